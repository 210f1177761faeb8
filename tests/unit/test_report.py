"""The report: one page that needs nothing else, says what is absent, and is the same for the same runs."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small_checkpoint
from staged_run import Staged, stage, staircase, sync, tail, write_facts
from typer.testing import CliRunner, Result

from hpc_es.analysis.report.build import Written, write_report
from hpc_es.analysis.report.figures import MAX_PANELS, SECTIONS
from hpc_es.analysis.statistics.text_table import TextTable, mean_and_sd
from hpc_es.cli import app
from hpc_es.envs.base import TaskFacts
from hpc_es.errors import ConfigError, StoreError
from hpc_es.params import Arena
from hpc_es.store import Run

pytestmark = pytest.mark.filterwarnings("error")

NATURAL = Staged(staleness={"mode": "natural", "max_lag": 1}, workers=8, spread=1.5, num_updates=12)
STEPS = ((1, 0), (4, 3))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of Sync, with their base model; Async-1, a tail and a staircase, without."""
    root = tmp_path_factory.mktemp("runs")
    model = small_checkpoint.make(root / "model")
    for seed in (0, 1):
        arena = Arena.from_pretrained(model)
        staged = Staged(
            composition=sync(4),
            seed=seed,
            model=str(model),
            success={0: 1, 8: 3 + seed},
            repeats=2,
            finish=lambda commit, arena=arena: (commit, arena.apply([commit]).update_norm),  # type: ignore[misc]
        )
        stage(root / f"sync{seed}", staged)
        write_facts(root / f"sync{seed}", [TaskFacts(str(task), 5 + task, task < 7) for task in range(8)])
    stage(root / "natural", NATURAL)
    counts = {0: 2, 1: 1, 2: 1}
    staleness = {"mode": "tail", "counts": {str(lag): count for lag, count in counts.items()}}
    stage(root / "tail", Staged(staleness=staleness, composition=tail(counts)))
    stage(
        root / "staircase",
        Staged(staleness={"mode": "staircase", "steps": STEPS}, composition=staircase(4, STEPS)),
    )
    return root


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def read(path: Path) -> Run:
    from hpc_es.store import read

    return read(path)


