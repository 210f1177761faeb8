"""The planner against published numbers, against the simulator and the messages themselves, and its own promises."""

import math
from typing import Any

import pytest
from builders import Counted, built_commit
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import EPISODE, H100, QWEN_4B, QWEN_27B, config_of, of, planned
from theatre import make_config

from hpc_es.errors import ConfigError
from hpc_es.planner import GPUS, Shape, Tokens, assume
from hpc_es.planner.compute import compute_of
from hpc_es.planner.memory import GIB, gpu_memory, memory_of
from hpc_es.planner.phases import phases_of
from hpc_es.planner.wire import wire_of
from hpc_es.records import EvalId
from hpc_es.simulator.durations import parse
from hpc_es.simulator.simulate import simulate
from hpc_es.transport.messages import decode_commit, encode_commit

# --- what is published ------------------------------------------------------------------------------------------


# More of it, held out from what it was fitted to: test_plan_published.py.


@pytest.mark.parametrize(("parameters", "gib"), [(QWEN_4B, 8.41), (QWEN_27B, 51.75)])
def test_weights_take_the_published_memory(parameters, gib):
    assert gpu_memory(config_of(), of(parameters), H100).weights / GIB == pytest.approx(gib, abs=0.01)


def test_evaluations_are_counted_once_for_theta_0_for_the_last_and_for_those_between():
    config = make_config(run={"num_updates": 25}, eval={"every": 10, "num_tasks": 8, "repeats": 3})
    flops = compute_of(config, of(1e6), EPISODE, H100)
    assert flops.evaluations == 2 * 4 * 8 * 3 * 1e6 * EPISODE.total  # theta_0, 10, 20 and 25


# --- memory -----------------------------------------------------------------------------------------------------


def test_tensor_parallel_ranks_share_weights_theta_and_cache():
    one, two = (
        gpu_memory(config_of(engine={"base": "device", "tensor_parallel": ranks}), of(QWEN_4B), H100)
        for ranks in (1, 2)
    )
    assert (two.weights, two.theta) == (one.weights / 2, one.theta / 2)
    assert two.kv_cache / two.sequences == pytest.approx(one.kv_cache / one.sequences / 2)


def test_theta_is_on_the_device_only_where_vllm_leaves_room():
    assert gpu_memory(config_of(), of(QWEN_4B), H100).base == "device"  # theta and weights take less than half
    assert gpu_memory(config_of(), of(QWEN_27B), H100).base == "host"
    shape = of(8e9)
    assert gpu_memory(config_of(), shape, H100).base == "host"
    needs = memory_of(config_of(), shape, H100)
    assert needs.to_device is not None
    key, value = needs.to_device.split("=")
    assert key == "engine.kv_cache_mib"
    roomy = gpu_memory(config_of(engine={"kv_cache_mib": int(value)}), shape, H100)
    assert roomy.base == "device"
    assert roomy.is_ample
    assert memory_of(config_of(engine={"kv_cache_mib": int(value)}), shape, H100).to_device is None
    assert gpu_memory(config_of(engine={"base": "host", "kv_cache_mib": int(value)}), shape, H100).base == "host"
    assert gpu_memory(config_of(), of(135e6), H100).base == "device"  # 0.5 GiB find room anyway
    through_load_weights = config_of(engine={"direct_map": False})
    assert gpu_memory(through_load_weights, of(135e6), H100).base == "host"
    assert planned(through_load_weights, of(135e6)).phases.base == "cores"


def test_an_optimiser_doubles_or_triples_theta():
    arena = {kind: memory_of(config_of(es={"optimiser": {"kind": kind}}), of(1e9), H100).arena for kind in
             ("none", "momentum", "adam")}  # fmt: skip
    assert arena == {"none": 4e9, "momentum": 8e9, "adam": 12e9}


