"""The direct map: where in a live model's memory each element of each canonical tensor lies, found by watching the
model's own load_weights instead of by rules for each architecture.

Invariant: a map is a proposal. It is complete for one rank only in what it saw: copies of canonical tensors, or of
views of them, into live memory in the same type. Whoever uses it first proves it against load_weights itself.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_es.errors import EngineError, ModelError
from hpc_es.params.base import Target
from hpc_es.params.regions import Region

MAX_REGIONS = 2**18
"""Maximum number of regions of one rank. More would be very short, and no faster than load_weights."""


class Watch(TorchDispatchMode):
    """While active, notes which live memory is written from which elements of which canonical tensor."""

    obstacle = ""
    """Reason why a copy has no region, of the first such copy."""
    types: dict[str, torch.dtype]
    """Types of live memory that differ from the types of the tensors that are copied there."""

    def __init__(self, live: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._live = {_storage(tensor) for tensor in live}
        self._sources = dict[int, str]()
        self._targets = dict[tuple[int, int, str], Target]()
        self.types = {}
        self.reached = set[str]()
        """Canonical tensors of which something was copied into live memory, with or without a region."""

    def showing(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass (name, contiguous tensor) on to load_weights; the memory of each may be used again for a later one."""
        for name, tensor in tensors:
            self._sources[_storage(tensor)] = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and _storage(args[0]) in self._live and args[0].numel():
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, live: torch.Tensor, stored: torch.Tensor) -> None:
        name = self._sources.get(_storage(stored))
        if name is None:
            return self._refuse("something computed is copied into live memory")
        self.reached.add(name)
        if live.dtype != stored.dtype:
            self.types[name] = live.dtype
        if (live.dtype, live.shape) != (stored.dtype, stored.shape):
            return self._refuse(f"{name} is converted from {stored.dtype} {list(stored.shape)} to {live.dtype}")
        try:
            for region, offset in regions(name, live, stored):
                run = live.detach().as_strided((region.size,), (1,), offset)
                self._targets[_storage(live), offset, name] = region, run
                if len(self._targets) > MAX_REGIONS:
                    return self._refuse(f"{name} lies in very many short runs")
        except ModelError as error:
            self._refuse(str(error))

    def _refuse(self, why: str) -> None:
        self.obstacle = self.obstacle or why

    @property
    def targets(self) -> list[Target]:
        """All regions that were seen, in the order of live memory.

        Errors: EngineError when two canonical tensors lie in the same live memory: one would overwrite the other.
        """
        ordered, end, last = list[Target](), (0, 0), ""
        for (storage, offset, _), (region, run) in sorted(self._targets.items(), key=lambda item: item[0]):
            if (storage, offset) < end:
                raise EngineError(
                    f"vLLM keeps {last} and {region.name} in the same memory, but they are two tensors of the "
                    "checkpoint: the noise of one would be lost. If they are tied, say so in config.json"
                )
            end, last = (storage, offset + region.size), region.name
            ordered.append((region, run))
        return ordered


def regions(name: str, live: torch.Tensor, stored: torch.Tensor) -> Iterator[tuple[Region, int]]:
    """The regions that are copied when `stored`, a view of the tensor `name`, is copied into `live`, of the same shape.

    Yields each region with its start in the storage of `live`, in elements. Errors: ModelError for a region that would
    cut blocks of noise.
    """
    (_, _, _), (width, _, _), *outer = [(1, 1, 1), *_axes(live, stored)]
    rows, stride = 1, width
    if outer and outer[0][1] == width:
        (rows, _, stride), *outer = outer
    for index in product(*(range(size) for size, _, _ in reversed(outer))):
        steps = list(zip(index, reversed(outer), strict=True))
        offset = live.storage_offset() + sum(i * in_live for i, (_, in_live, _) in steps)
        start = stored.storage_offset() + sum(i * in_stored for i, (_, _, in_stored) in steps)
        yield Region(name, start, rows, width, stride), offset


def _axes(live: torch.Tensor, stored: torch.Tensor) -> list[tuple[int, int, int]]:
    """(size, stride in live, stride in stored) from the innermost axis outwards, with as few axes as possible."""
    axes = [(1, 1, 1)]
    by_live = sorted(zip(live.shape, live.stride(), stored.stride(), strict=True), key=lambda axis: axis[1])
    for size, in_live, in_stored in by_live:
        inner, step, stored_step = axes[-1]
        if (in_live, in_stored) == (inner * step, inner * stored_step):
            axes[-1] = inner * size, step, stored_step
        elif size > 1:
            axes.append((size, in_live, in_stored))
    return axes


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
