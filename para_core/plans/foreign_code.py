"""Find code of the user's own that runs inside a planned model, where it sees the tokens of one rank only.

A plan knows what the code of one class does with tokens. A subclass with another ``forward``, a replaced
submodule, an attention processor or a hook may look at the whole sequence, count tokens or index them, and
would be wrong without an error. What a module calls but does not hold, such as a function of the user's in
the module's globals, is not found.

This only finds and names the code. :mod:`.attention_check` warns of it, and ``adapters/vae/unet.py`` does for
a UNet. Tests: tests/plans/test_foreign_code.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

from para_core.instance.modules import submodules_of
from para_core.instance.private_class import original_class
from para_core.torch_internals import FORWARD_HOOKS, FORWARD_PRE_HOOKS

# Packages whose models have plans that were written, and are tested, for their code.
PACKAGES_OF_MODELS = frozenset({"diffusers", "transformers"})
# Packages whose modules, processors and hooks are covered by plans, or treat each token alone: layers of
# adapters and of quantized weights, and hooks that move weights.
_KNOWN_PACKAGES = PACKAGES_OF_MODELS | {
    *("torch", "peft", "torchao", "para_core", "accelerate", "bitsandbytes", "optimum"),
}


def processor_of(module: nn.Module) -> Any:
    """Return the attention processor of ``module``; None if it has none."""
    processor = module.__dict__.get("processor")
    if processor is None:
        return module._modules.get("processor")
    return processor


def find_foreign_code(module: nn.Module, written_for: type) -> list[str]:
    """Return a phrase for each piece of code inside ``module`` that its plan does not cover, each kind once.

    Args:
        module: A model with a plan.
        written_for: The class that the plan was written for, ``type(module)`` or one of its base classes.
            Code of its package is covered.
    """
    covered = _KNOWN_PACKAGES | {written_for.__module__.partition(".")[0]}
    # The first module stands for all that have the same code.
    first: dict[str, nn.Module] = {}
    # The ids of the classes of the modules that have no code of their own, and of their processors.
    seen: set[tuple[int, int]] = set()
    for part in submodules_of(module):
        state = part.__dict__
        written_for_part = None
        if part is module:
            written_for_part = written_for
        elif not ("forward" in state or state[FORWARD_PRE_HOOKS] or state[FORWARD_HOOKS]):
            kind = id(type(part)), id(type(state.get("processor")))
            if kind in seen:
                continue
            seen.add(kind)
        for phrase in _find_foreign_parts(part, covered, written_for_part):
            first.setdefault(phrase, part)
    if not first:
        return []
    names = {part: repr(name) for name, part in module.named_modules()}
    names[module] = "the model itself"
    return [f"{phrase} at {names.get(part, names[module])}" for phrase, part in first.items()]


def _find_foreign_parts(part: nn.Module, known: frozenset[str], written_for: type | None) -> Iterator[str]:
    """Yield a phrase for each piece of code of one module that comes from none of the ``known`` packages.

    ``written_for`` is the class of the plan if ``part`` is the model itself, and None for a module inside it.
    Hooks of the model's own package count as foreign, because they are added to it.
    """
    cls = original_class(part)
    state = part.__dict__
    forward: Any = cls.forward  # type: ignore[attr-defined]
    if written_for is None and _package_of(cls) not in known:
        yield f"the module {_name(cls)}"
    elif written_for is not None and forward is not written_for.forward:  # type: ignore[attr-defined]
        yield f"the forward of {_name(cls)}, which overrides that of {written_for.__qualname__},"
    elif _package_of(forward) not in known:
        # Somebody has replaced the method of a class, as TeaCache does.
        yield f"the method {_name(forward)} of {cls.__qualname__}"
    if "forward" in state and _package_of(state["forward"]) not in known:
        yield f"the method forward, replaced by {_name(state['forward'])},"
    processor = processor_of(part)
    # A processor that is a module is found among the modules.
    if processor is not None and not isinstance(processor, nn.Module):
        kind = type(processor)
        if not {_package_of(kind), _package_of(kind.__call__)} <= known:
            yield f"the processor {_name(kind)}"
    for hooks in (FORWARD_PRE_HOOKS, FORWARD_HOOKS):
        for hook in state.get(hooks, {}).values():
            if _package_of(hook) not in _KNOWN_PACKAGES:
                yield f"the hook {_name(hook)}"


def _module_of(code: Any) -> str:
    """Return the name of the Python module that defines a class, a function or a callable object."""
    code = _unbound(code)
    if isinstance(code, type):
        return code.__module__
    # functools.wraps copies __module__ from the wrapped function, but not __globals__.
    scope = getattr(code, "__globals__", None)
    if scope is not None:
        return str(scope.get("__name__", ""))
    return str(getattr(code, "__module__", None) or type(code).__module__)


def _package_of(code: Any) -> str:
    """Return the name of the package that defines a class, a function or a callable object."""
    # The first two cases are those of _module_of(), repeated to save two Python calls for each kind of
    # module: tests/test_walks.py counts them.
    if isinstance(code, type):
        return code.__module__.partition(".")[0]
    if isinstance(code, FunctionType):
        return str(code.__globals__.get("__name__", "")).partition(".")[0]
    return _module_of(code).partition(".")[0]


def _unbound(code: Any) -> Any:
    """Return the function inside a partial or a bound method; other ``code`` itself."""
    if isinstance(code, functools.partial):
        return _unbound(code.func)
    if hasattr(code, "__func__"):
        return _unbound(code.__func__)
    return code


def _name(code: Any) -> str:
    code = _unbound(code)
    if not hasattr(code, "__qualname__"):
        code = type(code)
    return f"{_module_of(code)}.{code.__qualname__}"
