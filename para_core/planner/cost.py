"""Prediction of the seconds of one model call on a mesh, from link latency, bandwidth and fractions of peak speed.

The prediction is for the first rank, which has the most tokens and heads if they cannot be divided evenly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from para_core.attention.grid_shape import choose_grid
from para_core.planner.hardware import Device, Host, Topology
from para_core.planner.traffic import (
    AttentionBytes,
    CallWork,
    CountedAttention,
    CountedGather,
    MeshShape,
    Product,
    Tokens,
    bytes_of_attention,
    held_by,
    shard_size,
)

# While communication overlaps with computation, this number of an H100's 132 multiprocessors communicates and does not
# compute (arXiv:2412.19437, section 3.2.2).
_SENDING_MULTIPROCESSORS = 20


@dataclass(frozen=True)
class Runtime:
    """Properties of the software: by default of para_core, otherwise of software whose published figures are predicted.

    Args:
        compiled (`bool`): Whether the transformer is compiled. Otherwise it runs eagerly.
        messages (`int`): Number of all-to-alls that exchange queries, keys and values before an attention call.
        copies (`int`): Number of copies of the tensors of a Ulysses all-to-all before it, and again after it.
        overlapped (`bool`): Whether the keys of the next ring block are sent while attention to the current block is
            computed. In Attention2D, all tensors are sent while attention is computed with those that have arrived.
        merge_passes (`int`): Number of times that a partial result in float32 is read or written when it is merged.
        ulysses_launches, ring_launches (`int`): Number of launches of a Ulysses attention call, and of each ring step.
        grid_launches (`int`): Number of launches of an Attention2D call with two columns of ranks.
        gathered_grid (`bool`): Whether Attention2D all-gathers queries and keys in process groups of rows and columns,
            instead of using all-to-alls as para_core does.
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
    """The predicted seconds of a step or a call, by cause.

    ``communication`` is the part that does not overlap with computation. ``host`` is the time that the device waits for
    the host to launch operators.
    """

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
    """The hardware and software on which a mesh runs.

    Args:
        slowdown (`float`): Measured compute seconds of one device, divided by the predicted compute seconds. All
            predicted compute seconds are multiplied by this factor.
        room (`float`, *optional*): Bytes that a rank may hold. Defaults to the memory of the device, less a reserve.
    """

    device: Device
    topology: Topology
    host: Host = field(default_factory=Host)
    runtime: Runtime = field(default_factory=Runtime)
    slowdown: float = 1.0
    room: float | None = None

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth * self.device.of_bandwidth / self.slowdown


def local_rows(tokens: tuple[Tokens, ...], ranks: int) -> int:
    """Return the number of tokens on the first of ``ranks`` sequence ranks, including replicated tokens."""
    return sum(x.held(0, ranks) + x.replicated(ranks) for x in tokens)


def product_seconds(product: Product, shape: MeshShape, machine: Machine) -> tuple[float, float]:
    """Return the seconds that a rank computes a matrix product, and the bytes that it sends to sum the product.

    Products are summed over the mesh dim ``tensor`` if the tensor ranks split the weight along its input features.
    """
    rows = product.samples * local_rows(product.rows, shape.sequence)
    inner, columns, summed = product.inner, product.columns, 0.0
    if shape.tensor > 1 and product.tensor_split == "colwise":
        columns = shard_size(columns, 0, shape.tensor)
    elif shape.tensor > 1 and product.tensor_split == "rowwise":
        inner = shard_size(inner, 0, shape.tensor)
        summed = 2 * (shape.tensor - 1) / shape.tensor * rows * columns * product.element_size
    device = machine.device
    operations = 2.0 * rows * inner * columns
    moved = product.element_size * (rows * inner + inner * columns + rows * columns)
    computing = operations / (device.products * device.of_products) * machine.slowdown
    return max(computing, moved / machine.bandwidth), summed


