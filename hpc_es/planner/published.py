"""Published results, shown beside the plan of the same run. No prediction is computed from them."""

from dataclasses import dataclass

from hpc_es.config.schema import Config

HARDWARE = ("h100", 4)
"""GPU model and number of GPUs of the published hours."""


@dataclass(frozen=True)
class Published:
    """One row of a paper's table; None for figures that it does not state."""

    source: str
    fitted: tuple[str, ...]
    """Fields that an assumption of the planner was fitted to, so that the planned figure is not a prediction."""
    exaflops: float | None = None
    hours: float | None = None
    """Hours on HARDWARE; also the unit of `grpo_hours`."""
    grpo_exaflops: float | None = None
    grpo_hours: float | None = None
    grpo_gib: float | None = None
    """GiB of memory for training; also the unit of `ppo_gib`."""
    ppo_gib: float | None = None
    ratio_per_update: float | None = None
    """Nominal compute of ES divided by GRPO's, per update; `ratio_in_all` is the ratio over the whole run."""
    ratio_in_all: float | None = None


_MEMORY = {"grpo_gib": 58.88, "ppo_gib": 89.40}
SUDOKU = {
    5: Published("Zheng et al., 2026, H* 5", ("hours", "grpo_hours", "grpo_gib"), 3.1, 3.1, 3.2, 5.4, **_MEMORY),
    10: Published("Zheng et al., 2026, H* 10", ("grpo_gib",), 6.3, 5.8, 7.6, 13.1, **_MEMORY),
    15: Published("Zheng et al., 2026, H* 15", ("grpo_gib",), 9.4, 9.4, 10.9, 19.0, **_MEMORY),
}
"""Rows by number of blanks: Qwen3.5-4B, 9x9, 100 updates of 32 members x 32 puzzles."""
_RATIOS = ("ratio_per_update", "ratio_in_all")
WEBSHOP = {
    (16, 16, 200): Published("Hoy et al., 2026, 16x16", _RATIOS, ratio_per_update=0.20, ratio_in_all=0.40),
    (30, 32, 200): Published("Hoy et al., 2026, 30x32", _RATIOS, ratio_per_update=0.75, ratio_in_all=1.50),
    (30, 100, 120): Published("Hoy et al., 2026, 30x100", _RATIOS, ratio_per_update=2.34, ratio_in_all=2.81),
}
"""Rows by members, tasks per member and updates."""


def published_of(config: Config) -> Published | None:
    """The published row that this configuration repeats, by task and size; the model is not compared."""
    es, options = config.es, config.task.options
    size = (es.population, es.tasks_per_member, config.run.num_updates)
    if config.task.env == "webshop":
        return WEBSHOP.get(size)
    if config.task.env == "sudoku" and size == (32, 32, 100) and options.get("size", 9) == 9:
        return SUDOKU.get(options.get("blanks", 0))
    return None
