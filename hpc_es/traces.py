"""What a gradient method learns from: the tokens of every answer, exactly as the engine sampled them.

A worker writes one file for every evaluation; the trainer and offline analysis read it. Invariant: token ids are those
that the engine was given and that it drew. Text that was put into tokens again never stands in for them: where a later
prompt does not begin with the tokens of the turns before it, a new sequence begins.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct

from hpc_es.errors import StoreError
from hpc_es.files import open_regular
from hpc_es.records import EvalId

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


class TurnTrace(Struct, frozen=True, gc=False, array_like=True):
    """One answer of the model."""

    prompt: tuple[int, ...]
    """Token ids that the engine was given."""
    sampled: tuple[int, ...]
    """Token ids that it drew, the one that ended the answer included."""
    log_probabilities: tuple[float, ...]
    """Of the sampled tokens, natural logarithms, under the distribution that they were drawn from: after temperature,
    top-k, top-p and penalties."""
    reward: float
    """Reward of this turn."""
    images: tuple[bytes, ...] = ()
    """PNG or JPEG files that stand in the prompt, in order."""
    choices: tuple[tuple[int, ...], ...] = ()
    """Token ids of the choices that the answer had to be one of; empty: free text. The first sampled token then has
    the log-probability of the choice as a whole, and the others have 0."""


class EpisodeTrace(Struct, frozen=True, gc=False, array_like=True):
    """One episode: what the model was shown and what it wrote."""

    task: int
    turns: tuple[TurnTrace, ...]


class Trace(Struct, frozen=True):
    """One evaluation, in the order of its task batch."""

    eval_id: EvalId
    digest: int
    """Digest of theta that the episodes were sampled from."""
    episodes: tuple[EpisodeTrace, ...]


@dataclass(frozen=True)
class TokenSequence:
    """Tokens that one forward pass can compute: all turns that continue each other."""

    tokens: "Array"
    """int32, [T]"""
    mask: "Array"
    """bool, [T]: the tokens that the model sampled."""
    log_probabilities: "Array"
    """float32, [T]: the sampler's; 0 where the mask is False."""
    rewards: "Array"
    """float32, [T]: the reward of a turn at its last sampled token, 0 elsewhere."""
    choices: Mapping[int, tuple[tuple[int, ...], ...]]
    """Position of the first token of an answer -> token ids of the choices that it had to be one of."""


def sequences(episode: EpisodeTrace) -> Iterator[TokenSequence]:
    """The sequences of one episode, in order: one, if every prompt begins with all tokens before it."""
    turns: list[TurnTrace] = []
    so_far: tuple[int, ...] = ()
    for turn in episode.turns:
        if turns and turn.prompt[: len(so_far)] != so_far:
            yield _joined(turns)
            turns = []
        turns.append(turn)
        so_far = turn.prompt + turn.sampled
    if turns:
        yield _joined(turns)


def _joined(turns: Sequence[TurnTrace]) -> TokenSequence:
    last = turns[-1]
    tokens = np.array(last.prompt + last.sampled, np.int32)
    mask = np.zeros(tokens.size, np.bool_)
    log_probabilities, rewards = np.zeros(tokens.size, np.float32), np.zeros(tokens.size, np.float32)
    choices = {len(turn.prompt): turn.choices for turn in turns if turn.choices}
    for turn in turns:
        first, end = len(turn.prompt), len(turn.prompt) + len(turn.sampled)
        mask[first:end] = True
        log_probabilities[first:end] = turn.log_probabilities
        if turn.sampled:
            rewards[end - 1] = turn.reward
    return TokenSequence(tokens, mask, log_probabilities, rewards, choices)


# --- files -------------------------------------------------------------------------------------------------------


def write_trace(folder: Path, trace: Trace) -> str:
    """Write a trace atomically to a file of its own in `folder`. Returns the hash that names it. Errors: OSError."""
    data = zlib.compress(msgspec.msgpack.encode(trace), level=1)
    name = _hash(data)
    folder.mkdir(exist_ok=True)
    path = trace_file(folder, trace.eval_id, name)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
    return name


def read_trace(folder: Path, eval_id: EvalId, name: str) -> Trace:
    """The trace that a result names. Errors: StoreError when the file is missing, damaged, or of another evaluation."""
    path = trace_file(folder, eval_id, name)
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read()
    except FileNotFoundError as error:
        raise StoreError(f"the trace of evaluation {eval_id} is missing: {path}; was it removed?") from error
    except OSError as error:
        raise StoreError(f"the trace of evaluation {eval_id} cannot be read: {error}") from error
    if _hash(data) != name:
        raise StoreError(f"the trace {path} is damaged: its content does not have the hash in its name")
    trace = msgspec.msgpack.decode(zlib.decompress(data), type=Trace)
    if trace.eval_id != eval_id:
        raise StoreError(f"the trace {path} is of evaluation {trace.eval_id}, and not of {eval_id}")
    return trace


def remove_traces(folder: Path, eval_id: EvalId) -> None:
    """Remove every trace of an evaluation; there may be several, because an evaluation can be made twice."""
    for path in folder.glob(f"{eval_id}-*.trace"):
        path.unlink(missing_ok=True)


def trace_file(folder: Path, eval_id: EvalId, name: str) -> Path:
    """The path of a trace. The hash is part of it, because an evaluation can be made twice."""
    return folder / f"{eval_id}-{name}.trace"


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
