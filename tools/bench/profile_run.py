"""Where the seconds of a run go.

    python tools/bench/profile_run.py RUN                             # the wall-clock time of a finished run
    python tools/bench/profile_run.py --run CONFIG [key=value ...]    # run it now, and count CPU seconds by process
    python tools/bench/profile_run.py --rollouts CONFIG [key=value ...]   # one engine: CPU seconds per turn, by part

Wall-clock time says little on a shared machine; CPU seconds do. `--rollouts` plays members' evaluations as a worker
does, samples the stack of its thread, and separates our loop, the tokenizer, the environment and vLLM's front. The CPU
seconds of vLLM's other processes count whole, including busy waiting.
"""

import argparse
import asyncio
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from phases import phases
from sampled import command, cpu_seconds, descendants, watched

from hpc_es import envs
from hpc_es.analysis.statistics.text_table import TextTable
from hpc_es.config import load
from hpc_es.config.schema import Config
from hpc_es.engine import start_engine
from hpc_es.engine.base import Engine
from hpc_es.errors import HpcEsError
from hpc_es.launch.prepare import run_paths
from hpc_es.paths import RunPaths
from hpc_es.records import Assignment, Candidate, EvalId, Member
from hpc_es.seeds import derive
from hpc_es.store import read
from hpc_es.worker.rollout import Player

LOOK_S = 0.2
FRONT = "worker: loop, vLLM's front"


def role(text: str) -> str:
    """Role of a process of a local run, by its command line."""
    for part, name in (
        ("VLLM::EngineCore", "vLLM's engine"),
        ("VLLM::Worker", "vLLM's worker"),
        ("hpc_es head", "head"),
        ("hpc_es worker", FRONT),
        ("hpc-es run", "launcher, report"),
        ("-m hpc_es run", "launcher, report"),
    ):
        if part in text:
            return name
    return "compilers, trackers"


def table_of_phases(root: Path) -> str:
    rows = phases(root)
    foot = "Workers' rows are means over workers; the head works at the same time."
    return TextTable(
        ("process", "phase", "seconds"),
        [(r.process, r.phase, "unknown" if math.isnan(r.seconds) else f"{r.seconds:.1f}") for r in rows],
        foot,
        num_names=2,
    ).markdown()


# --- a whole run ---------------------------------------------------------------------------------------------------


def run_and_look(arguments: list[str]) -> dict[int, list[tuple[float, float, str]]]:
    """Run a configuration. Returns (time, CPU seconds, role) of each process at intervals. Errors: SystemExit."""
    looks: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    with subprocess.Popen([sys.executable, "-m", "hpc_es", "run", *arguments]) as run:
        while run.poll() is None:
            for pid in (run.pid, *descendants(run.pid)):
                looks[pid].append((time.time(), cpu_seconds(pid), role(command(pid))))
            time.sleep(LOOK_S)
    if run.returncode:
        raise SystemExit(run.returncode)
    return looks


def table_of_cpu(looks: Mapping[int, list[tuple[float, float, str]]], root: Path) -> str:
    """Table of CPU seconds by role, before the first lease, up to the last result, and after it."""
    evaluations = read(RunPaths(root).hdf5).evaluations
    marks = (float(evaluations["time_leased"].min()), float(evaluations["time_received"].max()))
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for seen in looks.values():
        for (_, before, _), (when, after, _) in zip([(0.0, 0.0, ""), *seen], seen, strict=False):
            part = sum(when > mark for mark in marks)
            spent[_last_role(seen)][part] += max(after - before, 0.0)
    total = sum(map(sum, spent.values()))
    rows = [
        (name, *(f"{seconds:.1f}" for seconds in parts), f"{sum(parts) / total:.1%}")
        for name, parts in sorted(spent.items(), key=lambda item: -sum(item[1]))
    ]
    return TextTable(("CPU seconds", "start", "evaluations", "end", "share"), rows).markdown()


def _last_role(seen: list[tuple[float, float, str]]) -> str:
    """Roles by process id. Processes of vLLM set their names only after their imports, so the last name counts."""
    named = [name for _, _, name in seen if name != role("")]
    return named[-1] if named else role("")


# --- rollouts --------------------------------------------------------------------------------------------------------


async def rollouts(config: Config, count: int, threads: int) -> str:
    began = time.monotonic()
    engine = await start_engine(config.model, config.engine, threads=threads, optimiser=config.es.optimiser.kind)
    try:
        pids = {os.getpid(): FRONT, **{pid: role(command(pid)) for pid in descendants(os.getpid())}}
        started = {name: f"{cpu_seconds(pid):.1f}" for pid, name in pids.items()}
        print(f"started in {time.monotonic() - began:.1f} s; CPU seconds: {started}")
        player = Player(config, engine, lambda kind: envs.make_for(config, kind))
        warm, *planned = assignments(config, count + 1)
        await engine.perturb(warm.member)
        await player.play(warm)
        return await _measured(engine, player, planned, pids)
    finally:
        began = time.monotonic()
        await engine.close()
        print(f"closed in {time.monotonic() - began:.1f} s")


def assignments(config: Config, count: int) -> list[Assignment]:
    size, num_tasks = config.es.tasks_per_member, envs.make_for(config, "train").num_tasks
    return [
        Assignment(
            eval_id=EvalId(0, slot),
            update=1,
            candidate=Candidate(0, Member(derive(0, "profile", slot), 1, config.es.sigma.start)),
            tasks=tuple((slot * size + place) % num_tasks for place in range(size)),
            sampling_seed=slot,
        )
        for slot in range(count)
    ]


async def _measured(engine: Engine, player: Player, planned: list[Assignment], pids: Mapping[int, str]) -> str:
    spent = dict.fromkeys(pids.values(), 0.0)
    accounts: dict[str, float] = {}
    turns = 0
    for assignment in planned:
        await engine.perturb(assignment.member)
        before = {pid: cpu_seconds(pid) for pid in pids}
        with watched(accounts):
            episodes = await player.play(assignment)
        for pid, name in pids.items():
            spent[name] += cpu_seconds(pid) - before[pid]
        turns += sum(episode.turns for episode in episodes)
    rows = [(name, seconds) for name, seconds in by_size(spent) if seconds]
    rows += [(f"- {account}", seconds) for account, seconds in by_size(accounts)]
    total = sum(spent.values())
    return TextTable(
        ("process, or - account of the worker's own thread", "CPU s", "ms a turn", "share"),
        [(name, f"{s:.2f}", f"{1e3 * s / turns:.2f}", f"{s / total:.1%}") for name, s in rows],
        f"{len(planned)} evaluations, {turns} turns",
    ).markdown()


def by_size(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="a run folder, or with --run and --rollouts a configuration")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides as for `hpc-es run`")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--rollouts", action="store_true")
    parser.add_argument("--evaluations", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if not (arguments.run or arguments.rollouts):
        try:
            print(table_of_phases(Path(arguments.target)))
        except HpcEsError as error:  # for example, the folder is not a run
            raise SystemExit(f"error: {error}") from error
        return
    config = load(Path(arguments.target), arguments.overrides).config
    if arguments.rollouts:
        print(asyncio.run(rollouts(config, arguments.evaluations, arguments.threads)))
        return
    looks, root = run_and_look([arguments.target, *arguments.overrides]), run_paths(config).root
    print(f"\n{table_of_cpu(looks, root)}\n\n{table_of_phases(root)}")


if __name__ == "__main__":
    main()
