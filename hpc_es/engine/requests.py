"""What all engines compute in the same way for a request: room for the answer, choices as tokens, and their ranks."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_es.config.schema import SamplingConfig
from hpc_es.engine.base import Completion, SampledTokens
from hpc_es.errors import EngineError, EnvError
from hpc_es.noise import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def answer_room(prompt: Sequence[int], max_tokens: int, max_model_len: int) -> int:
    """New tokens that this prompt may get. Errors: EngineError when there is no room for even one."""
    if not prompt:
        raise EngineError("the prompt has no tokens; it needs at least one")
    room = max_model_len - len(prompt)
    if room < 1:
        raise EngineError(
            f"a prompt of {len(prompt)} tokens leaves no room within engine.max_model_len={max_model_len}; "
            "raise it, or shorten the prompt"
        )
    return min(max_tokens, room)


def choice_tokens(
    tokenizer: "PreTrainedTokenizerBase", choices: Sequence[str], prompt: Sequence[int], max_model_len: int
) -> dict[tuple[int, ...], str]:
    """Token ids -> choice, in the order given.

    Errors: EnvError for a choice without tokens, or two that are the same tokens; EngineError when one does not fit
    behind the prompt.
    """
    tokens: dict[tuple[int, ...], str] = {}
    for choice in choices:
        ids = tuple(tokenizer.encode(choice, add_special_tokens=False))
        if not ids:
            raise EnvError(f"choice {choice!r} has no tokens; a choice is what the model would have to say")
        if ids in tokens:
            raise EnvError(f"choices {tokens[ids]!r} and {choice!r} are the same tokens {list(ids)}; drop one")
        tokens[ids] = choice
    if not tokens:
        raise EnvError("choices is empty; give at least one, or None for free text")
    longest = max(map(len, tokens))
    if len(prompt) + longest >= max_model_len and longest > 1:
        raise EngineError(
            f"a choice of {longest} tokens does not fit behind a prompt of {len(prompt)} within "
            f"engine.max_model_len={max_model_len}; raise it, or shorten the prompt"
        )
    return tokens


def single_tokens(choices: Mapping[tuple[int, ...], str]) -> list[int] | None:
    """The token ids of the choices, in order, if each is a single token: then drawing one of them ranks the choices.

    None if some choice is longer.
    """
    return [ids[0] for ids in choices] if all(len(ids) == 1 for ids in choices) else None


def chosen(
    choices: Mapping[tuple[int, ...], str],
    log_probabilities: Sequence[Sequence[float]],
    prompt: Sequence[int],
    sampling: SamplingConfig,
    seed: int,
    traces: bool,
) -> Completion:
    """Draw one of the choices; the logit of each is its sampling.choice_score.

    `log_probabilities`: of the tokens of each choice, given all tokens before; the end of an answer is not scored.
    tokens_out is the number of tokens of the choice that is drawn.
    """
    scores = np.array([sum(each) for each in log_probabilities])
    if sampling.choice_score == "mean":
        scores /= [len(each) for each in log_probabilities]
    place, log_probability = draw(scores, sampling, random.Random(seed))
    return choice_completion(choices, list(choices)[place], log_probability, prompt, traces)


def choice_completion(
    choices: Mapping[tuple[int, ...], str],
    ids: tuple[int, ...],
    log_probability: float,
    prompt: Sequence[int],
    traces: bool,
) -> Completion:
    """The completion that is the choice with the token ids `ids`, drawn with this log-probability."""
    sampled = None
    if traces:
        log_probabilities = (log_probability, *[0.0] * (len(ids) - 1))
        sampled = SampledTokens(tuple(prompt), ids, log_probabilities, tuple(choices))
    return Completion(choices[ids], len(prompt), len(ids), truncated=False, sampled=sampled)


def draw(logits: Array, sampling: SamplingConfig, generator: random.Random) -> tuple[int, float]:
    """A position in `logits`, and the log-probability with which it was drawn.

    Applied in vLLM's order: greedy or temperature, top-k, top-p. The log-probability of a greedy draw is that of the
    plain softmax.
    """
    if sampling.temperature == 0:
        best = int(logits.argmax())
        return best, -math.log(np.exp(logits.astype(np.float64) - float(logits[best])).sum())
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    scaled = logits[order].astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled[0])
    ends = weights.cumsum()
    ends /= ends[-1]
    ends = ends[: int(np.searchsorted(ends, sampling.top_p)) + 1]  # the smallest number that together reach top_p
    at = min(int(np.searchsorted(ends, generator.random() * ends[-1], side="right")), ends.size - 1)
    return int(order[at]), float(scaled[at] - scaled[0] - math.log(weights[: ends.size].sum()))


def end_tokens(tokenizer: "PreTrainedTokenizerBase", generation_config: Any) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's, and all that the checkpoint's generation_config.json lists."""
    listed = getattr(generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    return frozenset(i for i in (tokenizer.eos_token_id, *ids) if i is not None)
