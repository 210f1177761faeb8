"""theta of 1.2 billion parameters kept on the device, and streamed through it: digests and bits against the host's
kernels, time against what was measured beside it, and device memory against its bounds.

Host memory: 5 GB for the arena, 2.5 GB of a temporary folder for its checkpoint. The bits are compared on the tensors
of one layer, the digests on all of them.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from findings import Findings, arguments, begin
from model import BILLION, TINY, base_on, bits, commit, member, write_model

from hpc_es.noise import Update, kernels, tensor_id, threads
from hpc_es.params.arena import CHUNK, Arena, update_of
from hpc_es.params.base import Target
from hpc_es.params.device import Extra, bytes_needed, extra_memory
from hpc_es.params.regions import Region
from hpc_es.params.streamed import MAX_STAGING

OF_COPY = 0.7
ELEMENT_MEMBERS = 150.0
IN_PASSING = 2**24
"""Bytes that a member or an update may take for a while."""


def main() -> None:
    findings = begin(arguments(__doc__).parse_args())
    num_members = 30 if findings.on_gpu else 3
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model(Path(scratch) / "model", BILLION if findings.on_gpu else TINY, findings.device)
        arena = Arena.from_pretrained(folder)
    findings.fact(
        "arena", f"{arena.num_parameters:,} parameters, read in {arena.seconds_to_load:.1f} s; N={num_members}"
    )
    targets = live(arena, findings.device)
    made = dict[str, Any]()
    for residence in ("device", "host"):
        made[residence] = base(findings, arena, targets, residence)
    equality(findings, arena, targets, made, num_members)
    if findings.on_gpu:
        pinned = torch.from_numpy(arena.memory).is_pinned()
        findings.check("the arena is pinned", pinned, "if not, the limit on locked memory forbids it")
    speed(findings, arena, made, num_members)


def live(arena: Arena, device: torch.device) -> list[Target]:
    """bfloat16, NaN at first."""
    sizes = {name: arena.tensor(name).size for name in arena.names}
    return [
        (Region(name, 0, 1, size, size), torch.full((size,), torch.nan, dtype=torch.bfloat16, device=device))
        for name, size in sizes.items()
    ]


def base(findings: Findings, arena: Arena, targets: list[Target], residence: str) -> Any:
    """Errors where it takes more memory than it says: device_base looks at that itself."""
    began = time.perf_counter()
    with memory_of(findings) as extra:
        made = base_on(findings.device, residence, arena, targets)
    bound = MAX_STAGING + bytes_needed(arena, [region for region, _ in targets]) * (residence == "device")
    findings.measured(f"base {residence}: made in", time.perf_counter() - began, "s, pinning included")
    at_most(findings, f"base {residence}: device memory when it is made", extra.peak, bound)
    return made


def at_most(findings: Findings, what: str, taken: int, bound: int) -> None:
    if not findings.on_gpu:
        findings.not_run(what, "a CPU's allocator does not say")
    else:
        findings.check(what, taken <= bound, f"{taken / 2**20:,.1f} MiB of at most {bound / 2**20:,.1f} MiB")


@contextmanager
def memory_of(findings: Findings) -> Iterator[Extra]:
    if not findings.on_gpu:
        yield Extra()
        return
    with extra_memory(findings.device) as extra:
        yield extra


def equality(findings: Findings, arena: Arena, targets: list[Target], made: dict[str, Any], num_members: int) -> None:
    """Both bases begin at theta_0 and make the same update; then the arena holds what was streamed back to it."""
    names = [name for name in arena.names if ".layers.0." in name or "norm" in name]
    wanted = {name: arena.tensor(name).copy() for name in names}
    first = commit(1, num_members)
    digests = dict[str, int]()
    for residence, each in made.items():
        written(findings, arena, targets, each, names, f"base {residence}: a member of theta_0", arena.base_digest)
        arena.version = 0
        with memory_of(findings) as extra:
            digests[residence] = each.apply([first]).digest
        at_most(findings, f"base {residence}: device memory in an update", extra.peak, IN_PASSING)
    same = digests["device"] == digests["host"] == arena.digest()
    findings.check("update: one digest on the device, streamed, and of the arena", same, f"{digests['host']:016x}")
    update_on_host(wanted, update_of(first))
    right = [bits(torch.from_numpy(arena.tensor(name))) == values.tobytes() for name, values in wanted.items()]
    findings.check("update: the bits of the host's kernels", all(right), f"{sum(right)} of {len(right)} tensors")
    for residence, each in made.items():
        written(findings, arena, targets, each, names, f"base {residence}: a member of theta_1", digests["host"])


def written(
    findings: Findings, arena: Arena, targets: list[Target], base: Any, names: list[str], what: str, digest: int
) -> None:
    """The device's copy of theta is seen only through what is written from it."""
    for _, values in targets:
        values.fill_(torch.nan)
    with memory_of(findings) as extra:
        reported = base.write(member())
    findings.check(f"{what}: digest", reported == digest, f"{reported:016x}")
    held = {region.name: values for region, values in targets}
    right = [bits(held[name]) == arena.perturbed(name, member(), "bfloat16").tobytes() for name in names]
    findings.check(f"{what}: bits", all(right), f"{sum(right)} of {len(right)} tensors")
    unwritten = sum(bool(values.isnan().any()) for values in held.values())
    findings.check(f"{what}: everything is written", not unwritten, f"{unwritten} tensors are not")
    at_most(findings, f"{what}: device memory", extra.peak, IN_PASSING)


