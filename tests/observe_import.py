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
import threading
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

WATCHED = ("torch", "diffusers", "transformers", "peft", "accelerate", "safetensors", "huggingface_hub", "numpy")
# torch.DispatchKey does not list them.
KEYS_FOR_TESTS = ("TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper")
# The switches of torch, as expressions.
FLAGS = """
get_default_dtype() get_default_device() get_num_threads() is_grad_enabled() get_rng_state().tolist()
are_deterministic_algorithms_enabled() get_float32_matmul_precision() is_warn_always_enabled()
backends.cuda.matmul.allow_tf32 backends.cudnn.allow_tf32 backends.cudnn.benchmark backends.cuda.flash_sdp_enabled()
backends.cuda.mem_efficient_sdp_enabled() backends.cuda.math_sdp_enabled() backends.cuda.cudnn_sdp_enabled()
_C._len_torch_function_stack() _C._len_torch_dispatch_stack() _tensor_str.PRINT_OPTS
nn.modules.module._global_forward_hooks nn.modules.module._global_forward_pre_hooks
multiprocessing.get_sharing_strategy() distributed.is_initialized() cuda.is_initialized()
"""


def attributes() -> dict[str, Any]:
    """Return the identities of the attributes of modules and classes of other packages, and the names of classes."""
    identities: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in WATCHED and type(module) is types.ModuleType:
            for attribute, value in list(vars(module).items()):
                if not attribute.startswith("__"):
                    identities[f"{name}.{attribute}"] = id(value)
                if issubclass(type(value), type) and value.__module__.split(".")[0] in WATCHED:
                    identities[f"{name}.{attribute}'s name"] = value.__name__, value.__qualname__
                    for member, method in list(vars(value).items()):
                        if callable(method):
                            identities[f"{name}.{attribute}.{member}"] = id(method)
    return identities


def registrations(torch: Any) -> set[str]:
    """Return the registered kernels and fallbacks with their dispatch keys."""
    kernels = set()
    for key in (*torch._C.DispatchKey.__members__, *KEYS_FOR_TESTS):
        # Some names are aliases that have no table.
        with suppress(RuntimeError):
            operators = torch._C._dispatch_get_registrations_for_dispatch_key(key)
            kernels |= {f"{operator} {key}" for operator in operators}
        with suppress(RuntimeError):
            if torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse(key)):
                kernels.add(f"fallback {key}")
    return kernels


def process(torch: Any) -> dict[str, Any]:
    """Return the switches of torch, the levels and handlers of loggers, and the state of the process."""
    states: dict[str, Any] = {flag: repr(eval(f"torch.{flag}", {"torch": torch})) for flag in FLAGS.split()}
    for config in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        if config in sys.modules:
            states[config] = repr(sys.modules[config].save_config_portable())  # type: ignore[attr-defined]
    for name, logger in [("root", logging.root), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger) and not name.startswith("para_core"):
            states[f"logger {name}"] = logger.level, logger.propagate, logger.disabled, len(logger.filters)
            states[f"handlers of {name}"] = [id(handler) for handler in logger.handlers]
    return states | {
        "environment": dict(os.environ),
        "hooks": [id(sys.excepthook), id(threading.excepthook), id(sys.displayhook), id(__import__), id(sys.stdout)],
        "threads": threading.active_count(),
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "limits": [str(Path.cwd()), sys.getrecursionlimit(), locale.setlocale(locale.LC_ALL)],
        "finders": [id(finder) for finder in sys.meta_path],
        "path": list(sys.path),
    }


def exit_hooks() -> list[str]:
    """Return the functions registered with atexit, which compares each with a function that is being unregistered."""
    hooks = []

    class Watch:
        def __eq__(self, other: object) -> bool:
            hooks.append(f"{getattr(other, '__module__', '')}.{getattr(other, '__qualname__', repr(other))}")
            return False

        __hash__ = None  # type: ignore[assignment]

    atexit.unregister(Watch())  # type: ignore[arg-type]
    return hooks


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names whose value changed. A new name belongs to a module that another import loaded."""
    return sorted(name for name, value in before.items() if name in after and after[name] != value)


def main(module: str, first: list[str]) -> None:
    import torch

    for name in first:
        # Modules of other packages that the import loads may register anything. Only what para_core's do is compared.
        with suppress(Exception):
            importlib.import_module(name)
    loaded, hooks, filters = set(sys.modules), exit_hooks(), list(warnings.filters)
    before = attributes(), registrations(torch), process(torch)
    importlib.import_module(module)
    report = {
        "attributes": changed(before[0], attributes()),
        "registrations": sorted(registrations(torch) ^ before[1]),
        "process": changed(before[2], process(torch)),
        "warning filters": [repr(item) for item in warnings.filters if item not in filters],
        "exit hooks": [hook for hook in exit_hooks() if hook not in hooks],
        "modules": [name for name in sys.modules if name not in loaded and name.split(".")[0] in WATCHED],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], json.load(sys.stdin))
