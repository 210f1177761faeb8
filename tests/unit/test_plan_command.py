"""The planner's cautions, what it is given, and the command."""

import json
from typing import Any

import pytest
from plans import H100, QWEN_4B, QWEN_27B, config_of, of, planned
from repository import CONFIGS
from small_checkpoint import make, values
from staged_run import Staged, stage
from typer.testing import CliRunner

from hpc_es.cli import app
from hpc_es.config import load
from hpc_es.errors import ConfigError
from hpc_es.planner import GPUS, Tokens, assume, make_plan, shape_of
from hpc_es.planner import tokens as lengths

# --- cautions ----------------------------------------------------------------------------------------------------


def test_a_lease_that_is_too_short_and_jobs_that_are_too_small_are_warned_about():
    config = config_of(slurm={"head": {"memory": "16G"}, "worker": {"memory": "64G"}}, transport={"lease_timeout": 1})
    plan = planned(config, of(QWEN_4B))
    lease, head = plan.cautions
    assert "transport.lease_timeout=1" in lease
    assert "slurm.head.memory=16G" in head
    roomy = config_of(slurm={"head": {"memory": "24000"}, "worker": {"memory": "0"}})
    assert planned(roomy, of(QWEN_4B)).cautions == ()
    assert "does not fit" in planned(roomy, of(QWEN_27B), assumed=assume("a10")).cautions[0]


@pytest.mark.parametrize(("staleness", "most"), [({"mode": "sync"}, 4), ({"mode": "natural", "max_lag": 2}, 12)])
def test_workers_that_would_only_idle_are_warned_about(staleness, most):
    config, at_once = config_of(staleness=staleness), assume("h100", ["start_s=0"])
    assert planned(config, of(135e6), workers=most, assumed=at_once).cautions == ()
    (told,) = planned(config, of(135e6), workers=most + 3, assumed=at_once).cautions
    assert f"at most {most} members at once: 3 of the {most + 3} workers" in told


def test_workers_that_connect_after_the_end_are_warned_about():
    config = config_of(es={"population": 64})
    late = planned(config, of(135e6), workers=64, assumed=assume("h100", ["start_s=600"]))
    assert 0 < late.num_up < 64
    assert f"{late.num_up} of 64 workers connect before the run ends" in late.cautions[-1]
    at_once = assume("h100", ["start_s=0", "core_noise_g_per_s=100"])
    assert planned(config, of(135e6), workers=64, assumed=at_once).cautions == ()


def test_a_head_that_workers_wait_for_is_warned_about():
    config, at_once = config_of(es={"population": 64}), assume("h100", ["start_s=0"])
    (told,) = planned(config, of(135e6), workers=64, assumed=at_once).cautions
    assert "while the head adds an update, which takes 8 s with slurm.head.cpus=1" in told
    many = config_of(es={"population": 64}, slurm={"head": {"cpus": 64}})
    assert planned(many, of(135e6), workers=64, assumed=at_once).cautions == ()


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (Tokens(2000, 640, 10, ""), []),  # 64 new tokens a turn, 2048 in all
        (Tokens(2000, 641, 10, ""), ["641 answer tokens are more than 10 turns of sampling.max_tokens=64"]),
        (Tokens(20470, 11, 10, ""), ["L = 20,481 tokens are more than 10 turns of engine.max_model_len=2048"]),
        (
            Tokens(141, 3, 3, "", with_cached=True),
            ["and the measured --tokens-out 3 --turns 3"],
        ),
    ],
)
def test_impossible_or_overcounted_lengths_are_warned_about(tokens, told):
    assumed = assume("h100", ["start_s=0"])
    cautions = make_plan(config_of(), of(135e6), tokens, assumed, num_workers=2).cautions
    assert len(cautions) == len(told)
    assert all(part in caution for part, caution in zip(told, cautions, strict=True))


# --- what is given ----------------------------------------------------------------------------------------------


