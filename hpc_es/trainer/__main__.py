"""`python -m hpc_es.trainer RUN VERSION`: make theta_VERSION of the closed cohort, write its checkpoint, and report."""

import ctypes
import math
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from hpc_es import methods
from hpc_es.config.load import load
from hpc_es.errors import HpcEsError, RunFailed
from hpc_es.params import checkpoint
from hpc_es.params.arena import Arena
from hpc_es.paths import RunPaths
from hpc_es.trainer.cohort import TrainingReport, read_cohort

_PR_SET_PDEATHSIG = 1


def train(run: Path, version: int) -> TrainingReport:
    """Errors: HpcEsError; RunFailed when what was trained is not finite."""
    began, paths = time.monotonic(), RunPaths(run)
    config = load(paths.config).config
    cohort = read_cohort(paths.training_cohort(version))
    method = methods.make(config)
    arena = Arena.from_pretrained(config.model.path, config.model.include, config.model.exclude)
    if version > 1:
        arena.reload(paths.checkpoint(version - 1))
    theta = {name: arena.tensor(name) for name in arena.trained}
    before = {name: values.copy() for name, values in theta.items()}
    metrics = method.train(theta, version, cohort.evaluations)
    squares = [float(np.square(theta[name].astype(np.float64) - before[name]).sum()) for name in theta]
    if not math.isfinite(norm := math.sqrt(math.fsum(squares))):
        raise RunFailed(f"training of theta_{version} made values that are not finite: lower the step size")
    arena.version = version
    digest = arena.digest()
    checkpoint.write_folder(paths.trained(version), arena, digest)
    return TrainingReport(digest, norm, time.monotonic() - began, metrics)


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a trainer never outlives its head
    if os.getppid() == 1:
        return 1  # the head ended before this could be followed
    sys.path.insert(0, "")  # methods of the user's lie in the working directory
    try:
        report = train(Path(sys.argv[1]), int(sys.argv[2]))
    except (HpcEsError, OSError, msgspec.DecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(report).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
