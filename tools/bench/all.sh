#!/usr/bin/env bash
# Run every benchmark, one after the other, and print one Markdown table; progress goes to stderr.
#
#     bash tools/bench/all.sh [--quick] > table.md
#
# Takes about four minutes on two idle cores. --quick uses small sizes, to check that every benchmark runs, not how
# fast. `cycle` serves models/smollm2-135m, or with --quick models/tiny-llama, and fetches or makes them if missing.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -f .venv/bin/activate ]] && source .venv/bin/activate
# vLLM's worker process imports cycle_extension.py by name, so it needs this folder on its path.
export PYTHONPATH=$PWD/tools/bench${PYTHONPATH:+:$PYTHONPATH} VLLM_LOGGING_LEVEL=ERROR

lines=$(mktemp -d)
trap 'rm -rf "$lines"' EXIT
failed=0

model() { # NAME: prints its folder, and makes it if it is missing
    [[ -d models/$1 ]] || python -m hpc_es model get "$1" --out "models/$1" >&2
    echo "models/$1"
}

bench() { # NAME ARGUMENTS...
    local name=$1 log=$lines/$1.log
    shift
    echo "==> $name $*" >&2
    if python "tools/bench/$name.py" "$@" --json >"$log" 2>"$log.err"; then
        tail -n 1 "$log" >>"$lines/json"
    else
        echo "error: $name failed:" >&2
        tail -n 5 "$log.err" >&2
        failed=1
    fi
}

if [[ ${1:-} == --quick ]]; then
    bench noise --layers 0 --rounds 1
    bench update --layers 0 --rounds 1
    bench lowrank --layers 1 --rounds 1
    bench cycle "$(model tiny-llama)" --rounds 1 --prompt 16
    bench commit --updates 3 --members 16 --workers 20 --parameters 1024
    bench join --mib 8
    bench wire --commits 3
    bench groups --members 4 --mesh 4 --processes 2
    bench store --updates 10 --rounds 5
else
    bench noise --layers 30
    bench update # not all layers: the usual way would take a quarter of an hour on them
    bench lowrank --layers 30 --threads 1 --cpu-time
    bench cycle "$(model smollm2-135m)"
    bench commit --updates 20 --members 30
    bench join
    bench wire
    bench groups
    bench store
fi
python tools/bench/markdown.py <"$lines/json"
exit $failed
