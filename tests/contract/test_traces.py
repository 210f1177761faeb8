"""Traces of every engine: exactly the tokens that were sampled, with the probabilities that they were sampled with."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from builders import built_assignment
from engine_cases import settings
from repository import REAL_MODEL
from transformers import AutoModelForCausalLM

from hpc_es.config.schema import Config, ModelConfig
from hpc_es.engine import start_engine
from hpc_es.engine.base import Engine
from hpc_es.envs.base import Env, Message, Observation, StepResult
from hpc_es.errors import StoreError
from hpc_es.params.lab_model import write_lab_model
from hpc_es.params.models import get_model
from hpc_es.records import EvalId, Member
from hpc_es.traces import (
    EpisodeTrace,
    Trace,
    TurnTrace,
    read_trace,
    remove_traces,
    sequences,
    trace_file,
    write_trace,
)
from hpc_es.worker.rollout import Performance, Player

TOLERANCE = 1e-4
MEMBER = Member(seed=5, sign=1, sigma=1e-3)
VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])
DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "truncated": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "penalised": {"temperature": 1.3, "presence_penalty": 1.5},
    "stopped": {"stop": ("e",)},
}


class Talks(Env):
    """Three turns, each worth as many points as the turn's number."""

    num_tasks = 10
    history = None

    def __init__(self, choices: tuple[str, ...] | None = None) -> None:
        self._choices = choices

    def reset(self, task: int) -> Observation:
        self.turn = 0
        return Observation((Message("user", f"Name a number above {task}."),), self._choices)

    def step(self, text: str) -> StepResult:
        self.turn += 1
        if self.turn == 3:
            return StepResult(None, 3.0, terminated=True, truncated=False)
        return StepResult(Observation((Message("user", "And another?"),)), float(self.turn), False, False)


class Bench(NamedTuple):
    kind: str
    engine: Engine
    runner: asyncio.Runner

    def play(self, decoder: str = "plain", choices: tuple[str, ...] | None = None) -> Performance:
        config = Config.model_validate(
            {
                "run": {"name": "traces", "num_updates": 1},
                "model": {"path": str(REAL_MODEL), "dtype": "float32"},
                "task": {"env": "test_traces:Talks", "chat": self.kind != "lab"},
                "sampling": {"max_tokens": 12, **DECODERS[decoder]},
                "engine": settings("lab").model_dump() | {"kind": self.kind},
            }
        )
        player = Player(config, self.engine, lambda purpose: Talks(choices))
        assignment = built_assignment(EvalId(0, 0), 1, "train", None, (3, 1, 4, 1), sampling_seed=7)
        return self.runner.run(player.perform(assignment))


@pytest.fixture(scope="module", params=["transformers", VLLM])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """An engine with SmolLM2, perturbed by MEMBER."""
    model = ModelConfig(path=str(get_model("smollm2-135m", REAL_MODEL)), dtype="float32")
    yield from started(request.param, model)


def started(kind: str, model: ModelConfig) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        engine = runner.run(start_engine(model, settings(kind), threads=2, traces=True))
        runner.run(engine.perturb(MEMBER))
        yield Bench(kind, engine, runner)
        runner.run(engine.close())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    path = write_lab_model(tmp_path_factory.mktemp("lab") / "model", 16, seed=2)
    yield from started("lab", ModelConfig(path=str(path), dtype="float32"))


@pytest.fixture(scope="module")
def reference() -> Any:
    """SmolLM2 in transformers, with the weights of MEMBER."""
    from hpc_es.params.arena import Arena

    path = str(get_model("smollm2-135m", REAL_MODEL))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    arena = Arena.from_pretrained(path)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name in arena.trained:
            parameters[name].copy_(torch.from_numpy(arena.perturbed(name, MEMBER, "float32")))
    return model


def forward(model: Any, tokens: "np.ndarray[Any, Any]") -> torch.Tensor:
    """Logits of every next token, [T - 1, vocabulary]."""
    with torch.inference_mode():
        return model(torch.tensor(tokens[None].astype(np.int64))).logits[0, :-1]


@pytest.mark.model
@pytest.mark.slow
def test_traces_have_the_probabilities_of_a_forward_pass_over_several_turns(bench: Bench, reference: Any) -> None:
    played = bench.play()
    joined = 0
    for episode, trace in zip(played.episodes, played.traces, strict=True):
        assert [len(trace.turns), sum(len(turn.sampled) for turn in trace.turns)] == [3, episode.tokens_out]
        assert [turn.reward for turn in trace.turns] == [1.0, 2.0, 3.0]
        assert sum(len(turn.prompt) for turn in trace.turns) == episode.tokens_in
        found = list(sequences(trace))
        joined += len(found) < 3
        assert sum(sequence.rewards.sum() for sequence in found) == 6.0
        for sequence in found:
            scores = forward(reference, sequence.tokens).log_softmax(-1).numpy()
            expected = scores[np.arange(len(scores)), sequence.tokens[1:]]
            places = sequence.mask[1:]
            np.testing.assert_allclose(sequence.log_probabilities[1:][places], expected[places], atol=TOLERANCE)
            assert not sequence.log_probabilities[~sequence.mask].any()
    assert joined, "no episode is one sequence: then every turn would be computed anew"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("decoder", [name for name in DECODERS if name != "plain"])
