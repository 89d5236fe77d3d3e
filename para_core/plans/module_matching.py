"""Find the submodules of a model that a plan names, and collect the rules of each.

:mod:`.region` wraps what :func:`match_modules` finds, and ``parallelize_transformer`` checks a plan by it
before it changes anything. Caches, stages, PipeFusion, tensor parallelism and the planner use the same
patterns and parameter names. Tests: tests/plans/test_plan.py, tests/plans/test_exactness.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.plans.plan import (
    AttentionByHeads,
    AttentionRule,
    Gather,
    Halo,
    OneForEach,
    Plan,
    ShardRule,
    Split,
)
from para_core.torch_internals import ORIGINAL_MODULE, SUBMODULES


@dataclass(frozen=True)
class ModuleRules:
    """The rules of a plan for one submodule, as in :class:`Plan`. Submodules with equal rules share one hook,
    so a rule must not know its submodule.

    Args:
        name: The module name in the plan, which may contain wildcards.
        shard_rules: Rules for inputs and outputs, with keys as in :attr:`Plan.inner`: an output has an index,
            or a path that begins with one. No key occurs twice.
        attention: The rule of :attr:`Plan.attention`; an empty tuple, also as written in a plan, describes nothing.
        exchange: For a projection of an :class:`AttentionByHeads`: ``"enter"`` exchanges tokens for heads in
            its output, ``"leave"`` undoes this in its input.
        parts: The number of tensors in the output of such a projection, as in :class:`AttentionByHeads`.
    """

    name: str = ""
    shard_rules: tuple[tuple[str | int, ShardRule], ...] = ()
    gathers: tuple[Gather | None, ...] = ()
    attention: AttentionRule = ()
    halo: Halo | None = None
    exchange: Literal["enter", "leave"] | None = None
    parts: int | None = None

    @property
    def of_inputs(self) -> dict[str, ShardRule]:
        """Those of :attr:`shard_rules` for inputs, by parameter name or the path of a field of a parameter."""
        return {
            key: rule for key, rule in self.shard_rules if isinstance(key, str) and not key[:1].isdecimal()
        }

    @property
    def of_outputs(self) -> dict[int | str, ShardRule]:
        """Those of :attr:`shard_rules` for outputs, by index or a path that begins with one."""
        return {key: rule for key, rule in self.shard_rules if isinstance(key, int) or key[:1].isdecimal()}

    def with_more(self, other: ModuleRules) -> ModuleRules:
        """Return these rules and those of ``other``, which count only where these have none: each shard rule
        by its key, and ``exchange`` with its ``parts``.
        """
        shard_rules = dict(self.shard_rules)
        for key, rule in other.shard_rules:
            shard_rules.setdefault(key, rule)
        exchanging = self
        if self.exchange is None:
            exchanging = other
        return replace(
            self,
            shard_rules=tuple(shard_rules.items()),
            gathers=self.gathers or other.gathers,
            attention=self.attention or other.attention,
            halo=self.halo or other.halo,
            exchange=exchanging.exchange,
            parts=exchanging.parts,
        )


def match_modules(module: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, ModuleRules]]:
    """Return the submodules that ``plan`` names, each with its rules, by full module name.

    If several names of one field of ``plan`` match a module, the first counts; in ``Plan.inner`` the first
    that has a rule for the same input or output.

    Raises:
        ValueError: The plan names a module that does not exist. Only entries of ``Plan.attention`` may match
            nothing; but if one is an :class:`AttentionByHeads`, its projections and output must exist. Or one
            of these has another rule. Or the plan first splits a segment inside a module of ``Plan.attention``.
    """
    required = [ModuleRules(name, shard_rules=tuple(rules.items())) for name, rules in plan.inner.items()]
    required += [
        ModuleRules(name, gathers=gathers_as_tuple(rule)) for name, rule in plan.outputs.items() if name
    ]
    required += [ModuleRules(name, halo=halo) for name, halo in plan.halos.items()]
    optional = [ModuleRules(name, attention=attention) for name, attention in plan.attention.items()]
    for name, attention in plan.attention.items():
        if isinstance(attention, AttentionByHeads):
            for projection, parts in zip(attention.projections, attention.parts_of_projections, strict=True):
                required.append(ModuleRules(f"{name}.{projection}", exchange="enter", parts=parts))
            required.append(ModuleRules(f"{name}.{attention.output}", exchange="leave"))
    matches: dict[str, tuple[nn.Module, ModuleRules]] = {}
    for index, rules in enumerate((*required, *optional)):
        submodules = matching_modules(module, rules.name)
        if not submodules and index < len(required):
            raise ValueError(
                f"the plan names the module {rules.name!r}, which {type(module).__name__} does not have."
            )
        for name, submodule in submodules.items():
            if name in matches:
                _, earlier_rules = matches[name]
                matches[name] = submodule, earlier_rules.with_more(rules)
            else:
                matches[name] = submodule, rules
    _check_projections(matches)
    if plan.inner:
        _check_splits(plan, matches)
    return matches


def _check_projections(matches: Mapping[str, tuple[nn.Module, ModuleRules]]) -> None:
    """Raise ``ValueError`` if a projection or output of an :class:`AttentionByHeads` has another rule, because
    its hook applies none.

    Its tensors have all tokens on one side of it and this rank's on the other, and a rule does not say for
    which it is meant. Rules for parameters that it lacks do nothing anywhere.
    """
    for name, (submodule, rules) in matches.items():
        if rules.exchange is None:
            continue
        parameters = parameters_of(submodule)
        shards = [key for key in rules.of_inputs if key.partition(".")[0] in parameters]
        if shards or rules.of_outputs or rules.gathers or rules.attention or rules.halo is not None:
            raise ValueError(
                f"the plan has a rule for {name}, which an AttentionByHeads names as a projection or its output and "
                "which exchanges tokens for heads; expected no other rule. Write it for the attention module, or for a "
                "module inside that the AttentionByHeads does not name."
            )


def _check_splits(plan: Plan, matches: Mapping[str, tuple[nn.Module, ModuleRules]]) -> None:
    """Raise ``ValueError`` if a segment is split only inside modules whose attention calls the plan describes.

    Such a module takes the segments at the moment of its call (``PlannedAttention.copy_for_calls``), so that
    its attention would be on this rank's tokens only.
    """
    # Splits of a segment inside an attention module, as (segment, name of the split module, of the outer module).
    inside: list[tuple[str, str, str]] = []
    split_outside = set()
    for rule in plan.inputs.values():
        if isinstance(rule, Split):
            split_outside.add(rule.segment)
    for name, (_, rules) in matches.items():
        for _, rule in rules.shard_rules:
            if not isinstance(rule, Split) or rule.segment is None:
                continue
            outer = _outer_attention(name, matches)
            if outer is None:
                split_outside.add(rule.segment)
            else:
                inside.append((rule.segment, name, outer))
    for segment, name, outer in inside:
        if segment not in split_outside:
            raise ValueError(
                f"the plan splits {segment!r} at {name}, inside {outer}, whose attention it describes: that attention "
                f"would see this rank's tokens only. Split {segment!r} before {outer} is called, or at its inputs."
            )


def _outer_attention(name: str, matches: Mapping[str, tuple[nn.Module, ModuleRules]]) -> str | None:
    """Return the outermost module around ``name`` whose attention calls the plan describes; None if there is none."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        outer = ".".join(parts[:depth])
        if outer not in matches:
            continue
        attention = matches[outer][1].attention
        # For single calls a module copies the segments when it is called. The other kinds of rules read them
        # later, and an empty tuple describes nothing.
        if isinstance(attention, OneForEach) or (isinstance(attention, tuple) and attention):
            return outer
    return None


