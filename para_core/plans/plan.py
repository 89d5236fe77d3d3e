"""Plans: data that says which tensors of a model are split and gathered, and which segments its attention
calls see.

:mod:`para_core.plans.region` applies a plan to a module.
:func:`~para_core.plans.published_plan.convert_published_plan` converts the plans that diffusers publishes
with its models (``_cp_plan``). The plans of known models are in ``adapters/models/``. Nothing is checked here
against a model, except ``parts`` of :class:`AttentionByHeads`: names are looked up by
:mod:`.module_matching`, and shapes are compared by :mod:`.apply_rules` during a call. Tests:
tests/plans/test_plan.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal


def _require_tuple(field: str, names: object) -> None:
    """Raise ``TypeError`` if ``names``, the value of ``field``, is no tuple.

    The letters of a single name would count as segments that no rule shards, so that each rank would attend
    to its own tokens only, in silence.
    """
    if not isinstance(names, tuple):
        raise TypeError(f"{field} is {names!r}; expected a tuple of names, such as {field}=('image',).")


def _require_kinds(field: str, values: Mapping[Any, Any], kinds: Any, expected: str) -> None:
    """Raise ``TypeError`` if one of the ``values`` in ``field`` of a plan is of none of these ``kinds``."""
    for name, value in values.items():
        if not isinstance(value, kinds):
            raise TypeError(f"{field}[{name!r}] is {value!r}; expected {expected}.")


@dataclass(frozen=True)
class Split:
    """A rule that shards a tensor, or each tensor of a tuple, list or dict, along ``dim``.

    A segment with fewer than two tokens per rank, or a segment of rows or frames with fewer entries than
    ranks, is replicated instead. A dim of size 1 is replicated, too.

    With neither ``segment`` nor ``like``, the tensor counts as one with ``like`` and its own name: tensors of
    equal names have equal lengths, and attention is not intercepted. The plans of diffusers have such rules
    for position ids.

    At most one of ``after``, ``then_replicated``, ``after_replicated``, ``runs``, ``only`` and ``together``
    may be given, because each says what else ``dim`` holds or leaves out. ``per=None`` excludes all of them,
    and ``together`` excludes ``per``.

    Args:
        dim (`int`): The dim to split.
        segment (`str`, *optional*): Name of the segment whose tokens the tensor holds. Attention is
            intercepted after the first split of a segment in a call.
        like (`str`, *optional*): Instead of ``segment``: name of a segment that the tensor accompanies with
            one entry per token, such as position ids.
        ndim (`int`, *optional*): Expected number of dims. A tensor with ``segment`` and another number of
            dims is an error. Without ``segment``, a tensor with fewer dims has no dim for tokens and is
            replicated, such as a timestep per sample instead of per token. A tensor with ``like`` and more
            dims is split along ``dim`` all the same.
        after (`str`, *optional*): Name of a replicated segment whose tokens precede those of ``segment`` or
            ``like`` along ``dim``. Only with one of these.
        then_replicated (`bool`, defaults to `False`): Whether the tokens are followed along ``dim`` by other
            entries, which are replicated. Only with ``like``.
        per (`int`, *optional*, defaults to `1`): Number of entries along ``dim`` for each entry of the
            segment, which stay on one rank: a segment of image rows has many tokens per row. None to infer
            the number from the size of ``dim`` and an earlier split of the segment; only with ``like``. At
            least 1.
        after_replicated (`bool`, defaults to `False`): Whether the tokens are preceded along ``dim`` by other
            entries, which are replicated. The segment must have been split earlier, so that its length is
            known. Only with ``segment`` or ``like``.
        runs (`bool`, defaults to `False`): Whether ``dim`` contains all tokens several times in a row, such
            as once per sample. Only with ``like``.
        only (`"first"` or `"last"`, *optional*): Whether ``dim`` has an entry for the first or for the last
            tokens only, such as a rotary table of the patches that follow class and register tokens. A rank
            gets the entries of its own tokens, perhaps none. Only with ``like``.
        together (`tuple[int, ...]`, *optional*): The dims after ``dim`` that hold the other tokens of an
            entry, if attention flattens ``dim`` and these: ``Split(1, segment="video", together=(2, 3))`` for
            ``[B, T, H, W, C]``. The segment then has ``T * H * W`` tokens, and those of a frame stay on one
            rank. A later rule of the segment may name a dim with all tokens, or with one entry for each
            frame. Only with ``segment``.

    Raises:
        TypeError: ``dim``, or one of ``together``, is no int.
        ValueError: ``segment`` and ``like`` are both given, a field lacks the one that it needs or excludes
            another, ``per`` is less than 1, or ``only`` has another value.
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
    only: Literal["first", "last"] | None = None
    together: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # A bool is no dim. No function does this for all rules, because some are made in each call of a model.
        if not isinstance(self.together, tuple) or {*map(type, (self.dim, *self.together))} != {int}:
            raise TypeError(f"{self}: expected dim to be an int, and together a tuple of ints.")
        if self.segment is not None and self.like is not None:
            raise ValueError(
                f"{self}: expected segment, if the tensor holds the tokens, or like, if it accompanies them, but not "
                "both."
            )
        if self.like is None and (self.then_replicated or self.runs or self.only or self.per is None):
            raise ValueError(
                f"{self}: then_replicated, runs, only and per=None need the length of a segment that was split "
                "earlier; expected its name as like."
            )
        if self.segment is None and self.like is None and (self.after is not None or self.after_replicated):
            raise ValueError(
                f"{self}: after and after_replicated need the tokens that follow; expected the name of their segment, "
                "as segment if the tensor holds them, or as like if it accompanies them."
            )
        if self.only not in (None, "first", "last"):
            raise ValueError(f"{self}: expected only to be 'first' or 'last'.")
        if self.per is not None and self.per < 1:
            raise ValueError(f"{self}: expected per to be at least 1, or None.")
        if self.together and self.segment is None:
            raise ValueError(f"{self}: together needs segment, the name of the segment of all these dims.")
        # Of two such fields one would be ignored, or would take the tokens to be at other entries.
        num_others = sum([self.then_replicated, self.after_replicated, self.runs])
        num_others += sum([self.after is not None, self.only is not None, bool(self.together)])
        if num_others > 1:
            raise ValueError(
                f"{self}: expected at most one of after, then_replicated, after_replicated, runs, only and together, "
                "because each says what else dim holds."
            )
        if num_others == 1 and (self.per is None or (self.together and self.per != 1)):
            raise ValueError(
                f"{self}: per=None needs a dim with nothing but tokens, and together needs per=1. Say per as a number, "
                "or split the output of a module that holds the tokens alone."
            )

    @cached_property
    def is_plain(self) -> bool:
        """Whether ``dim`` holds one entry for each token of one segment, and nothing else."""
        has_more = self.after or self.then_replicated or self.after_replicated or self.runs
        return self.per == 1 and not (has_more or self.only or self.together)


