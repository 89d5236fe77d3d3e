"""The bytes of a pipeline's weights on a rank, by where they are placed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from para_core.adapters.planner.mesh import MeshShape
from para_core.option_values import TextEncoders, VaePlacement
from para_core.weights.balance import split_by_cost


@dataclass(frozen=True)
class Placement:
    """The placement of weights that the mesh does not shard.

    Args:
        encoders, vae (`str`): Placements of the text encoders and of the VAE, as in ``parallelize_pipe``.
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


def default_text_encoders(shape: MeshShape) -> Literal["replicate", "fsdp"]:
    """Return the placement of text encoders that ``parallelize_pipe`` chooses by default on this mesh."""
    if shape.tensor > 1 or shape.fsdp:
        return "fsdp"
    return "replicate"


@dataclass(frozen=True)
class ModuleBytes:
    """The bytes of one module's parameters.

    Args:
        sharded (`float`): Bytes of the parameters that FSDP2 would shard.
        at_once (`float`): Bytes of gathered weights that FSDP2 would hold at the same time: a block, the
            buffer in which it was gathered, the next block, and parameters outside blocks.
        largest_layer (`float`): Bytes of the largest layer, of a waiting module the only one on the device.
    """

    total: float = 0
    sharded: float = 0
    at_once: float = 0
    largest_layer: float = 0

    def at_rest(self, ranks: int) -> float:
        """Return the bytes that a rank holds between calls if FSDP2 shards the module over ``ranks`` ranks."""
        return self.total - self.sharded + self.sharded / ranks

    def gathered(self, ranks: int) -> float:
        """Return the bytes that a rank sends in one call to gather the module's weights over ``ranks`` ranks."""
        return self.sharded * (ranks - 1) / ranks


@dataclass(frozen=True)
class Weights:
    """The bytes of a pipeline's parameters: of one of its ``transformers``, all text encoders, and the rest.

    Args:
        tensor (`float`): Bytes of one transformer's parameters that tensor parallelism would split.
        vae, other (`float`): Bytes of all autoencoders, and of all other modules.
        blocks (`tuple[tuple[float, float], ...]`): Relative cost and bytes of each block of a transformer.
        in_8_bits (`float`): Bytes of a transformer with linear layers of 8 bits, over ``transformer.total``.
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
        if placement.quantize is None:
            return self
        factor, module = self.in_8_bits, self.transformer
        return replace(
            self,
            transformer=ModuleBytes(factor * module.total, factor * module.sharded, factor * module.at_once),
            tensor=factor * self.tensor,
            blocks=tuple((cost, factor * size) for cost, size in self.blocks),
        )

    def at_rest(self, shape: MeshShape, placement: Placement) -> float:
        """Return the bytes of weights that are always on the device, on the rank that holds most."""
        if placement.takes_turns:
            return 0.0
        held = self.transformers * self._transformer_at_rest(shape, placement) + self.other
        if placement.encoders == "replicate":
            held += self.encoders.total
        elif placement.encoders == "fsdp":
            held += self.encoders.at_rest(shape.ranks)
        if not placement.vae_waits:
            held += self.vae
        return held

    def while_running(self, shape: MeshShape, placement: Placement) -> tuple[float, float, float]:
        """Return the bytes on a rank beside :meth:`at_rest` while it encodes, denoises and decodes."""
        if placement.takes_turns:
            return self.encoders.total, self.transformer.total, self.vae
        encoding = denoising = decoding = 0.0
        if placement.encoders == "fsdp":
            encoding = self.encoders.at_once
        elif placement.encoders_wait:
            encoding = self.encoders.largest_layer
        if shape.fsdp:
            denoising = self.transformer.at_once
        if placement.vae_waits:
            decoding = self.vae
        return encoding, denoising, decoding

    def waiting(self, placement: Placement) -> float:
        """Return the bytes of components in host memory, which a generation copies to the device once."""
        if placement.takes_turns:
            return self.transformers * self.transformer.total + self.encoders.total + self.vae + self.other
        waiting = 0.0
        if placement.encoders_wait:
            waiting += self.encoders.total
        if placement.vae_waits:
            waiting += self.vae
        return waiting

    def waiting_blocks(self, placement: Placement) -> float:
        """Return the bytes of one transformer's blocks in host memory, which each call copies to the device."""
        if placement.resident is None:
            return 0.0
        return sum(size for _, size in self.blocks[placement.resident :])

    def _transformer_at_rest(self, shape: MeshShape, placement: Placement) -> float:
        if shape.fsdp:
            return self.transformer.at_rest(shape.sequence)
        absent = self.tensor * (1 - 1 / shape.tensor)
        if 1 < shape.pipe <= len(self.blocks):
            absent += sum(size for _, size in self.blocks) - _bytes_of_largest_stage(self.blocks, shape.pipe)
        if placement.resident is not None:
            # Two of the waiting blocks are on the device at a time: the one that runs, and the next one.
            absent += self.waiting_blocks(placement) - 2 * max((size for _, size in self.blocks), default=0)
        return self.transformer.total - absent


@cache
def _bytes_of_largest_stage(blocks: tuple[tuple[float, float], ...], num_stages: int) -> float:
    """Return the most bytes of blocks that a stage holds. Cached, because many meshes have as many stages."""
    stages = split_by_cost([cost for cost, _ in blocks], num_stages)
    return max(sum(size for _, size in blocks[stage.start : stage.stop]) for stage in stages)
