"""All-to-all and all-gather with uneven sizes, in eager code and as operators in graphs.

Attention, plans and sharded rows of images use no other operators, because every backend has these two for
every device (gloo has no point-to-point for CUDA tensors).

**Order in a graph.** A compiler may reorder independent operators, for example to save memory. Ranks whose
parts differ in size would then run their collectives in different orders, and hang. Therefore every
collective of a graph, forward and backward, takes a one-element tensor from the previous collective as an
input. This data dependency keeps the order (:func:`define_collective`).

Every function here is called by all ranks of its mesh dim; transfers between two ranks are in
:mod:`.point_to_point`, and bytes of the host in :mod:`.agree`. Only :func:`all_to_all` and :func:`all_gather`
may be called for a dim of one rank, which has no process group.

Tests: tests/distributed/test_graph_order.py and tests/test_cuda_graphs.py for graphs,
tests/attention/test_traffic.py for what is sent, and all tests on several ranks.
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

from para_core.distributed.mesh import MeshDim
from para_core.torch_internals import WAIT_TENSOR, backend_of, group_named, schema_of

# Sleep 0.05 s at exit. The sleep releases the GIL, which gloo's threads need to free the tensors of a
# collective shortly after it ends. A script that exits right after a collective otherwise aborts in some runs
# ("terminate called without an active exception", pytorch/pytorch#190489), because these threads can no
# longer get the GIL when the interpreter has finished.
atexit.register(time.sleep, 0.05)


class Travelling(NamedTuple):
    """A collective that was started: the buffer it fills, and a handle to wait for (None if the collective ended)."""

    buffer: Tensor
    work: dist.Work | None


def swap_evenly(x: Tensor, dim: MeshDim) -> Tensor:
    """Return the result of an all-to-all of equal parts of the contiguous ``x``, split along its first dim.
    Collective.

    The result has the shape of ``x``. Only for eager code without gradients, where all ranks know that all
    parts are equal: the backend gets no sizes, and nothing is looked up, which is faster than
    :func:`start_all_to_all`.
    """
    received = torch.empty_like(x)
    group_of(dim).alltoall_base(received, x, [], [], _ALL_TO_ALL).wait()
    return received


def start_all_to_all(
    x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], dim: MeshDim
) -> Travelling:
    """Start an all-to-all of the contiguous ``x`` over the ranks of ``dim``. :func:`wait` returns the
    received tensor. Collective. ``x`` must not change before that.

    If ``x`` requires a gradient, or a graph is traced, the operator :func:`all_to_all` runs instead, and has
    ended when this function returns.

    Args:
        send_sizes: Number of elements of the 1-dim ``x`` that are sent to each rank of ``dim``, in order.
        receive_sizes: Number of elements that each rank sends to this one. They arrive in the order of the
            senders.
    """
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return Travelling(all_to_all(x, send_sizes, receive_sizes, dim), None)
    received = x.new_empty(sum(receive_sizes))
    sizes = list(receive_sizes), list(send_sizes)
    buffers = received, x
    if x.dtype in NOT_SENT:
        buffers = view_to_send(received), view_to_send(x)
    return Travelling(received, group_of(dim).alltoall_base(*buffers, *sizes, _ALL_TO_ALL))


# The dtypes that no collective of gloo sends. NCCL does not send some of them, either. Complex numbers are the ones
# that gloo does not send in an all-to-all. swap_evenly, start_ring_shift and start_all_gather do not check for any
# of them, to save time. Only attention may call these three: it sends floats of 16 bits and more, and bytes.
_SENT_AS_BYTES = frozenset(
    {
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)
NOT_SENT = _SENT_AS_BYTES | {torch.complex32, torch.complex64, torch.complex128}


def view_to_send(x: Tensor) -> Tensor:
    """Return the contiguous ``x``, of a dtype in ``NOT_SENT``, as every backend sends it: as bytes or, if it
    is complex, as pairs of numbers.

    The dims of ``x`` stay, before a new last one. The result has the memory of ``x``, unless ``x`` is a lazy
    conjugate.
    """
    if x.dtype in _SENT_AS_BYTES:
        return x.unsqueeze(-1).view(torch.uint8)
    return torch.view_as_real(x.resolve_conj())


# Pass these options to ProcessGroup.alltoall_base. This method is called in place of dist.all_to_all_single,
# because the host would spend more time in the Python code of that function.
_ALL_TO_ALL = dist.AllToAllOptions()


def start_ring_shift(x: Tensor, receive_size: int, dim: MeshDim, *, distance: int = 1) -> Travelling:
    """Start to send the 1-dim ``x`` to the rank ``distance`` positions after this one along ``dim``, and to
    receive ``receive_size`` elements from the rank ``distance`` positions before it. Positions wrap around.

    Collective: an all-to-all, in which every rank of ``dim`` takes part with the same ``distance``, also if
    it has nothing to send or to receive.
    """
    send_sizes = [0] * dim.size
    receive_sizes = [0] * dim.size
    send_sizes[(dim.index + distance) % dim.size] = x.numel()
    receive_sizes[(dim.index - distance) % dim.size] = receive_size
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return start_all_to_all(x, send_sizes, receive_sizes, dim)
    # Do not go through start_all_to_all, to save its Python calls in each step of a ring.
    received = x.new_empty(receive_size)
    return Travelling(
        received, group_of(dim).alltoall_base(received, x, receive_sizes, send_sizes, _ALL_TO_ALL)
    )


def start_all_gather(x: Tensor, dim: MeshDim) -> Travelling:
    """Start an all-gather in rank order of the 1-dim ``x``, whose length is the same on all ranks of ``dim``.
    Collective. :func:`wait` returns the gathered tensor.
    """
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return Travelling(all_gather(x, [x.numel()] * dim.size, 0, dim), None)
    gathered = x.new_empty(dim.size * x.numel())
    return Travelling(gathered, all_gather_into(gathered, x, group=group_of(dim), async_op=True))


def wait(travelling: Travelling) -> Tensor:
    """Wait until a started collective has ended, and return the tensor that it filled."""
    if travelling.work is not None:
        travelling.work.wait()
    return travelling.buffer


def group_of(dim: MeshDim) -> dist.ProcessGroup:
    """Return the process group of ``dim``.
    A dim read from a graph has no group object, so look it up by its name.
    """
    return dim.group if dim.group is not None else group_named(dim.group_name)


def all_gather_into(gathered: Tensor, x: Tensor, **options: Any) -> Any:
    """Gather ``x`` of all ranks into ``gathered``, and return the work if ``async_op`` is set. Collective."""
    # torch 2.11 only has all_gather_into_tensor, and torch 2.13 deprecates it.
    return getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, x, **options)


LIBRARY = torch.library.Library("para_core", "FRAGMENT")


def define_operator(signature: str) -> None:
    """Define an operator of the namespace ``para_core`` by its schema, such as ``"name(Tensor x) ->
    Tensor"``.

    The operator is tagged as not capturable by a CUDA graph, because collectives wait for other ranks, and
    packing caches tables that must not be in the memory pool of a CUDA graph. Inductor then splits its CUDA
    graphs at the operator or, without graph partitioning, creates none.
    """
    LIBRARY.define(signature, tags=(torch.Tag.cudagraph_unsafe,))


def define_collective(
    signature: str,
    run: Callable[..., Any],
    shape: Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    context: Callable[..., Any] | None = None,
) -> None:
    """Define an operator that runs a collective. A compiler neither removes it nor changes the order of such
    operators.

    The last argument of the operator is ``Tensor? after=None``, and the last result is a token, a tensor with
    one element (:func:`done`). While a graph is traced, the token of the previous collective, which is stored
    on the tracer, is passed as ``after``: a data dependency that no compiler pass can remove. The graph also
    waits for the last token, a side effect that a compiler must keep; otherwise a rank whose result has no
    elements would drop the collective, and the others would hang.

    ``run`` is the implementation, ``shape`` that for tensors without data (a fake kernel), and ``gradient``
    and ``context`` are arguments of :func:`torch.library.register_autograd`.
    """
    name = signature[: signature.index("(")]
    define_operator(signature)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"para_core::{name}", shape, lib=LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"para_core::{name}", gradient, setup_context=context, lib=LIBRARY)
    torch.library.register_torch_dispatch(
        f"para_core::{name}", ProxyTorchDispatchMode, _trace_in_order, lib=LIBRARY
    )


def _trace_in_order(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Add the collective ``func`` to the graph that is traced, with the token of the previous one as ``after``."""
    tracer, num_before = mode.tracer, len(schema_of(func).arguments) - 1
    token, last_wait = getattr(tracer, "_para_core_last_collective", (None, None))
    # Pass the token as a positional argument: a keyword costs the host a microsecond more in each call of the
    # graph.
    outputs = mode.__torch_dispatch__(func, types, (*args[:num_before], token), kwargs)
    mode.__torch_dispatch__(WAIT_TENSOR, types, (outputs[-1],))
    # torch 2.11 needs iter(), because reversed() of its node list returns no iterator.
    wait_node = next(iter(reversed(tracer.graph.nodes)))
    if last_wait is not None and last_wait.meta.get(_PART) == wait_node.meta.get(_PART):
        tracer.graph.erase_node(last_wait)
    elif last_wait is not None:
        # This is the first collective of the backward. Tag the wait at the end of the forward, so that the
        # partitioner does not copy that wait into the backward.
        last_wait.meta[_PART] = "must_be_in_forward"
    tracer._para_core_last_collective = outputs[-1], wait_node
    return outputs


