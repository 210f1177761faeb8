"""Everything that is settled before the first process of a run starts.

Invariants: a run folder has one launcher at a time; once the run has begun, the configuration in its journal is the one
that counts, and nothing that would change what the run computes takes its place, not even an edited config.yaml; a
mistake in the configuration is found here, before anything is loaded.
"""

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hpc_es import envs, modes
from hpc_es.config import Config, compare, from_record, save
from hpc_es.config.schema import EngineConfig
from hpc_es.engine.supported import check_supported
from hpc_es.envs.manifest import settle_tasks
from hpc_es.errors import ConfigError, LaunchError, ModelError
from hpc_es.params import check_memory, num_bytes
from hpc_es.params.heads import check_ranks, num_heads
from hpc_es.params.weights import read_config
from hpc_es.paths import RunPaths
from hpc_es.store.journal import last_record, read_journal
from hpc_es.store.records import Started, Stopped
from hpc_es.transport.secrets import create_secrets

_PASSING_ON_S = 2.0
"""How long a lock may outlive its holder."""


def run_paths(config: Config) -> RunPaths:
    return RunPaths(config.run.dir / config.run.name)


def is_finished(paths: RunPaths) -> bool:
    """Whether all updates and evaluations of the run are done. Errors: StoreError, JournalDamaged."""
    endings = [record.finished for record in read_journal(paths.root) if isinstance(record, Stopped)]
    return bool(endings) and endings[-1]


def seems_finished(paths: RunPaths) -> bool:
    """The same for a worker, by the end of the journal alone. One that is wrongly told no hears it from the head."""
    last = last_record(paths)
    return isinstance(last, Stopped) and last.finished


def check(config: Config, *, in_slurm: bool = False) -> None:
    """Find what would make the head or every worker fail at its start, and settle the manifest of evaluation tasks.
    `in_slurm`: they start as jobs on other nodes, not on this one.

    Errors: ModelError, EnvError, StoreError; ConfigError, also when tensor-parallel ranks cannot share the model, and
    when a run that has begun has other evaluation tasks.
    """
    if config.engine.kind == "endpoint":
        raise ConfigError(
            f"engine.kind=endpoint: a frozen endpoint cannot be trained; `hpc-es eval {config.engine.url} --model "
            f"{config.model.path}` evaluates it, and engine.kind=vllm or transformers train a model of your own"
        )
    envs.refuse_planned(config.task.env)  # first: its model is likely not here either, but that is not the reason
    check_model(Path(config.model.path), config.engine)
    if in_slurm:
        _check_memory_of_jobs(config)
    else:
        model, optimiser = config.model, config.es.optimiser.kind
        num_arenas = config.launch.workers + 1  # the head has one too
        check_memory(model.path, num_arenas, include=model.include, exclude=model.exclude, optimiser=optimiser)
    paths = run_paths(config)
    settle_tasks(paths.tasks, config, has_begun=began_config(paths) is not None)


def _check_memory_of_jobs(config: Config) -> None:
    """Each job holds one arena. Errors: ConfigError when it asks Slurm for less memory than that."""
    needed = num_bytes(config.model.path, config.model.include, config.model.exclude, config.es.optimiser.kind)
    for role in ("head", "worker"):
        memory = getattr(config.slurm, role).memory
        given = None if memory is None else slurm_bytes(memory)
        if given is not None and given < needed:
            raise ConfigError(
                f"slurm.{role}.memory={memory} is {given / 2**30:.2f} GiB, but the arena of {config.model.path} alone "
                f"takes {needed / 2**30:.2f} GiB in every job: ask for more"
            )


