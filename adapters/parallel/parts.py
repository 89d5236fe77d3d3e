"""The changes that parallelize_pipe makes to the call, the time-outs, the VAEs and the weights of a pipeline.

Each change is a part of a *session*: all changes that are applied to one pipeline and undone together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from para_core.adapters.adapter import Adapter
from para_core.adapters.components import (
    VAE_METHODS,
    TextEncoders,
    VaePlacement,
    encoders_with_blocks,
    text_encoders_of,
)
from para_core.adapters.parallel.call import ParallelCall, remove_parallel_call
from para_core.adapters.parallel.scheduled_attention import ScheduledAttention
from para_core.adapters.parallel.session import Part, Undo, nothing
from para_core.adapters.registry import transformers_of
from para_core.adapters.rows.vae import parallelize_vae, unparallelize_vae
from para_core.adapters.weights.block_offload import OffloadedBlocks
from para_core.adapters.weights.fused_pipe import FusedPipe
from para_core.adapters.weights.offloaded_modules import OffloadedModules, offloader_of, require_not_offloaded
from para_core.adapters.weights.shard import release_shards, shard_components
from para_core.adapters.weights.sharded_component import Method, is_distributed
from para_core.adapters.weights.staged_transformer import refuse_late_on_pipe, release_pipe
from para_core.attention.attention_options import AttentionSchedule, AttnOptions
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.timeouts import override_timeouts
from para_core.instance_patching import original_class
from para_core.weights.group import timeout_of, weights_mesh
from para_core.weights.pipefusion import PipeFusion


@dataclass(frozen=True)
class CallPart(Part):
    """The change by which parallelize_pipe wraps the pipeline's ``__call__``."""

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
    """The change by which parallelize_pipe turns on PipeFusion for the staged transformers."""

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
class SchedulePart(Part):
    """The change by which parallelize_pipe sets the attention backend of each denoising step from a schedule.

    ``options`` are the attention options of the transformers; their ``backend`` is replaced at each step.

    Raises:
        ValueError: If ``pipe`` has no scheduler whose steps could be counted.
    """

    pipe: Any
    call: ParallelCall
    schedule: AttentionSchedule
    options: AttnOptions
    adapter: Adapter | None
    name = "the schedule of attention"

    def __post_init__(self) -> None:
        if getattr(self.pipe, "scheduler", None) is None:
            raise ValueError(
                f"backend= is an AttentionSchedule, and this {original_class(self.pipe).__name__} has no scheduler "
                "whose steps could be counted. Name one backend for all steps."
            )

    def apply(self) -> Undo:
        self.call.scheduled = ScheduledAttention(transformers_of(self.pipe), self.schedule, self.options, self.adapter)
        return partial(self.call.scheduled.remove, self.pipe)


@dataclass(frozen=True)
class TimeoutPart(Part):
    """The change by which parallelize_pipe sets the time-out of process groups."""

    groups: Collection[ProcessGroup]
    timeout: timedelta
    ranks: Collection[int]
    name = "setting the time-out"

    def apply(self) -> Undo:
        return override_timeouts(self.groups, self.timeout, self.ranks)

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        # Leave the time-out set until finish(), which runs after the next session has started. Until then a time-out of
        # the next session overrides this one, and if that session fails, this one is still set.
        return nothing

    def finish(self, undo: Undo) -> None:
        undo()


@dataclass(frozen=True)
class VaePart(Part):
    """The change by which parallelize_pipe runs one autoencoder on all ranks."""

    vae: nn.Module
    mesh: GuidedMesh
    name = "the VAE"

    def apply(self) -> Undo:
        parallelize_vae(self.vae, mesh=self.mesh)
        return self.undo

    def undo(self) -> None:
        unparallelize_vae(self.vae)


