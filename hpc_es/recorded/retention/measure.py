"""Measure versions on the retention tasks, each (version, task) once.

Invariants: a model is treated as a run without updates, so that both use the same code; a task is recorded as soon as
it is finished, and recorded tasks are not measured again.
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
"""Default for the tokens of prompt and answer together; the longest prompt has about 1,600 tokens."""


@dataclasses.dataclass(frozen=True)
class RetentionRequest:
    """Settings that the user requested; None means the run's setting, or the model's."""

    backend: Backend | None = None
    dtype: Dtype | None = None
    batch_size: int | None = None
    """Number of prompts at once; does not change scores."""
    max_tokens: int = MAX_TOKENS
    max_length: int | None = None
    chat: bool = True
    chat_options: dict[str, Any] | None = None


def of_run(root: Path, base: Path | None = None) -> Recorded:
    """Open a run; `base` is the base model if it has moved. Errors: see Recorded.read."""
    recorded = Recorded.read(root)
    model = recorded.config.model.model_copy(update={"path": str(base)} if base else {})
    return dataclasses.replace(recorded, config=recorded.config.model_copy(update={"model": model}))


def of_model(folder: Path) -> Recorded:
    """Open a Hugging Face folder as a run without updates. Errors: ModelError."""
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
    """Measure the versions on the tasks, unless `folder` has the record; return records by (version, task name).

    Errors: ConfigError without the extra `retention`, for a wrong setting or version; DigestMismatch; EngineError;
    ModelError; StoreError.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError("measuring retention needs lm-eval, which is not installed: pip install 'hpc_es[retention]'")
    _stay_offline()
    requested, settings = _requested(recorded, request)
    wanted = {
        (recorded.version(version), task.definition.name): (task, _measured(requested, version, task, settings))
        for version in sorted(versions)
        for task in tasks
    }
    earlier = {at: find_record(folder, measured) for at, (_, measured) in wanted.items()}
    found = {at: record for at, record in earlier.items() if record is not None}
    if missing := {at: what for at, what in wanted.items() if at not in found}:
        with _Session.start(requested, settings, say) as session:
            for (version, name), (task, measured) in missing.items():
                say(f"{requested.paths.root}, theta_{version}: {task.definition.title}, {len(task.rows)} examples")
                record = session.measure(version, task, measured)
                found[version, name] = (write_record(folder, record), record)
    return {at: found[at] for at in wanted}


def _requested(recorded: Recorded, request: RetentionRequest) -> tuple[Recorded, Settings]:
    """The run with the requested engine settings. Errors: ConfigError, ModelError."""
    config = recorded.config
    backend = request.backend or config.engine.kind
    if backend not in get_args(Backend):
        raise ConfigError(
            f"engine.kind={backend} of {recorded.paths.root} cannot measure retention; if its model is a language "
            "model, use --backend vllm or transformers"
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
            f"answers of {settings.max_tokens} tokens leave no room for a prompt within {settings.max_length}; lower "
            "--max-tokens, or raise --max-length if the model allows it"
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
    """The context length of a model according to its config; MAX_LENGTH if it does not say."""
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
    """Keep libraries from accessing the network, since all data are local files."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


@dataclasses.dataclass
class _Session:
    """One engine, and the event loop in which it runs while lm-eval waits for its answers."""

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
        """lm-eval's results, and the number of prompts whose beginning was cut off."""
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
