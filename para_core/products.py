"""``products="triton"``: the matrix products of a model by one kernel, whose bits do not depend on the number
of rows.

Libraries choose the kernel of a matrix product by its sizes, so a rank, which has fewer rows than one
process, may get other bits. :mod:`para_core.kernels.product` has one tile shape and adds up in one order.

``adapters/products.py`` enters the mode around the calls of a transformer. Tests: tests/test_products.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core import triton_support
from para_core.attention.usp import autocasts
from para_core.torch_internals import FORWARD_AD_LEVEL, FakeTensor, forward_ad_globals

_PLAIN = (Tensor, nn.Parameter, FakeTensor)
# What a function multiplies: rows [..., K], a weight [N, K], and a bias [N] or None.
Operands = tuple[Tensor, Tensor, Tensor | None]


class TritonProducts(TorchFunctionMode):
    """Inside this context, products of rows with a matrix are computed by
    :func:`para_core.kernels.product.product`.

    These are ``F.linear``; ``torch.matmul`` (``@``) and ``torch.mm`` with a matrix on the right; and
    ``torch.addmm`` with a vector. They are in float32, bfloat16 or float16. Everything else is computed as
    ever: batched products, convolutions, einsum, other types, ``out=``. Inside a transform of ``torch.func``
    only reverse mode is possible.

    Raises:
        ImportError: Triton is not installed, or there is no C compiler for it.
        TypeError: In a product inside the context: an operand is quantized or sharded.
        RuntimeError: In a product inside the context: its device, or forward-mode AD, is not supported.
    """

    def __init__(self) -> None:
        super().__init__()
        kernel = triton_support.load_kernel("product")
        if kernel is None:
            raise ImportError(
                'products="triton" needs Triton and a C compiler, and one of them is not installed here: pip install '
                '"triton>=3.5", and gcc or clang. Or leave products out.'
            )
        self._product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = kernel.product

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = _READ.get(func)
        operands = None
        if read is not None:
            operands = read(*args, **kwargs)
        if operands is None:
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling():
            _check_can_run(operands[0])
        return self._product(*operands)


def _check_can_run(x: Tensor) -> None:
    """Raise ``RuntimeError`` if the kernel does not run on the device of ``x``, or not in forward-mode AD.
    The kernel itself refuses the CPU.
    """
    if x.is_cuda and triton_support.load_kernel("product", x.device) is None:
        raise RuntimeError(
            f'products="triton" needs compute capability 8.0 (Ampere) or later, and {x.device} has less. Leave '
            "products out."
        )
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise RuntimeError(
            f'products="triton" needs a CUDA device, and a product is on {x.device}. Leave products out.'
        )
    if forward_ad_globals[FORWARD_AD_LEVEL] >= 0:
        raise RuntimeError(
            'products="triton" in forward-mode AD (torch.func.jvp, torch.autograd.forward_ad): tangents would be lost. '
            "Use reverse mode (torch.func.vjp, .backward()), or leave products out."
        )


def _read_linear(input: Any, weight: Any, bias: Any = None) -> Operands | None:
    """Return the operands of a product for the kernel; None for another one, and for one that is not valid.

    Raises:
        TypeError: An operand is quantized or sharded.
    """
    tensors = [input, weight] if bias is None else [input, weight, bias]
    if not all(isinstance(x, Tensor) for x in tensors) or weight.ndim != 2 or input.ndim == 0:
        return None
    for x in tensors:
        if type(x) not in _PLAIN:
            raise TypeError(
                f'products="triton" multiplies plain tensors, and this product has a {type(x).__name__}: quantized and '
                "sharded weights have products of their own. Leave products out, or take plain weights."
            )
    fits = input.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    input, weight = _cast(input), _cast(weight)
    if bias is not None:
        bias = _cast(bias)
    are_equal = all(x is None or (x.dtype, x.device) == (input.dtype, input.device) for x in (weight, bias))
    if not fits or not are_equal or input.dtype not in triton_support.FLOATS:
        return None
    return input, weight, bias


# The functions below have the parameters of the function of torch that they read, and return as _read_linear
# does.


def _read_matmul(input: Any, other: Any, **others: Any) -> Operands | None:
    if others or not isinstance(other, Tensor) or other.ndim != 2:
        return None
    return _read_linear(input, other.mT)


def _read_rmatmul(input: Any, other: Any) -> Operands | None:
    return _read_matmul(other, input)


def _read_mm(input: Any, mat2: Any, *others: Any, **named: Any) -> Operands | None:
    if others or not isinstance(input, Tensor) or input.ndim != 2:
        return None
    return _read_matmul(input, mat2, **named)


def _read_addmm(
    input: Any, mat1: Any, mat2: Any, *deprecated: Any, beta: Any = 1, alpha: Any = 1, **others: Any
) -> Operands | None:
    # With more than three, the first is beta, and perhaps the third alpha.
    if deprecated or others or beta != 1 or alpha != 1:
        return None
    if not isinstance(mat2, Tensor) or mat2.ndim != 2 or mat1.ndim != 2:
        return None
    return _read_linear(mat1, mat2.mT, input)


def _cast(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype to which autocast would cast the operands of a product."""
    if x.is_floating_point() and x.dtype != torch.float64 and autocasts(x):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


_READ: Mapping[Any, Callable[..., Operands | None]] = {
    F.linear: _read_linear,
    torch.matmul: _read_matmul,
    Tensor.matmul: _read_matmul,
    Tensor.__matmul__: _read_matmul,
    Tensor.__rmatmul__: _read_rmatmul,
    torch.mm: _read_mm,
    Tensor.mm: _read_mm,
    torch.addmm: _read_addmm,
    Tensor.addmm: _read_addmm,
}
