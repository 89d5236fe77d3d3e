"""Process groups of the simulated device: gloo moves the data, by the rules of NCCL.

A collective of tensors on cuda is logged for order.py, and its outputs are NaN until the stream has waited for it.
``torch.distributed`` and its functional operators both end here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.simulated_gpu import groups, streams
from tests.simulated_gpu.native import on_cpu
from tests.simulated_gpu.operators import tensors_of
from tests.simulated_gpu.record import HostWaits, Launch, Waited, line, record

FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
DTYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8),
}
# The functions of torch's class that the methods below replace.
_gloo: dict[str, Callable[..., Any]] = {}


class Work:
    """A collective in flight."""

    def __init__(self, work: Any, outputs: list[tuple[Tensor, Tensor]], inputs: list[Tensor], number: int) -> None:
        self._work, self._outputs, self._number = work, outputs, number
        self._inputs = [(x, x.clone()) for x in inputs]
        self._line, self._clock, self._ended = line(), dict(streams.current().known), False
        self._job = record.job

    def wait(self, timeout: Any = None) -> bool:
        if not self._ended:
            self._ended = True
            self._work.wait()
            record.add(Waited(self._number))
            streams.current().learn(self._clock)
            for x, before in self._inputs:
                if not streams.same_bytes(x, before):
                    record.fault("the input of a collective was changed while it was in flight", at=self._line)
            for x, value in self._outputs:
                on_cpu(x).copy_(value)
            with streams.accessing(reads=[], writes=[x for x, _ in self._outputs]):
                pass
        if timeout is not None:
            streams.host_waits("Work.wait with a timeout")
        return True

    def is_completed(self) -> bool:
        return self._ended or bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_work"], name)

    def __del__(self) -> None:
        # What a job that failed has left behind is freed at any later time.
        if not self._ended and self._job == record.job:
            record.fault("a collective was never waited for", at=self._line)


def _run(
    group: dist.ProcessGroup,
    kind: str,
    outputs: list[Tensor],
    inputs: list[Tensor],
    gloo: Callable[[list[Tensor], list[Tensor]], Any],
    **sizes: Any,
) -> Any:
    """Check and log a collective, and start it between copies of ``inputs`` and of ``outputs`` on the CPU."""
    if not any(x.is_cuda for x in (*outputs, *inputs)):
        if not groups.takes_host_tensors(group):
            record.fault(f"NCCL {kind}: a tensor on the CPU, and the group has NCCL alone")
        record.count("collectives of the host", kind)
        return gloo(outputs, inputs)
    if groups.is_fake(group):
        record.count("collectives", kind)
        return gloo([on_cpu(x) for x in outputs], [on_cpu(x) for x in inputs])
    if groups.is_nccl(group):
        _check(kind, outputs, inputs)
    else:
        streams.host_waits(f"gloo {kind} of tensors on cuda")
    number = _log(group, kind, (inputs or outputs)[0].dtype, **sizes)
    with streams.accessing(reads=inputs, writes=outputs):
        sources = [on_cpu(x).clone() for x in inputs]
        in_place = any(x is y for x in outputs for y in inputs)
        results = sources if in_place else [torch.empty_like(on_cpu(x)) for x in outputs]
    work = gloo(results, sources)
    for x in outputs:
        if x.is_floating_point() and x.element_size() > 1:
            on_cpu(x).fill_(float("nan"))
    kept = [] if in_place else [on_cpu(x) for x in inputs if not _is_part_of(x, outputs)]
    return Work(work, list(zip(outputs, results, strict=True)), kept, number)


def _check(kind: str, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Raise if NCCL refuses these tensors."""
    for x in (*outputs, *inputs):
        if not x.is_cuda:
            record.fault(f"NCCL {kind}: a tensor of {list(x.shape)} on {x.device} together with tensors on cuda")
        if x.dtype not in DTYPES:
            record.fault(f"NCCL {kind}: {x.dtype}")
        if x.dtype in FLOAT8:
            record.fault(f"NCCL {kind}: {x.dtype} needs compute capability 9.0 and NCCL 2.24")
        if not x.is_contiguous() and not (x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)):
            record.fault(f"NCCL {kind}: a tensor of {list(x.shape)} with strides {x.stride()}")
    if len({x.dtype for x in (*outputs, *inputs)}) > 1:
        record.fault(f"NCCL {kind}: dtypes {sorted({str(x.dtype) for x in (*outputs, *inputs)})}")
    for x in inputs:
        if kind in ("all_to_all", "reduce_scatter") and _is_part_of(x, outputs):
            record.fault(f"NCCL {kind}: an output overlaps an input")


