"""Benchmarks of hpc_es. `bash tools/bench/all.sh > table.md` runs them all and writes one table.

Each script measures one thing and says in its help what it compares; harness.py has what they share. A script runs as
`python tools/bench/NAME.py`, for which Python puts this folder first on its path. So the modules import each other by
plain name, and mypy checks them that way (`mypy_path` in pyproject.toml).
"""
