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
_MARK, _READ = "_para_core_part", "_para_core_rows"
# The mark of a tensor that ``cp.shard`` made: the dim, counted from the last, and the runs of tokens that the
# rank holds. It has plain values only, because torch.save stores the attributes of a tensor.
Mark = tuple[int, tuple[Run, ...]]


def mark_part(x: Tensor, dim: int, layout: SequenceLayout, rank: int) -> None:
    """Mark ``x`` as the part of ``rank`` by ``layout`` along ``dim``, if this is one of the last two dims."""
    from_last = dim % x.ndim - x.ndim
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
    if x.ndim < -dim or x.shape[dim] != owner.shape[dim]:
        return None
    return inherited


def copy_mark(source: Tensor | None, x: Tensor | None) -> None:
    """Mark ``x`` like ``source``, from which it was computed row by row, except in a graph, where no mark is read."""
    if source is None or x is None or x is source or torch.compiler.is_compiling():
        return
    mark = mark_of(source)
    if mark is not None and x.shape[mark[0]] == source.shape[mark[0]]:
        setattr(x, _MARK, mark)


def follow_parts(
    function: Callable[..., Any], args: Sequence[Any], values: Iterable[Any], output: Any
) -> None:
    """Mark ``output``, which ``function`` returned, if it was computed row by row from an argument with rows
    that ``cp.shard`` made.

    ``values`` are those of the keyword arguments. Functions that make a new tensor from the shape of another
    one, such as ``zeros_like``, do not pass a mark on.
    """
    if not isinstance(output, Tensor) or output.ndim < 2:
        return
    name = getattr(function, "__name__", "")
    if name.startswith("new_") or name.endswith("_like"):
        return
    for x in (*args, *values):
        if not isinstance(x, Tensor) or x is output or x.ndim < 2 or x.shape[-2] != output.shape[-2]:
            continue
        if x.shape[-1] in (1, output.shape[-1]) or name == "__getitem__":
            mark = mark_of(x)
            if mark is not None and mark[0] == -2:
                setattr(output, _MARK, mark)
                return


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