@given(
    st.sampled_from(sorted(GPUS)),
    st.sampled_from([0.5e9, 4.5e9, 8e9, 27.78e9]),
    st.sampled_from(["auto", "host", "device"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from([2048, 32768]),
    st.sampled_from([None, 1024, 16384]),
)
@settings(max_examples=60, deadline=None)
def test_every_remedy_is_one(gpu, parameters, base, dtype, length, cache):
    assumed, shape = assume(gpu), of(parameters)
    engine = {"base": base, "max_model_len": length, "kv_cache_mib": cache}
    config = config_of(engine=engine, model={"dtype": dtype}, es={"tasks_per_member": 64})
    needs = memory_of(config, shape, assumed)
    assert not (needs.gpu.is_ample and needs.remedies)
    for remedy in needs.remedies:
        changes = [override.split("=") for override in remedy.split()]
        changed = config
        for key, value in changes:
            section, name = key.split(".")
            part = getattr(changed, section).model_copy(update={name: int(value) if value.isdigit() else value})
            changed = changed.model_copy(update={section: part})
        after = gpu_memory(changed, shape, assumed)
        assert after.is_ample or (after.fits and not needs.gpu.fits)


def test_only_ranks_that_share_the_heads_out_evenly_are_offered():
    smol = of(QWEN_27B, heads=9, kv_heads=3)  # SmolLM2's heads
    assert memory_of(config_of(model={"dtype": "float32"}), smol, H100).remedies == (
        "model.dtype=bfloat16",
        "engine.tensor_parallel=3",
    )
    assert memory_of(config_of(engine={"kind": "transformers"}), of(QWEN_27B), assume("a10")).remedies == ()
    seven_billion = of(QWEN_27B, heads=28, kv_heads=4)  # 7 would cut groups that share keys and values
    assert memory_of(config_of(), seven_billion, assume("a10")).remedies == ("engine.tensor_parallel=4",)
    assert planned(config_of(engine={"tensor_parallel": 3}), smol).num_gpus == 6
    with pytest.raises(ConfigError, match=r"tensor_parallel=2 does not divide the model's 9 .* one of 1, 3, 9$"):
        planned(config_of(engine={"tensor_parallel": 2}), smol)


def test_a_plan_that_does_not_fit_says_so():
    small = memory_of(config_of(), of(QWEN_27B), assume("a10"))
    assert not small.gpu.fits
    assert any("tensor_parallel" in remedy for remedy in small.remedies)
    both = memory_of(config_of(engine={"base": "device"}), of(QWEN_27B), assume("a10"))
    assert both.remedies == ("engine.base=host engine.tensor_parallel=4",)


def test_the_cache_is_cut_over_ranks_as_far_as_there_are_heads():
    eight, sixteen = (
        gpu_memory(config_of(engine={"tensor_parallel": ranks, "kv_cache_mib": 1024}), of(QWEN_27B), H100)
        for ranks in (8, 16)
    )
    assert eight.sequences == sixteen.sequences == 2**30 / (2048 * 2 * 2 * 36 * 128)


def test_too_small_a_cache_is_reported_with_the_size_that_fits_all():
    token = 2 * 2 * 36 * 8 * 128
    config = config_of(engine={"kv_cache_mib": 1024, "max_concurrent": 32}, es={"tasks_per_member": 100})
    needs = memory_of(config, of(QWEN_4B), H100)
    assert needs.gpu.fits
    assert not needs.gpu.is_ample
    assert f"engine.kv_cache_mib={32 * 2048 * token // 2**20}" in needs.remedies
    assert "engine.max_concurrent=3" in needs.remedies


def test_the_disk_holds_one_checkpoint_more_than_is_kept():
    config = config_of(checkpoint={"keep": 3}, es={"optimiser": {"kind": "momentum"}})
    assert memory_of(config, of(1e9), H100).checkpoints == 4 * 8e9


# --- network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "es",
    [{}, {"mirrored": True}, {"subspaces": 5}, {"optimiser": {"kind": "adam"}}, {"baseline": "centre"}],
    ids=str,
)
def test_an_update_of_30_members_costs_a_worker_less_than_the_promised_bytes(es):
    config = config_of(run={"num_updates": 200}, es={"population": 30, **es})
    assert wire_of(config, of(1e12), EPISODE, num_workers=1).per_worker < 1500


def test_the_record_is_as_long_as_that_of_a_commit_like_it():
    config = config_of(es={"population": 30})
    found = wire_of(config, of(QWEN_4B), EPISODE, num_workers=1)
    members = [
        Counted(EvalId(1, slot), 2**63 + slot**12, 1, 1e-3, 0, 0.5, 1.0, 4.7e-9 * (slot + 0.3)) for slot in range(30)
    ]
    other = encode_commit(built_commit(2, 5e-4, tuple(members)))
    assert len(decode_commit(other).consumed) == 30
    assert found.record == pytest.approx(len(other), rel=0.25)


def test_bytes_grow_with_workers_and_members_and_not_with_the_model():
    config = config_of(es={"population": 8})
    one, many = (wire_of(config, of(1e9), EPISODE, num_workers=n) for n in (1, 64))
    assert many.per_update - one.per_update == 63 * one.per_worker
    assert wire_of(config, of(1e12), EPISODE, num_workers=1).per_update == one.per_update
    longer = wire_of(config_of(es={"population": 16}), of(1e9), EPISODE, num_workers=1)
    assert longer.record > one.record
    assert longer.journal_per_update > 1.9 * one.journal_per_update


# --- time -------------------------------------------------------------------------------------------------------


def test_a_plan_and_the_simulator_agree():
    config = config_of(run={"num_updates": 10}, staleness={"mode": "natural", "max_lag": 1})
    plan = planned(config, of(QWEN_4B), workers=3)
    again = simulate(config, parse(plan.durations, population=config.es.population), num_workers=3)
    assert again.wall_clock_s == plan.simulated.wall_clock_s
    assert plan.gpu_hours == pytest.approx(3 * again.total_s / 3600)


def test_a_barrier_costs_whole_rounds_of_the_planned_seconds():
    assumed = assume("h100", ["evaluation_cv=0", "message_s=0", "start_s=0", "core_noise_g_per_s=1e6"])
    config = config_of(run={"num_updates": 5}, es={"population": 8})
    plan = planned(config, of(QWEN_4B), workers=4, assumed=assumed)
    takes = plan.phases
    assert takes.evaluation == pytest.approx(takes.perturb + takes.prompts + takes.answers + takes.turns + takes.member)
    expected = 5 * 2 * takes.evaluation + 4 * takes.catch_up
    assert plan.simulated.wall_clock_s == pytest.approx(expected, rel=1e-3)


ROUND = {
    "memory_gb_per_s": 1000,
    "bf16_tflops": 100,
    "decode_share": 0.5,
    "prefill_share": 0.5,
    "turn_s": 0.1,
    "pace": 1,
}
"""A machine with which one can reckon."""


def rollout(tokens: Tokens, shape: Shape, *, episodes: int, env: str = "sudoku", **engine: Any) -> Any:
    assumed = assume("h100", [f"{key}={value}" for key, value in ROUND.items()])
    config = config_of(task={"env": env}, engine={"max_model_len": 10_000, **engine})
    return phases_of(config, shape, tokens, gpu_memory(config, shape, assumed), assumed, num_episodes=episodes)


def test_few_sequences_are_answered_as_fast_as_weights_and_cache_are_read():
    tokens, shape = Tokens(900, 100, 1, ""), of(1e9, kv_elements=1000)
    one = rollout(tokens, shape, episodes=1)
    assert one.prompts == pytest.approx(2 * 1e9 * 900 / 50e12)
    assert one.answers == pytest.approx(100 * (2e9 + 2 * 1000 * 950) / 500e9)  # on average half of the answer is there
    assert one.turns == pytest.approx(0.1)
    two = rollout(tokens, shape, episodes=1, tensor_parallel=2)
    assert (two.prompts, two.answers) == pytest.approx((one.prompts / 2, one.answers / 2))


def test_many_sequences_are_answered_as_fast_as_they_are_computed_and_in_rounds():
    tokens, shape = Tokens(900, 100, 4, ""), of(1e9, kv_elements=None, kv_heads=None)
    takes = rollout(tokens, shape, episodes=1000, max_concurrent=500)
    assert takes.concurrent == 500
    assert takes.answers == pytest.approx(2 * 100 * 2 * 1e9 * 500 / 50e12)
    assert takes.turns == pytest.approx(2 * 4 * 0.1)


def test_a_small_cache_lets_fewer_sequences_run():
    tokens, shape = Tokens(900, 100, 10**6, ""), of(1e9, kv_elements=2**10)  # a talk that grows: 500 tokens on average
    takes = rollout(tokens, shape, episodes=200, env="math_tool", kv_cache_mib=100, max_concurrent=200)
    assert takes.concurrent == pytest.approx(100 * 2**20 / (2 * 2**10 * 500), rel=1e-3)


def test_where_every_turn_is_a_fresh_prompt_the_cache_holds_one_turn():
    tokens, shape = Tokens(900, 100, 10, ""), of(1e9, kv_elements=1000)
    fresh, grown = (rollout(tokens, shape, episodes=1, env=env).answers for env in ("sudoku", "math_tool"))
    assert fresh == pytest.approx(100 * (2e9 + 2 * 1000 * 95) / 500e9)  # 90 tokens of prompt, and half of 10
    assert grown == pytest.approx(100 * (2e9 + 2 * 1000 * 545) / 500e9)


def test_experts_that_no_token_asks_for_are_not_read():
    tokens = Tokens(900, 100, 1, "")
    whole, sparse = (rollout(tokens, of(8e9, active=active), episodes=2) for active in (8e9, 1e9))
    assert sparse.answers < 0.3 * whole.answers
    assert sparse.prompts == pytest.approx(whole.prompts / 8)


def test_a_slower_pace_makes_rollouts_longer_and_nothing_else():
    config, shape = config_of(), of(QWEN_4B)
    usual, slow = (planned(config, shape, assumed=assume("h100", [f"pace={pace}"])).phases for pace in (1, 3))
    assert slow.rollout == pytest.approx(3 * usual.rollout)
    assert (slow.perturb, slow.catch_up, slow.member) == (usual.perturb, usual.catch_up, usual.member)


def test_float32_is_computed_without_tensor_cores():
    config, shape = config_of(), of(QWEN_4B)
    slow = planned(config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float32"})}), shape)
    assert slow.phases.prompts == pytest.approx(planned(config, shape).phases.prompts * 989 / 67)


def test_ranks_share_the_passes_over_theta():
    one, four = (
        planned(config_of(engine={"tensor_parallel": ranks, "base": "host"}), of(QWEN_4B)).phases for ranks in (1, 4)
    )
    assert (four.catch_up, four.perturb) == pytest.approx((one.catch_up / 4, one.perturb / 4))


def test_durations_have_the_planned_mean_and_evaluations_last_as_long_as_they_are_big():
    config = config_of(es={"tasks_per_member": 8}, eval={"num_tasks": 100, "batch": 32})
    plan = planned(config, of(QWEN_4B))
    lasts = parse(plan.durations, population=4).evaluations
    assert lasts.median * math.exp(lasts.sigma**2 / 2) == pytest.approx(plan.phases.evaluation, rel=1e-4)
    assert math.sqrt(math.expm1(lasts.sigma**2)) == pytest.approx(0.3, rel=1e-4)
    assert 1 < lasts.eval < 4  # four times the episodes, side by side


@pytest.mark.parametrize("population", [16, 30])
def test_more_workers_never_take_longer_without_a_barrier(population):
    assumed = assume("h100", ["evaluation_cv=0"])
    config = config_of(
        run={"num_updates": 12}, es={"population": population}, staleness={"mode": "natural", "max_lag": 4}
    )
    took = [
        planned(config, of(QWEN_4B), workers=n, assumed=assumed).simulated.wall_clock_s for n in (1, 2, 3, 4, 8, 16)
    ]
    assert took == sorted(took, reverse=True)


@pytest.mark.parametrize(
    "faster",
    ["memory_gb_per_s=99999", "bf16_tflops=99999", "link_gb_per_s=9999", "core_noise_g_per_s=999", "turn_s=0"],
)
def test_a_faster_machine_makes_no_phase_longer_and_one_shorter(faster):
    config, shape, changed = config_of(engine={"base": "host"}), of(QWEN_4B), assume("h100", [faster])
    seconds = [
        [value for value in vars(phases_of(config, shape, EPISODE, gpu_memory(config, shape, assumed), assumed,
                                         num_episodes=2)).values() if isinstance(value, float)]
        for assumed in (H100, changed)
    ]  # fmt: skip
    assert all(after <= before for before, after in zip(*seconds, strict=True))
    assert seconds[0] != seconds[1]


def test_a_member_of_a_subspace_costs_the_update_its_share():
    assumed = assume("h100", ["memory_gb_per_s=1e9", "link_gb_per_s=1e9"])  # noise alone
    plain, parted = (
        planned(config_of(es={"population": 8, "subspaces": k}), of(QWEN_4B), assumed=assumed).phases for k in (1, 4)
    )
    assert plain.catch_up == pytest.approx(8 * QWEN_4B / 150e9)
    assert parted.catch_up == pytest.approx(plain.catch_up / 4)


def test_a_head_with_a_gpu_streams_theta_through_it():
    config = config_of(slurm={"head": {"gpus_per_task": 1}})
    assert planned(config, of(QWEN_4B)).phases.head == "stream"
    assert planned(config, of(QWEN_4B)).num_gpus == 3
    without = config_of(slurm={"head": {"gpus_per_task": 1}}, head={"device": "cpu"})
    assert planned(without, of(QWEN_4B)).phases.head == "cores"