def attention_seconds(call: CountedAttention, shape: MeshShape, machine: Machine) -> float:
    """Return the seconds that a rank computes attention of its queries to all keys.

    Tiles of 128 queries of one head are computed in waves, with one tile per multiprocessor. An incomplete last wave
    takes as long as a full one.
    """
    device = machine.device
    sharded = any(x.sharded and x.total >= shape.sequence for x in call.keys)
    heads = shard_size(call.heads, 0, shape.tensor)
    ranks = shape.sequence
    keys = sum(x.total for x in call.keys)
    if sharded:
        heads = shard_size(heads, 0, shape.ulysses)
        queries = held_by(call.queries, 0, ranks, shape.ulysses) + sum(x.replicated(ranks) for x in call.queries)
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
    """Return the attention call that the first of ``tensor`` tensor ranks computes, with its part of the heads."""
    heads, kv_heads = shard_size(call.heads, 0, tensor), max(1, shard_size(call.kv_heads, 0, tensor))
    return replace(call, heads=heads, kv_heads=kv_heads if heads % kv_heads == 0 else 1)


def exchange_seconds(
    call: CountedAttention, shape: MeshShape, machine: Machine, attending: float
) -> tuple[float, float]:
    """Return the seconds that an attention call waits for communication, and the seconds for copying and merging.

    ``attending`` is the call's compute time in seconds, with which part of the communication overlaps.
    """
    own = of_tensor_rank(call, shape.tensor)
    sent = bytes_of_attention(own, shape, 0)
    if not sent.total:
        return 0.0, 0.0
    runtime, topology = machine.runtime, machine.topology
    waiting = copying = 0.0
    if shape.ulysses > 1:
        stride = shape.tensor
        waiting += topology.all_to_all(sent.to_heads, stride, shape.ulysses, runtime.messages)
        waiting += topology.all_to_all(sent.from_heads, stride, shape.ulysses)
        total = (sent.to_heads + sent.from_heads) * shape.ulysses / (shape.ulysses - 1)
        copying += 2 * runtime.copies * total / machine.bandwidth
    if shape.ring > 1:
        ring_waiting, merging = _ring_seconds(own, sent, shape, machine, attending)
        waiting, copying = waiting + ring_waiting, copying + merging
    link = topology.link(shape.tensor, shape.sequence)
    return waiting + (link.seconds(sent.mask) if sent.mask else 0.0), copying


def _ring_seconds(
    call: CountedAttention, sent: AttentionBytes, shape: MeshShape, machine: Machine, attending: float
) -> tuple[float, float]:
    """Return the seconds that a ring attention call waits for keys, and the seconds for merging partial results."""
    runtime, ring = machine.runtime, shape.ring
    link = machine.topology.link(shape.tensor * shape.ulysses, ring)
    heads = shard_size(call.heads, 0, shape.ulysses)
    queries = held_by(call.queries, 0, shape.sequence, shape.ulysses)
    results = call.samples * heads * queries * call.value_dim
    if shape.ring_method == "2d":
        return _grid_seconds(call, sent, shape, machine, attending, results)
    merging = (ring - 1) * runtime.merge_passes * 4 * results / machine.bandwidth
    if shape.ring_method == "all-gather":
        return link.seconds(sent.around), merging
    # A ring step sends to one peer, by an all-to-all or by send and receive. NCCL needs the same time for both.
    hop = link.seconds(sent.around / (ring - 1), all_to_all=True)
    if not runtime.overlapped:
        return (ring - 1) * hop, merging
    hidden = min(hop, attending / ring)
    return (ring - 1) * (hop - hidden + overlap_cost(hidden, machine)), merging


def overlap_cost(hidden: float, machine: Machine) -> float:
    """Return the seconds that computation loses because ``hidden`` seconds of communication occupy multiprocessors."""
    device = machine.device
    return hidden * min(1.0, _SENDING_MULTIPROCESSORS / device.multiprocessors) if device.multiprocessors > 1 else 0.0


