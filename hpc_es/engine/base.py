"""What an engine is: a language model whose weights are a member around theta_v.

An engine owns one arena (theta in float32) and one live model. Invariant: the live weights are always
cast(theta_v + sigma * sign * eps(seed)) of exactly one member, or cast(theta_v); they are written from theta
each time, never restored by subtraction. Weights never change while a request is in flight.
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
    facts: dict[str, str]
    """Versions of torch, vLLM and transformers, device, dtype."""
    seconds_to_load: float = 0.0
    """What reading theta_0 took; 0: unknown."""


@dataclass(frozen=True)
class Chat:
    """The prompt of an engine that puts messages through a chat template of its own."""

    messages: tuple[Mapping[str, Any], ...]
    """role and content of each, as in OpenAI's API."""
    options: Mapping[str, Any]
    """Variables of the chat template (task.chat_options)."""

    def __len__(self) -> int:
        return len(self.messages)


@dataclass(frozen=True)
class Illustrated:
    """A prompt of token ids with a place for each image."""

    tokens: list[int]
    images: tuple[bytes, ...]
    """PNG or JPEG files."""

    def __len__(self) -> int:
        """Without what the images add, which the engine alone knows."""
        return len(self.tokens)


@dataclass(frozen=True)
class Completion:
    text: str
    tokens_in: int
    tokens_out: int
    truncated: bool
    """The answer was cut at max_tokens or at the context's end."""


class Engine(ABC):
    """Asynchronous: many `generate` calls at once; everything else one at a time and with none in flight."""

    tokenizer: "PreTrainedTokenizerBase | None"
    """None: this engine takes no tokens; it is asked by `chat` in place of `generate`."""

    @classmethod
    @abstractmethod
    async def start(
        cls, model: ModelConfig, engine: EngineConfig, *, threads: int, optimiser: Kind = "none"
    ) -> "Engine":
        """Load theta_0 into arena and live model, and probe that noise reaches the engine (design, section 5).

        `optimiser`: es.optimiser.kind, whose state the arena keeps beside theta.

        Errors: ModelError for a checkpoint that cannot be used, EngineError when the probe fails.
        """

    @property
    def takes_images(self) -> bool:
        """Whether prompts may carry images, as far as is known here: engines that take chats pass them on."""
        return self.tokenizer is None

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @property
    @abstractmethod
    def version(self) -> int:
        """The policy version in the arena."""

    @property
    @abstractmethod
    def digest(self) -> int:
        """Digest of the arena at `version`, as the last load, update or perturb read it."""

    @abstractmethod
    async def load(self, checkpoint: Path | None) -> None:
        """Arena := a checkpoint folder, or the base model. Sets `version` and `digest`."""

    @abstractmethod
    async def update(self, commits: Sequence[Commit]) -> None:
        """Apply consecutive commits version+1, version+2, ... in one streaming pass."""

    async def receive(self, version: int, digest: int, buckets: Iterable[memoryview]) -> None:
        """Arena := what the buckets bring (see hpc_es/params/receive.py); they are iterated over in a thread.

        Errors: as there; the arena is then at theta_0.
        """
        raise EngineError(f"{type(self).__name__} keeps no theta that could be received")

    @abstractmethod
    async def perturb(self, member: Member | None) -> None:
        """Write the member's weights (None: the centre) into the live model; drop every cached prefix.

        Errors: EngineError while a request is in flight, or when the cache reset is refused.
        """

    @abstractmethod
    async def generate(
        self, prompt: Sequence[int], sampling: SamplingConfig, *, seed: int, choices: Sequence[str] | None = None
    ) -> Completion:
        """Continue a prompt of token ids; with `choices`, answer with one of them, ranked by sampling.choice_score.

        Errors: EngineError when the prompt leaves no room for an answer within max_model_len; EnvError for choices
        without tokens, or with the same ones.
        """

    @abstractmethod
    async def log_probabilities(self, prompt: Sequence[int], answers: Sequence[tuple[int, ...]]) -> list[list[float]]:
        """Log-probability of each token of each answer, given the prompt and the tokens before it.

        The prompt is computed once. Prompt and answer have to be shorter than max_model_len.
        """

    async def chat(
        self, chat: Chat, sampling: SamplingConfig, *, seed: int, choices: Sequence[str] | None = None
    ) -> Completion:
        """The same for an engine without a tokenizer.

        Errors: ContextFull when the conversation is too long for the model; EngineError for everything that does not
        answer; ConfigError when the engine cannot choose among given answers; EnvError as in `generate`.
        """
        raise EngineError(f"{type(self).__name__} continues token ids; call generate")

    async def look(self, prompt: Illustrated, sampling: SamplingConfig, *, seed: int) -> Completion:
        """As `generate`, about images; tokens in are counted with those that the images come to.

        Errors: ContextFull when that is too long for the model; EnvError for what is no image; EngineError when the
        engine takes none.
        """
        raise EngineError(f"{type(self).__name__} takes no images")

    @abstractmethod
    async def logits(self, prompt: Sequence[int]) -> list[float]:
        """Log-probabilities of the next token over the vocabulary; for probes and cross-checks."""

    @abstractmethod
    async def probe(self) -> None:
        """Compare every live parameter with the arena. Errors: EngineError naming the first that differs."""

    @abstractmethod
    async def close(self) -> None:
        """End every process and free every byte that the engine took."""
