"""Every error that hpc_es raises on purpose.

    HpcEsError
    ├── ConfigError        a value in a config file, an override or a command line, also the name of what does not exist
    ├── ModelError         a checkpoint that cannot be used (missing, quantised, damaged, inconsistent)
    ├── StoreError         a run folder, journal or HDF5 file
    │   ├── JournalDamaged     bytes in the middle of a journal are not what was written
    │   ├── Superseded         a newer head owns this run
    │   └── NothingToShow      a figure for which the runs have no data
    ├── TransportError     sockets, keys, rendezvous, process groups
    │   └── HeadSilent         no head was heard for transport.head_timeout
    ├── EngineError        the inference engine
    │   ├── DigestMismatch     parameters are not the bits that the head has
    │   └── ContextFull        a conversation outgrew the model's context: an outcome of its episode, not a fault
    ├── EnvError           an environment broke its contract or its time limit
    ├── LaunchError        processes that could not be started or kept alive
    ├── RunFailed          the run cannot go on (too many failed evaluations in a row)
    └── VerifyError        a recorded run contradicts itself

Messages name the value, the rule and the remedy. The command line prints them without a traceback. Many quote words
that come from outside, so each is bounded and has its control characters escaped, wherever it goes.
"""

from hpc_es.quoting import MAX_MESSAGE, quote


class HpcEsError(Exception):
    """Base of all errors below."""

    def __init__(self, message: str = "") -> None:
        super().__init__(quote(message, MAX_MESSAGE))


class ConfigError(HpcEsError):
    """A setting is wrong."""


class ModelError(HpcEsError):
    """A checkpoint cannot be used."""


class StoreError(HpcEsError):
    """A run folder or a file in it cannot be used."""


class JournalDamaged(StoreError):
    """A journal is damaged before its end; the message has the offset."""


class Superseded(StoreError):
    """A newer head has taken the run over; this one must stop and write nothing more."""


class NothingToShow(StoreError):
    """The runs have no data for a figure; the message says why."""


class TransportError(HpcEsError):
    """Messages cannot be exchanged."""


class HeadSilent(TransportError):
    """No head was heard for transport.head_timeout."""


class EngineError(HpcEsError):
    """The inference engine cannot do what was asked."""


class DigestMismatch(EngineError):
    """Parameters differ from the bits they should have."""


class ContextFull(EngineError):
    """A conversation does not fit into the context of a model whose tokens we cannot count."""


class EnvError(HpcEsError):
    """An environment broke its contract, raised, or ran past its time limit."""


class LaunchError(HpcEsError):
    """Processes could not be started or kept alive."""


class RunFailed(HpcEsError):
    """The run stopped because going on would be pointless."""


class VerifyError(HpcEsError):
    """What a run recorded does not fit together."""
