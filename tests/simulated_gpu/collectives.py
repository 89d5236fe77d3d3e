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

from tests.simulated_gpu import streams
from tests.simulated_gpu.groups import Kind, kind_of
from tests.simulated_gpu.native import on_cpu
from tests.simulated_gpu.operators import tensors_of
from tests.simulated_gpu.record import HostWaits, Launch, Waited, line, record

DTYPES = {torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64}
DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
# The functions of torch's class that the methods below replace.
_gloo: dict[str, Callable[..., Any]] = {}


class Work:
    """A collective in flight."""

    def __init__(self, work: Any, outputs: list[tuple[Tensor, Tensor]], inputs: list[Tensor], number: int) -> None:
        self._work, self._outputs, self._number = work, outputs, number
        self._inputs = [(x, x.clone()) for x in inputs]
        self._line, self._started, self._ended = line(), streams.current().record_event(), False
        self._job = record.job

    def wait(self, timeout: Any = None) -> bool:
        if not self._ended:
            self._ended = True
            self._work.wait()
            record.add(Waited(self._number))
            streams.current().wait_event(self._started)
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
        if kind_of(group) == Kind.NCCL_ALONE:
            record.fault(f"NCCL {kind}: a tensor on the CPU, and the group has NCCL alone")
        record.count("collectives of the host", kind)
        return gloo(outputs, inputs)
    if kind_of(group) == Kind.FAKE:
        record.count("collectives", kind)
        return gloo([on_cpu(x) for x in outputs], [on_cpu(x) for x in inputs])
    if kind_of(group).is_nccl:
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
        if x.dtype not in DTYPES:  # float8 needs compute capability 9.0 and NCCL 2.24.
            record.fault(f"NCCL {kind}: {x.dtype}")
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
    more = list(out_sizes), list(in_sizes), *rest

    def gloo(outs: list[Tensor], ins: list[Tensor]) -> Any:
        return _gloo["alltoall_base"](group, outs[0], ins[0], *more)

    return _run(group, "all_to_all", [output], [input], gloo, sizes=sent, received=received)


def all_gather(group: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
    if isinstance(inputs, Tensor):
        outputs, inputs = [outputs], [inputs]
    flat = list(tensors_of(outputs))
    sizes = tuple(x.numel() for x in flat)

    def gloo(outs: list[Tensor], ins: list[Tensor]) -> Any:
        if flat[0].is_cuda and len(set(sizes)) > 1:
            return _uneven(group, outs, ins[0])
        return _gloo["allgather"](group, [outs], ins, *rest)

    return _run(group, "all_gather", flat, list(inputs), gloo, sizes=sizes)


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


def _of_one_tensor(kind: str, name: str) -> Callable[..., Any]:
    """Return the method of a collective from one tensor into one, of which one is the larger."""

    def run(group: Any, output: Tensor, input: Tensor, *rest: Any) -> Any:
        small, large = sorted([output.numel(), input.numel()])
        if output.is_cuda and large != small * group.size():
            record.fault(f"NCCL {kind}: {input.numel()} elements into {output.numel()} on {group.size()} ranks")
        return _run(
            group, kind, [output], [input], lambda outs, ins: _gloo[name](group, outs[0], ins[0], *rest), sizes=(small,)
        )

    return run


def _in_place(kind: str, name: str) -> Callable[..., Any]:
    def run(group: Any, tensors: Any, *rest: Any) -> Any:
        xs = list(tensors_of(tensors))
        return _run(group, kind, xs, xs, lambda outs, _: _gloo[name](group, outs, *rest), sizes=(xs[0].numel(),))

    return run


def _of_a_pair(kind: str) -> Callable[..., Any]:
    def run(group: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        outputs, inputs = ([], tensors) if kind == "send" else (tensors, [])

        def gloo(outs: list[Tensor], ins: list[Tensor]) -> Any:
            return _gloo[kind](group, [*outs, *ins], peer, tag)

        return _run(group, kind, outputs, inputs, gloo, sizes=(tensors[0].numel(),), peer=peer)

    return run


def barrier(group: Any, *args: Any, **kwargs: Any) -> Any:
    record.count("collectives of the host", "barrier")
    record.add(HostWaits())
    return _gloo["barrier"](group, *args, **kwargs)


METHODS = {
    **dict.fromkeys(("alltoall_base", "all_to_all_single"), all_to_all),
    **dict.fromkeys(("_allgather_base", "all_gather_single"), _of_one_tensor("all_gather", "_allgather_base")),
    **dict.fromkeys(
        ("_reduce_scatter_base", "reduce_scatter_single"), _of_one_tensor("reduce_scatter", "_reduce_scatter_base")
    ),
    "allgather": all_gather,
    "broadcast": _in_place("broadcast", "broadcast"),
    "allreduce": _in_place("all_reduce", "allreduce"),
    "send": _of_a_pair("send"),
    "recv": _of_a_pair("recv"),
    "barrier": barrier,
}
# -- torch's functional operators: the same collectives, kept by their output until wait_tensor.

_in_flight: dict[tuple[int, int], Any] = {}
_OPTIONS = {
    "alltoall_base": c10d.AllToAllOptions,
    "_allgather_base": c10d.AllgatherOptions,
    "_reduce_scatter_base": c10d.ReduceScatterOptions,
    "allreduce": c10d.AllreduceOptions,
    "broadcast": c10d.BroadcastOptions,
}


def _start(name: str, output: Tensor, *args: Any, group: Any, **options: Any) -> Tensor:
    """Start a collective that fills ``output``, by the method of this name, and return ``output``."""
    given = _OPTIONS[name]()
    for option, value in options.items():
        setattr(given, option, value)
    group = c10d._resolve_process_group(group)
    _in_flight[output.data_ptr(), output.numel()] = METHODS[name](group, output, *args, given)
    return output


def _reduction(name: str) -> Any:
    return getattr(dist.ReduceOp, name.upper())


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    return _start("alltoall_base", x.new_empty(sum(received), *x.shape[1:]), x, received, sent, group=group)


def _all_gather(x: Tensor, size: int, group: Any, *, out: Tensor | None = None) -> Tensor:
    out = x.new_empty(size * x.shape[0], *x.shape[1:]) if out is None else out
    return _start("_allgather_base", out, x, group=group)


def _reduce_scatter(x: Tensor, operation: str, size: int, group: Any) -> Tensor:
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    return _start("_reduce_scatter_base", out, x, group=group, reduceOp=_reduction(operation))


def _all_reduce_(x: Tensor, operation: str, group: Any) -> Tensor:
    return _start("allreduce", x, group=group, reduceOp=_reduction(operation))


def _wait_tensor(x: Tensor) -> Tensor:
    work = _in_flight.pop((x.data_ptr(), x.numel()), None)
    if work is not None:
        work.wait()
    return x


FUNCTIONAL = {
    "all_to_all_single": _all_to_all,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_reduce": lambda x, *args: _all_reduce_(x.clone(memory_format=torch.contiguous_format), *args),
    "all_reduce_": _all_reduce_,
    "broadcast": lambda x, source, group: _start("broadcast", x.clone(), group=group, rootRank=source),
    "wait_tensor": _wait_tensor,
}


def replace_methods() -> None:
    """Replace the methods of ``dist.ProcessGroup`` in this process. gloo refuses tensors of cuda in all others."""
    for name, method in METHODS.items():
        if hasattr(dist.ProcessGroup, name):
            _gloo[name] = getattr(dist.ProcessGroup, name)
            setattr(dist.ProcessGroup, name, method)
