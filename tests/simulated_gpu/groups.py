"""Process groups in the place of NCCL's: gloo for both devices, which says "nccl" for cuda."""

from __future__ import annotations

import functools
import os
import uuid
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# The backend of a group that stands for "cpu:gloo,cuda:nccl", and for "nccl" alone. "gloo" stays gloo.
BACKEND = "cpu:gloo,cuda:gloo"


class Kind(Enum):
    """The kinds of groups that the simulation tells apart."""

    GLOO = auto()
    NCCL = auto()  # NCCL for cuda, and gloo for the CPU.
    NCCL_ALONE = auto()
    FAKE = auto()  # One process stands for all ranks: nothing moves.

    @property
    def is_nccl(self) -> bool:
        return self in (Kind.NCCL, Kind.NCCL_ALONE)


@dataclass
class World:
    """The default group of this process, for its record: the ranks of one world have the same name."""

    rank: int = 0
    size: int = 1
    name: str = ""

    def place(self) -> dict[str, Any]:
        return {"rank": self.rank, "size": self.size, "world": self.name or str(os.getpid())}


world = World()
_kinds: dict[str, Kind] = {}  # By name of group.
_own: dict[str, Any] = {}


class _Nccl:
    """A backend that says that it is NCCL."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def name(self) -> str:
        return "nccl"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_backend"], name)


def kind_of(group: dist.ProcessGroup) -> Kind:
    return _kinds.get(group.group_name, Kind.GLOO)


def use_nccl(group: dist.ProcessGroup, *, alone: bool = False) -> None:
    """Let an existing default group, and those made from it, stand for NCCL (``alone``: without gloo beside it)."""
    _kinds[group.group_name] = Kind.NCCL_ALONE if alone else Kind.NCCL
    c10d._world.pg_map[group] = (BACKEND, c10d._world.pg_map[group][1])


def _get_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    backend = _own["_get_backend"](group, torch.device(device))
    return _Nccl(backend) if kind_of(group).is_nccl and torch.device(device).type == "cuda" else backend


def _device_types(group: dist.ProcessGroup) -> list[torch.device]:
    devices: list[torch.device] = _own["_device_types"].__get__(group)
    return [x for x in devices if x.type == "cuda"] if kind_of(group) == Kind.NCCL_ALONE else devices


@functools.wraps(c10d._new_process_group_helper)
def _new_group(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any) -> Any:
    """Create a group as torch does, with gloo in the place of NCCL."""
    asked = str(backend)
    kind = Kind.FAKE if asked == "fake" else Kind.GLOO
    if asked == BACKEND and dist.is_initialized():
        kind = kind_of(c10d._get_default_group())
    elif asked in (BACKEND, "undefined") or "nccl" in asked:
        kind = Kind.NCCL_ALONE if "gloo" not in asked and "nccl" in asked else Kind.NCCL
    if kind.is_nccl:
        backend = BACKEND
        options |= {"backend_options": None, "device_id": None}
    group, store = _own["helper"](size, rank, ranks, backend, *args, **options)
    if not isinstance(group, dist.ProcessGroup):
        return group, store  # This rank is no member.
    # torch gives a name again once the group that had it was destroyed.
    _kinds[group.group_name] = kind
    if kind != Kind.FAKE and not ranks:
        world.rank, world.size, world.name = rank, size, _name_of_world(rank, store)
    return group, store


def _name_of_world(rank: int, store: dist.Store) -> str:
    if rank == 0:
        store.set("simulated_gpu", uuid.uuid4().hex)
    return store.get("simulated_gpu").decode()


def replace_groups() -> None:
    """Replace what makes process groups and names their backends, in this process."""
    _own.update(
        _get_backend=dist.ProcessGroup._get_backend,
        _device_types=dist.ProcessGroup._device_types,
        helper=c10d._new_process_group_helper,
    )
    dist.ProcessGroup._get_backend = _get_backend
    dist.ProcessGroup._device_types = property(_device_types)
    c10d._new_process_group_helper = _new_group
