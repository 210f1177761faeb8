"""Proves that noise reaches the live model; all engines use it.

The logits of a perturbed member must differ from those of the centre, and the centre's must return to the same bits.
"""

import math
from typing import TYPE_CHECKING

from hpc_es.engine.base import Engine
from hpc_es.errors import EngineError
from hpc_es.records import Member

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = Member(seed=0x5EED0F9E0BE5, sign=1, sigma=1e-2)
"""Strong enough to show in bfloat16."""


async def prove_noise_reaches(engine: Engine) -> None:
    """Compare the logits of the centre, of one member, and of the centre again. The live model is then the centre.

    Errors: EngineError when noise does not change them, or when the centre does not return to the same bits.
    """
    prompt = _probe_prompt(engine.tokenizer)
    await engine.perturb(None)
    centre = await engine.logits(prompt)
    await engine.perturb(PROBE)
    perturbed = await engine.logits(prompt)
    await engine.perturb(None)
    again = await engine.logits(prompt)
    if not all(map(math.isfinite, centre)):
        raise EngineError("the base model's logits are not finite; is model.dtype right for this checkpoint?")
    if perturbed == centre:
        raise EngineError("the logits of a perturbed member equal the centre's: noise does not reach the live model")
    if again != centre:
        worst = max(abs(a - b) for a, b in zip(again, centre, strict=True))
        raise EngineError(f"the centre's logits did not return to the same bits after a member (off by {worst:.3g})")


def _probe_prompt(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    return list(tokenizer.encode("1 + 1 ="))[:8]