def _grid_seconds(
    call: CountedAttention, sent: AttentionBytes, shape: MeshShape, machine: Machine, attending: float, own_results: int
) -> tuple[float, float]:
    """Return the seconds that an Attention2D call waits for communication, and the seconds for packing and merging.

    Attention2D (arXiv:2503.15758) arranges P ring ranks in √P rows, so that each rank sends O(S / √P) bytes. With r
    rows and c columns, a rank computes r · c blocks of scores: one block of its own tokens, c - 1 blocks when the
    queries of its row have arrived, (c - 1) · (r - 1) blocks when the keys of its column have arrived, and r - 1 blocks
    while results are sent back.
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
    # A rank first merges its results over the keys of its column with its results over its own keys, then with the
    # results that the other ranks of its row send.
    merges = (rows > 1) * columns + columns - 1
    packing += merges * runtime.merge_passes * 4 * own_results / machine.bandwidth
    block = attending / shape.ring
    with_own_keys = max(block, to_row) + (columns - 1) * block
    ready = max(with_own_keys, to_row + to_column) + (columns - 1) * (rows - 1) * block
    exposed = max(ready + back, ready + (rows - 1) * block) - attending
    return exposed + overlap_cost(to_row + to_column + back - exposed, machine), packing


def call_seconds(own: CallWork, shape: MeshShape, machine: Machine) -> Seconds:
    """Return the seconds of one model call, or of this rank's part ``own`` of its samples, on the first rank."""
    products = attention = waiting = copying = 0.0
    runtime, host = machine.runtime, machine.host
    launches = own.launches * (host.fused if runtime.compiled else 1.0)
    reduced = machine.topology.link(1, shape.tensor)
    for operation, number in own.operations.items():
        if isinstance(operation, Product):
            computing, summed = product_seconds(operation, shape, machine)
            products += number * computing
            if summed:
                waiting += number * reduced.seconds(summed)
                launches += number
        elif isinstance(operation, CountedAttention):
            attending = attention_seconds(operation, shape, machine)
            exposed, copied = exchange_seconds(operation, shape, machine, attending)
            attention += number * attending
            waiting, copying = waiting + number * exposed, copying + number * copied
            if exposed or copied:
                of_ring = shape.ring * runtime.ring_launches
                if shape.ring_method == "2d" and shape.ring > 1:
                    _, columns = choose_grid(shape.ring, operation.heads, operation.kv_heads)
                    of_ring = runtime.grid_launches + columns - 2
                launches += number * ((shape.ulysses > 1) * runtime.ulysses_launches + of_ring)
        elif shape.sequence > 1 and (tokens := operation.tokens.held(0, shape.sequence)):
            if isinstance(operation, CountedGather):
                sent = operation.bytes_per_token * tokens * (shape.sequence - 1)
            else:
                sent = operation.sent(shape, rank=0)
            waiting += number * machine.topology.link(shape.tensor, shape.sequence).seconds(sent)
            launches += 3 * number
    share = region_share(own, shape.sequence)
    moved = (own.moved[0] * share / shape.tensor + own.moved[1]) * (host.fused if runtime.compiled else 1.0)
    other = moved / machine.bandwidth + copying
    device = products + attention + other + waiting
    launching = launches * (host.compiled_launch if runtime.compiled else host.launch)
    return Seconds(products, attention, other, waiting, max(0.0, launching - device))


def region_share(own: CallWork, ranks: int) -> float:
    """Return the fraction of a call's tokens that the first of ``ranks`` ranks holds; 1 if no tokens are sharded.

    Only the longest sharded sequence of queries is considered.
    """
    longest: tuple[Tokens, ...] = max(
        (x.queries for x in own.attention if any(y.sharded for y in x.queries)),
        key=lambda tokens: sum(x.total for x in tokens),
        default=(),
    )
    total = sum(x.total for x in longest)
    return local_rows(longest, ranks) / total if total else 1.0
