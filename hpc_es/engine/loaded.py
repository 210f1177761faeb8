"""Writes members into a live vLLM model of any family: by its own `load_weights`, or by loading everything again.

Invariant: the storage of no parameter moves, so that CUDA graphs stay valid.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch

from hpc_es.engine.direct_map import Watch
from hpc_es.errors import EngineError
from hpc_es.params.arena import Arena, Dtype, Stream
from hpc_es.params.base import HostBase
from hpc_es.records import Member


class LoadedBase(HostBase):
    """Every rank makes the perturbed tensors in host memory, one group at a time, and passes them to load_weights."""

    refresh: Callable[[Iterable[tuple[str, torch.Tensor]]], object] | None = None
    """In place of load_weights, for a model that repacks weights after loading: load and repack. Keeps tensors."""

    def __init__(self, arena: Arena, model: Any, dtype: torch.dtype, rank: int, num_ranks: int) -> None:
        super().__init__(arena, [], rank, num_ranks)
        self._model, self._dtype = model, dtype
        self.types: Mapping[str, torch.dtype] = {}
        """Types of tensors that the model keeps in another type than its own; casting at once loses nothing."""

    @torch.no_grad()
    def write(self, member: Member | None, watch: Watch | None = None, poisoned: str = "") -> int:
        """As Base.write. `watch` notes what is copied where. `poisoned`: name of a tensor that is replaced by NaN."""
        before = self._addresses()
        arrays = self._arena.stream(member, _name(self._dtype))
        tensors = self._tensors(arrays, member)
        if poisoned:
            tensors = (
                (name, torch.full_like(tensor, math.nan) if name == poisoned else tensor) for name, tensor in tensors
            )
        if self.refresh is not None:
            self.refresh((name, tensor.clone()) for name, tensor in tensors)
        elif watch is None:
            self._model.load_weights(tensors)
        else:
            with watch:
                self._model.load_weights(watch.showing(tensors))
        moved = [name for name, address in self._addresses().items() if before.get(name) != address]
        if moved:
            raise EngineError(
                f"loading weights again moved the storage of {moved[0]}: this model family cannot be written in place"
            )
        return arrays.digest if self._rank == 0 else 0

    def _addresses(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self._model.named_parameters()}

    def _tensors(self, arrays: Stream, member: Member | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors one by one, so that the only extra memory is the buffer of the stream."""
        for name, array in arrays:
            dtype = self.types.get(name, self._dtype)
            if dtype != self._dtype:
                array = self._arena.perturbed(name, member, _name(dtype))
            yield name, torch.from_numpy(array).view(dtype)


def _name(dtype: torch.dtype) -> Dtype:
    return cast(Dtype, str(dtype).removeprefix("torch."))
