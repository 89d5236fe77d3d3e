"""Plans: which tensors of a model are split and gathered, and which segments its attention calls consist of.

A plan is data. :mod:`para_core.plans.region` applies it to a module; plans that diffusers publishes (``_cp_plan``) are
accepted as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Split:
    """Shard a tensor, or each tensor of a tuple, list or dict, along ``dim``.

    A segment with fewer than two tokens per rank, or with fewer rows or frames than ranks, is replicated instead. So is
    a dim of size 1.

    Args:
        dim (`int`): The dim to split.
        segment (`str`, *optional*): The tensor holds the tokens of this segment. Attention over it is intercepted from
            here on.
        like (`str`, *optional*): Instead of ``segment``: the tensor has one entry per token of this segment, such as
            its positions.
        ndim (`int`, *optional*): Number of dims of the tensor. With ``like``, a tensor with fewer dims has none for
            tokens and is replicated (a timestep per sample instead of per token). With ``segment``, another number of
            dims is an error.
        after (`str`, *optional*): The tokens of this segment come first along ``dim`` and are kept on every rank.
        then_replicated (`bool`, defaults to `False`): Whether something else follows along ``dim``, which is kept on
            every rank. The segment must have been sharded before.
        per (`int`, *optional*, defaults to `1`): Number of entries along ``dim`` per entry of the segment. They stay
            together: a segment of rows or frames has many tokens per row. None if the number follows from the length,
            and the number of rows is known from an earlier split.
        after_replicated (`bool`, defaults to `False`): Whether something else comes first along ``dim``, which is kept
            on every rank. The length of the segment must be known from an earlier split.
        runs (`bool`, defaults to `False`): Whether ``dim`` contains several runs of all tokens, such as one per sample.
            Only with ``like``.
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
    """Keep all tokens of ``segment`` on every rank. The size of ``dim`` is the length of the segment."""

    dim: int
    segment: str


@dataclass(frozen=True)
class Count:
    """Read the length of a segment that is sharded later: the product of the numbers at ``at`` of a nested list.

    For an argument such as ``img_shapes``, a list with ``(frames, height, width)`` per sample.
    """

    segment: str
    at: tuple[int, ...]


@dataclass(frozen=True)
class FirstTokens:
    """Replace an integer, a number of tokens at the start of ``segment``, by the number of those that this rank
    holds.
    """

    segment: str


@dataclass(frozen=True)
class LastTokens:
    """Replace an integer, a number of tokens at the end of ``segment``, by the number of those that this rank holds."""

    segment: str


@dataclass(frozen=True)
class Gather:
    """Gather all tokens of ``segment`` along ``dim``.

    Args:
        dim (`int`): The dim to gather along.
        segment (`str`): The segment.
        per (`int`, *optional*, defaults to `1`): Number of entries along ``dim`` per entry of the segment; None if it
            follows from the length.
        after_replicated (`bool`, defaults to `False`): Whether something that every rank has comes first along ``dim``.
        then_replicated (`bool`, defaults to `False`): Whether something that every rank has follows along ``dim``.
    """

    dim: int
    segment: str
    per: int | None = 1
    after_replicated: bool = False
    then_replicated: bool = False


@dataclass(frozen=True)
class Entries:
    """A rule for each entry of a tuple or list, or None to leave the entry. Only for companions of tokens, such as
    positions.
    """

    cuts: tuple[Split | None, ...]


