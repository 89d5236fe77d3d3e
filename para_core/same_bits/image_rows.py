"""The mode under which the rows of an image have the bytes of one process, and its rules for torch functions.

- GroupNorm gets all rows of some groups of channels (:mod:`channel_groups`).
- Keys and values of attention are gathered, as ever.
- Functions that add up rows, or resample them, run on gathered rows: in full on each rank.
- All other functions run on this rank's rows, and at their place in zeros of one process's sizes if bytes
  differ else (:mod:`placed_rows`).

The rules for rows without equal bytes, and the exchange of rows, are in :mod:`para_core.spatial`.
``adapters/same_bits.py`` makes the modes. Tests: tests/same_bits/test_vaes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.mesh import MeshDim
from para_core.layout.sequence import Run
from para_core.layout.windows import Sizes, plan_convolution
from para_core.same_bits.at_place import resize
from para_core.same_bits.channel_groups import group_norm_of_rows
from para_core.same_bits.device_settings import check_workspaces, deterministic_products
from para_core.same_bits.placed_rows import PlacedRows, bits_key, copy_part, run_rows
from para_core.spatial.convolution import WindowedCall, read_convolution, read_pool
from para_core.spatial.fetch import fetch_rows, gather_rows
from para_core.spatial.mode import ROW_RULES, SpatialShardMode, rules_by_name
from para_core.spatial.products import operands_of
from para_core.spatial.row_tag import RowTag, mixing_error, rows_of, set_rows
from para_core.spatial.rules import REDUCTIONS, align, argument, bind, dims_of, require_rows
from para_core.torch_functions import Function, name_of
from para_core.torch_internals import DisableTorchFunction, is_compiled_code

_COMPILED = (
    "same_bits=True runs an eager VAE: generated code may add up in another order for another number of rows, which "
    "nothing checks. Leave torch.compile out, or same_bits."
)


class SameBitsModes:
    """Makes the modes of the calls of one autoencoder, which share what was found about its functions."""

    def __init__(self) -> None:
        check_workspaces()
        self._placed = PlacedRows()

    def __call__(self, ranks: MeshDim) -> SpatialShardMode:
        """Return the mode of one call.

        Raises:
            RuntimeError: The call is compiled.
        """
        if is_compiled_code():
            raise RuntimeError(_COMPILED)
        return SameBitsRows(ranks, self._placed)


class SameBitsRows(SpatialShardMode):
    """Mode under which a model computes this rank's rows of an image, with the bytes of one process.

    Args:
        ranks: The ranks over which rows are sharded.
        placed: The kinds of functions that were compared with one process so far.
    """

    def __init__(self, ranks: MeshDim, placed: PlacedRows) -> None:
        super().__init__(ranks)
        self.placed = placed
        self._settings = ExitStack()

    def shard(self, x: Tensor, dim: int = -2, *, unit: int = 1, sizes: Sizes | None = None) -> Tensor:
        """Return this rank's rows of ``x``, in its order of dims in memory, by which functions choose kernels."""
        part = super().shard(x, dim, unit=unit, sizes=sizes)
        rows = rows_of(part)
        if rows is None:
            return part
        with DisableTorchFunction():
            return set_rows(copy_part(x, rows, self.ranks), rows)

    def __enter__(self) -> SameBitsRows:
        self._settings.enter_context(deterministic_products())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._settings.close()

    def run_rule(self, name: str, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        rule = _RULES.get(name)
        if rule is None:
            return super().run_rule(name, func, args, kwargs)
        return rule(self, func, args, kwargs)


def _run_on_rows(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function whose rows do not depend on each other."""
    return run_rows(mode.placed, mode.ranks, ROW_RULES[name_of(func)], func, args, kwargs)


def _elementwise(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise function after its sharded arguments were brought to one layout."""
    lead = next((x for x in (*args, *kwargs.values()) if rows_of(x) is not None), None)
    if lead is None:
        return ROW_RULES[name_of(func)](mode.ranks, func, args, kwargs)

    def fit(x: Any) -> Any:
        if rows_of(x) is None:
            return x
        return _align_to_lead(mode.ranks, func, x, lead)

    return _run_on_rows(mode, func, [fit(x) for x in args], {name: fit(x) for name, x in kwargs.items()})


def _sum(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a sum or a difference. With ``alpha`` it may round once or twice."""
    if "alpha" in kwargs:
        return _elementwise(mode, func, args, kwargs)
    return ROW_RULES[name_of(func)](mode.ranks, func, args, kwargs)


def _run_if_real(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function that IEEE 754 rounds for real numbers. For complex ones it is several operations, and a
    CPU may round them otherwise in the last few elements of a tensor.
    """
    values = (*args, *kwargs.values())
    if any(isinstance(x, complex) or (isinstance(x, Tensor) and x.is_complex()) for x in values):
        rows = next((rows for x in values if (rows := rows_of(x)) is not None), None)
        raise mixing_error(func, rows, "same_bits=True does not compute with complex numbers")
    return ROW_RULES[name_of(func)](mode.ranks, func, args, kwargs)


def _align_to_lead(ranks: MeshDim, func: Function, x: Tensor, lead: Tensor) -> Tensor:
    """Return this rank's part of a sharded ``x`` in the layout of ``lead``, with its tag."""
    rows = rows_of(lead)
    if rows is None:
        return x
    dim_from_end = rows.dim - lead.ndim
    has_rows = x.ndim >= -dim_from_end and (
        rows_of(x) == rows.at(x.ndim + dim_from_end) or x.shape[dim_from_end] != 1
    )
    part = align(ranks, func, x, rows, dim_from_end)
    if has_rows:
        return set_rows(part, rows.at(part.ndim + dim_from_end))
    return part


def _run_on_all_rows(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function on all rows, in full on each rank, and return this rank's rows. Collective."""
    # The rule says how many rows each rank gets, and raises for what has none.
    rows = rows_of(ROW_RULES[name_of(func)](mode.ranks, func, args, kwargs))
    wholes = [gather_as_is(mode.ranks, x) for x in args]
    out = func(*wholes, **{name: gather_as_is(mode.ranks, x) for name, x in kwargs.items()})
    if rows is None:
        return out
    return set_rows(copy_part(out, rows, mode.ranks), rows)


def gather_as_is(ranks: MeshDim, x: Any) -> Any:
    """Return all rows of a tensor in its order of dims in memory; anything without rows as it is. Collective."""
    rows = rows_of(x)
    if rows is None:
        return x
    whole = gather_rows(x, rows, ranks)
    return resize(x, whole.shape).copy_(whole)


def _reduction(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a reduction, of gathered rows if it reduces them."""
    x = argument(args, kwargs, "input", 0)
    rows = rows_of(x)
    position, _ = REDUCTIONS[name_of(func)]
    dim = argument(args, kwargs, "dim", position)
    if rows is None or isinstance(dim, Tensor):
        return ROW_RULES[name_of(func)](mode.ranks, func, args, kwargs)
    # A bool at this position is ``unbiased``, as in x.var(False), which reduces all dims.
    if isinstance(dim, bool) or rows.dim in dims_of(dim, x.ndim):
        return _run_on_all_rows(mode, func, args, kwargs)
    return _run_on_rows(mode, func, args, kwargs)


def _group_norm(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Run ``F.group_norm`` of all rows of this rank's groups of channels. Collective."""
    x, groups, weight, bias, eps = bind(
        func, args, kwargs, input=None, num_groups=1, weight=None, bias=None, eps=1e-5
    )
    rows = rows_of(x)
    if rows is None or rows.dim == 1:
        raise mixing_error(func, rows, "its channels are sharded, or only its weights")
    if rows.dim == 0:
        return _run_on_rows(mode, func, args, kwargs)  # type: ignore[no-any-return]
    if x.shape[1] % groups:
        # torch raises, and says why.
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return group_norm_of_rows(mode.ranks, x, rows, groups, weight, bias, eps)


def _convolution(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a convolution with the rows of neighbours that its windows reach. Collective."""
    return _windows(mode, func, read_convolution(func, args, kwargs), args, kwargs)


def _pool(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an average pool with the rows of neighbours that its windows reach. Collective."""
    return _windows(mode, func, read_pool(func, args, kwargs), args, kwargs)


def _windows(
    mode: SameBitsRows,
    func: Function,
    call: WindowedCall | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a function with windows, or one of this rank's samples without ``call``. Collective with ``call``."""
    if call is None:
        return _run_on_rows(mode, func, args, kwargs)
    ranks, x, rows = mode.ranks, call.x, call.rows
    plan = plan_convolution(rows.sizes, call.extent, call.stride, call.padding)
    require_rows(func, rows, plan.sizes)
    out_rows = RowTag(rows.dim, plan.sizes)

    def compute(parts: Sequence[Tensor]) -> Tensor:
        return set_rows(call.run(parts[0], 0), out_rows)

    def compute_at_place(parts: Sequence[Tensor], rows_of_output: RowTag) -> Tensor:
        sizes = [*x.shape]
        sizes[rows.dim] = rows.total
        whole = resize(x, sizes)
        _put_run(whole, parts[0], rows.dim, plan.wanted[ranks.index])
        out = call.run(whole, call.padding)
        return copy_part(out, rows_of_output, ranks)

    part = fetch_rows(x, rows, plan.wanted, ranks, fill=call.fill)
    if not x.is_contiguous():
        # The output has the order of dims of the input, by which the next norm chooses its kernel.
        part = resize(x, part.shape).copy_(part)
    kind = (name_of(func), *map(bits_key, args), *[(name, bits_key(y)) for name, y in kwargs.items()])
    return mode.placed.run(kind, [part], compute, compute_at_place)


def _put_run(whole: Tensor, part: Tensor, dim: int, run: Run) -> None:
    """Copy the rows of ``run`` to their place in ``whole``, without those beyond its edges."""
    start, length = run
    first, stop = max(start, 0), min(start + length, whole.shape[dim])
    whole.narrow(dim, first, stop - first).copy_(part.narrow(dim, first - start, stop - first))


def _run_attention(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run SDPA of this rank's queries and gathered keys and values. Collective.

    If samples or heads are sharded instead of tokens, this rank's are computed without a comparison: a kernel
    computes each of them alone.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = [rows_of(named[name]) for name in ("key", "value")]
    if all(rows is not None and rows.dim == named["key"].ndim - 2 for rows in tokens):
        for name in ("key", "value"):
            named[name] = gather_as_is(mode.ranks, named[name])
    if rows_of(named["query"]) is None or rows_of(named["key"]) is not None:
        return ROW_RULES[name_of(func)](mode.ranks, func, (), named)
    return _run_on_rows(mode, func, (), named)


def _product(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a matrix product of this rank's rows and a gathered operand; of gathered ones if it sums over rows.

    Collective.
    """
    operands = operands_of(func, args, kwargs)
    a, b = operands[-2:]
    if operands[0].is_meta:
        # The input of a baddbmm with beta=0, for which spatial.factories allocates nothing. Here torch gets it.
        operands[0] = torch.empty((), dtype=a.dtype, device=a.device).expand(operands[0].shape)
    if name_of(func) == "rmatmul":
        a, b = b, a
    rows_a, rows_b = rows_of(a), rows_of(b)
    is_batched = rows_a is not None and rows_a == rows_b and rows_a.dim < a.ndim - 2
    if is_batched or (rows_b is None and rows_a is not None and rows_a.dim < a.ndim - 1):
        return _run_on_rows(mode, func, operands, kwargs)
    has_rows = rows_a is not None and rows_a.dim == a.ndim - 2
    if has_rows and name_of(func) != "rmatmul":
        operands[-1] = gather_as_is(mode.ranks, b)
        return _run_on_rows(mode, func, operands, kwargs)
    return _run_on_all_rows(mode, func, operands, kwargs)


def _interpolate(mode: SameBitsRows, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``F.interpolate``: of gathered rows, unless it only copies them. Collective."""
    resampling = argument(args, kwargs, "mode", 3, "nearest")
    if resampling in ("nearest", "nearest-exact"):
        return ROW_RULES[name_of(func)](mode.ranks, func, args, kwargs)
    return _run_on_all_rows(mode, func, args, kwargs)


# Functions that move, copy, compare or convert elements, and those that IEEE 754 rounds also for complex
# numbers, have no rule here: they are exact as they are. A function that gets a rule in spatial.rules, and
# whose bits depend on the number of rows, must be named here too: without it, its rows would be computed with
# other bits, and only a row for it in tests/same_bits/test_vaes.py would notice.
_BY_RULE: dict[Callable[..., Any], str] = {
    _run_on_rows: """
        rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh sigmoid erf erfc
        leaky_relu silu gelu mish elu selu celu softplus hardswish hardsigmoid log_sigmoid softsign
        tanhshrink sinc softmax log_softmax cumsum glu normalize adaptive_avg_pool1d layer_norm rms_norm linear
        batch_norm
    """,
    _sum: "add sub rsub subtract",
    _elementwise: "pow rpow float_power lerp addcmul addcdiv atan2 hypot xlogy polar",
    _run_if_real: """
        mul rmul multiply div rdiv divide true_divide truediv rtruediv reciprocal square sqrt abs absolute angle isclose
    """,
    _reduction: "mean sum prod logsumexp norm vector_norm linalg_vector_norm var std",
    _group_norm: "group_norm",
    _convolution: "conv1d conv2d conv3d",
    _pool: "avg_pool1d avg_pool2d avg_pool3d",
    _run_attention: "scaled_dot_product_attention",
    _product: "matmul bmm mm rmatmul baddbmm",
    _interpolate: "interpolate",
    _run_on_all_rows: "conv_transpose1d conv_transpose2d conv_transpose3d stft",
}
_RULES = rules_by_name(_BY_RULE)
