"""The modules of an instance: all of them, and those that torch.compile has compiled.

Plans, caches, stages and the adapters call these functions; nothing here changes a module. No module may
contain itself, or :func:`submodules_of` would not end. Tests: tests/instance/test_record.py for
:class:`ModuleTree`, tests/adapters/parallel/test_undo.py for :func:`instances_in`, and
tests/weights/test_pipefusion.py, which refuses compiled modules.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

from torch import nn

from para_core.torch_internals import COMPILED_CALL, DISABLED, ORIGINAL_CALLABLE, ORIGINAL_MODULE, SUBMODULES


def instances_in(instance: Any) -> list[Any]:
    """Return ``instance`` and all modules inside it, each once: submodules if it is a module itself, and
    otherwise the modules among its attributes with their submodules.
    """
    parts = [instance]
    if not isinstance(instance, nn.Module):
        parts = list(getattr(instance, "__dict__", {}).values())
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    return list({id(x): x for x in (instance, *modules)}.values())


def uncompiled(module: Any) -> Any:
    """Return the module that ``torch.compile`` wrapped to make ``module``; ``module`` itself if it was not made so."""
    return getattr(module, ORIGINAL_MODULE, module)


def is_compiled(module: Any) -> bool:
    """Whether ``module`` itself was compiled by ``torch.compile(module)``, ``module.compile()`` or
    ``module.forward = torch.compile(module.forward)``, and not disabled by ``torch.compiler.disable``.
    """
    state = module.__dict__
    if state.get(COMPILED_CALL) is not None:
        return True
    forward = state.get("forward")
    if getattr(forward, DISABLED, False):
        return False
    return ORIGINAL_MODULE in state[SUBMODULES] or hasattr(forward, ORIGINAL_CALLABLE)


def has_compiled_parts(module: Any) -> bool:
    """Whether ``module`` or a module inside it was compiled."""
    return ModuleTree(module).has_compiled_parts()


def submodules_of(module: nn.Module) -> list[nn.Module]:
    """Return ``module`` and all modules inside it, parents first.
    A module that two parents share is listed twice.
    """
    modules: list[nn.Module] = [module]
    # The loop appends to the list that it iterates over, without a Python call per module, unlike
    # module.modules().
    for submodule in modules:
        children = submodule.__dict__[SUBMODULES].values()
        if None in children:
            children = [child for child in children if child is not None]
        modules.extend(children)
    return modules


class ModuleTree:
    """A snapshot of ``module`` and all modules inside it, which can detect changes at every call of the
    model. :class:`~para_core.plans.region.Region` makes a new one when :meth:`is_unchanged` is False.

    A model has over a thousand modules, so the checks are loops in C, without a Python call per module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = submodules_of(module)
        self._states = [submodule.__dict__ for submodule in self._modules]
        self._child_dicts: list[dict[str, nn.Module | None]] = [state[SUBMODULES] for state in self._states]
        self._children = [children.copy() for children in self._child_dicts]
        self._holds_compiled_module = any(map(dict.__contains__, self._child_dicts, repeat(ORIGINAL_MODULE)))

    def is_unchanged(self) -> bool:
        """Whether every module still has the same submodules, by the same names, as in the snapshot."""
        return self._child_dicts == self._children

    def has_compiled_parts(self) -> bool:
        """Whether the module or a module inside it is compiled now. Only valid if :meth:`is_unchanged`."""
        # A compiled module has at least one of the three things that is_compiled() looks at.
        may_be_compiled = (
            self._holds_compiled_module
            or any(map(dict.get, self._states, repeat(COMPILED_CALL)))
            or any(map(dict.__contains__, self._states, repeat("forward")))
        )
        return may_be_compiled and any(map(is_compiled, self._modules))