@dataclass(frozen=True)
class SplitMask:
    """Shard a ``BlockMask`` of flex attention over all tokens to the rows that this rank computes.

    Args:
        queries (`tuple[str, ...]`): The segments of its rows, in order. A segment that was not sharded before is
            replicated.
        keys (`tuple[str, ...]`, *optional*): The segments of its columns. Defaults to ``queries``.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None


# A Gather as the rule of an input gives that module all tokens.
ShardRule = Split | Replicate | Count | FirstTokens | LastTokens | Gather | Entries | SplitMask


@dataclass(frozen=True)
class Attention:
    """The segments of one call of ``scaled_dot_product_attention``, in their order along its tokens.

    A segment that this call of the model did not shard is replicated, with any length. If all keys are replicated,
    nothing is sent.

    Args:
        queries (`tuple[str, ...]`): The segments of the queries.
        keys (`tuple[str, ...]`, *optional*): The segments of the keys. Defaults to ``queries``.
        mask (`"keys"` or `"pairs"`, *optional*): How to read the mask. ``"keys"``: its columns are this rank's keys.
            ``"pairs"``: for each pair of this rank's tokens it states whether both are valid. Defaults to deciding by
            its size.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    mask: Literal["keys", "pairs"] | None = None


@dataclass(frozen=True)
class OneForEach:
    """A module that makes one attention call per entry of a list, and then one more.

    Args:
        parameter (`str`): The parameter of the module that holds the list, or None for an empty one.
        each (`Attention`): The segments of the calls for the entries.
        last (`Attention`): The segments of the last call.
    """

    parameter: str
    each: Attention
    last: Attention


@dataclass(frozen=True)
class LinearAttention:
    """A module with linear attention: it sums over tokens and attends to the sum. Each rank's sum is added up over the
    ranks.

    The sums are small for any number of tokens: ``[B, H, D, D]``.

    Args:
        segment (`str`): The segment over whose tokens the module sums.
        sums (`tuple[tuple[str, int], ...]`): The calls that sum over tokens: the name of a function of torch, and the
            index of the call among the module's calls of that function.
    """

    segment: str
    sums: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class AttentionByHeads:
    """A self-attention module that each rank runs on all tokens of ``segment`` and some of the heads.

    For a module that needs all tokens between its projections and its attention, because it packs or pads them, makes a
    mask from them, or keeps their keys for later calls. Tokens are exchanged for heads over all sequence ranks,
    including those of a ring, so there must be at least as many heads as ranks. Other arguments of the module, such as
    positions, are not sharded.

    Args:
        segment (`str`): The segment of the tokens.
        projections (`tuple[str, ...]`): Submodules whose outputs ``[B, S, heads * D]`` are exchanged, just before heads
            become a dim.
        output (`str`): The submodule whose input, of the same form, is exchanged back.
        heads (`str`, defaults to `"heads"`): The attribute of the module with the number of heads.
        caches (`tuple[tuple[str, int], ...]`, defaults to `()`): Parameters of the module that hold tensors, or dicts
            of tensors, with all heads, and the dim of the heads.
    """

    segment: str
    projections: tuple[str, ...]
    output: str
    heads: str = "heads"
    caches: tuple[tuple[str, int], ...] = ()


# Descriptions of a module's attention.
Attending = tuple[Attention, ...] | OneForEach | LinearAttention | AttentionByHeads


def attention_calls(
    attention: tuple[Attention, ...] | OneForEach | AttentionByHeads,
    parameters: tuple[str, ...],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Attention, ...]:
    """Return the segments of each attention call that a module makes for these arguments."""
    if isinstance(attention, AttentionByHeads):
        return (Attention((attention.segment,)),)
    if not isinstance(attention, OneForEach):
        return attention
    entries = {**dict(zip(parameters, args, strict=False)), **kwargs}.get(attention.parameter) or ()
    return (attention.each,) * len(entries) + (attention.last,)


@dataclass(frozen=True)
class Halo:
    """A module that needs rows of neighbouring ranks, such as a convolution with padding.

    The halo is added to its first input and removed from its output, along ``dim``.

    Args:
        dim (`int`): The dim with the rows.
        segment (`str`): The segment of the rows.
        size (`int`): Number of rows that are needed on each side.
    """

    dim: int
    segment: str
    size: int


