"""Whole runs: real head, real workers, real control plane, the laboratory's engine, which starts in a moment.

The undisturbed run is made once; whatever else happens to a run, it must end with the same bits. What transformers and
the collective plane add is in test_cli_run.py and test_chaos.py.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import gated
import pytest
from repository import SUPPORT

from hpc_es import store
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.paths import RunPaths
from hpc_es.store import records as journal
from hpc_es.store.journal import read_journal

pytestmark = pytest.mark.slow

CONFIG = """
run: {name: NAME, dir: DIR, num_updates: 4}
model: {path: MODEL, dtype: float32}
task:
  env: sudoku
  options: {size: 4, blanks: 2, partial_credit: true, action: digit, prompt: short}
  chat: false
es: {population: 4, sigma: 0.5, alpha: 0.5, tasks_per_member: 3}
sampling: {max_tokens: 1}
eval: {every: 2, num_tasks: 4}
engine: {kind: lab, max_concurrent: 1, max_model_len: 512, threads: 1}
transport: {heartbeat: 0.5, heartbeat_timeout: 10, backend: none}
checkpoint: {every: 2}
launch: {workers: 2, stop_timeout: 20}
"""

PACED = CONFIG.replace("env: sudoku", "env: gated:Sudoku")
"""The same bits, from episodes that last: for runs that must not end before something happens to them."""


class Bench:
    """A folder in which the command line makes runs of one configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_lab_model(folder / "model", LAB_MODELS["lab-100k"])

    def config(self, name: str, folder: Path | None = None, template: str = CONFIG) -> Path:
        text = (
            template.replace("NAME", name).replace("DIR", str(folder or self.folder)).replace("MODEL", str(self.model))
        )
        path = self.folder / f"{name}.yaml"
        path.write_text(text)
        return path

    def start(self, *arguments: object, stderr: int = subprocess.STDOUT) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{SUPPORT}:{os.environ.get('PYTHONPATH', '')}",
            "COLUMNS": "300",
            gated.PACE: "0.2",
        }
        command = [sys.executable, "-m", "hpc_es", *map(str, arguments)]
        return subprocess.Popen(
            command,
            text=True,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            stdin=subprocess.DEVNULL,
        )

    def cli(self, *arguments: object, code: int = 0, timeout: float = 240) -> str:
        process = self.start(*arguments)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == code, output
        return output

    def answer(self, *arguments: object) -> dict:
        """The output of --json on stdout."""
        process = self.start(*arguments, "--json", stderr=subprocess.DEVNULL)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        return json.loads(output)


def records_of(root: Path) -> list[journal.AnyRecord]:
    return list(read_journal(root, warn=lambda text: None))


def digests(root: Path) -> dict[int, int]:
    return {record.version: record.digest for record in records_of(root) if isinstance(record, journal.Digested)}


def processes_of(root: Path) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if str(root) in words:
                found.append(" ".join(words))
    return found


