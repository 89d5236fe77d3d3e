"""What a person says of a model, by the names that a proposal asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from para_core.adapters.propose.stack import error_of
from para_core.cache.blocks import CachedBlocks
from para_core.plans.plan import Attention, Gather, Halo, LinearAttention, OneForEach, Plan, ShardRule, Split
from para_core.torch_internals import tree_leaves, tree_map
from para_core.verify.virtual_ranks import fresh

Answers = Mapping[str, Any]

# Fields of a Plan that are given under their own names.
_FIELDS = {"batched": Mapping, "common": tuple, "unshared": tuple, "refused": Mapping}

_EXPECTED = (
    "'module(parameter)' or 'module(0)', which is its output of that index: a Split or its like, or None for nothing ('(parameter)' is one of "
    "the model itself); 'module': a Gather of what it returns or a tuple of them, its Attention calls (a tuple, OneForEach, "
    "LinearAttention), a Halo, or None for nothing; 'joint_order': names of segments; 'batched', 'common', 'unshared', 'refused': as in a "
    "Plan; 'plan': a Plan; 'CachedBlocks': CachedBlocks(...), or None for none; 'samples': how many the examples hold, or None"
)
OF_PARAMETER = re.compile(r"(.*)\((\w+(?:\[\d+\])?)\)")


def require_answers(answers: Answers) -> None:
    """
    Raises:
        TypeError: an answer is none that can be given to that name.
    """
    for name, answer in answers.items():
        if not _fits(name, answer):
            raise TypeError(f"answers[{name!r}] is {answer!r}; expected one of: {_EXPECTED}.")


def _fits(name: str, answer: Any) -> bool:
    if name == "CachedBlocks":
        return answer is None or isinstance(answer, CachedBlocks)
    if name == "samples":
        return answer is None or type(answer) is int
    if name == "plan":
        return isinstance(answer, Plan)
    if name == "joint_order":
        return isinstance(answer, tuple) and all(isinstance(one, str) for one in answer)
    if name in _FIELDS:
        return isinstance(answer, _FIELDS[name])
    if OF_PARAMETER.fullmatch(name):
        return answer is None or isinstance(answer, get_args(ShardRule))
    return answer is None or isinstance(answer, Halo) or _is_gather(answer) or _is_attention(answer)


def _is_gather(answer: Any) -> bool:
    if isinstance(answer, tuple):
        gathers = [one for one in answer if one is not None]
        return bool(gathers) and all(isinstance(one, Gather) for one in gathers)
    return isinstance(answer, Gather)


def _is_attention(answer: Any) -> bool:
    if isinstance(answer, tuple):
        return all(isinstance(one, Attention) for one in answer)
    return isinstance(answer, (OneForEach, LinearAttention))


def is_whole(answers: Answers) -> bool:
    """Whether ``answers`` alone are a plan: they shard tokens, and gather them."""
    splits = any(isinstance(answer, Split) and answer.segment is not None for answer in answers.values())
    return "plan" in answers or (splits and bool(_gathers(answers)))


def _gathers(answers: Answers) -> dict[str, Any]:
    """What is gathered of the outputs of modules; a Gather of a parameter is another thing."""
    return {name: answer for name, answer in answers.items() if _is_gather(answer) and not OF_PARAMETER.fullmatch(name)}


def answered(plan: Plan, answers: Answers) -> Plan:
    """``plan`` with what a person said in place of what was guessed."""
    if "plan" in answers:
        plan = answers["plan"]
    said = {answer.segment for answer in answers.values() if isinstance(answer, Split) and answer.segment is not None}
    plan = _without_splits(plan, said)
    gathers = _gathers(answers)
    if gathers:
        plan = replace(plan, outputs=gathers)
    for name, answer in answers.items():
        parameter = OF_PARAMETER.fullmatch(name)
        if parameter is not None:
            plan = _with_cut(plan, parameter[1], parameter[2], answer)
        elif name == "joint_order" or name in _FIELDS:
            plan = replace(plan, **{name: answer})
        elif name not in ("CachedBlocks", "samples", "plan", *gathers):
            plan = _with_module(plan, name, answer)
    return plan


def _without_splits(plan: Plan, segments: Set[str]) -> Plan:
    """``plan`` without what it guessed of where tokens of these segments are sharded first: that is said once."""

    def kept(cuts: Mapping[Any, ShardRule]) -> dict[Any, ShardRule]:
        return {key: cut for key, cut in cuts.items() if not (isinstance(cut, Split) and cut.segment in segments)}

    inner = {name: kept(cuts) for name, cuts in plan.inner.items()}
    return replace(plan, inputs=kept(plan.inputs), inner={name: cuts for name, cuts in inner.items() if cuts})


def _with_module(plan: Plan, name: str, answer: Any) -> Plan:
    if isinstance(answer, Halo):
        return replace(plan, halos={**plan.halos, name: answer})
    if answer is not None:
        # Where several names fit, the first counts.
        return replace(
            plan, attention={name: answer, **{key: one for key, one in plan.attention.items() if key != name}}
        )
    outputs = {key: one for key, one in plan.outputs.items() if key != name}
    attention = {key: one for key, one in plan.attention.items() if key != name}
    return replace(plan, outputs=outputs, attention=attention)


def _with_cut(plan: Plan, module: str, parameter: str, cut: ShardRule | None) -> Plan:
    said = {} if cut is None else {parameter: cut}
    if not module:
        return replace(plan, inputs={**{key: one for key, one in plan.inputs.items() if key != parameter}, **said})
    # Outputs of a module have numbers.
    key: str | int = int(parameter) if parameter.isdecimal() else parameter
    inner = {
        place: {one: old for one, old in cuts.items() if one != key or not _within(place, module)}
        for place, cuts in plan.inner.items()
    }
    if cut is not None:
        inner[module] = {**inner.get(module, {}), key: cut}
    return replace(plan, inner={place: cuts for place, cuts in inner.items() if cuts})


def _within(place: str, pattern: str) -> bool:
    """Whether the modules at ``place`` are among those of ``pattern``, in which ``*`` stands for any one part."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]+"), place) is not None


