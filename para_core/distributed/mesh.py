"""Convert a user's mesh, a ``DeviceMesh`` or a ``ProcessGroup``, to the types that this package uses internally.

Features hold these types and not the user's mesh, which is made in :mod:`.create_mesh` or by the user.
Nothing here communicates. Tests: tests/distributed/test_mesh.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.dataclass_json import from_json, to_json
from para_core.torch_internals import (
    group_devices,
    group_named,
    is_registered,
)

MESH_DIMS = ("batch", "ring", "ulysses")
# The name of the last mesh dim if there is tensor parallelism. Its ranks hold different heads of the same
# tokens.
TENSOR_DIM = "tensor"
# The name of the first mesh dim if there are pipeline stages. Its ranks hold different transformer blocks.
PIPE_DIM = "pipe"


def check_process_group(caller: str) -> None:
    """Raise ``RuntimeError`` if torch.distributed is not initialised. The message begins with ``caller``."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"{caller} needs a process group, and none is initialised. Start with `torchrun --nproc_per_node=N …` and "
            "call torch.distributed.init_process_group() first."
        )


@dataclass(frozen=True)
class MeshDim:
    """One mesh dim as this rank sees it.

    ``index`` is the position of this rank along the dim. ``group_name`` is the process group's name, by which
    graphs look the group up. A dim of size 1 has no group; its ``group_name`` is "".

    A dim that :func:`read_mesh` has restored has a name and no group, so
    :func:`~para_core.distributed.collectives.group_of` looks the group up. The ring of
    :meth:`SequenceMesh.single_rank` has size 1, and the rank in the sequence as its index.
    """

    name: str
    size: int
    index: int
    group_name: str
    group: ProcessGroup | None


def dim_of_one(name: str) -> MeshDim:
    """Return a mesh dim of size 1 with this name, without a process group."""
    return MeshDim(name, 1, 0, "", None)


def _device_type_of(group: ProcessGroup) -> str:
    """Return the device type on which the ranks of ``group`` compute: ``"cuda"`` if the group has a backend
    for it and a GPU is available, otherwise another device type of the group.
    """
    if torch.compiler.is_compiling():
        # Look the group up by its name: if it is an argument of a graph, Dynamo can only read its name and
        # size.
        named: str = _device_type_of_named(group.group_name)
        return named
    return _preferred_device_type(group)


def _preferred_device_type(group: ProcessGroup) -> str:
    """Return the result of :func:`_device_type_of` in eager code."""
    # Do not rely on the order of the devices, which is arbitrary: for "cpu:gloo,cuda:nccl" the CPU may be the
    # last.
    types = [device.type for device in group_devices(group)]
    if "cuda" in types and torch.cuda.is_available():
        return "cuda"
    return "cpu" if "cpu" in types else str(types[-1])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_type_of_named(group_name: Any) -> str:
    return _preferred_device_type(group_named(group_name))


def dim_of_group(name: str, group: ProcessGroup | None) -> MeshDim:
    """Return a mesh dim with this name and the ranks of ``group``. It has size 1 if ``group`` is None."""
    if group is None or group.size() == 1:
        return dim_of_one(name)
    return MeshDim(name, group.size(), group.rank(), group.group_name, group)


@dataclass(frozen=True)
class SequenceMesh:
    """The ``ring`` × ``ulysses`` ranks that share one sequence, as this rank sees them.

    The ``rank`` in the sequence is ring index × Ulysses size + Ulysses index, so the ranks of a Ulysses group
    hold neighbouring parts of the sequence.
    """

    ring: MeshDim
    ulysses: MeshDim
    device_type: str
    # The JSON forms of this mesh and of :meth:`single_rank`, from which read_mesh restores the meshes. They
    # are created in advance, because Dynamo treats strings as constants, but may treat numbers as variables.
    text: str = ""
    single_rank_text: str = ""

    @property
    def ranks(self) -> int:
        """The number of ranks that share the sequence; 1 for a mesh of one rank."""
        return self.ring.size * self.ulysses.size

    @property
    def dims(self) -> tuple[MeshDim, ...]:
        """The mesh dims, innermost first: neighbouring ranks differ in their index along the first dim, ``ulysses``."""
        return (self.ulysses, self.ring)

    @property
    def rank(self) -> int:
        return self.ring.index * self.ulysses.size + self.ulysses.index

    def check_alive(self) -> None:
        """Raise ``RuntimeError`` if a process group of this mesh does not exist or was destroyed."""
        _check_alive(self.dims)

    def single_rank(self) -> SequenceMesh:
        """Return a mesh of this rank only, for calls without communication.
        ``rank`` is still that in the sequence.
        """
        # A ring of size 1 keeps the rank as its index.
        ring, ulysses = MeshDim("ring", 1, self.rank, "", None), dim_of_one("ulysses")
        return SequenceMesh(ring, ulysses, self.device_type, self.single_rank_text, self.single_rank_text)


