"""How blocks of keys and values get from one ring rank to another: passed on, gathered, or asked for.

What it costs stands in ``ring.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from para_core.attention.approximate.wire import Wire
from para_core.attention.tiling import RingCall
from para_core.collectives import pack, start_all_to_all, start_ring_shift, wait


def travelling(x: Tensor, call: RingCall) -> list[Tensor]:
    """The parts of this rank's own block that no other block holds, in order; along dim 2."""
    layout, mesh = call.key_layout, call.mesh
    if mesh.ulysses.size > 1:
        return [x.narrow(2, 0, call.block_sizes()[mesh.ring.index])]
    parts = x.split([segment.size(mesh.rank, layout.ranks) for segment in layout.segments], dim=2)
    return [part for part, segment in zip(parts, layout.segments, strict=True) if not segment.replicated]


# These give the blocks that this rank sees, its own first, and the step of each: how many ranks before it its owner is. The
# next block is in flight while the caller computes. What arrives is added to ``received``.


def rotated_blocks(
    key: Tensor, value: Tensor, call: RingCall, received: list[Tensor] | None = None
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Each rank passes on what it got: neighbours talk to neighbours only."""
    dim = call.mesh.ring
    if dim.size == 1 or not call.key_layout.sharded:
        yield 0, (key, value)
        return
    sizes, wire = call.block_sizes(), Wire(call.comm_dtype, min(key.shape[3], value.shape[3]))
    buffer = _pack_block(key, value, call, wire)
    for step in range(dim.size):
        source = (dim.index - step) % dim.size
        if step + 1 < dim.size:
            arriving = start_ring_shift(buffer, _numel(key, value, sizes[source - 1], wire), dim)
        yield step, (key, value) if step == 0 else _unpack_block(buffer, key, value, sizes[source], wire)
        if step + 1 < dim.size:
            buffer = wait(arriving)
            if received is not None:
                received.append(buffer)


def _gathered_blocks(
    key: Tensor, value: Tensor, call: RingCall, received: list[Tensor] | None = None
) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """All of them in one collective."""
    dim = call.mesh.ring
    if dim.size == 1 or not call.key_layout.sharded:
        yield 0, (key, value)
        return
    wire = Wire(call.comm_dtype, min(key.shape[3], value.shape[3]))
    buffer = _pack_block(key, value, call, wire)
    others = [rank != dim.index for rank in range(dim.size)]
    sent = [buffer.numel() * other for other in others]
    arriving = [_numel(key, value, size, wire) * other for size, other in zip(call.block_sizes(), others, strict=True)]
    started = start_all_to_all(buffer.repeat(dim.size - 1), sent, arriving, dim)
    yield 0, (key, value)
    blocks = wait(started)
    if received is not None:
        received.append(blocks)
    buffers = blocks.split(arriving)
    for step in range(1, dim.size):
        source = (dim.index - step) % dim.size
        yield step, _unpack_block(buffers[source], key, value, call.block_sizes()[source], wire)


def asked_blocks(
    key: Tensor, value: Tensor, call: RingCall, received: list[Tensor] | None = None
) -> Iterator[tuple[int, tuple[Tensor, Tensor] | None]]:
    """Each rank sends its block straight to those that see any of it; None where another got one, and this rank none."""
    dim, sizes = call.mesh.ring, call.block_sizes()
    wire = Wire(call.comm_dtype, min(key.shape[3], value.shape[3]))
    steps = _steps_with_traffic(call)
    own = _pack_block(key, value, call, wire) if steps else key

    def start(step: int, after: Tensor) -> Tensor:
        # Where autograd follows each collective, they go back in the order in which they came, on every rank.
        sent = tied(own if call.sees((dim.index + step) % dim.size, dim.index) else own[:0], [after])
        arrives = _numel(key, value, sizes[(dim.index - step) % dim.size], wire) if _wanted(call, step) else 0
        return start_ring_shift(sent, arrives, dim, distance=step)

    arriving = start(steps[0], own) if steps else own
    yield 0, (key, value)
    for place, step in enumerate(steps):
        buffer = wait(arriving)
        if received is not None:
            received.append(buffer)
        if place + 1 < len(steps):
            arriving = start(steps[place + 1], buffer)
        size = sizes[(dim.index - step) % dim.size]
        yield step, _unpack_block(buffer, key, value, size, wire) if _wanted(call, step) else None


def blocks_in_turn(call: RingCall) -> Callable[..., Iterator[tuple[int, tuple[Tensor, Tensor] | None]]]:
    if call.blocks is not None:
        return asked_blocks
    return _gathered_blocks if call.rotate_method == "allgather" else rotated_blocks


def _wanted(call: RingCall, step: int) -> bool:
    """Whether this rank sees the block of the rank that is ``step`` before it."""
    dim = call.mesh.ring
    return call.sees(dim.index, (dim.index - step) % dim.size)


def _steps_with_traffic(call: RingCall) -> list[int]:
    """The distances at which some rank sees another's block: the same on every rank, so that all skip the others."""
    size = call.mesh.ring.size
    return [step for step in range(1, size) if any(call.sees(i, (i - step) % size) for i in range(size))]


def _pack_block(key: Tensor, value: Tensor, call: RingCall, wire: Wire) -> Tensor:
    """What travels of this rank's keys and values."""
    parts = [travelling(x, call) for x in (key, value)]
    if wire.dtype is not None:
        parts = [[wire.write(torch.cat(one, dim=2))] for one in parts]
    return pack(parts)


def _numel(key: Tensor, value: Tensor, num_tokens: int, wire: Wire) -> int:
    return sum([prod(shape) for shape in block_shapes(key, value, num_tokens + wire.scale_rows)])


def _unpack_block(buffer: Tensor, key: Tensor, value: Tensor, num_tokens: int, wire: Wire) -> tuple[Tensor, Tensor]:
    parts = unpack(buffer, block_shapes(key, value, num_tokens + wire.scale_rows))
    return wire.read(parts[0], key.dtype), wire.read(parts[1], value.dtype)


def block_shapes(key: Tensor, value: Tensor, num_tokens: int) -> list[tuple[int, ...]]:
    return [(x.shape[0], x.shape[1], num_tokens, x.shape[3]) for x in (key, value)]


def unpack(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    key, value = [part.view(shape) for part, shape in zip(buffer.split([prod(s) for s in shapes]), shapes, strict=True)]
    return key, value


def tied(x: Tensor, received: Sequence[Tensor]) -> Tensor:
    """``x`` and nothing of ``received``: but if autograd follows these, they have a gradient of 0, on every rank.

    A rank that needs nothing of what it got would otherwise not join in that collective's backward.
    """
    if not torch.is_grad_enabled():
        return x
    for one in received:
        if one.requires_grad:
            x = x + one[:0].sum().to(x.dtype)
    return x
