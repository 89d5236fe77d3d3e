"""Sharding plans: where a model's tensors are split and gathered, and what its attention calls consist of.

A plan is data; ``para_core.plans.region`` applies one to a module. Published plans (diffusers' ``_cp_plan``) are read as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Split:
    """Shard a tensor (or each tensor of a tuple, list or dict) along ``dim`` to this rank's part.

    Fewer than two tokens for each rank are replicated, and fewer rows or frames than ranks: so is a dim of size 1, which is broadcast.

    Args:
        segment: the tokens of this name are what the tensor holds, and attention sees them from here on.
        like: or: something that has one entry for each token of this segment, such as its positions.
        ndim: the number of dims of the tensor. A companion with fewer has no dim for tokens, and is replicated (a time step
            for each sample, say, instead of each token); one with more has others behind ``dim``. Tokens that do not have
            as many are an error.
        after: the tokens of this segment come first along ``dim``; every rank keeps them.
        then_replicated: something else follows along ``dim``; every rank keeps it. The segment has been sharded before.
        per: entries along ``dim`` for each one of the segment, which stay together: a segment of rows of an image, or of frames,
            has many tokens a row. None: as many as there are; how many rows has been said before.
        after_replicated: something else comes first along ``dim``; every rank keeps it. How many tokens the segment has, was said before.
        runs: along ``dim`` stands one run of all tokens behind the other, such as those of each sample. Only with ``like``.
    """

    dim: int
    segment: str | None = None
    like: str | None = None
    ndim: int | None = None
    after: str | None = None
    then_replicated: bool = False
    per: int | None = 1
    after_replicated: bool = False
    runs: bool = False


@dataclass(frozen=True)
class Replicate:
    """Every rank keeps all tokens of ``segment``, of which the tensor's ``dim`` says how many there are."""

    dim: int
    segment: str


@dataclass(frozen=True)
class Count:
    """A segment has as many tokens as the numbers that stand at ``at`` of a nested list multiply to; it will be sharded later.

    For an argument such as ``img_shapes``, a list of ``(frames, height, width)`` for each sample.
    """

    segment: str
    at: tuple[int, ...]


@dataclass(frozen=True)
class FirstTokens:
    """A number of tokens at the start of ``segment`` becomes the number of those that this rank holds."""

    segment: str


@dataclass(frozen=True)
class LastTokens:
    """A number of tokens at the end of ``segment`` becomes the number of those that this rank holds."""

    segment: str


@dataclass(frozen=True)
class Gather:
    """Put the parts of a tensor along ``dim`` together again: all tokens of ``segment``.

    Args:
        per: entries along ``dim`` for each one of the segment. None: as many as there are.
        after_replicated: something else comes first along ``dim``, which every rank has.
        then_replicated: something else follows along ``dim``, which every rank has.
    """

    dim: int
    segment: str
    per: int | None = 1
    after_replicated: bool = False
    then_replicated: bool = False


@dataclass(frozen=True)
class Entries:
    """Of a tuple or list, what is done to each entry; None: nothing. Only of what goes with tokens, such as positions."""

    cuts: tuple[Split | None, ...]


@dataclass(frozen=True)
class SplitMask:
    """Shard a ``BlockMask`` of flex attention, which is over all tokens, to the rows that this rank computes.

    Args:
        queries: the segments of its rows, in their order. They have been sharded before, or are replicated.
        keys: those of its columns. None: those of its rows.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None


# A Gather of an input: this one module sees all tokens.
ShardRule = Split | Replicate | Count | FirstTokens | LastTokens | Gather | Entries | SplitMask


@dataclass(frozen=True)
class Attention:
    """What one call of ``scaled_dot_product_attention`` consists of: segments, in their order along its tokens.

    A segment that the call of the model did not shard is held by every rank; it may have any length. If all keys are, no
    rank needs another.

    Args:
        keys: None: those of the queries.
        mask: how the mask is to be read. ``"keys"``: its columns are of this rank's keys. ``"pairs"``: it says of each two of
            this rank's tokens whether both are valid. None: as sizes say.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    mask: Literal["keys", "pairs"] | None = None


@dataclass(frozen=True)
class OneForEach:
    """A module that makes one attention call for each entry of a list, and then one more.

    Args:
        parameter: of the module, holds the list; none is made for None.
        each: what these calls consist of.
        last: what the last call consists of.
    """

    parameter: str
    each: Attention
    last: Attention


@dataclass(frozen=True)
class LinearAttention:
    """A module that sums over tokens once, and attends to that sum: each rank sums over its own, then all add their sums up.

    What it sums is small, whatever the number of tokens: ``[B, H, D, D]``. Each token of ``segment`` is held by one rank.

    Args:
        sums: what sums over tokens: the name of a function of torch, and which of the module's calls of it, counted from 0.
    """

    segment: str
    sums: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class AttentionByHeads:
    """A self-attention module that each rank runs on all tokens of ``segment``, with a share of its heads.

    For a module that needs all tokens between its projections and its attention: it packs or pads them, makes a mask from them, or
    keeps their keys for later calls. Tokens are exchanged for heads over all sequence ranks, those of a ring, too, so there have to be
    as many heads as ranks. What the module is given besides its tokens, such as positions, is left whole.

    Args:
        projections: submodules whose outputs, ``[B, S, heads * D]``, are exchanged: the last before heads are taken apart.
        output: the submodule whose input, of the same form, is exchanged back.
        heads: the attribute of the module that holds their number.
        caches: parameters of the module that hold tensors (or dicts of such) with all heads, and the dim of these.
    """

    segment: str
    projections: tuple[str, ...]
    output: str
    heads: str = "heads"
    caches: tuple[tuple[str, int], ...] = ()


