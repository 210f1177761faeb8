"""Measure versions on the tasks of retention, each (version, task) once.

Invariants: a model is a run without updates, so that one path serves both; a task is recorded as soon as it is done,
and what is recorded is not measured again.
"""

import contextlib
import dataclasses
import logging
import os
from asyncio import Runner
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, get_args

from msgspec.structs import replace

from hpc_es.config import Config
from hpc_es.errors import ConfigError
from hpc_es.params.arena import Arena
from hpc_es.params.weights import read_config, text_config
from hpc_es.paths import RunPaths
from hpc_es.recorded.retention.tasks import MAX_TOKENS, SEED, Examples, make_task
from hpc_es.recorded.solo import Recorded, Solo
from hpc_es.store.clock import Clock
from hpc_es.store.retention import Measured, Record, Settings, find_record, write_record
from hpc_es.version import __version__

Backend = Literal["vllm", "transformers"]
Dtype = Literal["float32", "bfloat16", "float16"]
MAX_LENGTH = 4096
"""Default of prompt and answer together: the longest prompt has about 1,600 tokens."""


@dataclasses.dataclass(frozen=True)
class RetentionRequest:
    """Settings that were given; None: the run's own, or the model's."""

    backend: Backend | None = None
    dtype: Dtype | None = None
    batch_size: int | None = None
    """Prompts at once; it changes no score."""
    max_tokens: int = MAX_TOKENS
    max_length: int | None = None
    chat: bool = True
    chat_options: dict[str, Any] | None = None


def of_run(root: Path, base: Path | None = None) -> Recorded:
    """`base`: the base model, where it has moved. Errors: as Recorded.read."""
    recorded = Recorded.read(root)
    model = recorded.config.model.model_copy(update={"path": str(base)} if base else {})
    return dataclasses.replace(recorded, config=recorded.config.model_copy(update={"model": model}))


def of_model(folder: Path) -> Recorded:
    """A Hugging Face folder as a run that has made no update. Errors: ModelError."""
    stated = read_config(folder) | text_config(read_config(folder))
    dtype = stated.get("dtype") or stated.get("torch_dtype")
    config = Config.model_validate(
        {
            "run": {"name": "model", "num_updates": 1},
            "model": {"path": str(folder), "dtype": dtype if dtype in ("float32", "float16") else "bfloat16"},
            "task": {"env": "none"},
            "engine": {"kind": "vllm" if find_spec("vllm") else "transformers"},
        }
    )
    recorded = Recorded.frozen(RunPaths(folder), config)
    recorded.digests[0] = Arena.from_pretrained(folder).digest()
    return recorded