@dataclass(frozen=True)
class WeightsPart(Part):
    """The change by which parallelize_pipe shards weights by ``method``, or gathers them if it is None."""

    pipe: Any
    mesh: GuidedMesh
    method: Method | None
    # Names of the components to shard; None for all that the method can shard.
    components: Sequence[str] | None = None
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
        # Leave the weights sharded, because the next session shards them again or has a WeightsPart that gathers them.
        # Only a session with stages needs full weights to start from, so gather them for such a session.
        return release_shards(self.pipe, self.components) if self.shards_weights and mesh.pipe.size > 1 else nothing


@dataclass
class TextEncodersPart(Part):
    """The change by which parallelize_pipe places the weights of the text encoders as ``placement`` says.

    ``ranks`` are the global ranks of ``mesh``; only ``"fsdp"`` needs them.
    """

    pipe: Any
    mesh: GuidedMesh
    ranks: Collection[int]
    placement: TextEncoders
    name = "placing the text encoders"

    def __post_init__(self) -> None:
        self.shards_weights = self.placement == "fsdp"
        self._offloaded = OffloadedModules(
            text_encoders_of(self.pipe), self.mesh, first_rank_only=self.placement == "first"
        )

    def clear(self) -> Undo:
        return nothing if self.placement == "fsdp" else release_shards(self.pipe, text_encoders_of(self.pipe))

    def apply(self) -> Undo:
        if self.placement == "replicate":
            return nothing
        # Check here and not in __init__: the session that this one replaces may have offloaded the encoders, which has
        # been undone by now.
        require_not_offloaded(text_encoders_of(self.pipe), "text_encoders")
        if self.placement == "fsdp":
            mesh = weights_mesh(sorted(self.ranks), self.mesh.sequence.device_type, timeout=timeout_of(self.mesh))
            names = shard_components(self.pipe, mesh, "fsdp", encoders_with_blocks(self.pipe), keep=True)
            return partial(_release, self.pipe, names)
        self._offloaded.apply()
        return self._offloaded.remove

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        if self.placement in ("fsdp", "replicate"):
            # As in WeightsPart, the next session shards these weights again or gathers them, so leave them sharded.
            return nothing
        undo()
        return self._offloaded.apply


@dataclass
class VaePlacementPart(Part):
    """The change by which parallelize_pipe keeps the autoencoders' weights in host memory.

    With ``placement="first"`` only the first rank runs the autoencoders and sends their outputs to the others.
    """

    vaes: Mapping[str, nn.Module]
    mesh: GuidedMesh
    placement: VaePlacement
    name = "placing the VAE"

    def __post_init__(self) -> None:
        first = self.placement == "first"
        self._offloaded = OffloadedModules(self.vaes, self.mesh, methods=VAE_METHODS, first_rank_only=first)

    def apply(self) -> Undo:
        # Check here and not in __init__: the session that this one replaces may have offloaded the autoencoders, which
        # has been undone by now.
        require_not_offloaded(self.vaes, "vae_placement")
        self._offloaded.apply()
        return self._offloaded.remove

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        undo()
        return self._offloaded.apply


@dataclass
class BlocksPart(Part):
    """The change by which parallelize_pipe keeps transformer blocks, except the first ``resident``, in host memory."""

    pipe: Any
    mesh: GuidedMesh
    resident: int
    name = "offloading the blocks"

    def __post_init__(self) -> None:
        self._offloaded = OffloadedBlocks(transformers_of(self.pipe).values(), self.mesh, self.resident)

    def apply(self) -> Undo:
        for name, module in transformers_of(self.pipe).items():
            # Check here and not in __init__: the session that this one replaces may have offloaded the blocks, which
            # has been undone by now.
            offloader = offloader_of(module)
            if offloader is not None or is_distributed(module):
                raise ValueError(
                    f"pipe.{name} is {'sharded' if offloader is None else f'offloaded by {offloader}'} already. Leave "
                    "offload out, or undo that first (unshard_weights(pipe), pipe.remove_all_hooks())."
                )
        self._offloaded.apply()
        return self._offloaded.remove

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        undo()
        return self._offloaded.apply


def _release(pipe: Any, names: Collection[str]) -> None:
    release_shards(pipe, names)
