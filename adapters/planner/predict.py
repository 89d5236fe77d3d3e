"""The memory, the traffic and the seconds of one mesh for one workload.

The prediction is of the first rank, as if all sizes divided evenly. Seconds leave out what is smaller than
their error, which benchmarks/results/planner_check.json has ("errors", "ratios").
"""

from __future__ import annotations

from dataclasses import dataclass

from para_core.adapters.planner.mesh import MeshShape, grid_of
from para_core.adapters.planner.prediction import Prediction, default_text_encoders
from para_core.adapters.planner.weights import Placement
from para_core.adapters.planner.work import AttentionWork, CallWork, Workload
from para_core.devices import Device, Link

# Bytes of device memory that a model cannot use: the CUDA context, NCCL's buffers and fragments of the
# allocator.
RESERVED = 6e9
# Seconds in which the host launches an operator, in eager code: a host on which 57 small FLUX blocks, 3,737
# launches, take 21.2 ms. On the host of benchmarks/results/host_cost.json ("unmodified") they take three
# times as long.
LAUNCH = 5.7e-6
# The same in a compiled graph, and the share of the operators, and of the bytes that they move, that a graph
# has. Both are estimates. What they are wrong by is in the ratios to published runs (PUBLISHED_RATIOS).
COMPILED_LAUNCH, FUSED = 4e-6, 0.35
# While communication overlaps with computation, it takes this share of an H100's multiprocessors
# (arXiv:2412.19437, section 3.2.2).
OVERLAP = 20 / 132
# The lse of a partial result has 4 bytes per query and head. Partial results that are merged have 4 per
# element.
_LSE_BYTES = _MERGED_BYTES = 4


@dataclass(frozen=True)
class Machine:
    """The devices on which a mesh runs, and the links ``inside`` a host of ``per_host`` ranks and ``between``
    hosts.

    Args:
        compiled (`bool`): Whether the transformer is compiled. Otherwise it runs eagerly.
        room (`float`, *optional*): Bytes that a rank may hold. Defaults to the memory of the device, less a
            reserve.
    """

    device: Device
    inside: Link
    between: Link
    per_host: int = 8
    compiled: bool = True
    room: float | None = None

    def link(self, stride: int, size: int) -> Link:
        """Return the link among ``size`` ranks that are ``stride`` ranks apart: ``between`` if they span hosts."""
        if stride * size <= self.per_host:
            return self.inside
        return self.between

    @property
    def rank_room(self) -> float:
        """Bytes of device memory that a rank can use for weights and activations."""
        if self.room is None:
            return self.device.memory - RESERVED
        return self.room


def predict(
    shape: MeshShape, work: Workload, machine: Machine, placement: Placement | None = None
) -> Prediction:
    """Return the prediction of one mesh.

    ``placement`` is that of the weights that the mesh does not shard, by default as in ``parallelize_pipe``.
    """
    placement = placement or Placement(default_text_encoders(shape))
    step = step_seconds(shape, work, machine, placement)
    return Prediction(
        shape=shape,
        placement=placement,
        step=step,
        seconds=step * work.steps + copy_seconds(shape, work, machine, placement),
        sent=traffic_of(shape, work),
        memory=memory_of(shape, work, placement),
        room=machine.rank_room,
        host_memory=work.weights.quantize(placement).in_host_memory(placement),
        problem=problem_of(shape, work, placement.quantize),
    )


def problem_of(shape: MeshShape, work: Workload, quantize: str | None = None) -> str:
    """Return why a mesh cannot run, or why it would leave ranks unused; empty if it can run."""
    if quantize is not None and shape.fsdp and quantize != "int8":
        return f"FSDP2 cannot gather weights in {quantize}"
    if quantize is not None and shape.tensor > 1 and quantize.endswith("-dynamic"):
        return f"{quantize} needs all features of a token, and a tensor rank holds a part"
    if shape.batch > 1 and work.branches == 1:
        return "there is one CFG branch, so the batch dim has nothing to split"
    if shape.tensor > 1 and work.weights.tensor == 0:
        return "the model has no tensor-parallel plan"
    if shape.pipe > 1 and work.weights.no_stages:
        return f"it cannot run in stages: {work.weights.no_stages}"
    if shape.pipe > max(1, len(work.weights.blocks)):
        return f"{len(work.weights.blocks)} blocks are too few for {shape.pipe} stages"
    if work.heads and work.heads % shape.tensor:
        return f"tensor {shape.tensor} does not divide {work.heads} heads"
    if work.heads and shape.ulysses * shape.tensor > work.heads:
        return f"ulysses {shape.ulysses} × tensor {shape.tensor} is more than {work.heads} heads"
    return ""


# -- Memory.


