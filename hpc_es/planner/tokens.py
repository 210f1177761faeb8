"""How many tokens an episode takes: given, or as a run measured them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_es import envs
from hpc_es.config.schema import Config
from hpc_es.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from hpc_es.store import Run


@dataclass(frozen=True)
class Tokens:
    """Mean tokens of one episode. L is what is computed; only what a run recorded may hold cached prefixes too."""

    prompt: float
    answer: float
    turns: float
    source: str
    with_cached: bool = False
    """Prompts are counted in full, though a prefix cache spared a part."""

    @property
    def total(self) -> float:
        """L."""
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
    """L, or prompt and answer tokens apart. Turns: at most what the task allows; with L alone, answers are as long as
    `answer_share` of it, and at most sampling.max_tokens a turn. Errors: ConfigError."""
    turns = turn_limit(config) if turns is None else turns
    longest = turns * config.sampling.max_tokens
    if per_episode is None:
        if prompt is None or answer is None:
            raise ConfigError(
                "say how long an episode is: --tokens-per-episode L, or --tokens-in and --tokens-out, or --like RUN. "
                "L counts prompts and answers of all turns, without what the prefix cache spares; answers have at most "
                f"{longest:,.0f} tokens here, {turns:g} turns of sampling.max_tokens={config.sampling.max_tokens}"
            )
        return Tokens(prompt, answer, turns, "given")
    if prompt is not None:
        raise ConfigError("--tokens-per-episode and --tokens-in say the same twice: give L, or --tokens-in and -out")
    if answer is not None and answer > per_episode:
        raise ConfigError(f"--tokens-out {answer:g} must be at most the {per_episode:g} of the whole episode")
    if answer is not None:
        return Tokens(per_episode - answer, answer, turns, "given")
    answer = min(longest, answer_share * per_episode)
    return Tokens(per_episode - answer, answer, turns, "L is given, answers are assumed")


def measured(run: "Run") -> Tokens:
    """Means over a run's training episodes. There, prompts count in full in every turn, whatever the prefix cache
    spared. Errors: StoreError when it has none."""
    episodes = run.episodes[(run.episodes["source"] == "run") & (run.episodes["kind"] == "train")]
    if episodes.empty:
        raise StoreError("the run has no training episode: how long one is cannot be read from it")
    prompt, answer, turns = (float(episodes[name].mean()) for name in ("tokens_in", "tokens_out", "turns"))
    engine = run.config.get("engine", {})
    with_cached = engine.get("kind", "vllm") == "vllm" and engine.get("prefix_cache", True)
    source = f"means over {len(episodes):,} episodes" + (", cached prefixes included" if with_cached else "")
    return Tokens(prompt, answer, turns, source, with_cached)


def turn_limit(config: Config) -> float:
    """Turns that the task allows: `max_turns`, three per blank in sudoku, 1 where an environment has no such option.

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
