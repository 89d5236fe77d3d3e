"""What travels rounded to 8 bits, ``torch.float8_e4m3fn`` with a scale per sample and head. Approximate; forward only.

A tensor ``[B, H, S, D]`` becomes bytes ``[B, H, S + r, D]``: each element divided by its head's scale and rounded, and the
scale itself in ``r`` more tokens, so that it takes the way that its head takes, in the same collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from para_core.attention.ulysses import Exchange, as_sdpa, join_kinds, num_replicated
from para_core.collectives import LIBRARY
from para_core.fused import FLOATS, kernels, on_device_of
from para_core.kernels import wire_reference

LIBRARY.define("write_8_bits(Tensor x, SymInt scale_rows) -> Tensor")
LIBRARY.define("read_8_bits(Tensor x, SymInt scale_rows, ScalarType dtype) -> Tensor")


def write_on_gpu(x: Tensor, scale_rows: int) -> Tensor:
    fused = kernels("wire")
    if fused is None or x.dtype not in FLOATS:
        return wire_reference.write(x, scale_rows)
    with on_device_of(x):
        written: Tensor = fused.write(x, scale_rows)
    return written


def read_on_gpu(x: Tensor, scale_rows: int, dtype: torch.dtype) -> Tensor:
    fused = kernels("wire")
    if fused is None or dtype not in FLOATS:
        return wire_reference.read(x, scale_rows, dtype)
    with on_device_of(x):
        found: Tensor = fused.read(x, scale_rows, dtype)
    return found


def _written_shape(x: Tensor, scale_rows: int) -> Tensor:
    return x.new_empty(*x.shape[:2], x.shape[2] + scale_rows, x.shape[3], dtype=torch.uint8)


def _read_shape(x: Tensor, scale_rows: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(*x.shape[:2], x.shape[2] - scale_rows, x.shape[3], dtype=dtype)


LIBRARY.impl("write_8_bits", wire_reference.write, "CompositeExplicitAutograd")
LIBRARY.impl("write_8_bits", write_on_gpu, "CUDA")
LIBRARY.impl("read_8_bits", wire_reference.read, "CompositeExplicitAutograd")
LIBRARY.impl("read_8_bits", read_on_gpu, "CUDA")
torch.library.register_fake("para_core::write_8_bits", _written_shape, lib=LIBRARY)
torch.library.register_fake("para_core::read_8_bits", _read_shape, lib=LIBRARY)


@dataclass(frozen=True)
class Wire:
    """``width``: the smallest head dim of what travels together."""

    width: int

    @property
    def scale_rows(self) -> int:
        """Tokens that hold the scale of a head."""
        return -(-wire_reference.SCALE_BYTES // max(1, self.width))

    def write(self, x: Tensor) -> Tensor:
        """``x`` ``[B, H, S, D]`` as it travels, ``[B, H, S + scale_rows, D]``."""
        written: Tensor = torch.ops.para_core.write_8_bits.default(x, self.scale_rows)
        return written

    def read(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """What was written, in ``dtype``."""
        found: Tensor = torch.ops.para_core.read_8_bits.default(x, self.scale_rows, dtype)
        return found

    def read_each(self, x: Tensor, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What several ranks wrote, of so many tokens each, one after the other."""
        parts = x.split([size + self.scale_rows for size in sizes], dim=2)
        return torch.cat([self.read(part, dtype) for part in parts], dim=2)


class RoundedExchange:
    """An :class:`Exchange` whose sharded tokens travel as a :class:`Wire` writes them; used in its place."""

    def __init__(self, exact: Exchange) -> None:
        self._exact = exact

    def start_enter(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Sequence[Tensor]]:
        exact, dtype = self._exact, query.dtype
        wire = Wire(min(query.shape[3], value.shape[3]))
        kinds = exact.by_kind(query, key, value)
        carrier = Exchange(exact.query_layout, exact.key_layout, exact.mesh, exact.heads, extra_tokens=wire.scale_rows)
        finish = carrier.start_enter_sharded(*[wire.write(sharded) for sharded, _ in kinds])
        sizes = [exact.token_sizes(layout) for layout in (exact.query_layout, exact.key_layout, exact.key_layout)]

        def read() -> list[Tensor]:
            blocks = [wire.read_each(block, numbers, dtype) for block, numbers in zip(finish(), sizes, strict=True)]
            return exact.with_replicated(blocks, [text for _, text in kinds])

        return read

    def start_leave(self, out: Tensor) -> Callable[[], Tensor]:
        exact, layout = self._exact, self._exact.query_layout
        wire = Wire(out.shape[3])
        rounded, num_text = wire.write(out), num_replicated(layout)
        # Behind its own tokens every peer gets the replicated ones, and what all of them are scaled by.
        common = num_text + wire.scale_rows
        leaving = exact.transfer([layout], [exact.heads.of_query], common, to_heads=False)
        finish = leaving.start((rounded, rounded.narrow(2, rounded.shape[2] - common, common)))

        def read() -> Tensor:
            sharded, common = finish()
            found = wire.read(torch.cat([sharded, common], dim=2), out.dtype)
            sharded, text = found.split([found.shape[2] - num_text, num_text], dim=2)
            return join_kinds((sharded, text), layout, exact.mesh.rank) if num_text else as_sdpa(sharded)

        return read
