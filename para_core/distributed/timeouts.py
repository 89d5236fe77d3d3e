"""Set the timeouts of process groups temporarily, for several pipelines that may share the groups.

Each call of :func:`override_timeouts` sets a timeout and returns a function that undoes it. A group has the
timeout of the last call that is not undone yet. When all calls are undone, it has the timeout from before the
first call again. Calls may be undone in any order. If the user sets another timeout on the group in the
meantime, undoing a call does not change that timeout.

``adapters/parallel/parts.py`` calls it for the option ``timeout``, which ``options.py`` and ``resolve.py``
there read by :func:`as_timedelta`. Tests: tests/adapters/parallel/test_undo.py.
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

    # It changes only if the group was made during another override, which is undone first.
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
        ValueError: ``timeout`` is less than a millisecond, or too large for a timedelta, such as ``inf``.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (timedelta, int, float)):
        raise TypeError(f"timeout is {timeout!r}; expected a positive number of seconds, or a timedelta.")
    if isinstance(timeout, timedelta):
        converted = timeout
    else:
        try:
            converted = timedelta(seconds=timeout)
        except (OverflowError, ValueError):  # ValueError for NaN.
            converted = timedelta(0)
    # torch rounds down to milliseconds, and with 0 every collective fails.
    if converted < timedelta(milliseconds=1):
        raise ValueError(
            f"timeout is {timeout} (in seconds if a number); expected at least a millisecond, and a finite time that a "
            "timedelta can hold."
        )
    return converted


def override_timeouts(
    groups: Collection[ProcessGroup], timeout: timedelta, ranks: Collection[int]
) -> Callable[[], None]:
    """Set the timeout of ``groups``, and return a function that restores the timeouts. See the module's
    docstring.

    ``ranks`` are the global ranks of the mesh. ``groups`` must contain all groups that this package has
    already created among them. Groups that it creates there before the call is undone inherit the timeout.
    Undoing the call sets the timeout of these groups to the restored one of the first of ``groups``. They are
    recognised by having the timeout: a group that was created meanwhile for another mesh of the same ranks,
    and has an equal timeout of its own, is taken for one of them.
    """
    override = object()
    changed: list[ProcessGroup] = []

    def undo() -> None:
        alive = [group for group in changed if dist.is_initialized() and is_registered(group)]
        for group in alive:
            _remove(override, group)
        if alive:
            _restore_created(set(groups_among(ranks)) - set(changed), timeout, alive[0])

    try:
        for group in groups:
            # Record the override before it is set, so that undo() restores the group if setting it fails.
            overrides = _OVERRIDES.setdefault(group, _Overrides(group_timeout(group)))
            overrides.active[override] = timeout
            changed.append(group)
            set_group_timeout(group, timeout)
    except BaseException:
        undo()
        raise
    return undo


def _remove(override: object, group: ProcessGroup) -> None:
    """Set the timeout that ``group`` has without ``override``."""
    overrides = _OVERRIDES.get(group)
    if overrides is None or override not in overrides.active:
        # An earlier call of undo() has restored this group, but failed at a later group.
        return
    others = {other: value for other, value in overrides.active.items() if other is not override}
    if group_timeout(group) == overrides.timeout:
        set_group_timeout(group, _Overrides(overrides.initial, others).timeout)
    # Remove the override only now, so that a second call of undo() repeats a step that failed.
    del overrides.active[override]
    if not overrides.active:
        del _OVERRIDES[group]


def _restore_created(created: Collection[ProcessGroup], timeout: timedelta, like: ProcessGroup) -> None:
    """Let those of the groups ``created`` that inherited ``timeout`` have the restored timeout of ``like``."""
    initial = _OVERRIDES.get(like, _Overrides(group_timeout(like))).initial
    for group in created:
        overrides = _OVERRIDES.get(group)
        if overrides is None and group_timeout(group) == timeout:
            set_group_timeout(group, group_timeout(like))
        elif overrides is not None and overrides.initial == timeout:
            # Created during the call, and overridden by a later call that is still active.
            overrides.initial = initial
