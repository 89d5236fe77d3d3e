"""Collectives with uneven sizes: by hand in eager code, and as operators that a graph keeps in program order.

The only module that knows torch's own names for them. Two are enough, all-to-all and all-gather: they exist on every backend for
every device (gloo has no point-to-point for CUDA tensors).

**Order in a graph.** Compilers order independent operators as they see fit, by memory, say, which differs from rank to rank where
parts differ in size: the ranks would then meet in different collectives. So every collective of a graph, forward and backward,
takes from the one before it a tensor of one element that it does not look at (:func:`define_collective`).
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from para_core.distributed.mesh import GuidedMesh, MeshDim, SequenceMesh, host_group
from para_core.torch_internals import WAIT_TENSOR, backend_of, group_named, schema_of

# gloo's threads drop the tensors of the last collective a little after it is done, and need the GIL for it. At exit they
# would not get it any more, and a script that ends right after a collective aborts in one of four runs ("terminate called
# without an active exception", pytorch/pytorch#190489). Sleeping releases the GIL while there is still an interpreter.
atexit.register(time.sleep, 0.05)  # seconds


# -- begun now, waited for later


class Travelling(NamedTuple):
    """A collective under way: what it will have filled, and whom to wait for; None: nobody."""

    buffer: Tensor
    work: dist.Work | None


def start_all_to_all(
    x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], dim: MeshDim, *, even: bool = False
) -> Travelling:
    """Begin to send ``send_sizes[i]`` elements of ``x`` to rank ``i`` of ``dim``; :func:`wait` gives what arrives.

    Args:
        x: contiguous; flat, unless ``even``.
        receive_sizes: elements from each rank of ``dim``: what that rank sends here. They arrive in the order of the senders.
        even: every rank sends as much to every other, which all of them know: backends have a shorter way for it, without sizes.
            The first dim of ``x`` is what they share.

    Where a gradient will be asked for, or a graph is traced, it is the operator, and done at once.
    """
    if _needs_operator(x):
        return Travelling(all_to_all(x.view(-1), send_sizes, receive_sizes, dim), None)
    if even:
        received = torch.empty_like(x)
        return Travelling(received, group_of(dim).alltoall_base(received, x, [], [], _ALL_TO_ALL))
    received = x.new_empty(sum(receive_sizes))
    sizes = list(receive_sizes), list(send_sizes)
    return Travelling(received, group_of(dim).alltoall_base(received, x, *sizes, _ALL_TO_ALL))


# What dist.all_to_all_single calls: half of the host's time goes into what is around it there.
_ALL_TO_ALL = dist.AllToAllOptions()


def start_ring_shift(x: Tensor, receive_size: int, dim: MeshDim, *, distance: int = 1) -> Travelling:
    """Begin to send ``x`` (flat) to the rank ``distance`` after this one, and to receive ``receive_size`` elements."""
    send_sizes = [0] * dim.size
    receive_sizes = [0] * dim.size
    send_sizes[(dim.index + distance) % dim.size] = x.numel()
    receive_sizes[(dim.index - distance) % dim.size] = receive_size
    return start_all_to_all(x, send_sizes, receive_sizes, dim)


def start_all_gather(x: Tensor, dim: MeshDim) -> Travelling:
    """Begin to gather the equally long ``x`` (flat) of all ranks of ``dim``, one behind the other."""
    if _needs_operator(x):
        return Travelling(all_gather(x, [x.numel()] * dim.size, 0, dim), None)
    gathered = x.new_empty(dim.size * x.numel())
    return Travelling(gathered, _all_gather_into(gathered, x, group=group_of(dim), async_op=True))


def wait(travelling: Travelling) -> Tensor:
    """What a collective that was started has brought."""
    if travelling.work is not None:
        travelling.work.wait()
    return travelling.buffer


def _needs_operator(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled())


def group_of(dim: MeshDim) -> dist.ProcessGroup:
    """The group of a mesh dim; in a graph, which holds names, found by its name."""
    return dim.group if dim.group is not None else group_named(dim.group_name)


def _all_gather_into(gathered: Tensor, x: Tensor, **options: Any) -> Any:
    # torch 2.11 has only the second name; 2.13 warns of it.
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, x, **options)


def _all_equal(sizes: Sequence[int]) -> bool:
    return all(size == sizes[0] for size in sizes)


# -- as operators: with a gradient, and in graphs

LIBRARY = torch.library.Library("para_core", "FRAGMENT")


def define_operator(signature: str) -> None:
    """Define the operator ``para_core::signature`` without an implementation, for use in compiled graphs.

    It is tagged as not capturable by a CUDA graph. Inductor then cuts its CUDA graphs at the operator (or, without graph partition,
    makes none), because collectives wait for other ranks, and packing keeps tables that must not be in the memory pool of a graph.
    """
    LIBRARY.define(signature, tags=(torch.Tag.cudagraph_unsafe,))


def define_collective(
    signature: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    context: Callable[..., Any] | None = None,
) -> None:
    """Define the operator ``para_core::signature``, which every graph keeps, after the collective that was traced before it.

    Its last argument, ``after``, is an optional tensor; its last result is one of one element (:func:`done`). While a graph is
    traced the first is filled with the second of the operator before: a data dependency, which no pass of a compiler can cut. The
    last one is waited for, which is a side effect: else it would be missing in the graph of a rank for which it has no elements, and
    the others would wait. Both are kept on the tracer, so they begin and end with the graph.

    Args:
        shape: what ``run`` is for tensors without data.
        gradient, context: what :func:`torch.library.register_autograd` takes.
    """
    name = signature[: signature.index("(")]
    define_operator(signature)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"para_core::{name}", shape, lib=LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"para_core::{name}", gradient, setup_context=context, lib=LIBRARY)
    torch.library.register_torch_dispatch(f"para_core::{name}", ProxyTorchDispatchMode, _chained, lib=LIBRARY)


def _chained(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    tracer, place = mode.tracer, len(schema_of(func).arguments) - 1
    token, waiting = getattr(tracer, "_para_core_last_collective", (None, None))
    # By place: a name would cost the host another microsecond at each call of the graph.
    found = mode.__torch_dispatch__(func, types, (*args[:place], token), kwargs)
    mode.__torch_dispatch__(WAIT_TENSOR, types, (found[-1],))
    waits = next(iter(reversed(tracer.graph.nodes)))  # torch 2.11 gives what can be iterated, and no iterator
    if waiting is not None and waiting.meta.get(_PART) == waits.meta.get(_PART):
        tracer.graph.erase_node(waiting)
    elif waiting is not None:
        # The first of a backward. What keeps a forward must not keep a second one in the backward, which has its inputs.
        waiting.meta[_PART] = "must_be_in_forward"
    tracer._para_core_last_collective = found[-1], waits
    return found


_PART = "partitioner_tag"


def done(x: Tensor) -> Tensor:
    """A token of one element for who comes next; ``x`` says on which device."""
    return x.new_empty(1, dtype=torch.float32)


def _all_to_all(
    x: Tensor, send_sizes: list[int], receive_sizes: list[int], group_name: str, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    received = x.new_empty(sum(receive_sizes), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), receive_sizes, send_sizes, group=group_named(group_name))
    return received, done(x)


def _all_to_all_shape(x: Tensor, _: list[int], receive_sizes: list[int], *__: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(sum(receive_sizes), *x.shape[1:]), done(x)


def _all_to_all_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.send_sizes, ctx.receive_sizes, ctx.group_name, *_ = inputs


def _all_to_all_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    back, _ = torch.ops.para_core.all_to_all(grad, ctx.receive_sizes, ctx.send_sizes, ctx.group_name)
    return back, None, None, None, None


def _all_gather(x: Tensor, sizes: list[int], group_name: str, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows, group = x.new_empty(sum(sizes), *x.shape[1:]), group_named(group_name)
    if _all_equal(sizes):
        _all_gather_into(rows, x.contiguous(), group=group)
        return rows, done(x)
    parts = list(rows.split(sizes))
    if _is_nccl(group, x.device):
        # ProcessGroupNCCL::allgather sends outputs of unequal sizes as one coalesced group of broadcasts: one kernel instead of one
        # per rank. gloo refuses such outputs.
        dist.all_gather(parts, x.contiguous(), group=group)
        return rows, done(x)
    works = []
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(x)
        if part.numel():
            works.append(dist.broadcast(part, group_src=rank, group=group, async_op=True))
    for work in works:
        work.wait()
    return rows, done(x)


def _is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL moves tensors on ``device`` among the ranks of ``group``."""
    try:
        return bool(backend_of(group, device).name() == "nccl")
    except RuntimeError:  # A group written in Python, such as that of para_core.verify, has no backend.
        return False


