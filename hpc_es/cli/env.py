"""`hpc-es env`: list environments, check one against the contract, or play one by hand.

Invariant: needs neither a model nor an engine. A user's own environment is named package.module:Class; its module may
be in the working directory.
"""

import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_es.cli.arguments import EXIT_STOPPED, Json
from hpc_es.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from rich.console import Console

    from hpc_es.envs.base import Env, Observation

Name = Annotated[str, typer.Argument(metavar="ENV", help="A built-in name, or package.module:Class.")]
Options = Annotated[
    list[str] | None, typer.Argument(metavar="OPTION=VALUE", help="Options of the environment, e.g. blanks=5.")
]


def add_commands(app: typer.Typer) -> None:
    env = typer.Typer(help="List, check and play environments.", no_args_is_help=True, rich_markup_mode=None)
    env.command("list")(list_envs)
    env.command()(check)
    env.command()(play)
    app.add_typer(env, name="env")


def list_envs(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="ENV", help="Show only this one (or package.module:Class), with the meaning of its options."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the built-in environments with their options and defaults."""
    from dataclasses import asdict

    from hpc_es import envs
    from hpc_es.cli.output import console, print_json

    described = {each: envs.describe(each) for each in ([name] if name else envs.registered())}
    if json:
        print_json({name: asdict(each) for name, each in described.items()})
    out = console(stderr=json)
    for listed, each in described.items():
        out.print(listed, style="bold")
        out.print(f"  {each.what}")
        for option, default in each.options.items():
            choices = f"  ({', '.join(each.choices[option])})" if option in each.choices else ""
            out.print(f"    {option} = {default}{choices}", style="dim")
        if name and each.meaning:
            out.print(textwrap.indent(each.meaning, "  "))
    if not name:
        out.print("for the meaning of the options: hpc-es env list ENV")


def check(name: Name, options: Options = None, json: Json = False) -> None:
    """Check an environment: play it with valid, invalid and extreme answers, and report how it breaks the contract."""
    from hpc_es import envs
    from hpc_es.cli.output import console, print_json, stdout_for
    from hpc_es.envs.check import check_env

    given = _options(options)
    with stdout_for(json):
        try:
            num_tasks = check_env(lambda: envs.make(name, **given))
        except EnvError as error:
            raise EnvError(f"{name} breaks the contract: {error}") from error
    if json:
        print_json({"env": name, "options": given, "ok": True, "num_tasks": num_tasks})
    out = console(stderr=json)
    out.print(f"{name} satisfies the contract; it has {num_tasks} tasks", style="green")
    if "split" not in envs.describe(name).options:
        out.print(
            "it has no option `split`, which a run sets to train or eval: evaluations will play training tasks unless "
            "task.train and eval.options select different ones"
        )


def play(
    name: Name,
    options: Options = None,
    task: Annotated[int, typer.Option(help="Index of the task.")] = 0,
) -> None:
    """Play one task by hand, in place of the model.

    An empty line shows the prompt again. A backslash at the end of a line continues the answer on the next line.
    Ctrl-D quits.
    """
    from hpc_es import envs
    from hpc_es.cli.output import console
    from hpc_es.envs.check import made

    out, given = console(), _options(options)
    try:
        with made(lambda: envs.make(name, **given)) as env:
            is_over = _play(env, task, out)
    except EnvError as error:
        raise EnvError(f"{name}: {error}") from error
    if not is_over:
        raise typer.Exit(EXIT_STOPPED)


def _play(env: "Env", task: int, out: "Console") -> bool:
    """Play one episode; False if the user quits before its end."""
    observation: Observation | None = env.reset(task)
    reward, turn = 0.0, 0
    while observation is not None:
        turn += 1
        out.rule(f"turn {turn}", align="left", style="dim")
        _show(observation, out)
        answer = _ask(observation, out)
        if answer is None:
            return False
        result = env.step(answer)
        reward += float(result.reward)
        if result.invalid:
            out.print("refused", style="red")
        if result.reward:
            out.print(f"reward {float(result.reward):.4g}", style="yellow")
        observation = result.observation
    ended = "a limit of the task was reached" if result.truncated else "the task is over"
    solved = "solved" if result.success else "not solved"
    out.print(f"{ended} after {turn} turn{'' if turn == 1 else 's'}: reward {reward:.4g}, {solved}", style="bold")
    return True


def _show(observation: "Observation", out: "Console") -> None:
    for message in observation.messages:
        if message.role != "user":
            out.print(f"[{message.role}]", style="dim")
        out.print(message.readable)
    for number, choice in enumerate(observation.choices or (), 1):
        out.print(f"  #{number} {choice}", style="cyan")


def _ask(observation: "Observation", out: "Console") -> str | None:
    """Read an answer of one or more lines; None at the end of the input.

    If there are choices, the answer must be one of them, by its text or as `#number`.
    """
    while True:
        try:
            answer = out.input("> ")
            while answer.endswith("\\"):
                answer = answer[:-1] + "\n" + out.input(". ")
        except (EOFError, KeyboardInterrupt):
            return None
        choices = observation.choices
        if not answer:
            _show(observation, out)
        elif choices is None or answer in choices:
            return answer
        elif answer.startswith("#") and answer[1:].isdecimal() and 1 <= int(answer[1:]) <= len(choices):
            return choices[int(answer[1:]) - 1]
        else:
            out.print(f"answer with one of the {len(choices)} choices, or #1 to #{len(choices)}", style="red")


def _options(given: list[str] | None) -> dict[str, Any]:
    """Parse OPTION=VALUE arguments, whose values are YAML. Errors: ConfigError."""
    from hpc_es.config import yaml12

    options = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not (equals and key.isidentifier()):
            raise ConfigError(f"{text!r} must look like option=value, e.g. blanks=5")
        options[key] = yaml12.plain(yaml12.parse(value, text))
    return options
