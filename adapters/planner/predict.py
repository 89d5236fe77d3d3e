"""The memory, the traffic and the seconds of one mesh for one workload.

The prediction is of the first rank, as if all sizes divided evenly. Seconds leave out what is smaller than
their error, which benchmarks/results/planner_check.json has ("errors", "ratios").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from para_core.adapters.planner.mesh import MeshShape, grid_of
from para_core.adapters.planner.weights import Placement, default_text_encoders
from para_core.adapters.planner.work import AttentionWork, CallWork, Workload
from para_core.devices import RESERVED, Device, Link

# Seconds in which the host launches an operator, in eager code: a host on which 57 small FLUX blocks, 3,737
# launches, take 21.2 ms. That of benchmarks/results/host_cost.json ("unmodified") takes three times as long.
LAUNCH = 5.7e-6
# The same in a compiled graph, and the share of the operators, and of the bytes that they move, that a graph
# has. Both are estimates. What they are wrong by is in the ratios to published runs (PUBLISHED_RATIOS).
COMPILED_LAUNCH, FUSED = 4e-6, 0.35
# While communication overlaps with computation, it takes this share of an H100's multiprocessors
# (arXiv:2412.19437, section 3.2.2).
OVERLAP = 20 / 132


@dataclass(frozen=True)
class Machine:
    """The devices of a mesh, and the links ``inside`` a host of ``per_host`` ranks and ``between`` hosts.

    Args:
        compiled (`bool`): Whether the transformer is compiled. Otherwise it runs eagerly.
        room (`float`, *optional*): Bytes that a rank may hold. Defaults to the device's less ``RESERVED``.
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


