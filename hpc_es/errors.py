"""The exceptions of hpc_es.

    HpcEsError
    ├── ConfigError        a wrong value in a config file, an override or a command line; a name that does not exist
    ├── ModelError         a checkpoint that cannot be used (missing, quantised, damaged, inconsistent)
    ├── StoreError         a run folder, journal or HDF5 file that cannot be used
    │   ├── JournalDamaged     a journal is damaged before its end
    │   ├── Superseded         a newer head has taken over this run
    │   └── NothingToShow      the runs have no data for a figure
    ├── TransportError     a problem with sockets, keys, rendezvous or process groups
    │   └── HeadSilent         no message came from a head for transport.head_timeout
    ├── EngineError        a problem with the inference engine
    │   ├── DigestMismatch     parameters differ from those of the head
    │   └── ContextFull        a conversation exceeds the model's context: an outcome of its episode, not a fault
    ├── EnvError           an environment broke its contract or its time limit
    ├── LaunchError        processes could not be started or kept alive
    ├── RunFailed          the run cannot continue (too many failed evaluations in a row)
    └── VerifyError        the records of a run are inconsistent

Messages name the value, the rule and the remedy. The command line prints them without a traceback. Many quote text from
outside, so every message has a maximum length, and its control characters are escaped.
"""

from hpc_es.quoting import MAX_MESSAGE, quote


class HpcEsError(Exception):
    """Base class of all exceptions of hpc_es."""

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
    """A newer head has taken over the run; this one must stop and write nothing more."""


class NothingToShow(StoreError):
    """The runs have no data for a figure; the message says why."""


class TransportError(HpcEsError):
    """Head and workers cannot communicate."""


class HeadSilent(TransportError):
    """No head was heard for transport.head_timeout."""


class EngineError(HpcEsError):
    """The inference engine cannot do what was requested."""


class DigestMismatch(EngineError):
    """Parameters differ from the bits they should have."""


class ContextFull(EngineError):
    """A conversation does not fit into the context of a model whose tokens we cannot count."""


class EnvError(HpcEsError):
    """An environment broke its contract, raised, or ran past its time limit."""


class LaunchError(HpcEsError):
    """Processes could not be started or kept alive."""


class RunFailed(HpcEsError):
    """The run stopped because continuing would be pointless."""


class VerifyError(HpcEsError):
    """The records of a run are inconsistent."""
