"""The version of hpc_es, stated once: for pyproject.toml, `hpc-es --version`, and the records of a run."""

__version__ = "0.2.0"
