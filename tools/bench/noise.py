"""Write one perturbed member into a live model: compared with the usual way in PyTorch, and with this machine's limit.

    python tools/bench/noise.py [MODEL_FOLDER] [--layers 4] [--threads T] [--rounds 7] [--cpu-time] [--json]

Ours reads the fp32 arena, adds the noise, rounds, writes the model's tensors in their dtype, and takes the arena's
digest in the same pass. The usual way, per tensor: seed a torch.Generator, draw randn of the tensor's shape in the
model's dtype, add_. It would have to subtract the same noise afterwards, which is not counted here.

The limit is the larger of two times that are measured in turn with ours: a copy that moves as many bytes, far more than
the cache holds, and the kernel alone on as many elements within the cache. Medians, on the same threads. On a busy
machine, --cpu-time counts CPU seconds divided by the threads instead of wall-clock time; the usual way draws on one
thread. "extra memory" is the peak of the process while ours runs, above what it held before (arena and model).
"""

from pathlib import Path

import numpy as np
from harness import Clock, Row, alternate, arguments, copying, perturbing, show
from weights import add_arguments, bits, clock_of, live_model, prepare, usual_perturb

from hpc_es.params import Arena
from hpc_es.params.arena import perturbation_of
from hpc_es.records import Member

SIGMA = 1e-3
MAX_OF_LIMIT = 1.5
EXTRA_MEMORY_MIB = 256
KERNEL_DTYPES: dict[str, type[np.generic]] = {"float32": np.float32, "bfloat16": np.uint16}


def main() -> None:
    parser = arguments(__doc__)
    add_arguments(parser, rounds=7)
    options = parser.parse_args()
    arena = prepare(options)
    rows, extra = [], 0.0
    for dtype in KERNEL_DTYPES:
        row, memory = compare(arena, dtype, options.threads, options.rounds, clock_of(options))
        rows.append(row)
        extra = max(extra, memory)
    rows.append(Row("perturb, extra memory", "MiB", extra, goal=EXTRA_MEMORY_MIB))
    show("noise", rows, as_json=options.json)


def compare(arena: Arena, dtype: str, num_threads: int, rounds: int, clock: Clock) -> tuple[Row, float]:
    """Measure the row of one dtype, and the extra memory in MiB."""
    model, member = live_model(arena, dtype), Member(2**40, 1, SIGMA)
    outs, itemsize = {name: bits(tensor) for name, tensor in model.items()}, np.dtype(KERNEL_DTYPES[dtype]).itemsize
    before = reset_peak()
    arena.perturb_into(outs, member)
    extra = peak_memory() - before
    count, noisy = arena.num_parameters, perturbation_of(member)
    assert noisy is not None
    seconds = alternate(
        {
            "ours": lambda: arena.perturb_into(outs, member),
            "copy": copying(count * (4 + itemsize), num_threads),
            "kernel": perturbing(count, num_threads, KERNEL_DTYPES[dtype], noisy),
            "usual": lambda: usual_perturb(model, member.seed, SIGMA),
        },
        rounds,
        clock=clock,
    )
    rates = {what: f"{count / 1e6 / seconds[what]:,.0f} M elements/s" for what in ("copy", "kernel")}
    note = f"limit: {', '.join(f'{what} {rate}' for what, rate in rates.items())}"
    print(f"perturb, {dtype}: {note}")
    limit = max(seconds["copy"], seconds["kernel"])
    row = Row(f"perturb, {dtype}", "s", seconds["ours"], seconds["usual"], limit, max_of_limit=MAX_OF_LIMIT, note=note)
    return row, extra / 2**20


def reset_peak() -> int:
    """Reset the process's memory peak. Returns its resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return memory("VmRSS")


def peak_memory() -> int:
    return memory("VmHWM")


def memory(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines[field].split()[0])


if __name__ == "__main__":
    main()
