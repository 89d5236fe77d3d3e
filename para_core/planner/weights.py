"""Sharded weights: bytes per rank, and the communication that stages, patches and gathered blocks add to a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from para_core.planner.cost import Machine, MeshShape, Seconds, call_seconds, local_rows, overlap_cost
from para_core.planner.traffic import CallWork, CountedAttention, Operation, Product, Tokens
from para_core.weights.stages import balanced


@dataclass(frozen=True)
class ModuleBytes:
    """Bytes of one module's parameters.

    Args:
        sharded (`int`): Bytes that FSDP2 shards, in ``parts`` units that are gathered one after the other.
        at_once (`int`): Bytes of ``sharded`` that are gathered at the same time: two neighbouring blocks, and
            parameters outside blocks.
    """

    total: int = 0
    sharded: int = 0
    at_once: int = 0
    parts: int = 1

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
        other (`float`): Bytes of all other modules.
        blocks (`tuple[tuple[float, int], ...]`): Cost (in any unit) and bytes of each block of a transformer, in order.
        no_stages, no_patches (`str`, *optional*): Why the model cannot run in stages, or on patches. None if it can.
    """

    transformer: ModuleBytes
    transformers: int = 1
    tensor: int = 0
    encoders: ModuleBytes = ModuleBytes()
    other: float = 0.0
    blocks: tuple[tuple[float, int], ...] = ()
    no_stages: str | None = "its blocks are not described"
    no_patches: str | None = "its blocks are not described"

    def held(self, shape: MeshShape) -> float:
        """Return the bytes on the rank that holds the most."""
        if shape.fsdp:
            ranks = shape.sequence
            gathered = max(self.transformer.at_once, self.encoders.at_once) * (ranks - 1) / ranks
            at_rest = self.transformers * self.transformer.at_rest(ranks) + self.encoders.at_rest(ranks)
            return at_rest + gathered + self.other
        apart = self.tensor * (1 - 1 / shape.tensor) + self._of_other_stages(shape.pipe)
        return self.transformers * (self.transformer.total - apart) + self.encoders.total + self.other

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
