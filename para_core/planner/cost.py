"""Predicted seconds of one call of a model on a mesh: alpha-beta links, shares of a device's peak, and the overlap that the code has.

Of all ranks the first is predicted: where tokens or heads do not divide, it has most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from para_core.attention.grid import choose_grid
from para_core.planner.hardware import Device, Host, Topology
from para_core.planner.traffic import (
    AttentionBytes,
    CallWork,
    CountedAttention,
    Edges,
    Gathered,
    Product,
    Summed,
    Tokens,
    bytes_of_attention,
    heads_of_ranks,
    part,
    sent_of_edges,
    sent_of_sum,
)
from para_core.weights.pipefusion import PipeFusion

# Multiprocessors that send while others compute, of 132: arXiv:2412.19437, 3.2.2.
_SENDING = 20
RingMethod = Literal["rotate", "all-gather", "2d"]


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh dims; the product is the number of ranks. Along ``pipe`` ranks are farthest apart, then along ``batch``, …,
    along ``tensor`` they are neighbours.

    Args:
        pipe: stages, which hold consecutive blocks.
        ring_method: how keys travel around the ring; ``"2d"``: Attention2D (arXiv:2503.15758).
        pipefusion: all stages work at once, on patches; approximates. None: one after the other, exactly.
        fsdp: the sequence ranks share the weights, and gather each block before it runs.
    """

    batch: int = 1
    pipe: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    ring_method: RingMethod = "rotate"
    pipefusion: PipeFusion | None = None
    fsdp: bool = False

    @property
    def ranks(self) -> int:
        return self.batch * self.pipe * self.sequence * self.tensor

    @property
    def sequence(self) -> int:
        return self.ring * self.ulysses

    def __str__(self) -> str:
        sizes = [self.batch, self.pipe, self.ring, self.ulysses, self.tensor]
        named = {
            "2d": self.ring_method == "2d" and self.ring > 1,
            "fsdp": self.fsdp,
            "PipeFusion (not exact)": self.pipefusion is not None,
        }
        return ", ".join([" × ".join(map(str, sizes)), *[name for name, is_so in named.items() if is_so]])


@dataclass(frozen=True)
class Runtime:
    """What code does around attention calls. The defaults are para_core's; published tables are checked with those of others.

    Args:
        compiled: the transformer is one graph; else eager.
        messages: all-to-alls before an attention call, of queries, keys and values.
        copies: times that what Ulysses sends is read and written on either side.
        overlapped: keys travel around the ring while the block before is attended to; in two dims, all that travels while something
            that is here already is.
        merge_passes: times that a partial result in float32 is read or written for each step of the ring.
        ulysses_launches, ring_launches: of an attention call, and of each step of its ring; ``grid_launches``: in two dims, with two
            columns.
        gathered_grid: in two dims, queries and keys are all-gathered in groups of their own, where para_core takes all-to-alls.
    """

    compiled: bool = False
    messages: int = 1
    copies: int = 1
    overlapped: bool = True
    merge_passes: int = 3
    ulysses_launches: int = 5
    ring_launches: int = 3
    grid_launches: int = 17
    gathered_grid: bool = False