def test_the_shape_is_read_from_a_folder_and_counts_trained_parameters(tmp_path):
    layers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 40}
    folder = make(tmp_path / "model", **layers)
    model = config_of(model={"path": str(folder), "exclude": ["*embed*"]}).model
    shape = shape_of(model)
    sizes = {name: tensor.size for name, tensor in values().items()}
    assert shape.parameters == sum(sizes.values())
    assert shape.trained == shape.parameters - sizes["model.embed_tokens.weight"]
    assert (shape.kv_elements, shape.kv_heads, shape.heads) == (2 * 3 * 2 * 10, 2, 4)
    hybrid = make(tmp_path / "hybrid", **layers, layer_types=["linear_attention", "full_attention", "linear_attention"])
    assert shape_of(model, described=hybrid).kv_elements == 2 * 2 * 10
    mixed, whole = shape_of(model, parameters=4.5e9), shape_of(model, parameters=4.5e9, described=hybrid)
    (caution,) = planned(config_of(), mixed, assumed=assume("h100", ["start_s=0"])).cautions
    assert f"KV cache and heads are still those of {folder}" in caution
    assert whole.other_model == shape.other_model == ""


def test_a_model_elsewhere_has_to_be_described():
    with pytest.raises(ConfigError, match=r"--parameters 4\.5e9"):
        shape_of(config_of().model)
    assert shape_of(config_of().model, parameters=5e9).kv_elements is None


def test_the_length_of_an_episode_is_given_or_measured(tmp_path):
    config = load(CONFIGS / "quickstart.yaml").config  # sudoku, 3 blanks, 1 token a turn
    assert lengths.turn_limit(config) == 9
    assert lengths.given(config, per_episode=400, answer_share=0.25) == Tokens(
        391, 9, 9, "L is given, answers are assumed"
    )
    assert lengths.given(config, per_episode=20, answer_share=0.25).answer == 5
    assert lengths.given(config, prompt=300, answer=3, turns=3, answer_share=0.25).total == 303
    with pytest.raises(ConfigError, match="--tokens-per-episode L"):
        lengths.given(config, prompt=300, answer_share=0.25)
    run = stage(tmp_path / "staged", Staged())
    episodes = run.episodes[run.episodes["kind"] == "train"]
    measured = lengths.measured(run)
    assert measured.total == pytest.approx((episodes["tokens_in"] + episodes["tokens_out"]).mean())
    assert measured.with_cached
    uncached = stage(tmp_path / "uncached", Staged(engine={"prefix_cache": False}))
    assert not lengths.measured(uncached).with_cached


