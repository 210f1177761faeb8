"""A worker extension that can damage a live weight and show them all, for tests. vLLM's worker imports it by name."""

import torch

from hpc_es.engine.vllm_extension import WorkerExtension


class CorruptibleExtension(WorkerExtension):
    def es_flip_one_bit(self, name: str) -> None:
        """Flip the lowest bit of one element in the middle of a float32 parameter."""
        parameter = dict(self._es_parameters())[name]
        parameter.detach().view(torch.int32).flatten()[parameter.numel() // 2] ^= 1

    def es_show(self) -> dict[str, tuple[list[int], str]]:
        """Shape and bytes, in hexadecimal, of every live parameter by vLLM's name for it."""
        return {
            name: (list(parameter.shape), parameter.detach().contiguous().numpy().tobytes().hex())
            for name, parameter in self._es_parameters()
        }