def test_traces_have_the_probabilities_of_the_distribution_that_was_sampled(
    bench: Bench, reference: Any, decoder: str
) -> None:
    sampling = DECODERS[decoder]
    for trace in bench.play(decoder).traces:
        turn = trace.turns[0]
        logits = forward(reference, np.array(turn.prompt + turn.sampled))[len(turn.prompt) - 1 :]
        for place, (row, token) in enumerate(zip(logits, turn.sampled, strict=True)):
            row = row.clone()
            row[list(set(turn.sampled[:place]))] -= sampling.get("presence_penalty", 0.0)
            row /= sampling.get("temperature", 1.0) or 1.0
            if "top_k" in sampling:
                row[row < row.topk(sampling["top_k"]).values[-1]] = -np.inf
                ordered, order = row.softmax(-1).sort(descending=True)
                row[order[ordered.cumsum(-1) - ordered >= sampling["top_p"]]] = -np.inf
            assert abs(float(row.log_softmax(-1)[token]) - turn.log_probabilities[place]) < TOLERANCE


def test_the_laboratory_has_traces_too(lab: Bench) -> None:
    for decoder in DECODERS:
        for trace in lab.play(decoder).traces:
            for turn in trace.turns:
                ranked = lab.runner.run(lab.engine.log_probabilities(turn.prompt, [turn.sampled]))[0]
                assert len(turn.sampled) == len(turn.log_probabilities)
                assert max(turn.log_probabilities) <= 0
                if decoder in ("plain", "greedy", "stopped"):
                    np.testing.assert_allclose(turn.log_probabilities, ranked, atol=1e-6)


CHOICES = {"single": ("1", "2", "3"), "several": ("one hundred", "two", "a million")}


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("kind", CHOICES)
def test_a_choice_has_the_probability_that_it_was_drawn_with(bench: Bench, kind: str) -> None:
    check_choices(bench, kind)


@pytest.mark.parametrize("kind", CHOICES)
def test_a_choice_of_the_laboratory_has_its_probability(lab: Bench, kind: str) -> None:
    check_choices(lab, kind)


def check_choices(bench: Bench, kind: str) -> None:
    turn = bench.play(choices=CHOICES[kind]).traces[0].turns[0]
    assert bench.engine.tokenizer is not None
    encode = bench.engine.tokenizer.encode
    assert turn.choices == tuple(tuple(encode(choice, add_special_tokens=False)) for choice in CHOICES[kind])
    scores = bench.runner.run(bench.engine.log_probabilities(turn.prompt, turn.choices))
    drawn = turn.choices.index(turn.sampled)
    expected = torch.tensor([sum(each) / len(each) for each in scores]).log_softmax(-1)[drawn]
    assert abs(turn.log_probabilities[0] - float(expected)) < TOLERANCE
    assert not any(turn.log_probabilities[1:])


# --- sequences and files -------------------------------------------------------------------------------------------


def turn(prompt: tuple[int, ...], sampled: tuple[int, ...], reward: float = 0.0) -> TurnTrace:
    return TurnTrace(prompt, sampled, tuple(-0.5 * token for token in sampled), reward)


def test_turns_that_continue_each_other_are_one_sequence() -> None:
    episode = EpisodeTrace(3, (turn((1, 2), (3, 4), 0.5), turn((1, 2, 3, 4, 5), (6,), 1.0)))
    (found,) = sequences(episode)
    assert found.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert found.mask.tolist() == [False, False, True, True, False, True]
    assert found.log_probabilities.tolist() == [0, 0, -1.5, -2, 0, -3]
    assert found.rewards.tolist() == [0, 0, 0, 0.5, 0, 1]


@pytest.mark.parametrize("prompt", [(1, 2, 3, 9, 5), (1, 2, 3), (7,)])
def test_a_prompt_that_was_put_into_tokens_anew_begins_a_sequence(prompt: tuple[int, ...]) -> None:
    """Its tokens are not those that were sampled, although its text may be the same."""
    episode = EpisodeTrace(3, (turn((1, 2), (3, 4)), turn(prompt, (6,))))
    assert [found.tokens.tolist() for found in sequences(episode)] == [[1, 2, 3, 4], [*prompt, 6]]
    assert [int(found.mask.sum()) for found in sequences(episode)] == [2, 1]


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = Trace(EvalId(3, 1), 2**64 - 1, (EpisodeTrace(3, (turn((1, 2), (3, 4)),)),))
    name = write_trace(tmp_path / "traces", trace)
    assert read_trace(tmp_path / "traces", EvalId(3, 1), name) == trace
    assert [path.name for path in (tmp_path / "traces").iterdir()] == [f"3.1-{name}.trace"]
    other = write_trace(tmp_path / "traces", msgspec.structs.replace(trace, eval_id=EvalId(3, 1, 1)))
    remove_traces(tmp_path / "traces", EvalId(3, 1))
    assert [path.name for path in (tmp_path / "traces").iterdir()] == [f"3.1r1-{other}.trace"]


def test_a_trace_that_is_missing_damaged_or_of_another_evaluation_is_refused(tmp_path: Path) -> None:
    eval_id = EvalId(3, 1)
    name = write_trace(tmp_path, Trace(eval_id, 7, ()))
    with pytest.raises(StoreError, match=r"the trace of evaluation 3\.2 is missing"):
        read_trace(tmp_path, EvalId(3, 2), name)
    path = trace_file(tmp_path, eval_id, name)
    path.rename(trace_file(tmp_path, EvalId(3, 2), name))
    with pytest.raises(StoreError, match=r"is of evaluation 3\.1, and not of 3\.2"):
        read_trace(tmp_path, EvalId(3, 2), name)
    path.write_bytes(trace_file(tmp_path, EvalId(3, 2), name).read_bytes()[:-1])
    with pytest.raises(StoreError, match="is damaged"):
        read_trace(tmp_path, eval_id, name)
