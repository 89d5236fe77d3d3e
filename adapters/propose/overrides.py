"""Answers of the user to propose_plan: parts of a plan that replace the guesses of the same name.

``propose.py`` validates them, and ``search.py`` puts them into each candidate. The questions are in
``questions.py`` and ``completion.py``, which also reads the answers ``CachedBlocks`` and ``samples``. Tests:
tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from para_core.cache.blocks import CachedBlocks
from para_core.plans.plan import Attention, AttentionRule, Gather, Halo, Plan, ShardRule, Split

Answers = Mapping[str, Any]

# Types that a value of Plan.attention may have, apart from tuples.
_ATTENDING = tuple(kind for kind in get_args(AttentionRule) if isinstance(kind, type))
# Fields of a Plan that an answer of the same name sets, and their types.
_PLAN_FIELDS = {"batched": Mapping, "common": tuple, "unshared": tuple, "refused": Mapping}

_EXPECTED = (
    "'module(parameter)', or 'module(0)' for the module's output of that index: a Split or another rule, or None for "
    "no rule ('(parameter)' is a parameter of the model itself, and '(parameter.field)' a field of a dataclass); "
    "'module': a Gather of its output or a tuple of them, its Attention calls (a tuple, OneForEach, LinearAttention, "
    "AttentionByHeads), a Halo, or None; 'joint_order': names of segments; 'batched', 'common', 'unshared', 'refused': "
    "as in a Plan; 'plan': a Plan; 'CachedBlocks': CachedBlocks(...) or None; 'samples': the number of samples in the "
    "examples, or None"
)
# Matches "module(parameter)", "module(parameter[index])" and "module(index of an output)", each also with the
# path of a field: "module(parameter.field)".
PARAMETER_NAME = re.compile(r"(.*)\((\w+(?:\[\d+\])?(?:\.\w+)*)\)")


def require_answers(answers: Answers) -> None:
    """Raise ``TypeError`` if the value of an answer does not have the type that its name requires.

    Whether a module or parameter of this name exists shows when the plan is checked.
    """
    for name, answer in answers.items():
        if not _is_answer_for(name, answer):
            raise TypeError(f"answers[{name!r}] is {answer!r}; expected one of: {_EXPECTED}.")


def _is_answer_for(name: str, answer: Any) -> bool:
    """Whether ``answer`` has the type that ``name`` requires."""
    if name == "joint_order":
        return isinstance(answer, tuple) and all(isinstance(segment, str) for segment in answer)
    if name == "plan" or name in _PLAN_FIELDS:
        return isinstance(answer, _PLAN_FIELDS.get(name, Plan))
    if answer is None:
        return True
    if name == "CachedBlocks":
        return isinstance(answer, CachedBlocks)
    if name == "samples":
        return type(answer) is int
    if PARAMETER_NAME.fullmatch(name):
        return isinstance(answer, get_args(ShardRule))
    if isinstance(answer, tuple) and all(isinstance(entry, Attention) for entry in answer):
        return True
    return isinstance(answer, (Halo, *_ATTENDING)) or _is_gather(answer)


def _is_gather(answer: Any) -> bool:
    if isinstance(answer, (tuple, list)):
        gathers = [entry for entry in answer if entry is not None]
        return bool(gathers) and all(isinstance(entry, Gather) for entry in gathers)
    return isinstance(answer, Gather)


def are_a_complete_plan(answers: Answers) -> bool:
    """Whether ``answers`` are a complete plan: they have a ``"plan"``, or split a segment and gather an
    output.
    """
    splits = any(isinstance(answer, Split) and answer.segment is not None for answer in answers.values())
    return "plan" in answers or (splits and bool(_gather_answers(answers)))


def _gather_answers(answers: Answers) -> dict[str, Any]:
    """Return the answers that are a ``Gather`` of a module's output, or several of them, by module name.

    Answers for one parameter or output, whose name is ``"module(parameter)"``, are left out.
    """
    return {
        name: answer
        for name, answer in answers.items()
        if _is_gather(answer) and not PARAMETER_NAME.fullmatch(name)
    }


def with_answers(plan: Plan, answers: Answers) -> Plan:
    """Return ``plan`` with the answers in place of the guesses for the same names."""
    plan = answers.get("plan", plan)
    # If an answer splits a segment, drop all guesses that split the same segment elsewhere.
    segments = {answer.segment for answer in answers.values() if isinstance(answer, Split)} - {None}

    def keep(rules: Mapping[Any, ShardRule]) -> dict[Any, ShardRule]:
        return {
            key: rule
            for key, rule in rules.items()
            if not (isinstance(rule, Split) and rule.segment in segments)
        }

    inner = {name: keep(rules) for name, rules in plan.inner.items()}
    plan = replace(
        plan, inputs=keep(plan.inputs), inner={name: rules for name, rules in inner.items() if rules}
    )
    gathers = _gather_answers(answers)
    if gathers:
        plan = replace(plan, outputs=gathers)
    for name, answer in answers.items():
        parameter = PARAMETER_NAME.fullmatch(name)
        if parameter is not None:
            plan = _with_rule(plan, parameter[1], parameter[2], answer)
        elif name == "joint_order" or name in _PLAN_FIELDS:
            plan = replace(plan, **{name: answer})
        elif isinstance(answer, Halo):
            plan = replace(plan, halos={**plan.halos, name: answer})
        elif name not in ("CachedBlocks", "samples", "plan", *gathers):
            attention = {key: calls for key, calls in plan.attention.items() if key != name}
            if answer is None:
                outputs = {key: gather for key, gather in plan.outputs.items() if key != name}
                plan = replace(plan, outputs=outputs, attention=attention)
            else:
                # Put the answer first: if several names in a plan match a module, the first one applies.
                plan = replace(plan, attention={name: answer, **attention})
    return plan


def _with_rule(plan: Plan, module: str, parameter: str, rule: ShardRule | None) -> Plan:
    """Return ``plan`` with ``rule`` for a parameter or output of ``module``, or without one if it is None.

    It replaces the rules of all names that ``module``, which may be a pattern, matches. An empty ``module``
    stands for the model itself.
    """
    if not module:
        inputs = {key: old for key, old in plan.inputs.items() if key != parameter}
        return replace(plan, inputs=inputs if rule is None else {**inputs, parameter: rule})
    # An integer names an output of the module by its index. In ``module``, ``*`` matches one part between
    # dots.
    key: str | int = int(parameter) if parameter.isdecimal() else parameter
    pattern = re.compile(re.escape(module).replace(r"\*", "[^.]+"))
    inner = {
        name: {other: old for other, old in rules.items() if other != key or not pattern.fullmatch(name)}
        for name, rules in plan.inner.items()
    }
    if rule is not None:
        inner[module] = {**inner.get(module, {}), key: rule}
    return replace(plan, inner={name: rules for name, rules in inner.items() if rules})