@dataclass(frozen=True)
class MeshRecord:
    """The content of :attr:`SequenceMesh.text`. The dims have the names of their process groups, not the
    groups.

    ``ranks`` is the number of ranks that share the sequence, even for the mesh of one rank
    (:meth:`SequenceMesh.single_rank`).
    """

    ring: MeshDim
    ulysses: MeshDim
    device_type: str
    ranks: int


def _sequence_mesh(ring: MeshDim, ulysses: MeshDim, device_type: str) -> SequenceMesh:
    """Return the mesh of these dims, with its JSON forms."""
    ranks, rank = ring.size * ulysses.size, ring.index * ulysses.size + ulysses.index
    text = to_json(MeshRecord(replace(ring, group=None), replace(ulysses, group=None), device_type, ranks))
    if ranks == 1:
        return SequenceMesh(ring, ulysses, device_type, text, text)
    single = MeshRecord(MeshDim("ring", 1, rank, "", None), dim_of_one("ulysses"), device_type, ranks)
    return SequenceMesh(ring, ulysses, device_type, text, to_json(single))


def read_mesh(text: str) -> tuple[SequenceMesh, int]:
    """Return the mesh that ``text`` (:attr:`SequenceMesh.text`) describes, and the number of ranks that share
    a sequence.

    The :meth:`~SequenceMesh.single_rank` of this mesh has no text, so it can compute, but no graph can hold it.
    """
    record = from_json(MeshRecord, text)
    return SequenceMesh(record.ring, record.ulysses, record.device_type, text), record.ranks


def _check_alive(dims: tuple[MeshDim, ...]) -> None:
    """Raise ``RuntimeError`` if torch.distributed does not have the group of one of the ``dims`` any more."""
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
    """All ranks that work on one image or video: ``pipe`` × ``batch`` × ``sequence`` × ``tensor``, outermost
    first.

    Ranks along ``pipe`` hold different transformer blocks, along ``batch`` different CFG branches or samples,
    in ``sequence`` different tokens, and along ``tensor`` different heads.
    """

    batch: MeshDim
    sequence: SequenceMesh
    # The fields have no defaults, because modes may be created inside compiled functions, and Dynamo of torch
    # 2.11 cannot trace a default that is an instance of our own classes.
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
        """The mesh dims, innermost first.
        Ranks that gather along one after the other get the order of :attr:`rank`.
        """
        return (self.tensor, *self.sequence.dims, self.batch, self.pipe)

    def check_alive(self) -> None:
        """Raise ``RuntimeError`` if a process group of this mesh does not exist or was destroyed."""
        _check_alive(self.dims)


AnyMesh = GuidedMesh | SequenceMesh


def one_guided_rank(device_type: str) -> GuidedMesh:
    """Return a mesh of this rank alone, without process groups."""
    return GuidedMesh(
        dim_of_one("batch"), one_rank(device_type), dim_of_one(TENSOR_DIM), dim_of_one(PIPE_DIM)
    )


def all_ranks() -> GuidedMesh:
    """Return all ranks of the default process group as a mesh of one dim; only this rank without that group."""
    group = None
    if dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return replace(one_guided_rank("cpu"), batch=dim_of_group("all ranks", group))


def guided_mesh(mesh: DeviceMesh | ProcessGroup, *, group_dim: str = "ulysses") -> GuidedMesh:
    """Convert a user's ``mesh`` to a :class:`GuidedMesh`.

    ``mesh`` may be anything that :func:`sequence_mesh` accepts, or a DeviceMesh that only has ``batch``,
    ``tensor`` and ``pipe`` dims. All ranks of a ProcessGroup form the dim ``group_dim``.

    Raises what :func:`sequence_mesh` raises.
    """
    check_member(mesh)
    names = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    batch, tensor, pipe = (dim_of_one(name) for name in ("batch", TENSOR_DIM, PIPE_DIM))
    if isinstance(mesh, DeviceMesh) and "batch" in names:
        batch = _dim_of_mesh(mesh, "batch")
    if isinstance(mesh, DeviceMesh) and TENSOR_DIM in names:
        tensor = _dim_of_mesh(mesh, TENSOR_DIM)
    if isinstance(mesh, DeviceMesh) and PIPE_DIM in names:
        pipe = _dim_of_mesh(mesh, PIPE_DIM)
    if isinstance(mesh, DeviceMesh) and names and set(names) <= {"batch", TENSOR_DIM, PIPE_DIM}:
        return GuidedMesh(batch, one_rank(mesh.device_type), tensor, pipe)
    return GuidedMesh(batch, sequence_mesh(mesh, group_dim=group_dim), tensor, pipe)


def one_rank(device_type: str) -> SequenceMesh:
    """Return a sequence mesh of this rank alone, without process groups."""
    ring, ulysses = (dim_of_one(name) for name in ("ring", "ulysses"))
    return _sequence_mesh(ring, ulysses, device_type)


def mesh_of_groups(ring: ProcessGroup, ulysses: ProcessGroup, device_type: str) -> SequenceMesh:
    """Return the sequence mesh of two groups of this rank, which need not be registered with torch.distributed."""
    return _sequence_mesh(dim_of_group("ring", ring), dim_of_group("ulysses", ulysses), device_type)