def wait_until(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def version_of(root: Path) -> int:
    return max(digests(root), default=0) if RunPaths(root).segments() else -1


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def undisturbed(bench) -> Path:
    bench.cli("run", bench.config("undisturbed"))
    return bench.folder / "undisturbed"


def test_a_run_ends_with_all_updates_a_table_and_no_process(bench, undisturbed):
    assert sorted(digests(undisturbed)) == [1, 2, 3, 4]
    assert processes_of(undisturbed) == []
    bench.cli("verify", undisturbed)


def test_the_log_answers_how_stale_every_result_was(undisturbed):
    run = store.read(undisturbed / "run.h5")
    trained = run.evaluations[run.evaluations.kind == "train"]
    assert len(trained) == 16
    assert (trained.lag == 0).all()
    assert (trained.consumed_version == trained.dispatch_version).all()
    assert (trained.status == "accepted").all()
    assert list(run.updates.version) == [1, 2, 3, 4]
    assert sorted(run.evals.version) == [0, 2, 4]
    assert len(run.episodes) == 16 * 3 + 3 * 4


def test_a_head_with_another_configuration_leaves_the_journal_alone(bench, undisturbed):
    root = bench.folder / "edited"
    shutil.copytree(undisturbed, root)
    (root / "config.yaml").write_text(
        (root / "config.yaml")
        .read_text()
        .replace("sigma:\n    kind: constant\n    start: 0.5", "sigma:\n    kind: constant\n    start: 0.07")
    )
    output = bench.cli("head", root, "--local", code=2)
    assert "es.sigma.start: 0.5 -> 0.07" in output
    assert "es.sigma.start: 0.5 -> 0.07" in bench.cli("eval", root, code=2)
    assert len(RunPaths(root).segments()) == 1


def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(bench, undisturbed):
    root = bench.folder / "stopped"
    process = bench.start("run", bench.config("stopped", template=PACED))
    wait_until(lambda: version_of(root) >= 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 3, process.stdout.read()
    assert processes_of(root) == []
    assert version_of(root) < 4
    bench.cli("run", bench.config("stopped", template=PACED))
    assert digests(root) == digests(undisturbed)


def test_a_worker_and_a_head_that_are_killed_change_no_bit_and_count_nothing_twice(bench, undisturbed):
    root = bench.folder / "killed"
    process = bench.start("run", bench.config("killed", template=PACED))
    for at, role in ((1, "worker"), (2, "head")):
        wait_until(lambda at=at: version_of(root) >= at)
        subprocess.run(["pkill", "-KILL", "-f", f"hpc_es {role} {root}"], check=True)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "starting it again" in output
    assert digests(root) == digests(undisturbed)
    bench.cli("verify", root)


def test_a_frozen_head_that_was_replaced_writes_nothing_more(bench, undisturbed):
    root = bench.folder / "frozen"
    paths = RunPaths(root)
    bench.cli("config", "show", bench.config("frozen", template=PACED))
    process = bench.start("run", bench.config("frozen", template=PACED))
    wait_until(lambda: version_of(root) >= 1)
    head = json.loads(paths.rendezvous.read_text())
    os.kill(head["pid"], signal.SIGSTOP)
    second = bench.start("head", root, "--local")
    wait_until(lambda: json.loads(paths.rendezvous.read_text())["generation"] > head["generation"])
    size = paths.segment(head["generation"]).stat().st_size
    os.kill(head["pid"], signal.SIGCONT)
    output, _ = process.communicate(timeout=120)  # its head ends, and with it this launch
    assert process.returncode == 1
    assert "newer head" in output
    assert paths.segment(head["generation"]).stat().st_size == size
    bench.cli("run", bench.config("frozen", template=PACED))
    assert second.wait(60) in (0, 1)  # it finished the run with the first one's workers, or the third took over from it
    assert digests(root) == digests(undisturbed)


def test_a_torn_tail_is_cut_with_a_warning_and_the_run_continues(bench, undisturbed):
    root = bench.folder / "torn"
    shutil.copytree(undisturbed, root)
    segment = RunPaths(root).segment(1)
    data = segment.read_bytes()
    segment.write_bytes(data[: len(data) * 2 // 3])
    (root / "config.yaml").write_text((root / "config.yaml").read_text().replace("undisturbed", "torn"))
    output = bench.cli("run", bench.config("torn"), code=1)
    assert "its end is lost" in output
    for name in re.search(r", or remove (.*) to resume from", output)[1].split(", "):
        shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink()
    bench.cli("run", bench.config("torn"))
    assert digests(root) == digests(undisturbed)
    bench.cli("verify", root)


def test_a_flipped_byte_in_the_journal_is_refused_with_its_offset(bench, undisturbed):
    root = bench.folder / "flipped"
    shutil.copytree(undisturbed, root)
    (root / "config.yaml").write_text((root / "config.yaml").read_text().replace("undisturbed", "flipped"))
    segment = RunPaths(root).segment(1)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0x10
    segment.write_bytes(data)
    for command in (["run", bench.config("flipped")], ["verify", root], ["status", root]):
        output = bench.cli(*command, code=1)
        assert "journal.1.hpcj" in output
        assert "offset" in output
        assert "Traceback" not in output
    assert segment.read_bytes() == data


def test_a_truncated_run_h5_is_rebuilt(bench, undisturbed):
    root = bench.folder / "truncated"
    shutil.copytree(undisturbed, root)
    hdf5 = RunPaths(root).hdf5
    hdf5.write_bytes(hdf5.read_bytes()[:3000])
    with pytest.warns(UserWarning, match="journal"):
        assert len(store.read(hdf5).updates) == 4


def test_secrets_that_others_can_read_are_refused(bench, undisturbed):
    root = bench.folder / "open"
    shutil.copytree(undisturbed, root)
    (root / "config.yaml").write_text((root / "config.yaml").read_text().replace("undisturbed", "open"))
    RunPaths(root).segment(1).unlink()
    shutil.rmtree(RunPaths(root).checkpoints)
    RunPaths(root).hdf5.unlink(), RunPaths(root).rendezvous.unlink()
    RunPaths(root).secrets.chmod(0o755)
    output = bench.cli("run", bench.config("open"), code=1)
    assert "chmod" in output
    assert "Traceback" not in output


def test_a_full_disk_stops_the_run_cleanly_and_it_resumes(bench, undisturbed, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "none", disk], capture_output=True, text=True)
    if mounted.returncode:
        assert os.environ.get("CI") != "true", mounted.stderr
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr}")
    try:
        config = bench.config("full", folder=disk)
        output = bench.cli("run", config, code=1)
        assert "No space left" in output
        assert "Traceback" not in output
        assert processes_of(disk / "full") == []
        subprocess.run(["mount", "-o", "remount,size=50m", disk], check=True)
        bench.cli("run", config)
        assert digests(disk / "full") == digests(undisturbed)
        bench.cli("verify", disk / "full")
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_worker_with_a_corrupted_arena_is_quarantined_and_the_run_continues(bench, tmp_path):
    template = re.sub(
        r"env: sudoku\n  options: .*", f"env: scripted:Corrupts\n  options: {{marker: {tmp_path}/done}}", CONFIG
    )
    root = bench.folder / "corrupted"
    bench.cli("run", bench.config("corrupted", template=template))
    assert (tmp_path / "done").exists()
    records = records_of(root)
    notes = [record.what for record in records if isinstance(record, journal.Noted)]
    assert sum("is quarantined" in note for note in notes) == 1
    void = [record for record in records if isinstance(record, journal.Voided)]
    assert void
    assert all("measured with digest" in record.reason for record in void)
    assert sorted(digests(root)) == [1, 2, 3, 4]
    assert bench.answer("verify", root)["problems"] == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan", "rewarded with nan"),
        ("raises", "the tool server is unreachable"),
        ("never returns", "did not return within task.step_timeout=0.2 s"),
    ],
)
def test_an_environment_that_only_fails_ends_the_run_with_its_error(bench, fault, words):
    name = fault.replace(" ", "-")
    template = re.sub(r"env: sudoku\n  options: .*", f"env: scripted:Fickle\n  options: {{fault: {fault}}}", CONFIG)
    overrides = ["task.step_timeout=0.2", "run.max_failures_in_a_row=4", "launch.workers=1", "sampling.max_tokens=4"]
    output = bench.cli("run", bench.config(name, template=template), *overrides, code=1)
    assert words in output
    assert "Traceback" not in output
    assert processes_of(bench.folder / name) == []
    void = [record for record in records_of(bench.folder / name) if isinstance(record, journal.Voided)]
    assert len(void) == 4