def _all_gather_shape(x: Tensor, sizes: list[int], *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(sum(sizes), *x.shape[1:]), done(x)


def _all_gather_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.sizes, ctx.group_name, *_ = inputs
    ctx.own = x.shape[0]


def _all_gather_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    """Every rank had this rank's rows, so their gradients come from all and add up."""
    ranks = len(ctx.sizes)
    found, _ = torch.ops.para_core.all_to_all(grad, ctx.sizes, [ctx.own] * ranks, ctx.group_name)
    return found.unflatten(0, (ranks, ctx.own)).sum(0), None, None, None


define_collective(
    "all_to_all(Tensor x, SymInt[] send_sizes, SymInt[] receive_sizes, str group_name, Tensor? after=None) -> (Tensor, Tensor)",
    _all_to_all,
    _all_to_all_shape,
    _all_to_all_backward,
    _all_to_all_context,
)
define_collective(
    "all_gather(Tensor x, SymInt[] sizes, str group_name, Tensor? after=None) -> (Tensor, Tensor)",
    _all_gather,
    _all_gather_shape,
    _all_gather_backward,
    _all_gather_context,
)


def all_to_all(x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], dim: MeshDim) -> Tensor:
    """Send ``send_sizes[i]`` rows of ``x`` to rank ``i`` of ``dim``; differentiable, in eager code and graphs.

    Returns:
        What arrives, in the order of the senders, concatenated along the first dim. ``x`` where ``dim`` has one rank.
    """
    if dim.size == 1:
        return x
    received, _ = torch.ops.para_core.all_to_all(x, list(send_sizes), list(receive_sizes), dim.group_name)
    return received  # type: ignore[no-any-return]


