"""The bytes of a pipeline's weights on a rank, by where they are placed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from para_core.adapters.planner.mesh import MeshShape
from para_core.option_values import TextEncoders, VaePlacement
from para_core.weights.balance import split_by_cost


@dataclass(frozen=True)
class Placement:
    """The placement of weights that the mesh does not shard.

    Args:
        encoders, vae (`str`): Placements of the text encoders and of the VAE, as in
            ``parallelize_pipe``.
        resident (`int`, *optional*): Number of transformer blocks, counted from the first, that stay on the
            device; the others wait in host memory. None if all blocks stay on the device.
        quantize (`str`, *optional*): Scheme of ``from_pretrained_sharded(quantize=...)``, which is not exact.
        takes_turns (`bool`): Whether each component is on the device only while it runs, all others in host
            memory (diffusers' ``enable_model_cpu_offload``).
    """

    encoders: TextEncoders = "replicate"
    resident: int | None = None
    quantize: str | None = None
    vae: VaePlacement = "replicate"
    takes_turns: bool = False

    @property
    def encoders_wait(self) -> bool:
        """Whether the text encoders wait in host memory while they are not running."""
        return self.encoders in ("offload", "first")

    @property
    def vae_waits(self) -> bool:
        """Whether the VAE waits in host memory while it is not running."""
        return self.vae != "replicate"


@dataclass(frozen=True)
class ModuleBytes:
    """The bytes of one module's parameters.

    Args:
        sharded (`float`): Bytes of the parameters that FSDP2 would shard, and gather in ``parts`` units.
        at_once (`float`): Bytes of gathered weights that FSDP2 would hold at the same time: a block, the
            buffer in which it was gathered, the next block, and parameters outside blocks.
        largest_layer (`float`): Bytes of the largest layer, the only one on the device if the module waits on
            the host.
    """

    total: float = 0
    sharded: float = 0
    at_once: float = 0
    parts: int = 1
    largest_layer: float = 0

    def at_rest(self, ranks: int) -> float:
        """Return the bytes that a rank holds between calls if FSDP2 shards the module over ``ranks`` ranks."""
        return self.total - self.sharded + self.sharded / ranks

    def gathered(self, ranks: int) -> float:
        """Return the bytes that a rank sends in one call to gather the module's weights over ``ranks`` ranks."""
        return self.sharded * (ranks - 1) / ranks

    def scale(self, factor: float) -> ModuleBytes:
        """Return the bytes of the module with weights of ``factor`` times the size."""
        return replace(
            self, total=factor * self.total, sharded=factor * self.sharded, at_once=factor * self.at_once
        )


@dataclass(frozen=True)
class Weights:
    """The bytes of a pipeline's parameters: of one of its ``transformers``, of all text encoders, and of the
    rest.

    Args:
        tensor (`float`): Bytes of one transformer's parameters that tensor parallelism would split.
        vae, other (`float`): Bytes of all autoencoders, and of all other modules.
        blocks (`tuple[tuple[float, float], ...]`): Relative cost and bytes of each block of a transformer, in
            order.
        in_8_bits (`float`): Bytes of a transformer whose linear layers have 8 bits, divided by
            ``transformer.total``.
        no_stages (`str`): The reason why the model cannot run in stages; empty if it can.
    """

    transformer: ModuleBytes
    transformers: int = 1
    tensor: float = 0
    encoders: ModuleBytes = ModuleBytes()
    vae: float = 0.0
    other: float = 0.0
    blocks: tuple[tuple[float, float], ...] = ()
    in_8_bits: float = 1.0
    no_stages: str = "its blocks are not described"

    def quantize(self, placement: Placement) -> Weights:
        """Return these weights in 8 bits if ``placement`` quantizes them."""
        factor = self.in_8_bits
        if placement.quantize is None:
            return self
        return replace(
            self,
            transformer=self.transformer.scale(factor),
            tensor=factor * self.tensor,
            blocks=tuple((cost, factor * size) for cost, size in self.blocks),
        )

    def at_rest(self, shape: MeshShape, placement: Placement) -> float:
        """Return the bytes of weights that are always on the device, on the rank that holds most."""
        if placement.takes_turns:
            return 0.0
        held = self._transformers(shape, placement) + self.other
        if placement.encoders == "replicate":
            held += self.encoders.total
        elif placement.encoders == "fsdp":
            held += self.encoders.at_rest(shape.ranks)
        if placement.vae_waits:
            return held
        return held + self.vae

    def while_encoding(self, placement: Placement) -> float:
        """Return the bytes of weights that a rank holds in addition to :meth:`at_rest` while the text encoders run."""
        if placement.takes_turns:
            return self.encoders.total
        if placement.encoders == "fsdp":
            return self.encoders.at_once
        if placement.encoders_wait:
            return self.encoders.largest_layer
        return 0.0

    def while_denoising(self, shape: MeshShape, placement: Placement) -> float:
        """Return the bytes of weights that a rank holds in addition to :meth:`at_rest` while the transformer runs."""
        if placement.takes_turns:
            return self.transformer.total
        if shape.fsdp:
            return self.transformer.at_once
        return 0.0

    def while_decoding(self, placement: Placement) -> float:
        """Return the bytes of weights that a rank holds in addition to :meth:`at_rest` while the VAE runs."""
        if placement.vae_waits or placement.takes_turns:
            return self.vae
        return 0.0

    def in_host_memory(self, placement: Placement) -> float:
        """Return the bytes of weights in the host memory of each rank: text encoders, VAE and transformer blocks."""
        if placement.takes_turns:
            return self.transformers * self.transformer.total + self.encoders.total + self.vae + self.other
        waiting = self.transformers * self.copied(placement)
        if placement.encoders_wait:
            waiting += self.encoders.total
        if placement.vae_waits:
            return waiting + self.vae
        return waiting

    def copied(self, placement: Placement) -> float:
        """Return the bytes of one transformer's blocks in host memory, which each call copies to the device."""
        if placement.resident is None:
            return 0.0
        return sum(size for _, size in self.blocks[placement.resident :])

    def _transformers(self, shape: MeshShape, placement: Placement) -> float:
        if shape.fsdp:
            return self.transformers * self.transformer.at_rest(shape.sequence)
        absent = self.tensor * (1 - 1 / shape.tensor)
        if 1 < shape.pipe <= len(self.blocks):
            stages = split_by_cost([cost for cost, _ in self.blocks], shape.pipe)
            largest = max(sum(size for _, size in self.blocks[stage.start : stage.stop]) for stage in stages)
            absent += sum(size for _, size in self.blocks) - largest
        if placement.resident is not None:
            # Two of the blocks in host memory are on the device at a time: the one that runs, and the next
            # one.
            absent += self.copied(placement) - 2 * max(size for _, size in self.blocks)
        return self.transformers * (self.transformer.total - absent)
