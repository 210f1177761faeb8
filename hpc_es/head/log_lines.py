"""The head's log: one line for each record of the journal that says how the run gets on."""

import logging

from hpc_es.store import records as journal

log = logging.getLogger(__name__)
_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING}


def log_record(record: journal.AnyRecord) -> None:
    """Log what a person who reads the log wants to know; leases and results would be too many."""
    match record:
        case journal.Started(generation=generation, run_id=run_id, host=host):
            log.info("head of generation %d of %s on %s", generation, run_id, host)
        case journal.Joined(worker=worker, host=host):
            log.info("worker %s on %s has joined", worker, host)
        case journal.Left(worker=worker, reason=reason):
            log.info("worker %s has left: %s", worker, reason)
        case journal.Digested(version=version, digest=digest, update_norm=norm):
            log.info("version %d: digest %016x, norm of the update %.3g", version, digest, norm)
        case journal.Checkpointed(version=version):
            log.info("checkpoint of version %d", version)
        case journal.Noted(level=level, what=what, detail=detail):
            log.log(_LEVELS.get(level, logging.INFO), "%s%s", what, f" ({detail})" if detail else "")
