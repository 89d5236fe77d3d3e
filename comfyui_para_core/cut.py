"""The method of a diffusion model at which ComfyUI's process and the ranks are cut apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_ORIGINAL = "_comfyui_class"


def method_of(cls: type) -> str:
    """Return the name of the method that runs on the ranks: ``"_forward"`` or ``"forward"``.

    In most classes ``forward`` runs the wrappers of other nodes around ``_forward``. These wrappers are functions of
    ComfyUI's process, so there the cut is ``_forward``.
    """
    for base in cls.__mro__:
        names = getattr(getattr(base.__dict__.get("forward"), "__code__", None), "co_names", ())
        if {"_forward", "DIFFUSION_MODEL"} <= {*names}:
            return "_forward"
    return "forward"


def by_name(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the bound ``method`` by name, those of its ``**kwargs`` too."""
    signature = inspect.signature(method)
    bound = signature.bind(*args, **kwargs).arguments
    rest = [
        name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD
    ]
    return {
        **{name: value for name, value in bound.items() if name not in rest},
        **bound.get("".join(rest), {}),
    }


def use_cut(model: nn.Module) -> None:
    """Give ``model`` on a rank a class of the same name whose ``forward`` is the method at the cut."""
    cls = type(model)
    method = method_of(cls)
    if method != "forward":
        namespace = {
            "forward": getattr(cls, method),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        namespace[_ORIGINAL] = cls
        model.__class__ = type(cls.__name__, (cls,), namespace)


def original_of(cls: type) -> type:
    """Return the class of ComfyUI from which :func:`use_cut` made ``cls``, or ``cls`` itself."""
    original: type = getattr(cls, _ORIGINAL, cls)
    return original
