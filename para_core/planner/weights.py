"""Weights that no rank holds alone: bytes of each rank, and what stages, patches and gathered blocks add to a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from para_core.planner.cost import Machine, MeshShape, Seconds, call_seconds, local_rows, sending_slows
from para_core.planner.traffic import CallWork, CountedAttention, Product, Tokens
from para_core.weights.stages import balanced


@dataclass(frozen=True)
class ModuleBytes:
    """Of the parameters of one module.

    Args:
        total: all of them.
        sharded: by FSDP2, in ``parts`` that are gathered one after the other.
        at_once: of ``sharded``, what is gathered while the module runs: two neighbours, and what is outside of blocks.
    """

    total: int = 0
    sharded: int = 0
    at_once: int = 0
    parts: int = 1

    def at_rest(self, ranks: int) -> float:
        """On each of ``ranks`` ranks that share them, while the module does not run."""
        return self.total - self.sharded + self.sharded / ranks

    def gathered(self, ranks: int) -> float:
        """That a rank sends to others in one call."""
        return self.sharded * (ranks - 1) / ranks


@dataclass(frozen=True)
class Weights:
    """Of a pipeline.

    Args:
        transformer: of each of its ``transformers``, which take turns.
        tensor: of one transformer, bytes that tensor ranks share.
        encoders: of text, together; ``other``: bytes of all else.
        blocks: of one transformer, in their order: the cost of computing one, in any unit, and its bytes. Stages share them.
        no_stages, no_patches: why the model does not run in stages, or on patches; None: it does.
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
        """Bytes of the rank that holds most."""
        if shape.fsdp:
            ranks = shape.sequence
            at_once = max(self.transformer.at_once, self.encoders.at_once) * (ranks - 1) / ranks
            return (
                self.transformers * self.transformer.at_rest(ranks)
                + self.encoders.at_rest(ranks)
                + at_once
                + self.other
            )
        apart = self.tensor * (1 - 1 / shape.tensor) + self._of_other_stages(shape.pipe)
        return self.transformers * (self.transformer.total - apart) + self.encoders.total + self.other

    def _of_other_stages(self, stages: int) -> int:
        if stages == 1 or stages > len(self.blocks):
            return 0
        ranges = balanced([cost for cost, _ in self.blocks], stages)
        own = max(sum(held for _, held in self.blocks[one.start : one.stop]) for one in ranges)
        return sum(held for _, held in self.blocks) - own


# -- FSDP2: a block is gathered while the one before computes


def with_gathered_weights(step: Seconds, weights: Weights, calls: int, shape: MeshShape, machine: Machine) -> Seconds:
    """``step`` of ``calls`` calls, each of which gathers all blocks of a transformer."""
    of_one = weights.transformer
    link = machine.topology.link(shape.tensor, shape.sequence)
    travelling = calls * link.seconds(of_one.gathered(shape.sequence), messages=of_one.parts)
    # The first block of a call has none before it.
    hidden = min(travelling * (1 - 1 / of_one.parts), step.compute)
    exposed = travelling - hidden + sending_slows(hidden, machine)
    return replace(step, communication=step.communication + exposed)


# -- stages: a mesh dim ``pipe``


def _stream(own: CallWork, shape: MeshShape) -> float:
    """Bytes of the tokens that go from block to block in one call."""
    calls = [x for x in own.events if isinstance(x, CountedAttention)]
    widest = max(calls, key=lambda x: sum(y.total for y in x.queries), default=None)
    if widest is None:
        return 0.0
    tokens = local_rows(widest.queries, shape.sequence)
    return float(tokens * widest.samples * widest.heads * widest.head_dim * widest.element_size)


def sent_between_stages(own: CallWork, calls: int, shape: MeshShape) -> int:
    """Bytes that the first stage sends in ``calls`` calls, whole or in patches."""
    return round(calls * _stream(own, shape)) if shape.pipe > 1 else 0


def staged(own: CallWork, calls: int, shape: MeshShape, machine: Machine) -> Seconds:
    """Exact stages: each waits for the one before, and all for the result of the last."""
    # While a stage computes, the hosts of the others have launched theirs.
    one = call_seconds(replace(own, launches=own.launches // shape.pipe), shape, machine)
    link, hops = machine.topology.link(shape.ranks // shape.pipe, shape.pipe), shape.pipe - 1
    between = hops * link.seconds(_stream(own, shape), all_to_all=True)
    result = link.seconds(hops * own.returned, messages=hops, all_to_all=True)
    return (one + Seconds(communication=between + result)).times(calls)


def patched(own: CallWork, calls: int, shape: MeshShape, machine: Machine) -> Seconds:
    """PipeFusion, arXiv:2405.14430: each stage busy with another patch, whose tokens leave while the next one is computed."""
    patches = shape.pipefusion.num_patches if shape.pipefusion is not None else 1
    one = call_seconds(_one_patch(own, patches), replace(shape, pipe=1), machine)
    # With fewer patches than stages, some stages are idle.
    step = one.times(calls * max(patches, shape.pipe) / shape.pipe)
    link = machine.topology.link(shape.ranks // shape.pipe, shape.pipe)
    travelling = link.seconds(calls * _stream(own, shape), messages=calls * patches, all_to_all=True)
    return replace(step, communication=step.communication + max(0.0, travelling - step.compute))


def _one_patch(own: CallWork, patches: int) -> CallWork:
    """What is computed of one patch: its queries, and all keys."""

    def of_patch(tokens: tuple[Tokens, ...]) -> tuple[Tokens, ...]:
        return tuple(replace(x, total=-(-x.total // patches)) for x in tokens)

    events = [
        replace(x, queries=of_patch(x.queries))
        if isinstance(x, CountedAttention)
        else replace(x, rows=of_patch(x.rows))
        if isinstance(x, Product)
        else x
        for x in own.events
    ]
    return replace(own, events=events, moved=(own.moved[0] // patches, own.moved[1]))


def stale_key_bytes(own: CallWork, calls: int, stages: int) -> float:
    """Keys and values of the step before that a stage keeps, of ``calls`` branches of guidance."""
    of_all = sum(
        x.samples * x.element_size * x.kv_heads * (x.head_dim + x.value_dim) * sum(y.total for y in x.keys)
        for x in own.events
        if isinstance(x, CountedAttention)
    )
    return calls * of_all / stages