@dataclass(frozen=True)
class Seconds:
    """Of a device and its host; ``host``: what the device waits for it."""

    products: float = 0.0
    attention: float = 0.0
    other: float = 0.0
    communication: float = 0.0
    host: float = 0.0

    @property
    def compute(self) -> float:
        return self.products + self.attention + self.other

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.host

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def times(self, factor: float) -> Seconds:
        return Seconds(*(factor * getattr(self, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Machine:
    """What a mesh runs on, and what runs on it.

    Args:
        slowdown: seconds of a device's computing over what the table says, as measured on one device.
    """

    device: Device
    topology: Topology
    host: Host = field(default_factory=Host)
    runtime: Runtime = field(default_factory=Runtime)
    slowdown: float = 1.0

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth * self.device.of_bandwidth / self.slowdown


def local_rows(tokens: tuple[Tokens, ...], ranks: int) -> int:
    """Tokens that the first of ``ranks`` sequence ranks has."""
    return sum(x.held(0, ranks) + x.whole(ranks) for x in tokens)


def product_seconds(product: Product, shape: MeshShape, machine: Machine) -> tuple[float, float]:
    """Seconds of computing, and bytes that are summed over the tensor ranks."""
    rows = product.samples * local_rows(product.rows, shape.sequence)
    inner, columns, summed = product.inner, product.columns, 0.0
    if shape.tensor > 1 and product.shared == "colwise":
        columns = part(columns, 0, shape.tensor)
    elif shape.tensor > 1 and product.shared == "rowwise":
        inner = part(inner, 0, shape.tensor)
        summed = 2 * (shape.tensor - 1) / shape.tensor * rows * columns * product.element_size
    device = machine.device
    operations = 2.0 * rows * inner * columns
    moved = product.element_size * (rows * inner + inner * columns + rows * columns)
    computing = operations / (device.products * device.of_products) * machine.slowdown
    return max(computing, moved / machine.bandwidth), summed


def attention_seconds(call: CountedAttention, shape: MeshShape, machine: Machine) -> float:
    """Seconds of computing: of the rank's queries, to all keys of its sequence ranks; tiles of 128 queries fill the device in waves."""
    device = machine.device
    sharded = any(x.cut and x.total >= shape.sequence for x in call.keys)
    heads = part(call.heads, 0, shape.tensor)
    ranks = shape.sequence
    keys = sum(x.total for x in call.keys)
    if sharded:
        heads = part(heads, 0, shape.ulysses)
        held = [sum(x.held(rank, ranks) for x in call.queries) for rank in range(shape.ulysses)]
        queries = sum(held) + sum(x.whole(ranks) for x in call.queries)
    else:
        queries = local_rows(call.queries, ranks)
    operations = 2.0 * call.samples * heads * queries * keys * (call.head_dim + call.value_dim)
    if not operations:
        return 0.0
    blocks = shape.ring if sharded and shape.ring_method != "2d" else 1
    tiles = call.samples * heads * math.ceil(queries / 128)
    waves = math.ceil(tiles / device.multiprocessors) * device.multiprocessors / tiles
    moved = call.element_size * call.samples * heads * (queries * call.head_dim * 2 * blocks + 2 * keys * call.head_dim)
    computing = operations / (device.products * device.of_attention) * machine.slowdown * waves
    return max(computing, moved / machine.bandwidth)


def of_tensor_rank(call: CountedAttention, tensor: int) -> CountedAttention:
    """What the first of ``tensor`` ranks attends to, each of which has other heads."""
    heads, kv_heads = part(call.heads, 0, tensor), max(1, part(call.kv_heads, 0, tensor))
    return replace(call, heads=heads, kv_heads=kv_heads if heads % kv_heads == 0 else 1)


def exchange_seconds(
    call: CountedAttention, shape: MeshShape, machine: Machine, attending: float
) -> tuple[float, float]:
    """Seconds for which an attention call waits for what travels, and of copying and merging; ``attending``: of its computing."""
    own = of_tensor_rank(call, shape.tensor)
    sent = bytes_of_attention(own, shape.ring, shape.ulysses, 0, two_dims=shape.ring_method == "2d")
    if not sent.total:
        return 0.0, 0.0
    runtime, topology = machine.runtime, machine.topology
    waiting = copying = 0.0
    if shape.ulysses > 1:
        stride = shape.tensor
        waiting += topology.all_to_all(sent.to_heads, stride, shape.ulysses, runtime.messages)
        waiting += topology.all_to_all(sent.from_heads, stride, shape.ulysses)
        all_of_it = (sent.to_heads + sent.from_heads) * shape.ulysses / (shape.ulysses - 1)
        copying += 2 * runtime.copies * all_of_it / machine.bandwidth
    if shape.ring > 1:
        around, merged = _around_the_ring(own, sent, shape, machine, attending)
        waiting, copying = waiting + around, copying + merged
    link = topology.link(shape.tensor, shape.sequence)
    return waiting + (link.seconds(sent.mask) if sent.mask else 0.0), copying


def _around_the_ring(
    call: CountedAttention, sent: AttentionBytes, shape: MeshShape, machine: Machine, attending: float
) -> tuple[float, float]:
    """Seconds of waiting for keys, and of merging."""
    runtime, ring = machine.runtime, shape.ring
    link = machine.topology.link(shape.tensor * shape.ulysses, ring)
    heads = heads_of_ranks(call, shape.ulysses)[0][0]
    ranks = shape.sequence
    queries = sum(sum(x.held(rank, ranks) for x in call.queries) for rank in range(shape.ulysses))
    results = call.samples * heads * queries * call.value_dim
    if shape.ring_method == "2d":
        return _in_two_dims(call, sent, shape, machine, attending, results)
    merging = (ring - 1) * runtime.merge_passes * 4 * results / machine.bandwidth
    if shape.ring_method == "all-gather":
        return link.seconds(sent.around), merging
    # A step around the ring is an all-to-all of which all but one part is empty, or a send and a receive: NCCL has one way for them.
    hop = link.seconds(sent.around / (ring - 1), all_to_all=True)
    if not runtime.overlapped:
        return (ring - 1) * hop, merging
    hidden = min(hop, attending / ring)
    return (ring - 1) * (hop - hidden + sending_slows(hidden, machine)), merging


def sending_slows(hidden: float, machine: Machine) -> float:
    """Seconds that computing takes longer, for what travels for ``hidden`` seconds of it needs multiprocessors."""
    device = machine.device
    return hidden * min(1.0, _SENDING / device.multiprocessors) if device.multiprocessors > 1 else 0.0


def _in_two_dims(
    call: CountedAttention, sent: AttentionBytes, shape: MeshShape, machine: Machine, attending: float, own_results: int
) -> tuple[float, float]:
    """Attention2D, arXiv:2503.15758: seconds of waiting for queries, keys and partial results, and of packing and merging these.

    O(S / √P) bytes for ring ranks in √P rows. Of the r · c blocks of scores that a rank computes in r rows and c columns of ranks, 1 is
    of what it has itself, c - 1 more once queries are here, (c - 1) · (r - 1) once keys are, and r - 1 while results travel back.
    """
    rows, columns = choose_grid(shape.ring, call.heads, call.kv_heads)
    stride, topology, runtime = shape.tensor * shape.ulysses, machine.topology, machine.runtime
    along_rows, along_columns = topology.link(stride, columns), topology.link(stride * columns, rows)
    queries, keys, results = sent.grid
    exchanged = not runtime.gathered_grid
    to_row = along_rows.seconds(queries, all_to_all=exchanged) if columns > 1 else 0.0
    to_column = along_columns.seconds(keys, all_to_all=exchanged) if rows > 1 else 0.0
    back = topology.all_to_all(results, stride, columns)
    packing = 2 * columns * own_results * call.element_size / machine.bandwidth
    if not runtime.overlapped or runtime.gathered_grid:
        return to_row + to_column + back, packing
    # What the queries of the row see of the keys of the column is merged with what they see of this rank's; then those of other ranks.
    merges = (rows > 1) * columns + columns - 1
    packing += merges * runtime.merge_passes * 4 * own_results / machine.bandwidth
    block = attending / shape.ring
    with_own_keys = max(block, to_row) + (columns - 1) * block
    ready = max(with_own_keys, to_row + to_column) + (columns - 1) * (rows - 1) * block
    exposed = max(ready + back, ready + (rows - 1) * block) - attending
    return exposed + sending_slows(to_row + to_column + back - exposed, machine), packing


def call_seconds(own: CallWork, shape: MeshShape, machine: Machine) -> Seconds:
    """One call of the model, or of one share of its samples, on the ranks that share its tokens and weights."""
    products = attention = waiting = copying = 0.0
    runtime, host = machine.runtime, machine.host
    launches = own.launches * (host.fused if runtime.compiled else 1.0)
    reduced = machine.topology.link(1, shape.tensor)
    for event in own.events:
        if isinstance(event, Product):
            computing, summed = product_seconds(event, shape, machine)
            products += computing
            if summed:
                waiting += reduced.seconds(summed)
                launches += 1
        elif isinstance(event, CountedAttention):
            attending = attention_seconds(event, shape, machine)
            exposed, copied = exchange_seconds(event, shape, machine, attending)
            attention, waiting, copying = attention + attending, waiting + exposed, copying + copied
            if exposed or copied:
                launches += (shape.ulysses > 1) * runtime.ulysses_launches + _ring_launches(event, shape, runtime)
        elif shape.sequence > 1 and isinstance(event, Gathered):
            tokens = event.tokens.held(0, shape.sequence)
            link = machine.topology.link(shape.tensor, shape.sequence)
            waiting += link.seconds(event.bytes_per_token * tokens * (shape.sequence - 1))
            launches += 3
        elif isinstance(event, Summed | Edges) and event.tokens.held(0, shape.sequence):
            link = machine.topology.link(shape.tensor, shape.sequence)
            sizes = shape.ring, shape.ulysses
            sent = sent_of_sum(event, *sizes) if isinstance(event, Summed) else sent_of_edges(event, *sizes, rank=0)
            waiting += link.seconds(sent)
            launches += 3
    share = region_share(own, shape.sequence)
    moved = (own.moved[0] * share / shape.tensor + own.moved[1]) * (host.fused if runtime.compiled else 1.0)
    other = moved / machine.bandwidth + copying
    device = products + attention + other + waiting
    launching = launches * (host.compiled_launch if runtime.compiled else host.launch)
    return Seconds(products, attention, other, waiting, max(0.0, launching - device))


def _ring_launches(call: CountedAttention, shape: MeshShape, runtime: Runtime) -> int:
    if shape.ring_method != "2d" or shape.ring == 1:
        return shape.ring * runtime.ring_launches
    _, columns = choose_grid(shape.ring, call.heads, call.kv_heads)
    return runtime.grid_launches + columns - 2


def region_share(own: CallWork, ranks: int) -> float:
    """Of all tokens that are sharded somewhere in a call, and those that are beside them, the share that the first rank has."""
    longest: tuple[Tokens, ...] = max(
        (
            event.queries
            for event in own.events
            if isinstance(event, CountedAttention) and any(x.cut for x in event.queries)
        ),
        key=lambda tokens: sum(x.total for x in tokens),
        default=(),
    )
    total = sum(x.total for x in longest)
    return local_rows(longest, ranks) / total if total else 1.0
