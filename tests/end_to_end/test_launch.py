"""The local launcher: restarts, endings, and that nothing is left behind. Head and workers are played by actor.py."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import small_checkpoint
from repository import SUPPORT

from hpc_es.config import Config, load, save
from hpc_es.engine.supported import check_supported
from hpc_es.errors import ConfigError, LaunchError, ModelError, RunFailed, StoreError
from hpc_es.launch import local, prepare
from hpc_es.launch.local import Outcome, run_local
from hpc_es.paths import RunPaths
from hpc_es.store.hdf5 import rebuild
from hpc_es.store.journal import JournalWriter
from hpc_es.store.records import SCHEMA_VERSION, Started, Stopped

ACTOR = (sys.executable, str(SUPPORT / "actor.py"))
WAITS = "wait_for_sigterm()"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


class Stage:
    """A run folder with a script for its actors."""

    def __init__(self, folder: Path) -> None:
        self.model = small_checkpoint.make(folder / "model")
        self.paths = RunPaths(folder / "runs" / "play")
        self.events: list[str] = []

    def config(
        self, *, workers: int = 1, max_restarts: int = 2, stop_timeout: float = 5.0, sigma: float = 1e-3
    ) -> Config:
        return Config.model_validate(
            {
                "run": {"name": "play", "dir": self.paths.root.parent, "num_updates": 1},
                "model": {"path": str(self.model)},
                "task": {"env": "sudoku", "options": {"size": 4}},
                "es": {"sigma": sigma},
                "launch": {"workers": workers, "max_restarts": max_restarts, "stop_timeout": stop_timeout},
            }
        )

    def script(self, **snippets: list[str]) -> None:
        """Keys: head, local_0, local_1, ..."""
        self.paths.root.mkdir(parents=True, exist_ok=True)
        script = {role.replace("_", "-"): texts for role, texts in snippets.items()}
        (self.paths.root / "script.json").write_text(json.dumps(script))

    def run(self, config: Config | None = None) -> Outcome:
        return run_local(config or self.config(), on_event=self.events.append)

    def pids(self, name: str) -> list[int]:
        file = self.paths.root / name
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def num_starts(self, role: str) -> int:
        return len(self.pids(f"starts-{role}"))

    def all_pids(self) -> list[int]:
        starts = [pid for file in self.paths.root.glob("starts-*") for pid in self.pids(file.name)]
        return starts + self.pids("sleepers")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(local, "ROLE_COMMAND", ACTOR)
    monkeypatch.setattr(local, "_RESTART_DELAY_S", 0.1)
    monkeypatch.setattr(local, "_POLL_S", 0.02)
    monkeypatch.setattr(local, "_STATUS_EVERY_S", 3600.0)
    monkeypatch.setattr(local, "_LEAVING_S", 0.2)
    stage = Stage(tmp_path)
    yield stage
    assert [pid for pid in stage.all_pids() if is_alive(pid)] == []


def is_alive(pid: int) -> bool:
    return state_of(pid) not in "ZX"


def state_of(pid: int) -> str:
    """R, S, T (stopped), Z (zombie), ... as in /proc; X when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# --- good endings -------------------------------------------------------------------------------------------------


def test_when_the_head_finishes_the_run_is_finished(stage: Stage) -> None:
    stage.script(head=["wait_for_file('starts-local-1'); sys.exit(0)"], local_0=[WAITS], local_1=[WAITS])
    outcome = stage.run(stage.config(workers=2, stop_timeout=1.0))
    assert (outcome.finished, outcome.reason) == (True, "finished")
    assert stage.paths.log("worker-local-1").read_text().startswith("start 0 of local-1")


def test_a_head_that_was_stopped_leaves_the_run_unfinished(stage: Stage) -> None:
    stage.script(head=["sys.exit(3)"], local_0=[WAITS])
    assert not stage.run(stage.config(stop_timeout=1.0)).finished


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_head_first_and_in_good_order(stage: Stage, number: signal.Signals) -> None:
    head = "signal.signal(signal.SIGTERM, lambda *_: ((root / 'asked').touch(), sys.exit(3))); "
    stage.script(
        head=[head + "(root / 'ready').touch(); time.sleep(600)"],
        local_0=["wait_for_file('ready'); (root / 'both ready').touch(); wait_for_file('asked'); sys.exit(3)"],
    )
    with signal_when(stage, "both ready", number):
        outcome = stage.run()
    assert (outcome.finished, outcome.reason) == (False, f"stopped by {number.name}")
    assert (stage.paths.root / "asked").exists()
    assert (stage.num_starts("head"), stage.num_starts("local-0")) == (1, 1)


