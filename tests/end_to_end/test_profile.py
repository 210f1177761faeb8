"""tools/bench/profile_run.py: no second is lost or counted twice."""

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from repository import ROOT

from hpc_es.params.models import get_model
from hpc_es.store import read

BENCH = ROOT / "tools" / "bench"


@pytest.fixture(autouse=True)
def bench_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_a_profile_has_phases_that_add_up_and_cpu_seconds_of_processes(tmp_path: Path) -> None:
    from phases import phases
    from profile_run import table_of_phases

    model = get_model("lab-10k", tmp_path / "lab-10k")
    command = [sys.executable, "tools/bench/profile_run.py", "--run", "configs/lab/10k.yaml", f"run.dir={tmp_path}"]
    few = ["run.num_updates=2", "eval.num_tasks=0", f"model.path={model}", "run.name=short"]
    done = subprocess.run([*command, *few], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cpu = dict(re.findall(r"^\| (.+?) \| .* ([\d.]+)% \|$", done.stdout, re.MULTILINE))
    assert {"head", "launcher, report"} < cpu.keys()
    assert sum(map(float, cpu.values())) == pytest.approx(100, abs=0.5)

    rows = phases(tmp_path / "short")
    in_table = re.findall(r"^\| [^|]+ \| [^|]+ \| (-?[\d.]+) \|$", done.stdout, re.MULTILINE)
    assert in_table == [f"{row.seconds:.1f}" for row in rows]
    connected = [row.seconds for row in rows if row.process == "workers"][1:-1]
    workers = read(tmp_path / "short" / "run.h5").workers
    assert sum(connected) == pytest.approx(workers["seconds_connected"].mean())
    assert min(row.seconds for row in rows if row.phase != "engine's end") >= 0
    for name in ("report.html", "figures"):  # as of a later `hpc-es report`
        (tmp_path / "short" / "report" / name).write_text("")
    assert phases(tmp_path / "short") == rows
    lock = tmp_path / "short" / "launcher.lock"
    lock.touch()  # as by a later `hpc-es run`
    again = phases(tmp_path / "short")
    assert [math.isnan(row.seconds) for row in again] == [True, *[False] * (len(rows) - 2), True]
    assert re.search(r"report \| unknown \|$", table_of_phases(tmp_path / "short"), re.MULTILINE)
    lock.unlink()
    without = {row.phase: row.seconds for row in phases(tmp_path / "short")}
    assert [phase for phase, seconds in without.items() if math.isnan(seconds)] == [rows[0].phase]


def test_a_folder_that_is_not_a_run_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "tools/bench/profile_run.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(rf"error: {tmp_path}/run.h5 is not a run.*\n", done.stderr)


def made_in(path: str) -> Callable[[Callable[[], object]], object]:
    """A function of that file which calls what it is given."""
    names: dict[str, Callable[[Callable[[], object]], object]] = {}
    exec(compile("def call(what):\n    return what()", path, "exec"), names)
    return names["call"]


def test_cpu_seconds_belong_to_the_innermost_listed_package() -> None:
    from sampled import OTHER, watched

    def burn() -> None:
        ends = time.thread_time() + 0.2
        while time.thread_time() < ends:
            pass

    ours, theirs = made_in("lib/hpc_es/worker/rollout.py"), made_in("lib/vllm/v1/engine/async_llm.py")
    accounts: dict[str, float] = {}
    before = time.thread_time()
    with watched(accounts):
        ours(burn)
        ours(lambda: theirs(burn))
        burn()
        time.sleep(0.3)
    spent = time.thread_time() - before
    assert sum(accounts.values()) == pytest.approx(spent, abs=0.05)
    assert accounts["our loop over episodes"] == pytest.approx(0.2, abs=0.05)
    assert accounts["vLLM's front"] == pytest.approx(0.2, abs=0.05)
    assert accounts[OTHER] == pytest.approx(0.2, abs=0.05)


def test_processes_below_this_one_are_found_and_their_seconds_counted() -> None:
    from sampled import command, cpu_seconds, descendants

    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in descendants(os.getpid())
        assert cpu_seconds(child.pid) == pytest.approx(0.3, abs=0.15)  # by ticks
        assert "process_time" in command(child.pid)
        child.communicate(b"\n")
    assert (cpu_seconds(child.pid), command(child.pid)) == (0.0, "")