@dataclass(frozen=True)
class Replicate:
    """A rule that keeps all tokens of ``segment`` on every rank, and reads their number from the size of
    ``dim``, times those of the dims ``together``.
    """

    dim: int
    segment: str
    together: tuple[int, ...] = ()


@dataclass(frozen=True)
class Count:
    """A rule that reads from an argument how many tokens ``segment`` has, before the segment itself is split.

    The argument is a nested list, which is passed on unchanged. The number is the product of the list at the
    indices ``at``: with ``img_shapes``, a list of images per sample with ``(frames, height, width)`` each,
    ``at=(0, -1)`` is ``frames * height * width`` of the last image of the first sample.
    """

    segment: str
    at: tuple[int, ...]


@dataclass(frozen=True)
class FirstTokens:
    """A rule that replaces an int argument n by how many of the first n tokens of ``segment`` this rank holds."""

    segment: str


@dataclass(frozen=True)
class LastTokens:
    """A rule that replaces an int argument n by how many of the last n tokens of ``segment`` this rank holds."""

    segment: str


@dataclass(frozen=True)
class CumulativeLengths:
    """A rule that replaces ``[0, n]``, the cumulative lengths (``cu_seqlens``) of a single sequence of all
    tokens of ``segment``, by those of the tokens that this rank holds. Several sequences raise, because
    attention of a plan is over one. n itself is not read: it is taken for the number of tokens.
    """

    segment: str


