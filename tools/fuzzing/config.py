"""Damaged config.yaml of a run, and odd overrides."""

import random
import re
from collections.abc import Callable
from pathlib import Path

from fuzzing import readers
from fuzzing.base import Base
from fuzzing.bytes import any_damage
from fuzzing.child import Answer, Case, learn
from hpc_es.config import load
from hpc_es.paths import RunPaths

ODD = (
    "9" * 5000,
    "-" + "9" * 5000,
    "1e999999999",
    "1" + "0" * 400,
    "0x" + "f" * 5000,
    "[" * 20_000,
    "[" * 200,
    "{a: " * 5000,
    "\0",
    '"a\\0b"',
    "a" * 100_000,
    "&a [*a, *a]",
    "&a {x: *a}",
    "*nowhere",
    "!!python/object/apply:os.system [true]",
    ".nan",
    "-.inf",
    "null",
    "~",
    "[]",
    "{}",
    "[1, 2]",
    "{a: 1}",
    "true",
    "24:00:00",
    "2026-12-01",
    "-1",
    "0",
    "1.5",
    "''",
    "'\\ud800'",
    "\t",
    "%",
    "|\n  text",
    "? a",
    "\u2028",
    "٣",
)


def case(base: Base, seed: int) -> Case:
    rng = random.Random(f"config {seed}")
    path = RunPaths(base.run).config
    kind = rng.choice([*MUTATIONS, "override"])
    if kind == "override":
        text = _override(rng, path.read_text())

        def load_override(base: Base, run: Path) -> Answer:
            load(RunPaths(run).config, [text])
            return (), ""

        base.copy()
        return Case(kind, f"{text[:60]!r}", (load_override,))
    chosen = (load_config, readers.status, readers.verify, readers.replay, readers.resume)
    learn(base, *chosen[1:])
    mutated = RunPaths(base.copy()).config
    mutated.write_bytes(MUTATIONS[kind](rng, mutated.read_bytes()))
    return Case(kind, "", chosen)


def load_config(base: Base, run: Path) -> Answer:
    load(RunPaths(run).config)
    return (), ""


def _override(rng: random.Random, text: str) -> str:
    keys = ["run.seed", "run.dir", "run.name", "task.options.x", "es.population", "sampling.stop", "engine.extra.a"]
    key = rng.choice(
        [*keys, rng.choice(ODD), f"run.{rng.choice(ODD)}", "." * rng.randint(1, 5000), "task.options." * 500]
    )
    return f"{key}{rng.choice(('=', '=', '=', ' = ', '', '=='))}{rng.choice(ODD)}"


def _token(rng: random.Random, data: bytes) -> bytes:
    """A value, a key or whatever else is between two blanks."""
    text = data.decode()
    tokens = list(re.finditer(r"[^\s:]+", text))
    token = rng.choice(tokens)
    return (text[: token.start()] + rng.choice(ODD) + text[token.end() :]).encode(errors="surrogatepass")


def _line(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    which = rng.randrange(len(lines))
    change = rng.choice(("remove", "repeat", "swap", "indent"))
    if change == "remove":
        del lines[which]
    elif change == "repeat":
        lines.insert(rng.randrange(len(lines)), lines[which])
    elif change == "swap":
        other = rng.randrange(len(lines))
        lines[which], lines[other] = lines[other], lines[which]
    else:
        lines[which] = rng.choice((b" ", b"\t", b"  ")) + lines[which]
    return b"".join(lines)


def _replaced(rng: random.Random, data: bytes) -> bytes:
    return rng.choice(
        (b"", b"\0", b"hi", b"[]", b"\xff\xfe\x00", b"[" * 100_000, b"a: &a [" * 5000, b"- " * 50_000, b"1")
    )


MUTATIONS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "token replaced": _token,
    "line moved": _line,
    "bytes damaged": any_damage,
    "file replaced": _replaced,
}
