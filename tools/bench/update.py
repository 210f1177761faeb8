"""Apply N members to theta: compared with the usual way in PyTorch, and with this machine's limit.

    python tools/bench/update.py [MODEL_FOLDER] [--layers 4] [--members 16] [--threads T] [--rounds 3] [--cpu-time]
                                 [--json]

Ours adds all members to the fp32 arena in one pass, which also takes the digest and the norm of the change. The usual
way, per tensor: the sum of the members' noise (torch.Generator, randn in the model's dtype) in an fp32 buffer, then
add_.

The limit is the larger of two times that are measured in turn with ours: a copy that moves as many bytes (theta read
and written once), and the kernel alone on as many elements within the cache. Medians, on the same threads; --cpu-time
as in noise.py.
"""

import time
from functools import partial

import numpy as np
from harness import Clock, Row, alternate, arguments, copying, show, updating
from weights import add_arguments, clock_of, live_model, prepare, usual_update

from hpc_es.noise import Update
from hpc_es.params import Arena

ALPHA = 5e-4
MIN_RATIO, MAX_OF_LIMIT = 10, 1.5


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--members", type=int, default=16, help="population N")
    add_arguments(parser, rounds=3)
    options = parser.parse_args()
    arena = prepare(options)
    rows = compare(arena, options.members, options.threads, options.rounds, clock_of(options))
    show("update", rows, as_json=options.json)


def compare(arena: Arena, num_members: int, num_threads: int, rounds: int, clock: Clock) -> list[Row]:
    """Measure one row per dtype of the usual way; ours is the same for both."""
    seeds = [2**40 + seed for seed in range(num_members)]
    coefficients = [float(np.float32(ALPHA / num_members / 4096 * (seed % 5 - 2))) for seed in range(num_members)]
    count, members = arena.num_parameters, list(zip(seeds, coefficients, strict=True))
    models = {dtype: live_model(arena, dtype) for dtype in ("float32", "bfloat16")}
    seconds = alternate(
        {
            "ours": lambda: arena.update(members),
            "copy": copying(8 * count, num_threads),
            "kernel": updating(count, num_threads, [Update(seeds, coefficients)]),
            **{dtype: partial(usual_update, model, seeds, coefficients) for dtype, model in models.items()},
        },
        rounds,
        warm_up=False,
        clock=clock,
    )
    cpu, wall = time.process_time(), time.perf_counter()
    arena.update(members)
    cores = (time.process_time() - cpu) / (time.perf_counter() - wall)
    rate = count * num_members / 1e6 / seconds["ours"]
    print(f"{rate:,.0f} M elements x members a second; {cores:.2f} cores busy")
    limit = max(seconds["copy"], seconds["kernel"])
    return [
        Row(
            f"update N={num_members}, usual way in {dtype}",
            "s",
            seconds["ours"],
            seconds[dtype],
            limit,
            min_ratio=MIN_RATIO,
            max_of_limit=MAX_OF_LIMIT,
        )
        for dtype in models
    ]


if __name__ == "__main__":
    main()
