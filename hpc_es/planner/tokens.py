"""Tokens per episode, given by the user or measured in a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_es import envs
from hpc_es.config.schema import Config
from hpc_es.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from hpc_es.store import Run


@dataclass(frozen=True)
class Tokens:
    """Mean tokens of one episode. L counts only computed tokens; numbers from a run may include cached prefixes."""

    prompt: float
    answer: float
    turns: float
    source: str
    with_cached: bool = False
    """Whether prompts include tokens that a prefix cache saved."""

    @property
    def total(self) -> float:
        """Tokens of an episode, L."""
        return self.prompt + self.answer


def given(
    config: Config,
    *,
    per_episode: float | None = None,
    prompt: float | None = None,
    answer: float | None = None,
    turns: float | None = None,
    answer_share: float,
) -> Tokens:
    """Tokens from L, or from separate prompt and answer tokens.

    `turns` defaults to the task's limit. With L alone, `answer_share` of it are answer tokens, but at most
    sampling.max_tokens per turn. Errors: ConfigError.
    """
    turns = turn_limit(config) if turns is None else turns
    longest = turns * config.sampling.max_tokens
    if per_episode is None:
        if prompt is None or answer is None:
            raise ConfigError(
                "give an episode's length: --tokens-per-episode L, or --tokens-in and --tokens-out, or --like RUN. "
                "L counts prompts and answers of all turns, without tokens from the prefix cache; answers have at most "
                f"{longest:,.0f} tokens here, {turns:g} turns of sampling.max_tokens={config.sampling.max_tokens}"
            )
        return Tokens(prompt, answer, turns, "given")
    if prompt is not None:
        raise ConfigError("--tokens-per-episode excludes --tokens-in: give L, or --tokens-in and --tokens-out")
    if answer is not None and answer > per_episode:
        raise ConfigError(f"--tokens-out {answer:g} must be at most the {per_episode:g} of the whole episode")
    if answer is not None:
        return Tokens(per_episode - answer, answer, turns, "given")
    answer = min(longest, answer_share * per_episode)
    return Tokens(per_episode - answer, answer, turns, "L is given, answers are assumed")


def measured(run: "Run") -> Tokens:
    """Means over a run's training episodes. A run records full prompts in every turn, whatever its prefix cache saved.

    Errors: StoreError when the run has no training episode.
    """
    episodes = run.episodes[(run.episodes["source"] == "run") & (run.episodes["kind"] == "train")]
    if episodes.empty:
        raise StoreError(
            "the run has no training episode, so it does not show how long one is; give --tokens-in and -out"
        )
    prompt, answer, turns = (float(episodes[name].mean()) for name in ("tokens_in", "tokens_out", "turns"))
    engine = run.config.get("engine", {})
    with_cached = engine.get("kind", "vllm") == "vllm" and engine.get("prefix_cache", True)
    source = f"means over {len(episodes):,} episodes" + (", cached prefixes included" if with_cached else "")
    return Tokens(prompt, answer, turns, source, with_cached)


def turn_limit(config: Config) -> float:
    """Most turns per episode: `max_turns`, three per blank in sudoku, 1 if the environment has no such option.

    Errors: ConfigError for an environment that does not exist, or a puzzle that it does not have."""
    options = {**config.task.options, **config.task.train}
    if config.task.env == "sudoku":
        from hpc_es.envs.sudoku import DEFAULT_BLANKS, TURNS_PER_BLANK

        size = options.get("size", 9)
        blanks = options.get("blanks") or next((blanks for n, blanks in DEFAULT_BLANKS.items() if n == size), None)
        if not isinstance(blanks, int):
            sizes = " or ".join(map(str, DEFAULT_BLANKS))
            raise ConfigError(f"task.options={options}: sudoku needs a size of {sizes}, and a whole number of blanks")
        return float(TURNS_PER_BLANK * blanks)
    if "max_turns" not in options:
        options |= envs.describe(config.task.env).options
    limit = str(options.get("max_turns"))
    return float(limit) if limit.isdigit() else 1.0
