"""The question of asynchronous ES, put again in the laboratory: does staleness cost success, and how much of it?

Every 16x16 condition of the paper, and the random walk as the floor, each with several seeds; every run is a real
`hpc-es run` with head and workers. Runs that are finished are kept, so the study can be stopped and goes on. The
tables and figures are those of `hpc_es.analysis`; DIR/results.md has them all.

    python tools/lab/staleness_study.py [--seeds 6] [--at-once 2] [--dir runs/lab-study] [key=value ...]
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = ROOT / "configs"
BASE = CONFIGS / "lab" / "10k.yaml"
CONDITIONS = (
    *("sync", "async-1", "lag4-18.75", "lag4-50", "lag4-100", "lag8-18.75", "lag8-50", "lag8-100"),
    *("tail-32", "tail-64", "tail-128", "staircase"),
)
"""Of configs/staleness/16x16, in the order of the table."""
FLOOR = "random-walk"
ASYNC_WORKERS = 4
"""As in the paper: 4 workers make at most 3 of 16 results stale. The other schedules do not depend on the number."""


@dataclass(frozen=True)
class Job:
    """One run of the study."""

    condition: str
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.condition}-seed{self.seed}"

    def command(self, overrides: list[str]) -> list[str]:
        preset = "sync" if self.condition == FLOOR else self.condition
        files = [BASE, CONFIGS / "staleness" / "16x16" / f"{preset}.yaml"]
        files += [CONFIGS / "staleness" / "random-walk.yaml"] if self.condition == FLOOR else []
        settings = [f"run.name={self.name}", f"run.dir={self.folder}", f"run.seed={self.seed}"]
        settings += [f"launch.workers={ASYNC_WORKERS}"] if self.condition == "async-1" else []
        return [sys.executable, "-m", "hpc_es", "run", *map(str, files), *overrides, *settings]


def jobs(folder: Path, num_seeds: int) -> Iterator[Job]:
    """Seed by seed, so that a study that is stopped has every condition equally often."""
    for seed in range(num_seeds):
        for condition in (*CONDITIONS, FLOOR):
            yield Job(condition, seed, folder)


def perform(job: Job, overrides: list[str]) -> None:
    """Run it, unless it is finished. Errors: CalledProcessError."""
    from hpc_es.launch.prepare import is_finished
    from hpc_es.paths import RunPaths

    paths = RunPaths(job.folder / job.name)
    if paths.root.exists() and is_finished(paths):
        return
    began = time.monotonic()
    done = subprocess.run(job.command(overrides), capture_output=True, text=True)
    if done.returncode:
        print(f"{job.name}: {done.stdout}{done.stderr}", file=sys.stderr)
        done.check_returncode()
    print(f"{job.name}: {time.monotonic() - began:.1f} s", flush=True)


def write_results(folder: Path, num_seeds: int) -> str:
    """Tables (Markdown, CSV) and figures of all finished runs; returns the Markdown."""
    import pandas as pd

    from hpc_es.analysis.figures.plots import plot_learning_curve, save_png
    from hpc_es.analysis.statistics import conditions
    from hpc_es.analysis.statistics.csv_files import write_frame
    from hpc_es.analysis.statistics.episodes import brackets
    from hpc_es.store import read

    runs = [read(job.folder / job.name) for job in jobs(folder, num_seeds)]
    outcomes, differences = conditions.table(runs), conditions.paired(runs)
    stairs = pd.concat(
        [brackets(run).assign(seed=run.config["run"]["seed"]) for run in runs if "staircase" in run.attrs["run_id"]]
    )
    lags = conditions.costs(runs)
    tables = {"outcomes": outcomes, "differences": differences, "staircase": stairs, "costs": lags}
    for name, table in tables.items():
        write_frame(table, folder / f"{name}.csv")
    save_png(plot_learning_curve(runs), folder / "learning_curves.png")
    parts = (
        ("Success by condition", conditions.markdown(outcomes)),
        ("Differences to Sync, paired by seed", conditions.paired_markdown(differences)),
        ("Steps of the staircase: fitness of the cohort", stairs_markdown(stairs)),
    )
    text = "\n".join(f"## {title}\n\n{table}\n" for title, table in parts)
    (folder / "results.md").write_text(text, encoding="utf-8")
    return text


def stairs_markdown(stairs: "pd.DataFrame") -> str:
    """Means over the seeds: the cohort at a step was measured around theta_0, so it should be worth the first one."""
    from hpc_es.analysis.statistics.conditions import mean_and_sd

    lines = ["| update | lag | first cohort | cohort before | cohort at the step |", "| --: | --: | --: | --: | --: |"]
    for (update, lag), group in stairs.groupby(["update", "lag"]):
        cells = [mean_and_sd(group[name].mean(), group[name].std(ddof=1), 1, 3) for name in ("start", "before", "at")]
        lines.append(f"| {update} | {lag} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="seeds 0, 1, ... of every condition")
    parser.add_argument("--at-once", type=int, default=2, help="runs that run side by side")
    parser.add_argument("--dir", type=Path, default=Path("runs/lab-study"))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every run, e.g. run.num_updates=160")
    given = parser.parse_args()
    began = time.monotonic()
    pool = ThreadPoolExecutor(given.at_once)
    try:
        for _ in pool.map(lambda job: perform(job, given.overrides), jobs(given.dir, given.seeds)):
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, what has not begun does not begin
    print(write_results(given.dir, given.seeds))
    print(f"{given.seeds} seeds: {(time.monotonic() - began) / 60:.1f} minutes; {given.dir / 'results.md'}")


if __name__ == "__main__":
    main()
