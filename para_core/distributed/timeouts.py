"""Time-outs of process groups, set for a while by pipelines that may share the groups.

The rule: a group has the time-out that was set last and is not undone yet; when all are undone, the one that it had
before the first. Pipelines may undo theirs in any order. A time-out that the user sets on the group meanwhile stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from para_core.distributed.mesh import groups_among
from para_core.torch_internals import group_timeout, is_registered, set_group_timeout


@dataclass(eq=False)
class _Override:
    timeout: timedelta


@dataclass
class _Overrides:
    """The time-outs that were set on one group and are not undone, the latest one last."""

    initial: timedelta
    active: list[_Override] = field(default_factory=list)

    @property
    def timeout(self) -> timedelta:
        return self.active[-1].timeout if self.active else self.initial


# A group takes no attributes, so what belongs to it is kept here, for as long as torch's table of groups has it.
_OVERRIDES: WeakKeyDictionary[ProcessGroup, _Overrides] = WeakKeyDictionary()


def as_timedelta(timeout: timedelta | float) -> timedelta:
    """Return ``timeout``, in seconds if it is a number.

    Raises:
        TypeError: It is neither a number nor a timedelta.
        ValueError: It is not positive.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (timedelta, int, float)):
        raise TypeError(f"timeout is {timeout!r}; expected a positive number of seconds, or a timedelta.")
    period = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if period <= timedelta(0):
        raise ValueError(
            f"timeout is {period.total_seconds()} s; expected a positive number of seconds, or a timedelta."
        )
    return period


def override_timeouts(
    groups: Collection[ProcessGroup], timeout: timedelta, ranks: Collection[int]
) -> Callable[[], None]:
    """Set the time-out of ``groups``, and return a function that undoes it by the rule of this module.

    Args:
        ranks: The ranks of the mesh. A group of ours among them that is made before the undo takes the time-out of the
            mesh, and the undo gives it the one that the first of ``groups`` then has.
    """
    override = _Override(timeout)
    own: list[ProcessGroup] = []

    def undo() -> None:
        alive = [group for group in own if dist.is_initialized() and is_registered(group)]
        for group in alive:
            overrides = _OVERRIDES.get(group, _Overrides(timeout))
            if override not in overrides.active:
                continue  # done by an earlier call, which failed later
            remaining = _Overrides(overrides.initial, [other for other in overrides.active if other is not override])
            if group_timeout(group) == overrides.timeout:
                set_group_timeout(group, remaining.timeout)
            # After the group was set, so that a second call finishes what a failed one left.
            overrides.active.remove(override)
            if not overrides.active:
                del _OVERRIDES[group]
        for group in groups_among(ranks) if alive else []:
            if group not in _OVERRIDES and group_timeout(group) == timeout:
                set_group_timeout(group, group_timeout(alive[0]))

    try:
        for group in groups:
            initial = group_timeout(group)
            set_group_timeout(group, timeout)
            own.append(group)
            _OVERRIDES.setdefault(group, _Overrides(initial)).active.append(override)
    except BaseException:
        undo()
        raise
    return undo
