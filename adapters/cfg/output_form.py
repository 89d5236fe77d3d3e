"""Shapes and dtypes of a transformer's output before it runs, computed by a copy of the model on the meta
device.

A rank that does not compute a CFG branch needs these to receive the output of that branch. They depend on the
class, its config, the dtypes of its parameters and the arguments, and in most models not on the number of
blocks. So the copy has one block of each kind, which takes less time than all blocks.

``guided_calls.py`` passes :func:`predict_output` to ``para_core/cfg/guidance.py``, which calls it and falls
back to a call on all ranks. Tests: tests/adapters/test_guidance.py.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from para_core.adapters.inspect.components import config_and_depths
from para_core.instance.modules import has_compiled_parts, uncompiled
from para_core.instance.private_class import unwrapped_class
from para_core.recorder.without_data import attention_without_data
from para_core.torch_internals import forward_hooks, pytree

logger = logging.getLogger(__name__)

_COMPUTE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Types of arguments that a call cannot change, or, as tensors, that are replaced by copies on the meta device.
_COPYABLE = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))


def predict_output(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the output of ``module(*args, **kwargs)`` with tensors on the meta device; None if it cannot be
    predicted.

    It cannot be predicted if

    - the model reads values of tensors, or one of its blocks depends on the number of blocks;
    - the model differs from its config (quantized or cast weights, a ``forward`` set by the user, or a hook
      of the model itself);
    - an argument is or contains something that the call might change, such as an object with state (``_COPYABLE``);
    - the tensors of the arguments are on several devices or on none; those with one element do not count,
      because schedulers keep timesteps on the CPU;
    - autocast is on, because the meta device has no autocast;
    - the model is compiled: then all ranks should compile at the same time instead of waiting for each other.

    The model is not changed, and none of its hooks runs. Hooks of its submodules are not looked at, because
    most only observe: if one changes the form of the output, the first generation raises on all ranks, and
    later ones predict nothing (:mod:`para_core.cfg.guidance`).

    Whether the result is None, and what it is, must depend only on what is equal on all ranks, because those
    that do not compute a call rely on the same form: see :data:`~para_core.cfg.guidance.PredictOutput`.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    devices = {x.device for x in leaves if isinstance(x, Tensor) and x.numel() > 1}
    if len(devices) != 1 or torch.is_autocast_enabled(devices.pop().type):
        return None
    if not _is_as_configured(module) or not all(isinstance(x, _COPYABLE) for x in leaves):
        return None
    # Torch function modes, autocast and grad mode are per thread, so a new thread is free of the caller's.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run_copy, module, args, kwargs).result()


def _is_as_configured(module: Any) -> bool:
    """Whether ``module`` runs its class's ``forward``, not compiled and without hooks of its own but FSDP2's."""
    if uncompiled(module) is not module or has_compiled_parts(module):
        return False
    # accelerate and diffusers install hooks by setting ``forward`` on the instance, and mark it by these
    # attributes. Theirs move weights and inputs between devices, which does not change the output.
    has_other_forward = "forward" in vars(module) and not (
        hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")
    )
    return (
        hasattr(module, "config")
        and not has_other_forward
        and all(
            # FSDP2 gathers weights before a call and frees them after it, which does not change the output.
            str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")
            for hook in forward_hooks(module)
        )
    )


def _run_copy(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the output of a copy of ``module`` on the meta device; None if the copy cannot compute it."""
    try:
        with torch.no_grad(), torch.device("meta"), attention_without_data():
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda x: torch.empty_like(x, device="meta"), (args, kwargs)
            )
            output = _make_meta_copy(module)(*args, **kwargs)
    except Exception as error:
        # An error is expected if the model reads a value, the meta device lacks an operator, or an argument
        # is wrong. The call of the real model follows and raises a proper error.
        logger.debug("the output of %s is not known before its call: %s", type(module).__name__, error)
        return None
    leaves = [x for x in pytree.tree_leaves(output) if x is not None]
    if all(isinstance(x, Tensor) and x.is_meta for x in leaves):
        return output
    return None


def _make_meta_copy(module: nn.Module) -> nn.Module:
    """Return a model of the same class and config on the meta device, with one block of each kind.

    Raises ``ValueError`` if ``module`` differs from its config: a weight has another shape, or a dtype that
    is not a floating-point compute dtype (quantized or 8-bit weights).
    """
    cls = unwrapped_class(module)
    config, depths = config_and_depths(module)
    copy: nn.Module = cls(**{**config, **dict.fromkeys(depths, 1)}).to("meta").eval()
    # PEFT renames a layer that has a LoRA from ``name`` to ``name.base_layer``. With another name,
    # test_model_unlike_its_config_is_not_predicted (tests/adapters/test_guidance.py) fails.
    weights = {
        name.replace(".base_layer.", "."): x
        for name, x in chain(module.named_parameters(), module.named_buffers())
    }
    for name, x in chain(copy.named_parameters(), copy.named_buffers()):
        weight = weights.get(name)
        if (
            weight is None
            or weight.shape != x.shape
            or (x.is_floating_point() and weight.dtype not in _COMPUTE_DTYPES)
        ):
            raise ValueError(f"{name} of this {cls.__name__} differs from its config.")
        x.data = x.data.to(weight.dtype)
    return copy