@dataclass(frozen=True)
class Gather:
    """A rule that gathers the tokens of ``segment`` from all ranks along ``dim``.

    Args:
        dim (`int`): The dim to gather along.
        segment (`str`): Name of the segment.
        per (`int`, *optional*, defaults to `1`): Number of entries along ``dim`` for each entry of the
            segment; None to infer the number from the size of ``dim``.
        after_replicated (`bool`, defaults to `False`): Whether the tokens are preceded along ``dim`` by
            replicated entries.
        then_replicated (`bool`, defaults to `False`): Whether the tokens are followed along ``dim`` by
            replicated entries.
        field (`str`, *optional*): If the output is a dataclass or named tuple, the field that holds the
            tokens, or its path, such as ``"video.x"``. Without it, the fields count as the entries of a
            tuple.

    Raises:
        TypeError: ``dim`` is no int.
        ValueError: More than one of ``per``, ``after_replicated`` and ``then_replicated`` is given: the
            numbers of tokens and of other entries would be unknown.
    """

    dim: int
    segment: str
    per: int | None = 1
    after_replicated: bool = False
    then_replicated: bool = False
    field: str = ""

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            raise TypeError(f"{self}: expected dim to be an int.")
        if sum([self.per != 1, self.after_replicated, self.then_replicated]) > 1:
            raise ValueError(
                f"{self}: expected at most one of per, after_replicated and then_replicated. Gather the output of a "
                "module that holds the tokens alone."
            )


@dataclass(frozen=True)
class Entries:
    """Rules for the entries of a tuple or list argument, one for each; None leaves an entry unchanged.

    Only for tensors that accompany tokens, such as position ids, not for the tokens themselves.

    Raises:
        ValueError: A rule has ``segment``.
    """

    cuts: tuple[Split | None, ...]

    def __post_init__(self) -> None:
        for cut in self.cuts:
            if cut is not None and cut.segment is not None:
                raise ValueError(
                    f"{self}: an entry accompanies tokens that another rule splits; expected like={cut.segment!r} "
                    "instead of segment."
                )


@dataclass(frozen=True)
class SplitMask:
    """A rule that shards a flex-attention ``BlockMask`` of all tokens to the rows of this rank's queries.

    Args:
        queries (`tuple[str, ...]`): The segments of the queries, in order. A segment that was not sharded
            before is replicated.
        keys (`tuple[str, ...]`, *optional*): The segments of the keys. Defaults to ``queries``.

    Raises:
        TypeError: ``queries`` or ``keys`` is no tuple.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _require_tuple("queries", self.queries)
        if self.keys is not None:
            _require_tuple("keys", self.keys)


# Includes Gather, which is usually the rule of an output, because a module that needs all tokens has it for
# an input.
ShardRule = (
    Split | Replicate | Count | FirstTokens | LastTokens | CumulativeLengths | Gather | Entries | SplitMask
)


@dataclass(frozen=True)
class Attention:
    """The segments of the queries and keys in one call of ``scaled_dot_product_attention``, in the order in
    which their tokens are concatenated.

    A segment that the current model call did not shard counts as replicated, with any length. If all keys are
    replicated, attention needs no communication.

    Args:
        queries (`tuple[str, ...]`): The segments of the queries.
        keys (`tuple[str, ...]`, *optional*): The segments of the keys. Defaults to ``queries``.
        mask (`"keys"` or `"pairs"`, *optional*): The form of the model's mask if its tokens are sharded.
            ``"keys"``: the columns are only this rank's keys, and are gathered from all ranks. ``"pairs"``:
            an entry says whether two tokens of this rank are both valid, so the diagonal is used as the key
            mask; the first eager call compares the other entries. By default the form follows from the size
            of the mask.

    Raises:
        TypeError: ``queries`` or ``keys`` is no tuple.
        ValueError: ``mask`` has another value.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    mask: Literal["keys", "pairs"] | None = None

    def __post_init__(self) -> None:
        _require_tuple("queries", self.queries)
        if self.keys is not None:
            _require_tuple("keys", self.keys)
        if self.mask not in (None, "keys", "pairs"):
            raise ValueError(f"{self}: expected mask to be 'keys' or 'pairs', or None.")


