#!/usr/bin/env bash
# The staleness study in the laboratory: every 16x16 condition of asynchronous ES, several seeds, tables with intervals.
#
#     bash tools/lab/staleness_study.sh [--seeds 6] [--at-once 2] [key=value ...]
#
# Can be stopped and run again: finished runs are kept in runs/lab-study, and results.md there has the tables.

source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

install model
say "writing models/lab-10k"
hpc-es model get lab-10k
say "running the study"
python tools/lab/staleness_study.py "$@"
