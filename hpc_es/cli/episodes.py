"""`hpc-es episodes`: the numbers of every episode, and the full text of those that were kept.

Invariant: reads only; works while the run is going on, too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_es.cli.arguments import Json, RunFolder, plural, run_paths
from hpc_es.errors import ConfigError
from hpc_es.paths import RunPaths
from hpc_es.records import FIRST_CENTRE

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, RenderableType

    from hpc_es.worker.trajectories import Trajectory

COLUMNS = {
    "task": "task",
    "reward": "reward",
    "success": "solved",
    "turns": "turns",
    "invalid_actions": "refused",
    "tokens_in": "tok in",
    "tokens_out": "out",
    "seconds_generating": "gen s",
    "seconds_in_env": "env s",
    "ended": "ended",
}
"""Columns for the numbers of an episode, with their titles. The table fits into a terminal."""
OVERVIEW = {
    "version": "version",
    "member": "member",
    "task": "task",
    "reward": "reward",
    "success": "solved",
    "turns": "turns",
    "ended": "ended",
}
EVALUATED = -1
"""Number that is used as the member for the unperturbed policy on evaluation tasks."""
NUM_LISTED = 40
"""Number of rows in the overview without --all: the newest episodes."""


def add_commands(app: typer.Typer) -> None:
    app.command()(episodes)


def episodes(
    run: RunFolder,
    version: Annotated[int | None, typer.Option(help="Policy version. Default: the last with kept episodes.")] = None,
    member: Annotated[
        int | None,
        typer.Option(help="Slot of the member; -1: the policy on evaluation tasks. Default: list kept episodes."),
    ] = None,
    task: Annotated[int | None, typer.Option(help="Show only this task.")] = None,
    evaluation: Annotated[
        str | None,
        typer.Option("--eval", help="Name of an evaluation made after the run; `hpc-es evals RUN` lists them."),
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="List all kept episodes, not only the newest.")] = False,
    json: Json = False,
) -> None:
    """Show the episodes of a member: numbers for all of them, and full text for the sample that store.trajectories
    keeps."""
    from hpc_es.cli.output import console, print_json

    paths = run_paths(run)
    if evaluation is not None and not paths.later_eval(evaluation).is_file():
        names = ", ".join(path.stem for path in paths.later_evals()) or "none"
        raise ConfigError(f"{run} has no later evaluation {evaluation!r}, only {names}")
    kept = kept_episodes(paths, version, member, task, evaluation)
    named = f"{run} --eval {evaluation}" if evaluation else str(run)
    out = console(stderr=json)
    if member is None:
        if json:
            print_json({"run": str(run), "kept": [_summary(each) for each in kept]})
        if not kept and not (version is None and task is None):
            raise ConfigError(
                f"no episode is kept in {run}{_at(version)}{_of_task(task)}: {_what_is_kept(paths, evaluation)}`hpc-es "
                f"episodes {named}` lists those that are"
            )
        _print_overview(out, kept if whole else kept[-NUM_LISTED:], len(kept), named)
        return
    if version is None:
        if not kept:
            raise ConfigError(f"no episode of member {member} is kept in {run}; for its numbers, give --version")
        version = kept[-1].eval_id.version
        kept = [each for each in kept if each.eval_id.version == version]
    rows = _rows(paths.root, version, member, task, evaluation)
    if rows.empty and not kept:
        raise ConfigError(f"{run} has no episode of member {member} at version {version}{_of_task(task)}")
    if json:
        numbers = rows.to_dict(orient="records")
        print_json({"run": str(run), "version": version, "member": member, "episodes": numbers, "kept": kept})
    _print_numbers(out, rows, version, member)
    for each in kept:
        out.print(_shown(each))
    if not kept:
        out.print(
            f"the text of these episodes was not kept; `hpc-es episodes {named}` lists those with text, and "
            "store.trajectories sets how many are kept",
        )


def kept_episodes(
    paths: RunPaths, version: int | None, member: int | None, task: int | None, evaluation: str | None = None
) -> "list[Trajectory]":
    """Kept episodes, sorted by version, slot and position. If an evaluation was made twice, the last one counts."""
    from hpc_es.worker.trajectories import read_trajectories, read_trajectory_file

    found, later = {}, paths.later_eval_trajectories(evaluation or "")
    if evaluation is None:
        everything = read_trajectories(paths)
    else:
        everything = read_trajectory_file(later) if later.is_file() else iter(())
    for each in everything:
        named = (each.eval_id.version, _member(each.eval_id.table_slot), each.episode.task)
        if all(wanted in (None, given) for wanted, given in zip((version, member, task), named, strict=True)):
            found[(each.eval_id, each.position)] = each
    return [found[key] for key in sorted(found)]


def _rows(root: Path, version: int, member: int, task: int | None, evaluation: str | None) -> "pd.DataFrame":
    """The numbers of every episode of a member or its replacement; for the evaluated policy, those of all batches."""
    from hpc_es.store import read

    rows = read(root).episodes
    rows = rows[(rows["source"] == (evaluation or "run")) & (rows["dispatch_version"] == version)]
    rows = rows[rows["slot"].map(_member) == member]
    rows = rows[rows["replacement"] == rows.groupby("slot")["replacement"].transform("max")]
    rows = rows.sort_values(["slot", "position"], ascending=[False, True])
    return rows if task is None else rows[rows["task"] == task]


def _member(slot: int) -> int:
    """Member number that is shown for a slot: all batches of evaluation tasks belong to the evaluated policy."""
    return slot if slot >= 0 or slot == FIRST_CENTRE else EVALUATED


def _summary(kept: "Trajectory") -> dict[str, Any]:
    import msgspec

    return {
        "version": kept.eval_id.version,
        "member": _member(kept.eval_id.table_slot),
        "position": kept.position,
        "kind": kept.eval_id.purpose,
        **msgspec.structs.asdict(kept.episode),
    }


def _print_overview(out: "Console", listed: "Sequence[Trajectory]", num_kept: int, run: str) -> None:
    if not listed:
        raise ConfigError(f"no episode is kept in {run}: none has ended yet, or store.trajectories is 0")
    summaries = [_summary(each) for each in listed]
    out.print(_table(summaries, OVERVIEW))
    last = summaries[-1]
    if len(listed) < num_kept:
        out.print(f"the newest {len(listed)} of {num_kept} kept episodes; the others: --all, or --version V")
    else:
        out.print(plural(num_kept, "kept episode"))
    out.print(f"read one with: hpc-es episodes {run} --version {last['version']} --member {last['member']}")


def _print_numbers(out: "Console", rows: "pd.DataFrame", version: int, member: int) -> None:
    whose = "the evaluated policy" if member < 0 else f"member {member}"
    if rows.empty:
        out.print(f"version {version}, {whose}: not reported yet")
        return
    out.print(
        f"version {version}, {whose}: mean reward {rows['reward'].mean():.4f}, {int(rows['success'].sum())} of "
        f"{len(rows)} solved",
        style="bold",
    )
    out.print(_table([{str(key): value for key, value in row.items()} for row in rows.to_dict("records")], COLUMNS))


def _table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), collapse_padding=True, header_style="dim")
    for name, title in columns.items():
        table.add_column(title, justify="left" if name == "ended" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    return table


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _shown(kept: "Trajectory") -> "RenderableType":
    """One episode as readable text, in which answers stand out from prompts."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.rule import Rule
    from rich.text import Text

    from hpc_es.cli.terminal import harmless

    parts: list[RenderableType] = []
    for number, turn in enumerate(kept.turns, 1):
        parts.append(Rule(f"turn {number}", style="dim", align="left"))
        for message in turn.messages:
            label = "" if message.role == "user" else f"[{message.role}] "
            parts.append(Text(label + harmless(message.content)))
        earned = f"reward {turn.reward:.4g}" if turn.reward else ""
        notes = ", ".join(filter(None, (earned, "refused" if turn.invalid else "")))
        parts.append(Text(harmless(turn.answer) or "(an empty answer)", style="bold green"))
        if notes:
            parts.append(Text(notes, style="yellow"))
    episode, hidden = kept.episode, kept.episode.turns - len(kept.turns)
    if hidden:
        parts.append(Text(f"({plural(hidden, 'further turn')} not kept)", style="dim"))
    parts.append(Rule(style="dim"))
    solved = "solved" if episode.success else "not solved"
    parts.append(
        Text(f"{episode.ended} after {plural(episode.turns, 'turn')}, reward {episode.reward:.4g}, {solved}", "bold")
    )
    title = f"task {episode.task} ({kept.eval_id.purpose}), played by {kept.worker}"
    return Panel(Group(*parts), title=Text(title), title_align="left")


def _what_is_kept(paths: RunPaths, evaluation: str | None) -> str:
    versions = sorted({each.eval_id.version for each in kept_episodes(paths, None, None, None, evaluation)})
    if len(versions) > NUM_LISTED:
        return f"there are some of {len(versions)} versions from {versions[0]} to {versions[-1]}; "
    return f"there are some of version {', '.join(map(str, versions))}; " if versions else ""


def _at(version: int | None) -> str:
    return "" if version is None else f" at version {version}"


def _of_task(task: int | None) -> str:
    return "" if task is None else f" on task {task}"