@pytest.fixture(scope="module")
def side_by_side(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    runs = [read(root / name) for name in ("sync0", "sync1", "natural", "tail", "staircase")]
    return write_report(runs, tmp_path_factory.mktemp("all"))


@pytest.fixture(scope="module")
def of_the_tail(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_report(read(root / "tail"), tmp_path_factory.mktemp("tail"))


@pytest.fixture
def few_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes seconds: where figures are not the point, two are enough, one of them with a panel per run."""
    chosen = [entry for entries in SECTIONS.values() for entry in entries if entry.name in ("brackets", "discards")]
    monkeypatch.setattr("hpc_es.analysis.report.build.SECTIONS", {"Some": chosen})


def assert_self_contained(page: str) -> None:
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert sources
    assert all(source.startswith(("data:image/png;base64,", "#")) for source in sources)


def test_all_modes_side_by_side(side_by_side: Written) -> None:
    written, folder = side_by_side, side_by_side.page.parent
    page = written.page.read_text()
    assert_self_contained(page)
    assert written.absent == {}
    names = [entry.name for entries in SECTIONS.values() for entry in entries]
    assert [path.stem for path in written.figures] == names
    assert page.count("data:image/png;base64,") == len(names)
    assert page.count('class="reading"') == len(names)
    assert "Shown: Sync: sync0, 1 of 2 runs; Async-1; Tail-2; Staircase." in page.replace("\n", " ")
    for link in re.findall(r'href="#([^"]*)"', page):
        assert f'id="{link}"' in page
    outcomes = (folder / "tables" / "outcomes.md").read_text()
    assert "| Sync | 2 | 18.75 ± 0.00 | 50.00 ± 8.84 | 8 ± 0 | 50.00 ± 8.84 |" in outcomes
    assert "87.5 % can be solved at all" in outcomes
    assert "<td>Sync</td>" in page
    with (folder / "tables" / "paired.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["condition"] for row in rows] == [c for c in ("Async-1", "Tail-2", "Staircase") for _ in range(2)]
    assert {row["base"] for row in rows} == {"Sync"}


def test_the_same_runs_give_the_same_bytes(root: Path, of_the_tail: Written, tmp_path: Path) -> None:
    again = write_report(read(root / "tail"), tmp_path)
    assert again.page.read_bytes() == of_the_tail.page.read_bytes()
    for one, other in zip(again.tables, of_the_tail.tables, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_absent_parts_are_named_with_the_reason(of_the_tail: Written) -> None:
    assert set(of_the_tail.absent) == {"at_k", "brackets", "discards", "drift", "horizon", "magnitudes"}
    page, folder = of_the_tail.page.read_text(), of_the_tail.page.parent
    assert page.count("Not shown:") == 6
    assert "no version has played its held-out tasks more than once" in page
    assert "the folder of this run has no tasks.json" in page
    assert "no good result was discarded for its lag" in page
    assert "the base model cannot be read" in page
    assert not (folder / "figures" / "drift.png").exists()
    assert not (folder / "tables" / "paired.csv").exists()


@pytest.mark.usefixtures("few_figures")
def test_an_older_report_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    mine = tmp_path / "figures" / "mine.png"
    write_report(read(root / "natural"), tmp_path)
    mine.write_bytes(b"not of a report")
    assert (tmp_path / "figures" / "discards.png").exists()
    write_report(read(root / "tail"), tmp_path)
    assert not (tmp_path / "figures" / "discards.png").exists()
    assert not (tmp_path / "tables" / "discard_bias.csv").exists()
    assert mine.exists()


def test_a_run_h5_alone_has_no_journal_for_the_drift(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_es.analysis.report.build.SECTIONS", {"Movement": SECTIONS["How far theta moved"]})
    shutil.copy(root / "sync0" / "run.h5", tmp_path / "copied.h5")
    written = write_report(read(tmp_path / "copied.h5"), tmp_path / "out")
    assert [path.stem for path in written.figures] == ["update_norms"]
    assert set(written.absent) == {"drift", "magnitudes"}
    assert "the journal, which is not in the folder of this run.h5" in written.absent["drift"]


@pytest.mark.usefixtures("few_figures")
def test_many_runs_have_few_panels(root: Path, tmp_path: Path) -> None:
    run = read(root / "natural")
    written = write_report({f"c{number}": run for number in range(MAX_PANELS + 2)}, tmp_path)
    page = written.page.read_text()
    assert "Shown: " + "; ".join(f"c{number}" for number in range(MAX_PANELS)) + "." in page


@pytest.mark.usefixtures("few_figures")
def test_names_are_text_and_not_html(root: Path, tmp_path: Path) -> None:
    page = write_report({"<b>&": read(root / "tail")}, tmp_path).page.read_text()
    assert "<b>&" not in page
    assert "&lt;b&gt;&amp;" in page
    assert TextTable(["a|b"], [["c"]]).markdown() == "| a\\|b |\n| --- |\n| c |"


@pytest.mark.usefixtures("few_figures")
def test_mistakes_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--base 'Sink' is not a condition of these runs: Tail-2"):
        write_report(read(root / "tail"), tmp_path, base="Sink")
    with pytest.raises(ConfigError, match="at least one run"):
        write_report([], tmp_path)
    bogus = invoke(root / "tail", "--measure", "bogus")
    assert (bogus.exit_code, bogus.stderr) == (2, "error: the measure 'bogus' is unknown: success or fitness\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"the report cannot be written to .*file"):
        write_report(read(root / "tail"), tmp_path / "file")


def test_numbers_for_people() -> None:
    assert mean_and_sd(0.7266, 0.012, 100) == "72.66 ± 1.20"
    assert mean_and_sd(1234567.0, float("nan"), 1, 0) == "1,234,567"
    assert mean_and_sd(float("nan"), float("nan")) == "-"


# --- the command -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_figures")
def test_the_command_names_conditions_and_says_where_the_page_is(root: Path, tmp_path: Path) -> None:
    done = invoke(f"Barrier={root}/sync0", f"Barrier={root}/sync1", root / "natural", "--out", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["page"] == str(tmp_path / "report.html")
    assert (list(told["absent"]), len(told["figures"])) == (["brackets"], 1)
    assert "| Barrier | 2 |" in (tmp_path / "tables" / "outcomes.md").read_text()
    assert "Differences from Barrier" in Path(told["page"]).read_text()
    assert "no figure brackets: no run is a staircase" in done.stderr


@pytest.mark.usefixtures("few_figures")
def test_one_run_reports_into_its_own_folder(root: Path) -> None:
    done = invoke(root / "tail", "--measure", "fitness")
    assert done.exit_code == 0, done.output
    assert "mean reward on held-out tasks" in (root / "tail" / "report" / "report.html").read_text()


def test_a_missing_run_is_a_plain_message(tmp_path: Path) -> None:
    done = invoke(tmp_path / "nothing", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "nothing is not a run: give a run folder (it has journal.1.hpcj) or a run.h5" in done.stderr
    assert not (tmp_path / "out").exists()
    assert invoke("Sync=", "--out", tmp_path).exit_code == 2


def test_a_damaged_journal_is_a_plain_message(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "sync0", tmp_path / "run")
    (tmp_path / "run" / "run.h5").unlink()
    journal = tmp_path / "run" / "journal.1.hpcj"
    data = bytearray(journal.read_bytes())
    data[200] ^= 255
    journal.write_bytes(data)
    with pytest.warns(UserWarning, match=r"run.h5 is missing"):
        done = invoke(tmp_path / "run")
    assert done.exit_code == 1
    assert re.search(r"error: .*journal\.1\.hpcj.*offset", done.stderr, re.S)


def test_a_report_needs_neither_torch_nor_numba_nor_a_display(root: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom hpc_es.analysis.report.build import write_report\n"
        "from hpc_es.store import read\n"
        f"write_report(read({str(root / 'natural')!r}), Path({str(tmp_path)!r}))\n"
        "print({'torch', 'numba', 'vllm', 'matplotlib.pyplot', 'tkinter'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
