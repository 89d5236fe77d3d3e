"""Parts of a parallel pipeline other than its transformers. Each applies itself and returns its undo."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from para_core.adapters.parallel.call import ParallelCall, remove_parallel_call
from para_core.adapters.parallel.session import Part, Undo, nothing
from para_core.adapters.rows.unet import UnetRun
from para_core.adapters.rows.vae import parallelize_vae, unparallelize_vae
from para_core.adapters.spec import Adapter
from para_core.adapters.weights.pipefusion import FusedPipe
from para_core.adapters.weights.shard import release_shards, shard_components
from para_core.adapters.weights.sharded_component import Method
from para_core.adapters.weights.stages import refuse_late_on_pipe, release_pipe
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.timeouts import override_timeouts
from para_core.weights.pipefusion import PipeFusion


@dataclass(frozen=True)
class UnetPart(Part):
    """One UNet or ControlNet whose rows are sharded."""

    run: UnetRun
    name = "the UNet"

    def apply(self) -> Undo:
        self.run.apply()
        return self.run.remove


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
    name = "sharding the weights"

    def apply(self) -> Undo:
        if self.method is None:
            release_shards(self.pipe)
            return nothing
        names = shard_components(self.pipe, self.mesh, self.method, keep=True)

        def undo() -> None:
            release_shards(self.pipe, names)

        return undo

    @property
    def shards_weights(self) -> bool:  # type: ignore[override]
        return self.method is not None

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        # The next session shards the weights again or has a part that releases them. Only stages need full weights
        # before.
        return release_shards(self.pipe) if self.shards_weights and mesh.pipe.size > 1 else nothing
