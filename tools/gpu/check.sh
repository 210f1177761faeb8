#!/usr/bin/env bash
# Check and time on a GPU what only shows there: kernels, pipelines, memory, CUDA graphs, the direct map, NCCL, the head.
#
#     bash tools/gpu/check.sh                      # on a machine with a GPU: under 8 minutes
#     bash tools/gpu/check.sh --device cpu         # the same code in Triton's interpreter, tiny: a rehearsal without a GPU
#     bash tools/gpu/check.sh --only speed bases   # some of the checks; --list names them
#
# It takes the machine's own Python (PYTHON, default python3) with its torch, triton and numpy, installs nothing and needs
# no network. What else is missing there, it says, with what that stops; such packages may be brought as wheels:
# HPC_ES_WHEELS=FOLDER. Rows are passed, FAILED, or not run with the reason; the table comes last, check.json and
# check.log into --out DIR (default $OUT, else a temporary folder). Exit code 1: something failed.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [[ -n ${HPC_ES_WHEELS:-} ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/site" "$HPC_ES_WHEELS"/*.whl
fi
export PYTHONPATH="$scratch/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" tools/gpu/check.py --scratch "$scratch" "$@"
