#!/usr/bin/env bash
# Run every check of the project: .venv, installation, ruff, mypy, rules for imports, all tests.
#
#     bash tools/test.sh [pytest arguments]           # e.g. -k journal, -m "not slow", -n 0 for one process
#
# Data of the tests: HPC_ES_DATA, or shared/data beside the repository.

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

install model test
system_packages bwrap=bubblewrap tesseract=tesseract-ocr java=default-jre-headless
say "ruff"
ruff check .
ruff format --check --quiet .
say "mypy"
mypy
say "directions of imports"
python tools/check_imports.py
say "tests"
pytest -n 2 --no-loadscope-reorder -ra "$@"
