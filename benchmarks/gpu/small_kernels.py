"""The kernels around attention: the error of each, and its bandwidth relative to a copy of as many bytes on the same
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# These modules register operators.
import para_core.attention.merge
import para_core.cache.residual_operators
import para_core.spatial.norm  # noqa: F401
from benchmarks.gpu.job import OK, WRONG, SectionJob
from benchmarks.gpu.timing import milliseconds
from benchmarks.harness import relative_error
from para_core.attention.pack_ops import as_numbers
from para_core.kernels import merge_reference, norm_reference, pack_reference, product_reference, residual_reference
from para_core.kernels.pack_reference import LARGEST, SCALE_BYTES, CopyRegion
from para_core.layout.sequence import Segment
from para_core.triton_support import load_kernel

RANKS = 8
# These are tokens of one of 8 ranks, and heads: FLUX.1 at 1024 × 1024, the same with one head more, and HunyuanVideo at
# 1280 × 720 × 129.
REAL = ((576, 24, 128), (576, 25, 128), (14882, 24, 128))
TINY = ((9, 8, 16), (9, 9, 16))


@dataclass(frozen=True)
class TimedKernel:
    """One launch of a kernel, or two launches.

    Args:
        call: the call that is timed.
        num_bytes: bytes that it reads and writes.
        error: the error of a fresh call relative to float64, or for copies relative to indexing. It must be at most
            ``bound``.
    """

    kernel: str
    call: Callable[[], Any]
    num_bytes: int
    error: Callable[[], float]
    bound: float


def measured(job: SectionJob, case: TimedKernel) -> dict[str, Any]:
    error, repeats = case.error(), 3 if job.tiny else 30
    source = torch.empty(case.num_bytes // 2, dtype=torch.uint8, device=job.device)
    target = torch.empty_like(source)
    case.call(), target.copy_(source)
    taken = milliseconds(case.call, job.device, repeats=repeats)
    copied = milliseconds(lambda: target.copy_(source), job.device, repeats=repeats)["ms"]
    return {
        "verdict": OK if error <= case.bound else WRONG,
        "error": error,
        "bytes": case.num_bytes,
        **taken,
        # Tiny times on a loaded CPU are below 0.05.
        "GB/s": float(f"{case.num_bytes / max(taken['ms'], 1e-6) / 1e6:.4g}"),
        "ms of a copy": copied,
        "of a copy's bandwidth": round(copied / max(taken["ms"], 1e-6), 3),
    }


def cases(device: torch.device, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> Iterator[TimedKernel]:
    """Yield all kernels at one size, one after the other, so that only the tensors of one kernel are in memory.

    Args:
        dtype: bfloat16 or float16. Triton's interpreter truncates to bfloat16 where a GPU rounds.
    """
    # Triton subtracts and merges in float32. Plain PyTorch subtracts in the dtype of the residuals.
    exact, rounded = 1e-5, 2 * torch.finfo(dtype).eps
    operators = torch.ops.para_core
    yield _merge(device, (1, max(1, heads // RANKS), RANKS * tokens, head_dim), dtype, dtype, exact)
    yield _merge(device, (1, max(1, heads // RANKS), RANKS * tokens, head_dim), dtype, torch.float32, exact)
    for eight_bits in (None, *LARGEST):
        yield from _exchange(device, (1, tokens, heads, head_dim), dtype, eight_bits)

    now, before, older = (_normal((1, tokens * heads * head_dim), device, dtype, seed=seed) for seed in range(3))
    twice = 2 * now.numel() * now.element_size()
    yield TimedKernel(
        "change",
        lambda: operators.residual_change(now, before),
        twice,
        lambda: relative_error(
            operators.residual_change(now, before), residual_reference.change(now.double(), before.double())
        ),
        rounded if device.type == "cpu" else exact,
    )
    weights = [1.5, -0.5]
    yield TimedKernel(
        "forecast of 2",
        lambda: operators.forecast(now, [before, older], weights),
        2 * twice,
        lambda: relative_error(
            operators.forecast(now, [before, older], weights),
            residual_reference.forecast(now.double(), [before.double(), older.double()], weights),
        ),
        rounded,
    )
    yield from _group_norm(device, (1, 4 * heads, tokens, head_dim), dtype)
    if device.type == "cuda":
        yield _product(device, tokens, heads * head_dim, dtype)


def _product(device: torch.device, tokens: int, width: int, dtype: torch.dtype) -> TimedKernel:
    """Multiply by a square weight. The error is infinite if a row has other bits among fewer rows."""
    load_kernel("product", device)  # Registers the operator.
    x, weight, bias = (
        _normal(size, device, dtype, seed=seed) for seed, size in enumerate([(tokens, width), (width, width), (width,)])
    )

    def multiply(rows: Tensor) -> Tensor:
        return torch.ops.para_core.product(rows, weight, bias)  # type: ignore[no-any-return]

    def error() -> float:
        out = multiply(x)
        parts = [slice(0, 1), slice(0, 8)]
        if tokens > TINY[0][0]:
            # Not in Triton's interpreter, which adds up the rows of a tile in several orders.
            parts += [slice(1, 8), slice(tokens // 2, tokens)]
        if not all(torch.equal(multiply(x[part]), out[part]) for part in parts):
            return float("inf")
        return relative_error(out, product_reference.product(x.double(), weight.double(), bias.double()))

    num_bytes = (2 * x.numel() + weight.numel()) * x.element_size()
    return TimedKernel("product", lambda: multiply(x), num_bytes, error, 2 * torch.finfo(dtype).eps)


def _group_norm(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[TimedKernel]:
    """Yield the statistics of one rank's rows, and the norm of one rank of two by the statistics of both."""
    groups, bound = shape[1] // 4, 2 * torch.finfo(dtype).eps
    x, weight, bias = (
        _normal(size, device, dtype, seed=seed) for seed, size in enumerate((shape, shape[1:2], shape[1:2]))
    )
    shares = torch.full((2,), 0.5, device=device)
    exactly = norm_reference.moments(x.double(), groups)
    of_ranks = torch.stack([exactly, exactly]).float()

    def moments() -> Any:
        return torch.ops.para_core.group_moments(x, groups)

    def normalized() -> Any:
        return torch.ops.para_core.group_normalized(x, of_ranks, shares, groups, weight, bias, 1e-6)

    def error_of_norm() -> float:
        exact = norm_reference.normalize(
            *[tensor.double() for tensor in (x, of_ranks, shares)], groups, weight.double(), bias.double(), 1e-6
        )
        return relative_error(normalized(), exact)

    yield TimedKernel("group moments", moments, x.nbytes, lambda: relative_error(moments(), exactly), 1e-3)
    yield TimedKernel("group norm", normalized, 2 * x.nbytes, error_of_norm, bound)