@contextlib.contextmanager
def signal_when(stage: Stage, name: str, number: signal.Signals) -> Iterator[None]:
    """Send this process a signal once a file is there."""

    def wait_and_send() -> None:
        wait_until((stage.paths.root / name).exists)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    yield
    thread.join()


def test_a_head_that_finishes_although_it_was_asked_to_stop_has_finished(stage: Stage) -> None:
    head = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); (root / 'ready').touch(); time.sleep(600)"
    stage.script(head=[head], local_0=[WAITS])
    with signal_when(stage, "ready", signal.SIGTERM):
        assert stage.run().finished


def test_a_process_that_ignores_the_request_is_killed_after_the_timeout(stage: Stage) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); (root / 'deaf').touch(); time.sleep(600)"
    stage.script(head=["wait_for_file('deaf'); sys.exit(0)"], local_0=[stubborn])
    began = time.monotonic()
    assert stage.run(stage.config(stop_timeout=0.5)).finished
    assert 0.5 < time.monotonic() - began < 5


# --- restarts -----------------------------------------------------------------------------------------------------


def test_a_killed_worker_and_a_killed_head_are_started_again(stage: Stage) -> None:
    stage.script(
        head=[KILLED, "wait_for_file('third'); time.sleep(0.5); sys.exit(0)"],
        local_0=[KILLED, KILLED, "(root / 'third').touch()"],
    )
    assert stage.run().finished
    assert (stage.num_starts("head"), stage.num_starts("local-0")) == (2, 3)
    assert "worker-local-0 was killed by SIGKILL; starting it again (2 of at most 2 times)" in stage.events


def test_restarts_are_bounded_and_the_log_is_shown(stage: Stage) -> None:
    stage.script(head=[WAITS], local_0=[f"print('the card is on fire', flush=True); {KILLED}"])
    with pytest.raises(LaunchError, match=r"(?s)killed by SIGKILL, after launch.max_restarts=2 .*the card is on fire"):
        stage.run()
    assert stage.num_starts("local-0") == 3


def test_a_worker_death_is_reported_by_its_witness_and_costs_a_restart(stage: Stage) -> None:
    imports = "from hpc_es.worker import seat; from hpc_es.paths import RunPaths; paths = RunPaths(root); "
    died = "seat.begin(paths, 'local-0'); seat.note(paths, 'local-0', 'died', 'ended with code 0 in x: step 1'); "
    stage.script(head=[WAITS], local_0=[f"{imports}{died}sys.exit(5)"])
    with pytest.raises(LaunchError, match=r"worker-local-0 ended .* in x: step 1, after launch\.max_restarts"):
        stage.run()
    assert "worker-local-0 ended with code 0 in x: step 1; starting it again (2 of at most 2 times)" in stage.events


def test_why_a_worker_failed_stands_first(stage: Stage) -> None:
    script = (
        "from hpc_es.worker import seat; from hpc_es.paths import RunPaths; from hpc_es.errors import ModelError\n"
        "try:\n    with seat.occupied(RunPaths(root), 'local-0'): raise ModelError('it is quantised')\n"
        "except ModelError: sys.exit(2)"
    )
    stage.script(head=[WAITS], local_0=[script])
    with pytest.raises(LaunchError, match="worker-local-0 failed: it is quantised; the end of"):
        stage.run()
    assert stage.num_starts("local-0") == 1


@pytest.mark.parametrize("code", [1, 2])
def test_a_worker_that_cannot_start_is_not_tried_again(stage: Stage, code: int) -> None:
    stage.script(head=[WAITS], local_0=[f"print('error: no room', flush=True); sys.exit({code})"])
    with pytest.raises(LaunchError, match=r"(?s)worker-local-0 failed; .*error: no room"):
        stage.run()
    assert stage.num_starts("local-0") == 1