@dataclass(frozen=True)
class OneForEach:
    """Attention of a module that makes one attention call for each entry of a list argument, and then one
    further call.

    Args:
        parameter (`str`): Name of the parameter with the list. None counts as an empty list.
        each (`Attention`): The segments of the call for each entry.
        last (`Attention`): The segments of the last call.
    """

    parameter: str
    each: Attention
    last: Attention


@dataclass(frozen=True)
class LinearAttention:
    """Attention of a module that sums products of keys and values over tokens, and multiplies queries with
    the sums.

    Each rank sums over its own tokens, and these sums are added up over all ranks. Their shape ``[B, H, D,
    D]`` does not depend on the number of tokens.

    Args:
        segment (`str`): The segment over whose tokens the module sums.
        sums (`tuple[tuple[str, int], ...]`): The calls that sum over tokens, as the name of a torch function
            and an index: ``("matmul", 0)`` is the module's first call of ``matmul``.
    """

    segment: str
    sums: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class AttentionByHeads:
    """Attention of a self-attention module that each rank runs on all tokens of ``segment`` and some of the
    heads.

    Use it for a module that needs all tokens between its projections and its attention, because it packs or
    pads tokens, makes a mask from them, or keeps their keys for later calls. Tokens are exchanged for heads
    over all sequence ranks, including those of a ring, so there must be at least as many heads as ranks.
    Other arguments of the module, such as positions, are not sharded. If ``segment`` is replicated in a call,
    because it is short, each rank still runs its own heads only, so that cached keys are those of the same
    heads in all calls.

    Args:
        segment (`str`): The segment of the tokens.
        projections (`tuple[str, ...]`): Names of the submodules whose outputs ``[B, S, H * D]`` are
            exchanged.
        output (`str`): Name of the submodule whose input ``[B, S, H * D]`` is exchanged back.
        heads (`str`, defaults to `"heads"`): The attribute of the module with the number of heads.
        caches (`tuple[tuple[str, int], ...]`, defaults to `()`): Pairs (parameter, dim): a parameter of the
            module that holds cached keys or values of all heads, as a tensor or a dict of tensors, and the
            dim of the heads.
        parts (`int` or `tuple[int, ...]`, *optional*): Number of tensors ``[B, S, H * D]`` that the output of
            a projection holds one after another, for all projections or for each: 3 for a fused ``qkv`` in
            the order (3, heads, D). 1 for an output in which all entries of a head are consecutive, as in the
            order (heads, 3, D). Defaults to 1, and a projection that is wider than the input of ``output``
            then raises.

    Raises:
        TypeError: ``projections`` is no tuple.
        ValueError: ``parts`` has not one number, at least 1, for each projection.
    """

    segment: str
    projections: tuple[str, ...]
    output: str
    heads: str = "heads"
    caches: tuple[tuple[str, int], ...] = ()
    parts: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _require_tuple("projections", self.projections)
        of_projections = self.parts_of_projections
        if len(of_projections) != len(self.projections) or any(
            parts is not None and parts < 1 for parts in of_projections
        ):
            raise ValueError(
                f"parts is {self.parts!r} for the projections {', '.join(self.projections)}; expected the number of "
                "tensors that each holds, or one number for all."
            )

    @property
    def parts_of_projections(self) -> tuple[int | None, ...]:
        """``parts`` of each of ``projections``."""
        if isinstance(self.parts, tuple):
            return self.parts
        return (self.parts,) * len(self.projections)


