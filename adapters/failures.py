"""A call that ends on one rank alone: the others give up waiting after the group's timeout, and say why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from para_core.collectives import broadcast_bytes
from para_core.mesh import GuidedMesh, host_group

_TOKEN_BYTES = 16
_REASON_CHARACTERS = 2000


def set_timeout(mesh: GuidedMesh, timeout: timedelta | float) -> None:
    """From now on, collectives over ``mesh`` wait so long for a rank that does not answer; in seconds, if a number.

    Raises:
        ValueError: it is not positive.
    """
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if timeout <= timedelta(0):
        raise ValueError(
            f"timeout is {timeout.total_seconds()} s; expected a positive number of seconds, or a timedelta."
        )
    for dim in mesh.dims:
        for group in () if dim.group is None else {dim.group, host_group(dim)}:
            dist.distributed_c10d._set_pg_timeout(timeout, group)


@contextmanager
def random_state_of_first_rank(mesh: GuidedMesh) -> Iterator[str]:
    """Inside, the default generators continue those of the mesh's first rank; afterwards each rank has its own again.

    The first rank's move on, as if it had drawn alone. Gives a token of this call, the same on all ranks.
    """
    # Whatever the mesh says: diffusers draws on the pipeline's device, and a gloo group also serves accelerators.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device_module = None if accelerator is None else torch.get_device_module(accelerator)
    own = [torch.get_rng_state()] + ([device_module.get_rng_state()] if device_module else [])
    token = torch.frombuffer(bytearray(os.urandom(_TOKEN_BYTES)), dtype=torch.uint8)
    shared: list[Tensor] = list(broadcast_bytes(torch.cat([token, *own]), mesh).split([_TOKEN_BYTES, *map(len, own)]))
    torch.set_rng_state(shared[1].clone())
    if device_module:
        device_module.set_rng_state(shared[2].clone())
    try:
        yield bytes(shared[0].tolist()).hex()
    finally:
        if mesh.rank != 0:
            torch.set_rng_state(own[0])
            if device_module:
                device_module.set_rng_state(own[1])


@contextmanager
def reasons_shared(token: str) -> Iterator[None]:
    """Inside, an exception leaves its reason for the other ranks, and a collective's time-out gives theirs."""
    try:
        yield
    except BaseException as error:
        text = str(error).lower()
        if isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS):
            raise RuntimeError(
                f"another rank stopped answering in the middle of this call: {_reason_of_other(token)} This rank gave up "
                "waiting."
            ) from error
        _leave_reason(token, f"rank {dist.get_rank()} raised {type(error).__name__}: {error}")
        raise


_SIGNS = ("timed out", "timeout", "connection closed", "connection reset")


def _leave_reason(token: str, reason: str) -> None:
    try:
        # The first one counts.
        _store().compare_set(_key(token), "", reason[:_REASON_CHARACTERS])
    except (RuntimeError, ValueError):
        return  # the process that holds the store is gone: the others will find out by themselves


def _reason_of_other(token: str) -> str:
    unknown = "it raised an exception of its own (its log has the reason), was interrupted, or died."
    try:
        store = _store()
        return f"{store.get(_key(token)).decode()}." if store.check([_key(token)]) else unknown
    except (RuntimeError, ValueError):
        return unknown


def _key(token: str) -> str:
    return f"para_core/call/{token}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