@pytest.mark.parametrize(("code", "kind"), [(1, RunFailed), (2, ConfigError)])
def test_a_head_that_fails_ends_the_run_with_its_log(stage: Stage, code: int, kind: type[Exception]) -> None:
    stage.script(head=[f"print('error: disk full', flush=True); sys.exit({code})"], local_0=[WAITS])
    with pytest.raises(kind, match=r"(?s)head failed; .*error: disk full"):
        stage.run(stage.config(stop_timeout=1.0))
    assert stage.num_starts("head") == 1


# --- nothing is left ----------------------------------------------------------------------------------------------


def test_grandchildren_of_a_killed_worker_end_before_it_starts_again(stage: Stage) -> None:
    first = f"start_sleeper(own_session=False); start_sleeper(own_session=True); {KILLED}"
    second = "pids = [int(p) for p in (root / 'sleepers').read_text().split()]; "
    second += "(root / 'seen').write_text(str(os.path.exists(f'/proc/{pids[0]}'))); wait_for_sigterm()"
    stage.script(head=["wait_for_file('seen'); time.sleep(0.1); sys.exit(0)"], local_0=[first, second])
    assert stage.run(stage.config(stop_timeout=1.0)).finished
    assert (stage.paths.root / "seen").read_text() == "False"
    assert len(stage.pids("sleepers")) == 2  # the fixture checks that both are gone


LAUNCHER = """\
import sys
from pathlib import Path
from hpc_es.config import load
from hpc_es.launch import local
local.ROLE_COMMAND = (sys.executable, sys.argv[2])
local.run_local(load(Path(sys.argv[1])).config)
"""


def start_launcher(stage: Stage) -> subprocess.Popen[str]:
    prepare.write_folder(stage.config())
    command = [sys.executable, "-c", LAUNCHER, str(stage.paths.config), ACTOR[1]]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_when_the_launcher_is_killed_its_family_ends_even_if_stopped(stage: Stage) -> None:
    stage.script(head=["start_sleeper(own_session=False); time.sleep(600)"], local_0=["time.sleep(600)"])
    launcher = start_launcher(stage)
    wait_until(lambda: bool(stage.pids("sleepers")) and stage.num_starts("local-0") == 1)
    stopped = stage.pids("starts-local-0")[0]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: state_of(stopped) == "T")
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in stage.all_pids()))


def test_a_second_launcher_is_refused_but_a_dead_one_does_not_block(stage: Stage) -> None:
    stage.script(head=[WAITS], local_0=[WAITS])
    launcher = start_launcher(stage)
    wait_until(lambda: stage.num_starts("head") == 1)
    with pytest.raises(LaunchError, match=f"is being run by process {launcher.pid}"):
        stage.run()
    launcher.kill()
    launcher.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in stage.all_pids()))
    stage.script(head=["sys.exit(0)"], local_0=[WAITS])
    assert stage.run(stage.config(stop_timeout=1.0)).finished


# --- the run folder -----------------------------------------------------------------------------------------------


def begin_journal(paths: RunPaths, *, finished: bool) -> None:
    def started(generation: int, predecessor_bytes: int) -> Started:
        began_with = load(paths.config).config.model_dump_json()
        return Started(0.0, SCHEMA_VERSION, "play", generation, predecessor_bytes, began_with, 0, {}, "here")

    writer = JournalWriter.create(paths, started)
    if finished:
        writer.append(Stopped(0.0, "all done", finished=True))
    writer.close()


def test_a_finished_run_starts_nothing(stage: Stage) -> None:
    stage.script(head=[WAITS], local_0=[WAITS])
    prepare.write_folder(stage.config())
    begin_journal(stage.paths, finished=True)
    outcome = stage.run()
    assert (outcome.finished, outcome.reason) == (True, "already finished")
    assert stage.num_starts("head") == 0


def test_a_finished_run_gets_damaged_tables_back(stage: Stage) -> None:
    stage.script(head=[WAITS], local_0=[WAITS])
    prepare.write_folder(stage.config())
    begin_journal(stage.paths, finished=True)
    rebuild(stage.paths.root)
    whole = stage.paths.hdf5.read_bytes()
    stage.paths.hdf5.write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
    assert stage.run().finished
    with stage.paths.hdf5.open("rb") as file:
        assert file.read(8192) != whole[:4096] + bytes(4096)
    assert any("run.h5 is rebuilt from the journal" in event for event in stage.events)


