"""Set the timeouts of process groups temporarily, for several pipelines that may share the groups.

Each call of :func:`override_timeouts` sets a timeout and returns a function that undoes it. A group has the
timeout of the last call that is not undone yet. When all calls are undone, it has the timeout from before the
first call again. Calls may be undone in any order. If the user sets another timeout on the group in the
meantime, undoing a call does not change that timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from para_core.distributed.groups import groups_among
from para_core.torch_internals import group_timeout, is_registered, set_group_timeout


@dataclass
class _Overrides:
    """The timeouts set on one group and not undone yet (the latest last), and the timeout before all of them."""

    initial: timedelta
    # Each key stands for one call that set a timeout.
    active: dict[object, timedelta] = field(default_factory=dict)

    @property
    def timeout(self) -> timedelta:
        """The timeout that the group has, unless the user has set another one since."""
        return [self.initial, *self.active.values()][-1]


# The overrides of each group are stored here, because attributes cannot be set on a process group. An entry
# exists as long as its group.
_OVERRIDES: WeakKeyDictionary[ProcessGroup, _Overrides] = WeakKeyDictionary()


def as_timedelta(timeout: timedelta | float) -> timedelta:
    """Convert ``timeout``, a timedelta or a number of seconds, to a timedelta.

    Raises:
        TypeError: ``timeout`` is neither a number nor a timedelta.
        ValueError: ``timeout`` is not positive, or too large for a timedelta, such as ``inf``.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (timedelta, int, float)):
        raise TypeError(f"timeout is {timeout!r}; expected a positive number of seconds, or a timedelta.")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    # Negate the comparison, so that NaN is refused as well.
    if not 0 < seconds <= timedelta.max.total_seconds():
        raise ValueError(f"timeout is {seconds} s; expected a positive number of seconds, or a timedelta.")
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)


def override_timeouts(
    groups: Collection[ProcessGroup], timeout: timedelta, ranks: Collection[int]
) -> Callable[[], None]:
    """Set the timeout of ``groups``, and return a function that restores the timeouts. See the module's
    docstring.

    ``ranks`` are the global ranks of the mesh. Groups that this package creates among them before the call is
    undone inherit the timeout. Undoing the call sets the timeout of these groups to the restored one of the
    first of ``groups``.
    """
    override = object()
    changed: list[ProcessGroup] = []

    def undo() -> None:
        alive = [group for group in changed if dist.is_initialized() and is_registered(group)]
        for group in alive:
            overrides = _OVERRIDES.get(group, _Overrides(timeout))
            if override not in overrides.active:
                # An earlier call of undo() has restored this group, but failed at a later group.
                continue
            others = {other: value for other, value in overrides.active.items() if other is not override}
            remaining = _Overrides(overrides.initial, others)
            if group_timeout(group) == overrides.timeout:
                set_group_timeout(group, remaining.timeout)
            # Remove the override only now, so that a second call of undo() repeats a step that failed.
            del overrides.active[override]
            if not overrides.active:
                del _OVERRIDES[group]
        if not alive:
            return
        for group in groups_among(ranks):
            if group not in _OVERRIDES and group_timeout(group) == timeout:
                set_group_timeout(group, group_timeout(alive[0]))

    try:
        for group in groups:
            initial = group_timeout(group)
            set_group_timeout(group, timeout)
            changed.append(group)
            _OVERRIDES.setdefault(group, _Overrides(initial)).active[override] = timeout
    except BaseException:
        undo()
        raise
    return undo