def slurm_bytes(memory: str) -> int | None:
    """Bytes of memory as Slurm writes it, in MiB without a unit; None for 0, all of the node, and for other words."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", memory.strip(), re.IGNORECASE)
    if not match or int(match[1]) == 0:
        return None
    return int(match[1]) * 2 ** {"K": 10, "": 20, "M": 20, "G": 30, "T": 40}[match[2].upper()]


def check_model(path: Path, engine: EngineConfig) -> None:
    """Errors: ModelError when `path` is not a Hugging Face folder with unquantised safetensors, or one that the
    engine has no code for; ConfigError when its tensor-parallel ranks cannot share the model's heads."""
    remedy = f"model.path is relative to the working directory ({Path.cwd()}); `hpc-es model get NAME` fetches a model"
    if not path.is_dir():
        raise ModelError(f"model.path={path}: no such folder; {remedy}")
    if not (path / "config.json").exists():
        raise ModelError(f"model.path={path} has no config.json, so it is not a Hugging Face folder; {remedy}")
    described = read_config(path)
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"model.path={path} holds no *.safetensors; convert the checkpoint with save_pretrained")
    if described.get("quantization_config"):
        raise ModelError(f"model.path={path} is quantised; noise needs full weights: use the unquantised checkpoint")
    check_supported(engine.kind, path, described)
    check_ranks(engine.tensor_parallel, num_heads(described))


def write_folder(config: Config) -> tuple[RunPaths, list[str]]:
    """Create the run folder, or check that `config` may resume it. Return its paths and the harmless changes.

    Errors: ConfigError with the differences when the run began with another configuration; StoreError, TransportError.
    """
    paths = run_paths(config)
    changed: list[str] = []
    for _ in read_journal(paths.root):  # to its end, where damage and loss show
        pass
    began_with = began_config(paths)
    if began_with is not None:
        harmful, harmless = compare(began_with, config)
        if harmful:
            raise ConfigError(
                f"{paths.root} began with another configuration:\n"
                + "".join(f"  {difference}\n" for difference in harmful)
                + f"Give this run another run.name, or set these back: `hpc-es run {paths.root}` resumes as before, "
                "unless its config.yaml was edited"
            )
        changed = [str(difference) for difference in harmless]
    try:
        paths.logs.mkdir(parents=True, exist_ok=True)
        save(config, paths.config)
    except OSError as error:
        raise LaunchError(f"the run folder {paths.root} cannot be written: {error}") from None
    create_secrets(paths)
    return paths, changed


def began_config(paths: RunPaths) -> Config | None:
    """Configuration that the run began with, from its journal; None when nothing has run here.

    Errors: StoreError, JournalDamaged.
    """
    first = next(read_journal(paths.root), None)
    return from_record(first.config_json) if isinstance(first, Started) else None


@contextlib.contextmanager
def launcher_lock(config: Config) -> Iterator[None]:
    """Be the only launcher of this run's folder, which is made if need be and has its modes from here on.

    The lock ends with the process, so a stale file blocks nobody.

    Errors: LaunchError with the process id of the other launcher.
    """
    paths = run_paths(config)
    try:
        modes.make_run_folder(paths.root)
        file = open(paths.launcher_lock, "a+", encoding="utf-8")  # noqa: SIM115 - the lock lasts as long as the file is open
        _lock(file)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        modes.settle(paths.root, group_readable=config.run.group_readable)
    except BlockingIOError:
        other = paths.launcher_lock.read_text(encoding="utf-8").strip()
        raise LaunchError(
            f"{paths.root} is being run by process {other or '?'}: watch it with `hpc-es status {paths.root}`, or stop "
            f"that process first"
        ) from None
    except OSError as error:
        raise LaunchError(f"the run folder {paths.root} cannot be written: {error}") from None
    with file, modes.within(paths.root):
        yield


def _lock(file: IO[str]) -> None:
    """Errors: BlockingIOError while another launcher has it."""
    deadline = time.monotonic() + _PASSING_ON_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # A launcher that was killed while it started a process leaves the lock to that child until it execs.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        except OSError as error:
            # Some cluster file systems have no locks. Two heads exclude each other by the journal all the same.
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            return
