"""Changes of a pipeline that parallelize_pipe makes: time-outs, sharded weights, and what the features of
weights do.

Each change is a part of a *session*: all changes that are applied to one pipeline and undone together.
``resolve.py`` makes these parts and ``session.py`` calls their methods; the part of a transformer is in
``transformer.py``, which also makes those of features for parallelize_transformer. Tests:
tests/adapters/parallel/test_undo.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from para_core.adapters.parallel.session import Part, Undo, do_nothing
from para_core.adapters.weights.feature import FeatureChange
from para_core.adapters.weights.shard import Sharding, weights_groups
from para_core.distributed.groups import groups_among, host_group
from para_core.distributed.mesh import GuidedMesh
from para_core.distributed.timeouts import override_timeouts


@dataclass(frozen=True)
class TimeoutPart(Part):
    """The change by which parallelize_pipe sets the time-out of all process groups that the ranks of ``mesh``
    use: its own with their CPU groups, those that para_core made among ``ranks``, and those of sharded
    weights.
    """

    pipe: Any
    mesh: GuidedMesh
    timeout: timedelta
    ranks: Collection[int]
    name = "setting the time-out"

    def apply(self) -> Undo:
        # Look for the groups only now, because other parts of the session may have made theirs after this
        # one.
        groups = [
            group for dim in self.mesh.dims if dim.group is not None for group in (dim.group, host_group(dim))
        ]
        groups += [*groups_among(self.ranks), *weights_groups(self.pipe)]
        return override_timeouts(list(dict.fromkeys(groups)), self.timeout, self.ranks)

    def suspend(self, undo: Undo) -> Undo:
        # Leave the time-out set until finish(), which runs after the next session has started. Until then a
        # time-out of the next session overrides this one, and if that session fails, this one is still set.
        return do_nothing

    def finish(self, undo: Undo) -> None:
        undo()


@dataclass(frozen=True)
class ShardPart(Part):
    """The change by which parallelize_pipe shards weights. Nothing undoes it."""

    sharding: Sharding
    name = "sharding the weights"

    def apply(self) -> Undo:
        # Offloads of an earlier session are undone only now, so this cannot be checked before.
        self.sharding.check_offloads()
        return do_nothing

    def complete(self) -> None:
        self.sharding.run()


class FeaturePart(Part):
    """The change that a feature of ``adapters/weights/features.py`` makes."""

    def __init__(self, change: FeatureChange) -> None:
        self.change, self.name = change, change.name

    def apply(self) -> Undo:
        self.change.apply()
        return self.change.undo

    def suspend(self, undo: Undo) -> Undo:
        undo()
        return self.change.resume

    def complete(self) -> None:
        self.change.complete()
