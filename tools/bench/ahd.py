"""Cost of evaluating one program of heuristic design: in the sandbox, scoring outside of it, and several side by side.

    python tools/bench/ahd.py [--repeats 3] [--workers 2]

`sandbox` is the wall-clock time of the sandboxed process, `whole` that of the evaluation, `side by side` the time per
program when `--workers` programs are evaluated at once. Kernels are compiled before the clock starts.
"""

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from hpc_es.envs.ahd import reference
from hpc_es.envs.ahd.evaluate import evaluate
from hpc_es.envs.ahd.tasks import SIZES, Evaluation, evaluation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print("| task | instances | sandbox s | whole s | side by side s |\n|---|---|---|---|---|")
    for problem in SIZES:
        for size in (None, 21) if problem == "asp_constructive" else (None,):
            task, program = evaluation(problem, size=size), reference.GREEDY[problem]
            inside, whole = measured(program, task, options.repeats)
            shared = side_by_side(program, task, options.repeats, options.workers)
            label = f"{problem} {size or ''}".strip()
            print(f"| {label} | {len(task.instances)} | {inside:.2f} | {whole:.2f} | {shared:.2f} |", flush=True)


def measured(program: str, task: Evaluation, repeats: int) -> tuple[float, float]:
    """Median seconds in the sandbox, and of the whole evaluation."""
    evaluate(program, task)
    inside, whole = [], []
    for _ in range(repeats):
        began = time.monotonic()
        inside.append(evaluate(program, task).seconds)
        whole.append(time.monotonic() - began)
    return statistics.median(inside), statistics.median(whole)


def side_by_side(program: str, task: Evaluation, repeats: int, workers: int) -> float:
    """Seconds per program with several at once."""
    count = repeats * workers
    began = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda _: evaluate(program, task), range(count)))
    return (time.monotonic() - began) / count


if __name__ == "__main__":
    main()
