"""The part of cycle.py that runs inside vLLM's worker process: the usual way on the live weights, and the limits."""

import time
from collections.abc import Callable

import torch
from harness import copying, perturbing

from hpc_es.engine.vllm_extension import WorkerExtension
from hpc_es.params.arena import CAST, perturbation_of
from hpc_es.records import Member


class CycleExtension(WorkerExtension):
    """Methods that cycle.py calls in vLLM's worker process."""

    def bench_ways(self) -> bool:
        """Remember the direct map. Returns whether there is one."""
        self.bench_direct = self.es_base
        return self.es_base is not self.es_loaded

    def bench_write(self, direct: bool) -> None:
        """Choose whether members are written through the direct map or through load_weights."""
        self.es_base = self.bench_direct if direct else self.es_loaded

    @torch.no_grad()
    def bench_usual(self, seed: int, scale: float) -> None:
        """Add noise in place, per parameter: seed a torch.Generator, draw randn in its dtype, add_ it times `scale`."""
        for _, parameter in self._es_parameters():
            generator = torch.Generator(parameter.device).manual_seed(seed)
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device=parameter.device)
            parameter.add_(noise, alpha=scale)

    def bench_limit(self, num_threads: int) -> float:
        """Seconds of the limit: the larger of copying as many bytes and of the kernel alone within the cache."""
        dtype = CAST[str(self.model_config.dtype).removeprefix("torch.")]  # type: ignore[index]
        count, noisy = self.es_arena.num_parameters, perturbation_of(Member(1, 1, 1e-3))
        assert noisy is not None
        copy = copying(count * (4 + dtype.itemsize), num_threads)
        return max(seconds(copy), seconds(perturbing(count, num_threads, dtype.type, noisy)))


def seconds(work: Callable[[], None]) -> float:
    """Seconds of the second of two calls."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