# A value of Plan.attention: how a module attends. A tuple has an entry for each attention call.
AttentionRule = tuple[Attention, ...] | OneForEach | LinearAttention | AttentionByHeads


@dataclass(frozen=True)
class Halo:
    """A module that needs rows of neighbouring ranks, such as a convolution with padding.

    Halo rows are added to the module's first input along ``dim``, and removed from its output.

    Args:
        dim (`int`): The dim of the rows.
        segment (`str`): The segment of the rows.
        size (`int`): Number of rows that are needed from each side.
    """

    dim: int
    segment: str
    size: int


@dataclass(frozen=True)
class Plan:
    """The sharding of one model: which tensors are split and gathered, and the segments of its attention
    calls.

    In module names, ``*`` matches one part between dots (``blocks.*.attn``), ``**`` any number of parts, and
    ``-1`` the last module of a list. A parameter that holds a dataclass, named tuple or dict may be followed
    by the path of a field: ``"video.x"`` is the field ``x`` of the parameter ``video``, and ``"0.x"`` that of
    the output of index 0.

    Args:
        inputs (`Mapping[str, ShardRule]`): Rules for parameters of the model's ``forward``. They apply if the
            argument is given and not None.
        outputs (`Mapping[str, Gather | Sequence[Gather | None]]`): What to gather from the output of a
            module, by module name (``""`` is the model itself). A single ``Gather`` applies to an output
            tensor, or to the first tensor of an output tuple.
        joint_order (`tuple[str, ...]`): The segments of the queries and keys, in order, in attention calls of
            modules that ``attention`` does not describe.
        inner (`Mapping[str, Mapping[str | int, ShardRule]]`, *optional*): Rules for submodules, by module
            name: for inputs (keyed by parameter name) and for outputs (keyed by index). A rule for a
            parameter that a submodule lacks, or that is not passed or None, does nothing, so a name with
            wildcards may match submodules with different parameters.
        attention (`Mapping[str, ...]`, *optional*): The attention of submodules, by module name: a tuple with
            an :class:`Attention` for each attention call (the last one also for all further calls), or an
            :class:`OneForEach`, :class:`LinearAttention` or :class:`AttentionByHeads`. If several names match
            a submodule, the first name counts.
        halos (`Mapping[str, Halo]`, *optional*): Submodules that need rows of neighbouring ranks, by module
            name.
        refused (`Mapping[str, str]`, *optional*): Parameters of the model's ``forward`` that raise if given,
            because they are not supported in parallel, each with the reason. A name that the model lacks is
            ignored, so that a plan fits several versions of a model.
        batched (`Mapping[str, int | None]`, *optional*): Parameters that can be split along a ``batch`` mesh
            dim, because they hold all samples or all CFG branches, each with its dim of samples (None for a
            list with one entry per sample). The number of samples is read from the first of these parameters.
            If empty, samples cannot be split, and CFG branches must be passed in separate calls.
        common (`tuple[str, ...]`, *optional*): Further parameters that may hold tensors. They apply to all
            samples, so they are not split along ``batch``.
        unshared (`tuple[str, ...]`, *optional*): Parameters that cannot be split by samples. If one of them
            is given, all ranks compute all samples.

    Raises:
        TypeError: ``joint_order`` is no tuple, or a rule, or a dim of ``batched``, is none of its kinds.
    """

    inputs: Mapping[str, ShardRule]
    outputs: Mapping[str, Gather | Sequence[Gather | None]]
    joint_order: tuple[str, ...]
    inner: Mapping[str, Mapping[str | int, ShardRule]] = field(default_factory=dict)
    attention: Mapping[str, AttentionRule] = field(default_factory=dict)
    halos: Mapping[str, Halo] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    batched: Mapping[str, int | None] = field(default_factory=dict)
    common: tuple[str, ...] = ()
    unshared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_tuple("joint_order", self.joint_order)
        _require_kinds("inputs", self.inputs, ShardRule, "a Split or another rule")
        for name, rules in self.inner.items():
            _require_kinds(f"inner[{name!r}]", rules, ShardRule, "a Split or another rule")
        _require_kinds("outputs", self.outputs, Gather | Sequence, "a Gather, or a tuple or list of them")
        _require_kinds("halos", self.halos, Halo, "a Halo")
        _require_kinds("batched", self.batched, int | None, "the dim of samples, or None")
        for name, rule in self.attention.items():
            of_calls = isinstance(rule, tuple) and all(isinstance(call, Attention) for call in rule)
            if not (of_calls or isinstance(rule, (OneForEach, LinearAttention, AttentionByHeads))):
                raise TypeError(
                    f"attention[{name!r}] is {rule!r}; expected a tuple with an Attention for each call, or "
                    "a OneForEach, LinearAttention or AttentionByHeads."
                )

    @property
    def shard_rules(self) -> list[ShardRule]:
        """The rules of ``inputs`` and ``inner``, and not those of ``outputs`` and ``halos``."""
        return [*self.inputs.values(), *[rule for rules in self.inner.values() for rule in rules.values()]]

    def splits(self, segment: str) -> bool:
        """Whether a rule of the plan splits the tokens of ``segment``, and not only tensors that accompany them."""
        return any(isinstance(rule, Split) and rule.segment == segment for rule in self.shard_rules)

    def with_replicated(self, segment: str) -> Plan:
        """Return a copy of this plan that keeps ``segment`` on every rank instead of splitting it.

        Tensors of any number of dims are then accepted: ``ndim`` protects a split, and nothing is split.

        Raises:
            ValueError: The number of tokens of ``segment`` is not the size of the dim at which the plan
                splits it: a rule has ``per``, ``after`` or ``after_replicated``, or is a :class:`Count`.
        """
        inner = {name: _with_replicated(rules, segment) for name, rules in self.inner.items()}
        return replace(
            self,
            inputs=_with_replicated(self.inputs, segment),
            inner={name: rules for name, rules in inner.items() if rules},
        )