def _is_part_of(x: Tensor, outputs: list[Tensor]) -> bool:
    """Return whether ``x`` shares memory with one of ``outputs``, as the input of an in-place all-gather may."""
    spans = [(y.data_ptr(), y.data_ptr() + y.nbytes) for y in outputs if y.numel()]
    return any(x.data_ptr() < end and start < x.data_ptr() + x.nbytes for start, end in spans if x.numel())


def _log(group: dist.ProcessGroup, kind: str, dtype: torch.dtype, **sizes: Any) -> int:
    ranks = tuple(dist.get_process_group_ranks(group))
    record.add(Launch(len(record.log), group.group_name, ranks, kind, str(dtype), **sizes, line=line()))
    record.count("collectives", kind)
    return len(record.log) - 1


# -- The methods of dist.ProcessGroup. Each gets what torch.distributed passes.


def all_to_all(group: Any, output: Tensor, input: Tensor, out_sizes: Any = (), in_sizes: Any = (), *rest: Any) -> Any:
    # Sizes count rows of the first dim; without sizes all parts are equal.
    count = group.size()
    rows = [list(sizes) or [x.shape[0] // count] * count for sizes, x in ((in_sizes, input), (out_sizes, output))]
    per_row = [x[0].numel() if x.shape[0] else x[:0].numel() for x in (input, output)]
    sent, received = (tuple(size * row for size in part) for part, row in zip(rows, per_row, strict=True))
    split = list(out_sizes), list(in_sizes)
    gloo = _gloo["alltoall_base"]
    run: Any = lambda outs, ins: gloo(group, outs[0], ins[0], *split, *rest)  # noqa: E731
    return _run(group, "all_to_all", [output], [input], run, sizes=sent, received=received)


def all_gather_single(group: Any, output: Tensor, input: Tensor, *rest: Any) -> Any:
    if output.is_cuda and output.numel() != input.numel() * group.size():
        record.fault(f"NCCL all_gather: {group.size()} × {input.numel()} elements into {output.numel()}")
    run: Any = lambda outs, ins: _gloo["_allgather_base"](group, outs[0], ins[0], *rest)  # noqa: E731
    return _run(group, "all_gather", [output], [input], run, sizes=(input.numel(),))


def reduce_scatter_single(group: Any, output: Tensor, input: Tensor, *rest: Any) -> Any:
    run: Any = lambda outs, ins: _gloo["_reduce_scatter_base"](group, outs[0], ins[0], *rest)  # noqa: E731
    return _run(group, "reduce_scatter", [output], [input], run, sizes=(output.numel(),))


def all_gather(group: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
    if isinstance(inputs, Tensor):
        outputs, inputs = [outputs], [inputs]
    flat = list(tensors_of(outputs))
    sizes = tuple(x.numel() for x in flat)
    run: Any = lambda outs, ins: _gloo["allgather"](group, [outs], ins, *rest)  # noqa: E731
    if flat[0].is_cuda and len(set(sizes)) > 1:
        run = lambda outs, ins: _uneven(group, outs, ins[0])  # noqa: E731
    return _run(group, "all_gather", flat, list(inputs), run, sizes=sizes)


def _uneven(group: Any, outputs: list[Tensor], own: Tensor) -> Any:
    """Gather parts of unequal sizes, which NCCL takes and gloo does not: one broadcast each."""
    outputs[group.rank()].copy_(own)
    work = None
    for rank, x in enumerate(outputs):
        options = c10d.BroadcastOptions()
        options.rootRank = rank
        work = _gloo["broadcast"](group, [x], options)
        work.wait()
    return work


def broadcast(group: Any, tensors: Any, *rest: Any) -> Any:
    xs = list(tensors_of(tensors))
    run: Any = lambda outs, _: _gloo["broadcast"](group, outs, *rest)  # noqa: E731
    return _run(group, "broadcast", xs, xs, run, sizes=(xs[0].numel(),))


def all_reduce(group: Any, tensors: Any, *rest: Any) -> Any:
    xs = list(tensors_of(tensors))
    run: Any = lambda outs, _: _gloo["allreduce"](group, outs, *rest)  # noqa: E731
    return _run(group, "all_reduce", xs, xs, run, sizes=(xs[0].numel(),))


def send(group: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
    run: Any = lambda _, ins: _gloo["send"](group, ins, peer, tag)  # noqa: E731
    return _run(group, "send", [], tensors, run, sizes=(tensors[0].numel(),), peer=peer)


def receive(group: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
    run: Any = lambda outs, _: _gloo["recv"](group, outs, peer, tag)  # noqa: E731
    return _run(group, "recv", tensors, [], run, sizes=(tensors[0].numel(),), peer=peer)


def barrier(group: Any, *args: Any, **kwargs: Any) -> Any:
    record.count("collectives of the host", "barrier")
    record.add(HostWaits())
    return _gloo["barrier"](group, *args, **kwargs)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(group: Any, *args: Any, **kwargs: Any) -> Any:
        if any(x.is_cuda for x in tensors_of((args, kwargs))):
            raise NotImplementedError(f"ProcessGroup.{name} is not simulated for tensors on cuda")
        return _gloo[name](group, *args, **kwargs)

    return refuse


METHODS = {
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), all_to_all),
    **dict.fromkeys(("_allgather_base", "all_gather_single"), all_gather_single),
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), reduce_scatter_single),
    "allgather": all_gather,
    "broadcast": broadcast,
    "allreduce": all_reduce,
    "send": send,
    "recv": receive,
    "barrier": barrier,
}
NOT_SIMULATED = (
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "allreduce_coalesced"),
    *("alltoall", "gather", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter"),
)


# -- torch's functional operators: the same collectives, kept by their output until wait_tensor.

_in_flight: dict[int, Any] = {}


def _group(name: Any) -> Any:
    return c10d._resolve_process_group(name)


def _started(output: Tensor, work: Any) -> Tensor:
    _in_flight[output.data_ptr(), output.numel()] = work
    return output


def _functional_all_to_all(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    return _started(out, all_to_all(_group(group), out, x, received, sent, c10d.AllToAllOptions()))


def _functional_all_gather(x: Tensor, size: int, group: Any) -> Tensor:
    return _functional_all_gather_out(x, size, group, out=x.new_empty(size * x.shape[0], *x.shape[1:]))


def _functional_all_gather_out(x: Tensor, size: int, group: Any, *, out: Tensor) -> Tensor:
    return _started(out, all_gather_single(_group(group), out, x, c10d.AllgatherOptions()))


def _reduction(name: str) -> Any:
    operations = dist.ReduceOp
    known = {"sum": operations.SUM, "avg": operations.AVG, "max": operations.MAX, "min": operations.MIN}
    return known[name.lower()]


def _functional_reduce_scatter(x: Tensor, operation: str, size: int, group: Any) -> Tensor:
    out, options = x.new_empty(x.shape[0] // size, *x.shape[1:]), c10d.ReduceScatterOptions()
    options.reduceOp = _reduction(operation)
    return _started(out, reduce_scatter_single(_group(group), out, x, options))


def _functional_all_reduce(x: Tensor, operation: str, group: Any) -> Tensor:
    return _functional_all_reduce_(x.clone(memory_format=torch.contiguous_format), operation, group)


def _functional_all_reduce_(x: Tensor, operation: str, group: Any) -> Tensor:
    options = c10d.AllreduceOptions()
    options.reduceOp = _reduction(operation)
    return _started(x, all_reduce(_group(group), [x], options))


def _functional_broadcast(x: Tensor, source: int, group: Any) -> Tensor:
    options, out = c10d.BroadcastOptions(), x.clone()
    options.rootRank = source
    return _started(out, broadcast(_group(group), [out], options))


def _wait_tensor(x: Tensor) -> Tensor:
    work = _in_flight.pop((x.data_ptr(), x.numel()), None)
    if work is not None:
        work.wait()
    return x


FUNCTIONAL = {
    "all_to_all_single": _functional_all_to_all,
    "all_gather_into_tensor": _functional_all_gather,
    "all_gather_into_tensor_out": _functional_all_gather_out,
    "reduce_scatter_tensor": _functional_reduce_scatter,
    "all_reduce": _functional_all_reduce,
    "all_reduce_": _functional_all_reduce_,
    "broadcast": _functional_broadcast,
    "wait_tensor": _wait_tensor,
}


def replace_methods() -> None:
    """Replace the methods of ``dist.ProcessGroup`` in this process."""
    names = (*METHODS, *NOT_SIMULATED)
    _gloo.update({name: getattr(dist.ProcessGroup, name) for name in names if hasattr(dist.ProcessGroup, name)})
    for name in _gloo:
        setattr(dist.ProcessGroup, name, METHODS.get(name) or _refused(name))
