"""Fork a run: start a new run from theta_V of another one, with other settings.

Invariants: the new run's base model has the bits of theta_V, as its digest proves before the folder appears; an
existing name is refused; a failure leaves no folder. The fork is an ordinary run whose version 0 is theta_V.

These start over: the schedules of sigma and alpha (update 1 of the fork is their first), the optimiser's state (zero),
and the run seed, unless it is given. With the original seed, version 0 of the fork would have the same members as
version 0 of the other run, so the seed is derived from that run's seed and V. Forks of one version therefore share
their members and can be compared pairwise.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_es import modes
from hpc_es.config import Config, Difference, compare, load
from hpc_es.config.fields import file_name
from hpc_es.errors import ConfigError, DigestMismatch, LaunchError
from hpc_es.launch import prepare
from hpc_es.noise import kernels, tensor_id
from hpc_es.paths import RunPaths
from hpc_es.recorded.solo import Recorded
from hpc_es.seeds import derive
from hpc_es.version import __version__

if TYPE_CHECKING:
    from hpc_es.params import Arena

_SETTLED = {"run.name": "--name names the fork", "model.path": "the base model of a fork is theta_V (see --base)"}


@dataclass(frozen=True)
class Fork:
    """A fork that can be written; nothing is written yet."""

    origin: RunPaths
    version: int
    config: Config
    base: Path
    """The model folder for theta_V."""
    differences: tuple[Difference, ...]
    """Changed settings that could change a result, old -> new, except the base model's path."""
    loses_optimiser: bool
    """Whether the run has an optimiser whose state is not carried over."""

    @property
    def paths(self) -> RunPaths:
        return prepare.run_paths(self.config)


def plan_fork(
    root: Path, version: int | None, name: str, overrides: Sequence[str] = (), base: Path | None = None
) -> Fork:
    """Plan a fork of theta_version (default: the newest) without writing anything.

    `overrides` are key=value settings that override the run's configuration. `base` is the folder that holds theta_V or
    will hold it; by default, the run's own base model for version 0, else a folder within the new run's folder.
    Errors: ConfigError for an impossible version, name or setting; StoreError.
    """
    recorded = Recorded.read(root)
    version = recorded.version(version)
    for key in (text.partition("=")[0].strip() for text in overrides):
        if key in _SETTLED:
            raise ConfigError(f"{key} cannot be set for a fork: {_SETTLED[key]}")
    beside = root.parent if root.name not in ("", "..") else root.resolve().parent
    config = load(recorded.paths.config, [f"run.dir={json.dumps(str(beside))}", *overrides]).config
    seed = config.run.seed
    if not any(text.partition("=")[0].strip() == "run.seed" for text in overrides):
        seed = derive(seed, "fork", version) % 2**31
    try:
        run = config.run.model_copy(update={"name": file_name(name), "seed": seed})
    except ValueError as error:
        raise ConfigError(f"--name {name} {error}") from None
    paths = RunPaths(run.dir / name)
    if paths.root.exists():
        raise ConfigError(f"{paths.root} already exists: choose another --name for the fork")
    base = base or (Path(config.model.path) if version == 0 else paths.base)
    config = config.model_copy(update={"run": run, "model": config.model.model_copy(update={"path": str(base)})})
    harmful, _ = compare(recorded.config, config)
    return Fork(
        origin=recorded.paths,
        version=version,
        config=config,
        base=base,
        differences=tuple(difference for difference in harmful if difference.key != "model.path"),
        loses_optimiser=version > 0 and recorded.config.es.optimiser.kind != "none",
    )


def write_fork(fork: Fork, theta: "Callable[[], Arena]", say: Callable[[str], None] = print) -> RunPaths:
    """Write the fork's folder: base model, configuration, and fork.json, which records its origin.

    `theta` returns theta_V, checked against the origin's journal. Errors: ConfigError when the folder exists by now;
    ModelError, StoreError, EnvError; DigestMismatch when the base model is not theta_V.
    """
    paths = fork.paths
    try:
        modes.make_run_folder(paths.root, exist_ok=False)
    except FileExistsError:
        raise ConfigError(f"{paths.root} already exists: choose another --name for the fork") from None
    except OSError as error:
        raise LaunchError(f"the run folder {paths.root} cannot be written: {error}") from None
    try:
        digest = _settle_base(fork, theta, say)
        with prepare.launcher_lock(fork.config):
            prepare.write_folder(fork.config)
            prepare.check(fork.config)
            paths.fork.write_text(json.dumps(_provenance(fork, digest), indent=2) + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise
    return paths


def _settle_base(fork: Fork, theta: "Callable[[], Arena]", say: Callable[[str], None]) -> int:
    """Write theta_V unless the folder holds it, check its digest and return that. Keeps only one arena in memory."""
    from hpc_es.params import Arena
    from hpc_es.params.export import export

    arena = theta()
    digest = theta_digest(arena)
    if fork.base.exists():
        say(f"using theta_{fork.version} in {fork.base}")
    else:
        say(f"writing theta_{fork.version} to {fork.base}")
        export(arena, Path(load(fork.origin.config).config.model.path), fork.base)
    del arena
    settings = fork.config.model
    found = Arena.from_pretrained(fork.base, settings.include, settings.exclude).base_digest
    if found != digest:
        raise DigestMismatch(
            f"{fork.base} has digest {found:016x}, but theta_{fork.version} of {fork.origin.root} has {digest:016x}: "
            "choose another --base, or none"
        )
    return digest


def theta_digest(arena: "Arena") -> int:
    """Digest of the parameters without the optimiser's state: the base digest of a run that starts here."""
    return sum(kernels().digest(arena.tensor(name).reshape(-1), tensor_id(name)) for name in arena.names) % 2**64


def _provenance(fork: Fork, digest: int) -> dict[str, object]:
    return {
        "run": str(fork.origin.root.resolve()),
        "version": fork.version,
        "digest": f"{digest:016x}",
        "base": str(fork.base),
        "differences": [str(difference) for difference in fork.differences],
        "optimiser_state": "begins at zero" if fork.loses_optimiser else None,
        "hpc_es": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
