"""The kernels alone, on the shapes of a model with 1.2 billion parameters that lies on the device: bits and speed.

Bytes moved count once each: perturb reads float32 and writes bfloat16, 6 bytes an element; its limit is the device's
copy bandwidth, measured here. The usual way: a torch.Generator on the device, randn per tensor, add_.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from findings import Findings, arguments, begin
from model import BILLION, TINY, bits, members_of, on_host, shapes

from hpc_es.noise import BLOCK, Perturbation, Update, cuda, kernels, tensor_id

OF_COPY = 0.7
ELEMENT_MEMBERS = 150e9
MEMBER = Perturbation(2**63 + 5, float(np.float32(1e-3 / 4096)))


class Model:
    """theta in float32 and live weights in bfloat16, by name."""

    def __init__(self, findings: Findings) -> None:
        device, generator = findings.device, torch.Generator(findings.device).manual_seed(1)
        size = BILLION if findings.on_gpu else TINY
        self.theta = {
            name: torch.randn(torch.Size(shape).numel(), generator=generator, device=device) / 50
            for name, shape in shapes(size).items()
        }
        self.live = {name: torch.empty_like(values, dtype=torch.bfloat16) for name, values in self.theta.items()}
        self.idents = {name: tensor_id(name) for name in self.theta}
        self.total = cuda.zero(device)
        self.pieces = cuda.Pieces(
            [cuda.Piece(self.theta[name], self.idents[name], out=self.live[name]) for name in self.theta], device
        )
        self.largest = max(self.theta, key=lambda name: self.theta[name].numel())

    @property
    def size(self) -> int:
        return sum(values.numel() for values in self.theta.values())

    def perturb(self, member: Perturbation | None = MEMBER) -> None:
        self.pieces.perturb(member, self.total)

    def update(self, versions: list[Update]) -> None:
        cuda.Plan.of(versions, self.total.device).run(self.pieces)

    def alone(self, dtype: torch.dtype) -> cuda.Pieces:
        """The largest tensor."""
        theta = self.theta[self.largest]
        out = torch.empty_like(theta, dtype=dtype)
        return cuda.Pieces([cuda.Piece(theta, self.idents[self.largest], out=out)], theta.device)


def main() -> None:
    findings = begin(arguments(__doc__).parse_args())
    model, num_members = Model(findings), 30 if findings.on_gpu else 3
    findings.fact("model", f"{model.size:,} parameters in {len(model.theta)} tensors, N={num_members}")
    update = Update(*members_of(1, num_members))
    with findings.step("the kernels equal the host's on a model of this size"):
        equality(findings, model, update)
    with findings.step("speed of perturb"):
        perturbing(findings, model)
    with findings.step("speed of update"):
        updating(findings, model, update)
    with findings.step("the usual way"):
        usual(findings, model, update)
    del model
    with findings.step("a tensor of more than 2^32 elements"):
        beyond_32_bits(findings)


def equality(findings: Findings, model: Model, update: Update) -> None:
    """Of 1,000 blocks at both ends of the largest tensor, and of some whole ones."""
    parts = ("norm", "k_proj", "v_proj")  # few enough for the reference
    names = [name for name in model.theta if ".layers.0." in name and any(part in name for part in parts)]
    whole = {name: on_host(model.theta[name]) for name in names}
    model.perturb()
    outs = {name: np.empty(values.size, np.uint16) for name, values in whole.items()}
    for name, values in whole.items():
        kernels().perturb(values, outs[name], model.idents[name], MEMBER)
    right = [bits(model.live[name]) == outs[name].tobytes() for name in names]
    findings.check("perturb: the bits of whole tensors", all(right), f"{sum(right)} of {len(right)} tensors")
    theta, ident = model.theta[model.largest], model.idents[model.largest]
    ends = {start: on_host(theta[start:][: 1000 * BLOCK]) for start in (0, max(0, theta.numel() - 1000 * BLOCK))}
    model.update([update])
    for name, values in whole.items():
        kernels().update(values, model.idents[name], [update])
    right = [bits(model.theta[name]) == values.tobytes() for name, values in whole.items()]
    findings.check("update: the bits of whole tensors", all(right), f"{sum(right)} of {len(right)} tensors")
    for start, values in ends.items():
        kernels().update(values, ident, [update], start=start)
        same = bits(theta[start:][: values.size]) == values.tobytes()
        findings.check(f"update: the bits of the largest tensor from {start}", same)
    findings.check("digest: of whole tensors", all(of_host(model, n, v) for n, v in whole.items()))


def of_host(model: Model, name: str, values: np.ndarray) -> bool:
    ident = model.idents[name]
    return cuda.digest(model.theta[name], ident) == kernels().digest(values, ident)


def perturbing(findings: Findings, model: Model) -> None:
    copy = findings.copy_bandwidth()
    findings.measured("copy bandwidth of the device", copy / 1e9, "GB/s")

    def of_copy(what: str, size: int, item: int, work: Callable[[], object], goal: float | None = None) -> None:
        seconds = findings.seconds(work)
        rates = (
            f"{seconds * 1e3:.2f} ms, {size / seconds / 1e9:.0f} G elements/s, {size * item / seconds / 1e9:.0f} GB/s"
        )
        findings.measured(what, size * item / seconds / copy, "of copy bandwidth", goal=goal, detail=rates)

    of_copy("perturb, all tensors", model.size, 6, model.perturb, OF_COPY)
    launched = launching(findings, model.perturb)
    why = "where this is more than the kernels take, it decides"
    findings.measured("perturb, all tensors: until the host has queued it", launched * 1e3, "ms", detail=why)
    of_copy("centre, all tensors", model.size, 6, lambda: model.perturb(None))
    size, part = model.theta[model.largest].numel(), Perturbation(MEMBER.seed, MEMBER.scale, 1, 4, 9)
    for dtype, item in ((torch.float32, 8), (torch.float16, 6), (torch.bfloat16, 6)):
        alone = model.alone(dtype)
        perturb = partial(alone.perturb, MEMBER, model.total)
        of_copy(f"perturb, the largest tensor, {dtype}", size, item, perturb)
    of_copy("perturb, the largest tensor, one of 4 subspaces", size, 6, partial(alone.perturb, part, model.total))
    of_copy("digest, the largest tensor", size, 4, partial(alone.digest, model.total))


def launching(findings: Findings, work: Callable[[], object]) -> float:
    """Seconds until everything is queued; the median of five."""
    took = list[float]()
    for _ in range(5 if findings.on_gpu else 1):
        if findings.on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def updating(findings: Findings, model: Model, update: Update) -> None:
    num_members, size, alone = len(update.seeds), model.theta[model.largest].numel(), model.alone(torch.bfloat16)

    def rate(what: str, count: int, work: Callable[[], object], goal: float | None = None) -> None:
        seconds = findings.seconds(work)
        unit, detail = "G element-members/s", f"{seconds * 1e3:.1f} ms"
        goal = goal and goal / 1e9
        findings.measured(what, count * num_members / seconds / 1e9, unit, goal=goal, detail=detail)

    rate("update, all tensors", model.size, lambda: model.update([update]), ELEMENT_MEMBERS)
    plan = cuda.Plan.of([update], findings.device)
    rate("update, the largest tensor", size, partial(plan.run, alone))
    owners = [slot % 4 for slot in range(num_members)]
    parted = cuda.Plan.of([Update(update.seeds, update.coefficients, owners, 4, [9] * num_members)], findings.device)
    rate("update, the largest tensor, 4 subspaces", size, partial(parted.run, alone))


def usual(findings: Findings, model: Model, update: Update) -> None:
    generator = torch.Generator(findings.device)

    def perturb() -> None:
        for live in model.live.values():
            generator.manual_seed(MEMBER.seed % 2**63)
            noise = torch.randn(live.shape, generator=generator, device=live.device, dtype=live.dtype)
            live.add_(noise, alpha=1e-3)

    def advance() -> None:
        for live in model.live.values():
            total = torch.zeros(live.shape, device=live.device)
            for seed, coefficient in zip(update.seeds, update.coefficients, strict=True):
                generator.manual_seed(seed % 2**63)
                noise = torch.randn(live.shape, generator=generator, device=live.device, dtype=live.dtype)
                total.add_(noise, alpha=4096 * coefficient)
            live.add_(total)

    ours, theirs = findings.seconds(model.perturb), findings.seconds(perturb)
    findings.measured("perturb, times the usual way", theirs / ours, "x", detail=f"it takes {theirs * 1e3:.1f} ms")
    ours, theirs = findings.seconds(lambda: model.update([update])), findings.seconds(advance, rounds=3)
    findings.measured("update, times the usual way", theirs / ours, "x", detail=f"it takes {theirs * 1e3:.0f} ms")


def beyond_32_bits(findings: Findings) -> None:
    """Places in memory that 32 bits cannot count: the bits around 2^31 and 2^32 and at the end, and the digest."""
    turns = [2**31, 2**32] if findings.on_gpu else [2**10, 2**11]
    window = 64 * BLOCK
    size = turns[-1] + 3 * window + 5
    if findings.on_gpu:
        torch.cuda.empty_cache()
    if findings.on_gpu and torch.cuda.mem_get_info(findings.device)[0] < 7 * size:
        findings.not_run("a tensor of more than 2^32 elements", f"it needs {7 * size / 2**30:.0f} GiB")
        return
    theta, ident, update = torch.empty(size, device=findings.device), tensor_id("large"), Update([1, 2], [1e-6, -2e-6])
    for part in theta.split(2**30):
        part.normal_()
    starts = [0, *(turn - window // 2 for turn in turns), (size - window) // BLOCK * BLOCK]
    windows = {start: on_host(theta[start:][: window + 5]) for start in starts}
    out = torch.empty(size, dtype=torch.bfloat16, device=findings.device)
    cuda.perturb(theta, out, ident, MEMBER)
    for start, values in windows.items():
        wanted = np.empty(values.size, np.uint16)
        kernels().perturb(values, wanted, ident, MEMBER, start=start)
        same = bits(out[start:][: values.size]) == wanted.tobytes()
        findings.check(f"perturb: the bits of {size:,} elements from {start:,}", same)
    cuda.update(theta, ident, [update])
    for start, values in windows.items():
        kernels().update(values, ident, [update], start=start)
        same = bits(theta[start:][: values.size]) == values.tobytes()
        findings.check(f"update: the bits of {size:,} elements from {start:,}", same)
    cut = 2**28 if findings.on_gpu else 2**9
    parts = [cuda.digest(theta[start : start + cut], ident, start=start) for start in range(0, size, cut)]
    findings.check("digest: of the whole is that of its parts", cuda.digest(theta, ident) == sum(parts) % 2**64)


if __name__ == "__main__":
    main()
