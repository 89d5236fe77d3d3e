"""Which ranks work together: reading what a user gives as a mesh. Making one: :mod:`para_core.distributed.create_mesh`."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.torch_internals import (
    group_devices,
    group_named,
    group_timeout,
    is_registered,
    new_process_group,
    process_groups,
)

MESH_DIMS = ("batch", "ring", "ulysses")
# Behind these, where weights are sharded by tensor parallelism: each of its ranks has other heads of the same tokens.
TENSOR_DIM = "tensor"
# What the descriptions of all groups begin with that this package makes.
_OURS = "para_core: "
# In front of them, where weights are held in stages: each of its ranks has other blocks, for the same tokens.
PIPE_DIM = "pipe"


def require_process_group(caller: str) -> None:
    """Raise ``RuntimeError`` unless torch.distributed is initialised in this process."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{caller} needs a process group, and none is initialised. Start with `torchrun --nproc_per_node=N …` and "
            "call torch.distributed.init_process_group() first."
        )


@dataclass(frozen=True)
class MeshDim:
    """One mesh dim as this rank sees it. ``group_name`` is what functional collectives take; "" where size is 1."""

    name: str
    size: int
    index: int
    group_name: str
    group: ProcessGroup | None


def dim_of_one(name: str) -> MeshDim:
    """A mesh dim along which this rank is alone."""
    return MeshDim(name, 1, 0, "", None)


def _device_type_of(group: ProcessGroup) -> str:
    """Return the type of the devices on which the ranks of ``group`` compute: CUDA, if the group serves it and there is a GPU."""
    if torch.compiler.is_compiling():
        # Dynamo shows the name and the size of a group that is an argument, and nothing else.
        named: str = _device_type_of_named(group.group_name)
        return named
    return _preferred_device_type(group)


def _preferred_device_type(group: ProcessGroup) -> str:
    # torch lists the devices of a group in any order: "cpu:gloo,cuda:nccl" may end with the CPU.
    types = [device.type for device in group_devices(group)]
    if "cuda" in types and torch.cuda.is_available():
        return "cuda"
    return "cpu" if "cpu" in types else str(types[-1])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_type_of_named(group_name: Any) -> str:
    return _preferred_device_type(group_named(group_name))


def _dim_of_group(name: str, group: ProcessGroup | None) -> MeshDim:
    if group is None or group.size() == 1:
        return dim_of_one(name)
    return MeshDim(name, group.size(), group.rank(), group.group_name, group)


def host_group(dim: MeshDim) -> ProcessGroup:
    """The group over which CPU tensors travel among the ranks of ``dim`` (more than one): its own, or a gloo group beside it.

    A group that has NCCL alone would move them by way of the device, and wait for all that was started on it. The gloo group is
    made once for each such group, when it is first needed: every rank of ``dim`` calls this. Its owner is torch's table of groups,
    where it is found again by its description, and from which ``destroy_process_group()`` takes it.
    """
    group = dim.group
    if group is None:
        raise ValueError(f"mesh dim {dim.name!r} has one rank, and so no group.")
    devices = group_devices(group)
    if any(device.type == "cpu" for device in devices):
        return group
    return find_or_make_group(
        f"para_core: CPU tensors beside group {dim.group_name}",
        dist.get_process_group_ranks(group),
        backend="gloo",
        timeout=group_timeout(group, devices[0]),
    )


def groups_among(ranks: Collection[int]) -> list[ProcessGroup]:
    """Return the groups that :func:`find_or_make_group` made, and of which this rank and no rank outside of ``ranks`` is a member."""
    ours = [group for group in process_groups() if group.group_desc.startswith(_OURS)]
    return [group for group in ours if set(dist.get_process_group_ranks(group)) <= set(ranks)]


