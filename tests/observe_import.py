"""Import a module and print the changes outside it as JSON. tests/test_import.py runs this in its own interpreter."""

from __future__ import annotations

import atexit
import importlib
import json
import locale
import logging
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

WATCHED = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "huggingface_hub", "numpy")


def is_watched(name: str) -> bool:
    return name.partition(".")[0] in WATCHED


def attributes() -> dict[str, int]:
    """Return the identities of the attributes of modules and classes of other packages."""
    identities: dict[str, int] = {}
    for name, module in list(sys.modules.items()):
        if is_watched(name) and type(module) is types.ModuleType:
            for attribute, value in list(vars(module).items()):
                if not attribute.startswith("__"):
                    identities[f"{name}.{attribute}"] = id(value)
                if issubclass(type(value), type) and is_watched(value.__module__):
                    for member, method in list(vars(value).items()):
                        if callable(method):
                            identities[f"{name}.{attribute}.{member}"] = id(method)
    return identities


def class_names() -> dict[str, tuple[str, str, str]]:
    names = {}
    for name, module in list(sys.modules.items()):
        if is_watched(name) and type(module) is types.ModuleType:
            for attribute, value in list(vars(module).items()):
                if issubclass(type(value), type):
                    names[f"{name}.{attribute}"] = (value.__name__, value.__qualname__, value.__module__)
    return names


# torch.DispatchKey does not list them.
KEYS_FOR_TESTS = ("TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper")


def dispatch_keys(torch: Any) -> dict[str, Any]:
    keys = dict(torch._C.DispatchKey.__members__)
    for name in KEYS_FOR_TESTS:
        with suppress(RuntimeError):
            keys[name] = torch._C._dispatch_key_parse(name)
    return keys


def registrations(torch: Any) -> set[str]:
    """Return the registered kernels with their dispatch keys."""
    kernels = set()
    for key in dispatch_keys(torch):
        try:
            operators = torch._C._dispatch_get_registrations_for_dispatch_key(key)
        except RuntimeError:
            continue
        kernels |= {f"{operator} {key}" for operator in operators}
    return kernels


def fallbacks(torch: Any) -> set[str]:
    keys = set()
    for name, key in dispatch_keys(torch).items():
        try:
            if torch._C._dispatch_has_backend_fallback(key):
                keys.add(name)
        except RuntimeError:
            continue
    return keys


def flags(torch: Any) -> dict[str, str]:
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    read: dict[str, Callable[[], Any]] = {
        "default dtype": torch.get_default_dtype,
        "default device": torch.get_default_device,
        "threads": torch.get_num_threads,
        "gradients": torch.is_grad_enabled,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "precision": torch.get_float32_matmul_precision,
        "tf32": lambda: (matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "benchmark": lambda: torch.backends.cudnn.benchmark,
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
        "math": cuda.math_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
        "rng": lambda: torch.get_rng_state().tolist(),
        "modes": torch._C._len_torch_function_stack,
        "dispatch modes": torch._C._len_torch_dispatch_stack,
        "module hooks": lambda: (
            len(torch.nn.modules.module._global_forward_hooks),
            len(torch.nn.modules.module._global_forward_pre_hooks),
        ),
        "warn always": torch.is_warn_always_enabled,
        "print options": lambda: vars(torch._tensor_str.PRINT_OPTS),
        "sharing": torch.multiprocessing.get_sharing_strategy,
        "distributed": torch.distributed.is_initialized,
        "cuda": torch.cuda.is_initialized,
    }
    values = {name: repr(value()) for name, value in read.items()}
    for config in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        if config in sys.modules:
            values[config] = repr(sys.modules[config].save_config_portable())  # type: ignore[attr-defined]
    return values


def loggers() -> dict[str, Any]:
    states: dict[str, Any] = {}
    for name, logger in [("", logging.root), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger) and not name.startswith("para_core"):
            states[f"{name} level"] = logger.level
            states[f"{name} handlers"] = [id(handler) for handler in logger.handlers]
            states[f"{name} rest"] = logger.propagate, logger.disabled, len(logger.filters)
    return states


def exit_hooks() -> list[str]:
    """Return the functions registered with atexit, which cannot list them, but compares each with a function that is
    being unregistered.
    """
    hooks = []

    class Watch:
        def __eq__(self, other: object) -> bool:
            hooks.append(f"{getattr(other, '__module__', '')}.{getattr(other, '__qualname__', repr(other))}")
            return False

        __hash__ = None  # type: ignore[assignment]

    atexit.unregister(Watch())  # type: ignore[arg-type]
    return hooks


def process() -> dict[str, Any]:
    import threading

    return {
        "environment": dict(os.environ),
        "excepthook": id(sys.excepthook),
        "thread excepthook": id(threading.excepthook),
        "threads": threading.active_count(),
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "folder": str(Path.cwd()),
        "recursion limit": sys.getrecursionlimit(),
        "locale": locale.setlocale(locale.LC_ALL),
        "meta path": [id(finder) for finder in sys.meta_path],
        "path": list(sys.path),
        "stdout": id(sys.stdout),
        "displayhook": id(sys.displayhook),
        "import": id(__import__),
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Return the names whose value changed. A new name belongs to a module that another import loaded."""
    return (name for name, value in before.items() if name in after and after[name] != value)


def main(module: str, first: list[str]) -> None:
    import torch

    for name in first:
        # Modules of other packages that the import loads may register anything. Only changes by para_core's modules are
        # compared.
        with suppress(Exception):
            importlib.import_module(name)
    before = observe(torch)
    loaded = set(sys.modules)
    importlib.import_module(module)
    after = observe(torch)
    report = {
        "attributes": sorted(changed(before["attributes"], after["attributes"])),
        "class names": sorted(changed(before["class names"], after["class names"])),
        "registrations": sorted(after["registrations"] - before["registrations"]),
        "fallbacks": sorted(after["fallbacks"] ^ before["fallbacks"]),
        "flags": sorted(changed(before["flags"], after["flags"])),
        "warning filters": [repr(item) for item in after["filters"] if item not in before["filters"]],
        "loggers": sorted(changed(before["loggers"], after["loggers"])),
        "exit hooks": [hook for hook in after["exit hooks"] if hook not in before["exit hooks"]],
        "process": sorted(changed(before["process"], after["process"])),
        "modules": [name for name in sys.modules if name not in loaded and is_watched(name)],
    }
    print(json.dumps(report))


def observe(torch: Any) -> dict[str, Any]:
    return {
        "attributes": attributes(),
        "class names": class_names(),
        "registrations": registrations(torch),
        "fallbacks": fallbacks(torch),
        "flags": flags(torch),
        "filters": list(warnings.filters),
        "loggers": loggers(),
        "exit hooks": exit_hooks(),
        "process": process(),
    }


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin))
