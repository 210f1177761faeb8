"""What an engine is: a generator of answers, and a host of weights that follow a run.

`Generator` is asked for answers: an endpoint is no more than that. `WeightHost` keeps theta, applies commits to it and
writes members. `Engine` is both. Invariant: the live weights are always cast(theta_v + sigma * sign * eps(seed)) of
exactly one member, or cast(theta_v). They are written from theta each time, never restored by subtraction, and never
change while a request is in flight.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_es.config.schema import EngineConfig, ModelConfig, SamplingConfig
from hpc_es.errors import EngineError
from hpc_es.methods.es.optimiser import Kind
from hpc_es.records import Commit, Member

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EngineInfo:
    """Facts exchanged at Hello."""

    base_digest: int
    """Digest of theta_0; for an endpoint, whose weights are not accessible, of its URL and the model's name."""
    facts: dict[str, str]
    """Versions of torch, vLLM and transformers, device, dtype."""
    seconds_to_load: float = 0.0
    """Seconds that loading theta_0 took; 0: unknown."""


# --- prompts and answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chat:
    """A prompt of messages, for a generator that applies a chat template of its own."""

    messages: tuple[Mapping[str, Any], ...]
    """role and content of each, as in OpenAI's API."""
    options: Mapping[str, Any]
    """Variables of the chat template (task.chat_options)."""

    def __len__(self) -> int:
        return len(self.messages)


@dataclass(frozen=True)
class ImagePrompt:
    """A prompt of token ids with a place for each image."""

    tokens: list[int]
    images: tuple[bytes, ...]
    """PNG or JPEG files."""

    def __len__(self) -> int:
        """Number of tokens without those of the images, which only the engine knows."""
        return len(self.tokens)


Prompt = Sequence[int] | ImagePrompt | Chat
"""Token ids, token ids with images, or messages."""


@dataclass(frozen=True)
class SampledTokens:
    """The tokens of one answer, exactly as the engine computed and drew them."""

    prompt: tuple[int, ...]
    """Token ids before the answer, those of images included."""
    tokens: tuple[int, ...]
    """Token ids that were drawn, the one that ended the answer included."""
    log_probabilities: tuple[float, ...]
    """Natural logarithm of the probability of each drawn token, under the distribution that it was drawn from: after
    penalties, temperature, top-k and top-p; at temperature 0, after penalties alone. Of an answer that is one of given
    choices, the first token has the log-probability of the choice as a whole, and the others have 0."""
    choices: tuple[tuple[int, ...], ...] = ()
    """Token ids of the given choices, in order; empty: free text."""


@dataclass(frozen=True)
class Completion:
    text: str
    tokens_in: int
    tokens_out: int
    truncated: bool
    """Whether the answer was cut off at max_tokens or at the end of the context."""
    sampled: SampledTokens | None = None
    """Present if the engine was started with `traces`."""


class Generator(ABC):
    """Answers prompts, many at the same time."""

    tokenizer: "PreTrainedTokenizerBase | None"
    """None: this generator takes no token ids, only chats."""

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @property
    def takes_images(self) -> bool:
        """Whether prompts may contain images. A generator that takes chats passes images on and cannot know."""
        return self.tokenizer is None

    @abstractmethod
    async def generate(
        self, prompt: Prompt, sampling: SamplingConfig, *, seed: int, choices: Sequence[str] | None = None
    ) -> Completion:
        """Answer a prompt. With `choices`, the answer is one of them, ranked by sampling.choice_score.

        Errors: ContextFull when a chat or images do not fit into the model's context; EngineError when token ids leave
        no room for an answer, when the generator does not take this kind of prompt, or when it fails; EnvError for
        choices that are empty or equal, and for damaged images; ConfigError when it cannot choose between answers.
        """

    @abstractmethod
    async def close(self) -> None:
        """End every process and free all memory that the generator uses."""


class WeightHost(ABC):
    """Keeps theta at one policy version, and writes members into a live model.

    Everything here happens one at a time, and with no request in flight.
    """

    @property
    @abstractmethod
    def version(self) -> int:
        """The policy version of theta."""

    @property
    @abstractmethod
    def digest(self) -> int:
        """Digest of theta at `version`, as computed by the last load, update or perturb."""

    @abstractmethod
    async def load(self, checkpoint: Path | None) -> None:
        """Set theta to a checkpoint folder, or to the base model (None)."""

    @abstractmethod
    async def update(self, commits: Sequence[Commit]) -> None:
        """Apply the consecutive commits version+1, version+2, ... in one streaming pass."""

    @abstractmethod
    async def receive(self, version: int, digest: int, buckets: Iterable[memoryview]) -> None:
        """Set theta to the bytes of the buckets (see hpc_es/params/rebuild.py), which are read in a thread.

        Errors: as there; theta is then theta_0.
        """

    @abstractmethod
    async def perturb(self, member: Member | None) -> None:
        """Write a member's weights (None: the centre) into the live model, and drop every cached prefix.

        Errors: EngineError while a request is in flight, or when the cache reset is refused.
        """

    @abstractmethod
    async def probe(self) -> None:
        """Compare every live parameter with theta. Errors: EngineError naming the first that differs."""


class Engine(Generator, WeightHost):
    """A language model on this node."""

    @classmethod
    @abstractmethod
    async def start(
        cls, model: ModelConfig, engine: EngineConfig, *, threads: int, optimiser: Kind = "none", traces: bool = False
    ) -> "Engine":
        """Load theta_0 into arena and live model, and probe that noise reaches the engine (design, section 5).

        `optimiser`: es.optimiser.kind, whose state the arena keeps beside theta. `traces`: whether completions contain
        the sampled tokens. Errors: ModelError for a checkpoint that cannot be used, EngineError when the probe fails.
        """

    @abstractmethod
    async def log_probabilities(self, prompt: Sequence[int], answers: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Log-probability of each token of each answer, given the prompt and the tokens before it.

        The prompt is computed once. Prompt and answer have to be shorter than max_model_len.
        """

    @abstractmethod
    async def logits(self, prompt: Sequence[int]) -> list[float]:
        """Log-probabilities of the next token over the vocabulary, for probes and comparisons of engines."""


def token_ids(prompt: Prompt, kind: str) -> Sequence[int]:
    """The prompt, for an engine that takes token ids only. Errors: EngineError for any other kind of prompt."""
    if isinstance(prompt, Chat | ImagePrompt):
        what = "messages" if isinstance(prompt, Chat) else "images"
        raise EngineError(f"engine.kind={kind} takes token ids, and the prompt has {what}")
    return prompt