def test_a_begun_run_refuses_another_configuration_and_shows_the_difference(stage: Stage) -> None:
    stage.script(head=["sys.exit(0)"], local_0=[WAITS])
    prepare.write_folder(stage.config())
    prepare.write_folder(stage.config(sigma=2e-3))  # nothing has run yet
    begin_journal(stage.paths, finished=False)
    with pytest.raises(ConfigError, match=r"another configuration:\n  es.sigma.start: 0.002 -> 0.003\n"):
        stage.run(stage.config(sigma=3e-3))
    assert stage.run(stage.config(sigma=2e-3, stop_timeout=1.0)).finished
    assert stage.events == ["changed since the run began: launch.stop_timeout: 5.0 -> 1.0"]


def test_an_edited_config_yaml_does_not_change_a_begun_run(stage: Stage) -> None:
    stage.script(head=["sys.exit(0)"], local_0=[WAITS])
    prepare.write_folder(stage.config())
    begin_journal(stage.paths, finished=False)
    save(stage.config(sigma=3e-3), stage.paths.config)
    with pytest.raises(ConfigError, match=r"another configuration:\n  es.sigma.start: 0.001 -> 0.003\n"):
        stage.run(stage.config(sigma=3e-3))
    assert stage.run(stage.config()).finished


def test_checkpoints_of_a_journal_that_is_lost_are_not_taken_for_those_of_a_new_run(stage: Stage) -> None:
    stage.script(head=["sys.exit(0)"], local_0=[WAITS])
    prepare.write_folder(stage.config())
    stage.paths.checkpoint(3).mkdir(parents=True)
    with pytest.raises(StoreError, match=r"has no journal, although it has .*v00000003: restore"):
        stage.run()
    stage.paths.checkpoint(3).rmdir()
    assert stage.run().finished


def test_arenas_that_do_not_fit_are_refused_before_anything_starts(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_es.params.layout.memory_limit", lambda: 60_000)
    stage.script(head=[WAITS], local_0=[WAITS])
    with pytest.raises(ModelError, match=r"4 arenas of .* would fit"):
        stage.run(stage.config(workers=3))
    assert stage.num_starts("head") == 0


def test_ranks_that_cannot_share_the_model_are_refused_before_anything_starts(stage: Stage) -> None:
    small_checkpoint.make(stage.model, num_attention_heads=9)
    config = stage.config()
    cut = config.model_copy(update={"engine": config.engine.model_copy(update={"tensor_parallel": 2})})
    with pytest.raises(ConfigError, match="tensor_parallel=2 does not divide the model's 9 attention heads"):
        stage.run(cut)
    assert not stage.all_pids()


def test_a_model_that_cannot_be_used_is_refused_before_anything_starts(stage: Stage) -> None:
    stage.script(head=[WAITS], local_0=[WAITS])
    (stage.model / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="must hold an object, not list"):
        stage.run()
    (stage.model / "config.json").write_text('{"quantization_config": {"bits": 4}}')
    with pytest.raises(ModelError, match="is quantised"):
        stage.run()
    (stage.model / "config.json").write_text("{}")
    (stage.model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors"):
        stage.run()
    (stage.model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        stage.run()
    stage.model.rmdir()
    with pytest.raises(ModelError, match=r"no such folder; model\.path is relative to the working directory"):
        stage.run()
    assert stage.num_starts("head") == 0


def test_a_model_that_transformers_has_no_code_for_is_refused_before_anything_starts(stage: Stage) -> None:
    config = stage.config()
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "transformers"})})
    (stage.model / "config.json").write_text('{"model_type": "clip"}')
    began = time.monotonic()
    with pytest.raises(ModelError, match=r"model_type='clip' in its config.json is not one of the \d+ types"):
        stage.run(config)
    assert time.monotonic() - began < 5
    for model_type in ("llama", "qwen3", "qwen3_5", "qwen3_vl", "gemma3"):
        check_supported("transformers", stage.model, {"model_type": model_type})
    check_supported("vllm", stage.model, {"model_type": "clip"})  # has more ways than its tables say


def test_gpus_are_dealt_to_the_workers_in_turn(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    own = [local._devices(stage.config(), i)["CUDA_VISIBLE_DEVICES"] for i in range(4)]
    assert own == ["4", "5", "6", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local._devices(stage.config(), 0) == {}
