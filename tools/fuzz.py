"""Damage the files of a run in many ways, and check how each command reacts.

    python tools/fuzz.py [journal] [hdf5] [checkpoint] [config] [--seeds 1000] [--first 0] [--json]

One mutation per seed of a copy of one small run folder. Every reader must either give the answer that the undamaged
folder gives (correct), a shorter one with a warning (repaired), or an error of ours (refused). Anything else, another
answer without a word, a traceback, a crash, or no answer within the time limit, is printed with its seed, and the exit
code is 1. A seed alone decides what is done, so `--seeds 1 --first N` repeats mutation N.

Prints a Markdown table of outcomes by kind of mutation; the worst reader counts.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzzing import base, checkpoint, config, hdf5, journal
from fuzzing.child import OUTCOMES, WRONG, judge

TARGETS = {"journal": journal.case, "hdf5": hdf5.case, "checkpoint": checkpoint.case, "config": config.case}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"default: all of {', '.join(TARGETS)}")
    parser.add_argument("--seeds", type=int, default=1000, help="mutations of each target")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for all readers of one mutation")
    parser.add_argument("--verbose", action="store_true", help="print every mutation, and what readers said of it")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    counts, num_wrong = Counter[tuple[str, str, str]](), 0
    with tempfile.TemporaryDirectory() as scratch:
        prepared = base.prepare(Path(scratch))
        for target in options.targets or TARGETS:
            began = time.monotonic()
            for seed in range(options.first, options.first + options.seeds):
                case = TARGETS[target](prepared, seed)
                outcome, lines = judge(prepared, case, options.limit)
                counts[target, case.kind, outcome] += 1
                num_wrong += outcome in WRONG
                if outcome in WRONG or options.verbose:
                    print(
                        f"{target} seed {seed}, {case.kind} ({case.detail}): {outcome}", *lines, sep="\n  ", flush=True
                    )
            print(f"{target}: {options.seeds} mutations in {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(_json(counts) if options.json else _markdown(counts))
    sys.exit(1 if num_wrong else 0)


def _rows(counts: Counter[tuple[str, str, str]]) -> list[tuple[str, str, list[int]]]:
    kinds = dict.fromkeys((target, kind) for target, kind, _ in sorted(counts))
    return [(target, kind, [counts[target, kind, outcome] for outcome in OUTCOMES]) for target, kind in kinds]


def _markdown(counts: Counter[tuple[str, str, str]]) -> str:
    lines = [f"| file | mutation | number | {' | '.join(OUTCOMES)} |", "|---|---|---:" + "|---:" * len(OUTCOMES) + "|"]
    rows = _rows(counts)
    total = [sum(numbers) for numbers in zip(*(row for _, _, row in rows), strict=True)]
    for target, kind, row in [*rows, ("all", "", total)]:
        lines.append(f"| {target} | {kind} | {sum(row)} | {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def _json(counts: Counter[tuple[str, str, str]]) -> str:
    return json.dumps(
        [
            {"file": target, "mutation": kind, **dict(zip(OUTCOMES, row, strict=True))}
            for target, kind, row in _rows(counts)
        ],
        indent=1,
    )


if __name__ == "__main__":
    main()
