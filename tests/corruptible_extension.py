"""A worker extension that can damage a live weight, for the test of the probe. vLLM's worker imports it by name."""

import torch

from hpc_es.engine.vllm_extension import WorkerExtension


class CorruptibleExtension(WorkerExtension):
    def es_flip_one_bit(self, name: str) -> None:
        """Flip the lowest bit of one element in the middle of a float32 parameter."""
        parameter = dict(self._es_parameters())[name]
        parameter.detach().view(torch.int32).flatten()[parameter.numel() // 2] ^= 1
