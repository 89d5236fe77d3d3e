"""Products of rows with a matrix in Triton, with one tile shape; the reference is
:mod:`para_core.kernels.product_reference`.

Each program computes one tile of the output, and adds up all inputs of a row in blocks of BLOCK, from the
first to the last. No sum is split, the tile shape depends on the dtype only, and one compiled kernel serves
every number of rows. So the bits of an element depend on its row and its column of the weight alone: not on
the number of rows, nor on the position among them. cuBLAS promises neither.

The bias is added in float32, before the only rounding.

:mod:`para_core.products`, the option ``products="triton"``, calls it. Tests: tests/kernels/test_product.py,
tests/test_products.py, and tests/kernels/test_compiled.py for registers and shared memory.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

PRODUCT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LIBRARY = torch.library.Library("para_core", "FRAGMENT")
# Programs of so many neighbouring tiles of rows run one after the other, so that they find their columns of
# the weight in the L2 cache.
GROUP = 8
# Triton loads 16 bytes at once only from addresses that are multiples of 16.
_ALIGNMENT = 16


class ProductTile(NamedTuple):
    """The tile of the output that one program computes, and its launch options.

    Args:
        rows: Number of rows.
        columns: Number of columns, which are rows of the weight.
        block: Number of inputs that are added up at once.
        warps: Number of warps.
        stages: Number of blocks in shared memory: one in use, the others being loaded.
        dot: Whether blocks are multiplied by the GPU's matrix instructions, which compute all rows of a tile
            in one order.
    """

    rows: int
    columns: int
    block: int
    warps: int = 4
    stages: int = 1
    dot: bool = True


# The largest tile whose sums stay in registers on every GPU, and whose blocks fit in 99 KiB of shared memory.
TILE = ProductTile(128, 128, 64, 8, 3)
# Tensor cores do not compute exact float32, so its products take many registers.
TILE_FLOAT32 = ProductTile(64, 64, 16, 8, 3)
# For Triton's interpreter, whose tl.dot is a product of NumPy: that adds up the rows of a tile in several
# orders, and takes bfloat16 for integers.
TILE_INTERPRETED = ProductTile(32, 64, 32, dot=False)


# With a number of rows that is 1 or a multiple of 16, Triton would compile another kernel.
@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    x, weight, bias, out, num_rows, num_columns, num_inputs, step_column, step_input,
    HAS_BIAS: tl.constexpr, DOT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``x @ weight.T + bias``.

    ``step_column`` and ``step_input`` are the strides of rows and columns of weight; x and out are
    contiguous, and ``num_inputs`` is a multiple of BLOCK.
    """
    tiles_down, tiles_across = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    # Programs go down GROUP tiles of rows, then to the next tile of columns.
    group, in_group = tl.program_id(0) // (GROUP * tiles_across), tl.program_id(0) % (GROUP * tiles_across)
    height = tl.minimum(tiles_down - group * GROUP, GROUP)
    row = (group * GROUP + in_group % height) * ROWS + tl.arange(0, ROWS)
    column = (in_group // height) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.arange(0, BLOCK)
    x += row.to(tl.int64)[:, None] * num_inputs + block[None, :]
    weight += column.to(tl.int64)[None, :] * step_column + block.to(tl.int64)[:, None] * step_input
    row_inside, column_inside = (row < num_rows)[:, None], (column < num_columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, num_inputs, BLOCK):
        a = tl.load(x, mask=row_inside, other=0.0)
        b = tl.load(weight, mask=column_inside, other=0.0)
        if DOT:
            total = tl.dot(a, b, total, input_precision="ieee")
        else:
            total += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
        x += BLOCK
        weight += BLOCK * step_input
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    out += row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=row_inside & column_inside)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute :func:`para_core.kernels.product_reference.product` in one launch, for floats of 16 and 32
    bits.

    ``x`` is copied only if it is not contiguous, or does not begin at a multiple of 16 bytes. Both are copied
    if K is no multiple of the tile's block, 64 in 16 bits and 16 in float32. The backward uses products of
    PyTorch, whose bits may depend on the number of rows. Forward-mode AD would lose tangents. The caller
    passes tensors of one device, which is not checked.

    Raises:
        TypeError: If the dtypes differ or are not supported.
        ValueError: If the shapes do not fit.
    """
    check(x, weight, bias)
    out: Tensor = torch.ops.para_core.product.default(x, weight, bias)
    return out


def check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ``TypeError`` or ``ValueError`` if the kernel does not support the dtypes or shapes of these
    tensors. Devices are not compared.
    """
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if x.dtype not in PRODUCT_DTYPES or any(y.dtype != x.dtype for y in tensors):
        names = ", ".join(str(y.dtype).removeprefix("torch.") for y in tensors)
        raise TypeError(
            f"the product is of {names}; expected float16, bfloat16 or float32, the same for x, weight and bias. "
            "torch.nn.functional.linear takes other types."
        )
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x is {list(x.shape)} and weight {list(weight.shape)}; expected [..., K] and [N, K] with one K."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias is {list(bias.shape)} and weight {list(weight.shape)}; expected [{weight.shape[0]}]."
        )