def matching_modules(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the submodules whose full names match ``pattern``, by name, without the ``_orig_mod`` of compilation.
    A module that :func:`torch.compile` has wrapped is represented by the wrapper.

    Wildcards are those of :class:`Plan`: a part ``*``, ``**`` or ``-1``, in front of which no other may stand.
    """
    parts = pattern.split(".")
    for index, part in enumerate(parts):
        if part == "-1":
            try:
                parent = module.get_submodule(".".join(parts[:index]))
            except AttributeError:
                return {}
            # A list that torch.compile has wrapped is in an attribute of the wrapper. children() would leave
            # out a module that the list holds twice.
            names = list(uncompiled(parent).__dict__[SUBMODULES])
            if not names:
                return {}
            parts[index] = names[-1]
    wildcards = {"**": r"(?:.+\.)?", "*": r"[^.]+\."}
    expression = "".join([wildcards.get(part, re.escape(part) + r"\.") for part in parts])
    submodules: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        plain = name
        # Most names have none. A Python call for each module would count.
        if ORIGINAL_MODULE in name:
            plain = ".".join([part for part in name.split(".") if part != ORIGINAL_MODULE])
        if plain not in submodules and re.fullmatch(expression, f"{plain}."):
            submodules[plain] = submodule
    return submodules


def gathers_as_tuple(rule: Gather | Sequence[Gather | None]) -> tuple[Gather | None, ...]:
    """Return ``rule``, of :attr:`Plan.outputs`, as a tuple: the rules of the first, second, … output tensor."""
    if isinstance(rule, Gather):
        return (rule,)
    return tuple(rule)


# Maximum number of values of ``*args`` that get a name. The signature does not say how many a call passes.
_MOST_VARIADIC = 16


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of ``module.forward`` in order, without ``self``, also if it is
    compiled.

    Values of ``*args`` are named ``args[0]``, ``args[1]``, and so on.
    """
    cls = original_class(uncompiled(module))
    names: list[str] = []
    for index, (name, parameter) in enumerate(inspect.signature(cls.forward).parameters.items()):  # type: ignore[attr-defined]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(_MOST_VARIADIC)]
        elif index > 0:  # The first parameter is self.
            names.append(name)
    return tuple(names)
