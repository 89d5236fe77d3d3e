"""The prediction of one mesh for one workload: seconds, bytes, memory, why it cannot run, and the code that uses it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from para_core.attention.grid_shape import choose_grid
from para_core.planner.cost import (
    Machine,
    Seconds,
    call_seconds,
    local_rows,
    of_tensor_rank,
    product_seconds,
    region_share,
)
from para_core.planner.traffic import (
    CallWork,
    CountedAttention,
    MeshShape,
    ModelCall,
    Operation,
    Product,
    sent_in_rounds,
)
from para_core.planner.weights import (
    Placement,
    Sharing,
    Weights,
    encoding_seconds,
    patched,
    staged,
    stale_key_bytes,
    stream_bytes,
    with_copied_weights,
    with_gathered_weights,
)
from para_core.weights.pipefusion_options import PipeFusion

# Bytes of device memory that a model cannot use: the CUDA context and the allocator's fragmentation take them.
RESERVED = 6e9
# Bytes of an NCCL communicator, mostly for buffers. An assumption: it depends on the links and on NCCL's channels.
COMMUNICATOR = 0.2e9


@dataclass(frozen=True)
class PublishedRun:
    """Seconds of one generation, end to end, that others published.

    Args:
        name (`str`): The software and the table.
        compiled (`bool`): Whether the transformer was compiled.
        source (`str`): Address of the table; empty if there is none.
    """

    name: str
    device: str
    ranks: int
    compiled: bool
    seconds: float
    source: str = ""


@dataclass(frozen=True)
class Workload:
    """The work of one generation with a pipeline.

    Args:
        calls (`Mapping[int, ModelCall]`): The operations of a transformer call, by the size of the ``batch`` mesh dim
            (1 or 2), which splits the samples of the call if possible.
        branches (`int`): Number of CFG branches per step, if the pipeline calls the model once per branch; else 1.
        encoder, decoder (`float`): Floating-point operations of the text encoders and of the VAE decoder.
        heads (`int`): Number of key heads of the transformer.
        frames (`int`): Number of frames of the result; 1 for an image.
        encodings (`int`): Number of times that each text encoder is called.
        published (`tuple[PublishedRun, ...]`): Published runs of the same generation.
        height, width (`int`): Pixels of the result; 0 if unknown.
        uncounted (`tuple[str, ...]`): Parts of the generation that are not counted, such as ``"decoding"``.
    """

    name: str
    calls: Mapping[int, ModelCall]
    branches: int
    steps: int
    weights: Weights
    encoder: float
    decoder: float
    heads: int
    frames: int = 1
    encodings: int = 1
    published: tuple[PublishedRun, ...] = ()
    uncounted: tuple[str, ...] = ()
    height: int = 0
    width: int = 0

    def of_rank(self, shape: MeshShape) -> tuple[CallWork, int]:
        """Return the work of a transformer call on the first rank of a mesh, and the number of its calls per step."""
        parts = self.calls[shape.batch].parts
        return parts[0], self.branches if len(parts) > 1 else -(-self.branches // shape.batch)

    def quantized(self, placement: Placement) -> Workload:
        """Return this work, with weights in 8 bits if ``placement`` quantizes them."""
        weights = None if placement.quantize is None else self.weights.in_8_bits
        return self if weights is None else replace(self, weights=weights)


@dataclass(frozen=True)
class MeshPrediction:
    """The prediction for one mesh.

    Args:
        step (`Seconds`): Seconds of one step with all CFG branches. With PipeFusion this is a step in patches.
        encoder, decoder (`float`): Seconds of the text encoders and of the VAE decoder, which every rank runs.
        seconds (`float`): Seconds of the whole generation.
        sent (`int`): Bytes that the first rank sends per step.
        memory (`float`): Peak bytes of device memory, of the rank that uses most.
        room (`float`): Bytes of device memory that a rank can use for weights and activations.
        problem (`str`, *optional*): The reason why the mesh cannot run; None if it can.
        why (`str`): The reason why the mesh is slower than the best mesh; empty for the best mesh.
        placement (`Placement`): The placement of weights that the mesh does not shard.
        host_memory (`float`): Bytes of weights that each rank keeps in host memory.
    """

    shape: MeshShape
    step: Seconds
    encoder: float
    decoder: float
    seconds: float
    sent: int
    memory: float
    room: float = 0.0
    problem: str | None = None
    why: str = ""
    placement: Placement = field(default_factory=Placement)
    host_memory: float = 0.0

    def __str__(self) -> str:
        """Return a short description: the mesh dims with several ranks, the ring method, and where the weights are."""
        shape, placement = self.shape, self.placement
        sizes = {name: getattr(shape, name) for name in ("pipe", "batch", "ring", "ulysses", "tensor")}
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1] or ["one rank"]
        words += ["2d"] * (shape.ring_method == "2d" and shape.ring > 1) + ["fsdp"] * shape.fsdp
        words += ["PipeFusion (not exact)"] * (shape.pipefusion is not None)
        if placement.text_encoders != default_text_encoders(shape):
            words.append(f"text encoders {placement.text_encoders}")
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
    def fits(self) -> bool:
        """Whether the mesh fits into device memory."""
        return self.memory <= self.room

    @property
    def runs(self) -> bool:
        """Whether the mesh can run and fits into device memory."""
        return self.problem is None and self.fits

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``parallelize_pipe`` for this mesh, except ``mesh``.

        With components that take turns on the device there are none: that is a method of the pipeline.
        """
        shape, options = self.shape, dict[str, Any]()
        if shape.ring_method != "rotate":
            options["rotate_method"] = "2d" if shape.ring_method == "2d" else "allgather"
        if shape.tensor > 1 or shape.fsdp:
            options["weights"] = "fsdp" if shape.fsdp else "tensor"
        if self.placement.text_encoders != default_text_encoders(shape):
            options["text_encoders"] = self.placement.text_encoders
        if self.placement.vae_waits:
            options["vae_placement"] = self.placement.vae
        if self.placement.resident is not None:
            options |= {"offload": "blocks", "resident_blocks": self.placement.resident}
        if shape.pipefusion is not None:
            options["pipefusion"] = shape.pipefusion
        return options

    @property
    def command_options(self) -> dict[str, str]:
        """The options of ``para_core generate`` for this mesh, without ``--ranks``, by name without dashes.

        With blocks in host memory the command places text encoders there, too, unless it is told otherwise.
        """
        placement, options = self.placement, dict(self.options)
        if placement.takes_turns:
            options["offload"] = "model"
        if placement.resident is not None:
            options.pop("text_encoders", None)
            options |= {} if placement.text_encoders == "offload" else {"text_encoders": placement.text_encoders}
        if self.shape.pipefusion is not None:
            options["pipefusion"] = self.shape.pipefusion.num_patches
        if placement.quantize is not None:
            options["quantize"] = placement.quantize
        sizes = [f"{name[len('max_') : -len('_dim_size')]}={size}" for name, size in self.mesh_options.items()]
        mesh = {"mesh": ",".join(sizes)} if self.shape.ranks > 1 else {}
        return mesh | {name.replace("_", "-"): str(value) for name, value in options.items()}

    @property
    def mesh_options(self) -> dict[str, int]:
        """The keyword arguments of ``init_context_parallel_mesh`` for this mesh."""
        sizes = {name: getattr(self.shape, name) for name in ("pipe", "batch", "ring", "ulysses", "tensor")}
        return {f"max_{name}_dim_size": n for name, n in sizes.items() if n > 1 or name in ("ring", "ulysses")}

    @property
    def call(self) -> str:
        """The line of code that parallelizes a pipeline ``pipe`` over this mesh."""
        quantized = self.placement.quantize
        if self.placement.takes_turns:
            return "pipe.enable_model_cpu_offload()  # one component at a time is on the device"
        if quantized is not None:
            return f"# {quantized}: para_core generate --quantize {quantized}, or from_pretrained_sharded(quantize=)"
        if self.shape.ranks == 1 and not self.options:
            return "pipe = pipe  # one device: unchanged"
        mesh = "" if self.shape.ranks == 1 else f"mesh=init_context_parallel_mesh({_arguments(self.mesh_options)})"
        return f"parallelize_pipe({', '.join(['pipe', *filter(None, [mesh, _arguments(self.options)])])})"