def measure(
    recorded: Recorded,
    versions: Sequence[int],
    tasks: Sequence[Examples],
    request: RetentionRequest,
    folder: Path,
    *,
    say: Callable[[str], None] = print,
) -> dict[tuple[int, str], tuple[Path, Record]]:
    """Records by (version, task name); those that `folder` has already are taken from there.

    Errors: ConfigError without the extra `retention`, for a wrong setting or version; DigestMismatch; EngineError;
    ModelError; StoreError.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError("lm-eval is not installed here, which measures retention: pip install 'hpc_es[retention]'")
    _stay_offline()
    asked, settings = _asked(recorded, request)
    wanted = {
        (recorded.version(version), task.definition.name): (task, _measured(asked, version, task, settings))
        for version in sorted(versions)
        for task in tasks
    }
    earlier = {at: find_record(folder, measured) for at, (_, measured) in wanted.items()}
    found = {at: record for at, record in earlier.items() if record is not None}
    if missing := {at: what for at, what in wanted.items() if at not in found}:
        with _Session.start(asked, settings, say) as session:
            for (version, name), (task, measured) in missing.items():
                say(f"{asked.paths.root}, theta_{version}: {task.definition.title}, {len(task.rows)} examples")
                record = session.measure(version, task, measured)
                found[version, name] = (write_record(folder, record), record)
    return {at: found[at] for at in wanted}


def _asked(recorded: Recorded, request: RetentionRequest) -> tuple[Recorded, Settings]:
    """The run with the engine that is wished for. Errors: ConfigError, ModelError."""
    config = recorded.config
    backend = request.backend or config.engine.kind
    if backend not in get_args(Backend):
        raise ConfigError(
            f"engine.kind={backend} of {recorded.paths.root} does not hold a language model whose retention can be "
            "measured; where it does have one, name --backend vllm or transformers"
        )
    settings = Settings(
        backend=backend,
        dtype=request.dtype or config.model.dtype,
        max_tokens=request.max_tokens,
        max_length=request.max_length or min(MAX_LENGTH, _context(Path(config.model.path))),
        chat=request.chat,
        chat_options=config.task.chat_options if request.chat_options is None else request.chat_options,
        seed=SEED,
    )
    if settings.max_tokens >= settings.max_length:
        raise ConfigError(
            f"answers of {settings.max_tokens} tokens leave no room for a prompt within {settings.max_length}; give "
            "fewer --max-tokens, or more --max-length where the model allows it"
        )
    engine = {
        "kind": settings.backend,
        "max_model_len": settings.max_length,
        "max_concurrent": request.batch_size or config.engine.max_concurrent,
    }
    parts = {
        "engine": config.engine.model_copy(update=engine),
        "model": config.model.model_copy(update={"dtype": settings.dtype}),
        "task": config.task.model_copy(update={"chat": settings.chat}),
    }
    return dataclasses.replace(recorded, config=config.model_copy(update=parts)), settings


def _context(model: Path) -> int:
    """Tokens that a model was made for, as far as its config says."""
    config = read_config(model)
    stated = (config | text_config(config)).get("max_position_embeddings")
    return stated if isinstance(stated, int) and stated > 0 else MAX_LENGTH


def _measured(recorded: Recorded, version: int, task: Examples, settings: Settings) -> Measured:
    return Measured(
        digest=f"{recorded.digests[version]:016x}",
        task=task.definition.name,
        task_version=task.definition.version,
        data_sha256=task.sha256,
        num_examples=len(task.rows),
        settings=settings if task.definition.generated else replace(settings, max_tokens=0),
        lm_eval=installed_version("lm_eval"),
    )


def _stay_offline() -> None:
    """All that is needed lies in files; libraries that look for news elsewhere are told not to."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


@dataclasses.dataclass
class _Session:
    """One engine, and the event loop in which it lives while lm-eval waits for its answers."""

    recorded: Recorded
    settings: Settings
    solo: Solo
    runner: Runner
    say: Callable[[str], None]

    @classmethod
    @contextlib.contextmanager
    def start(cls, recorded: Recorded, settings: Settings, say: Callable[[str], None]) -> Iterator["_Session"]:
        with Runner() as runner:
            stack = contextlib.AsyncExitStack()
            solo = runner.run(stack.enter_async_context(Solo.start(recorded)))
            try:
                yield cls(recorded, settings, solo, runner, say)
            finally:
                runner.run(stack.aclose())

    def measure(self, version: int, task: Examples, measured: Measured) -> Record:
        clock, definition = Clock(), task.definition
        began = clock()
        self.runner.run(self.solo.become(version, None))
        found, num_shortened = self._evaluate(task)
        filtered = "letter" if definition.generated else "none"
        samples = sorted(found["samples"][definition.name], key=lambda sample: sample["doc_id"])
        return Record(
            measured=measured,
            title=definition.title,
            source=str(self.recorded.paths.root),
            version=version if self.recorded.paths.config.is_file() else None,
            scores={
                each: float(found["results"][definition.name][f"{each},{filtered}"]) for each in definition.metrics
            },
            correct={each: [int(sample[each]) for sample in samples] for each in definition.metrics},
            answers=[sample["filtered_resps"][0] for sample in samples] if definition.generated else None,
            num_shortened=num_shortened,
            began=began,
            seconds=clock() - began,
            software={"hpc_es": __version__, **self.solo.engine.info.facts},
        )

    def _evaluate(self, task: Examples) -> tuple[dict[str, Any], int]:
        """lm-eval's results, and how many prompts lost their beginning."""
        from lm_eval.evaluator import evaluate

        from hpc_es.recorded.retention.model import EngineModel

        model = EngineModel(
            self.solo.engine,
            self.runner.run,
            max_length=self.settings.max_length,
            chat_options=self.settings.chat_options,
            say=self.say,
        )
        lm_task = make_task(task, self.settings.max_tokens)
        lm_task.set_fewshot_seed(SEED)
        found = evaluate(
            lm=model,
            task_dict={"tasks": {task.definition.name: lm_task}, "groups": {}, "group_map": {}},
            bootstrap_iters=0,
            apply_chat_template=self.settings.chat,
        )
        return cast(dict[str, Any], found), model.num_shortened
