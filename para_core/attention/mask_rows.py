"""Decide by provenance whether the rows of a mask are those of a rank's queries.

A model that builds its mask from the length of its input gives every rank rows 0, 1, … of the mask, which are
wrong on all ranks but the first. Such a mask has the shape of a correctly sharded one, ``[..., S_local, S]``.
So rows are taken for this rank's only if ``cp.shard`` made them by the layout of the queries, or if they are
all equal, which is a mask of keys.

``cp.shard`` marks the part that it returns (:func:`mark_part`). Views of a marked tensor have the mark of
their base, except tensors of inference mode, which know no base. A mode marks what is computed from a marked
tensor row by row (:func:`follow_parts`), in inference mode also its views.

``cp.shard`` and :mod:`para_core.modes.functional` set marks; :mod:`.call_agreement` reads them, in eager
calls in which ranks exchange the properties of their masks. Tests: tests/attention/test_mask_rows.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.attention.spec import AttentionSpec
from para_core.layout.runs import join_neighbours
from para_core.layout.sequence import Run, SequenceLayout
from para_core.torch_functions import OF_ONE, OF_SEVERAL, Function, is_in_place, name_of
from para_core.torch_internals import innermost_transform, owner_of, storage_id, version_of

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
# The name of an attribute of a storage.
_WRITES = "_para_core_writes"
# The mark of a tensor that ``cp.shard`` made: the dim, counted from the last, and the runs of tokens that the
# rank holds; None for equal rows, which are as well those of any rank. It is stored with the number of writes
# to the memory until then: after a write that nobody followed, the mark does not hold. All are plain values,
# because torch.save stores the attributes of a tensor.
Mark = tuple[int, tuple[Run, ...] | None]
_ANY_ROWS: Mark = (-2, None)


def mark_part(x: Tensor, dim: int, layout: SequenceLayout, rank: int) -> None:
    """Mark ``x`` as the part of ``rank`` by ``layout`` along ``dim``, if this is one of the last two dims."""
    from_last = int(dim) % x.ndim - x.ndim
    if from_last >= -2:
        _set_mark(x, (from_last, tuple(join_neighbours(layout.runs(rank)))))


def _set_mark(x: Tensor, mark: Mark) -> None:
    setattr(x, _MARK, (*mark, _writes_to(x)))


def _writes_to(x: Tensor) -> int:
    """Return how often the memory of ``x`` was written to.

    For tensors of inference mode torch does not count it, so :func:`follow_parts` does, for all views of a memory.
    """
    if x.is_inference():
        counted: int = getattr(x.untyped_storage(), _WRITES, 0)
        return counted
    return version_of(x)


def mark_of(x: Tensor, *, writes: int = 0) -> Mark | None:
    """Return the mark of ``x``, or of the tensor that ``x`` is a view of; None if neither was sharded, or if
    more than ``writes`` writes followed.
    """
    for marked in (x, owner_of(x)):
        stored: tuple[int, Any, int] | None = getattr(marked, _MARK, None)
        if stored is None:
            continue
        dim, runs, written = stored
        if not 0 <= _writes_to(marked) - written <= writes:
            return None
        # Another step in memory means another dim, which may have the same size.
        is_same_dim = (
            x.ndim >= -dim and x.shape[dim] == marked.shape[dim] and x.stride(dim) == marked.stride(dim)
        )
        return (dim, runs) if is_same_dim and _begins_with(x, marked, dim) else None
    return None


def _begins_with(x: Tensor, marked: Tensor, dim: int) -> bool:
    """Whether ``x`` is a view of ``marked``, also after ``x.data = y``, and begins at its index 0 of ``dim``."""
    if storage_id(x.untyped_storage()) != storage_id(marked.untyped_storage()):
        return False
    offset = x.storage_offset() - marked.storage_offset()
    dims = zip(marked.stride(), marked.shape, range(-marked.ndim, 0), strict=True)
    for step, size, each in sorted(dims, reverse=True):
        if step > 0:
            index = min(offset // step, max(0, size - 1))
            offset -= index * step
            if each == dim:
                return index == 0
    return True


def copy_mark(source: Tensor | None, x: Tensor | None) -> None:
    """Mark ``x`` like ``source``, from which it was computed row by row, except in a graph, where no mark is read."""
    if source is None or x is None or x is source or torch.compiler.is_compiling():
        return
    mark = mark_of(source)
    if mark is not None and x.shape[mark[0]] == source.shape[mark[0]]:
        _set_mark(x, mark)


# Functions that make or fill tensors with equal rows. torch's nn.MultiheadAttention converts a bool mask by
# zeros_like and masked_fill_, and models do so by zeros or new_zeros.
_CONSTANTS = """
    zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like zero fill