def with_samples(module: nn.Module, plan: Plan, inputs: Mapping[str, Any], samples: int) -> Plan | str:
    """``plan`` with ``batched`` and ``common`` for a model whose call holds all branches of guidance, or why that is not exact.

    An argument holds one entry for each sample in its first dim of that length. Each sample alone must give what it gives among all.

    Args:
        samples: how many ``inputs`` holds.
    """
    dims = {name: _dim_of_samples(value, samples) for name, value in inputs.items()}
    batched = {name: dim for name, dim in dims.items() if dim is not None}
    with torch.no_grad():
        expected = _stacked([module(**fresh(inputs))])
        try:
            parts = [
                module(**fresh({name: _sample(one, dims[name], place) for name, one in inputs.items()}))
                for place in range(samples)
            ]
        # Models fail in any way where an argument is not of samples, or one sample is not enough.
        except Exception as failure:
            return f"one sample of {samples} alone fails: {type(failure).__name__}: {failure}"
    error = error_of(_stacked(parts), expected)
    if samples < 2 or not error < 1e-4:
        return f"one sample of {samples} after the other gives something else than all at once ({error:.1e})."
    common = tuple(name for name, value in inputs.items() if name not in batched and _tensors(value))
    return replace(plan, batched=batched, common=common)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _dim_of_samples(value: Any, samples: int) -> int | None:
    shapes = [tuple(x.shape) for x in _tensors(value)]
    if not shapes or not all(samples in shape for shape in shapes):
        return None
    dims = {shape.index(samples) for shape in shapes}
    return dims.pop() if len(dims) == 1 else None


def _sample(value: Any, dim: int | None, place: int) -> Any:
    return value if dim is None else tree_map(lambda x: x.narrow(dim, place, 1) if isinstance(x, Tensor) else x, value)


def _stacked(outs: list[Any]) -> list[Tensor]:
    return [torch.cat(of_all) for of_all in zip(*[_tensors(out) for out in outs], strict=True)]
