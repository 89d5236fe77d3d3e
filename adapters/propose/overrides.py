"""Answers of the user to propose_plan: parts of a plan that replace the guesses of the same name.

``propose.py`` validates them, and ``search.py`` puts them into each candidate. The questions are in
``questions.py`` and ``completion.py``, which also reads the answers ``CachedBlocks`` and ``samples``. Tests:
tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import Any, get_args

from torch import nn

from para_core.cache.blocks import CachedBlocks
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.plans.module_matching import matching_modules, parameters_of
from para_core.plans.plan import Attention, AttentionRule, Gather, Halo, Plan, ShardRule, Split

Answers = Mapping[str, Any]

# Types that a value of Plan.attention may have, apart from tuples.
_ATTENDING = tuple(kind for kind in get_args(AttentionRule) if isinstance(kind, type))
# Fields of a Plan that an answer of the same name sets, and their types. All hold names: of segments or of
# parameters, the mappings as keys.
_PLAN_FIELDS = {
    "joint_order": tuple,
    "batched": Mapping,
    "common": tuple,
    "unshared": tuple,
    "refused": Mapping,
}

_EXPECTED = (
    "'module(parameter)', or 'module(0)' for the module's output of that index: a Split or another rule, or None for "
    "no rule ('(parameter)' is a parameter of the model itself, and '(parameter.field)' a field of a dataclass); "
    "'module': a Gather of its output or a tuple or list of them, its Attention calls (a tuple, OneForEach, "
    "LinearAttention, AttentionByHeads), a Halo, or None ('' is the model itself, whose outputs are only gathered); "
    "'joint_order': a tuple of names of segments; 'batched', 'common', 'unshared', 'refused': as in a Plan; 'plan': a "
    "Plan; 'CachedBlocks': CachedBlocks(...) or None; 'samples': the number of samples in the examples, or None"
)
# Matches "module(parameter)", "module(parameter[index])" and "module(index of an output)", each also with the
# path of a field: "module(parameter.field)".
_PARAMETER_NAME = re.compile(r"(.*)\((\w+(?:\[\d+\])?(?:\.\w+)*)\)")


class _Kind(Enum):
    """The part of a proposal that an answer gives."""

    PLAN = auto()
    FIELD = auto()  # a field of the plan, set as it is
    NOT_IN_PLAN = auto()  # the block stack, or the number of samples
    SHARD_RULE = auto()  # of a parameter or an output, or None
    GATHER = auto()  # of a module's output, or several
    HALO = auto()
    ATTENTION = auto()
    NO_RULES = auto()  # None for a module


def _classify(name: str, answer: Any) -> _Kind | None:
    """Return the kind of an answer; None if ``answer`` does not have the type that ``name`` requires."""
    kind = None
    if name == "plan":
        if isinstance(answer, Plan):
            kind = _Kind.PLAN
    elif name in _PLAN_FIELDS:
        if _fits_field(name, answer):
            kind = _Kind.FIELD
    elif name == "CachedBlocks":
        if answer is None or isinstance(answer, CachedBlocks):
            kind = _Kind.NOT_IN_PLAN
    elif name == "samples":
        # A number below 2 becomes a question, in completion.py.
        if answer is None or type(answer) is int:
            kind = _Kind.NOT_IN_PLAN
    elif (module_and_key := split_name(name)) is not None:
        is_rule = answer is None or isinstance(answer, get_args(ShardRule))
        if is_rule and not _is_output_of_model(*module_and_key):
            kind = _Kind.SHARD_RULE
    else:
        kind = _classify_rule_of_module(answer)
    return kind


def _fits_field(name: str, answer: Any) -> bool:
    """Whether ``answer`` has the type of the field ``name`` of a plan."""
    if not isinstance(answer, _PLAN_FIELDS[name]) or not all(isinstance(entry, str) for entry in answer):
        return False
    if name == "batched":
        # The dims of samples; None for a list with an entry for each sample.
        return all(dim is None or type(dim) is int for dim in answer.values())
    return True


def _is_output_of_model(module: str, key: str | int) -> bool:
    """Whether a name by :func:`split_name` is that of an output of the model itself, which no rule shards."""
    return not module and (isinstance(key, int) or key[0].isdecimal())


def _classify_rule_of_module(answer: Any) -> _Kind | None:
    """Return the kind of an answer whose name is that of a module; None if its type is wrong."""
    if answer is None:
        return _Kind.NO_RULES
    if isinstance(answer, Halo):
        return _Kind.HALO
    if isinstance(answer, _ATTENDING):
        return _Kind.ATTENTION
    if isinstance(answer, tuple) and all(isinstance(entry, Attention) for entry in answer):
        return _Kind.ATTENTION
    outputs = answer
    if not isinstance(answer, (tuple, list)):
        outputs = [answer]
    gathers = [entry for entry in outputs if entry is not None]
    if gathers and all(isinstance(entry, Gather) for entry in gathers):
        return _Kind.GATHER
    return None


def require_answers(answers: Answers, module: nn.Module) -> None:
    """Validate the answers for the model ``module``.

    Whether it has the module or parameter that a rule names shows when the plan is checked. None gives the plan
    no rule, so its name is looked up here.

    Raises:
        TypeError: The value of an answer does not have the type that its name requires.
        ValueError: An answer is None for a module or parameter that does not exist.
    """
    for name, answer in answers.items():
        kind = _classify(name, answer)
        if kind is None:
            raise TypeError(f"answers[{name!r}] is {answer!r}; expected one of: {_EXPECTED}.")
        if answer is None and kind is not _Kind.NOT_IN_PLAN and not _exists(name, module):
            raise ValueError(
                f"answers[{name!r}] is None, and {original_class(module).__name__} has no module or parameter of this "
                "name. Expected the name of a guess, as in the reasons of a proposal."
            )


def _exists(name: str, module: nn.Module) -> bool:
    """Whether ``module`` has a submodule ``name``; for ``"name(parameter)"`` one that takes this parameter.

    A submodule with ``**kwargs`` takes any. Outputs are not looked up, because only a call shows them.
    """
    pattern, key = split_name(name) or (name, 0)
    submodules = matching_modules(module, pattern).values()
    if isinstance(key, int) or key[0].isdecimal():
        return len(submodules) > 0
    parameter = key.partition(".")[0]
    return any(parameter in parameters_of(x) or _takes_any_keyword(x) for x in submodules)


def _takes_any_keyword(module: nn.Module) -> bool:
    cls = original_class(uncompiled(module))
    parameters = inspect.signature(cls.forward).parameters.values()  # type: ignore[attr-defined]
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def are_a_complete_plan(answers: Answers) -> bool:
    """Whether ``answers`` are a complete plan: they have a ``"plan"``, or split a segment and gather an
    output.
    """
    splits = any(isinstance(answer, Split) and answer.segment is not None for answer in answers.values())
    return "plan" in answers or (splits and bool(_of_kind(answers, _Kind.GATHER)))


def _of_kind(answers: Answers, kind: _Kind) -> dict[str, Any]:
    """Return the answers of this kind, in their order."""
    return {name: answer for name, answer in answers.items() if _classify(name, answer) is kind}


def with_answers(plan: Plan, answers: Answers, module: nn.Module) -> Plan:
    """Return ``plan``, of the model ``module``, with the answers in place of the guesses for the same names.

    If several names match a submodule, the first one in a field of the plan counts. So answers stand before the
    guesses that they would lose to, in their own order: an answer may be an exception to a guess, or to a later
    answer. Tokens are gathered once, so an answer that gathers replaces all guesses of where they are; the
    outputs of a whole plan in ``answers`` remain.

    Raises:
        ValueError: An answer is None for a module, parameter or output to which a wider name gives a rule.
    """
    guesses = _without_other_splits(plan, answers)
    gathers = _of_kind(answers, _Kind.GATHER)
    if gathers:
        guesses = replace(guesses, outputs={})
    plan = _with_shard_rules(answers.get("plan", guesses), _shard_rules(answers), module)
    removed = _of_kind(answers, _Kind.NO_RULES)

    def replace_rules(rules: Mapping[str, Any], answered: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: rule for name, rule in rules.items() if name not in answered}
        for name in removed:
            kept = {other: kept[other] for other in kept if not _is_within(other, name, module)}
        merged = {**answered, **kept}
        for name in removed:
            _require_no_rule(merged, name, module)
        return merged

    return replace(
        plan,
        outputs=replace_rules(plan.outputs, gathers),
        attention=replace_rules(plan.attention, _of_kind(answers, _Kind.ATTENTION)),
        halos=replace_rules(plan.halos, _of_kind(answers, _Kind.HALO)),
        **_of_kind(answers, _Kind.FIELD),
    )


def _is_within(name: str, wider: str, module: nn.Module) -> bool:
    """Whether all submodules that ``name`` matches are among those of ``wider``.

    False for a name that matches nothing, so that it remains in the plan: the check of the plan reports it.
    """
    matched = matching_modules(module, name).keys()
    return bool(matched) and matched <= matching_modules(module, wider).keys()


def _without_other_splits(plan: Plan, answers: Answers) -> Plan:
    """Return the guessed ``plan`` without splits of segments that an answer splits, here or elsewhere."""
    segments = {answer.segment for answer in answers.values() if isinstance(answer, Split)} - {None}

    def keep(rules: Mapping[Any, ShardRule]) -> dict[Any, ShardRule]:
        return {
            key: rule
            for key, rule in rules.items()
            if not (isinstance(rule, Split) and rule.segment in segments)
        }

    inner = {name: keep(rules) for name, rules in plan.inner.items()}
    return replace(
        plan, inputs=keep(plan.inputs), inner={name: rules for name, rules in inner.items() if rules}
    )


def split_name(name: str) -> tuple[str, str | int] | None:
    """Return the module and the key in :attr:`Plan.inner` of the name ``"module(key)"``; None for other names.

    An integer names an output of the module by its index. The module is empty for the model itself.
    """
    matched = _PARAMETER_NAME.fullmatch(name)
    if matched is None:
        return None
    module, parameter = matched.groups()
    if parameter.isdecimal():
        return module, int(parameter)
    return module, parameter


def _shard_rules(answers: Answers) -> dict[tuple[str, str | int], ShardRule | None]:
    """Return the answers for parameters and outputs, by :func:`split_name`, in their order."""
    rules: dict[tuple[str, str | int], ShardRule | None] = {}
    for name, answer in answers.items():
        module_and_key = split_name(name)
        if module_and_key is not None:
            rules[module_and_key] = answer
    return rules


def _with_shard_rules(
    plan: Plan, answers: Mapping[tuple[str, str | int], ShardRule | None], module: nn.Module
) -> Plan:
    """Return ``plan`` with the answers for parameters and outputs of ``module`` and its submodules.

    The answer for a name, which may be a pattern, replaces the rules of all names that match no other
    submodules. Those of wider names remain, and apply to the other submodules.

    Raises:
        ValueError: An answer is None, and a wider name gives a rule.
    """
    inputs = dict(plan.inputs)
    inner: dict[str, dict[str | int, ShardRule]]
    inner = {name: dict(rules) for name, rules in plan.inner.items()}
    answered: dict[str, dict[str | int, ShardRule]] = {}
    for (name, key), answer in answers.items():
        if not name:
            # A parameter of the model itself, whose names are no patterns.
            inputs.pop(str(key), None)
            if answer is not None:
                inputs[str(key)] = answer
            continue
        for other, rules in inner.items():
            if key in rules and _is_within(other, name, module):
                del rules[key]
        if answer is not None:
            answered.setdefault(name, {})[key] = answer
    # The last answer first, because each is put before names that would count instead of it.
    for name, rules in reversed(answered.items()):
        inner = _with_answered_rules(inner, name, rules, module)
    inner = {name: rules for name, rules in inner.items() if rules}
    for (name, key), answer in answers.items():
        if answer is None and name:
            _require_no_rule([other for other in inner if key in inner[other]], name, module, f"({key})")
    return replace(plan, inputs=inputs, inner=inner)


def _with_answered_rules(
    inner: Mapping[str, dict[str | int, ShardRule]],
    name: str,
    answered: Mapping[str | int, ShardRule],
    module: nn.Module,
) -> dict[str, dict[str | int, ShardRule]]:
    """Return ``inner`` with the ``answered`` rules of ``name``, which are the first for its submodules.

    The name keeps its place, so that its other rules count where they did, unless a name before it has one of
    these rules for one of its submodules; then it becomes the first name, with all its rules.
    """
    submodules = matching_modules(module, name).keys()
    rules = {**inner.get(name, {}), **answered}
    for other, other_rules in inner.items():
        if other == name:
            return {**inner, name: rules}
        if other_rules.keys() & answered.keys() and matching_modules(module, other).keys() & submodules:
            break
    return {name: rules, **{other: inner[other] for other in inner if other != name}}


def _require_no_rule(names: Iterable[str], name: str, module: nn.Module, key: str = "") -> None:
    """Raise ``ValueError`` if one of ``names``, which have a rule, matches submodules of ``name`` and others, too.
    A name that matches fewer is an answer, which is an exception to the None.

    ``key`` is that of the parameter or output in the names of answers, such as ``"(x)"``; empty for a module.
    """
    submodules = matching_modules(module, name).keys()
    for other in names:
        matched = matching_modules(module, other).keys()
        if matched & submodules and not matched <= submodules:
            raise ValueError(
                f"answers['{name}{key}'] is None, but the plan has a rule for it under the wider name {other!r}, "
                f"which this answer does not remove. Answer None for '{other}{key}', and give the rule to the "
                "modules that need it."
            )
