"""Where a plan does something to a model: its submodules by name, and what the plan says of each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from para_core.instance_patching import original_class, uncompiled
from para_core.plans.plan import Attending, AttentionByHeads, Gather, Halo, Plan, ShardRule


@dataclass(frozen=True)
class ModuleRules:
    """What a plan says of one submodule; ``name`` as the plan has it."""

    name: str = ""
    cuts: tuple[tuple[str | int, ShardRule], ...] = ()
    gathers: tuple[Gather | None, ...] = ()
    attention: Attending = ()
    halo: Halo | None = None
    # Of an attention by heads, whether this submodule's output becomes that of all tokens, or its input that of own ones.
    exchange: Literal["enter", "leave"] | None = None

    def with_more(self, other: ModuleRules) -> ModuleRules:
        return ModuleRules(
            self.name,
            (*self.cuts, *other.cuts),
            self.gathers or other.gathers,
            self.attention or other.attention,
            self.halo or other.halo,
            self.exchange or other.exchange,
        )


def match_modules(module: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, ModuleRules]]:
    """Of each submodule that the plan names, by name, the module and all that the plan says of it.

    Raises:
        ValueError: the plan shards or gathers at a module that is not there.
    """
    required = [ModuleRules(name, cuts=tuple(cuts.items())) for name, cuts in plan.inner.items()]
    required += [ModuleRules(name, gathers=as_tuple(rule)) for name, rule in plan.outputs.items() if name]
    required += [ModuleRules(name, halo=halo) for name, halo in plan.halos.items()]
    attending = [ModuleRules(name, attention=attention) for name, attention in plan.attention.items()]
    for name, attention in plan.attention.items():
        if isinstance(attention, AttentionByHeads):
            required += [ModuleRules(f"{name}.{projection}", exchange="enter") for projection in attention.projections]
            required.append(ModuleRules(f"{name}.{attention.output}", exchange="leave"))
    found: dict[str, tuple[nn.Module, ModuleRules]] = {}
    for rules in (*required, *attending):
        matching = matching_modules(module, rules.name)
        if not matching and rules in required:
            raise ValueError(f"the plan names the module {rules.name!r}, which {type(module).__name__} does not have.")
        for name, submodule in matching.items():
            found[name] = (submodule, found[name][1].with_more(rules) if name in found else rules)
    return found


def matching_modules(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Submodules by name; of a compiled one (``OptimizedModule``) the outer, under the name of the inner."""
    parts = {"**": r"(?:.+\.)?", "*": r"[^.]+\."}
    expression = "".join([parts.get(part, re.escape(part) + r"\.") for part in _counted(module, pattern)])
    found: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        plain = name.replace("_orig_mod.", "").removesuffix("._orig_mod")
        if plain not in found and re.fullmatch(expression, f"{plain}."):
            found[plain] = submodule
    return found


def _counted(module: nn.Module, pattern: str) -> list[str]:
    """The parts of ``pattern``, with -1 replaced by the last index."""
    parts = pattern.split(".")
    for place, part in enumerate(parts):
        if part == "-1":
            parts[place] = str(len(list(module.get_submodule(".".join(parts[:place])).children())) - 1)
    return parts


def is_at(module: nn.Module, name: str, submodule: nn.Module) -> bool:
    """Whether ``submodule`` still stands under that name."""
    found: Any = module
    for part in name.split("."):
        found = getattr(uncompiled(found), part, None)
    return found is submodule


def as_tuple(rule: Gather | Sequence[Gather | None]) -> tuple[Gather | None, ...]:
    """What is gathered of each tensor of an output."""
    return (rule,) if isinstance(rule, Gather) else tuple(rule)


# Of ``*args``. More positional arguments have no name.
_MOST_VARIADIC = 16


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of ``forward``, in order; of what torch.compile wraps, those of the module inside.

    Positional arguments behind ``*args`` are called ``args[0]``, ``args[1]``, and so on.
    """
    cls = original_class(uncompiled(module))
    names: list[str] = []
    for index, (name, parameter) in enumerate(inspect.signature(cls.forward).parameters.items()):  # type: ignore[attr-defined]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(_MOST_VARIADIC)]
        elif index > 0:  # the first one is self
            names.append(name)
    return tuple(names)
