"""Operators of the simulated device: computed on the CPU, with a GPU's refusals, waits and late results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.simulated_gpu import streams
from tests.simulated_gpu.native import on_cpu, on_device
from tests.simulated_gpu.record import record

aten = torch.ops.aten

ALLOCATIONS = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
# The host needs the result, or the size of the result.
WAITING = {
    *(aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.bincount),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.unique_dim_consecutive),
}
# These take indices in host memory too, and copy them.
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# cuBLAS and cuDNN have no kernels for integers, where the CPU has some.
PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addmv, aten.mv, aten.dot, aten.addbmm}
PRODUCTS |= {aten.convolution, aten.convolution_backward}


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that reached the device, the fallback of every operator without a rule of its own."""
    args = _with_numbers_as_tensors(op, args)
    packet = op.overloadpacket
    tensors = list(tensors_of((args, kwargs)))
    device = _device_of(tensors, kwargs)
    if packet not in INDEXING:
        refuse_host_tensors(op, tensors)
    _count_waits(op, packet, args, kwargs)
    if packet in PRODUCTS and not all(x.is_floating_point() or x.is_complex() for x in tensors):
        record.fault(f"{op}: CUDA has no kernel for {', '.join(str(x.dtype) for x in tensors)}")
    with reads_and_writes(op, args, kwargs) as made:
        out = compute(op, device.index, args, kwargs)
        made.append(out)
    if not op.is_view and packet not in ALLOCATIONS and packet is not aten._local_scalar_dense:
        record.count("launches", packet.__name__)
    return out


def compute(op: Callable[..., Any], index: int, args: Any, kwargs: Any) -> Any:
    """Return ``op(*args, **kwargs)``, computed on the CPU by tensors over the same memory."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def to_host(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_cuda:
            pairs.append((on_cpu(x), x))
            return pairs[-1][0]
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if isinstance(x, torch.Generator) and x.device.type == "cuda":
            host = torch.Generator()
            generators.append((host, x))
            return host.set_state(x.get_state())
        return x

    def to_device(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        for host, own in pairs:
            if host is x:
                return own
        return on_device(x, index)

    generators: list[tuple[torch.Generator, torch.Generator]] = []
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    out = op(*mapped(args, to_host), **mapped(kwargs, to_host))
    for host, own in pairs:
        if host.shape != own.shape or host.stride() != own.stride():
            own.set_(on_device(host, own.device.index))  # An ``out=`` of another size was resized.
    for host_generator, own_generator in generators:
        own_generator.set_state(host_generator.get_state())
    return mapped(out, to_device)


@contextmanager
def reads_and_writes(op: Any, args: Any, kwargs: Any) -> Iterator[list[Any]]:
    """Check the accesses of an operator by its schema. Append its output to the yielded list."""
    made: list[Any] = []
    if op.is_view:
        yield made
        return
    reads, writes = [], []
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    for argument in op._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for x in tensors_of(given.get(argument.name)):
            if x.is_cuda:
                (writes if is_written else reads).append(x)
    with streams.accessing(reads, writes):
        yield made
    for x in tensors_of(made):
        if op.overloadpacket in ALLOCATIONS:
            streams.allocated(x)
        elif x.is_cuda:
            streams.made_by_current(x)


def copy_(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within the device, to it or from it."""
    if into.is_cuda and source.is_cuda:
        with streams.accessing(reads=[source], writes=[into]):
            on_cpu(into).copy_(on_cpu(source))
        record.count("launches", "copy_")
    elif into.is_cuda:
        record.count("copies to the device", "non-blocking" if non_blocking else "blocking")
        with streams.accessing(reads=[], writes=[into]):
            on_cpu(into).copy_(source)
        if not non_blocking:
            streams.host_waits("a blocking copy to the device")
        elif source.is_pinned():
            streams.read_later(source)
    else:
        record.count("copies to the host", "non-blocking" if non_blocking and into.is_pinned() else "blocking")
        with streams.accessing(reads=[source], writes=[]):
            value = on_cpu(source)
        if non_blocking and into.is_pinned():
            streams.write_later(into, value)
        else:
            into.copy_(value)
            streams.host_waits("a blocking copy to the host")
    return into


def tensors_of(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from tensors_of(item)
    elif isinstance(x, dict):
        yield from tensors_of(list(x.values()))


def mapped(x: Any, function: Callable[[Any], Any]) -> Any:
    """Return ``x`` with ``function`` applied to what its lists, tuples and dicts hold."""
    if isinstance(x, (tuple, list)):
        return type(x)([mapped(item, function) for item in x])
    if isinstance(x, dict):
        return {name: mapped(item, function) for name, item in x.items()}
    return function(x)


def refuse_host_tensors(op: Any, tensors: list[Tensor]) -> None:
    """Raise if a tensor with dims is in host memory, or two tensors are on different GPUs."""
    for x in tensors:
        if not x.is_cuda and x.ndim > 0:
            record.fault(f"{op}: a tensor of {list(x.shape)} on {x.device} together with tensors on cuda")
    if len({x.device for x in tensors if x.is_cuda}) > 1:
        record.fault(f"{op}: tensors on {sorted({str(x.device) for x in tensors})}")


def _with_numbers_as_tensors(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with the numbers that a schema declares as tensors, which arrive as numbers of Python."""
    if not any(type(x) in (int, float, bool, complex) for x in args):
        return args
    takes_tensor = [isinstance(argument.type, torch.TensorType) for argument in op._schema.arguments]
    return tuple(
        torch.tensor(x) if is_tensor and isinstance(x, (int, float, complex)) else x
        for x, is_tensor in zip(args, takes_tensor, strict=False)
    )


def _device_of(tensors: list[Tensor], kwargs: dict[str, Any]) -> torch.device:
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type == "cuda":
        asked = torch.device(asked)
    else:
        asked = next((x.device for x in tensors if x.is_cuda), None)
    if asked is None or asked.index is None:
        asked = torch.device("cuda", torch.cuda.current_device())
    if streams.device.index is not None and asked.index != streams.device.index:
        record.fault(f"a tensor on {asked}, but the GPU of this rank is cuda:{streams.device.index}")
    return asked


def _count_waits(op: Any, packet: Any, args: Any, kwargs: Any) -> None:
    counts_repeats = packet is aten.repeat_interleave and kwargs.get("output_size") is None
    if packet in WAITING or counts_repeats:
        streams.host_waits(packet.__name__)
    elif packet in INDEXING and packet not in (aten.index, aten._unsafe_index):
        masks = [x for x in args[1] if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
        if masks:
            streams.host_waits(f"{packet.__name__} with a bool mask")
