"""A description, in plain values, of all that para_core may leave on a pipeline: classes, hooks, tensors and more."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from para_core.instance.private_class import RECORD

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def snapshot(pipe: Any) -> dict[str, str]:
    """Return a description of each attribute, by path. Pipelines built and changed in the same way have equal ones."""
    state = {"modes": str([*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()])}
    state.update(_object(pipe, "pipe"))
    for name, component in pipe.components.items():
        if isinstance(component, nn.Module):
            for at, module in component.named_modules():
                state.update(_module(module, f"pipe.{name}.{at}".rstrip(".")))
        elif component is not None:
            state.update(_object(component, f"pipe.{name}"))
    return state


def differences(actual: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Return the paths that only one snapshot has, or whose descriptions differ."""
    return [
        f"{path}: {actual.get(path, 'missing')}, expected {expected.get(path, 'nothing')}"
        for path in sorted(actual.keys() | expected.keys())
        if actual.get(path) != expected.get(path)
    ]


def _class_of(value: Any) -> str:
    cls = type(value)
    # A private subclass has the name of its base class, so its own attributes identify it.
    private = [name for name in vars(cls) if "para_core" in name]
    return f"{cls.__module__}.{cls.__qualname__}{sorted(private) if private else ''}"


def _object(value: Any, path: str) -> dict[str, str]:
    state = {path: _class_of(value)}
    for name, attribute in getattr(value, "__dict__", {}).items():
        if name == "deprecation_warnings":
            continue  # transformers records in it which hints it has logged in this process.
        # The values differ from call to call, but their classes do not.
        state[f"{path}.{name}"] = ", ".join(sorted(_kinds(attribute)))
    return state


def _kinds(value: Any, depth: int = 3) -> set[str]:
    """Return the classes of ``value`` and of the items of containers in it."""
    kinds = {_class_of(value)}
    if depth and isinstance(value, (list, tuple, set)):
        kinds.update(*[_kinds(each, depth - 1) for each in value], set())
    elif depth and isinstance(value, dict):
        kinds.update(*[_kinds(each, depth - 1) for each in value.values()], set())
    return kinds


def _module(module: nn.Module, path: str) -> dict[str, str]:
    state = {path: _class_of(module)}
    for name, attribute in vars(module).items():
        if name == "_output_capturing_hooks_installed":
            # transformers installs its own hooks at the first call of an encoder, and some pipelines share an encoder.
            continue
        if name in _HOOKS:
            hooks = [hook for hook in attribute.values() if "output_capturing" not in getattr(hook, "__module__", "")]
            state[f"{path}.{name}"] = str(sorted(map(_class_of, hooks)))
        elif name not in ("_parameters", "_buffers", "_modules"):
            state[f"{path}.{name}"] = _class_of(attribute)
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        state[f"{path}.{name}"] = "None" if tensor is None else describe(tensor)
    return state


def describe(tensor: Tensor) -> str:
    """Return the tensor's class, dtype, shape, ``requires_grad``, device, and a digest of its values."""
    kind = f"{_class_of(tensor)} {tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad} {tensor.device}"
    if tensor.is_meta:
        return kind
    plain = tensor.detach()
    if isinstance(plain, DTensor):
        plain = plain.to_local()
    if type(plain) not in (Tensor, nn.Parameter):
        plain = plain.dequantize() if hasattr(plain, "dequantize") else plain.to(torch.float32)
    values = plain.contiguous().flatten().view(torch.uint8)
    return f"{kind} {hashlib.sha1(values.numpy().tobytes()).hexdigest()[:12]}"


def tensors_of_ours(pipe: Any) -> list[str]:
    """Return the attributes of the pipeline and its components, modules excepted, that hold a class of para_core."""
    parts = {f"pipe.{name}": part for name, part in pipe.components.items() if not isinstance(part, nn.Module)}
    return [
        f"{path}.{name} holds {kind}"
        for path, part in {"pipe": pipe, **parts}.items()
        for name, value in getattr(part, "__dict__", {}).items()
        for kind in sorted(_kinds(value))
        if kind.startswith("para_core") and name != RECORD
    ]
