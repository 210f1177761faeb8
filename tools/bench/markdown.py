"""Make one Markdown table of the JSON lines that the benchmarks end with, below a line about this machine.

cat JSON_LINES | python tools/bench/markdown.py
"""

import json
import os
import platform
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

from harness import TITLES, Row, alternate, cells, copying

from hpc_es.noise import threads

COPIED = 2**30
"""Bytes read plus bytes written when measuring the memory bandwidth."""


def main() -> None:
    print(f"{machine()}.\n")
    print("| " + " | ".join(TITLES) + " |")
    print("|" + " --- |" * len(TITLES))
    notes = list[str]()
    for line in sys.stdin:
        bench = json.loads(line)
        print(f"| **{bench['bench']}** |" + " |" * (len(TITLES) - 1))
        for entry in bench["rows"]:
            row = Row(**{field.name: entry[field.name] for field in fields(Row)})
            print("| " + " | ".join(cells(row)) + " |")
            notes += [f"{bench['bench']}: {row.note}"] * bool(row.note)
    print("\n" + "\n".join(f"- {note}" for note in dict.fromkeys(notes)))


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    threads.start(cores)
    seconds = alternate({"copy": copying(COPIED, cores)}, 5)["copy"]
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    load = os.getloadavg()[0]
    return (
        f"{cores} cores of {model}, {COPIED / seconds / 1e9:.1f} GB/s copied by all (read and written), Python "
        f"{platform.python_version()}, torch {version('torch')}, numba {version('numba')}; load at the end {load:.1f}"
    )


if __name__ == "__main__":
    main()
