"""The cut: the method of a diffusion model whose calls ComfyUI's process sends to the ranks.

`remote_patcher` replaces this method in ComfyUI's process. On a rank, :func:`use_cut` makes it the
``forward`` of the model, because plans and the cache of para_core run around ``forward``.

`rank_model` calls :func:`use_cut` for the model that it has loaded, and `propose` for its small copy. Tests:
tests/comfyui/test_pack.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

_ORIGINAL = "_comfyui_class"  # attribute of a class that use_cut made: the class of ComfyUI


def cut_method_of(cls: type) -> str:
    """Return the name of the method that runs on the ranks: ``"_forward"`` or ``"forward"``.

    In most classes ``forward`` runs the wrappers of other nodes around ``_forward``. These wrappers are
    functions of ComfyUI's process, so there the cut is ``_forward``. Such a ``forward`` names both
    ``_forward`` and the kind of wrappers, ``WrappersMP.DIFFUSION_MODEL``.
    """
    for base in cls.__mro__:
        names = getattr(getattr(base.__dict__.get("forward"), "__code__", None), "co_names", ())
        if {"_forward", "DIFFUSION_MODEL"} <= {*names}:
            return "_forward"
    return "forward"


def bind_arguments(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of the bound ``method`` by name, those of its ``**kwargs`` too. Defaults
    are left out: the ranks have the same. Raise ``TypeError`` for arguments of ``*args``, which have no names.
    """
    signature = inspect.signature(method)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL and name in arguments:
            raise TypeError(
                f"{method.__qualname__} got {len(arguments[name])} arguments of *{name}; expected names."
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def use_cut(model: nn.Module) -> None:
    """Give ``model`` on a rank a class of the same name whose ``forward`` is the method at the cut.

    Adapters and messages name the class, so its name stays.
    """
    cls = type(model)
    method = cut_method_of(cls)
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
