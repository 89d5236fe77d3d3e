"""Decide by provenance whether the rows of a mask are those of a rank's queries.

A model that builds its mask from the length of its input gives every rank rows 0, 1, … of the mask, which are
wrong on all ranks but the first. Such a mask has the shape of a correctly sharded one, ``[..., S_local, S]``.
So rows are taken for this rank's only if ``cp.shard`` made them by the layout of the queries, or if they are
all equal, which is a mask of keys.

``cp.shard`` marks the part that it returns (:func:`mark_part`). Views of a marked tensor have the mark of
their base, and a mode marks what is computed from it row by row (:func:`follow_parts`).

``cp.shard`` and :mod:`para_core.modes.functional` set marks; :mod:`.call_agreement` reads them, in eager
calls in which ranks exchange the properties of their masks. Tests: tests/attention/test_mask_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.attention.spec import AttentionSpec
from para_core.layout.runs import join_neighbours
from para_core.layout.sequence import Run, SequenceLayout
from para_core.torch_internals import innermost_transform, owner_of, version_of

# A rank describes its mask by these bits of one integer.
ROWS_SHARDED = 1  # cp.shard made its rows, by the layout of the queries.
COLUMNS_SHARDED = 2  # cp.shard made its columns, by the layout of the keys.
ROWS_EQUAL = 4  # All rows are equal, and show a key.
HIDES = 8  # At least one row hides a key.

# A number below this in a float mask counts as hiding a key. Models hide keys with -inf, finfo(dtype).min or
# about -10000, which bfloat16 rounds to -9984.
_HIDDEN = -9900.0
# Names of the attributes of a tensor for its mark, and for what was last read from the mask in its memory:
# what the reading depends on (the view, and how often the memory was written), and the bits.
_MARK, _READ = "_para_core_part", "_para_core_mask_values"
# The mark of a tensor that ``cp.shard`` made: the dim, counted from the last, and the runs of tokens that the
# rank holds. It has plain values only, because torch.save stores the attributes of a tensor.
Mark = tuple[int, tuple[Run, ...]]


def mark_part(x: Tensor, dim: int, layout: SequenceLayout, rank: int) -> None:
    """Mark ``x`` as the part of ``rank`` by ``layout`` along ``dim``, if this is one of the last two dims."""
    from_last = int(dim) % x.ndim - x.ndim
    if from_last >= -2:
        setattr(x, _MARK, (from_last, tuple(join_neighbours(layout.runs(rank)))))


def mark_of(x: Tensor) -> Mark | None:
    """Return the mark of ``x``, or of the tensor that ``x`` is a view of; None if neither was sharded."""
    mark: Mark | None = getattr(x, _MARK, None)
    if mark is not None:
        return mark
    owner = owner_of(x)
    inherited: Mark | None = getattr(owner, _MARK, None)
    if inherited is None:
        return None
    dim, _ = inherited
    # Another step in memory means another dim, which may have the same size.
    if x.ndim < -dim or x.shape[dim] != owner.shape[dim] or x.stride(dim) != owner.stride(dim):
        return None
    return inherited


def copy_mark(source: Tensor | None, x: Tensor | None) -> None:
    """Mark ``x`` like ``source``, from which it was computed row by row, except in a graph, where no mark is read."""
    if source is None or x is None or x is source or torch.compiler.is_compiling():
        return
    mark = mark_of(source)
    if mark is not None and x.shape[mark[0]] == source.shape[mark[0]]:
        setattr(x, _MARK, mark)


# Names of functions, without underscores, that compute a row of their result from the same row of their
# arguments. After any other function, such as ``tril`` or ``flip``, nobody knows whose rows the result has.
_BY_ROW = """
    to type type_as float double half bfloat16 int long bool cpu cuda clone contiguous detach requires_grad
    share_memory pin_memory neg negative invert abs exp log logical_not bitwise_not isinf isnan isfinite nan_to_num
    add radd iadd sub rsub isub mul rmul imul div truediv true_divide itruediv eq ne lt le gt ge and rand iand or ror
    ior xor rxor ixor logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor where masked_fill clamp
    clamp_min clamp_max minimum maximum repeat repeat_interleave