def update_on_host(tensors: dict[str, np.ndarray], update: Update) -> None:
    pieces = [
        (values.reshape(-1)[start : start + CHUNK], tensor_id(name), start)
        for name, values in tensors.items()
        for start in range(0, values.size, CHUNK)
    ]
    threads.run(lambda piece: kernels().update(piece[0], piece[1], [update], start=piece[2]), pieces)


def speed(findings: Findings, arena: Arena, made: dict[str, Any], num_members: int) -> None:
    count, copy = arena.num_parameters, findings.copy_bandwidth()
    there, back = to_and_from(findings, arena)

    def of_limit(what: str, size: int, limit: float, work: Callable[[], object], goal: float | None = None) -> None:
        seconds = findings.seconds(work)
        detail = f"{seconds * 1e3:.1f} ms, {size / seconds / 1e9:.0f} of {limit / 1e9:.0f} GB/s"
        findings.measured(what, size / seconds / limit, "of the limit", goal=goal, detail=detail)

    def next_commit(base: Any) -> Any:
        return base.apply([commit(arena.version + 1, num_members)])

    kept, streamed = made["device"], made["host"]
    of_limit("base device: perturb against a copy", 6 * count, copy, lambda: kept.write(member()), OF_COPY)
    seconds = findings.seconds(lambda: next_commit(kept))
    rate, detail = count * num_members / seconds / 1e9, f"{seconds * 1e3:.1f} ms"
    findings.measured("base device: update", rate, "G element-members/s", goal=ELEMENT_MEMBERS, detail=detail)
    of_limit("base host: perturb against host to device", 4 * count, there, lambda: streamed.write(member()))
    of_limit("base host: update against both directions", 4 * count, min(there, back), lambda: next_commit(streamed))


def to_and_from(findings: Findings, arena: Arena) -> tuple[float, float]:
    """Bytes a second, one direction at a time, of the arena's own memory."""
    host = torch.from_numpy(arena.memory)[: 2**28]
    there = torch.empty(host.numel(), device=findings.device)
    rates = [host.nbytes / findings.seconds(lambda: there.copy_(host, non_blocking=True))]
    rates.append(host.nbytes / findings.seconds(lambda: host.copy_(there, non_blocking=True)))
    for name, rate in zip(("host to device", "device to host"), rates, strict=True):
        findings.measured(f"{name}, the arena's memory", rate / 1e9, "GB/s")
    return rates[0], rates[1]


if __name__ == "__main__":
    main()