# What a module attends to.
Attending = tuple[Attention, ...] | OneForEach | LinearAttention | AttentionByHeads


def attention_calls(
    attention: tuple[Attention, ...] | OneForEach | AttentionByHeads,
    parameters: tuple[str, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Attention, ...]:
    """What each attention call of a module consists of that is given these arguments."""
    if isinstance(attention, AttentionByHeads):
        return (Attention((attention.segment,)),)
    if not isinstance(attention, OneForEach):
        return attention
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}.get(attention.parameter) or ()
    return (attention.each,) * len(given) + (attention.last,)


@dataclass(frozen=True)
class Halo:
    """A module that mixes rows within ``size`` of each other, such as a convolution with padding: it sees those of the ranks beside.

    They are put on its first input, and taken off its output, both along ``dim``, which holds rows of ``segment``.
    """

    dim: int
    segment: str
    size: int


@dataclass(frozen=True)
class Plan:
    """What one model splits and gathers.

    In names of modules, ``*`` stands for any one part (``blocks.*.attn``), ``**`` for any number of parts, and ``-1`` for
    the last index of a list.

    Args:
        inputs: parameters of the model's ``forward`` that are split, wherever they are given and not None.
        outputs: module name (``""``: the model itself) to what is gathered of its output; of a tuple, the first tensor.
        joint_order: the segments of which an attention call consists, unless ``attention`` says otherwise.
        inner: module name to splits of its inputs (by parameter) or outputs (by index).
        attention: module name to what its first, second, … attention call consists of; the last stands for all further. Or, where
            their number depends on an argument, to that; or to the sum over tokens that stands for attention there; or, for a module that
            needs all tokens, to its share of heads. Where several names fit, the first counts.
        halos: module name to the rows of other ranks that it sees.
        refused: parameters of the model's ``forward`` that cannot be given in parallel, each with the reason.
        batched: parameters that hold all branches of guidance, one behind the other, and the dim along which they do (None:
            they are lists with an entry for each sample); the tokens first. Empty: the model is called in sequential CFG passes.
        common: with ``batched``, the other parameters that may hold tensors: what they hold is for all samples.
        unshared: with ``batched``, parameters of which a part cannot be given: where one is given, all ranks compute all samples.
    """

    inputs: Mapping[str, ShardRule]
    outputs: Mapping[str, Gather | Sequence[Gather | None]]
    joint_order: tuple[str, ...]
    inner: Mapping[str, Mapping[str | int, ShardRule]] = field(default_factory=dict)
    attention: Mapping[str, Attending] = field(default_factory=dict)
    halos: Mapping[str, Halo] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    batched: Mapping[str, int | None] = field(default_factory=dict)
    common: tuple[str, ...] = ()
    unshared: tuple[str, ...] = ()

    def cuts(self, segment: str) -> bool:
        """Whether any tensor of ``segment`` is sharded."""
        cuts = [*self.inputs.values(), *[cut for cuts in self.inner.values() for cut in cuts.values()]]
        return any(isinstance(cut, Split) and cut.segment == segment for cut in cuts)

    def with_replicated(self, segment: str) -> Plan:
        """This plan, but every rank keeps all tokens of ``segment``."""
        inner = {name: _with_replicated(cuts, segment) for name, cuts in self.inner.items()}
        return replace(
            self,
            inputs=_with_replicated(self.inputs, segment),
            inner={name: cuts for name, cuts in inner.items() if cuts},
        )


def coarse_segments(plan: Plan) -> frozenset[str]:
    """Return the segments of rows or frames: somewhere along a tensor, each entry of one of these stands for several tokens."""
    gathers = [gather for rule in plan.outputs.values() for gather in (rule if isinstance(rule, Sequence) else [rule])]
    cuts = [*plan.inputs.values(), *[cut for cuts in plan.inner.values() for cut in cuts.values()], *gathers]
    cuts = [one for cut in cuts for one in (cut.cuts if isinstance(cut, Entries) else [cut])]
    names = [
        cut.segment or cut.like if isinstance(cut, Split) else cut.segment
        for cut in cuts
        if isinstance(cut, (Split, Gather)) and cut.per != 1
    ]
    return frozenset([name for name in (*names, *[halo.segment for halo in plan.halos.values()]) if name is not None])


def _with_replicated(cuts: Mapping[Any, ShardRule], segment: str) -> dict[Any, ShardRule]:
    kept = {
        key: Replicate(cut.dim, segment) if isinstance(cut, Split) and cut.segment == segment else cut
        for key, cut in cuts.items()
    }
    kept = {
        key: Entries(tuple(None if _goes_with(one, segment) else one for one in cut.cuts))
        if isinstance(cut, Entries)
        else cut
        for key, cut in kept.items()
    }
    return {key: cut for key, cut in kept.items() if not _goes_with(cut, segment)}


def _goes_with(cut: ShardRule | None, segment: str) -> bool:
    return isinstance(cut, Split) and cut.like == segment