def test_assumptions_can_be_set_and_mistakes_are_explained(tmp_path):
    assert assume("h100", ["memory_gib=94"]).memory_gib == 94
    mine = tmp_path / "mine.yaml"
    mine.write_text("gpu: a10\nturn_s: 0.5\n")
    assert (assume(str(mine)).turn_s, assume(str(mine)).memory_gib) == (0.5, GPUS["a10"]["memory_gib"])
    mine.write_text("memory_gib: 10\n")
    for gpu, changes, complaint in (
        ("h10", [], "did you mean h100"),
        ("h100", ["prefil_share=1"], "did you mean prefill_share"),
        ("h100", ["prefill_share=2"], "prefill_share=2"),
        ("h100", ["prefill_share"], "KEY=VALUE"),
        (str(mine), [], "lacks memory_gb_per_s, bf16_tflops, fp32_tflops, link_gb_per_s: "),
        (str(tmp_path / "none.yaml"), [], "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            assume(gpu, changes)


# --- the command ------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


SUDOKU = (
    str(CONFIGS / "methods/agentic-esopt/sudoku-h5.yaml"),
    "run.name=planned",
    "model.path=elsewhere",
    "run.num_updates=3",
)


def test_the_command_prints_its_assumptions():
    done = invoke(*SUDOKU, "--gpu", "h200", "--workers", "4", "--tokens-per-episode", "3600", "--parameters", "4.5e9")
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line.split() for line in done.output.splitlines() if line.strip()}
    for name, value in assume("h200").model_dump().items():
        assert lines[name][1] == f"{value:g}"
    assert "8.38 GiB" in done.output


def test_the_command_prints_its_cautions_before_the_next_command():
    done = invoke(*SUDOKU, "--workers", "40", "--tokens-per-episode", "3600", "--parameters", "4.5e9")
    *_, idle, head, last = done.output.splitlines()
    assert idle.startswith("caution: ")
    assert "8 of the 40 workers would only idle" in idle
    assert "slurm.head.cpus=1" in head
    assert "hpc-es simulate" in last


def test_absent_parts_have_no_size_and_small_ratios_are_not_zero():
    options = ("--tokens-per-episode", "3600", "--parameters", "4.5e9", "engine.base=host")
    lines = {line.split()[0]: line for line in invoke(*SUDOKU, *options).output.splitlines() if line.strip()}
    assert lines["theta"].split()[1] == "-"
    few = invoke(*SUDOKU, *options, "es.population=12", "es.tasks_per_member=8").output
    (ratio,) = [line for line in few.splitlines() if line.startswith("an update, over GRPO's")]
    assert ratio.split()[4] == "0.075"


def test_its_json_has_the_numbers():
    options = ("--workers", "4", "--tokens-in", "3000", "--tokens-out", "600", "--parameters", "4.5e9", "--json")
    facts = json.loads(invoke(*SUDOKU, *options).stdout)
    assert facts["memory"]["gpu"]["weights"] == 9e9
    assert facts["compute"]["per_update"] == 2 * 32 * 32 * 3600 * 4.5e9
    assert facts["gpu_hours"] == pytest.approx(4 * facts["simulated"]["total_s"] / 3600)
    assert facts["assumptions"] == H100.model_dump()
    assert facts["compute"]["gradient"]["grpo_in_all"] == 100 * facts["compute"]["gradient"]["grpo_per_update"]
    assert facts["memory"]["gradient"]["grpo"] == 14 * 4.5e9
    assert facts["basis"]["pace"] == "fit"


def test_a_machine_without_a_gpu_is_planned_like_any_other():
    options = ("--gpu", str(CONFIGS / "hardware/two-cores.yaml"), "--workers", "2", "--parameters", "1.35e8")
    tokens = ("--tokens-in", "141", "--tokens-out", "3", "--turns", "3", "--json")
    facts = json.loads(invoke(str(CONFIGS / "quickstart.yaml"), *options, *tokens).stdout)
    assert facts["num_gpus"] == facts["gpu_hours"] == 0
    assert facts["phases"]["base"] == facts["phases"]["head"] == "cores"
    assert facts["memory"]["worker_job"] > facts["memory"]["gpu"]["total"] + facts["memory"]["arena"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--workers", "0"], "--workers 0"),
        (["--gpu", "h1000"], "did you mean h100"),
        (["--tokens-per-episode", "-3"], "must be a number above 0"),
        (["--tokens-per-episode", "1e30"], "below 1e+15"),
        (
            ["task.options={size: 7, blanks: null}", "--parameters", "1e9", "--tokens-per-episode", "9"],
            "sudoku needs a size of",
        ),
        (["task.options={blanks: x}", "--parameters", "1e9", "--tokens-per-episode", "9"], "a whole number of blanks"),
        (["--parameters", "1e9"], "--tokens-per-episode L"),
        (["--parameters", "1e9", "--active-parameters", "2e9"], "must be at most"),
        (["--like", "nowhere", "--turns", "3", "--parameters", "1e9"], "omit"),
    ],
)
def test_mistakes_are_one_plain_message(arguments, complaint):
    done = invoke(*SUDOKU, *arguments)
    assert done.exit_code == 2
    assert complaint in done.output
