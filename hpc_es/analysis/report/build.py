"""Writes the report of one run, or of several side by side: one self-contained page, and its figures and tables.

The files are OUT/report.html, OUT/figures/NAME.png, OUT/tables/NAME.csv, and OUT/tables/NAME.md for tables that are
short enough to read. Invariant: every figure says how to read it, and the page says why a figure is missing.
"""

from dataclasses import dataclass
from pathlib import Path

from hpc_es.analysis.figures.canvas import png
from hpc_es.analysis.report import page as report_page
from hpc_es.analysis.report.figures import SECTIONS, Entry, Selection
from hpc_es.analysis.report.page import Section
from hpc_es.analysis.report.tables import tables
from hpc_es.analysis.statistics.csv_files import write_frame
from hpc_es.analysis.statistics.progress import Measure, measure_column, measure_of
from hpc_es.analysis.statistics.runs import Condition, Runs, conditions_of
from hpc_es.errors import ConfigError, NothingToShow, StoreError
from hpc_es.version import __version__


@dataclass(frozen=True)
class Written:
    """Files of a report."""

    page: Path
    figures: tuple[Path, ...]
    tables: tuple[Path, ...]
    absent: dict[str, str]
    """Reason for each missing figure, by its name."""


def write_report(
    runs: Runs, out: Path, *, measure: Measure | None = None, base: str | None = None, model: Path | None = None
) -> Written:
    """Write the report of some runs into the folder `out`, replacing an older report.

    `measure=None` means success, or fitness if no task was ever solved. `base` is the condition that others are
    compared with, by default Sync, or else the first. `model` is the path of the base model if it has moved.
    Errors: ConfigError for an unknown base or measure; StoreError if a run cannot be read or `out` cannot be written.
    """
    chosen = _select(runs, measure, model)
    base = base or _base(chosen.conditions)
    if base not in chosen.runs:
        raise ConfigError(f"--base {base!r} is not a condition of these runs: {', '.join(chosen.runs)}")
    try:
        for folder in (out / "figures", out / "tables"):
            folder.mkdir(parents=True, exist_ok=True)
        written, blocks = _write_tables(chosen, base, out / "tables")
        figures, absent = list[Path](), dict[str, str]()
        sections = [Section("Results", blocks)]
        for title, entries in SECTIONS.items():
            blocks = [_figure(entry, chosen, out / "figures", figures, absent) for entry in entries]
            sections.append(Section(title, blocks))
        path = out / "report.html"
        path.write_text(report_page.page(_title(chosen), _lead(chosen), sections), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"the report cannot be written to {out}: {error.strerror or error}") from error
    return Written(path, tuple(figures), tuple(written), absent)


def _select(runs: Runs, measure: Measure | None, model: Path | None) -> Selection:
    chosen = tuple(condition for condition in conditions_of(runs) if condition.runs)
    if not chosen:
        raise ConfigError("a report needs at least one run")
    measure = measure or measure_of(run for condition in chosen for run in condition.runs)
    measure_column(measure)
    return Selection(chosen, measure, model)


def _write_tables(chosen: Selection, base: str, folder: Path) -> tuple[list[Path], list[str]]:
    """Write all tables. Returns their files, and their blocks of the page."""
    files, blocks = [], []
    for table in tables(chosen, base):
        csv = folder / f"{table.name}.csv"
        if table.numbers.empty:
            csv.unlink(missing_ok=True)  # of an older report
            continue
        files.append(csv)
        write_frame(table.numbers, csv)
        if table.text is not None:
            files.append(folder / f"{table.name}.md")
            files[-1].write_text(table.text.markdown() + "\n", encoding="utf-8")
            blocks.append(report_page.table_block(table.title, table.text.html()))
    return files, blocks


def _figure(entry: Entry, chosen: Selection, folder: Path, figures: list[Path], absent: dict[str, str]) -> str:
    """Draw and write one figure; returns its block of the page."""
    path = folder / f"{entry.name}.png"
    try:
        picture = png(entry.draw(chosen))
    except NothingToShow as reason:
        absent[entry.name] = str(reason)
        path.unlink(missing_ok=True)  # of an older report
        return report_page.absent_block(entry.title, str(reason))
    path.write_bytes(picture)
    figures.append(path)
    some = f" Shown: {'; '.join(chosen.few)}." if entry.per_run and len(chosen.few) < chosen.num_runs else ""
    return report_page.figure_block(entry.title, entry.reading + some, picture)


def _base(conditions: tuple[Condition, ...]) -> str:
    labels = [condition.label for condition in conditions]
    return "Sync" if "Sync" in labels else labels[0]


def _title(chosen: Selection) -> str:
    if chosen.num_runs == 1:
        ((label, (run,)),) = chosen.runs.items()
        return f"Run {run.attrs['run_id']} ({label})"
    return f"{chosen.num_runs} runs: {', '.join(chosen.runs)}"


def _lead(chosen: Selection) -> str:
    judged = "success on" if chosen.measure == "success" else "mean reward on"
    return f"Judged by {judged} held-out tasks. Made by hpc_es {__version__} from the runs' own records."