def sequence_mesh(mesh: DeviceMesh | ProcessGroup, *, group_dim: str = "ulysses") -> SequenceMesh:
    """Convert a user's ``mesh`` to a :class:`SequenceMesh`.

    Args:
        mesh: A DeviceMesh with a ``ring`` dim, a ``ulysses`` dim or both; or a ProcessGroup.
        group_dim: The mesh dim that all ranks of a ProcessGroup form, ``"ring"`` or ``"ulysses"``.

    Raises:
        TypeError: ``mesh`` is neither a DeviceMesh nor a ProcessGroup.
        ValueError: The mesh has neither of the two dims, or an unknown dim, or this rank does not belong to
            it.
        RuntimeError: The process groups of the mesh were destroyed.
    """
    check_member(mesh)
    if isinstance(mesh, ProcessGroup):
        dims = {group_dim: dim_of_group(group_dim, mesh)}
        device_type = _device_type_of(mesh)
    else:
        names = mesh.mesh_dim_names or ()
        if not {"ring", "ulysses"} & set(names):
            raise ValueError(
                f"mesh has {_dims_text(mesh)}; expected a dim named 'ring', 'ulysses' or both. "
                "init_context_parallel_mesh() makes one; init_device_mesh(..., mesh_dim_names=('ring', 'ulysses')) too."
            )
        unknown = [name for name in names if name not in (*MESH_DIMS, TENSOR_DIM, PIPE_DIM)]
        if unknown:
            wanted = ", ".join(repr(name) for name in names if name in MESH_DIMS)
            raise ValueError(
                f"mesh has {_dims_text(mesh)}; {unknown} are not dims of a sequence. Pass the slice that shards one "
                "sequence: "
                f"mesh[{wanted}]."
            )
        dims = {name: _dim_of_mesh(mesh, name) for name in names if name not in (TENSOR_DIM, PIPE_DIM)}
        device_type = mesh.device_type
    ring, ulysses = (dims.get(name, dim_of_one(name)) for name in ("ring", "ulysses"))
    sequence = _sequence_mesh(ring, ulysses, device_type)
    sequence.check_alive()
    return sequence


def _dim_of_mesh(mesh: DeviceMesh, name: str) -> MeshDim:
    """Return the dim ``name`` of ``mesh``. Raise ``RuntimeError`` if its process group was destroyed."""
    try:
        group = mesh.get_group(name)
    except RuntimeError as error:
        raise RuntimeError(
            f"the process groups of the mesh with {_dims_text(mesh)} were destroyed. Build the mesh again after "
            "init_process_group()."
        ) from error
    return dim_of_group(name, group)


def check_member(mesh: object) -> None:
    """Raise ``ValueError`` if this rank does not belong to ``mesh``, and ``TypeError`` if ``mesh`` is no mesh."""
    # new_group() returns NON_GROUP_MEMBER, a number, on ranks outside the group.
    if mesh == dist.GroupMember.NON_GROUP_MEMBER or (
        isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None
    ):
        text = "process group"
        if isinstance(mesh, DeviceMesh):
            text = f"mesh with {_dims_text(mesh)}"
        raise ValueError(f"rank {dist.get_rank()} does not belong to the {text}; only its members use it.")
    # Dynamo knows the class of a process group in a graph only if isinstance is asked for that class alone.
    if not (isinstance(mesh, DeviceMesh) or isinstance(mesh, ProcessGroup)):  # noqa: SIM101
        raise TypeError(f"mesh is a {type(mesh).__name__}; expected a DeviceMesh or a ProcessGroup.")


def _dims_text(mesh: DeviceMesh) -> str:
    """Return the dims of ``mesh`` as words of a message."""
    names = mesh.mesh_dim_names
    return f"dims {tuple(names)}" if names else f"{mesh.ndim} unnamed dim(s)"


def batch_mesh(mesh: DeviceMesh | ProcessGroup) -> SequenceMesh:
    """Return a sequence mesh whose ``ulysses`` dim is the ``batch`` dim of ``mesh``, to shard a batch like a
    sequence.

    All ranks of a ProcessGroup are used.

    Raises:
        TypeError: ``mesh`` is neither a DeviceMesh nor a ProcessGroup.
        ValueError: The mesh has no ``batch`` dim, or this rank does not belong to it.
        RuntimeError: The process group of this dim was destroyed.
    """
    check_member(mesh)
    if isinstance(mesh, ProcessGroup):
        dim, device_type = dim_of_group("batch", mesh), _device_type_of(mesh)
    else:
        if "batch" not in (mesh.mesh_dim_names or ()):
            raise ValueError(
                f"mesh has {_dims_text(mesh)}; expected a dim named 'batch'. "
                "init_context_parallel_mesh(max_batch_dim_size=...) makes one; init_device_mesh(..., "
                "mesh_dim_names=('batch', ...)) too."
            )
        dim, device_type = _dim_of_mesh(mesh, "batch"), mesh.device_type
    batch = _sequence_mesh(dim_of_one("ring"), dim, device_type)
    batch.check_alive()
    return batch
