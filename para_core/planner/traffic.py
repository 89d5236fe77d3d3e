"""The operations of one model call as values, and the bytes that each rank of a mesh sends for them.

:mod:`para_core.planner.observe` records them on one device. The small exchanges that compare inputs between ranks are
not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from para_core.attention.grid import choose_grid

LSE_BYTES = 4  # of all dtypes except float64
# (batch, ring, ulysses)
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Tokens:
    """Tokens of one kind: sharded over the sequence ranks, or replicated.

    Args:
        sharded (`bool`): Whether the plan shards them.
        min_per_rank (`int`): Fewest tokens of a rank; with more ranks than that allows they are replicated. It is 2
            for tokens, and 1 for rows or frames.
    """

    total: int
    sharded: bool
    min_per_rank: int = 2

    def held(self, rank: int, ranks: int, count: int = 1) -> int:
        """Return the number of sharded tokens on ``count`` ranks from ``rank`` on; 0 if they are replicated."""
        if self.replicated(ranks):
            return 0
        each, remainder = divmod(self.total, ranks)
        return count * each + min(rank + count, remainder) - min(rank, remainder)

    def replicated(self, ranks: int) -> int:
        """Return the number of replicated tokens; 0 if they are sharded over ``ranks`` ranks."""
        return 0 if self.sharded and self.total >= self.min_per_rank * ranks else self.total


@dataclass(frozen=True)
class CountedAttention:
    """One call of ``scaled_dot_product_attention``.

    Args:
        queries, keys (`tuple[Tokens, ...]`): Tokens along the sequence.
        mask_bytes (`int`): Bytes of mask per key if its columns belong to a rank's own keys; else 0.
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
    """A gathered output, or input of a module, with its bytes per token."""

    tokens: Tokens
    bytes_per_token: int


@dataclass(frozen=True)
class CountedSum:
    """A sum over ``tokens``, of ``size`` bytes, that all ranks add up."""

    tokens: Tokens
    size: int


@dataclass(frozen=True)
class CountedHalo:
    """An exchange of the rows at both edges of a rank's shard of ``tokens``: ``size`` bytes per neighbouring rank."""

    tokens: Tokens
    size: int


@dataclass(frozen=True)
class Product:
    """A linear layer or a convolution, as a product of ``[rows, inner]`` and ``[inner, columns]``.

    Args:
        rows (`tuple[Tokens, ...]`): Tokens that the rows of one sample belong to.
        tensor_split (`"colwise"` or `"rowwise"`, *optional*): How tensor ranks split the weight. The result of
            ``"rowwise"`` is summed over ranks.
    """

    samples: int
    rows: tuple[Tokens, ...]
    inner: int
    columns: int
    element_size: int
    tensor_split: str | None = None


Operation = CountedAttention | CountedGather | CountedSum | CountedHalo | Product


@dataclass
class CallWork:
    """The operations of one part of a call's samples.

    Args:
        operations (`Counter[Operation]`): Number of equal operations; the blocks of a model have equal ones.
        returned (`int`): Bytes of the output.
        launches (`int`): Operators that are not views; an attention call counts as one.
        moved (`tuple[int, int]`): Bytes read and written without products and attention, while tokens are sharded and
            otherwise.
        peak (`tuple[int, int]`): The most bytes of activations held at once, of the same two kinds.
    """

    operations: Counter[Operation] = field(default_factory=Counter)
    returned: int = 0
    launches: int = 0
    moved: tuple[int, int] = (0, 0)
    peak: tuple[int, int] = (0, 0)

    def map(self, change: Callable[[Operation], Operation]) -> CallWork:
        """Return the work with ``change(operation)`` in place of each operation."""
        operations: Counter[Operation] = Counter()
        for operation, number in self.operations.items():
            operations[change(operation)] += number
        return replace(self, operations=operations)


@dataclass
class ModelCall:
    """One call of a model.

    Args:
        inputs (`Any`): The model and its input sizes: calls with equal ``inputs`` have outputs of equal sizes.
        parts (`list[CallWork]`): One entry, or one per ``batch`` rank if these split the call's samples.
        foreseen (`bool`): Whether the sizes of the output are known before the call.
    """

    inputs: Any
    parts: list[CallWork]
    foreseen: bool = False