@dataclass(frozen=True)
class Plan:
    """The sharding of one model: which tensors are split and gathered, and the segments of its attention calls.

    In module names ``*`` matches one part (``blocks.*.attn``), ``**`` any number of parts, and ``-1`` the last index of
    a list.

    Args:
        inputs (`Mapping[str, ShardRule]`): Rules for parameters of the model's ``forward``. They apply if the argument
            is given and not None.
        outputs (`Mapping[str, Gather | Sequence[Gather | None]]`): What to gather of the output of a module (``""`` is
            the model itself). A single ``Gather`` applies to a tensor, or to the first tensor of a tuple.
        joint_order (`tuple[str, ...]`): The segments of an attention call, unless ``attention`` describes its module.
        inner (`Mapping[str, Mapping[str | int, ShardRule]]`, *optional*): Rules for inputs (by parameter) and outputs
            (by index) of submodules.
        attention (`Mapping[str, ...]`, *optional*): How a submodule attends: a tuple with an :class:`Attention` for
            each of its calls (the last one also for all further calls), or :class:`OneForEach`,
            :class:`LinearAttention` or :class:`AttentionByHeads`. If several names match, the first one counts.
        halos (`Mapping[str, Halo]`, *optional*): Submodules that need rows of neighbouring ranks.
        refused (`Mapping[str, str]`, *optional*): Parameters of the model's ``forward`` that are not supported in
            parallel, with the reason.
        batched (`Mapping[str, int | None]`, *optional*): Parameters that hold all samples, or all CFG branches, and the
            dim of the samples (None for a list with one entry per sample). The first one holds the tokens. Without it
            CFG branches are expected in sequential calls.
        common (`tuple[str, ...]`, *optional*): With ``batched``, the other parameters that may hold tensors; they apply
            to all samples.
        unshared (`tuple[str, ...]`, *optional*): With ``batched``, parameters that cannot be split by samples. If one
            is given, all ranks compute all samples.
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

    @property
    def shard_rules(self) -> list[ShardRule]:
        """All rules for inputs of the model, and for inputs and outputs of submodules."""
        return [*self.inputs.values(), *[rule for rules in self.inner.values() for rule in rules.values()]]

    def cuts(self, segment: str) -> bool:
        """Whether the plan splits a tensor of ``segment``."""
        return any(isinstance(rule, Split) and rule.segment == segment for rule in self.shard_rules)

    def with_replicated(self, segment: str) -> Plan:
        """Return this plan with ``segment`` replicated on every rank."""
        inner = {name: _with_replicated(cuts, segment) for name, cuts in self.inner.items()}
        return replace(
            self,
            inputs=_with_replicated(self.inputs, segment),
            inner={name: cuts for name, cuts in inner.items() if cuts},
        )


def coarse_segments(plan: Plan) -> frozenset[str]:
    """Return the segments of rows or frames, whose entries stand for several tokens each."""
    gathers = [gather for rule in plan.outputs.values() for gather in (rule if isinstance(rule, Sequence) else [rule])]
    rules = [*plan.shard_rules, *gathers]
    rules = [entry for rule in rules for entry in (rule.cuts if isinstance(rule, Entries) else [rule])]
    names = [
        rule.segment or rule.like if isinstance(rule, Split) else rule.segment
        for rule in rules
        if isinstance(rule, (Split, Gather)) and rule.per != 1
    ]
    return frozenset([name for name in (*names, *[halo.segment for halo in plan.halos.values()]) if name is not None])


def _with_replicated(rules: Mapping[Any, ShardRule], segment: str) -> dict[Any, ShardRule]:
    kept: dict[Any, ShardRule] = {}
    for key, rule in rules.items():
        if isinstance(rule, Split) and rule.segment == segment:
            kept[key] = Replicate(rule.dim, segment)
        elif isinstance(rule, Entries):
            kept[key] = Entries(tuple(None if _is_companion(entry, segment) else entry for entry in rule.cuts))
        elif not _is_companion(rule, segment):
            kept[key] = rule
    return kept


def _is_companion(rule: ShardRule | None, segment: str) -> bool:
    return isinstance(rule, Split) and rule.like == segment