@dataclass(frozen=True)
class Prediction:
    """The prediction of one mesh.

    Args:
        placement (`Placement`): Where the weights are that the mesh does not shard.
        step (`float`): Seconds of one step with all CFG branches.
        seconds (`float`): Seconds of the whole generation.
        sent (`float`): Bytes that the first rank sends per step.
        memory (`float`): Peak bytes of device memory, of the rank that uses most.
        room (`float`): Bytes of device memory that a rank can use for weights and activations.
        host_memory (`float`): Bytes of weights that each rank keeps in host memory.
        problem (`str`): The reason why the mesh cannot run; empty if it can.
        why (`str`): The reason why another mesh is chosen; empty for the chosen mesh.
    """

    shape: MeshShape
    placement: Placement
    step: float
    seconds: float
    sent: float
    memory: float
    room: float
    host_memory: float
    problem: str = ""
    why: str = ""

    @property
    def fits(self) -> bool:
        """Whether the mesh fits into device memory."""
        return self.memory <= self.room

    @property
    def runs(self) -> bool:
        """Whether the mesh can run and fits into device memory."""
        return not self.problem and self.fits

    def __str__(self) -> str:
        """Return a short description: the mesh dims with several ranks, the ring method, and where the weights are."""
        placement, words = self.placement, [str(self.shape)]
        if placement.encoders != default_text_encoders(self.shape):
            words.append(f"text encoders {placement.encoders}")
        if placement.vae_waits:
            words.append(f"VAE {placement.vae}")
        if placement.resident is not None:
            words.append(f"blocks offloaded ({placement.resident} resident)")
        if placement.takes_turns:
            words.append("components offloaded")
        if placement.quantize is not None:
            words.append(f"{placement.quantize} (not exact)")
        return ", ".join(words)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``parallelize_pipe`` for this mesh, except ``mesh``.

        With components that take turns on the device there are none: that is a method of the pipeline.
        """
        shape, placement, options = self.shape, self.placement, dict[str, Any]()
        if shape.ring_method != "rotate":
            options["rotate_method"] = shape.ring_method
        if shape.fsdp:
            options["weights"] = "fsdp"
        elif shape.tensor > 1:
            options["weights"] = "tensor"
        if placement.encoders != default_text_encoders(shape):
            options["text_encoders"] = placement.encoders
        if placement.vae_waits:
            options["vae_placement"] = placement.vae
        if placement.resident is not None:
            options |= {"offload": "blocks", "resident_blocks": placement.resident}
        return options

    @property
    def mesh_options(self) -> dict[str, int]:
        """The keyword arguments of ``init_context_parallel_mesh`` for this mesh."""
        sizes = {name: n for name, n in self.shape.sizes.items() if n > 1 or name in ("ring", "ulysses")}
        return {f"max_{name}_dim_size": size for name, size in sizes.items()}

    @property
    def code(self) -> str:
        """The line of code that runs a pipeline ``pipe`` on this mesh."""
        quantized = self.placement.quantize
        if self.placement.takes_turns:
            return "pipe.enable_model_cpu_offload()  # one component at a time is on the device"
        if quantized is not None:
            return f"# {quantized}: para_core generate --quantize {quantized}, or from_pretrained_sharded(quantize=)"
        if self.shape.ranks == 1 and not self.options:
            return "pipe = pipe  # one device: unchanged"
        arguments = [f"{name}={value!r}" for name, value in self.options.items()]
        if self.shape.ranks > 1:
            sizes = ", ".join(f"{name}={size}" for name, size in self.mesh_options.items())
            arguments.insert(0, f"mesh=init_context_parallel_mesh({sizes})")
        return f"parallelize_pipe({', '.join(['pipe', *arguments])})"


def predict(
    shape: MeshShape, work: Workload, machine: Machine, placement: Placement | None = None
) -> Prediction:
    """Return the prediction of one mesh.

    ``placement`` is that of the weights that the mesh does not shard, by default as in ``parallelize_pipe``.
    """
    placement = placement or Placement(default_text_encoders(shape))
    weights = work.weights.quantize(placement)
    step = step_seconds(shape, work, machine, placement)
    waiting = weights.waiting(placement)
    loading = waiting / machine.device.host_bandwidth
    if placement.encoders == "fsdp":
        loading += machine.link(1, shape.ranks).seconds(weights.encoders.gathered(shape.ranks))
    return Prediction(
        shape=shape,
        placement=placement,
        step=step,
        seconds=step * work.steps + loading,
        sent=traffic_of(shape, replace(work, weights=weights)),
        memory=memory_of(shape, work, placement),
        room=machine.rank_room,
        host_memory=waiting + weights.transformers * weights.waiting_blocks(placement),
        problem=problem_of(shape, work, placement),
    )


def problem_of(shape: MeshShape, work: Workload, placement: Placement) -> str:
    """Return why a mesh cannot run, or why it would leave ranks unused; empty if it can run."""
    quantize, blocks = placement.quantize, len(work.weights.blocks)
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
    if shape.pipe > max(1, blocks):
        return f"{blocks} blocks are too few for {shape.pipe} stages"
    if work.heads and work.heads % shape.tensor:
        return f"tensor {shape.tensor} does not divide {work.heads} heads"
    if work.heads and shape.ulysses * shape.tensor > work.heads:
        return f"ulysses {shape.ulysses} × tensor {shape.tensor} is more than {work.heads} heads"
    if placement.resident is not None and not can_move_blocks(shape, work):
        return "its blocks cannot wait in host memory"
    return ""


def can_move_blocks(shape: MeshShape, work: Workload) -> bool:
    """Whether transformer blocks can wait in host memory: only whole blocks can be moved between host and device."""
    return shape.tensor == shape.pipe == 1 and not shape.fsdp and len(work.weights.blocks) > 1


def memory_of(shape: MeshShape, work: Workload, placement: Placement) -> float:
    """Return the peak bytes of device memory of a rank, which encodes the prompt, denoises, or decodes.

    Denoising needs memory for activations at their peak, gathered weights, and buffers of exchanges. The
    activations of encoding and decoding are not included.
    """
    weights = work.weights.quantize(placement)
    call, _ = work.call_on_rank(shape.batch)
    encoding, denoising, decoding = weights.while_running(shape, placement)
    # Tensor ranks split the activations between a column-sharded layer and the row-sharded layer after it.
    # These are taken as half of the peak. docs/planner.md has the errors of the predicted memory.
    denoising += call.peak[0] / shape.sequence * (1 + 1 / shape.tensor) / 2 + call.peak[1]
    if shape.ulysses > 1:
        # The send and receive buffers of the exchanges before and after attention.
        largest = max((bytes_of_tokens(x) for x in call.attention), default=0.0)
        denoising += 2 * largest / shape.sequence / shape.tensor
    return weights.at_rest(shape, placement) + max(encoding, denoising, decoding)


def bytes_of_tokens(call: AttentionWork) -> float:
    """Return the bytes of the queries, keys, values and results of an attention call."""
    vectors = call.queries * call.heads + call.keys * call.key_heads
    return float(call.samples * call.element_size * call.width * vectors)


def exchanged_bytes(call: AttentionWork, shape: MeshShape) -> tuple[float, float]:
    """Return the bytes that a rank sends in one attention call: over ``ulysses``, and along ``ring``.

    Over Ulysses it sends its part of the queries, keys, values and results, all but its own heads. Around a
    ring it passes on the keys and values of its Ulysses group to all but one. In Attention2D with r rows and
    c columns, queries and results go to c - 1 ranks, and keys and values to r - 1.
    """
    if not call.exchanges:
        return 0.0, 0.0
    ranks = shape.sequence * shape.tensor
    over_ulysses = bytes_of_tokens(call) / ranks * (shape.ulysses - 1) / shape.ulysses
    token = call.samples * call.element_size * call.width / ranks
    queries, keys = token * call.queries * call.heads, token * call.keys * call.key_heads
    rows, columns = grid_of(shape.ring_method, shape.ring, call.heads, call.key_heads)
    return over_ulysses, (columns - 1) * queries + (rows - 1) * keys


def traffic_of(shape: MeshShape, work: Workload) -> float:
    """Return the bytes that the first rank sends per step, without the model's outputs, which are small."""
    call, calls = work.call_on_rank(shape.batch)
    sent = sum(x.calls * sum(exchanged_bytes(x, shape)) for x in call.attention) + summed_bytes(call, shape)
    # The attention calls are those of all stages, and each stage makes only its share of them.
    sent /= shape.pipe
    if shape.pipe > 1:
        sent += stream_bytes(call, shape)
    if shape.fsdp:
        sent += work.weights.transformer.gathered(shape.sequence)
    return calls * sent


