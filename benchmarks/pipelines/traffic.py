"""The operations of a model call, and the bytes that each rank of a mesh sends for them.

The planner has an approximation of this (adapters/planner/predict.py). :mod:`benchmarks.pipelines.observe`
records the operations on one device. The small exchanges that compare inputs between ranks are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from para_core.adapters.planner.mesh import MeshShape
from para_core.attention.grid_shape import choose_grid

# The lse has 4 bytes per element, because it is float32 for all dtypes except float64.
_LSE_BYTES = 4


@dataclass(frozen=True)
class Tokens:
    """The tokens of one segment, sharded over the sequence ranks or replicated.

    Args:
        sharded (`bool`): Whether the plan shards the tokens.
        min_per_rank (`int`): Fewer tokens per rank are replicated; 1 for image rows or frames, else 2.
    """

    total: int
    sharded: bool
    min_per_rank: int = 2

    def held(self, rank: int, ranks: int, count: int = 1) -> int:
        """Return the number of tokens on ranks ``rank`` to ``rank + count - 1``; 0 if the tokens are replicated."""
        if self.replicated(ranks):
            return 0
        each, remainder = divmod(self.total, ranks)
        return count * each + min(rank + count, remainder) - min(rank, remainder)

    def replicated(self, ranks: int) -> int:
        """Return the number of replicated tokens: 0 if the tokens are sharded over ``ranks`` ranks, otherwise all."""
        return 0 if self.sharded and self.total >= self.min_per_rank * ranks else self.total


@dataclass(frozen=True)
class CountedAttention:
    """One call of ``scaled_dot_product_attention``.

    Args:
        queries, keys (`tuple[Tokens, ...]`): The tokens along the sequence, one item per segment.
        mask_bytes (`int`): Bytes of the mask per key, if each rank holds only the columns of its own keys; else 0.
    """

    samples: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    element_size: int
    queries: tuple[Tokens, ...]
    keys: tuple[Tokens, ...]
    mask_bytes: int = 0


@dataclass(frozen=True)
class CountedGather:
    """A gather of ``tokens``, in an input or an output of a module. Each token has ``bytes_per_token`` bytes."""

    tokens: Tokens
    bytes_per_token: int


@dataclass(frozen=True)
class CountedSum:
    """A sum over sharded ``tokens``, as in linear attention. Ranks add their partial sums, each of ``size`` bytes."""

    tokens: Tokens
    size: int

    def sent(self, shape: MeshShape, rank: int) -> int:
        """Return the bytes that any rank sends: first in its Ulysses group, then along the ring."""
        return self.size * (shape.ulysses - 1 + shape.ring - 1)


@dataclass(frozen=True)
class CountedHalo:
    """A halo exchange: a rank sends each neighbour ``size`` bytes, the rows at one edge of its shard of ``tokens``."""

    tokens: Tokens
    size: int

    def sent(self, shape: MeshShape, rank: int) -> int:
        """Return the bytes that ``rank`` sends in its Ulysses group and, at an end of it, to the other groups."""
        group, index = divmod(rank, shape.ulysses)
        is_first, is_last = index == 0, index == shape.ulysses - 1
        # With several groups, the two ends of a group exchange their edges, too.
        within = (not is_first) + (not is_last)
        if shape.ring > 1 and shape.ulysses > 1:
            within = 2
        between = (is_first and group < shape.ring - 1) + (is_last and group > 0)
        return self.size * (within + between)


Operation = CountedAttention | CountedGather | CountedSum | CountedHalo


@dataclass
class CallWork:
    """The exchanges of a model call, or for a part of its samples.

    Args:
        operations (`Counter[Operation]`): The number of times that each operation occurs. Blocks of equal size have
            equal operations.
        returned (`int`): Bytes of the output.
    """

    operations: Counter[Operation] = field(default_factory=Counter)
    returned: int = 0


@dataclass
class ModelCall:
    """One call of a model.

    Args:
        inputs (`Any`): The model and the sizes of its inputs. Calls with equal ``inputs`` have outputs of equal sizes.
        parts (`list[CallWork]`): The work of each ``batch`` rank, if these split the samples of the call; else one.
        foreseen (`bool`): Whether the size of the output is known before the call.
    """

    inputs: Any
    parts: list[CallWork]
    foreseen: bool = False


def shard_size(total: int, rank: int, ranks: int) -> int:
    """Return the size of shard ``rank`` of ``total`` entries, split like ``torch.tensor_split``."""
    return total // ranks + (rank < total % ranks)


@dataclass(frozen=True)
class AttentionBytes:
    """The bytes that one rank sends to others in each exchange of an attention call.

    Args:
        to_heads, from_heads (`int`): The all-to-alls over Ulysses of queries, keys and values, and of the output.
        around (`int`): Keys and values in the ``ring - 1`` steps of a ring; in Attention2D, the sum of ``grid``.
        mask (`int`): The all-gather of the mask's columns.
        grid (`tuple[int, int, int]`): In Attention2D, the bytes of queries, of keys and values, and of partial results.
    """

    to_heads: int = 0
    from_heads: int = 0
    around: int = 0
    mask: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)

    @property
    def total(self) -> int:
        return self.to_heads + self.from_heads + self.around + self.mask


def held_by(tokens: Sequence[Tokens], rank: int, ranks: int, count: int = 1) -> int:
    """Return the number of tokens, over all sharded segments, that ranks ``rank`` to ``rank + count - 1`` hold."""
    return sum(x.held(rank, ranks, count) for x in tokens)


def bytes_of_attention(call: CountedAttention, shape: MeshShape, rank: int) -> AttentionBytes:
    """Return the bytes that sequence rank ``rank`` sends in an attention call; all 0 if no key is sharded.

    Let rank r have Ulysses index u, S_r sharded tokens, H_u query heads and H_kv,u key heads. Per sample the rank sends
    these numbers of elements:

    - over Ulysses, before attention: Σ_{j≠u} (S_r · H_j · D + S_r · H_kv,j · (D + D_v));
    - over Ulysses, after attention: Σ_{j≠u} (S_j + replicated tokens) · H_u · D_v;
    - around the ring: S_block · H_kv,u · (D + D_v) for each ring block that it passes on.

    For Attention2D, which replaces the ring, see :func:`_sent_in_grid`. If the columns of the mask are sharded, the
    rank also sends its part in an all-gather.
    """
    ranks, ring, ulysses = shape.sequence, shape.ring, shape.ulysses
    keys = held_by(call.keys, 0, ranks, ranks)
    if not keys:
        return AttentionBytes()
    block, index = divmod(rank, ulysses)
    group = call.heads // call.kv_heads
    heads = [shard_size(call.heads, rank, ulysses) for rank in range(ulysses)]
    # If neighbouring ranks have query heads that share a key head, each of them receives this key head.
    ends = [*zip(heads, accumulate(heads), strict=True)]
    kv_heads = [-(-end // group) - (end - own) // group if own else 0 for own, end in ends]
    both = call.head_dim + call.value_dim
    own_queries = held_by(call.queries, rank, ranks)
    way_in = own_queries * (call.heads - heads[index]) * call.head_dim
    way_in += held_by(call.keys, rank, ranks) * (sum(kv_heads) - kv_heads[index]) * both
    replicated = sum(x.replicated(ranks) for x in call.queries)
    others = held_by(call.queries, block * ulysses, ranks, ulysses) - own_queries + (ulysses - 1) * replicated
    unit = call.samples * call.element_size
    grid = (0, 0, 0)
    if shape.ring_method == "2d":
        grid = _sent_in_grid(call, heads[index], kv_heads[index], shape, block)
        around = sum(grid)
    else:
        # A rank passes on all ring blocks except the last one that it receives, which is the block of the next ring
        # rank.
        not_passed_on = held_by(call.keys, (block + 1) % ring * ulysses, ranks, ulysses)
        around = unit * (keys - not_passed_on) * kv_heads[index] * both
    mask = call.mask_bytes * _tokens_sent_in_gather(call.keys, shape, rank)
    return AttentionBytes(unit * way_in, unit * others * heads[index] * call.value_dim, around, mask, grid)


def _sent_in_grid(
    call: CountedAttention, heads: int, kv_heads: int, shape: MeshShape, block: int
) -> tuple[int, int, int]:
    """Return the bytes that ring rank ``block`` sends in Attention2D: queries along its row, keys and values along its
    column, and results back along the row. The rank computes ``heads`` query heads and ``kv_heads`` key heads.
    """
    ranks, ulysses = shape.sequence, shape.ulysses
    rows, columns = choose_grid(shape.ring, call.heads, call.kv_heads)
    queries, keys = (held_by(x, block * ulysses, ranks, ulysses) for x in (call.queries, call.keys))
    replicated = sum(x.replicated(ranks) for x in call.queries)
    of_row = held_by(call.queries, (block - block % columns) * ulysses, ranks, columns * ulysses)
    others = of_row - queries + (columns - 1) * replicated
    to_row = heads * call.head_dim * (queries + replicated) * (columns - 1)
    to_column = kv_heads * (call.head_dim + call.value_dim) * keys * (rows - 1)
    results = heads * others * (call.value_dim * call.element_size + _LSE_BYTES)
    unit = call.samples * call.element_size
    return unit * to_row, unit * to_column, call.samples * results


def _tokens_sent_in_gather(tokens: Sequence[Tokens], shape: MeshShape, rank: int) -> int:
    """Return the tokens that ``rank`` sends in an all-gather: its own over Ulysses, then its group's along the ring."""
    ranks, ulysses = shape.sequence, shape.ulysses
    block = held_by(tokens, rank // ulysses * ulysses, ranks, ulysses)
    return held_by(tokens, rank, ranks) * (ulysses - 1) + block * (shape.ring - 1)


def _shards_any(work: CallWork, shape: MeshShape) -> bool:
    """Whether any tokens to which the call attends are sharded."""
    attended = [call.keys for call in work.operations if isinstance(call, CountedAttention)]
    return any(not tokens.replicated(shape.sequence) for keys in attended for tokens in keys if tokens.total)


def _sent_in_call(call: ModelCall, shape: MeshShape, rank: int) -> int:
    """Return the bytes that ``rank`` of the mesh sends in a model call that it computes."""
    index, rank = divmod(rank, shape.sequence)
    own = call.parts[index if len(call.parts) > 1 else 0]
    total = own.returned * (len(call.parts) - 1)
    for operation, number in own.operations.items():
        if isinstance(operation, CountedAttention):
            sent = bytes_of_attention(operation, shape, rank).total
        elif isinstance(operation, CountedGather):
            # If other tokens are sharded, each of a replicated output comes from one rank, so that all get equal bits.
            tokens = replace(operation.tokens, min_per_rank=1) if _shards_any(own, shape) else operation.tokens
            sent = operation.bytes_per_token * _tokens_sent_in_gather([tokens], shape, rank)
        elif not operation.tokens.held(rank, shape.sequence):
            sent = 0
        else:
            sent = operation.sent(shape, rank)
        total += number * sent
    return total


def sent_in_rounds(rounds: Sequence[Sequence[ModelCall]], shape: MeshShape, rank: int, *, apart: bool) -> int:
    """Return the bytes that ``rank`` sends in several steps. Each of ``rounds`` lists the model calls of one step.

    Args:
        apart (`bool`): Whether the ``batch`` ranks compute different calls of a step, and exchange the outputs. A call
            with new input sizes is computed by all of them, unless the size of its output is known in advance.
    """
    batch, earlier, total = shape.batch, set(), 0
    index = rank // shape.sequence
    for calls in rounds:
        for number, call in enumerate(calls):
            shared = apart and batch > 1 and (call.foreseen or call.inputs in earlier)
            earlier.add(call.inputs)
            if shared and number % batch != index:
                continue
            total += _sent_in_call(call, shape, rank)
            if shared:
                total += call.parts[0].returned * (batch - 1)
    return total