def find_or_make_group(
    description: str, ranks: list[int], *, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup:
    """Return the group with this ``description``, made if there is none. Only ``ranks`` call this, and wait for no other rank.

    These ranks may have made different numbers of groups before.
    """
    for group in process_groups():
        if group.group_desc == description:
            return group
    name = blake2b(f"{description} {ranks}".encode(), digest_size=20).hexdigest()
    return new_process_group(name, ranks, description=description, backend=backend, timeout=timeout)


@dataclass(frozen=True)
class SequenceMesh:
    """The ``ring`` × ``ulysses`` ranks that share one sequence, as this rank sees them.

    The sequence rank is ring index × ulysses size + ulysses index: a ring block is held by one Ulysses group.
    """

    ring: MeshDim
    ulysses: MeshDim
    device_type: str
    # JSON of itself, and of the mesh of this rank alone, which :func:`read_mesh` reads. Fields, for a graph takes numbers for variables.
    text: str = ""
    alone_text: str = ""

    @property
    def ranks(self) -> int:
        return self.ring.size * self.ulysses.size

    @property
    def dims(self) -> tuple[MeshDim, ...]:
        """From the one whose ranks are neighbours outwards."""
        return (self.ulysses, self.ring)

    @property
    def rank(self) -> int:
        return self.ring.index * self.ulysses.size + self.ulysses.index

    def check_alive(self) -> None:
        """Raise ``RuntimeError`` if a group of this mesh is not (or no longer) usable."""
        _check_alive(self.dims)

    def alone(self) -> SequenceMesh:
        """The mesh of this rank, where it computes what it needs from what it holds; it keeps its place in the sequence."""
        ring, ulysses = MeshDim("ring", 1, self.rank, "", None), dim_of_one("ulysses")
        return SequenceMesh(ring, ulysses, self.device_type, self.alone_text, self.alone_text)


def _sequence_mesh(ring: MeshDim, ulysses: MeshDim, device_type: str) -> SequenceMesh:
    ranks, rank = ring.size * ulysses.size, ring.index * ulysses.size + ulysses.index
    of_ring, of_ulysses = [(dim.size, dim.index, dim.group_name) for dim in (ring, ulysses)]
    text: str = _to_json(of_ring, of_ulysses, device_type, ranks)
    alone: str = _to_json((1, rank, ""), (1, 0, ""), device_type, ranks)
    return SequenceMesh(ring, ulysses, device_type, text, alone)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _to_json(ring: tuple[int, int, str], ulysses: tuple[int, int, str], device_type: str, ranks: int) -> str:
    # Dynamo does not trace the encoder. A mesh is a constant of a graph.
    return json.dumps({"ring": ring, "ulysses": ulysses, "device_type": device_type, "ranks": ranks})


def read_mesh(text: str) -> tuple[SequenceMesh, int]:
    """Return the mesh that ``text`` describes, without its groups, and among how many ranks a sequence is sharded."""
    fields = json.loads(text)
    dims = []
    for name in ("ring", "ulysses"):
        size, index, group_name = fields[name]
        dims.append(MeshDim(name, size, index, group_name, None))
    return SequenceMesh(dims[0], dims[1], fields["device_type"], text), fields["ranks"]


def _check_alive(dims: tuple[MeshDim, ...]) -> None:
    for dim in dims:
        if dim.size == 1:
            continue
        if not dist.is_initialized() or not is_registered(dim.group):
            raise RuntimeError(
                f"The process group of mesh dim {dim.name!r} ({dim.size} ranks) was destroyed. Build the mesh and "
                "the mode again after init_process_group()."
            )


@dataclass(frozen=True)
class GuidedMesh:
    """All ranks that work on one image: for each index along ``pipe``, which has blocks of its own, and along ``batch``, which shares
    branches of guidance, a ``sequence``, for each of whose ranks those of ``tensor``, which share the heads of its tokens."""

    batch: MeshDim
    sequence: SequenceMesh
    # Without defaults: Dynamo of torch 2.11 cannot take a value of ours for one, and modes are made inside compiled functions.
    tensor: MeshDim
    pipe: MeshDim

    @property
    def ranks(self) -> int:
        return self.pipe.size * self.batch.size * self.sequence.ranks * self.tensor.size

    @property
    def rank(self) -> int:
        guided = self.pipe.index * self.batch.size + self.batch.index
        return (guided * self.sequence.ranks + self.sequence.rank) * self.tensor.size + self.tensor.index

    @property
    def dims(self) -> tuple[MeshDim, ...]:
        return (self.tensor, *self.sequence.dims, self.batch, self.pipe)

    def check_alive(self) -> None:
        _check_alive(self.dims)


def one_guided_rank(device_type: str) -> GuidedMesh:
    """The mesh of a process that works alone; needs no process group."""
    return GuidedMesh(dim_of_one("batch"), one_rank(device_type), dim_of_one(TENSOR_DIM), dim_of_one(PIPE_DIM))


def guided_mesh(mesh: DeviceMesh | ProcessGroup, *, group_dim: str = "ulysses") -> GuidedMesh:
    """Read a user's ``mesh``: as :func:`sequence_mesh`, with or without a ``batch``, ``tensor`` and ``pipe`` dim (or of these alone)."""
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    batch, tensor, pipe = (dim_of_one(name) for name in ("batch", TENSOR_DIM, PIPE_DIM))
    if isinstance(mesh, DeviceMesh) and "batch" in names:
        batch = batch_mesh(mesh).ulysses
    if isinstance(mesh, DeviceMesh) and TENSOR_DIM in names:
        tensor = _dim_of_group(TENSOR_DIM, mesh.get_group(TENSOR_DIM))
    if isinstance(mesh, DeviceMesh) and PIPE_DIM in names:
        pipe = _dim_of_group(PIPE_DIM, mesh.get_group(PIPE_DIM))
    if isinstance(mesh, DeviceMesh) and names and set(names) <= {"batch", TENSOR_DIM, PIPE_DIM}:
        return GuidedMesh(batch, one_rank(mesh.device_type), tensor, pipe)
    return GuidedMesh(batch, sequence_mesh(mesh, group_dim=group_dim), tensor, pipe)


def one_rank(device_type: str) -> SequenceMesh:
    """The mesh of a process that works alone; needs no process group."""
    ring, ulysses = (dim_of_one(name) for name in ("ring", "ulysses"))
    return _sequence_mesh(ring, ulysses, device_type)


def mesh_of_groups(ring: ProcessGroup, ulysses: ProcessGroup, device_type: str) -> SequenceMesh:
    """The mesh of a rank that is in these two groups, which torch.distributed need not know."""
    return _sequence_mesh(_dim_of_group("ring", ring), _dim_of_group("ulysses", ulysses), device_type)


def sequence_mesh(mesh: DeviceMesh | ProcessGroup, *, group_dim: str = "ulysses") -> SequenceMesh:
    """Read a user's ``mesh``: a DeviceMesh with a ``ring`` and/or ``ulysses`` dim, or a group (all ``group_dim``).

    Raises:
        TypeError: ``mesh`` is neither.
        ValueError: the mesh has neither dim, has dims of another name, or this rank is not part of it.
    """
    if isinstance(mesh, ProcessGroup):
        dims = {group_dim: _dim_of_group(group_dim, mesh)}
        device_type = _device_type_of(mesh)
    elif isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        given = f"dims {tuple(names)}" if names else f"{mesh.ndim} unnamed dim(s)"
        if not {"ring", "ulysses"} & set(names):
            raise ValueError(
                f"mesh has {given}; expected a dim named 'ring', 'ulysses' or both. "
                "init_context_parallel_mesh() makes one; init_device_mesh(..., mesh_dim_names=('ring', 'ulysses')) too."
            )
        unknown = [name for name in names if name not in (*MESH_DIMS, TENSOR_DIM, PIPE_DIM)]
        if unknown:
            wanted = ", ".join(repr(name) for name in names if name in MESH_DIMS)
            raise ValueError(
                f"mesh has {given}; {unknown} mean nothing here. Pass the slice that shares one sequence: mesh[{wanted}]."
            )
        if mesh.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not part of the mesh with {given}; only its members use it.")
        try:
            dims = {
                name: _dim_of_group(name, mesh.get_group(name)) for name in names if name not in (TENSOR_DIM, PIPE_DIM)
            }
        except RuntimeError as error:
            raise RuntimeError(
                f"the process groups of the mesh with {given} were destroyed. Build the mesh again after "
                "init_process_group()."
            ) from error
        device_type = mesh.device_type
    else:
        raise TypeError(f"mesh is a {type(mesh).__name__}; expected a DeviceMesh or a ProcessGroup.")
    alone = one_rank(device_type)
    found = _sequence_mesh(dims.get("ring", alone.ring), dims.get("ulysses", alone.ulysses), device_type)
    found.check_alive()
    return found


def batch_mesh(mesh: DeviceMesh | ProcessGroup) -> SequenceMesh:
    """The ranks of the ``batch`` dim of ``mesh``, or of a group, which share a batch as others share a sequence.

    Raises:
        TypeError: ``mesh`` is neither.
        ValueError: the mesh has no such dim.
    """
    if isinstance(mesh, ProcessGroup):
        group, device_type = mesh, _device_type_of(mesh)
    elif isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if "batch" not in names:
            given = f"dims {tuple(names)}" if names else f"{mesh.ndim} unnamed dim(s)"
            raise ValueError(
                f"mesh has {given}; expected a dim named 'batch'. init_context_parallel_mesh(max_batch_dim_size=...) makes "
                "one; init_device_mesh(..., mesh_dim_names=('batch', ...)) too."
            )
        group, device_type = mesh.get_group("batch"), mesh.device_type
    else:
        raise TypeError(f"mesh is a {type(mesh).__name__}; expected a DeviceMesh or a ProcessGroup.")
    found = _sequence_mesh(one_rank(device_type).ring, _dim_of_group("batch", group), device_type)
    found.check_alive()
    return found