# -- bytes per collective


def shard_size(total: int, rank: int, ranks: int) -> int:
    """Return the size of shard ``rank`` of ``total``, split like ``torch.tensor_split``."""
    return total // ranks + (rank < total % ranks)


@dataclass(frozen=True)
class AttentionBytes:
    """Bytes that one rank sends to others in an attention call, by collective.

    Args:
        to_heads (`int`): Ulysses' all-to-all of queries, keys and values.
        from_heads (`int`): Ulysses' all-to-all of the output.
        around (`int`): Keys and values in the ``ring - 1`` steps of a ring; in Attention2D, everything along rows and
            columns.
        mask (`int`): All-gather of the mask's columns.
        grid (`tuple[int, int, int]`): In Attention2D, ``around`` split into queries, keys and values, and partial
            results.
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
    """Return the number of sharded tokens of all kinds on ``count`` ranks from ``rank`` on."""
    return sum(x.held(rank, ranks, count) for x in tokens)


def bytes_of_attention(
    call: CountedAttention, ring: int, ulysses: int, rank: int, *, two_dims: bool = False
) -> AttentionBytes:
    """Return the bytes that sequence rank ``rank`` sends. All are 0 if no key is sharded.

    With S_r the sharded tokens of rank r and H_u the heads of Ulysses rank u, per sample and element: Ulysses sends
    Σ_{j≠u} (S_r · H_j · D + S_r · H_kv,j · (D + D_v)) in and Σ_{j≠u} (S_j + replicated tokens) · H_u · D_v out. The
    ring sends S_block · H_kv,u · (D + D_v) for each block that is passed on; for ``two_dims`` see
    :func:`_sent_in_grid`.
    """
    ranks = ring * ulysses
    keys = held_by(call.keys, 0, ranks, ranks)
    if not keys:
        return AttentionBytes()
    block, index = divmod(rank, ulysses)
    heads, kv_heads = heads_of_ranks(call, ulysses)
    both = call.head_dim + call.value_dim
    own_queries = held_by(call.queries, rank, ranks)
    way_in = own_queries * (call.heads - heads[index]) * call.head_dim
    way_in += held_by(call.keys, rank, ranks) * (sum(kv_heads) - kv_heads[index]) * both
    replicated = sum(x.replicated(ranks) for x in call.queries)
    others = held_by(call.queries, block * ulysses, ranks, ulysses) - own_queries + (ulysses - 1) * replicated
    unit = call.samples * call.element_size
    grid = (0, 0, 0)
    if two_dims:
        grid = _sent_in_grid(call, heads[index], kv_heads[index], ring, ulysses, block)
        around = sum(grid)
    else:
        # The block of the next rank of the ring is the one that this rank receives last and does not pass on.
        not_passed_on = held_by(call.keys, (block + 1) % ring * ulysses, ranks, ulysses)
        around = unit * (keys - not_passed_on) * kv_heads[index] * both
    mask = call.mask_bytes * _tokens_sent_in_gather(call.keys, ring, ulysses, rank)
    return AttentionBytes(unit * way_in, unit * others * heads[index] * call.value_dim, around, mask, grid)


def _sent_in_grid(
    call: CountedAttention, heads: int, kv_heads: int, ring: int, ulysses: int, block: int
) -> tuple[int, int, int]:
    """Return the bytes that a rank of ring index ``block`` sends along its row, its column, and back along its row.

    The exchange is that of ``para_core/attention/attention_2d.py``.

    Args:
        heads, kv_heads (`int`): Heads that this rank computes.
    """
    ranks = ring * ulysses
    rows, columns = choose_grid(ring, call.heads, call.kv_heads)
    queries, keys = (held_by(x, block * ulysses, ranks, ulysses) for x in (call.queries, call.keys))
    replicated = sum(x.replicated(ranks) for x in call.queries)
    of_row = held_by(call.queries, (block - block % columns) * ulysses, ranks, columns * ulysses)
    others = of_row - queries + (columns - 1) * replicated
    to_row = heads * call.head_dim * (queries + replicated) * (columns - 1)
    to_column = kv_heads * (call.head_dim + call.value_dim) * keys * (rows - 1)
    results = heads * others * (call.value_dim * call.element_size + LSE_BYTES)
    unit = call.samples * call.element_size
    return unit * to_row, unit * to_column, call.samples * results


def heads_of_ranks(call: CountedAttention, ulysses: int) -> tuple[list[int], list[int]]:
    """Return the numbers of query heads and of key heads that each Ulysses rank computes."""
    group = call.heads // call.kv_heads
    heads, kv_heads, start = [], [], 0
    for u in range(ulysses):
        heads.append(shard_size(call.heads, u, ulysses))
        end = start + heads[u]
        # Neighbours that share a key head both receive it.
        kv_heads.append(-(-end // group) - start // group if heads[u] else 0)
        start = end
    return heads, kv_heads


def _tokens_sent_in_gather(tokens: Sequence[Tokens], ring: int, ulysses: int, rank: int) -> int:
    """Return the tokens that ``rank`` sends in an all-gather: its own over Ulysses, then its block over the ring."""
    ranks = ring * ulysses
    block = held_by(tokens, rank // ulysses * ulysses, ranks, ulysses)
    return held_by(tokens, rank, ranks) * (ulysses - 1) + block * (ring - 1)


def sent_in_call(call: ModelCall, shape: Shape, rank: int, *, two_dims: bool = False) -> int:
    """Return the bytes that ``rank`` of the mesh sends in one model call that it computes."""
    _, ring, ulysses = shape
    index, rank = divmod(rank, ring * ulysses)
    own = call.parts[index if len(call.parts) > 1 else 0]
    total = own.returned * (len(call.parts) - 1)
    for operation, number in own.operations.items():
        if isinstance(operation, CountedAttention):
            sent = bytes_of_attention(operation, ring, ulysses, rank, two_dims=two_dims).total
        elif isinstance(operation, CountedGather):
            sent = operation.bytes_per_token * _tokens_sent_in_gather([operation.tokens], ring, ulysses, rank)
        elif isinstance(operation, Product) or not operation.tokens.held(rank, ring * ulysses):
            continue
        elif isinstance(operation, CountedSum):
            sent = sent_of_sum(operation, ring, ulysses)
        else:
            sent = sent_of_halo(operation, ring, ulysses, rank)
        total += number * sent
    return total


def sent_of_sum(summed: CountedSum, ring: int, ulysses: int) -> int:
    """Return the bytes that a rank sends: its sum to its Ulysses group, then the sum of that group around the ring."""
    return summed.size * (ulysses - 1 + ring - 1)


def sent_of_halo(halo: CountedHalo, ring: int, ulysses: int, rank: int) -> int:
    """Return the bytes that ``rank`` sends to neighbours in its Ulysses group and, at its ends, in the next groups."""
    at_an_end = rank % ulysses in (0, ulysses - 1)
    return 2 * halo.size * ((ulysses > 1) + (ring > 1 and at_an_end))


def sent_in_rounds(
    rounds: Sequence[Sequence[ModelCall]], shape: Shape, rank: int, *, apart: bool, two_dims: bool = False
) -> int:
    """Return the bytes that ``rank`` sends in ``rounds``, each the model calls of one step.

    Args:
        apart (`bool`): Whether the ``batch`` ranks take turns in the calls of a step, then exchange outputs. A call
            with new sizes is computed by all ranks if the shape of its output was not known before.
        two_dims (`bool`): The ring is Attention2D.
    """
    batch, known, total = shape[0], set(), 0
    index = rank // (shape[1] * shape[2])
    for calls in rounds:
        for number, call in enumerate(calls):
            shared = apart and batch > 1 and (call.foreseen or call.inputs in known)
            known.add(call.inputs)
            if shared and number % batch != index:
                continue
            total += sent_in_call(call, shape, rank, two_dims=two_dims)
            if shared:
                total += call.parts[0].returned * (batch - 1)
    return total