def _arguments(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in named.items())


def shapes(ranks: int, *, sharing: Sequence[Sharing] = (), pipefusion: PipeFusion | None = None) -> Iterator[MeshShape]:
    """Yield the shape of every possible mesh of ``ranks`` ranks, without FSDP2. The size of ``batch`` is 1 or 2.

    Meshes with a ``tensor`` dim are included if ``"tensor"`` is in ``sharing``, meshes with a ``pipe`` dim if
    ``"stages"`` is, and meshes with PipeFusion if its options are given.
    """
    for batch in (1, 2):
        if ranks % batch:
            continue
        for stages in divisors(ranks // batch) if "stages" in sharing else [1]:
            # A pipeline cannot use stages and tensor parallelism together.
            for size in divisors(ranks // batch) if "tensor" in sharing and stages == 1 else [1]:
                left = ranks // (batch * stages * size)
                for ring in divisors(left):
                    yield MeshShape(batch, stages, ring, left // ring, size)
                    # Leave out Attention2D with one column, which is the same as a ring with all-gather.
                    if choose_grid(ring, 1, 1)[1] > 1:
                        yield MeshShape(batch, stages, ring, left // ring, size, "2d")
        if pipefusion is not None and ranks > batch:
            # With PipeFusion, only plan meshes with one rank per stage.
            yield MeshShape(batch, ranks // batch, pipefusion=pipefusion)


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [size for size in range(1, number + 1) if number % size == 0]


def default_text_encoders(shape: MeshShape) -> Literal["replicate", "fsdp"]:
    """Return the placement of text encoders that ``parallelize_pipe`` chooses by default on this mesh."""
    return "fsdp" if shape.tensor > 1 or shape.fsdp else "replicate"


def problem_of(shape: MeshShape, work: Workload, quantize: str | None = None) -> str | None:
    """Return why a mesh cannot run, or why it would leave ranks unused; None if it can run."""
    if quantize is not None and shape.fsdp and quantize != "int8":
        return f"FSDP2 cannot gather weights in {quantize}"
    if quantize is not None and shape.tensor > 1 and quantize.endswith("-dynamic"):
        return f"{quantize} needs all features of a token, and a tensor rank holds a part"
    if shape.batch > 1 and work.branches == 1 and len(work.calls[2].parts) == 1:
        return "there is one CFG branch, so the batch dim has nothing to split"
    if shape.tensor > 1 and work.weights.tensor == 0:
        return "the model has no tensor-parallel plan"
    if shape.pipe > 1 and work.weights.no_stages is not None:
        return f"it cannot run in stages: {work.weights.no_stages}"
    if shape.pipe > max(1, len(work.weights.blocks)):
        return f"{len(work.weights.blocks)} blocks are too few for {shape.pipe} stages"
    if shape.pipefusion is not None and work.weights.no_patches is not None:
        return f"it cannot run on patches: {work.weights.no_patches}"
    if work.heads % shape.tensor:
        return f"tensor {shape.tensor} does not divide {work.heads} heads"
    if shape.ulysses * shape.tensor > work.heads:
        return f"ulysses {shape.ulysses} × tensor {shape.tensor} is more than {work.heads} heads"
    return None


def communicators(shape: MeshShape) -> int:
    """Return the largest number of NCCL communicators that a rank of a mesh holds.

    There is one communicator for each mesh dim with several ranks, and one for FSDP2. With pipeline stages, each pair
    of a sender and a receiver has one of its own. The last stage takes part in most pairs: it receives tokens from the
    stage before it, and sends its output to all other stages.

    >>> communicators(MeshShape(ring=2, ulysses=4)), communicators(MeshShape(pipe=4, ulysses=2))
    (2, 6)
    """
    dims = (shape.batch, shape.pipe, shape.ring, shape.ulysses, shape.tensor)
    edges = shape.pipe if shape.pipe > 1 else 0
    return sum(size > 1 for size in dims) + edges + shape.fsdp


def room_of(machine: Machine, shape: MeshShape) -> float:
    """Return how many bytes of device memory a rank can use for weights and activations."""
    if machine.room is not None:
        return machine.room
    return machine.device.memory - RESERVED - COMMUNICATOR * communicators(shape)


def predict(shape: MeshShape, work: Workload, machine: Machine, placement: Placement | None = None) -> MeshPrediction:
    """Return the predicted seconds, bytes and memory of one mesh.

    ``placement`` is that of the weights that the mesh does not shard, by default as in ``parallelize_pipe``.
    """
    placement = placement or Placement(default_text_encoders(shape))
    work = work.quantized(placement)
    own, passes = work.of_rank(shape)
    if shape.pipe > 1:
        exact_step = staged(own, passes, shape, machine)
    else:
        exact_step = call_seconds(own, shape, machine).times(passes)
    if shape.fsdp and shape.pipe == 1:
        exact_step = with_gathered_weights(exact_step, work.weights, passes, shape, machine)
    if placement.resident is not None:
        exact_step = with_copied_weights(exact_step, work.weights, passes, placement, machine)
    step = exact_step if shape.pipefusion is None else patched(own, passes, shape, machine)
    if shape.batch > 1:
        link = machine.topology.link(shape.sequence * shape.tensor, shape.batch)
        exchanged = Seconds(communication=link.seconds(own.returned * (shape.batch - 1)))
        step, exact_step = step + exchanged, exact_step + exchanged
    fusion = shape.pipefusion
    exact_steps = sum(fusion.is_whole(index, work.steps) for index in range(work.steps)) if fusion else 0
    device = machine.device
    encoder = work.encoder / (device.products * device.of_products) * machine.slowdown
    encoder += encoding_seconds(work.encodings, work.weights, shape, placement, machine)
    decoder = work.decoder / (device.products * device.of_convolutions) * machine.slowdown
    if placement.vae_waits or placement.takes_turns:
        decoder += work.weights.vae / device.host_bandwidth
    denoising = step.total * (work.steps - exact_steps) + exact_step.total * exact_steps
    if placement.takes_turns:
        denoising += work.weights.transformers * work.weights.transformer.total / device.host_bandwidth
    return MeshPrediction(
        shape,
        step,
        encoder,
        decoder,
        denoising + encoder + decoder,
        _sent(shape, work, machine),
        memory_of(shape, work, placement),
        room_of(machine, shape),
        problem_of(shape, work, placement.quantize),
        placement=placement,
        host_memory=work.weights.in_host_memory(placement),
    )


def with_most_resident(row: MeshPrediction, work: Workload) -> Placement | None:
    """Return the placement of ``row`` with as many transformer blocks on the device as fit; None if none fit.

    Also return None for a mesh that shards weights, because only whole blocks can be moved between host and device.
    """
    shape, placement = row.shape, row.placement
    if shape.fsdp or shape.tensor > 1 or shape.pipe > 1 or not work.weights.blocks:
        return None

    def is_too_large(resident: int) -> bool:
        return memory_of(shape, work, replace(placement, resident=resident)) > row.room

    resident = bisect.bisect_left(range(len(work.weights.blocks)), True, key=is_too_large)
    return replace(placement, resident=resident - 1) if resident else None


def _sent(shape: MeshShape, work: Workload, machine: Machine) -> int:
    """Return the bytes that the first rank sends per step: for attention, gathers, sums, and between stages."""
    call, (part, passes) = work.calls[shape.batch], work.of_rank(shape)

    def of_rank(x: Operation) -> Operation:
        return of_tensor_rank(x, shape.tensor) if isinstance(x, CountedAttention) else x

    # As in a later step than the first, in which all ranks compute the calls whose sizes are not foreseen.
    later = replace(call, parts=[part.map(of_rank) for part in call.parts], foreseen=True)
    own = sent_in_rounds([[later] * work.branches], shape, 0, apart=work.branches > 1)
    summed = sum(
        number * product_seconds(x, shape, machine)[1]
        for x, number in part.operations.items()
        if isinstance(x, Product)
    )
    gathered = passes * work.weights.transformer.gathered(shape.sequence) if shape.fsdp else 0.0
    between_stages = round(passes * stream_bytes(part, shape)) if shape.pipe > 1 else 0
    # The attention calls are those of all stages, and each stage makes only its share of them.
    return own // shape.pipe + round(passes * summed + gathered) + between_stages


def memory_of(shape: MeshShape, work: Workload, placement: Placement | None = None) -> float:
    """Return the peak bytes of device memory of a rank: its weights, and the largest need of a step and of the rest.

    The rest is encoding the prompt, and the weights of a VAE that waits in host memory. A step needs memory for its
    activations at their peak, gathered weights, buffers of exchanges, and keys stored by PipeFusion.
    """
    placement = placement or Placement(default_text_encoders(shape))
    weights = work.quantized(placement).weights
    own, passes = work.of_rank(shape)
    # Tensor ranks split the activations between a column-sharded layer and the row-sharded layer after it. These are
    # about half of the peak (measured: 26 to 70 %).
    share = region_share(own, shape.sequence) * (1 + 1 / shape.tensor) / 2
    kept = stale_key_bytes(own, passes, shape.pipe) if shape.pipefusion is not None else 0.0

    def exchanged(x: CountedAttention) -> float:
        # The send and receive buffers of a Ulysses exchange of q, k, v and output.
        rows = local_rows(x.queries, shape.sequence) * x.heads + local_rows(x.keys, shape.sequence) * x.kv_heads
        return 2.0 * x.samples * x.element_size * (x.head_dim + x.value_dim) * rows

    attention = own.attention if shape.ulysses > 1 else []
    largest = max((exchanged(of_tensor_rank(x, shape.tensor)) for x in attention), default=0.0)
    gathered = weights.transformer.at_once if shape.fsdp else 0.0
    if placement.takes_turns:
        gathered = float(weights.transformer.total)
    denoising = gathered + own.peak[0] * share + own.peak[1] + kept + largest
    other = max(weights.while_encoding(placement), weights.while_decoding(placement))
    return weights.at_rest(shape, placement) + max(denoising, other)
