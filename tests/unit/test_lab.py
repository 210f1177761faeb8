"""The laboratory: its task, its model, and runs that are over in seconds."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from repository import CONFIGS, SUPPORT
from typer.testing import CliRunner

from hpc_es.cli import app
from hpc_es.config.schema import SamplingConfig
from hpc_es.engine.lab import AsciiTokenizer, draw
from hpc_es.envs import lab, make
from hpc_es.envs.check import check_env
from hpc_es.errors import ConfigError, EnvError, ModelError
from hpc_es.params.arena import Arena
from hpc_es.params.lab_model import LAB_MODELS, write_lab_model
from hpc_es.params.models import get_model
from hpc_es.records import EvalId
from hpc_es.store import read
from hpc_es.traces import read_trace


@pytest.mark.parametrize("options", [{}, {"split": "eval", "graded": False, "length": 8, "actions": 9}])
def test_the_task_keeps_the_contract_of_environments(options: dict[str, object]) -> None:
    check_env(lambda: make("lab", **options))


def test_the_reward_is_the_share_of_answers_that_the_teacher_likes_less() -> None:
    env = make("lab", actions=5)
    for task in range(20):
        rewards = []
        for answer in "12345":
            env.reset(task)
            result = env.step(answer)
            assert result.success == (result.reward == 1.0)
            rewards.append(result.reward)
        assert sorted(rewards) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_without_grades_only_success_is_rewarded() -> None:
    env, graded = make("lab", graded=False), make("lab")
    for task, answer in [(task, answer) for task in range(10) for answer in "1234"]:
        env.reset(task), graded.reset(task)
        assert env.step(answer).reward == (graded.step(answer).reward == 1.0)


@pytest.mark.parametrize("answer", ["", "5", "12", "one", "²", "٣", "-1"])
def test_an_inadmissible_answer_earns_nothing(answer: str) -> None:
    env = make("lab")
    env.reset(0)
    result = env.step(answer)
    assert (result.reward, result.invalid, result.success) == (0.0, True, False)


def test_every_answer_is_right_about_as_often_and_none_is_a_policy() -> None:
    env, wins = make("lab"), dict.fromkeys("1234", 0)
    for task in range(1000):
        for answer in wins:
            env.reset(task)
            wins[answer] += env.step(answer).success
    assert sum(wins.values()) == 1000
    assert max(wins.values()) < 400


@pytest.mark.parametrize("seed", [0, 7])
def test_held_out_words_never_appear_in_training_whatever_the_seed(seed: int) -> None:
    train = {lab.word(seed, "train", task, 4, 3) for task in range(1000)}
    held_out = {lab.word(0, "eval", task, 4, 3) for task in range(1000)}
    assert len(train) > 40
    assert len(held_out) > 10
    assert not train & held_out


def test_words_too_short_to_be_split_are_refused() -> None:
    with pytest.raises(ConfigError, match="give only 8 words"):
        make("lab", length=3, letters=2)


def test_a_task_outside_is_refused() -> None:
    with pytest.raises(EnvError, match=r"tasks are 0\.\.9"):
        make("lab", num_tasks=10).reset(10)


def test_durations_are_long_tailed_differ_by_episode_and_change_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(lab.time, "sleep", slept.append)
    slow, quick = make("lab", seconds={"kind": "lognormal", "median": 0.05, "sigma": 0.8}), make("lab")
    assert (slow.instant, quick.instant) == (False, True)
    for _ in range(2000):
        slow.reset(3), quick.reset(3)
        assert slow.step("2") == quick.step("2")
    assert len(set(slept)) == 2000
    assert np.median(slept) == pytest.approx(0.05, rel=0.15)
    assert np.log(slept).std() == pytest.approx(0.8, rel=0.1)


@pytest.mark.parametrize("seconds", [{"kind": "uniform", "median": 1}, {"median": 0}, {"median": 1, "mean": 2}])
def test_durations_that_do_not_exist_are_refused(seconds: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="seconds"):
        make("lab", seconds=seconds)


def test_the_models_have_the_sizes_that_they_are_named_by(tmp_path: Path) -> None:
    sizes = {"lab-10k": 9_352, "lab-100k": 99_286, "lab-1m": 999_779}
    assert sizes.keys() == LAB_MODELS.keys()
    for name, size in sizes.items():
        folder = get_model(name, tmp_path / name, say=lambda line: None)
        assert Arena.from_pretrained(folder).num_parameters == size


def test_a_model_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    one, two, other = (write_lab_model(tmp_path / str(i), 4, seed=i // 2) for i in range(3))
    theta = [(folder / "model.safetensors").read_bytes() for folder in (one, two, other)]
    assert theta[0] == theta[1] != theta[2]


def test_the_tokenizer_round_trips_text_and_replaces_other_characters() -> None:
    tokenizer = AsciiTokenizer()
    text = "".join(map(chr, range(1, 128)))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("né🧩")) == "n??"
    assert tokenizer.decode([65, 0, 66]) == "AB"


LOGITS = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"temperature": 1}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 1, "top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1, "top_p": 0.65}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1, "top_p": 0.3}, [0, 1, 0, 0]),
        ({"temperature": 1, "top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_answers_are_drawn_as_the_settings_say(settings: dict[str, float], shares: list[float]) -> None:
    sampling, generator = SamplingConfig.model_validate(settings), random.Random(1)
    counts = np.bincount([draw(LOGITS, sampling, generator)[0] for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, shares, atol=0.03)


def test_a_worker_of_the_laboratory_imports_nothing_heavy() -> None:
    """Starting processes is what a short run consists of."""
    code = (
        "import sys, hpc_es.worker.loop, hpc_es.head.loop, hpc_es.engine.lab\n"
        "print(*{'torch', 'transformers', 'safetensors', 'vllm', 'pandas', 'matplotlib'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.fixture(scope="module")
def lab_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return get_model("lab-10k", tmp_path_factory.mktemp("models") / "lab-10k", say=lambda line: None)


LAST_DIGEST = {"sync": "757e55964d68c6c3", "lag4-50": "e4625ed4efd65145"}
"""Digests of theta_8. A difference means that bits have changed; async-1 depends on which worker is faster."""


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["sync", "lag4-50", "async-1"])
def test_a_whole_run_of_the_laboratory_is_verified_and_replayed(tmp_path: Path, lab_model: Path, preset: str) -> None:
    settings = [f"model.path={lab_model}", f"run.dir={tmp_path}", "run.num_updates=8", "eval.num_tasks=128"]
    command = [str(CONFIGS / "lab" / "10k.yaml"), str(CONFIGS / "staleness" / "16x16" / f"{preset}.yaml"), *settings]
    hpc_es("run", *command)
    run = read(tmp_path / "lab")
    assert len(run.updates) == 8
    assert run.evals["version"].tolist() == [0, 8]
    assert run.updates["lag_max"].max() <= {"sync": 0, "lag4-50": 4, "async-1": 1}[preset]
    assert "everything fits" in hpc_es("verify", str(tmp_path / "lab"))
    hpc_es("replay", str(tmp_path / "lab"), "--out", str(tmp_path / "theta"))
    digest = run.updates["digest"].iloc[-1]
    assert Arena.from_pretrained(tmp_path / "theta").digest() == digest
    assert f"{digest:016x}" == LAST_DIGEST.get(preset, f"{digest:016x}")


@pytest.mark.slow
def test_traces_of_a_run_are_kept_and_change_none_of_its_bits(tmp_path: Path, lab_model: Path) -> None:
    settings = [f"model.path={lab_model}", f"run.dir={tmp_path}", "run.num_updates=8", "eval.num_tasks=128"]
    command = [str(CONFIGS / "lab" / "10k.yaml"), str(CONFIGS / "staleness" / "16x16" / "sync.yaml"), *settings]
    hpc_es("run", *command, "store.traces=true")
    run = read(tmp_path / "lab")
    assert f"{run.updates['digest'].iloc[-1]:016x}" == LAST_DIGEST["sync"]
    assert len(run.evaluations) == len(list((tmp_path / "lab" / "traces").iterdir()))
    for row in run.evaluations.itertuples():
        eval_id = EvalId(row.dispatch_version, row.slot if row.kind == "train" else -1 - row.slot, 0, row.kind)
        trace = read_trace(tmp_path / "lab" / "traces", eval_id, row.trace)
        sampled = [turn.sampled for episode in trace.episodes for turn in episode.turns]
        assert (sum(map(len, sampled)), trace.digest) == (row.tokens_out, row.digest)


@pytest.mark.slow
def test_a_method_that_needs_traces_has_them_and_those_that_were_consumed_are_removed(
    tmp_path: Path, lab_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    settings = [f"model.path={lab_model}", f"run.dir={tmp_path}", "run.num_updates=3", "eval.num_tasks=16"]
    hpc_es("run", str(CONFIGS / "lab" / "10k.yaml"), "method=toy:Traced", "es.population=4", *settings)
    evaluations = read(tmp_path / "lab").evaluations
    left = {path.name for path in (tmp_path / "lab" / "traces").iterdir()}
    assert all(len(name) == 32 for name in evaluations.trace)
    assert len(evaluations.query("kind == 'train'")) == 12
    assert not [name for name in left if name.partition("-")[0].split(".")[1].isdigit()], "a consumed one is left"
    assert {"0.eval0", "3.eval0"} <= {name.partition("-")[0] for name in left}


def hpc_es(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_model_of_other_shapes_is_refused_by_its_tensor(tmp_path: Path) -> None:
    from small_checkpoint import save

    from hpc_es.config.schema import ModelConfig
    from hpc_es.engine.lab import _Live

    write_lab_model(tmp_path, 8)
    arena = Arena.from_pretrained(tmp_path)
    tensors = {name: np.array(arena.tensor(name)) for name in arena.names}
    save(tmp_path, {**tensors, "readout.weight": tensors["readout.weight"].T})
    with pytest.raises(ModelError, match=r"readout\.weight has the shape \(8, 128\) where \(128, 8\) is wanted"):
        _Live(ModelConfig(path=str(tmp_path)), "none")
