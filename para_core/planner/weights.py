"""Placement of weights: the choices, the bytes per rank, and the seconds that stages, patches and moved weights add."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, get_args

from para_core.distributed.mesh_shape import MESH_NAMES
from para_core.option_values import QUANTIZE, TEXT_ENCODERS, VAE_PLACEMENTS, TextEncoders, VaePlacement
from para_core.planner.cost import Machine, Seconds, call_seconds, local_rows, overlap_cost
from para_core.planner.traffic import CallWork, CountedAttention, MeshShape, Operation, Product, Tokens
from para_core.weights.balance import balanced
from para_core.weights.pipefusion_options import PipeFusion

# Ways to shard weights. Meshes that replicate all weights are always considered as well.
Sharing = Literal["tensor", "stages", "fsdp"]
SHARING: tuple[Sharing, ...] = get_args(Sharing)
# What a user may demand instead, with the names of parallelize_pipe; "replicate" is its default.
Demanded = Literal["replicate", "fsdp", "tensor"]
Offload = Literal["blocks", "model"]


@dataclass(frozen=True)
class Choices:
    """The user's choices besides the sizes of a mesh. The planner chooses what the user leaves at its default.

    ``weights`` is one way to shard weights that is demanded, or several that may be used. It and the other arguments
    are as in ``plan_mesh``, which documents them.

    Raises:
        ValueError, TypeError: An argument has an unknown value, or two exclude each other.
    """

    weights: Sequence[Sharing] | Demanded = SHARING
    text_encoders: TextEncoders | None = None
    vae_placement: VaePlacement | None = None
    offload: bool | Offload = True
    quantize: str | None = None
    pipefusion: PipeFusion | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.weights, str):
            _require_one_of("weights", self.weights, get_args(Demanded))
        elif not set(self.weights) <= set(SHARING):
            raise ValueError(
                f"weights is {self.weights!r}; expected one of {', '.join(map(repr, get_args(Demanded)))}, or a "
                f"sequence of some of {SHARING}, () to replicate them."
            )
        accepted = {
            "text_encoders": TEXT_ENCODERS,
            "vae_placement": VAE_PLACEMENTS,
            "quantize": QUANTIZE,
        }
        for name, values in accepted.items():
            if getattr(self, name) is not None:
                _require_one_of(name, getattr(self, name), values)
        if not isinstance(self.offload, bool):
            _require_one_of("offload", self.offload, get_args(Offload))
        self._require_compatible()
        if self.pipefusion is not None and not isinstance(self.pipefusion, PipeFusion):
            raise TypeError(
                f"pipefusion is {self.pipefusion!r}; expected a PipeFusion of para_core, or None for exact meshes "
                "alone."
            )

    def _require_compatible(self) -> None:
        """Raise ValueError if two choices exclude each other, as ``para_core generate`` does."""
        if self.offload in get_args(Offload) and self.demanded in ("fsdp", "tensor"):
            raise ValueError(f"weights is {self.demanded!r} with offload {self.offload!r}; expected 'replicate'.")
        for name in ("text_encoders", "vae_placement"):
            if self.offload == "model" and getattr(self, name) not in (None, "replicate"):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r} with offload 'model', which moves all components; leave one "
                    "out."
                )
        if self.demanded == "tensor" and self.mesh and "tensor" not in self.mesh:
            raise ValueError(
                "weights is 'tensor', but the mesh has no tensor dim; expected a size, such as --mesh tensor=2."
            )
        for dim, way in (("tensor", "tensor"), ("pipe", "replicate")):
            if self.mesh.get(dim, 1) > 1 and self.demanded not in (None, way):
                raise ValueError(
                    f"weights is {self.demanded!r}, but the mesh has a {dim} dim, which needs {way!r}; leave one out."
                )
        if self.quantize is not None and self.demanded == "fsdp" and self.quantize != "int8":
            raise ValueError(
                f"quantize is {self.quantize!r} with weights 'fsdp', which can gather weights in int8 only. Use "
                "quantize='int8', or replicate the weights."
            )
        if self.quantize is not None and self.demanded == "tensor" and self.quantize.endswith("-dynamic"):
            raise ValueError(
                f"quantize is {self.quantize!r} with weights 'tensor', where a rank holds a part of a token's "
                "features. Use quantize='int8', or replicate the weights."
            )
        for name, size in self.mesh.items():
            if name not in MESH_NAMES:
                raise ValueError(f"mesh has a dim {name!r}; expected some of {', '.join(MESH_NAMES)}.")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"mesh has {size!r} ranks along {name}; expected a positive integer.")

    @property
    def demanded(self) -> str | None:
        """The one way to shard weights that is demanded; None if the planner may choose."""
        return self.weights if isinstance(self.weights, str) else None

    @property
    def sharing(self) -> tuple[Sharing, ...]:
        """The ways to shard weights that meshes may use."""
        if self.demanded is None:
            allowed: set[str] = set(self.weights)
        else:
            allowed = {self.demanded} - {"replicate"}
        # A mesh that names these dims asks for them.
        allowed |= {"tensor"} if self.mesh.get("tensor", 1) > 1 else set()
        allowed |= {"stages"} if self.mesh.get("pipe", 1) > 1 else set()
        return tuple(way for way in SHARING if way in allowed)

    def fallbacks(self, weights: Weights, ranks: int) -> Iterator[Choices]:
        """Yield these choices, then alternatives to try if no mesh fits: VAE in host memory, int8 weights, and both."""
        placements, schemes = [self.vae_placement], [self.quantize]
        if self.vae_placement is None and weights.vae and self.offload != "model":
            placements.append("first" if ranks > 1 else "offload")
        if self.quantize is None and weights.in_8_bits is not None:
            schemes.append("int8")
        for quantize, placement in product(schemes, placements):
            yield replace(self, quantize=quantize, vae_placement=placement)


def _require_one_of(name: str, value: Any, values: Sequence[str]) -> None:
    if value not in values:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, values))}.")


@dataclass(frozen=True)
class Placement:
    """The placement of weights that the mesh does not shard.

    Args:
        text_encoders, vae (`str`): Placements of the text encoders and of the VAE, as in ``parallelize_pipe``.
        resident (`int`, *optional*): Number of transformer blocks, counted from the first, that stay on the device; the
            others wait in host memory. None if all blocks stay on the device.
        quantize (`str`, *optional*): Scheme of ``from_pretrained_sharded(quantize=...)``, which is not exact.
        takes_turns (`bool`): Whether each component is on the device only while it runs, all others in host memory
            (diffusers' ``enable_model_cpu_offload``).
    """

    text_encoders: TextEncoders = "replicate"
    resident: int | None = None
    quantize: str | None = None
    vae: VaePlacement = "replicate"
    takes_turns: bool = False

    @property
    def vae_waits(self) -> bool:
        """Whether the VAE waits in host memory while it is not running."""
        return self.vae != "replicate"


@dataclass(frozen=True)
class ModuleBytes:
    """The bytes of one module's parameters.

    Args:
        sharded (`int`): Bytes of the parameters that FSDP2 would shard, and gather in ``parts`` units.
        at_once (`int`): Bytes of gathered weights that FSDP2 would hold at the same time: a block, the buffer in which
            it was gathered, the next block, and parameters outside blocks.
        largest_layer (`int`): Bytes of the largest layer, the only one on the device if the module waits on the host.
    """

    total: int = 0
    sharded: int = 0
    at_once: int = 0
    parts: int = 1
    largest_layer: int = 0

    def at_rest(self, ranks: int) -> float:
        """Return the bytes that a rank holds between calls if FSDP2 shards the module over ``ranks`` ranks."""
        return self.total - self.sharded + self.sharded / ranks

    def gathered(self, ranks: int) -> float:
        """Return the bytes that a rank sends in one call to gather the module's weights over ``ranks`` ranks."""
        return self.sharded * (ranks - 1) / ranks


@dataclass(frozen=True)
class Weights:
    """The bytes of a pipeline's parameters: of one of its ``transformers``, of all text encoders, and of the rest.

    Args:
        tensor (`int`): Bytes of one transformer's parameters that tensor parallelism would split.
        vae, other (`float`): Bytes of all autoencoders, and of all other modules.
        blocks (`tuple[tuple[float, int], ...]`): Relative cost and bytes of each block of a transformer, in order.
        in_8_bits (`Weights`, *optional*): The same pipeline with the linear layers of its transformers in 8 bits.
        no_stages, no_patches (`str`, *optional*): The reason why the model cannot run in stages, or on patches; None if
            it can.
    """

    transformer: ModuleBytes
    transformers: int = 1
    tensor: int = 0
    encoders: ModuleBytes = ModuleBytes()
    vae: float = 0.0
    other: float = 0.0
    blocks: tuple[tuple[float, int], ...] = ()
    in_8_bits: Weights | None = None
    no_stages: str | None = "its blocks are not described"
    no_patches: str | None = "its blocks are not described"

    def at_rest(self, shape: MeshShape, placement: Placement) -> float:
        """Return the bytes of weights that are always on the device, on the rank that holds most."""
        if placement.takes_turns:
            return 0.0
        vae = 0.0 if placement.vae_waits else self.vae
        encoders = {"replicate": float(self.encoders.total), "fsdp": self.encoders.at_rest(shape.ranks)}
        return self._transformers(shape, placement) + encoders.get(placement.text_encoders, 0.0) + vae + self.other

    def while_encoding(self, placement: Placement) -> float:
        """Return the bytes of weights that a rank holds in addition to :meth:`at_rest` while the text encoders run."""
        if placement.takes_turns:
            return float(self.encoders.total)
        if placement.text_encoders == "fsdp":
            return self.encoders.at_once
        return self.encoders.largest_layer if placement.text_encoders in ("offload", "first") else 0.0

    def while_decoding(self, placement: Placement) -> float:
        """Return the bytes of weights that a rank holds in addition to :meth:`at_rest` while the VAE runs."""
        return self.vae if placement.vae_waits or placement.takes_turns else 0.0

    def in_host_memory(self, placement: Placement) -> float:
        """Return the bytes of weights in the host memory of each rank: text encoders, VAE and transformer blocks."""
        if placement.takes_turns:
            return self.transformers * self.transformer.total + self.encoders.total + self.vae + self.other
        encoders = self.encoders.total if placement.text_encoders in ("offload", "first") else 0
        vae = self.vae if placement.vae_waits else 0.0
        return encoders + vae + self.transformers * self.copied(placement)

    def copied(self, placement: Placement) -> int:
        """Return the bytes of one transformer's blocks in host memory, which each call copies to the device."""
        return 0 if placement.resident is None else sum(size for _, size in self.blocks[placement.resident :])

    def _transformers(self, shape: MeshShape, placement: Placement) -> float:
        if shape.fsdp:
            return self.transformers * self.transformer.at_rest(shape.sequence)
        apart = self.tensor * (1 - 1 / shape.tensor)
        if 1 < shape.pipe <= len(self.blocks):
            ranges = balanced([cost for cost, _ in self.blocks], shape.pipe)
            own = max(sum(held for _, held in self.blocks[stage.start : stage.stop]) for stage in ranges)
            apart += sum(held for _, held in self.blocks) - own
        if placement.resident is not None:
            # Two of the blocks in host memory are on the device at a time: the one that runs, and the next one.
            apart += self.copied(placement) - 2 * max(size for _, size in self.blocks)
        return self.transformers * (self.transformer.total - apart)


def with_gathered_weights(step: Seconds, weights: Weights, calls: int, shape: MeshShape, machine: Machine) -> Seconds:
    """Return the seconds of a step with FSDP2: those of ``step`` without, and the wait for weights in all ``calls``."""
    transformer = weights.transformer
    link = machine.topology.link(shape.tensor, shape.sequence)
    sending = calls * link.seconds(transformer.gathered(shape.sequence), messages=transformer.parts)
    # The first block of a call cannot be gathered while another block computes.
    hidden = min(sending * (1 - 1 / transformer.parts), step.compute)
    exposed = sending - hidden + overlap_cost(hidden, machine)
    return replace(step, communication=step.communication + exposed)


def with_copied_weights(step: Seconds, weights: Weights, calls: int, placement: Placement, machine: Machine) -> Seconds:
    """Return the seconds of a step with blocks in host memory, each of whose ``calls`` waits for copies of them."""
    copying = calls * weights.copied(placement) / machine.device.host_bandwidth
    return replace(step, communication=step.communication + max(0.0, copying - step.compute))


def encoding_seconds(
    encodings: int, weights: Weights, shape: MeshShape, placement: Placement, machine: Machine
) -> float:
    """Return the seconds that ``encodings`` calls of all text encoders wait for weights to be copied or gathered."""
    encoders = weights.encoders
    if placement.takes_turns:
        return encoders.total / machine.device.host_bandwidth
    if placement.text_encoders in ("offload", "first"):
        return encodings * encoders.total / machine.device.host_bandwidth
    if placement.text_encoders == "fsdp" and shape.ranks > 1:
        link = machine.topology.link(1, shape.ranks)
        return encodings * link.seconds(encoders.gathered(shape.ranks), messages=encoders.parts)
    return 0.0


def stream_bytes(own: CallWork, shape: MeshShape) -> float:
    """Return the bytes of hidden states that a rank passes from block to block: those of the longest queries."""
    widest = max(own.attention, key=lambda x: sum(y.total for y in x.queries), default=None)
    if widest is None:
        return 0.0
    tokens = local_rows(widest.queries, shape.sequence)
    return float(tokens * widest.samples * widest.heads * widest.head_dim * widest.element_size)


def staged(own: CallWork, calls: int, shape: MeshShape, machine: Machine) -> Seconds:
    """Return the seconds of ``calls`` model calls in exact stages: they work in turn, and the last sends the output."""
    # The host of a stage launches operators ahead while the stage waits, so only the launches of one stage add time.
    call = call_seconds(replace(own, launches=own.launches // shape.pipe), shape, machine)
    link, hops = machine.topology.link(shape.ranks // shape.pipe, shape.pipe), shape.pipe - 1
    between = hops * link.seconds(stream_bytes(own, shape), all_to_all=True)
    result = link.seconds(hops * own.returned, messages=hops, all_to_all=True)
    return (call + Seconds(communication=between + result)).times(calls)


def patched(own: CallWork, calls: int, shape: MeshShape, machine: Machine) -> Seconds:
    """Return the seconds of ``calls`` model calls with PipeFusion (arXiv:2405.14430).

    All stages work at the same time, on different patches. The tokens of a patch are sent while the next patch is
    computed.
    """
    patches = shape.pipefusion.num_patches if shape.pipefusion is not None else 1

    def of_patch(tokens: tuple[Tokens, ...]) -> tuple[Tokens, ...]:
        return tuple(replace(x, total=-(-x.total // patches)) for x in tokens)

    def change(x: Operation) -> Operation:
        # The queries of a patch attend to the keys of all patches.
        if isinstance(x, CountedAttention):
            return replace(x, queries=of_patch(x.queries))
        return replace(x, rows=of_patch(x.rows)) if isinstance(x, Product) else x

    work = replace(own.map(change), moved=(own.moved[0] // patches, own.moved[1]))
    patch = call_seconds(work, replace(shape, pipe=1), machine)
    # With fewer patches than stages, some stages have no patch to work on.
    step = patch.times(calls * max(patches, shape.pipe) / shape.pipe)
    link = machine.topology.link(shape.ranks // shape.pipe, shape.pipe)
    sending = link.seconds(calls * stream_bytes(own, shape), messages=calls * patches, all_to_all=True)
    return replace(step, communication=step.communication + max(0.0, sending - step.compute))


def stale_key_bytes(own: CallWork, calls: int, stages: int) -> float:
    """Return the bytes of keys and values that a stage stores for PipeFusion with ``calls`` model calls per step."""
    total = sum(
        number * x.samples * x.element_size * x.kv_heads * (x.head_dim + x.value_dim) * sum(y.total for y in x.keys)
        for x, number in own.operations.items()
        if isinstance(x, CountedAttention)
    )
    return calls * total / stages
