"""What one call of a model does, as values, and what each rank of a mesh sends of it.

Seen on one device by :mod:`para_core.planner.observe`. The small exchanges with which ranks agree on what they were given are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from para_core.attention.grid import choose_grid

LSE_BYTES = 4  # of all dtypes but float64
# (batch, ring, ulysses)
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Tokens:
    """Tokens of one kind: sharded over the sequence ranks, or replicated.

    Args:
        fewest: the number that each rank must get for them to be sharded; a plan asks for two tokens, or one row or frame.
    """

    total: int
    cut: bool
    fewest: int = 2

    def held(self, rank: int, ranks: int) -> int:
        """Return how many of those that are sharded ``rank`` has."""
        return 0 if self.whole(ranks) else part(self.total, rank, ranks)

    def whole(self, ranks: int) -> int:
        return 0 if self.cut and self.total >= self.fewest * ranks else self.total


@dataclass(frozen=True)
class CountedAttention:
    """One call of ``scaled_dot_product_attention``.

    Args:
        of_mask: bytes of the mask for each key, where its columns are of a rank's own keys.
    """

    samples: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    element_size: int
    queries: tuple[Tokens, ...]
    keys: tuple[Tokens, ...]
    of_mask: int = 0


@dataclass(frozen=True)
class Gathered:
    """An output, or the input of a module, whose tokens are put together, and its bytes for each token."""

    tokens: Tokens
    bytes_per_token: int


@dataclass(frozen=True)
class Summed:
    """A sum over ``tokens``, of so many bytes, which all ranks gather from all."""

    tokens: Tokens
    size: int


@dataclass(frozen=True)
class Edges:
    """Rows at an edge of a rank's ``tokens``, of so many bytes, which it gives to either rank beside it."""

    tokens: Tokens
    size: int


@dataclass(frozen=True)
class Product:
    """A linear layer, or a convolution, as a product of ``[rows, inner]`` and ``[inner, columns]``.

    Args:
        rows: of one sample, by what tokens they are of.
        shared: of the weight over tensor ranks: ``"colwise"``, ``"rowwise"`` (its result is summed over the ranks), or not.
    """

    samples: int
    rows: tuple[Tokens, ...]
    inner: int
    columns: int
    element_size: int
    shared: str | None = None


@dataclass
class CallWork:
    """What one share of a call's samples does, and the bytes of what it returns.

    Args:
        launches: operators that are not views, an attention call counted as one.
        moved: bytes that these read and write, products and attention aside: of tokens that are sharded, and of all else.
        peak: the most bytes of activations held at once: of the former and of the latter.
    """

    events: list[CountedAttention | Gathered | Summed | Edges | Product] = field(default_factory=list)
    returned: int = 0
    launches: int = 0
    moved: tuple[int, int] = (0, 0)
    peak: tuple[int, int] = (0, 0)


@dataclass
class ModelCall:
    """One call of a model; ``parts``: several where the ranks along ``batch`` share its samples.

    Args:
        inputs: the model and the sizes that it was given: what calls whose results have the same sizes have in common.
        foreseen: what it gives is known before it is computed.
    """

    inputs: Any
    parts: list[CallWork]
    foreseen: bool = False


# -- the formula


def part(total: int, rank: int, ranks: int) -> int:
    """What ``rank`` has of ``total``, sharded as ``torch.tensor_split`` splits."""
    return total // ranks + (rank < total % ranks)