def memory_of(shape: MeshShape, work: Workload, placement: Placement | None = None) -> float:
    """Return the peak bytes of device memory of a rank: its weights, and the largest need of a step and of
    the rest.

    The rest is encoding the prompt, and the weights of a VAE that waits in host memory. A step needs memory
    for its activations at their peak, gathered weights, and buffers of exchanges.
    """
    placement = placement or Placement(default_text_encoders(shape))
    weights = work.weights.quantize(placement)
    call, _ = work.call_on_rank(shape.batch)
    # Tensor ranks split the activations between a column-sharded layer and the row-sharded layer after it.
    # These are taken as half of the peak. docs/planner.md has the errors of the predicted memory.
    share = token_share(call, shape.sequence) * (1 + 1 / shape.tensor) / 2
    denoising = call.peak[0] * share + call.peak[1] + weights.while_denoising(shape, placement)
    if shape.ulysses > 1:
        # The send and receive buffers of the exchanges before and after attention.
        denoising += (
            max((2 * bytes_of_tokens(x) for x in call.attention), default=0.0) / shape.sequence / shape.tensor
        )
    other = max(weights.while_encoding(placement), weights.while_decoding(placement))
    return weights.at_rest(shape, placement) + max(denoising, other)


def token_share(call: CallWork, ranks: int) -> float:
    """Return the share of a call's tokens that the first of ``ranks`` sequence ranks holds."""
    longest = call.longest
    if longest is None:
        return 1.0
    return -(-longest.queries // ranks) / longest.queries


def bytes_of_tokens(call: AttentionWork) -> float:
    """Return the bytes of the queries, keys, values and results of an attention call."""
    vectors = call.queries * call.heads + call.keys * call.key_heads
    return float(call.samples * call.element_size * call.width * vectors)


# -- Traffic.


def exchanged_bytes(call: AttentionWork, shape: MeshShape) -> tuple[float, float]:
    """Return the bytes that a rank sends in one attention call: over ``ulysses``, and along ``ring``.

    Over Ulysses it sends its part of the queries, keys, values and results, all but its own heads. Around a
    ring it passes on the keys and values of its Ulysses group to all but one. In Attention2D with r rows and
    c columns, queries and results go to c - 1 ranks, and keys and values to r - 1.
    """
    if not call.exchanges:
        return 0.0, 0.0
    over_ulysses = bytes_of_tokens(call) / shape.sequence / shape.tensor * (shape.ulysses - 1) / shape.ulysses
    # The bytes of one head of one token, shared by the ranks: times tokens and heads, those of one ring
    # block.
    unit = call.samples * call.element_size * call.width / (shape.ring * shape.ulysses * shape.tensor)
    keys = unit * call.keys * call.key_heads
    rows, columns = grid_of(shape.ring_method, shape.ring, call.heads, call.key_heads)
    queries_and_results = (
        unit * call.queries * call.heads * (1 + 2 * _LSE_BYTES / call.width / call.element_size)
    )
    return over_ulysses, (columns - 1) * queries_and_results + (rows - 1) * keys


def traffic_of(shape: MeshShape, work: Workload) -> float:
    """Return the bytes that the first rank sends per step."""
    call, calls = work.call_on_rank(shape.batch)
    sent = sum(x.calls * sum(exchanged_bytes(x, shape)) for x in call.attention)
    sent += call.returned * (shape.sequence - 1) / shape.sequence
    sent += summed_bytes(call, shape)
    # The attention calls are those of all stages, and each stage makes only its share of them.
    sent /= shape.pipe
    if shape.pipe > 1:
        sent += stream_bytes(call, shape)
    if shape.fsdp:
        sent += work.weights.transformer.gathered(shape.sequence)
    return calls * sent + call.returned * (shape.batch - 1)


def summed_bytes(call: CallWork, shape: MeshShape) -> float:
    """Return the bytes that a rank sends in one call to add up results of tensor ranks."""
    return 2 * (shape.tensor - 1) / shape.tensor * call.summed * token_share(call, shape.sequence)


def stream_bytes(call: CallWork, shape: MeshShape) -> float:
    """Return the bytes of the hidden states that a rank passes from block to block: those of the longest queries."""
    longest = call.longest
    if longest is None:
        return 0.0
    features = longest.heads * longest.width / 2
    return longest.samples * longest.queries / shape.sequence * features * longest.element_size


# -- Seconds.


def step_seconds(shape: MeshShape, work: Workload, machine: Machine, placement: Placement) -> float:
    """Return the seconds of one step with all CFG branches."""
    call, calls = work.call_on_rank(shape.batch)
    weights = work.weights.quantize(placement)
    compute = compute_seconds(call, shape, machine)
    attending = attention_seconds(call, shape, machine)
    waits = exchange_seconds(call, shape, machine, attending)
    along_sequence = machine.link(shape.tensor, shape.sequence)
    if shape.sequence > 1:
        waits += along_sequence.seconds(call.returned * (shape.sequence - 1) / shape.sequence)
    if shape.tensor > 1:
        # Each block adds up the results of attention and of its feed-forward layers.
        sums = 2 * sum(x.calls for x in call.attention if x.exchanges)
        waits += machine.link(1, shape.tensor).seconds(summed_bytes(call, shape), messages=sums)
    launches, launch = call.launches, LAUNCH
    if machine.compiled:
        launches, launch = round(FUSED * call.launches), COMPILED_LAUNCH
    host = max(0.0, launches * launch - compute - waits)
    if shape.pipe > 1:
        hops, link = shape.pipe - 1, machine.link(shape.ranks // shape.pipe, shape.pipe)
        waits += hops * (link.seconds(stream_bytes(call, shape)) + link.seconds(call.returned))
    if shape.fsdp:
        # The first block of a call cannot be gathered while another block computes.
        gathering = along_sequence.seconds(
            weights.transformer.gathered(shape.sequence), weights.transformer.parts
        )
        waits += gathering - min(gathering * (1 - 1 / weights.transformer.parts), compute)
    if placement.resident is not None:
        waits += max(0.0, weights.copied(placement) / machine.device.host_bandwidth - compute)
    between_branches = 0.0
    if shape.batch > 1:
        link = machine.link(shape.sequence * shape.tensor, shape.batch)
        between_branches = link.seconds(call.returned * (shape.batch - 1))
    return calls * (compute + waits + host) + between_branches


def compute_seconds(call: CallWork, shape: MeshShape, machine: Machine) -> float:
    """Return the seconds that a rank computes in one call: matrix products, attention, and all other operators."""
    device, share = machine.device, token_share(call, shape.sequence)
    operations = call.products[0] * share + call.products[1] - call.split * share * (1 - 1 / shape.tensor)
    moved = call.moved[0] * share / shape.tensor + call.moved[1]
    if machine.compiled:
        moved *= FUSED
    computing = operations / device.product_speed + moved / device.copy_speed
    return computing + attention_seconds(call, shape, machine)


def attention_seconds(call: CallWork, shape: MeshShape, machine: Machine) -> float:
    """Return the seconds that a rank attends in one call.
    Its heads may be one more than those of another rank.
    """
    operations = 0.0
    for x in call.attention:
        heads, queries = -(-x.heads // shape.tensor), x.queries / shape.sequence
        if x.exchanges:
            heads, queries = -(-heads // shape.ulysses), x.queries / shape.ring
        operations += 2.0 * x.calls * x.samples * heads * queries * x.keys * x.width
    return operations / machine.device.attention_speed


def exchange_seconds(call: CallWork, shape: MeshShape, machine: Machine, attending: float) -> float:
    """Return the seconds that the exchanges of attention add to a call in which a rank attends ``attending``
    seconds.

    Those of Ulysses come before and after attention, and tensors are copied around them. What travels along a
    ring is sent while the rank attends to the block that it holds. Partial results of the blocks are merged
    in float32.
    """
    over_ulysses = machine.link(shape.tensor, shape.ulysses)
    along_ring = machine.link(shape.tensor * shape.ulysses, shape.ring)
    waits = copied = traveling = 0.0
    for x in call.attention:
        to_heads, to_ring = exchanged_bytes(x, shape)
        if to_heads:
            waits += x.calls * over_ulysses.seconds(to_heads, messages=2, all_to_all=True)
            copied += x.calls * 4 * to_heads
        if to_ring:
            traveling += x.calls * along_ring.seconds(to_ring, messages=shape.ring - 1, all_to_all=True)
            results = x.samples * x.queries * x.heads * x.width / 2 / (shape.sequence * shape.tensor)
            copied += x.calls * (shape.ring - 1) * 3 * _MERGED_BYTES * results
    hidden = min(traveling, attending * (shape.ring - 1) / shape.ring)
    return waits + copied / machine.device.copy_speed + traveling - hidden + OVERLAP * hidden


def copy_seconds(shape: MeshShape, work: Workload, machine: Machine, placement: Placement) -> float:
    """Return the seconds in which components in host memory are copied, and text encoders gathered, in a generation."""
    device, weights = machine.device, work.weights.quantize(placement)
    seconds = 0.0
    if placement.takes_turns:
        return weights.in_host_memory(placement) / device.host_bandwidth
    if placement.encoders_wait:
        seconds += work.branches * weights.encoders.total / device.host_bandwidth
    elif placement.encoders == "fsdp" and shape.ranks > 1:
        link = machine.link(1, shape.ranks)
        seconds += work.branches * link.seconds(
            weights.encoders.gathered(shape.ranks), weights.encoders.parts
        )
    if placement.vae_waits:
        return seconds + weights.vae / device.host_bandwidth
    return seconds
