"""Functions of which a row of the result needs that row alone, and reductions: the allowlist."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.spatial.errors import name_of, unknown
from para_core.spatial.fetch import all_ranks, gather, part_of, relayout
from para_core.spatial.tag import Rows, ShardedSize, counted, local_sizes, rows_of, tagged, untagged

Function = Callable[..., Any]


def _names(text: str) -> list[str]:
    return text.split()


# What a tensor is, not what it holds. Bytes and strides are those of this rank's part.
METADATA = _names(
    """
    shape.__get__ dtype.__get__ device.__get__ ndim.__get__ layout.__get__ is_cuda.__get__ is_cpu.__get__
    is_meta.__get__ is_mps.__get__ is_xpu.__get__ is_xla.__get__ is_quantized.__get__ is_sparse.__get__
    is_nested.__get__ is_leaf.__get__ is_mkldnn.__get__ requires_grad.__get__ grad_fn.__get__ grad.__get__
    itemsize.__get__ nbytes.__get__ output_nr.__get__ dim ndimension stride storage_offset
    is_contiguous is_floating_point is_complex element_size get_device data_ptr untyped_storage hash is_signed
    is_inference is_nonzero_ result_type can_cast promote_types
    """
)

# The rows of the first argument, whatever the others are.
LIKE_FIRST = _names(
    """
    to type_as float double half bfloat16 int long bool cpu cuda clone contiguous detach requires_grad data.__get__
    alias positive zeros_like ones_like empty_like full_like fill zero type record_stream retain_grad neg negative
    abs absolute sqrt rsqrt square exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh
    sigmoid erf erfc floor ceil round trunc frac sign reciprocal logical_not bitwise_not invert isnan isinf isfinite
    nan_to_num relu relu6 leaky_relu silu gelu mish elu selu celu softplus hardswish hardsigmoid hardtanh logsigmoid
    softsign softshrink hardshrink tanhshrink threshold deg2rad rad2deg sinc
    """
)

# Broadcast over all tensors among their arguments.
ELEMENTWISE = _names(
    """
    add radd sub rsub subtract mul rmul multiply div rdiv divide true_divide truediv rtruediv floor_divide floordiv
    rfloordiv remainder fmod mod rmod pow rpow float_power maximum minimum fmax fmin clamp clip clamp_min clamp_max
    where lerp addcmul addcdiv atan2 copysign hypot xlogy eq ne lt le gt ge greater less greater_equal less_equal
    not_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor and or xor copy masked_fill
    isclose
    """
)

# Along one dim, of which they keep the place: where it stands among the arguments, and what it is if left out.
ALONG = {
    "softmax": (1, -1),
    "log_softmax": (1, -1),
    "cumsum": (1, None),
    "flip": (1, None),
    "glu": (1, -1),
    "normalize": (2, 1),
    "adaptive_avg_pool1d": (2, -1),
    "layer_norm": (None, None),
    "rms_norm": (None, None),
}

# Over dims: where they and keepdim stand.
REDUCTIONS = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "argmax", "argmin", "any", "all", "prod", "logsumexp"), (1, 2)),
    **dict.fromkeys(("max", "min"), (1, 2)),
    **dict.fromkeys(("norm", "vector_norm", "linalg_vector_norm"), (2, 3)),
    **dict.fromkeys(("var", "std"), (1, 3)),
}


def metadata(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def shape(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``x.shape``, ``x.size()``, ``x.numel()``, ``len(x)``: as of all rows, in which the number of rows knows those of each rank."""
    found = func(*args, **kwargs)
    rows = rows_of(args[0])
    if rows is None:
        return found
    count = ShardedSize(tuple([rows.outer * count for count in rows.layout]), ranks.index)
    name = name_of(func)
    if name in ("numel", "nelement"):
        rest = [size for dim, size in enumerate(args[0].shape) if dim != rows.dim]
        return count * math.prod(rest)
    if name == "len":
        return int(count) if rows.dim == 0 else found
    if isinstance(found, int):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return count if dim % args[0].ndim == rows.dim else found
    return torch.Size([count if dim == rows.dim else size for dim, size in enumerate(found)])


