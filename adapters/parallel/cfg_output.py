"""What a call of a transformer will give, known before it is computed: a run of a copy without weights, on the meta device.

Sizes, dtypes and form of an output follow from the class, its config, the dtypes of its parameters and the arguments, in most models
however many blocks lie between. So the copy has one block of each kind: some 0.1 s for one of 60 blocks, of which the whole takes 3 s.
"""

from __future__ import annotations

import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from para_core.instance_patching import has_compiled_parts, uncompiled, unwrapped_class
from para_core.torch_internals import forward_hooks, pytree

# Names in a config, of how many blocks there are.
_DEPTH = re.compile(r"(num|n)_(\w+_)?(layers|blocks)|depth")
_COMPUTED_IN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


def foreseen_output(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``module(*args, **kwargs)`` gives, with tensors on the meta device; None if that is not known beforehand.

    It is not where the model reads values of tensors; where a block depends on how many there are (a copy of all takes seconds); where
    it is not as its config says: weights that were quantized or cast, a ``forward`` of the user's own; where a call may change its
    arguments; and under autocast, which knows no meta device. A compiled model is left out, for the ranks should compile at the
    same time, rather than wait for each other.

    The model itself is not touched, and none of its hooks runs.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    devices = {x.device for x in leaves if isinstance(x, Tensor) and x.numel() > 1}
    if len(devices) != 1 or torch.is_autocast_enabled(devices.pop().type):
        return None
    if not _is_as_configured(module) or not all(isinstance(x, _PLAIN) for x in leaves):
        return None
    # Modes, autocast and gradients are of a thread: in one of its own, nothing of the caller's takes part, or is told.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run_copy, module, args, kwargs).result()


def _is_as_configured(module: Any) -> bool:
    """Whether nothing was put around or in the place of what the class and the config say, as far as the parameters do not show it."""
    if uncompiled(module) is not module or has_compiled_parts(module):
        return False
    # Hooks of accelerate and diffusers replace forward, too, and give what it gives.
    own_forward = "forward" in vars(module) and not (hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook"))
    return hasattr(module, "config") and not own_forward and all(map(_only_gathers, forward_hooks(module)))


def _only_gathers(hook: Any) -> bool:
    """FSDP2 gathers weights before a call, and frees them behind it."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def _run_copy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        with torch.no_grad(), torch.device("meta"):
            args, kwargs = pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs))
            found = _copy(module)(*args, **kwargs)
    except Exception:
        # Whatever it is (a value that is read, an operator that meta lacks, a wrong argument), the model will tell.
        return None
    leaves = [x for x in pytree.tree_leaves(found) if x is not None]
    return found if all(isinstance(x, Tensor) and x.is_meta for x in leaves) else None


def _copy(module: nn.Module) -> nn.Module:
    """A model of the same class and config on the meta device, but with one block of each kind.

    Raises:
        ValueError: ``module`` has become another, or a block of it depends on how many there are.
    """
    cls = unwrapped_class(module)
    config: Any = module.config
    parameters = inspect.signature(cls).parameters
    given = {name: value for name, value in config.items() if name in parameters}
    shallow = {name: 1 for name, value in given.items() if _DEPTH.fullmatch(name) and isinstance(value, int) and value}
    copy: nn.Module = cls(**{**given, **shallow}).to("meta").eval()
    # A LoRA puts the layer that it changes one level deeper.
    own = {name.replace(".base_layer.", "."): x for name, x in chain(module.named_parameters(), module.named_buffers())}
    for name, x in chain(copy.named_parameters(), copy.named_buffers()):
        found = own.get(name)
        if found is None or found.shape != x.shape or (x.is_floating_point() and found.dtype not in _COMPUTED_IN):
            raise ValueError(f"{name} of this {cls.__name__} is not as its config says.")
        x.data = x.data.to(found.dtype)
    return copy