def launch_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Launch the kernel, and return its output. Does not check the tensors."""
    out = _empty_output(x, weight)
    if out.numel() == 0:
        return out
    tile = tile_for(x)
    rows, weight = _in_blocks(x, weight, tile.block)
    # Every pointer argument must be a tensor, so pass the weight in place of a missing bias.
    bias_or_weight = weight
    if bias is not None:
        bias_or_weight = bias.contiguous()
    num_columns, num_inputs = weight.shape
    grid = (triton.cdiv(rows.shape[0], tile.rows) * triton.cdiv(num_columns, tile.columns),)
    with torch.cuda.device_of(x):
        product_kernel[grid](
            rows, weight, bias_or_weight, out, rows.shape[0], num_columns, num_inputs, *weight.stride(),
            HAS_BIAS=bias is not None, DOT=tile.dot, ROWS=tile.rows, COLUMNS=tile.columns, BLOCK=tile.block,
            GROUP=GROUP, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def _is_interpreting() -> bool:
    # para_core.triton_support has this, too: kernels import torch and Triton only.
    return bool(triton.knobs.runtime.interpret)


def _launch_in_interpreter(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Launch the kernel on CPU tensors, also of a graph. Raise ``RuntimeError`` without Triton's interpreter."""
    if not _is_interpreting():
        raise RuntimeError(
            'products="triton" needs a CUDA device, and a product is on the CPU. Leave products out; Triton\'s own '
            "interpreter runs it there (TRITON_INTERPRET=1)."
        )
    return launch_product(x, weight, bias)


def tile_for(x: Tensor) -> ProductTile:
    """Return the tile of the dtype of ``x``; on a CPU that of Triton's interpreter."""
    if x.is_cpu:
        return TILE_INTERPRETED
    return TILE_FLOAT32 if x.dtype == torch.float32 else TILE


def _in_blocks(x: Tensor, weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return ``x`` as a contiguous ``[rows, K]``, and ``weight``, ``[N, K]``, with K a multiple of ``block``.

    The address of ``x`` is a multiple of 16. Triton compiles another kernel for others, and a rank's part may
    have one that the whole tensor has not. It is copied, so that both run the same code. The weight and the
    bias keep their addresses: torch allocates on a GPU at multiples of 16, and a view of a weight has the
    same offset on each rank, so all ranks run the same code for it.
    """
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    missing = -x.shape[-1] % block
    if missing:
        # Zeros add nothing. Without them the kernel would load element by element, and spill registers.
        return F.pad(rows, (0, missing)), F.pad(weight, (0, missing))
    if not rows.is_contiguous() or rows.data_ptr() % _ALIGNMENT:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows, weight


def _empty_output(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    grad_x, grad_weight, grad_bias = None, None, None
    num_rows = prod(grad.shape[:-1])
    rows = grad.reshape(num_rows, grad.shape[-1])
    if needs[0]:
        grad_x = grad @ weight
    if needs[1]:
        grad_weight = rows.mT @ x.reshape(num_rows, x.shape[-1])
    if needs[2]:
        grad_bias = rows.sum(0)
    return grad_x, grad_weight, grad_bias


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


# The tag makes the operator end a CUDA graph of torch.compile, like all operators of para_core (see
# para_core.distributed.collectives.define_operator).
LIBRARY.define("product(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
LIBRARY.impl("product", launch_product, "CUDA")
LIBRARY.impl("product", _launch_in_interpreter, "CPU")
torch.library.register_fake("para_core::product", _empty_output, lib=LIBRARY)
torch.library.register_autograd("para_core::product", _gradients, setup_context=_save, lib=LIBRARY)
