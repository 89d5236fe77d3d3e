"""Changes of a pipeline that parallelize_pipe makes: time-outs, and where weights are.

Each change is a part of a *session*: all changes that are applied to one pipeline and undone together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.inspect.components import components_of, text_encoders_of
from para_core.adapters.parallel.session import Part, Undo, nothing
from para_core.adapters.weights.block_offload import OffloadedBlocks
from para_core.adapters.weights.offloaded_modules import OffloadedModules, require_not_offloaded
from para_core.adapters.weights.shard import gather_modules, release_shards, restore_shards, shard_components
from para_core.adapters.weights.sharded_component import Method
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.timeouts import override_timeouts
from para_core.weights.group import timeout_of, weights_mesh


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
class WeightsPart(Part):
    """The change by which parallelize_pipe shards the weights of ``components``, or gathers them if ``method`` is None.

    ``components=None`` stands for all that the method can shard.
    """

    pipe: Any
    mesh: GuidedMesh
    method: Method | None
    components: Sequence[str] | None = None
    name = "sharding the weights"
    # The user may take modules out of the pipeline before the change is undone.
    _sharded: list[nn.Module] = field(default_factory=list, init=False)

    @property
    def shards_weights(self) -> bool:  # type: ignore[override]
        return self.method is not None and self.components != []

    def clear(self) -> Undo:
        # Sharding replaces earlier shards by itself; if a later step of the session fails, they must come back.
        if self.shards_weights:
            return restore_shards(self.pipe, self.components)
        return release_shards(self.pipe, self.components)

    def apply(self) -> Undo:
        return self._shard_over(self.mesh)

    def _shard_over(self, mesh: GuidedMesh | DeviceMesh) -> Undo:
        if self.method is None or not self.shards_weights:
            return nothing
        self._sharded[:] = shard_components(self.pipe, mesh, self.method, self.components, keep=True)
        return partial(gather_modules, self.pipe, self._sharded)

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        # Leave the weights sharded, because the next session shards them again or has a WeightsPart that gathers them.
        # Only a session with stages needs full weights to start from, so gather them for such a session.
        if self.shards_weights and mesh.pipe.size > 1:
            return release_shards(self.pipe, self.components)
        return nothing

    def finish(self, undo: Undo) -> None:
        # The next session does not know modules that have left the pipeline.
        current = components_of(self.pipe).values()
        gather_modules(self.pipe, [module for module in self._sharded if module not in current])


@dataclass(frozen=True)
class TextEncodersPart(WeightsPart):
    """The change by which parallelize_pipe shards the text encoders over all ``ranks``, or gathers them."""

    ranks: Collection[int] = ()
    name = "placing the text encoders"

    def apply(self) -> Undo:
        if not self.shards_weights:
            return nothing
        require_not_offloaded(text_encoders_of(self.pipe), "Leave text_encoders out.")
        mesh = weights_mesh(sorted(self.ranks), self.mesh.sequence.device_type, timeout=timeout_of(self.mesh))
        return self._shard_over(mesh)


@dataclass(frozen=True)
class OffloadPart(Part):
    """The change by which parallelize_pipe keeps weights in host memory."""

    offloaded: OffloadedModules | OffloadedBlocks
    name: str

    def apply(self) -> Undo:
        self.offloaded.apply()
        return self.offloaded.remove

    def suspend(self, undo: Undo, mesh: GuidedMesh) -> Undo:
        undo()
        return self.offloaded.apply
