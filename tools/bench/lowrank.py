"""Apply N members of low rank to theta: compared with as many members of full rank.

    python tools/bench/lowrank.py [MODEL_FOLDER] [--layers 4] [--members 16] [--ranks 1,2,4,16] [--threads T]
                                  [--rounds 3] [--cpu-time] [--json]

Only the matrices of the layers are trained, so that both change the same elements. Medians of rounds in turn, on the
same threads; --cpu-time as in noise.py.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from harness import Row, alternate, arguments, show
from weights import add_arguments, clock_of, random_model

from hpc_es.noise import threads
from hpc_es.params import Arena

ALPHA = 5e-4
MIN_RATIO = 8
"""Goal at rank 1 with 16 members, in CPU time."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--members", type=int, default=16, help="population N")
    parser.add_argument("--ranks", default="1,2,4,16", help="ranks, separated by commas")
    add_arguments(parser, rounds=3)
    options = parser.parse_args()
    threads.start(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or random_model(Path(scratch), options.layers)
        arena = Arena.from_pretrained(model, include=["*_proj.weight"])
    ranks = [int(rank) for rank in options.ranks.split(",")]
    seconds = alternate(
        {str(rank): partial(arena.update, members(options.members, rank), rank) for rank in (0, *ranks)},
        options.rounds,
        clock=clock_of(options),
    )
    rows = [
        Row(
            f"update N={options.members}, rank {rank}",
            "s",
            seconds[str(rank)],
            seconds["0"],
            min_ratio=MIN_RATIO if rank == 1 and options.members == 16 else None,
            note="usual: full rank",
        )
        for rank in ranks
    ]
    show("lowrank", rows, as_json=options.json)


def members(count: int, rank: int) -> list[tuple[int, float]]:
    """Seeds with coefficients that move theta by as much at every rank."""
    scale = ALPHA / count / (4096**2 * rank**0.5 if rank else 4096)
    return [(2**40 + seed, float(np.float32(scale * (seed % 5 - 2)))) for seed in range(count)]


if __name__ == "__main__":
    main()
