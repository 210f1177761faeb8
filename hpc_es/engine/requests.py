"""What a request may ask, worked out alike for every engine: room for the answer, choices as tokens and their rank."""

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_es.config.schema import SamplingConfig
from hpc_es.engine.base import Completion
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


def single_tokens(choices: Mapping[tuple[int, ...], str]) -> dict[int, str] | None:
    """The same for choices that are one token each: drawing among these tokens is ranking them. None when some are
    longer."""
    return {ids[0]: choice for ids, choice in choices.items()} if all(len(ids) == 1 for ids in choices) else None


def chosen(
    choices: Mapping[tuple[int, ...], str],
    log_probabilities: Sequence[Sequence[float]],
    num_prompt: int,
    sampling: SamplingConfig,
    seed: int,
) -> Completion:
    """The choice that is drawn, by sampling.choice_score as its logit. `log_probabilities`: of each choice's tokens,
    given all before; the end of an answer is not scored. Counted as tokens out are those of the choice that is drawn.
    """
    scores = np.array([sum(each) for each in log_probabilities])
    if sampling.choice_score == "mean":
        scores /= [len(each) for each in log_probabilities]
    ids, text = list(choices.items())[draw(scores, sampling, random.Random(seed))]
    return Completion(text, num_prompt, len(ids), truncated=False)


def draw(logits: Array, sampling: SamplingConfig, generator: random.Random) -> int:
    """A position in `logits`, in vLLM's order: greedy or temperature, top-k, top-p."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    scaled = logits[order].astype(np.float64) / sampling.temperature
    ends = np.exp(scaled - scaled[0]).cumsum()
    ends /= ends[-1]
    ends = ends[: int(np.searchsorted(ends, sampling.top_p)) + 1]  # the first so many that together reach top_p
    at = int(np.searchsorted(ends, generator.random() * ends[-1], side="right"))
    return int(order[min(at, ends.size - 1)])


def end_tokens(tokenizer: "PreTrainedTokenizerBase", generation_config: Any) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's, and all that the checkpoint's generation_config.json lists."""
    listed = getattr(generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    return frozenset(i for i in (tokenizer.eos_token_id, *ids) if i is not None)
