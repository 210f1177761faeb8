"""What cycle.py measures inside vLLM's worker process: the usual way on the live weights, and the limits there."""

import time

import torch
from harness import copying, perturbing

from hpc_es.engine.vllm_extension import WorkerExtension
from hpc_es.params.arena import CAST, perturbation_of
from hpc_es.records import Member


class CycleExtension(WorkerExtension):
    def bench_ways(self) -> bool:
        """Remember the direct map; whether there is one."""
        self.bench_direct = self.es_base
        return self.es_base is not self.es_loaded

    def bench_write(self, direct: bool) -> None:
        """From now on, write members through the direct map, or through load_weights."""
        self.es_base = self.bench_direct if direct else self.es_loaded

    @torch.no_grad()
    def bench_usual(self, seed: int, scale: float) -> None:
        """Per parameter: seed a torch.Generator, draw randn in its dtype, add scale times that in place."""
        for _, parameter in self._es_parameters():
            generator = torch.Generator(parameter.device).manual_seed(seed)
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device=parameter.device)
            parameter.add_(noise, alpha=scale)

    def bench_limit(self, num_threads: int) -> float:
        """Seconds: the larger of copying as many bytes, and of the kernel alone within the cache."""
        dtype = CAST[str(self.model_config.dtype).removeprefix("torch.")]  # type: ignore[index]
        count, noisy = self.es_arena.num_parameters, perturbation_of(Member(1, 1, 1e-3))
        assert noisy is not None
        copy = copying(count * (4 + dtype.itemsize), num_threads)
        return max(seconds(copy), seconds(perturbing(count, num_threads, dtype.type, noisy)))


def seconds(work) -> float:  # type: ignore[no-untyped-def]
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