def summed_bytes(call: CallWork, shape: MeshShape) -> float:
    """Return the bytes that a rank sends in one call to add up results of tensor ranks."""
    return 2 * (shape.tensor - 1) / shape.tensor * call.summed / shape.sequence


def stream_bytes(call: CallWork, shape: MeshShape) -> float:
    """Return the bytes of the hidden states that a stage hands on: those of the largest queries."""
    of_queries = [x.samples * x.queries * x.heads * x.width / 2 * x.element_size for x in call.attention]
    return max(of_queries, default=0.0) / shape.sequence


def step_seconds(shape: MeshShape, work: Workload, machine: Machine, placement: Placement) -> float:
    """Return the seconds of one step with all CFG branches."""
    call, calls = work.call_on_rank(shape.batch)
    weights = work.weights.quantize(placement)
    compute = compute_seconds(call, shape, machine)
    waits = exchange_seconds(call, shape, machine)
    if shape.tensor > 1:
        # Each block adds up the results of attention and of its feed-forward layers.
        sums = 2 * sum(x.calls for x in call.attention if x.exchanges)
        waits += machine.link(1, shape.tensor).seconds(summed_bytes(call, shape), messages=sums)
    launching = call.launches * LAUNCH
    if machine.compiled:
        launching = FUSED * call.launches * COMPILED_LAUNCH
    host = max(0.0, launching - compute - waits)
    if shape.pipe > 1:
        link = machine.link(shape.ranks // shape.pipe, shape.pipe)
        waits += (shape.pipe - 1) * link.seconds(stream_bytes(call, shape))
    # The weights of the next block are gathered, or copied to the device, while a block computes.
    copying = weights.waiting_blocks(placement) / machine.device.host_bandwidth
    if shape.fsdp:
        copying = machine.link(1, shape.sequence).seconds(weights.transformer.gathered(shape.sequence))
    return calls * (compute + waits + host + max(0.0, copying - compute))


def compute_seconds(call: CallWork, shape: MeshShape, machine: Machine) -> float:
    """Return the seconds that a rank computes in one call: matrix products, attention, and all other operators."""
    # In published models 99.9 % of products and bytes are of layers that ranks share.
    moved = call.moved
    if machine.compiled:
        moved *= FUSED
    computing = call.products / machine.device.product_speed + moved / machine.device.copy_speed
    return computing / (shape.sequence * shape.tensor) + attention_seconds(call, shape, machine)


def attention_seconds(call: CallWork, shape: MeshShape, machine: Machine) -> float:
    """Return the seconds that a rank attends in one call, of the rank with the most heads."""
    operations = 0.0
    for x in call.attention:
        heads, queries = -(-x.heads // shape.tensor), x.queries / shape.sequence
        if x.exchanges:
            heads, queries = -(-heads // shape.ulysses), x.queries / shape.ring
        operations += 2.0 * x.calls * x.samples * heads * queries * x.keys * x.width
    return operations / machine.device.attention_speed


def exchange_seconds(call: CallWork, shape: MeshShape, machine: Machine) -> float:
    """Return the seconds that the exchanges of attention add to a call.

    Those of Ulysses come before and after attention, and tensors are copied around them. What travels along a
    ring is sent while the rank attends to the block that it holds. Partial results of the blocks are merged.
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
            # Partial results have 4 bytes per element. To merge two, both are read and one is written.
            results = 4 * x.samples * x.queries * x.heads * x.width / 2 / (shape.sequence * shape.tensor)
            copied += x.calls * (shape.ring - 1) * 3 * results
    hidden = min(traveling, attention_seconds(call, shape, machine) * (shape.ring - 1) / shape.ring)
    return waits + copied / machine.device.copy_speed + traveling - hidden + OVERLAP * hidden
