"""Compare the options of a function that changes a pipeline or a model between the ranks that call it.

The public functions of ``adapters/parallel`` and :func:`parallelize_vae` begin with it. Arguments of later
calls are compared in ``arguments.py``. Tests: tests/adapters/agree/test_options.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.agree.arguments import describe_all, describe_value
from para_core.distributed.agree import agree, together
from para_core.distributed.mesh import GuidedMesh, all_ranks, check_member, guided_mesh
from para_core.distributed.records import Record, describe_differences


@contextmanager
def agree_on_options(
    function: str, mesh: DeviceMesh | ProcessGroup | GuidedMesh | None, options: Mapping[str, object]
) -> Iterator[None]:
    """Return a context manager for the checks of ``options``, which ``function`` was called with and may be
    invalid. Collective.

    Every rank of ``mesh`` must enter the context, before anything that depends on an option is sent. If an
    option, or the device type or a size of ``mesh``, differs between ranks, every rank raises ``ValueError``.
    An exception in the ``with`` block is raised on every rank as well. With a :class:`GuidedMesh`, nothing is
    exchanged, because it comes from a caller that has compared the options and raises on every rank.
    """
    if isinstance(mesh, GuidedMesh):
        yield
        return
    ranks = _ranks_of(mesh)
    # A function has no value to compare between processes, but a name. ``describe_all`` returns the class of
    # a callback.
    names = {name: getattr(value, "__qualname__", value) for name, value in options.items()}
    record = {"mesh": _describe_mesh_sizes(mesh), **describe_all(names)}

    def explain(records: list[Record]) -> str:
        differences = "; ".join(describe_differences(records))
        return f"the ranks of one mesh must call {function} with equal options. {differences}."

    agree(record, ranks, explain=explain, call=function)
    with together(ranks, function, call=function):
        yield


def _ranks_of(mesh: DeviceMesh | ProcessGroup | None) -> GuidedMesh:
    """Return the ranks of ``mesh`` by groups that they share even if each of them has passed another mesh.

    If the mesh has all ranks, this is the default group, because the groups of its dims depend on their
    sizes. So is it for None, which stands for all ranks, and for other types, which are refused later. Ranks
    whose meshes have other members share no such group: they wait for each other until the time-out.
    """
    world = all_ranks()
    if mesh == dist.GroupMember.NON_GROUP_MEMBER:
        # The other ranks may have a group of their own, so this rank raises alone.
        check_member(mesh)
    if isinstance(mesh, (DeviceMesh, ProcessGroup)) and mesh.size() < world.ranks:
        return guided_mesh(mesh)
    return world


def _describe_mesh_sizes(mesh: object) -> str:
    """Return the device type and the sizes of ``mesh`` as text, which ranks compare; sizes of 1 are left out."""
    if isinstance(mesh, ProcessGroup):
        return f"a process group of {mesh.size()}"
    if not isinstance(mesh, DeviceMesh):
        return describe_value(mesh)
    names = mesh.mesh_dim_names or [f"dim {index}" for index in range(mesh.ndim)]
    sizes = zip(names, mesh.shape, strict=True)
    return f"{mesh.device_type}: {' × '.join(f'{name} {size}' for name, size in sizes if size > 1) or 'one rank'}"