def all_gather(x: Tensor, sizes: Sequence[int], tensor_dim: int, dim: MeshDim) -> Tensor:
    """Concatenate the ``x`` of all ranks of ``dim`` along ``tensor_dim``; rank ``i`` gives ``sizes[i]`` along it. Differentiable."""
    if dim.size == 1:
        return x
    if x.dtype == torch.bool:  # gloo moves no bool
        return all_gather(x.view(torch.uint8), sizes, tensor_dim, dim).view(torch.bool)
    gathered, _ = torch.ops.para_core.all_gather(x.movedim(tensor_dim, 0), list(sizes), dim.group_name)
    return gathered.movedim(0, tensor_dim)  # type: ignore[no-any-return]


# -- small values, on the host


class HostGroups:
    """The process groups over which bytes travel among the ranks of a mesh, looked up at the first exchange.

    For whoever exchanges bytes in every call: it takes the place of the mesh in :mod:`para_core.distributed.consistency`.
    """

    def __init__(self, mesh: SequenceMesh | GuidedMesh) -> None:
        self.dims = tuple([dim for dim in mesh.dims if dim.size > 1])
        self.by_dim: dict[str, dist.ProcessGroup] = {}


def all_gather_bytes(x: Tensor, dim: MeshDim, by_dim: dict[str, dist.ProcessGroup] | None = None) -> Tensor:
    """The equally long uint8 CPU tensors ``x`` of all ranks of ``dim``, concatenated. Eager code only; blocks.

    Goes over the CPU, also where the group of ``dim`` does not (:func:`~para_core.distributed.mesh.host_group`): nothing is waited for
    but the other ranks.

    Args:
        by_dim: the groups of :class:`HostGroups`; a group that is missing is looked up and added.
    """
    if dim.group is None:
        return x
    group = None if by_dim is None else by_dim.get(dim.name)
    if group is None:
        group = host_group(dim)
        if by_dim is not None:
            by_dim[dim.name] = group
    gathered = x.new_empty(dim.size * x.numel())
    _all_gather_into(gathered, x, group=group)
    if group is not dim.group:
        # torch sorts the ranks of a new group; those of the one that it stands beside may be in another order.
        rows = [dist.get_group_rank(group, rank) for rank in dist.get_process_group_ranks(dim.group)]
        gathered = gathered.view(dim.size, -1)[rows].flatten()
    return gathered


def broadcast_bytes(x: Tensor, mesh: SequenceMesh | GuidedMesh) -> Tensor:
    """``x`` of the first rank of ``mesh``, where all ranks give an equally long uint8 CPU tensor. Eager code only."""
    for dim in mesh.dims:
        x = all_gather_bytes(x, dim)[: x.numel()]
    return x


def tensor_bytes(x: Tensor) -> Tensor:
    """Return the elements of ``x`` as a 1-D uint8 tensor, in C order."""
    # A dim of size 1 may have any stride and still count as contiguous, as t.expand(1) does, and view(uint8) refuses it.
    # flatten keeps such a stride.
    x = x.resolve_conj().resolve_neg().contiguous().flatten()
    return x.as_strided(x.shape, (1,), x.storage_offset()).view(torch.uint8)
