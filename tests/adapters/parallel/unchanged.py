"""The state of a pipeline that calls of the library may change, for tests that a call changes nothing."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from para_core.instance.modules import uncompiled
from para_core.instance.record import filled_slots
from tests.tiny import flux_call
from tests.together.snapshot import differences, snapshot


def timeouts():
    """Return the time-out of each group in seconds, by the group's description and ranks."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
    return {
        f"group {group.group_desc} {dist.get_process_group_ranks(group)}": str(
            group._get_backend(torch.device("cpu")).options._timeout
        )
        for group in groups
    }


def state_of(pipe):
    """Return what a call may change: the snapshot, the filled slots of each instance, and time-outs of groups."""
    state = {**snapshot(pipe), **timeouts()}
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    for name, part in {"": pipe, **parts}.items():
        modules = [(name, part)] if part is pipe else uncompiled(part).named_modules(prefix=name)
        for path, module in modules:
            state[f"slots of {path}"] = str(sorted(filled_slots(module)))
    return state


def image_of(pipe):
    return pipe(**flux_call())[0]


def changes_since(before, pipe):
    """Return the differences from ``before``, except new process groups, which later calls reuse."""
    now = {path: value for path, value in state_of(pipe).items() if not path.startswith("group ") or path in before}
    return differences(now, before)


@contextmanager
def same_pipe(pipe):
    """Raise unless ``pipe`` is the same after the context as before it."""
    before = state_of(pipe)
    yield
    changed = changes_since(before, pipe)
    assert not changed, "\n".join(changed)
