#!/usr/bin/env bash
# From a fresh clone to a trained model: .venv, installation, SmolLM2-135M, configs/quickstart.yaml.
#
#     bash tools/quickstart.sh [key=value ...]        # overrides, e.g. run.seed=1 run.name=again
#
# It can be run again at any time: finished steps are skipped, and a stopped run is resumed.
# HPC_ES_EXTRA=cpu|gpu overrides the choice by nvidia-smi; PYTHON names an interpreter (3.11 to 3.13).

source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

install model
say "fetching SmolLM2-135M"
hpc-es model get smollm2-135m --out models/smollm2-135m
say "running configs/quickstart.yaml"
hpc-es run configs/quickstart.yaml "$@"
say "for the commands above, in this shell: source .venv/bin/activate"