"""
# These keep the rows if the step from one row to the next in memory stays.
_VIEWS = "getitem view reshape unsqueeze squeeze expand expand_as broadcast_to flatten unflatten select"
_NAMES_BY_ROW, _NAMES_OF_VIEWS = frozenset(_BY_ROW.split()), frozenset(_VIEWS.split())
# These make equal rows, which are as well those of any rank. torch's nn.MultiheadAttention converts a bool mask by
# zeros_like and masked_fill_, and models do so by zeros or new_zeros.
_NAMES_OF_CONSTANTS = frozenset(
    f"{start}{name}{end}"
    for name in ("zeros", "ones", "full")
    for start, end in (("", ""), ("new_", ""), ("", "_like"))
)
# The name of the attribute of such a result for how often its memory had been written then (:func:`_is_constant`).
_CONSTANT = "_para_core_constant"
# These read nothing but the dtype or the shape of their second argument.
_READ_FIRST = frozenset({"to", "type_as", "expand_as"})


def follow_parts(
    function: Callable[..., Any], args: Sequence[Any], values: Iterable[Any], output: Any
) -> None:
    """Mark ``output``, which ``function`` returned, if it was computed row by row from arguments with rows
    that ``cp.shard`` made. Remove its mark if ``function`` may have written other rows into it.

    ``values`` are those of the keyword arguments. An argument whose rows nobody knows, such as a mask made
    from the length of the input, leaves the output without a mark.
    """
    # A nested tensor raises if it is asked for its shape.
    if not isinstance(output, Tensor) or output.ndim < 2 or output.is_nested:
        return
    name = getattr(function, "__name__", "").partition(".")[0].strip("_")
    if name in _NAMES_OF_CONSTANTS:
        if not output.is_inference():
            setattr(output, _CONSTANT, version_of(output))
        return
    is_view = name in _NAMES_OF_VIEWS
    is_by_row = is_view or name in _NAMES_BY_ROW
    mark = None
    if is_by_row:
        read = args[:1] if name in _READ_FIRST else (*args, *values)
        mark = _common_mark(read, output, is_view=is_view)
    if mark is not None:
        setattr(output, _MARK, mark)
        return
    # A function that writes in place, or has nothing to do, returns an argument, which may have a mark.
    own_mark: Mark | None = getattr(output, _MARK, None)
    if own_mark is not None and (own_mark[0] == -2 or not is_by_row):
        delattr(output, _MARK)


def _common_mark(values: Iterable[Any], output: Tensor, *, is_view: bool) -> Mark | None:
    """Return the mark of the rows of ``output``, if all tensors among ``values`` with as many rows have it."""
    common = None
    for x in values:
        if not isinstance(x, Tensor) or x.is_nested or x.ndim < 2 or x.shape[-2] != output.shape[-2]:
            continue
        mark = mark_of(x)
        if mark is None and _is_constant(x, output):
            continue
        if mark is None or mark[0] != -2 or mark != (common or mark):
            return None
        if is_view and x.stride(-2) != output.stride(-2):
            return None
        common = mark
    return common


def _is_constant(x: Tensor, output: Tensor) -> bool:
    """Whether ``x`` had equal rows before the function that returned ``output``, perhaps ``x`` itself, which it
    wrote to: nothing else has written to ``x`` since a function such as ``zeros_like`` made it. False for a
    tensor of inference mode, which does not count how often it is written.
    """
    made: int | None = getattr(x, _CONSTANT, None)
    return made is not None and version_of(x) == made + (x is output)


def describe_rows(mask: Tensor, query_layout: SequenceLayout, key_layout: SequenceLayout, rank: int) -> int:
    """Return the bits of this rank's ``mask``, from its mark, or from its values if only these can tell.

    To read values, the host waits for the device, once for all layers that share a mask. Masks whose values
    cannot be read (meta tensors, ``torch.func`` transforms, CUDA graph capture) count as sharded: the user
    answers for them.
    """
    if mask.is_meta or innermost_transform() is not None:
        return ROWS_SHARDED
    mark, bits = mark_of(mask), 0
    if mark == (-2, tuple(join_neighbours(query_layout.runs(rank)))):
        return ROWS_SHARDED
    if mark == (-1, tuple(join_neighbours(key_layout.runs(rank)))):
        bits = COLUMNS_SHARDED
    rows, columns = mask.shape[-2:]
    if rows < 2:
        return bits | ROWS_EQUAL
    is_block = columns == key_layout.size(rank) and bool(key_layout.sharded)
    has_all_columns = columns == key_layout.total and rows < query_layout.total
    if rows != query_layout.size(rank) or not (is_block or has_all_columns):
        return bits
    return bits | _read_values(mask, must_show=not is_block)


def _read_values(mask: Tensor, *, must_show: bool) -> int:
    """Return ``ROWS_EQUAL`` and ``HIDES`` of ``mask``, if they hold. The host waits for the device.

    With ``must_show``, rows that hide every key do not count as equal: a mask of keys would show some, and in
    a causal mask whose first tokens are padding all rows of one rank may look so.
    """
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return ROWS_SHARDED
    owner, view = owner_of(mask), None
    # A tensor of inference mode does not count how often it is written, so it is read in each call.
    if not owner.is_inference():
        view = (version_of(owner), tuple(mask.shape), mask.stride(), mask.storage_offset(), must_show)
        read: tuple[Any, int] = getattr(owner, _READ, (None, 0))
        if read[0] == view:
            return read[1]
    with torch.no_grad():
        values = mask.detach()
        shown = values
        if mask.dtype != torch.bool:
            shown = values > _HIDDEN
        equal = (values == values[..., :1, :]).all()
        if must_show:
            equal = equal & shown.any()
        # Combine the findings on the device, so that the host waits for it only once.
        bits = int((ROWS_EQUAL * equal + HIDES * ~shown.all()).item())
    if view is not None:
        setattr(owner, _READ, (view, bits))
    return bits


def check_rows(bits: Sequence[int], rows: Sequence[int], spec: AttentionSpec) -> None:
    """Raise ``ValueError`` if the rows of a mask are not known to be those of its rank. All ranks decide the
    same.

    ``bits`` and numbers of ``rows`` are those of all ranks, whose masks are ``[..., S_local, S]``.
    """
    layout = spec.query_layout
    unknown = [
        rank
        for rank, number in enumerate(rows)
        if 1 < number < layout.total and not bits[rank] & (ROWS_SHARDED | ROWS_EQUAL)
    ]
    if not unknown:
        return
    sizes = ", ".join([str(size) for size in layout.sizes()])
    raise ValueError(
        f"attn_mask has a row for each of a rank's own tokens ({sizes} of {layout.total}) and all "
        f"{spec.key_layout.total} columns, its rows differ or hide every key, and on rank {unknown[0]} it was not made "
        "by cp.shard by the layout of the queries. A model that builds its mask from the length of its input (Hugging "
        "Face transformers, given a 2-D attention_mask) counts rows from this rank's first token: on all ranks but the "
        "first these are the wrong rows. Pass the model a 4-D mask over all tokens, sharded by rows inside this mode: "
        "cp.shard(mask, dim=-2), with sequence= if the tokens have a layout of their own; or all rows, without shard; "
        "or no mask if nothing is padded; or use propose_plan, which runs the part that builds the mask on all tokens."
    )