@dataclass(frozen=True)
class AttentionBytes:
    """Bytes that one rank sends to others in an attention call, by collective.

    Args:
        to_heads: Ulysses' queries, keys and values; ``from_heads``: its results.
        around: keys and values around the ring, in ``size of the ring - 1`` steps; or, in two dims, all that travels along rows and
            columns. ``mask``: the columns of a mask, gathered.
        grid: of ``around``, in two dims: queries, keys and values, partial results.
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
    """What sequence rank ``rank`` sends to others, S_r being the sharded tokens of rank r, H_u the heads of Ulysses rank u.

    Per sample and element: Ulysses Σ_{j≠u} (S_r · H_j · D + S_r · H_kv,j · (D + D_v)) in, and Σ_{j≠u} (S_j + whole tokens) · H_u · D_v
    out; the ring S_block · H_kv,u · (D + D_v) for each block that is passed on, or, in ``two_dims``, what :func:`_sent_in_grid` says.
    Nothing where no key is sharded.
    """
    ranks = ring * ulysses
    queries, keys = ([sum(x.held(r, ranks) for x in kind) for r in range(ranks)] for kind in (call.queries, call.keys))
    if not any(keys):
        return AttentionBytes()
    block, place = divmod(rank, ulysses)
    peers = [peer for peer in range(ulysses) if peer != place]
    heads, kv_heads = heads_of_ranks(call, ulysses)
    both = call.head_dim + call.value_dim
    way_in = sum(queries[rank] * heads[j] * call.head_dim + keys[rank] * kv_heads[j] * both for j in peers)
    whole = sum(x.whole(ranks) for x in call.queries)
    way_out = sum(queries[block * ulysses + j] + whole for j in peers) * heads[place] * call.value_dim
    blocks = [sum(keys[i * ulysses : (i + 1) * ulysses]) for i in range(ring)]
    each = call.samples * call.element_size
    grid = (0, 0, 0)
    if two_dims:
        of_groups = [sum(queries[i * ulysses : (i + 1) * ulysses]) + whole for i in range(ring)]
        grid = _sent_in_grid(call, heads[place], kv_heads[place], of_groups, blocks, block)
        around = sum(grid)
    else:
        around = each * sum(blocks[(block - step) % ring] for step in range(ring - 1)) * kv_heads[place] * both
    mask = call.of_mask * _gathered(keys, ring, ulysses, rank)
    return AttentionBytes(each * way_in, each * way_out, around, mask, grid)


def _sent_in_grid(
    call: CountedAttention, heads: int, kv_heads: int, queries: Sequence[int], keys: Sequence[int], index: int
) -> tuple[int, int, int]:
    """What ring rank ``index`` sends along its row, along its column, and back along its row, as ``para_core/attention/attention_2d.py`` says.

    Args:
        heads, kv_heads: that this rank computes.
        queries, keys: of each ring rank.
    """
    rows, columns = choose_grid(len(keys), call.heads, call.kv_heads)
    first = index - index % columns
    others = sum(queries[first : first + columns]) - queries[index]
    to_row = heads * call.head_dim * queries[index] * (columns - 1)
    to_column = kv_heads * (call.head_dim + call.value_dim) * keys[index] * (rows - 1)
    results = heads * others * (call.value_dim * call.element_size + LSE_BYTES)
    each = call.samples * call.element_size
    return each * to_row, each * to_column, call.samples * results


def heads_of_ranks(call: CountedAttention, ulysses: int) -> tuple[list[int], list[int]]:
    """Heads of queries and of keys that each Ulysses rank computes."""
    group = call.heads // call.kv_heads
    heads, kv_heads, start = [], [], 0
    for u in range(ulysses):
        heads.append(part(call.heads, u, ulysses))
        end = start + heads[u]
        # Neighbours that see the same key head both get it.
        kv_heads.append(-(-end // group) - start // group if heads[u] else 0)
        start = end
    return heads, kv_heads


def sent_in_attention(call: CountedAttention, ring: int, ulysses: int, rank: int, *, two_dims: bool = False) -> int:
    """Bytes that sequence rank ``rank`` sends to others; see :func:`bytes_of_attention`."""
    return bytes_of_attention(call, ring, ulysses, rank, two_dims=two_dims).total


def _gathered(tokens: Sequence[int], ring: int, ulysses: int, rank: int) -> int:
    """Tokens that ``rank`` sends where all are gathered: its own over Ulysses, then its block over the ring."""
    block = rank // ulysses
    return tokens[rank] * (ulysses - 1) + sum(tokens[block * ulysses : (block + 1) * ulysses]) * (ring - 1)


def sent_in_call(call: ModelCall, shape: Shape, rank: int, *, two_dims: bool = False) -> int:
    """Bytes that ``rank`` of the mesh sends in one call of a model that it computes."""
    _, ring, ulysses = shape
    index, rank = divmod(rank, ring * ulysses)
    own = call.parts[index if len(call.parts) > 1 else 0]
    total = own.returned * (len(call.parts) - 1)
    for event in own.events:
        if isinstance(event, CountedAttention):
            total += sent_in_attention(event, ring, ulysses, rank, two_dims=two_dims)
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
    """Bytes that a rank sends: to all of its Ulysses group, then, what that has summed up, around the ring."""
    return event.size * (ulysses - 1 + ring - 1)


def sent_of_edges(event: Edges, ring: int, ulysses: int, rank: int) -> int:
    """Bytes that ``rank`` sends: Ulysses groups are circles, and what stands at their ends goes on to the next group, in a circle, too."""
    at_an_end = rank % ulysses in (0, ulysses - 1)
    return 2 * event.size * ((ulysses > 1) + (ring > 1 and at_an_end))


def sent_in_rounds(
    rounds: Sequence[Sequence[ModelCall]], shape: Shape, rank: int, *, apart: bool, two_dims: bool = False
) -> int:
    """Bytes that ``rank`` sends in all ``rounds``, each the calls of one step.

    Args:
        apart: the ranks along ``batch`` take turns in a round's calls, then exchange the results. All compute a call whose sizes
            are new, if what it gives was not foreseen.
        two_dims: a ring's ranks are rows and columns.
    """
    batch, known, total = shape[0], set(), 0
    index = rank // (shape[1] * shape[2])
    for calls in rounds:
        for place, call in enumerate(calls):
            shared = apart and batch > 1 and (call.foreseen or call.inputs in known)
            known.add(call.inputs)
            if shared and place % batch != index:
                continue
            total += sent_in_call(call, shape, rank, two_dims=two_dims)
            if shared:
                total += call.parts[0].returned * (batch - 1)
    return total
