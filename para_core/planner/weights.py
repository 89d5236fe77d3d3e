"""Placed weights: bytes per rank, and the seconds that stages, patches, and gathered or copied blocks add to a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from para_core.planner.cost import Machine, MeshShape, Seconds, call_seconds, local_rows, overlap_cost
from para_core.planner.traffic import CallWork, CountedAttention, Operation, Product, Tokens
from para_core.weights.stages import balanced


@dataclass(frozen=True)
class Placement:
    """Places of weights, besides how the mesh shards those of the transformers.

    Args:
        text_encoders (`"replicate"`, `"fsdp"`, `"offload"` or `"first"`): As in ``parallelize_pipe``.
        resident (`int`, *optional*): Number of first blocks on the device; the others wait in host memory. None if all
            blocks are on the device.
        quantize (`str`, *optional*): Scheme of ``from_pretrained_sharded(quantize=...)``, which is not exact.
        vae (`"replicate"`, `"offload"` or `"first"`): As ``vae_placement`` of ``parallelize_pipe``.
    """

    text_encoders: Literal["replicate", "fsdp", "offload", "first"] = "replicate"
    resident: int | None = None
    quantize: str | None = None
    vae: Literal["replicate", "offload", "first"] = "replicate"

    @property
    def vae_waits(self) -> bool:
        """Whether the VAE is in host memory while it does not run."""
        return self.vae != "replicate"


@dataclass(frozen=True)
class ModuleBytes:
    """Bytes of one module's parameters.

    Args:
        sharded (`int`): Bytes that FSDP2 shards, in ``parts`` units that are gathered one after the other.
        at_once (`int`): Bytes that are gathered at the same time: a block, the buffer in which it was gathered, the
            next block, and parameters outside blocks.
        largest_layer (`int`): Bytes of the largest layer, which is on the device while it runs if the module waits in
            host memory.
    """

    total: int = 0
    sharded: int = 0
    at_once: int = 0
    parts: int = 1
    largest_layer: int = 0

    def at_rest(self, ranks: int) -> float:
        """Return the bytes per rank with FSDP2 over ``ranks`` ranks while the module does not run."""
        return self.total - self.sharded + self.sharded / ranks

    def gathered(self, ranks: int) -> float:
        """Return the bytes that a rank sends in one call to gather the module."""
        return self.sharded * (ranks - 1) / ranks


@dataclass(frozen=True)
class Weights:
    """Bytes of a pipeline's parameters.

    Args:
        transformer (`ModuleBytes`): One transformer.
        tensor (`int`): Bytes of one transformer that tensor ranks split.
        encoders (`ModuleBytes`): All text encoders.
        vae (`float`): Bytes of all autoencoders.
        other (`float`): Bytes of all other modules.
        blocks (`tuple[tuple[float, int], ...]`): Cost (in any unit) and bytes of each block of a transformer, in order.
        in_8_bits (`Weights`, *optional*): The same pipeline with the linear layers of its transformers in 8 bits.
        no_stages, no_patches (`str`, *optional*): Why the model cannot run in stages, or on patches. None if it can.
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
        """Return the bytes that the rank with the most holds on its device all the time."""
        vae = 0.0 if placement.vae_waits else self.vae
        return self._transformers(shape, placement) + self._encoders(shape, placement) + vae + self.other

    def while_denoising(self, shape: MeshShape) -> float:
        """Return the bytes that a rank holds in addition while a transformer runs, without activations."""
        return self.transformer.at_once if shape.fsdp else 0.0

    def while_encoding(self, shape: MeshShape, placement: Placement) -> float:
        """Return the bytes that a rank holds in addition while the text encoders run, without activations."""
        if placement.text_encoders == "fsdp":
            return self.encoders.at_once
        return self.encoders.largest_layer if placement.text_encoders in ("offload", "first") else 0.0

    def in_host_memory(self, placement: Placement) -> float:
        """Return the bytes that each rank keeps in host memory."""
        encoders = self.encoders.total if placement.text_encoders in ("offload", "first") else 0
        vae = self.vae if placement.vae_waits else 0.0
        return encoders + vae + self.transformers * self.copied(placement)

    def copied(self, placement: Placement) -> int:
        """Return the bytes of one transformer that wait in host memory, and that each call copies to the device."""
        return 0 if placement.resident is None else sum(size for _, size in self.blocks[placement.resident :])

    def _encoders(self, shape: MeshShape, placement: Placement) -> float:
        if placement.text_encoders == "replicate":
            return self.encoders.total
        return self.encoders.at_rest(shape.ranks) if placement.text_encoders == "fsdp" else 0.0

    def _transformers(self, shape: MeshShape, placement: Placement) -> float:
        if shape.fsdp:
            return self.transformers * self.transformer.at_rest(shape.sequence)
        apart = self.tensor * (1 - 1 / shape.tensor) + self._of_other_stages(shape.pipe)
        if placement.resident is not None:
            # One block runs, and the next one is copied.
            apart += self.copied(placement) - 2 * max(size for _, size in self.blocks)
        return self.transformers * (self.transformer.total - apart)

    def _of_other_stages(self, stages: int) -> int:
        if stages == 1 or stages > len(self.blocks):
            return 0
        ranges = balanced([cost for cost, _ in self.blocks], stages)
        own = max(sum(held for _, held in self.blocks[stage.start : stage.stop]) for stage in ranges)
        return sum(held for _, held in self.blocks) - own