"""
# Functions that compute a row of their result from the same row of their arguments. After any other function,
# such as ``tril`` or ``flip``, nobody knows whose rows the result has.
_BY_ROW = OF_ONE + OF_SEVERAL + "repeat repeat_interleave tile share_memory pin_memory"
# These keep the rows if the step from one row to the next in memory stays. If reshape or flatten copies, they
# keep the rows if the last two dims stay.
_VIEWS = "getitem view reshape unsqueeze squeeze expand expand_as broadcast_to flatten unflatten select"
_NAMES_OF_CONSTANTS, _NAMES_BY_ROW = frozenset(_CONSTANTS.split()), frozenset(_BY_ROW.split())
_NAMES_OF_VIEWS = frozenset(_VIEWS.split())
# These read nothing but the dtype or the shape of their second argument.
_READ_FIRST = frozenset({"to", "type_as", "expand_as"})


def follow_parts(function: Function, args: Sequence[Any], values: Iterable[Any], output: Any) -> None:
    """Mark ``output``, which ``function`` returned, if it was computed row by row from arguments with rows,
    or with a single column, that ``cp.shard`` made. Where it was written to in another way, its mark does not
    hold any more.

    ``values`` are those of the keyword arguments. An argument whose rows nobody knows, such as a mask made
    from the length of the input, leaves the output without a mark.
    """
    name = name_of(function)
    if name == "data.__set__":
        # torch does not count it as a write. A mark that no number of writes fits also hides that of the owner.
        setattr(args[0], _MARK, (*_ANY_ROWS, sys.maxsize))
        return
    if not name.endswith("__"):
        name = name.partition(".")[0]
    options = (*values,)
    # An argument ``out=`` is among the options.
    writes = is_in_place(function) or any(x is output for x in options)
    if name == "setitem":
        # It returns nothing, and writes to its first argument.
        output, writes = args[0], True
    # Under a transform no mark is read.
    if not isinstance(output, Tensor) or _has_no_rows(output) or innermost_transform() is not None:
        return
    if writes and output.is_inference():
        setattr(output.untyped_storage(), _WRITES, _writes_to(output) + 1)
    if output.ndim < 2:
        return
    mark = None
    if name in _NAMES_OF_CONSTANTS:
        mark = _ANY_ROWS
    elif _keeps_rows(name, args, options):
        read = _read_by(name, args, options)
        mark = _common_mark(read, output, name=name, writes=writes)
        if mark is None and output.shape[-1] == 1:
            mark = _mark_of_column(read, output, writes=writes)
    if mark is not None:
        _set_mark(output, mark)


def _keeps_rows(name: str, args: Sequence[Any], options: Sequence[Any]) -> bool:
    """Whether the function ``name`` computes each row from the same row of its arguments, or returns a view of them."""
    if name == "setitem":
        return _writes_columns(args[1], args[2])
    if name == "repeat_interleave":
        # Numbers in a tensor may drop rows and repeat others.
        return not any(isinstance(x, Tensor) for x in (*args[1:], *options))
    return name in _NAMES_OF_VIEWS or name in _NAMES_BY_ROW


def _read_by(name: str, args: Sequence[Any], options: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments whose rows the function ``name`` reads."""
    if name == "setitem":
        return args[0], args[2]
    if name in _READ_FIRST:
        return args[:1]
    if name == "copy":
        return args[1:2]
    return (*args, *options)


def _has_no_rows(x: Tensor) -> bool:
    """Whether ``x`` is nested or sparse, and raises if it is asked for its shape or its memory."""
    return x.is_nested or x.layout is not torch.strided


def _writes_columns(index: Any, value: Any) -> bool:
    """Whether ``x[index] = value`` writes the same columns of every row, and rows of ``value`` to rows of ``x``."""
    if not (isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis):
        return False
    columns = index[1]
    # One number removes the dim of columns, so a value with a dim would have an entry per row. A bool adds a dim.
    if isinstance(columns, int) and not isinstance(columns, bool):
        return not (isinstance(value, Tensor) and value.ndim > 0)
    # A bool tensor of two dims is an index of rows and columns.
    return isinstance(columns, slice) or (isinstance(columns, Tensor) and columns.ndim == 1)


def _common_mark(values: Iterable[Any], output: Tensor, *, name: str, writes: bool) -> Mark | None:
    """Return the mark of the rows of ``output``, if all tensors among ``values`` with as many rows have it.

    ``output`` of a view must have the steps between rows of ``values``, or their last two dims if it is a
    copy, which it must not be of ``getitem``, because that takes rows in any order then. ``writes`` says
    whether the function ``name`` has written to ``output``, which may be among ``values``.
    """
    is_view = name in _NAMES_OF_VIEWS
    common: Mark | None = None
    for x in values:
        if not isinstance(x, Tensor) or _has_no_rows(x) or x.ndim < 2 or x.shape[-2] != output.shape[-2]:
            continue
        mark = mark_of(x, writes=int(writes and x is output))
        if mark is None or mark[0] != -2:
            return None
        if is_view and storage_id(x.untyped_storage()) == storage_id(output.untyped_storage()):
            if x.stride(-2) != output.stride(-2):
                return None
        elif is_view and (name == "getitem" or x.shape[-2:] != output.shape[-2:]):
            return None
        if common is None or common == _ANY_ROWS:
            common = mark
        elif mark not in (common, _ANY_ROWS):
            return None
    return common


def _mark_of_column(values: Iterable[Any], output: Tensor, *, writes: bool) -> Mark | None:
    """Return the mark of the first of ``values`` that is a single column which ``cp.shard`` made. It stays
    this column next to columns of any origin, because these are broadcast to it.
    """
    for x in values:
        if isinstance(x, Tensor) and not _has_no_rows(x) and x.shape[-1:] == (1,):
            mark = mark_of(x, writes=int(writes and x is output))
            if mark is not None and mark[0] == -1:
                return mark
    return None


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
