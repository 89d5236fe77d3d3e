"""The operations of one model call as values, and the bytes that each rank of a mesh sends for them.

:mod:`para_core.planner.observe` records them on one device. The small exchanges that compare inputs between ranks are
not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        min_per_rank (`int`): They are replicated if a rank would get fewer. A plan asks for two tokens, or one row or
            frame.
    """

    total: int
    sharded: bool
    min_per_rank: int = 2

    def held(self, rank: int, ranks: int) -> int:
        """Return the number of sharded tokens on ``rank``; 0 if they are replicated."""
        return 0 if self.replicated(ranks) else shard_size(self.total, rank, ranks)

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
class Gathered:
    """A gathered output, or input of a module, with its bytes per token."""

    tokens: Tokens
    bytes_per_token: int


@dataclass(frozen=True)
class Summed:
    """A sum over ``tokens``, of ``size`` bytes, that all ranks add up."""

    tokens: Tokens
    size: int


@dataclass(frozen=True)
class Edges:
    """Rows at both edges of a rank's shard of ``tokens``: ``size`` bytes for each neighbouring rank."""

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


@dataclass
class CallWork:
    """The operations of one part of a call's samples.

    Args:
        events (`list`): Operations in order.
        returned (`int`): Bytes of the output.
        launches (`int`): Operators that are not views; an attention call counts as one.
        moved (`tuple[int, int]`): Bytes read and written without products and attention, while tokens are sharded and
            otherwise.
        peak (`tuple[int, int]`): The most bytes of activations held at once, of the same two kinds.
    """

    events: list[CountedAttention | Gathered | Summed | Edges | Product] = field(default_factory=list)
    returned: int = 0
    launches: int = 0
    moved: tuple[int, int] = (0, 0)
    peak: tuple[int, int] = (0, 0)


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
        mask (`int`): Gathered columns of the mask.
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
    queries, keys = ([sum(x.held(r, ranks) for x in kind) for r in range(ranks)] for kind in (call.queries, call.keys))
    if not any(keys):
        return AttentionBytes()
    block, index = divmod(rank, ulysses)
    peers = [peer for peer in range(ulysses) if peer != index]
    heads, kv_heads = heads_of_ranks(call, ulysses)
    both = call.head_dim + call.value_dim
    way_in = sum(queries[rank] * heads[j] * call.head_dim + keys[rank] * kv_heads[j] * both for j in peers)
    replicated = sum(x.replicated(ranks) for x in call.queries)
    way_out = sum(queries[block * ulysses + j] + replicated for j in peers) * heads[index] * call.value_dim
    blocks = [sum(keys[i * ulysses : (i + 1) * ulysses]) for i in range(ring)]
    unit = call.samples * call.element_size
    grid = (0, 0, 0)
    if two_dims:
        of_groups = [sum(queries[i * ulysses : (i + 1) * ulysses]) + replicated for i in range(ring)]
        grid = _sent_in_grid(call, heads[index], kv_heads[index], of_groups, blocks, block)
        around = sum(grid)
    else:
        around = unit * sum(blocks[(block - step) % ring] for step in range(ring - 1)) * kv_heads[index] * both
    mask = call.mask_bytes * _gathered(keys, ring, ulysses, rank)
    return AttentionBytes(unit * way_in, unit * way_out, around, mask, grid)


def _sent_in_grid(
    call: CountedAttention, heads: int, kv_heads: int, queries: Sequence[int], keys: Sequence[int], index: int
) -> tuple[int, int, int]:
    """Return the bytes that ring rank ``index`` sends along its row, along its column, and back along its row.

    The exchange is that of ``para_core/attention/attention_2d.py``.

    Args:
        heads, kv_heads (`int`): Heads that this rank computes.
        queries, keys (`Sequence[int]`): Tokens of each ring rank.
    """
    rows, columns = choose_grid(len(keys), call.heads, call.kv_heads)
    first = index - index % columns
    others = sum(queries[first : first + columns]) - queries[index]
    to_row = heads * call.head_dim * queries[index] * (columns - 1)
    to_column = kv_heads * (call.head_dim + call.value_dim) * keys[index] * (rows - 1)
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


def _gathered(tokens: Sequence[int], ring: int, ulysses: int, rank: int) -> int:
    """Return the tokens that ``rank`` sends in an all-gather: its own over Ulysses, then its block over the ring."""
    block = rank // ulysses
    return tokens[rank] * (ulysses - 1) + sum(tokens[block * ulysses : (block + 1) * ulysses]) * (ring - 1)


def sent_in_call(call: ModelCall, shape: Shape, rank: int, *, two_dims: bool = False) -> int:
    """Return the bytes that ``rank`` of the mesh sends in one model call that it computes."""
    _, ring, ulysses = shape
    index, rank = divmod(rank, ring * ulysses)
    own = call.parts[index if len(call.parts) > 1 else 0]
    total = own.returned * (len(call.parts) - 1)
    for event in own.events:
        if isinstance(event, CountedAttention):
            total += bytes_of_attention(event, ring, ulysses, rank, two_dims=two_dims).total
        elif isinstance(event, Gathered):
            tokens = [event.tokens.held(r, ring * ulysses) for r in range(ring * ulysses)]
            total += event.bytes_per_token * _gathered(tokens, ring, ulysses, rank)
        elif isinstance(event, Summed | Edges) and event.tokens.held(rank, ring * ulysses):
            total += (
                sent_of_sum(event, ring, ulysses)
                if isinstance(event, Summed)
                else sent_of_edges(event, ring, ulysses, rank)
            )
    return total


def sent_of_sum(event: Summed, ring: int, ulysses: int) -> int:
    """Return the bytes that a rank sends: to its Ulysses group, and then that group's sum around the ring."""
    return event.size * (ulysses - 1 + ring - 1)


def sent_of_edges(event: Edges, ring: int, ulysses: int, rank: int) -> int:
    """Return the bytes that ``rank`` sends: a circle in each Ulysses group, and a circle of the groups' ends."""
    at_an_end = rank % ulysses in (0, ulysses - 1)
    return 2 * event.size * ((ulysses > 1) + (ring > 1 and at_an_end))


def sent_in_rounds(
    rounds: Sequence[Sequence[ModelCall]], shape: Shape, rank: int, *, apart: bool, two_dims: bool = False
) -> int:
    """Return the bytes that ``rank`` sends in ``rounds``, each the model calls of one step.

    Args:
        apart (`bool`): The ``batch`` ranks take turns in the calls of a step, then exchange outputs. All ranks compute
            a call of new sizes whose output was not foreseen.
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
