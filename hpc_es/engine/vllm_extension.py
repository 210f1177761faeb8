"""Runs inside each vLLM worker process: writes members, in place, into the live model.

vLLM mixes `WorkerExtension` into its worker class and imports this module before the model loads. Invariant: every
parameter of the live model is what the model's own `load_weights` makes of the arena, its storage never moves, and
no copy of a weight is kept elsewhere. Return values cross msgpack: plain numbers, strings, lists and dicts only,
because vLLM's client waits for ever for an answer that cannot be encoded.
"""

import os
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import torch
from vllm import _custom_ops
from vllm.model_executor.layers import utils as layer_utils

from hpc_es.engine.fingerprints import differing, fingerprints, poison
from hpc_es.errors import EngineError
from hpc_es.es.records import Commit, Member
from hpc_es.noise import threads as kernel_threads
from hpc_es.params.arena import Arena, Dtype, Stream

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# vLLM's CPU backend moves linear weights into packed handles and leaves empty parameters, so that noise written in
# place would miss most of the model without a complaint. These two switches keep the weights that are computed with.
_custom_ops._supports_onednn = False
layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


class WorkerExtension:
    """Methods that the front calls by name through `collective_rpc`; names are ours alone within vLLM's worker."""

    model_runner: Any
    model_config: Any
    parallel_config: Any
    rank: int
    es_arena: Arena

    def es_attach(self, arena: dict[str, Any], threads: int) -> int:
        """Share the front's arena, and prove that it writes the model that vLLM loaded. Returns this process's pid.

        Errors: EngineError naming the parameter, for a model whose weights cannot be written in place.
        """
        kernel_threads.start(threads)
        self.es_arena = Arena.attach(**arena)
        if getattr(self.model_config, "use_mla", False):
            raise EngineError(
                "models with multi-head latent attention derive weights after loading; they cannot take noise"
            )
        for name, parameter in self._es_parameters():
            if parameter.numel() == 0 or parameter.dtype not in _DTYPES:
                what = "is empty" if parameter.numel() == 0 else f"is {parameter.dtype}"
                raise EngineError(f"vLLM's parameter {name} {what}: its weights were packed away or quantised")
        loaded = fingerprints(self._es_parameters())
        poison(self._es_parameters())
        self._es_write(None)
        if changed := differing(loaded, fingerprints(self._es_parameters())):
            raise EngineError(
                f"vLLM's {changed[0]} ({len(changed)} such) is not what the checkpoint makes of it when written "
                "again: this model family repacks or derives weights after loading and cannot take noise in place"
            )
        return os.getpid()

    def es_write(self, member: bytes) -> int:
        """Write a member (msgpack; nil: the centre) into the live model. Returns the digest of its theta."""
        return self._es_write(msgspec.msgpack.decode(member, type=Member | None))

    def es_update(self, version: int, commits: bytes) -> int:
        """Apply commits to this rank's share of the arena, which is at `version`. Returns its share of the digest."""
        self.es_arena.version = version
        decoded = msgspec.msgpack.decode(commits, type=list[Commit])
        return self.es_arena.apply(decoded, rank=self.rank, num_ranks=self.parallel_config.world_size).digest

    def es_probe(self, member: bytes) -> list[str]:
        """Names of the live parameters that differ from the member written again; afterwards none does."""
        before = fingerprints(self._es_parameters())
        self.es_write(member)
        return differing(before, fingerprints(self._es_parameters()))

    def _es_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model_runner.get_model().named_parameters())

    @torch.no_grad()
    def _es_write(self, member: Member | None) -> int:
        storage = [parameter.data_ptr() for _, parameter in self._es_parameters()]
        dtype = str(self.model_config.dtype).removeprefix("torch.")
        tensors = self.es_arena.stream(member, cast(Dtype, dtype))
        self.model_runner.get_model().load_weights(self._es_tensors(tensors))
        moved = [name for (name, p), was in zip(self._es_parameters(), storage, strict=True) if p.data_ptr() != was]
        if moved:
            raise EngineError(
                f"load_weights of this model family moved the storage of {moved[0]}: it cannot be written in place"
            )
        return tensors.digest

    def _es_tensors(self, arrays: Stream) -> Iterator[tuple[str, torch.Tensor]]:
        """Lazily, so that memory beyond model and arena stays at the stream's buffer."""
        for name, array in arrays:
            yield name, torch.from_numpy(array).view(self.model_config.dtype)