def _merge(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, running: torch.dtype, bound: float
) -> TimedKernel:
    """Merge two 16-bit results into a new tensor, or one into the merged result."""
    out_a, out_b = _normal(shape, device, dtype).to(running), _normal(shape, device, dtype, seed=1)
    lse_a, lse_b = (_normal(shape[:3], device, dtype, seed=seed).float() for seed in (2, 3))
    in_place = running == torch.float32

    def merged(out: Tensor, lse: Tensor) -> Tensor:
        if not in_place:
            return torch.ops.para_core.merge(out, lse, out_b, lse_b)[0]
        torch.ops.para_core.merge_(out, lse, out_b, lse_b)
        return out

    def error() -> float:
        exactly, _ = merge_reference.merge(*[x.double() for x in (out_a, lse_a, out_b, lse_b)])
        return relative_error(merged(out_a.clone(), lse_a.clone()), exactly)

    row = shape[3] * (out_a.element_size() + out_b.element_size() + 4) + 12
    name = "merge in place" if in_place else "merge"
    return TimedKernel(name, lambda: merged(out_a, lse_a), out_b[..., 0].numel() * row, error, bound)


def _exchange(
    device: torch.device, shape: tuple[int, int, int, int], dtype: torch.dtype, eight_bits: torch.dtype | None
) -> Iterator[TimedKernel]:
    """Yield packing of query, key and value for 8 ranks, and unpacking of the output.

    With ``eight_bits`` they are compared with the rounding of plain PyTorch on the same device.
    """
    tensors = [_normal(shape, device, dtype, seed=seed).transpose(1, 2) for seed in range(3)]
    _, tokens, heads, head_dim = shape
    operators = torch.ops.para_core
    rows, scale = heads * tokens, 0 if eight_bits is None else SCALE_BYTES
    size, sent_dtype = rows * (head_dim + scale), eight_bits and torch.uint8
    sent, arriving = _regions(tensors, scale), _regions(tensors[:1], scale)
    packing, unpacking = as_numbers(sent), as_numbers(arriving)

    def pack() -> Any:
        return operators.pack(tensors, packing, 3 * size, eight_bits)

    def unpack() -> Any:
        return operators.unpack(buffer, unpacking, list(tensors[0].shape), eight_bits, dtype)[0]

    buffer = pack_reference.pack(tensors[:1], arriving, tensors[0].new_empty(size, dtype=sent_dtype), eight_bits)
    expected = pack_reference.pack(tensors, sent, tensors[0].new_empty(3 * size, dtype=sent_dtype), eight_bits)
    read = tensors[0]
    if eight_bits is not None:
        read = pack_reference.unpack(buffer, arriving, [torch.empty_like(read)], eight_bits)[0]
    each, name = 2 * rows * head_dim + size * buffer.element_size(), str(eight_bits).removeprefix("torch.")
    names = ("", "") if eight_bits is None else (f" as {name}", f" of {name}")
    yield TimedKernel(f"pack query, key, value{names[0]}", pack, 3 * each, lambda: _differs(pack(), expected), 0.0)
    yield TimedKernel(f"unpack out{names[1]}", unpack, each, lambda: _differs(unpack(), read), 0.0)


def _regions(tensors: Sequence[Tensor], more: int) -> list[CopyRegion]:
    """Return the regions of all ranks: columns of one table, with ``more`` elements after each head."""
    regions, offset = [], 0
    (_, heads, tokens, width), number = tensors[0].shape, len(tensors)
    for rank in range(RANKS):
        head, count = Segment("heads", heads).runs(rank, RANKS)[0]
        row = count * (width + more)
        regions += [
            CopyRegion(index, 0, tokens, head, count, offset + index * row, number * row) for index in range(number)
        ]
        offset += tokens * number * row
    return regions


def _normal(shape: Sequence[int], device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.float32).to(dtype)


def _differs(out: Tensor, expected: Tensor) -> float:
    return 0.0 if torch.equal(out, expected) else float("inf")