def _with_replicated(rules: Mapping[Any, ShardRule], segment: str) -> dict[Any, ShardRule]:
    """Return ``rules`` in which ``segment`` is replicated, without those of tensors that accompany its
    tokens. Raise ``ValueError`` for a rule that a :class:`Replicate` cannot replace.
    """

    def is_companion(rule: ShardRule | None) -> bool:
        return isinstance(rule, Split) and rule.like == segment

    kept = {key: rule for key, rule in rules.items() if not is_companion(rule)}
    for key, rule in kept.items():
        if isinstance(rule, Count) and rule.segment == segment:
            raise ValueError(
                f"the plan counts the tokens of {segment!r} by {rule} for a later split, so that it cannot replicate "
                "them. Shard them (text='shard'), or write a Replicate for the tensor that holds nothing else."
            )
        if isinstance(rule, Split) and rule.segment == segment:
            if rule.per != 1 or rule.after is not None or rule.after_replicated:
                raise ValueError(
                    f"the plan splits {segment!r} by {rule}: the dim has other entries too, or several for a token, so "
                    "it does not say how many tokens to replicate. Shard them (text='shard'), or write a Replicate "
                    "for a tensor with one entry for each token."
                )
            kept[key] = Replicate(rule.dim, segment, rule.together)
        elif isinstance(rule, Entries):
            entries = list(rule.cuts)
            for index, entry in enumerate(entries):
                if is_companion(entry):
                    entries[index] = None
            kept[key] = Entries(tuple(entries))
    return kept