def like_first(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The rows of the first argument; none of another one's, whose dtype or device it may be that is asked for."""
    if "out" in kwargs:
        raise unknown(func, _any_rows(args, kwargs), "it writes to out=")
    out = func(*args, **kwargs)
    x = args[0] if args else kwargs.get("input")
    rows = rows_of(x)
    if rows is not None and isinstance(out, Tensor) and isinstance(x, Tensor) and out.shape == x.shape:
        return tagged(out, rows)
    return out


def elementwise(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Tensors of another layout are laid out as the first one; of a replicated one, this rank's rows are taken."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    lead = next((x for x in tensors if rows_of(x) is not None), None)
    rows = rows_of(lead)
    if lead is None or rows is None or "out" in kwargs:
        raise unknown(func, _any_rows(args, kwargs), "its tensors are in a list, or it writes to out=")
    if lead is not tensors[0] and _in_place(func):
        raise unknown(func, rows, "it is written into a replicated tensor")
    place = rows.dim - lead.ndim

    def fit(x: Any) -> Any:
        return aligned(ranks, func, x, rows, place) if isinstance(x, Tensor) else x

    out = func(*[fit(x) for x in args], **{name: fit(x) for name, x in kwargs.items()})
    if isinstance(out, tuple):  # torch.where(x)
        raise unknown(func, rows, "it gives places of this rank's rows")
    # NotImplemented, where a tensor is compared with what is none: Wan asks a cache whether it is a word.
    return tagged(out, rows.at(out.ndim + place)) if isinstance(out, Tensor) else out


def _in_place(func: Function) -> bool:
    name = getattr(func, "__name__", "")
    return name.startswith("__i") if name.endswith("__") else name.endswith("_")


def aligned(ranks: MeshDim, func: Function, x: Tensor, rows: Rows, place: int) -> Tensor:
    """``x`` with the rows that this rank holds by ``rows`` along its dim ``place`` (counted from the end).

    Raises:
        MixesRows: ``x`` has another number of rows.
    """
    own = rows_of(x)
    if own is not None and own.dim - x.ndim != place:
        # Of tokens by tokens, say: of the one all, of the other this rank's.
        x, own = untagged(gather(x, own, ranks)), None
    if own is not None:
        if own.outer != rows.outer or sum(own.layout) != sum(rows.layout):
            raise unknown(func, rows, f"with one sharded as {own}")
        if own.layout == rows.layout:
            return x
        return tagged(relayout(x, own, rows.layout, ranks), Rows(own.dim, rows.layout, own.outer))
    if x.ndim < -place or x.shape[place] == 1:
        return x
    if x.shape[place] != rows.total:
        raise unknown(
            func,
            rows,
            f"with a replicated one of shape {list(x.shape)}, which has not {rows.total}",
        )
    return part_of(x, rows.at(x.ndim + place), ranks)


def along(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Softmax, layer norm and others that stay within a row, unless it is rows that they go along."""
    x, rows = _only_first(func, args, kwargs)
    name = name_of(func)
    place, default = ALONG[name]
    if place is None:
        shape = kwargs["normalized_shape"] if "normalized_shape" in kwargs else args[1]
        dims = set(range(x.ndim - len(shape), x.ndim))
    else:
        given = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
        dims = _dims(given, x.ndim)
    if rows.dim in dims:
        raise unknown(func, rows, "it goes along them")
    return tagged(func(*args, **kwargs), rows)


def reduction(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Local over other dims than that of rows; over that one, ``sum``, ``mean``, ``amax`` and ``amin`` of all ranks."""
    name = name_of(func)
    if name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor):
        return elementwise(ranks, func, args, kwargs)
    x, rows = _only_first(func, args, kwargs)
    at_dim, at_keepdim = REDUCTIONS[name]
    given = kwargs.get("dim", kwargs.get("axis", args[at_dim] if len(args) > at_dim else None))
    if isinstance(given, bool):  # x.var(False): of all, unbiased or not
        given = None
    keepdim = bool(kwargs.get("keepdim", args[at_keepdim] if len(args) > at_keepdim else False))
    dims = _dims(given, x.ndim)
    if rows.dim not in dims:
        shift = 0 if keepdim else sum(dim < rows.dim for dim in dims)
        return _tag_all(func(*args, **kwargs), rows.at(rows.dim - shift))
    if name not in ("sum", "mean", "amax", "amin") or kwargs.get("out") is not None:
        raise unknown(func, rows, "it reduces them")
    order = sorted(dims)
    if name in ("amax", "amin"):
        found = getattr(torch, name)(all_ranks(getattr(torch, name)(x, order, keepdim), ranks), 0)
        return untagged(found)
    # As torch does: a sum of integers is one of int64.
    made = kwargs.get("dtype") or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    wide = torch.float32 if made in (torch.float16, torch.bfloat16) else made
    found = all_ranks(x.sum(order, keepdim, dtype=wide), ranks).sum(0)
    if name == "mean":
        found = found / (rows.total * math.prod([x.shape[dim] for dim in dims - {rows.dim}]))
    return found.to(made)


def meshgrid(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``torch.meshgrid``: this rank's part along the first dim, all along the others."""
    tensors = list(args[0]) if isinstance(args[0], (tuple, list)) else list(args)
    lead = 1 if kwargs.get("indexing") == "xy" else 0
    rows = rows_of(tensors[lead])
    for place, x in enumerate(tensors):
        own = rows_of(x)
        if own is not None and place != lead:
            tensors[place] = gather(x, own, ranks)
    out = func(*tensors, **kwargs)
    return out if rows is None else _tag_all(out, rows)


def dropout(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """In eval mode, or with probability 0."""
    _, rows = _only_first(func, args, kwargs)
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    if training and p > 0:
        raise unknown(func, rows, "each rank would draw for its own rows. Call .eval() first")
    return tagged(func(*args, **kwargs), rows)


def new(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``x.new_zeros`` and others, of a shape in which a size was read from a sharded tensor; else replicated."""
    return made(ranks, partial(func, args[0]), args[1:], kwargs)


def made(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``torch.zeros`` and others of a shape in which a size was read from a sharded tensor."""
    shape = _shape(args, kwargs)
    found = counted(shape)
    if found is not None:
        if "size" in kwargs:
            kwargs = {**kwargs, "size": local_sizes(kwargs["size"])}
        elif isinstance(args[0], (list, tuple)):
            args = (local_sizes(args[0]), *args[1:])
        else:
            args = local_sizes(tuple(args))
        return tagged(func(*args, **kwargs), Rows(*found))
    if (
        name_of(func) == "empty" and "size" not in kwargs
    ):  # of tokens by tokens, which baddbmm with beta=0 does not read
        return torch.empty((), **kwargs).expand(shape)
    out: Tensor = func(*args, **kwargs)
    return out


def spread(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``x.expand`` of a replicated tensor to such a shape: each of its rows is the same."""
    out: Tensor = func(*args, **kwargs)
    sizes = args[1] if isinstance(args[1], (list, tuple)) else args[1:]
    found = counted(sizes)
    if found is None or out.stride(found[0]) != 0:
        return out
    dim, layout = found
    return tagged(out.narrow(dim, 0, layout[ranks.index]), Rows(dim, layout))


def of_each_frame(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``x.repeat_interleave(pixels)`` of one replicated number a frame: one for each token of this rank."""
    x, repeats = args[0], kwargs.get("repeats", args[1] if len(args) > 1 else None)
    if x.ndim != 1 or not isinstance(repeats, ShardedSize):
        out: Tensor = func(*args, **kwargs)
        return out
    return tagged(x.repeat_interleave(repeats.local), Rows(0, repeats.layout, len(x)))


def drawn(ranks: MeshDim, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``torch.randn`` and ``torch.rand`` of such a shape: drawn for all rows, as on one device, of which this rank takes its own."""
    shape = [int(size) for size in _shape(args, kwargs)]
    found = counted(_shape(args, kwargs))
    if found is None:
        raise TypeError(f"{name_of(func)} of {shape}: expected one size that is sharded.")
    rows = Rows(*found)
    if torch.compiler.is_compiling() and kwargs.get("generator") is None:
        raise unknown(func, rows, "in a compiled function each rank draws from a state of its own")
    rest = {name: value for name, value in kwargs.items() if name != "size"}
    return tagged(part_of(func(shape, **rest), rows, ranks).contiguous(), rows)


def _shape(args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
    if "size" in kwargs:
        return list(kwargs["size"])
    return (
        list(args[0]) if args and isinstance(args[0], (list, tuple)) else [one for one in args if isinstance(one, int)]
    )


def _any_rows(args: Sequence[Any], kwargs: dict[str, Any]) -> Rows:
    flat: list[Any] = [*args, *kwargs.values()]
    for value in flat:  # grows as it goes
        found = rows_of(value)
        if found is not None:
            return found
        if isinstance(value, (list, tuple)):
            flat.extend(value)
    return Rows(0, (0,))


def _only_first(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Rows]:
    x = args[0] if args else kwargs["input"]
    rows = rows_of(x)
    if rows is None:
        raise unknown(func, _any_rows(args, kwargs), "an argument other than the first is sharded")
    return x, rows


def _dims(given: Any, ndim: int) -> set[int]:
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return set(range(ndim))
    dims = [given] if isinstance(given, int) else list(given)
    return {dim % ndim for dim in dims}


def _tag_all(out: Any, rows: Rows) -> Any:
    for x in (out,) if isinstance(out, Tensor) else out:
        tagged(x, rows)
    return out


RULES: dict[str, Any] = {
    **dict.fromkeys(METADATA, metadata),
    **dict.fromkeys(("shape.__get__", "size", "numel", "nelement", "len"), shape),
    **dict.fromkeys(LIKE_FIRST, like_first),
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(ALONG, along),
    **dict.fromkeys(REDUCTIONS, reduction),
    "meshgrid": meshgrid,
    **dict.fromkeys(("dropout", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"), dropout),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), new),
}

# Of no tensor, but of sizes that may have been read from one.
FACTORIES: dict[str, Any] = {
    **dict.fromkeys(("zeros", "ones", "empty", "full"), made),
    **dict.fromkeys(("randn", "rand"), drawn),
    **dict.fromkeys(("expand", "broadcast_to"), spread),
    "repeat_interleave": of_each_frame,
}
