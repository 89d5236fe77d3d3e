"""A plan for a class of ``comfy/ldm`` that none is recorded for: proposed on a small copy of the model.

`rank_model` calls it in the first call of the model. The search itself is ``propose_plan`` of
para_core.adapters; recorded plans stand in `plans`. Tests: tests/comfyui/test_pack.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import comfy.ops
import torch
import torch.distributed as dist
from torch import nn

from para_core import adapters
from para_core.adapters import Adapter

from .cut import original_of, use_cut

# Arguments of constructors that count blocks.
_DEPTHS = (
    *(
        "depth",
        "depth_single_blocks",
        "num_layers",
        "n_layers",
        "num_blocks",
        "num_single_layers",
        "n_double_layers",
    ),
    *("num_dit_layers", "num_double_stream_layers", "num_refiner_layers", "n_refiner_layers", "patch_depth"),
)
_BLOCKS = 2
_MOST_PARAMETERS = 3_000_000_000  # 12 GB in float32
# Tokens per side of the two calls that are shown to propose_plan. They differ in one side only.
_HEIGHT, _WIDTHS = 5, (7, 9)


def propose_on_small_model(base: Any, model: nn.Module, inputs: Mapping[str, Any]) -> Adapter:
    """Return a proposed adapter for the class of ``model``, the same on all ranks.

    Rank 0 proposes it on a copy of the model with two blocks of each kind and random weights, and small
    latents. A collective call if there is a process group.

    Args:
        base: ComfyUI's BaseModel, which has the arguments of the constructor.
        model: Its diffusion model.
        inputs: The arguments of the first call, which say what the model is given.

    Raises:
        ValueError: No plan was exact, or the copy is too large. All ranks raise.
    """
    outcome: list[Any] = [None, None]  # the adapter, and why there is none
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = _propose(base, model, inputs)
        # The constructor and the model may raise anything, and the other ranks wait for the outcome.
        except Exception as error:
            outcome[1] = f"{type(error).__name__}: {error}"
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    adapter, problem = outcome
    if problem is not None:
        raise ValueError(
            f"no plan is recorded for {type(model).__name__}, and none was found on a small copy of it: {problem} "
            "Set ranks to 1 and cache to 0, or use ComfyUI's own loader."
        )
    proposed: Adapter = adapter
    return proposed


def _propose(base: Any, model: nn.Module, inputs: Mapping[str, Any]) -> Adapter:
    """Return a proposed adapter, on this rank alone. May raise anything."""
    small = _make_small_copy(base, original_of(type(model)))
    examples = [_make_example(model, inputs, _HEIGHT, width) for width in _WIDTHS]
    # The proposal of plans is optional. Where it was removed, this raises, and no plan was found.
    adapter: Adapter = adapters.propose_plan(small, examples).adapter()
    return adapter


def _make_small_copy(base: Any, cls: type) -> nn.Module:
    """Return a model of ``cls`` with few blocks and random weights, in float32 on the CPU, where plans are compared."""
    config = {
        key: value for key, value in base.model_config.unet_config.items() if key not in ("dtype", "device")
    }
    for key in _DEPTHS:
        if isinstance(config.get(key), int):
            config[key] = min(config[key], _BLOCKS)
    create = {"dtype": torch.float32, "operations": comfy.ops.disable_weight_init}
    on_meta = cls(**config, device="meta", **create)
    parameters = sum(parameter.numel() for parameter in on_meta.parameters())
    if parameters > _MOST_PARAMETERS:
        raise ValueError(
            f"a copy with {_BLOCKS} blocks has {parameters:,} parameters, more than {_MOST_PARAMETERS:,}."
        )
    small: nn.Module = cls(**config, device="cpu", **create).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    # Every parameter is random, or a part of the model that is multiplied by zero would hide a wrong plan.
    for parameter in small.parameters():
        fan = parameter[0].numel() if parameter.ndim > 1 else 1
        parameter.data.normal_(0, max(1, fan) ** -0.5, generator=generator)
    use_cut(small)
    return small


def _make_example(model: nn.Module, inputs: Mapping[str, Any], height: int, width: int) -> dict[str, Any]:
    """Return ``inputs`` with random latents of ``height × width`` patches in place of tensors of the latent's size.

    The first tensor in ``inputs`` is the latent. Arguments that ``forward`` does not take are left out.
    """
    patch = getattr(model, "patch_size", getattr(model, "patch_spatial", 2))
    patch = patch[-1] if isinstance(patch, (list, tuple)) else patch
    size: tuple[int, ...] = (height * patch, width * patch)
    first = next(value for value in inputs.values() if isinstance(value, torch.Tensor))  # the latent
    latent = first.shape[-2:]
    if first.ndim == 3:  # [B, C, length]: sound
        size, latent = (height * width * patch,), first.shape[-1:]
    example = {name: _resize_latents(value, latent, size) for name, value in inputs.items()}
    accepted = inspect.signature(model.forward).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    return {name: value for name, value in example.items() if any_name or name in accepted}


def _resize_latents(value: Any, latent: torch.Size, size: tuple[int, ...]) -> Any:
    """Return ``value`` with random tensors in place of those whose last dims are ``latent``, with the last
    dims ``size``; other tensors in float32 on the CPU.
    """
    if isinstance(value, torch.Tensor):
        value = value.float().cpu() if value.is_floating_point() else value.cpu()
        if value.ndim < len(latent) + 2 or value.shape[-len(latent) :] != latent:
            return value
        generator = torch.Generator().manual_seed(1)
        return torch.randn((*value.shape[: -len(latent)], *size), generator=generator)
    if isinstance(value, Mapping):
        return {key: _resize_latents(entry, latent, size) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_resize_latents(entry, latent, size) for entry in value)
    return value
