"""The head's end of the trainer: one process per closed cohort, beside the head's loop."""

import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from hpc_es.head.events import Event, Trained, TrainingFailed
from hpc_es.head.instructions import Train
from hpc_es.paths import RunPaths
from hpc_es.quoting import MAX_MESSAGE, quote
from hpc_es.trainer.cohort import ClosedCohort, TrainingReport, write_cohort

log = logging.getLogger(__name__)


class Training:
    """Runs trainers one at a time, each in a process and a thread of its own; `post` gets what became of it."""

    def __init__(self, paths: RunPaths, post: Callable[[Event], None]) -> None:
        self._paths, self._post = paths, post
        self._process: subprocess.Popen[str] | None = None
        self._closed = False

    def begin(self, train: Train) -> None:
        threading.Thread(target=self._run, args=(train,), name="training", daemon=True).start()

    def close(self) -> None:
        """Kill the running trainer, if any: the next head trains the same cohort again."""
        self._closed = True
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def _run(self, train: Train) -> None:
        event = self._train(train)
        if not self._closed:
            self._post(event)

    def _train(self, train: Train) -> Event:
        version, path = train.version, self._paths.training_cohort(train.version)
        command = [sys.executable, "-m", "hpc_es.trainer", str(self._paths.root), str(version)]
        try:
            write_cohort(path, ClosedCohort(version, train.cohort))
            process = subprocess.Popen(
                command, encoding="utf-8", errors="replace", stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            self._process = process
            said, complained = process.communicate()
            code, self._process = process.returncode, None
            if code:
                words = quote(complained.strip().rpartition("\n")[2], MAX_MESSAGE)
                return TrainingFailed(version, f"the trainer ended with code {code}: {words or 'it said nothing'}")
            report = msgspec.json.decode(said.strip().rpartition("\n")[2], type=TrainingReport)
        except (OSError, msgspec.DecodeError) as error:
            return TrainingFailed(version, f"{error}")
        path.unlink(missing_ok=True)
        return Trained(version, report.digest, report.update_norm, report.seconds, report.metrics)
