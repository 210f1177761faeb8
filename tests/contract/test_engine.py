"""The contract of engines, run on every adapter: transformers and vLLM with the tiny Llama, the laboratory with a model
of its own. vLLM is started once for all of it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from builders import with_step
from engine_cases import BLOCK_SIZE, MAX_MODEL_LEN, MEMBER, PROMPT, commit, settings
from repository import REAL_MODEL, SUPPORT

from hpc_es.config.schema import ModelConfig, SamplingConfig
from hpc_es.engine import start_engine
from hpc_es.engine.base import Engine
from hpc_es.engine.gate import to_the_end
from hpc_es.errors import ConfigError, EngineError, EnvError, HpcEsError, ModelError
from hpc_es.params import checkpoint
from hpc_es.params.arena import Arena
from hpc_es.params.lab_model import write_lab_model
from hpc_es.params.models import get_model
from hpc_es.params.tiny_llama import write_tiny_llama
from hpc_es.paths import RunPaths
from hpc_es.records import Member, OptimiserStep

T = TypeVar("T")

VLLM = [pytest.mark.vllm, pytest.mark.slow]
BOTH = ["transformers", pytest.param("vllm", marks=VLLM)]
EVERY = [*BOTH, "lab"]
GREEDY = SamplingConfig(max_tokens=24)
CORRUPTIBLE = {"lab": "readout.weight", "vllm": "model.layers.1.mlp.down_proj.weight"}
CORRUPTIBLE["transformers"] = CORRUPTIBLE["vllm"]
FACTS = {"lab": {"numpy"}, "vllm": {"vllm", "torch", "transformers"}, "transformers": {"torch", "transformers"}}


@dataclass
class Bench:
    """An engine together with the event loop that it lives in."""

    kind: str
    model: ModelConfig
    engine: Any
    run: Callable[[Coroutine[Any, Any, T]], T]

    def logits(self, member: Member | None) -> list[float]:
        self.run(self.engine.perturb(member))
        return self.run(self.engine.logits(PROMPT))

    def generate(self, sampling: SamplingConfig = GREEDY, *, seed: int = 1, **choices: Any) -> Any:
        return self.run(self.engine.generate(PROMPT, sampling, seed=seed, **choices))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model")), dtype="float32")


@pytest.fixture(scope="module")
def lab_model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(path=str(write_lab_model(tmp_path_factory.mktemp("lab") / "model", 16, seed=2)), dtype="float32")


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, model: ModelConfig, lab_model: ModelConfig) -> Iterator[Bench]:
    """Any engine; the weights are left at whatever the test before wrote, theta at theta_0."""
    yield from opened(request.param, lab_model if request.param == "lab" else model)


@pytest.fixture(scope="module")
def llama_reference(model: ModelConfig) -> Iterator[Bench]:
    """A transformers engine that nothing else has touched."""
    yield from opened("transformers", model)


@pytest.fixture(scope="module")
def lab_reference(lab_model: ModelConfig) -> Iterator[Bench]:
    yield from opened("lab", lab_model)


@pytest.fixture
def reference(bench: Bench, request: pytest.FixtureRequest) -> Bench:
    """An engine that must give the same answers, and that nothing else has touched."""
    return request.getfixturevalue("lab_reference" if bench.kind == "lab" else "llama_reference")


def opened(kind: str, model: ModelConfig) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        engine = runner.run(_start(kind, model))
        yield Bench(kind, model, engine, runner.run)
        runner.run(engine.close())


async def _start(kind: str, model: ModelConfig) -> Engine:
    if kind == "transformers":
        return await start_engine(model, settings(kind), threads=1)
    if kind == "lab":
        from hpc_es.engine.lab import LabEngine

        class Unhurried(LabEngine):
            """Answers as slowly as a language model, for tests that catch a request in flight."""

            async def _breathe(self) -> None:
                await asyncio.sleep(0.001)

        return await Unhurried.start(model, settings(kind), threads=1)
    from hpc_es.engine.vllm import VllmEngine

    class Corruptible(VllmEngine):
        extension = "corruptible_extension.CorruptibleExtension"

    return await Corruptible.start(model, settings(kind), threads=1)


def in_every_engine(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("bench", EVERY, indirect=True)(test)


def in_vllm(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.vllm(pytest.mark.slow(pytest.mark.parametrize("bench", ["vllm"], indirect=True)(test)))


@in_every_engine
def test_an_engine_starts_at_theta_0_and_describes_itself(bench: Bench) -> None:
    digest = Arena.from_pretrained(bench.model.path).digest()
    assert bench.engine.version == 0
    assert bench.engine.digest == bench.engine.info.base_digest == digest
    assert FACTS[bench.kind] | {"engine", "device", "dtype"} <= bench.engine.info.facts.keys()
    assert bench.engine.info.facts["engine"] == bench.kind


@in_every_engine
@pytest.mark.parametrize("member", [None, MEMBER, Member(seed=5, sign=1, sigma=0.02)])
def test_the_same_member_has_the_same_logits_everywhere(bench: Bench, reference: Bench, member: Member | None) -> None:
    np.testing.assert_allclose(bench.logits(member), reference.logits(member), rtol=1e-4)


@in_every_engine
def test_logits_are_log_probabilities_and_differ_between_members(bench: Bench) -> None:
    centre, perturbed = np.array(bench.logits(None)), np.array(bench.logits(MEMBER))
    assert np.exp(centre).sum() == pytest.approx(1, abs=1e-4)
    assert np.abs(centre - perturbed).max() > 0.01


@in_every_engine
def test_subspaces_and_sign_reach_the_live_model(bench: Bench, reference: Bench) -> None:
    part = Member(seed=9, sign=1, sigma=0.04, subspace=1, num_subspaces=4, partition_seed=3)
    whole, other = Member(seed=9, sign=1, sigma=0.04), Member(seed=9, sign=-1, sigma=0.04)
    np.testing.assert_allclose(bench.logits(part), reference.logits(part), rtol=1e-4)
    assert bench.logits(part) != bench.logits(whole) != bench.logits(other)


@in_every_engine
def test_the_centre_is_the_same_bits_after_200_members(bench: Bench) -> None:
    before, text = bench.logits(None), bench.generate()
    for seed in range(200):
        bench.run(bench.engine.perturb(Member(seed=seed, sign=1, sigma=0.1)))
    assert bench.logits(None) == before
    assert bench.generate() == text


@in_every_engine
def test_weights_do_not_change_under_a_request(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.engine.perturb(None)
        request = asyncio.create_task(bench.engine.generate(PROMPT, SamplingConfig(max_tokens=100), seed=1))
        await asyncio.sleep(0.02)
        for change in (bench.engine.perturb(MEMBER), bench.engine.update([commit(1)]), bench.engine.load(None)):
            with pytest.raises(EngineError, match="in flight"):
                await change
        await request
        await bench.engine.perturb(MEMBER)

    bench.run(scenario())


@in_every_engine
def test_a_cancelled_request_is_no_longer_in_flight(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.engine.perturb(None)
        request = asyncio.create_task(bench.engine.generate(PROMPT, SamplingConfig(max_tokens=100), seed=1))
        await asyncio.sleep(0.02)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await bench.engine.perturb(MEMBER)

    bench.run(scenario())


@in_every_engine
def test_many_requests_at_once_get_their_own_answers(bench: Bench) -> None:
    async def scenario() -> list[Any]:
        await bench.engine.perturb(None)
        hot = SamplingConfig(max_tokens=12, temperature=1.0)
        return await asyncio.gather(*(bench.engine.generate(PROMPT, hot, seed=seed) for seed in (1, 2, 3, 4, 5, 6, 1)))

    answers = bench.run(scenario())
    assert answers[0] == answers[-1]
    assert len({answer.text for answer in answers}) > 3


@in_every_engine
def test_a_seed_decides_the_answer(bench: Bench) -> None:
    hot = SamplingConfig(max_tokens=12, temperature=1.0, top_k=50, top_p=0.95)
    bench.run(bench.engine.perturb(None))
    assert bench.generate(hot, seed=2**64 - 1) == bench.generate(hot, seed=2**64 - 1)
    assert bench.generate(hot, seed=1) != bench.generate(hot, seed=2)


@in_every_engine
def test_greedy_answers_agree_with_the_reference(bench: Bench, reference: Bench) -> None:
    for sampling in (GREEDY, SamplingConfig(max_tokens=24, presence_penalty=2.0)):
        for each in (bench, reference):
            each.run(each.engine.perturb(MEMBER))
        assert bench.generate(sampling) == reference.generate(sampling)
    assert bench.generate(SamplingConfig(max_tokens=24, presence_penalty=2.0)) != bench.generate()


@in_every_engine
def test_an_answer_ends_at_a_stop_string_or_is_truncated(bench: Bench) -> None:
    bench.run(bench.engine.perturb(None))
    whole = bench.generate()
    assert whole.tokens_in == len(PROMPT)
    assert whole.truncated
    assert whole.tokens_out == GREEDY.max_tokens
    stop = next(character for character in whole.text[2:] if character.isprintable() and character != "\ufffd")
    cut = bench.generate(SamplingConfig(max_tokens=24, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert not cut.truncated
    assert cut.tokens_out < whole.tokens_out


@in_every_engine
def test_an_answer_ends_at_the_end_token(bench: Bench) -> None:
    async def scenario() -> list[Any]:
        await bench.engine.perturb(None)
        flat = SamplingConfig(max_tokens=200, temperature=2.0)
        return await asyncio.gather(*(bench.engine.generate(PROMPT[:4], flat, seed=seed) for seed in range(6)))

    answers = bench.run(scenario())
    assert [answer.truncated for answer in answers] == [answer.tokens_out == 200 for answer in answers]
    assert not all(answer.truncated for answer in answers)


@in_every_engine
def test_a_prompt_is_given_the_room_that_is_left(bench: Bench) -> None:
    bench.run(bench.engine.perturb(None))
    long = (PROMPT * 3)[: MAX_MODEL_LEN - 2]
    answer = bench.run(bench.engine.generate(long, GREEDY, seed=1))
    assert (answer.tokens_out, answer.truncated) == (2, True)
    with pytest.raises(EngineError, match="max_model_len"):
        bench.run(bench.engine.generate((PROMPT * 3)[:MAX_MODEL_LEN], GREEDY, seed=1))
    with pytest.raises(EngineError, match="no tokens"):
        bench.run(bench.engine.generate([], GREEDY, seed=1))


@in_every_engine
def test_choices_limit_the_answer_to_the_likeliest_of_them(bench: Bench) -> None:
    logits = bench.logits(None)
    choices = [str(digit) for digit in range(1, 10)]
    token = {choice: bench.engine.tokenizer.encode(choice)[0] for choice in choices}
    answer = bench.generate(choices=choices)
    assert answer.text == max(choices, key=lambda choice: logits[token[choice]])
    assert (answer.tokens_out, answer.truncated) == (1, False)
    hot = SamplingConfig(temperature=1.0)
    assert {bench.generate(hot, seed=seed, choices=["1", "2"]).text for seed in range(20)} == {"1", "2"}


@in_every_engine
@pytest.mark.parametrize(("choices", "message"), [([""], "no tokens"), (["1", "1"], "same tokens"), ([], "empty")])
def test_choices_that_cannot_be_distinguished_are_refused(bench: Bench, choices: list[str], message: str) -> None:
    bench.run(bench.engine.perturb(None))
    with pytest.raises(EnvError, match=message):
        bench.generate(choices=choices)


def log_probabilities(bench: Bench, answers: list[tuple[int, ...]]) -> list[list[float]]:
    return bench.run(bench.engine.log_probabilities(PROMPT, answers))


@in_every_engine
@pytest.mark.parametrize("member", [None, MEMBER])
def test_the_tokens_of_a_choice_have_the_probabilities_that_they_have_one_by_one(
    bench: Bench, reference: Bench, member: Member | None
) -> None:
    """Also when the prefix cache holds the choices already: the long one goes beyond the prompt's last block."""
    texts = ["1", "go north", "go", "open the chest", "x" * 20, *(f"take {number}" for number in range(20))]
    answers = [tuple(bench.engine.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    assert len(PROMPT) // BLOCK_SIZE < (len(PROMPT) + len(answers[4])) // BLOCK_SIZE
    bench.run(bench.engine.perturb(member))
    reference.run(reference.engine.perturb(member))
    found = log_probabilities(bench, answers)
    for answer, scores in list(zip(answers, found, strict=True))[:5]:
        one_by_one = [
            reference.run(reference.engine.logits([*PROMPT, *answer[:at]]))[token] for at, token in enumerate(answer)
        ]
        np.testing.assert_allclose(scores, one_by_one, rtol=1e-4)
    for flat, again in zip(found, log_probabilities(bench, answers), strict=True):
        np.testing.assert_allclose(flat, again, rtol=1e-4)


@in_every_engine
@pytest.mark.parametrize("how", ["mean", "sum"])
def test_choices_of_any_length_are_ranked_by_their_score_and_alike_in_every_engine(
    bench: Bench, reference: Bench, how: Any
) -> None:
    sampling, winners = SamplingConfig(choice_score=how), set()
    for seed in range(6):
        member = Member(seed=seed, sign=1, sigma=0.05)
        choices = [f"{word} {seed}" for word in ("go", "take the lamp", "open")] + ["y", "wait"]
        for each in (bench, reference):
            each.run(each.engine.perturb(member))
        answers = [tuple(bench.engine.tokenizer.encode(choice, add_special_tokens=False)) for choice in choices]
        scores = [sum(each) / (len(each) if how == "mean" else 1) for each in log_probabilities(bench, answers)]
        answer = bench.generate(sampling, choices=choices)
        assert answer.text == choices[int(np.argmax(scores))]
        assert (answer.tokens_in, answer.tokens_out) == (len(PROMPT), len(answers[choices.index(answer.text)]))
        assert reference.generate(sampling, choices=choices) == answer
        winners.add(answer.text[:4])
    assert winners == {"y"} if how == "sum" else len(winners) > 1


@in_every_engine
def test_a_temperature_draws_among_choices_by_their_score(bench: Bench) -> None:
    bench.run(bench.engine.perturb(None))
    hot, choices = SamplingConfig(temperature=1.0), ["ab", "cd", "ef"]
    drawn = [bench.generate(hot, seed=seed, choices=choices).text for seed in range(40)]
    assert drawn == [bench.generate(hot, seed=seed, choices=choices).text for seed in range(40)]
    assert set(drawn) == set(choices)
    assert {
        bench.generate(SamplingConfig(top_k=1, temperature=1.0), seed=s, choices=choices).text for s in range(9)
    } == {bench.generate(choices=choices).text}


@in_every_engine
def test_choices_that_do_not_fit_behind_the_prompt_are_refused(bench: Bench) -> None:
    bench.run(bench.engine.perturb(None))
    long = (PROMPT * 3)[: MAX_MODEL_LEN - 4]
    assert bench.run(bench.engine.generate(long, GREEDY, seed=1, choices=["ab", "c"])).text in ("ab", "c")
    with pytest.raises(EngineError, match="a choice of 4 tokens does not fit"):
        bench.run(bench.engine.generate(long, GREEDY, seed=1, choices=["abcd", "c"]))


@pytest.mark.parametrize("kind", EVERY)
def test_an_optimisers_state_is_in_the_digest_that_an_engine_proves(
    kind: str, model: ModelConfig, lab_model: ModelConfig, tmp_path: Path
) -> None:
    """vLLM with two ranks, each of which updates its share of m and v."""
    mine = lab_model if kind == "lab" else model
    step = OptimiserStep("adam", 5e-4, 0.9, 0.1, 0.999, 0.001, 1e-8)
    commits = [with_step(commit(version), step) for version in (1, 2, 3)]
    arena = Arena.from_pretrained(mine.path, optimiser="adam")
    arena.apply(commits[:2])
    folder = checkpoint.write(RunPaths(tmp_path), arena)
    arena.apply(commits[2:])
    with asyncio.Runner() as runner:
        extra = {"tensor_parallel": 2} if kind == "vllm" else {}
        engine = runner.run(start_engine(mine, settings(kind, **extra), threads=1, optimiser="adam"))
        try:
            for way in (lambda: engine.update(commits), lambda: engine.load(folder)):
                runner.run(way())
                runner.run(engine.update(commits[engine.version :]))
                updated = engine.digest
                runner.run(engine.perturb(MEMBER))
                assert updated == engine.digest == arena.digest()
        finally:
            runner.run(engine.close())


@in_every_engine
def test_updates_reach_arena_and_live_model(bench: Bench, reference: Bench) -> None:
    arena = Arena.from_pretrained(bench.model.path)
    base = bench.logits(None)
    for each in (bench, reference):
        each.run(each.engine.update([commit(1), commit(2)]))
        with pytest.raises(EngineError, match="perturb first"):
            each.generate()
        each.run(each.engine.update([commit(3)]))
    arena.apply([commit(1), commit(2), commit(3)])
    assert bench.engine.version == 3
    assert bench.engine.digest == arena.digest()
    updated = bench.logits(None)
    assert updated != base
    np.testing.assert_allclose(updated, reference.logits(None), rtol=1e-4)
    for each in (bench, reference):
        each.run(each.engine.load(None))
        assert (each.engine.version, each.engine.digest) == (0, each.engine.info.base_digest)
    assert bench.logits(None) == base


@in_every_engine
def test_a_cancelled_update_is_either_done_or_not_begun(bench: Bench) -> None:
    async def scenario() -> None:
        update = asyncio.create_task(bench.engine.update([commit(1)]))
        await asyncio.sleep(0)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update

    arena = Arena.from_pretrained(bench.model.path)
    bench.run(scenario())
    arena.apply([commit(version) for version in range(1, bench.engine.version + 1)])
    assert bench.engine.digest == arena.digest()
    bench.run(bench.engine.load(None))


@in_every_engine
def test_a_checkpoint_is_loaded_and_updates_continue_from_it(bench: Bench, tmp_path: Path) -> None:
    arena = Arena.from_pretrained(bench.model.path)
    arena.apply([commit(1), commit(2)])
    folder = checkpoint.write(RunPaths(tmp_path), arena)
    bench.run(bench.engine.load(folder))
    assert (bench.engine.version, bench.engine.digest) == (2, arena.digest())
    bench.run(bench.engine.update([commit(3)]))
    arena.apply([commit(3)])
    assert bench.engine.digest == arena.digest()
    bench.run(bench.engine.load(None))


@in_every_engine
def test_commits_out_of_order_are_refused_and_change_nothing(bench: Bench) -> None:
    with pytest.raises(HpcEsError, match="do not continue"):
        bench.run(bench.engine.update([commit(2)]))
    assert (bench.engine.version, bench.engine.digest) == (0, bench.engine.info.base_digest)
    bench.run(bench.engine.perturb(None))
    bench.run(bench.engine.probe())


@in_every_engine
@pytest.mark.parametrize("member", [None, MEMBER])
def test_the_probe_names_a_live_weight_that_differs(bench: Bench, member: Member | None) -> None:
    bench.run(bench.engine.perturb(member))
    bench.run(bench.engine.probe())
    flip_one_bit(bench)
    with pytest.raises(EngineError, match=re.escape(CORRUPTIBLE[bench.kind].removesuffix(".weight"))):
        bench.run(bench.engine.probe())
    bench.run(bench.engine.probe())


def flip_one_bit(bench: Bench) -> None:
    name = CORRUPTIBLE[bench.kind]
    if bench.kind == "vllm":
        bench.run(bench.engine._rpc("es_flip_one_bit", name))
        return
    if bench.kind == "lab":
        bench.engine._live.parameters[name].view(np.uint32).flat[100] ^= 1
        return
    parameter = dict(bench.engine._live.model.named_parameters())[name]
    parameter.data.view(torch.int32).flatten()[parameter.numel() // 2] ^= 1


@in_vllm
def test_cached_prefixes_would_leak_if_they_were_not_reset(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt spans cache blocks, so the other tests would notice a missing reset; a refused one is an error."""

    async def no_reset() -> None:
        pass

    right = bench.logits(MEMBER)
    bench.logits(None)
    monkeypatch.setattr(bench.engine, "_forget_prefixes", no_reset)
    assert np.abs(np.array(bench.logits(MEMBER)) - right).max() > 1e-3
    monkeypatch.undo()
    assert bench.logits(MEMBER) == right

    async def refused(self: Any) -> bool:
        return False

    monkeypatch.setattr(type(bench.engine._llm), "reset_prefix_cache", refused)
    with pytest.raises(EngineError, match="refused"):
        bench.run(bench.engine.perturb(None))
    with pytest.raises(EngineError, match="perturb first"):
        bench.generate()


@in_vllm
def test_a_sampling_setting_that_vllm_refuses_is_named(bench: Bench) -> None:
    bench.run(bench.engine.perturb(None))
    with pytest.raises(ConfigError, match="temperature"):
        bench.generate(SamplingConfig().model_copy(update={"temperature": 5.0}))


@in_vllm
def test_vllms_processes_sleep_while_they_wait_for_each_other(bench: Bench) -> None:
    bench.logits(None)
    before = [cpu_ticks(pid) for pid in bench.engine._processes]
    time.sleep(0.8)  # spinning would last a second
    spent = [cpu_ticks(pid) - ticks for pid, ticks in zip(bench.engine._processes, before, strict=True)]
    assert max(spent) <= 0.1 * 0.8 * os.sysconf("SC_CLK_TCK")


def cpu_ticks(pid: int) -> int:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@in_vllm
def test_the_engine_leaves_the_environment_of_its_process_alone(bench: Bench) -> None:
    assert "HF_HUB_OFFLINE" not in os.environ
    assert "VLLM_HOST_IP" not in os.environ


@pytest.mark.parametrize("kind", EVERY)
def test_a_missing_or_quantised_model_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        asyncio.run(start_engine(ModelConfig(path=str(tmp_path / "nowhere")), settings(kind), threads=1))
    quantised = tmp_path / "quantised"
    folder = write_lab_model(quantised, 4) if kind == "lab" else write_tiny_llama(quantised)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="gptq"):
        asyncio.run(start_engine(ModelConfig(path=str(folder)), settings(kind), threads=1))


def test_cancelled_work_is_waited_for() -> None:
    async def scenario() -> list[str]:
        events: list[str] = []

        async def work() -> None:
            await asyncio.sleep(0.05)
            events.append("done")

        task = asyncio.create_task(to_the_end(work(), lambda: events.append("cancelled")))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return events

    assert asyncio.run(scenario()) == ["cancelled", "done"]


def test_an_untied_head_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_tiny_llama(tmp_path / "untied", tied=False)), dtype="float32")
    with asyncio.Runner() as runner:
        engine = runner.run(start_engine(model, settings("transformers"), threads=1))
        only_head = model.model_copy(update={"include": ("lm_head*",)})
        scoped = runner.run(start_engine(only_head, settings("transformers"), threads=1))
        bench, head = (Bench("transformers", model, each, runner.run) for each in (engine, scoped))
        assert bench.logits(None) == head.logits(None)
        assert bench.logits(None) != head.logits(MEMBER) != bench.logits(MEMBER)
        for each in (engine, scoped):
            runner.run(each.close())


def test_bfloat16_is_written_as_the_arena_rounds_it(tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_tiny_llama(tmp_path / "model")), dtype="bfloat16")
    with asyncio.Runner() as runner:
        engine = runner.run(start_engine(model, settings("transformers"), threads=1))
        bench = Bench("transformers", model, engine, runner.run)
        assert bench.logits(None) != bench.logits(MEMBER)
        live = dict(bench.engine._live.model.named_parameters())["model.norm.weight"]
        expected = Arena.from_pretrained(model.path).perturbed("model.norm.weight", MEMBER, "bfloat16")
        assert (live.detach().view(torch.uint16).numpy() == expected).all()
        runner.run(bench.engine.close())


def test_the_laboratory_computes_no_other_model(model: ModelConfig) -> None:
    with pytest.raises(ModelError, match=r"of type llama.*lab-10k"):
        asyncio.run(start_engine(model, settings("lab"), threads=1))


def test_the_laboratory_rounds_to_the_type_that_a_language_model_would_have(lab_model: ModelConfig) -> None:
    with asyncio.Runner() as runner:
        for dtype in ("bfloat16", "float16"):
            model = lab_model.model_copy(update={"dtype": dtype})
            bench = Bench("lab", model, runner.run(start_engine(model, settings("lab"), threads=1)), runner.run)
            bench.logits(MEMBER)
            rounded = Arena.from_pretrained(model.path).perturbed("embedding.weight", MEMBER, dtype)
            expected = rounded if dtype == "float16" else (rounded.astype(np.uint32) << 16).view(np.float32)
            assert (bench.engine._live.parameters["embedding.weight"] == expected).all()
            bench.run(bench.engine.probe())
            runner.run(bench.engine.close())


def test_a_missing_engine_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, model: ModelConfig) -> None:
    monkeypatch.setattr("hpc_es.engine.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"hpc_es\[cpu\]"):
        asyncio.run(start_engine(model, settings("vllm"), threads=1))


def test_the_factory_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, hpc_es.engine, hpc_es.engine.base; sys.exit(bool({'torch', 'vllm'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.model
def test_the_real_model_agrees_in_both_engines() -> None:
    """SmolLM2-135M, fp32, one member: log-probabilities to 1e-4 relative, the same greedy answer."""
    model = ModelConfig(path=str(get_model("smollm2-135m", REAL_MODEL)), dtype="float32")
    member = Member(seed=11, sign=1, sigma=1e-3)
    with asyncio.Runner() as runner:
        benches = []
        for kind in ("vllm", "transformers"):
            started = runner.run(start_engine(model, settings(kind, kv_cache_mib=64), threads=1))
            benches.append(Bench(kind, model, started, runner.run))
        prompt = benches[0].engine.tokenizer.encode("The capital of France is Paris. The capital of Italy is")
        logits, answers = [], []
        for bench in benches:
            for each in (None, member):
                runner.run(bench.engine.perturb(each))
                logits.append(runner.run(bench.engine.logits(prompt)))
            answers.append(runner.run(bench.engine.generate(prompt, SamplingConfig(max_tokens=8), seed=1)))
            runner.run(bench.engine.close())
    np.testing.assert_allclose(logits[0], logits[2], rtol=1e-4)
    np.testing.assert_allclose(logits[1], logits[3], rtol=1e-4)
    assert np.abs(np.array(logits[1]) - logits[0]).max() > 0.01
    assert answers[0] == answers[1]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("key", "message"), [("max_num_seq", "did you mean 'max_num_seqs'"), ("seed", "set by other")])
def test_extra_arguments_of_vllm_are_checked(model: ModelConfig, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(start_engine(model, settings("vllm", extra={key: 1}), threads=1))


@pytest.mark.vllm
@pytest.mark.slow
def test_seeded_answers_survive_more_prompts_than_a_step_computes(model: ModelConfig) -> None:
    async def scenario() -> None:
        engine = await start_engine(
            model, settings("vllm", prefix_cache=False, extra={"max_num_batched_tokens": MAX_MODEL_LEN}), threads=1
        )
        hot = SamplingConfig(max_tokens=12, temperature=1.0)
        try:
            alone = [await engine.generate(PROMPT, hot, seed=seed) for seed in range(4)]
            assert await asyncio.gather(*(engine.generate(PROMPT, hot, seed=seed) for seed in range(4))) == alone
        finally:
            await engine.close()

    assert 4 * len(PROMPT) > MAX_MODEL_LEN
    asyncio.run(scenario())


@pytest.mark.vllm
@pytest.mark.slow
def test_two_ranks_share_the_arena_and_die_with_the_front(
    model: ModelConfig, llama_reference: Bench, tmp_path: Path
) -> None:
    log = (tmp_path / "front.log").open("w")
    front = subprocess.Popen(
        [sys.executable, SUPPORT / "engine_front.py", model.path], stdout=subprocess.PIPE, stderr=log
    )
    try:
        assert front.stdout is not None
        lines = (line for line in front.stdout if line.startswith(b"{"))
        said = json.loads(next(lines))
        assert said["weights"] == "load_weights: engine.direct_map is off"
        front.kill()
        front.wait()
        assert len(said["processes"]) == 3
        assert gone_within(said["processes"], seconds=5)
        assert not Path(said["scratch"]).exists()
        assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(said["shared_memory"])]
        assert said["queues"]
        assert not [path for path in said["queues"] if Path(path).exists()]
    finally:
        front.kill()
    llama_reference.run(llama_reference.engine.update([commit(1)]))
    assert said["digest"] == llama_reference.engine.digest
    np.testing.assert_allclose(said["logits"], llama_reference.logits(MEMBER), rtol=1e-4)
    llama_reference.run(llama_reference.engine.load(None))


def gone_within(pids: list[int], seconds: float) -> bool:
    from hpc_es.engine.lifetime import process_start

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(process_start(pid) is None for pid in pids):
            return True
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return False
