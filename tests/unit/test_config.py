"""Reading, checking, writing and comparing configurations."""

import ast
import inspect
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from repository import ROOT

from hpc_es.config import Config, compare, config_digest, flatten, load, save, yaml12
from hpc_es.config.schema import TAGGED
from hpc_es.errors import ConfigError

MINIMAL = """\
run:
  name: test
  num_updates: 5
model: {path: models/tiny}
task: {env: sudoku}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(MINIMAL)
    return path


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    message = str(caught.value)
    for jargon in ("pydantic", "Input should", "validation error", "type=", "Value error", "object at"):
        assert jargon not in message
    return message


# --- YAML -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("5E4", 5e4),
        ("-.5", -0.5),
        ("0x1f", 31),
        ("0o17", 15),
        ("017", 17),
        ("1_000", "1_000"),
        ("24:00:00", "24:00:00"),
        ("2026-11-30", "2026-11-30"),
        ("no", "no"),
        ("off", "off"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("'12'", "12"),
        ('"true"', "true"),
        ("[1, a, 1e1]", [1, "a", 10.0]),
        ("-.inf", -math.inf),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, value: Any) -> None:
    read = yaml12.plain(yaml12.parse(text, "test"))
    assert read == value
    assert type(read) is type(value)


text_of_files = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
whole_numbers = st.integers(-(2**63), 2**64 - 1)
json_like = st.recursive(
    st.none() | st.booleans() | whole_numbers | st.floats(allow_nan=False) | text_of_files,
    lambda inner: st.lists(inner) | st.dictionaries(text_of_files, inner),
    max_leaves=10,
)
tricky_text = st.from_regex(r"[-+0-9.eEx:_onftrue~ #\[\]{}'\"\n]{0,8}", fullmatch=True)


line_breaks = st.text("a \n\r\t\x85\u2028\u2029\ufeff'\":#")


@given(json_like | tricky_text | line_breaks)
def test_dumped_configurations_are_read_back_equal(value: Any) -> None:
    assert yaml12.plain(yaml12.parse(yaml12.dump(value), "test")) == value
    assert yaml12.plain(yaml12.parse(yaml12.dump_inline(value), "test")) == value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("2h", 7200), ("1.5h", 5400), ("1h30m", 5400), ("1d", 86400), ("24:00:00", 86400),
     ("10:30", 630), ("1-02:00:00", 93600), ("7", 7), ("0.5", 0.5)],
)  # fmt: skip
def test_durations_in_every_usual_form(config_file: Path, text: str, seconds: float) -> None:
    assert load(config_file, [f"launch.stop_timeout={text}"]).config.launch.stop_timeout == seconds


@pytest.mark.parametrize("text", ["soon", "'90'", "90x", "''", "-3", "0", "1:2:3:4"])
def test_invalid_durations_are_refused(config_file: Path, text: str) -> None:
    assert "launch.stop_timeout" in error_of(config_file, f"launch.stop_timeout={text}")


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("run:\n\tname: x\n", ":2:1", "indent with spaces"),
        ("run: {name: x\n", ":2:1", "expected ',' or '}'"),
        ("run:\n  name: a\n  name: b\n", ":3:3", "duplicate key 'name' (first on line 2)"),
        ("run: !!python/name:os.system {}\n", ":1:6", "tag"),
        ("run: &x [*x]\n", ":1:6", "contains itself"),
        ("true: 1\n", ":1:1", "a key must be text"),
    ],
)
def test_bad_yaml_is_located(tmp_path: Path, text: str, place: str, what: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = error_of(path)
    assert f"bad.yaml{place}: " in message
    assert what in message


def test_a_missing_or_empty_file_says_so(tmp_path: Path) -> None:
    assert "no such config file" in error_of(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert "mapping of sections" in error_of(tmp_path / "empty.yaml")


# --- keys and values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("es.populaton=3", "did you mean es.population?"),
        ("population=3", "did you mean es.population?"),
        ("es.num_updates=3", "did you mean run.num_updates?"),
        ("es.sigma.strt=3", "did you mean es.sigma.start?"),
        ("sampling.max_token=3", "did you mean sampling.max_tokens?"),
        ("enigne=vllm", "did you mean engine?"),
        ("checkpoint.zzz=3", "valid keys in checkpoint: every, keep"),
        ("zzz=3", "valid keys: run, model, task, method, es,"),
    ],
)
def test_an_unknown_key_suggests_the_right_one(config_file: Path, override: str, suggestion: str) -> None:
    message = error_of(config_file, override)
    assert ": unknown key" in message
    assert suggestion in message


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("es.population=1", "es.population=1 (override) must be above 1"),
        ("es.population=x", "es.population=x (override) must be a whole number"),
        ("es.population=16.0", "es.population=16.0 (override) must be a whole number"),
        ("es.population=true", "es.population=true (override) must be a whole number"),
        ("es.population=", "es.population=null (override) must be a whole number"),
        ("es.mirrored=yes", "es.mirrored=yes (override) must be true or false"),
        ("es=3", "es=3 (override) must be a section with the keys population, sigma, alpha"),
        ("es.sigma=0", "`start` must be above 0"),
        ("es.sigma=x", "es.sigma=x (override) must be a number, or a section with kind, start and end"),
        ("es.sigma={kind: cosine, start: 1}", "needs `end`"),
        ("es.sigma=.nan", "es.sigma.start"),
        ("engine.kind=vlm", "must be one of 'vllm', 'transformers', 'lab' or 'endpoint'; did you mean vllm?"),
        ("run.name=12", "run.name=12 (override) must be text; put it in quotes"),
        ("run.name=../x", "must consist of letters"),
        ("run.seed=-1", "run.seed=-1 (override) must be at least 0"),
        ("sampling.top_p=2", "must be at most 1"),
        ("sampling.top_p=.inf", "sampling.top_p"),
        ("sampling.stop=x", "must be a list"),
        ("sampling.stop=[a, 2]", "sampling.stop[1]=2"),
        ("task.options=3", "must be a section of key: value pairs"),
        ("es={mirrored: true, population: 15}", "es.population=15 must be even when es.mirrored is on"),
        ("transport.heartbeat_timeout=1s", "must be at least twice transport.heartbeat"),
        ("engine={kind: lab, tensor_parallel: 2}", "engine.tensor_parallel=2 is for engine.kind=vllm, not for lab"),
        ("engine.max_model_len=64", "sampling.max_tokens=64 must be below engine.max_model_len=64"),
        ("nonsense", "must have the form section.key=value"),
        ("es.=3", "must have the form section.key=value"),
        ("run.name=[a", "override run.name:1"),
    ],
)
def test_a_wrong_value_names_key_value_and_rule(config_file: Path, override: str, complaint: str) -> None:
    assert complaint in error_of(config_file, override)


def test_every_key_has_a_description() -> None:
    told = [key for model in models_below(Config) for key in keys_with_docstrings(model)]
    keys = [key for model in models_below(Config) for key in own_keys(model)]
    assert "EngineConfig.tensor_parallel" in keys
    assert [key for key in keys if key not in told] == []


def models_below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for section in sections_of(field):
            yield from models_below(section)


def sections_of(field: FieldInfo) -> list[type[BaseModel]]:
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def own_keys(model: type[BaseModel]) -> Iterator[str]:
    """Without those of sections, whose own keys say more, and without the names of kinds of a section."""
    for name, field in model.model_fields.items():
        if not sections_of(field) and name not in TAGGED.values():
            yield f"{model.__name__}.{name}"


def keys_with_docstrings(model: type[BaseModel]) -> Iterator[str]:
    (defined,) = ast.parse(inspect.getsource(model)).body
    assert isinstance(defined, ast.ClassDef)
    for line, below in itertools.pairwise(defined.body):
        if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield f"{model.__name__}.{ast.unparse(line.target)}"


def test_every_fault_is_named_at_once_with_its_line(config_file: Path) -> None:
    config_file.write_text(MINIMAL.replace("num_updates: 5", "num_updates: 0\n  sed: 3"))
    message = error_of(config_file)
    assert f"run.num_updates=0 ({config_file}:3) must be at least 1" in message
    assert f"run.sed: unknown key ({config_file}:4); did you mean run.seed?" in message


def test_a_missing_key_is_named(config_file: Path) -> None:
    config_file.write_text("run: {name: a}\nmodel: {path: x}\n")
    assert error_of(config_file).splitlines() == [
        "run.num_updates is missing: it has no default; set it in the config file or with run.num_updates=...",
        "task is missing: it has no default; set it in the config file or with task=...",
    ]


# --- layers and origins -------------------------------------------------------------------------------------------


def test_each_value_says_where_it_comes_from(config_file: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: config.yaml\nrun: {name: child}\nes:\n  sigma: 2e-3\n")
    loaded = load(child, ["es.population=16", "es.alpha.start=1e-2"])
    assert loaded.config.es.sigma.start == 2e-3
    assert loaded.config.run.num_updates == 5
    expected = {
        "run.name": f"{child}:2",
        "run.num_updates": f"{config_file}:3",
        "es.sigma.start": f"{child}:4",
        "es.population": "override",
        "es.alpha.start": "override",
        "es.mirrored": "default",
    }
    assert {key: loaded.origins[key] for key in expected} == expected
    assert set(loaded.origins) == {key for key, _ in flatten(loaded.config)}


def test_an_empty_mapping_clears_the_one_it_overrides(config_file: Path) -> None:
    config_file.write_text(MINIMAL.replace("{env: sudoku}", "{env: sudoku, options: {size: 4}}"))
    assert load(config_file, ["task.options.blanks=3"]).config.task.options == {"size": 4, "blanks": 3}
    assert load(config_file, ["task.options={}"]).config.task.options == {}


def test_of_several_files_that_a_file_extends_the_later_wins(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("run: {name: a, num_updates: 3}\nmodel: {path: x}\ntask: {env: sudoku}\n")
    (tmp_path / "b.yaml").write_text("run: {num_updates: 5}\nstaleness: {mode: natural, max_lag: 2}\n")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml, b.yaml]\n")
    config = load(tmp_path / "c.yaml").config
    assert (config.run.num_updates, config.staleness.mode) == (5, "natural")


def test_a_file_among_the_overrides_is_laid_over_the_config_in_its_turn(tmp_path: Path, config_file: Path) -> None:
    (tmp_path / "over.yaml").write_text("es: {population: 16, sigma: 0.5}\n")
    config = load(config_file, ["es.sigma=0.1", str(tmp_path / "over.yaml"), "es.population=20"]).config
    assert (config.es.population, config.es.sigma.start) == (20, 0.5)
    assert "no such config file" in error_of(config_file, "none.yaml")


def test_another_mode_of_staleness_replaces_all_of_the_former(tmp_path: Path, config_file: Path) -> None:
    (tmp_path / "over.yaml").write_text("staleness: {mode: controlled, lag: 2, share: 0.5}\n")
    config = load(config_file, ["staleness={mode: natural, max_lag: 3}", str(tmp_path / "over.yaml")]).config
    assert config.staleness.mode == "controlled"
    config = load(config_file, [str(tmp_path / "over.yaml"), "staleness.lag=4"]).config
    assert (config.staleness.lag, config.staleness.share) == (4, 0.5)


def test_naming_the_staleness_mode_resets_its_other_settings(config_file: Path) -> None:
    first, second = "staleness={mode: tail, counts: {0: 8, 1: 8}}", "staleness={mode: tail, counts: {0: 6, 2: 10}}"
    assert load(config_file, ["es.population=16", first, second]).config.staleness.counts == {0: 6, 2: 10}


def test_nested_aliases_that_stand_for_too_much_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 9)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    assert "more than 100000 values" in error_of(tmp_path / "bomb.yaml")


def test_a_staleness_setting_of_another_mode_is_refused_by_its_name(tmp_path: Path) -> None:
    wrong = error_of_section(tmp_path, "mode: natural, lag: 3")
    assert "staleness.lag: unknown key for mode=natural" in wrong
    assert wrong.endswith("valid keys of natural: mode, max_lag, overdue")
    assert error_of_section(tmp_path, "mode: tail, counts: {a: 30}").endswith("must be a whole number")
    assert "did you mean tail?" in error_of_section(tmp_path, "mode: tial")
    assert "staleness.max_lag=-1" in error_of_section(tmp_path, "mode: natural, max_lag: -1")
    assert "sum to 6" in error_of_section(tmp_path, "mode: tail, counts: {0: 4, 3: 2}")
    assert "needs version -5" in error_of_section(tmp_path, "mode: staircase, steps: [[1, 0], [5, 9]]")


def test_files_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    assert "leads back to" in error_of(tmp_path / "a.yaml")
    assert "no such config file" in error_of_extends(tmp_path, "none.yaml")
    assert "must be the name of a config file, or a list" in error_of_extends(tmp_path, "[a, 3]")


def error_of_section(tmp_path: Path, staleness: str) -> str:
    (tmp_path / "s.yaml").write_text(
        "run: {name: a, num_updates: 3}\nmodel: {path: x}\ntask: {env: sudoku}\nstaleness: {" + staleness + "}\n"
    )
    return error_of(tmp_path / "s.yaml")


def error_of_extends(folder: Path, parent: str) -> str:
    path = folder / "c.yaml"
    path.write_text(f"extends: {parent}\n")
    return error_of(path)


# --- saving and comparing -----------------------------------------------------------------------------------------

options = st.dictionaries(text_of_files.filter(lambda key: key and "." not in key), json_like, max_size=3)


@given(sigma=st.floats(1e-12, 1e3), name=tricky_text, seed=st.integers(0, 2**63 - 1), options=options)
def test_a_saved_config_is_loaded_exactly(
    tmp_path_factory: pytest.TempPathFactory, sigma: float, name: str, seed: int, options: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "in.yaml").write_text(MINIMAL)
    values = load(folder / "in.yaml").config.model_dump(mode="json")
    values["es"]["sigma"] = sigma
    values["run"]["seed"] = seed
    values["task"].update(env=name, options=options)
    config = Config.model_validate(values)
    save(config, folder / "out.yaml")
    again = load(folder / "out.yaml").config
    assert again == config
    assert config_digest(again) == config_digest(config)
    assert compare(config, again) == ([], [])


@pytest.mark.parametrize("key", ["es.sigma", "es.alpha", "es.sigma.end"])
def test_steps_that_would_leave_the_range_of_float32_are_refused(config_file: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="must be at most 1000000"):
        load(config_file, ["es.sigma.kind=linear", "es.sigma.start=1", "es.sigma.end=0", f"{key}=1e300"])


def test_more_updates_than_checkpoints_can_be_named_after_are_refused(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="must be below 100000000"):
        load(config_file, ["run.num_updates=99999999999999"])


def test_a_file_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(path)


def test_harmless_differences_are_distinguished_from_harmful_ones(config_file: Path) -> None:
    old = load(config_file).config
    new = load(config_file, ["launch.workers=4", "es.sigma=2e-3", "transport.heartbeat=1s", "engine.threads=2"]).config
    harmful, harmless = compare(old, new)
    assert [str(difference) for difference in harmful] == ["es.sigma.start: 0.001 -> 0.002"]
    assert [d.key for d in harmless] == ["engine.threads", "transport.heartbeat", "launch.workers"]


def test_the_digest_ignores_what_is_harmless_and_nothing_else(config_file: Path) -> None:
    digest = config_digest(load(config_file).config)
    assert config_digest(load(config_file, ["launch.workers=4", "run.dir=elsewhere"]).config) == digest
    assert config_digest(load(config_file, ["task.options.size=4"]).config) != digest
    assert config_digest(load(config_file, ["run.seed=1"]).config) != digest


def test_the_reference_page_fits_the_schema() -> None:
    command = [sys.executable, str(ROOT / "tools" / "config_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs" / "configuration-reference.md").read_text()
    assert not re.findall(r"^\| `.*\|\s*\|$", page, re.MULTILINE), "a key without a sentence"
