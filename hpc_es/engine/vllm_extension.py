"""Runs inside each vLLM worker process: writes members, in place, into the live model.

vLLM mixes `WorkerExtension` into its worker class and imports this module before the model loads. Invariant: every
parameter of the live model is what the model's own `load_weights` makes of the arena, its storage never moves, and
no copy of a weight is kept elsewhere. Members are written straight from theta where a direct map is proven to give
that, else through `load_weights`. Return values cross msgpack: plain numbers, strings, lists and dicts only, because
vLLM's client waits forever for a value that cannot be encoded.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from vllm import _custom_ops
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform

from hpc_es.engine.direct_map import Watch
from hpc_es.engine.fingerprints import differing, fingerprints, poison
from hpc_es.engine.loaded import LoadedBase
from hpc_es.engine.probe import PROBE
from hpc_es.errors import EngineError, HpcEsError
from hpc_es.noise import threads as kernel_threads
from hpc_es.params.arena import Arena
from hpc_es.params.base import Base, Target
from hpc_es.params.choose_base import make_base
from hpc_es.params.room import Residence
from hpc_es.quoting import quote_error
from hpc_es.records import Commit, Member

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# vLLM's CPU backend moves linear weights into packed handles and leaves empty parameters, so that noise written in
# place would miss most of the model without a complaint. These two switches keep the weights that are computed with.
_custom_ops._supports_onednn = False
layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False

# Loading a running model anew warns of every layer that has no tensor of its own, such as a tied head: for each member.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class WorkerExtension:
    """Methods that the front calls by name through `collective_rpc`; names are ours alone within vLLM's worker."""

    model_runner: Any
    model_config: Any
    parallel_config: Any
    reload_weights: Callable[..., None]
    rank: int
    es_arena: Arena
    es_loaded: LoadedBase
    es_targets: list[Target]
    es_base: Base
    """What members are written from: es_loaded, or where a direct map is in use, theta itself."""
    es_unreached: Mapping[str, int] = {}
    """Fingerprints of the live parameters with all that a direct map writes poisoned; empty where none is in use."""

    def es_attach(self, arena: dict[str, Any], threads: int) -> dict[str, Any]:
        """Share the front's arena, and prove that it writes the model that vLLM loaded.

        Returns this process's pid, the regions of the direct map, or the obstacle to one, and the names of trained
        tensors of which no copy was seen (see es_ignored). Errors: EngineError naming the parameter, for a model
        whose weights cannot be written in place.
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
        self.es_base = self.es_loaded = LoadedBase(
            self.es_arena, self.model_runner.get_model(), self.model_config.dtype, self.rank, self._es_num_ranks
        )
        loaded = fingerprints(self._es_parameters())
        watch = Watch(parameter for _, parameter in self._es_parameters())
        self.es_targets, obstacle = [], "this model family repacks weights after loading"
        changed = self._es_changed(loaded, watch)
        if watch.types:  # state-space models keep a few tensors in float32
            self.es_loaded.types = watch.types
            watch = Watch(parameter for _, parameter in self._es_parameters())
            changed = self._es_changed(loaded, watch)
        if not changed:
            self.es_targets, obstacle = watch.targets, watch.obstacle
        else:
            self.es_loaded.refresh = self._es_refresh
            if changed := self._es_changed(loaded):
                raise EngineError(
                    f"vLLM's {changed[0]} ({len(changed)} such) is not what the checkpoint makes of it when written "
                    "again: this model family repacks or derives weights after loading and cannot take noise in place"
                )
        regions = [[r.name, r.start, r.rows, r.width, r.stride] for r, _ in self.es_targets]
        unseen = [name for name in self.es_arena.trained if name not in watch.reached]
        return {"pid": os.getpid(), "regions": regions, "obstacle": obstacle, "unseen": unseen}

    @torch.no_grad()
    def es_ignored(self, names: list[str]) -> list[str]:
        """The tensors among these that loading ignores: this rank's model is the same with any values of them.

        The live model is the centre before and afterwards.
        """
        centre, ignored = fingerprints(self._es_tensors()), list[str]()
        for name in names:
            self.es_loaded.write(None, poisoned=name)
            if not differing(centre, fingerprints(self._es_tensors())):
                ignored.append(name)
        self.es_loaded.write(None)
        return ignored

    def es_write_directly(
        self, counted: list[list[bool]], residence: Residence, unheld: Sequence[str] = ()
    ) -> dict[str, Any]:
        """From now on, write members through the direct map, if it gives what `load_weights` gives.

        `counted`: for each region of each rank, whether it counts for the digest; `unheld`: the untrained tensors that
        are in no region of any rank. Returns the obstacle, or an empty one and this rank's share of the digest; the
        live model is the centre then.
        """
        try:
            return self._es_prove(counted, residence, unheld)
        except HpcEsError:
            raise
        except Exception as error:  # any error of a driver, an allocator or a compiler
            return {"obstacle": quote_error(error), "share": 0}

    @torch.no_grad()
    def _es_prove(self, counted: list[list[bool]], residence: Residence, unheld: Sequence[str]) -> dict[str, Any]:
        """As es_write_directly. Errors: any that a device, an allocator or a compiler raises."""
        targets = [
            (replace(region, counts=counts), live)
            for (region, live), counts in zip(self.es_targets, counted[self.rank], strict=True)
        ]
        base = make_base(self.es_arena, targets, self.rank, self._es_num_ranks, residence, unheld)
        centre, share = fingerprints(self._es_tensors()), 0
        poison(self._es_parameters())
        self.es_loaded.write(PROBE)
        perturbed = fingerprints(self._es_tensors())
        unreached = self._es_unreached()
        # In this order, what the map leaves alone is the member's first and then has to be the centre's.
        for member, expected in ((PROBE, perturbed), (None, centre)):
            poison((region.name, live) for region, live in targets)
            share = base.write(member)
            if changed := differing(expected, fingerprints(self._es_tensors())):
                return {"obstacle": f"{changed[0]} ({len(changed)} such) would differ", "share": 0}
        self.es_base, self.es_unreached = base, unreached
        return {"obstacle": "", "share": share}

    def es_write_through_load_weights(self) -> None:
        """From now on, write members through load_weights, as after es_attach."""
        self.es_base, self.es_unreached = self.es_loaded, {}

    @torch.no_grad()
    def es_write(self, member: bytes) -> int:
        """Write a member (msgpack; nil: the centre) into the live model. Returns this rank's share of the digest."""
        return self.es_base.write(msgspec.msgpack.decode(member, type=Member | None))

    def es_update(self, version: int, commits: bytes) -> int:
        """Apply commits to this rank's share of theta. Returns its share of the digest.

        `version`: the version of theta before, which the front's arena keeps for all ranks.
        """
        self.es_arena.version = version
        return self.es_base.apply(msgspec.msgpack.decode(commits, type=list[Commit])).digest

    def es_reload(self) -> None:
        """Read theta again, after the front has loaded the arena anew."""
        self.es_base.reload()

    def es_probe(self, member: bytes) -> list[str]:
        """Write the member again, and return the names of the live parameters that this changed.

        Parameters that no member reaches are compared with their values at the start.
        """
        before = fingerprints(self._es_parameters())
        unreached = differing(self.es_unreached, self._es_unreached()) if self.es_unreached else []
        self.es_write(member)
        return differing(before, fingerprints(self._es_parameters())) or unreached

    def _es_unreached(self) -> dict[str, int]:
        """Compute es_unreached. A member must be written afterwards."""
        poison((region.name, live) for region, live in self.es_targets)
        return fingerprints(self._es_parameters())

    def _es_changed(self, loaded: dict[str, int], watch: Watch | None = None) -> list[str]:
        """Names of the live parameters that are not as vLLM loaded them once the centre is written."""
        poison(self._es_parameters())
        self.es_loaded.write(None, watch)
        return differing(loaded, fingerprints(self._es_parameters()))

    def _es_refresh(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the running model again in vLLM's own way, repacking included."""
        if current_platform.is_cpu():  # it packs experts only once, when it makes their kernel
            for module in self.model_runner.get_model().modules():
                if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                    module.quant_method.moe_kernel = None
        self.reload_weights(weights_iterator=tensors)

    @property
    def _es_num_ranks(self) -> int:
        return int(self.parallel_config.world_size)

    def _es_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model_runner.get_model().named_parameters())

    def _es_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """All live parameters and buffers by name."""
        return [*self._es_parameters(), *self.model_runner.get_model().named_buffers()]
