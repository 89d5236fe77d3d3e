"""Names of torch functions, and which of them compute elementwise.

A mode that follows something through a model, such as which rows a tensor has, knows functions by these
names: :mod:`para_core.spatial.rules` for rows of images, :mod:`para_core.attention.mask_rows` for rows of
masks. Tests: tests/spatial/test_functions.py and tests/attention/test_mask_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# A torch function, or a method of a tensor.
Function = Callable[..., Any]
# The name of a method that writes in place, such as __iadd__, begins so; these names begin so, too.
_NOT_IN_PLACE = ("__invert__", "__index__", "__int__", "__iter__")

# Masks whose rows are followed by these names are trusted afterwards, so a wrong name here lets wrong rows pass.
# Functions of one tensor whose result has an element for each of its elements. Of other tensors they read the
# dtype or the device. The names are those of name_of: F.logsigmoid is a C function that is called
# log_sigmoid.
OF_ONE = """
    to type_as float double half bfloat16 int long short char byte bool cfloat cdouble cpu cuda clone contiguous
    detach requires_grad data.__get__ conj resolve_conj resolve_neg real.__get__ imag.__get__ real imag angle
    alias positive zeros_like ones_like empty_like full_like fill zero type record_stream retain_grad neg negative
    abs absolute sqrt rsqrt square exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh
    sigmoid erf erfc floor ceil round trunc frac sign reciprocal logical_not bitwise_not invert isnan isinf isfinite
    nan_to_num relu relu6 leaky_relu silu gelu mish elu selu celu softplus hardswish hardsigmoid hardtanh log_sigmoid
    softsign softshrink hardshrink tanhshrink threshold deg2rad rad2deg sinc
"""
# Functions that broadcast all tensors among their arguments against each other.
OF_SEVERAL = """
    add radd sub rsub subtract mul rmul multiply div rdiv divide true_divide truediv rtruediv floor_divide floordiv
    rfloordiv remainder fmod mod rmod pow rpow float_power maximum minimum fmax fmin clamp clip clamp_min clamp_max
    where lerp addcmul addcdiv atan2 copysign hypot xlogy eq ne lt le gt ge greater less greater_equal less_equal
    not_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor and or xor copy masked_fill
    isclose complex polar
"""


def name_of(func: Function) -> str:
    """Return the name by which a torch function is known, for example ``add`` for ``Tensor.__iadd__``.

    ``add_`` and ``__iadd__`` have the name of ``add``. The conversion ``bool(x)`` reads a value, and has
    another name than ``x.bool()``: ``__bool__``. An overload keeps its own name behind a dot, such as
    ``add.Tensor``.
    """
    name: str = getattr(getattr(func, "func", func), "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"{getattr(getattr(func, '__self__', None), '__name__', '')}.{name}"
    if name in ("__bool__", "__int__", "__float__", "__complex__"):
        return name
    stripped = name.strip("_")
    if name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE:
        return stripped[1:]
    return stripped


def is_in_place(func: Function) -> bool:
    """Whether ``func`` writes to its first argument, by the convention of torch's names.

    False for assignments (``x[i] = y``, ``x.data = y``), which return nothing, and for calls with ``out=``:
    whoever must know these too asks for them, as :mod:`para_core.attention.mask_rows` does.
    """
    name = getattr(func, "__name__", "").partition(".")[0]
    if name.endswith("__"):
        return bool(name.startswith("__i")) and name not in _NOT_IN_PLACE
    return bool(name.endswith("_"))
