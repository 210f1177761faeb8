"""What a request may ask, worked out alike for every engine: room for the answer, and choices as tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpc_es.errors import EngineError, EnvError

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


def choice_tokens(tokenizer: "PreTrainedTokenizerBase", choices: Sequence[str]) -> dict[int, str]:
    """Token id -> choice. Errors: EnvError for a choice that is not one token, or two that share theirs."""
    tokens: dict[int, str] = {}
    for choice in choices:
        ids = tokenizer.encode(choice, add_special_tokens=False)
        if len(ids) != 1:
            raise EnvError(f"choice {choice!r} is {len(ids)} tokens in this tokenizer; choices must be one token each")
        if ids[0] in tokens:
            raise EnvError(f"choices {tokens[ids[0]]!r} and {choice!r} are the same token {ids[0]}; drop one")
        tokens[ids[0]] = choice
    if not tokens:
        raise EnvError("choices is empty; give at least one, or None for free text")
    return tokens


def end_tokens(tokenizer: "PreTrainedTokenizerBase", generation_config: Any) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's, and all that the checkpoint's generation_config.json lists."""
    listed = getattr(generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    return frozenset(i for i in (tokenizer.eos_token_id, *ids) if i is not None)