# The key of a node's ``meta`` by which the partitioner of AOTAutograd keeps forward and backward apart.
_PART = "partitioner_tag"


def done(x: Tensor) -> Tensor:
    """Return a token that orders this collective before the next: an uninitialised ``[1]`` tensor on ``x.device``."""
    return x.new_empty(1, dtype=torch.float32)


def _all_to_all(
    x: Tensor, send_sizes: list[int], receive_sizes: list[int], group_name: str, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    received = x.new_empty(sum(receive_sizes), *x.shape[1:])
    buffers = received, x.contiguous()
    if x.dtype in NOT_SENT:
        buffers = view_to_send(received), view_to_send(buffers[1])
    group_named(group_name).alltoall_base(*buffers, receive_sizes, send_sizes, _ALL_TO_ALL).wait()
    return received, done(x)


def _all_to_all_shape(x: Tensor, _: list[int], receive_sizes: list[int], *__: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(sum(receive_sizes), *x.shape[1:]), done(x)


def _all_to_all_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.send_sizes, ctx.receive_sizes, ctx.group_name, *_ = inputs


def _all_to_all_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    back, _ = torch.ops.para_core.all_to_all(grad, ctx.receive_sizes, ctx.send_sizes, ctx.group_name)
    return back, None, None, None, None


def _all_gather(
    x: Tensor, sizes: list[int], group_name: str, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, group = x.new_empty(sum(sizes), *x.shape[1:]), group_named(group_name)
    gathered, sent = rows, x.contiguous()
    if x.dtype in NOT_SENT:
        gathered, sent = view_to_send(rows), view_to_send(sent)
    # A generator would add a Python call for each rank.
    if sizes.count(sizes[0]) == len(sizes):
        all_gather_into(gathered, sent, group=group)
        return rows, done(x)
    parts = list(gathered.split(sizes))
    if _is_nccl(group, x.device):
        # For outputs of unequal sizes, ProcessGroupNCCL::allgather coalesces broadcasts into one kernel,
        # instead of one kernel per rank. gloo refuses such outputs.
        dist.all_gather(parts, sent, group=group)
        return rows, done(x)
    works = []
    for rank, part in enumerate(parts):
        if rank == group.rank():
            part.copy_(sent)
        if part.numel():
            works.append(dist.broadcast(part, group_src=rank, group=group, async_op=True))
    for work in works:
        work.wait()
    return rows, done(x)


def _is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        return bool(backend_of(group, device).name() == "nccl")
    except RuntimeError:
        # A process group written in Python, such as that of para_core.comparison, has no backend.
        return False


def _all_gather_shape(x: Tensor, sizes: list[int], *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(sum(sizes), *x.shape[1:]), done(x)


def _all_gather_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.sizes, ctx.group_name, *_ = inputs
    ctx.size = x.shape[0]


def _all_gather_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    """Return the gradient of this rank's rows: the sum of the gradients of their copies, over all ranks."""
    ranks = len(ctx.sizes)
    grads, _ = torch.ops.para_core.all_to_all(grad, ctx.sizes, [ctx.size] * ranks, ctx.group_name)
    return grads.unflatten(0, (ranks, ctx.size)).sum(0), None, None, None


define_collective(
    "all_to_all(Tensor x, SymInt[] send_sizes, SymInt[] receive_sizes, str group_name, Tensor? after=None) -> "
    "(Tensor, Tensor)",
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
    """Exchange rows of ``x`` over ``dim`` by an all-to-all. Collective. It is differentiable, in eager code
    and in graphs.

    The first ``send_sizes[0]`` rows (along the first dim) are sent to rank 0 of ``dim``, and so on;
    ``receive_sizes[i]`` rows arrive from rank i, in the order of ranks. With one rank the result is ``x``
    itself.
    """
    if dim.size == 1:
        return x
    received, _ = torch.ops.para_core.all_to_all(x, list(send_sizes), list(receive_sizes), dim.group_name)
    return received  # type: ignore[no-any-return]


def all_gather(x: Tensor, sizes: Sequence[int], tensor_dim: int, dim: MeshDim) -> Tensor:
    """Return the concatenation of ``x``, of length ``sizes[i]`` on rank i, along ``tensor_dim``. Collective,
    and differentiable.
    """
    if dim.size == 1:
        return x
    gathered, _ = torch.ops.para_core.all_gather(x.movedim(tensor_dim, 0), list(sizes), dim.group_name)
    return gathered.movedim(0, tensor_dim)  # type: ignore[no-any-return]