# -- FSDP2 gathers a block while the previous one computes.


def with_gathered_weights(step: Seconds, weights: Weights, calls: int, shape: MeshShape, machine: Machine) -> Seconds:
    """Return ``step``, which consists of ``calls`` model calls, with the time to gather all blocks in each call."""
    transformer = weights.transformer
    link = machine.topology.link(shape.tensor, shape.sequence)
    sending = calls * link.seconds(transformer.gathered(shape.sequence), messages=transformer.parts)
    # The first block of a call has no previous block to overlap with.
    hidden = min(sending * (1 - 1 / transformer.parts), step.compute)
    exposed = sending - hidden + overlap_cost(hidden, machine)
    return replace(step, communication=step.communication + exposed)


def with_copied_weights(step: Seconds, weights: Weights, calls: int, placement: Placement, machine: Machine) -> Seconds:
    """Return ``step``, which consists of ``calls`` model calls, with the time to copy blocks from host memory."""
    copying = calls * weights.copied(placement) / machine.device.host_bandwidth
    return replace(step, communication=step.communication + max(0.0, copying - step.compute))


def encoding_seconds(
    encodings: int, weights: Weights, shape: MeshShape, placement: Placement, machine: Machine
) -> float:
    """Return the seconds that ``encodings`` calls of the text encoders wait for their weights."""
    encoders = weights.encoders
    if placement.text_encoders in ("offload", "first"):
        return encodings * encoders.total / machine.device.host_bandwidth
    if placement.text_encoders == "fsdp" and shape.ranks > 1:
        link = machine.topology.link(1, shape.ranks)
        return encodings * link.seconds(encoders.gathered(shape.ranks), messages=encoders.parts)
    return 0.0


# -- Stages: the mesh dim ``pipe``.


def _stream(own: CallWork, shape: MeshShape) -> float:
    """Return the bytes of the tokens that a block passes to the next one in a call."""
    calls = [x for x in own.operations if isinstance(x, CountedAttention)]
    widest = max(calls, key=lambda x: sum(y.total for y in x.queries), default=None)
    if widest is None:
        return 0.0
    tokens = local_rows(widest.queries, shape.sequence)
    return float(tokens * widest.samples * widest.heads * widest.head_dim * widest.element_size)


def sent_between_stages(own: CallWork, calls: int, shape: MeshShape) -> int:
    """Return the bytes that the first stage sends in ``calls`` calls, with or without patches."""
    return round(calls * _stream(own, shape)) if shape.pipe > 1 else 0


def staged(own: CallWork, calls: int, shape: MeshShape, machine: Machine) -> Seconds:
    """Return the seconds of ``calls`` calls in exact stages: each waits for the previous one, and all for the last."""
    # The hosts of waiting stages launch ahead, so only one stage's launches count.
    call = call_seconds(replace(own, launches=own.launches // shape.pipe), shape, machine)
    link, hops = machine.topology.link(shape.ranks // shape.pipe, shape.pipe), shape.pipe - 1
    between = hops * link.seconds(_stream(own, shape), all_to_all=True)
    result = link.seconds(hops * own.returned, messages=hops, all_to_all=True)
    return (call + Seconds(communication=between + result)).times(calls)


def patched(own: CallWork, calls: int, shape: MeshShape, machine: Machine) -> Seconds:
    """Return the seconds of ``calls`` calls with PipeFusion (arXiv:2405.14430).

    Each stage computes another patch; the tokens of a patch are sent while the next one is computed.
    """
    patches = shape.pipefusion.num_patches if shape.pipefusion is not None else 1
    patch = call_seconds(_patch_work(own, patches), replace(shape, pipe=1), machine)
    # With fewer patches than stages, some stages are idle.
    step = patch.times(calls * max(patches, shape.pipe) / shape.pipe)
    link = machine.topology.link(shape.ranks // shape.pipe, shape.pipe)
    sending = link.seconds(calls * _stream(own, shape), messages=calls * patches, all_to_all=True)
    return replace(step, communication=step.communication + max(0.0, sending - step.compute))


def _patch_work(own: CallWork, patches: int) -> CallWork:
    """Return the work of one patch: its queries attend to all keys."""

    def of_patch(tokens: tuple[Tokens, ...]) -> tuple[Tokens, ...]:
        return tuple(replace(x, total=-(-x.total // patches)) for x in tokens)

    def change(x: Operation) -> Operation:
        if isinstance(x, CountedAttention):
            return replace(x, queries=of_patch(x.queries))
        return replace(x, rows=of_patch(x.rows)) if isinstance(x, Product) else x

    return replace(own.map(change), moved=(own.moved[0] // patches, own.moved[1]))


def stale_key_bytes(own: CallWork, calls: int, stages: int) -> float:
    """Return the bytes of keys and values of the previous step that a stage keeps, for ``calls`` CFG branches."""
    total = sum(
        number * x.samples * x.element_size * x.kv_heads * (x.head_dim + x.value_dim) * sum(y.total for y in x.keys)
        for x, number in own.operations.items()
        if isinstance(x, CountedAttention)
    )
    return calls * total / stages
