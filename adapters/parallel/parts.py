"""Parts of a parallel pipeline other than its transformers. Each applies itself and returns its undo."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from para_core.adapters.parallel.call import ParallelCall, remove_parallel_call
from para_core.adapters.parallel.session import Part, Undo, nothing
from para_core.adapters.rows.vae import parallelize_vae, unparallelize_vae
from para_core.adapters.spec import Adapter
from para_core.adapters.weights.pipefusion import FusedPipe
from para_core.adapters.weights.shard import release_shards, shard_components
from para_core.adapters.weights.sharded_component import Method
from para_core.adapters.weights.stages import refuse_late_on_pipe, release_pipe
from para_core.adapters.weights.text_encoders import (
    OffloadedEncoders,
    TextEncoders,
    encoders_with_blocks,
    require_not_offloaded,
    text_encoders_of,
)
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.timeouts import override_timeouts
from para_core.weights.group import timeout_of, weights_mesh
from para_core.weights.pipefusion import PipeFusion


@dataclass(frozen=True)
class TimeoutPart(Part):
    """Time-out of process groups."""

    groups: Collection[ProcessGroup]
    timeout: timedelta
    ranks: Collection[int]
    name = "setting the time-out"

    def apply(self) -> Undo:
        return override_timeouts(self.groups, self.timeout, self.ranks)

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        # The time-out stays until the next session runs. The one set last counts, so there is nothing to restore.
        return nothing

    def finish(self, undo: Undo) -> None:
        undo()


@dataclass(frozen=True)
class VaePart(Part):
    """One autoencoder that runs on all ranks."""

    vae: nn.Module
    mesh: GuidedMesh
    name = "the VAE"

    def apply(self) -> Undo:
        parallelize_vae(self.vae, mesh=self.mesh)
        return self.undo

    def undo(self) -> None:
        unparallelize_vae(self.vae)


@dataclass(frozen=True)
class CallPart(Part):
    """Wrapper of the pipeline's ``__call__``."""

    pipe: Any
    call: ParallelCall
    name = "the pipeline"

    def apply(self) -> Undo:
        self.call.attach(self.pipe)
        if self.call.mesh.pipe.size > 1:
            refuse_late_on_pipe(self.pipe)
        return self.undo

    def undo(self) -> None:
        remove_parallel_call(self.pipe)
        release_pipe(self.pipe)


@dataclass(frozen=True)
class PipeFusionPart(Part):
    """PipeFusion over the stages of the transformers."""

    call: ParallelCall
    transformers: Mapping[str, nn.Module]
    options: PipeFusion
    adapter: Adapter | None
    name = "PipeFusion"

    def apply(self) -> Undo:
        fused = FusedPipe(self.transformers, self.options, self.call.mesh, self.adapter)
        self.call.fused = fused
        return fused.remove


@dataclass(frozen=True)
class WeightsPart(Part):
    """Weights that are sharded by ``method``, or replicated if ``method`` is None."""

    pipe: Any
    mesh: GuidedMesh
    method: Method | None
    components: Sequence[str] | None = None  # None: all that the method can shard
    name = "sharding the weights"

    def apply(self) -> Undo:
        if self.method is None:
            release_shards(self.pipe, self.components)
            return nothing
        names = shard_components(self.pipe, self.mesh, self.method, self.components, keep=True)
        return partial(_release, self.pipe, names)

    @property
    def shards_weights(self) -> bool:  # type: ignore[override]
        return self.method is not None

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        # The next session shards the weights again or has a part that releases them. Only stages need full weights
        # before.
        return release_shards(self.pipe, self.components) if self.shards_weights and mesh.pipe.size > 1 else nothing


@dataclass
class TextEncodersPart(Part):
    """Text encoders that are placed by ``placement``. ``ranks`` are the global ranks of ``mesh``."""

    pipe: Any
    mesh: GuidedMesh
    ranks: Collection[int]
    placement: TextEncoders
    name = "placing the text encoders"

    def __post_init__(self) -> None:
        self.shards_weights = self.placement == "fsdp"
        self._offloaded = OffloadedEncoders(self.pipe, self.mesh, first_rank_only=self.placement == "first")

    def clear(self) -> Undo:
        return nothing if self.placement == "fsdp" else release_shards(self.pipe, text_encoders_of(self.pipe))

    def apply(self) -> Undo:
        if self.placement == "replicate":
            return nothing
        # Not earlier, because the session that this one replaces may have offloaded them.
        require_not_offloaded(self.pipe)
        if self.placement == "fsdp":
            mesh = weights_mesh(sorted(self.ranks), self.mesh.sequence.device_type, timeout=timeout_of(self.mesh))
            names = shard_components(self.pipe, mesh, "fsdp", encoders_with_blocks(self.pipe), keep=True)
            return partial(_release, self.pipe, names)
        self._offloaded.apply()
        return self._offloaded.remove

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        if self.placement in ("fsdp", "replicate"):
            # As for WeightsPart, the next session shards these weights or releases them.
            return nothing
        undo()
        return self._offloaded.apply


def _release(pipe: Any, names: Collection[str]) -> None:
    release_shards(pipe, names)
