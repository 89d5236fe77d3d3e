"""A plan for a class of ``comfy/ldm`` that none is recorded for: proposed on a small copy of the model.

`rank_model` calls it in the first call of the model. The search itself is ``propose_plan`` of
para_core.adapters; recorded plans stand in `plans`. Tests: tests/comfyui/test_pack.py, on a stand-in for
ComfyUI; that of the search itself is marked long.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from typing import Any

import comfy.ops
import torch
import torch.distributed as dist
from torch import nn

from para_core import adapters
from para_core.adapters import Adapter

from .cut import original_of, use_cut

# Arguments of constructors in comfy/ldm that count blocks, each with a model that has it. A copy of a class
# that counts its blocks by another name has all of them: its plan is as exact, the search takes longer, and a
# copy of more than _MOST_PARAMETERS is refused.
_DEPTHS = (
    "depth",  # Flux
    "depth_single_blocks",  # Flux
    "num_layers",  # Wan
    "n_layers",  # Lumina 2
    "n_refiner_layers",  # Lumina 2
    "n_double_layers",  # AuraFlow
    "num_blocks",  # Cosmos Predict 2
    "num_single_layers",  # HiDream-I1
    "num_refiner_layers",  # OmniGen 2
    "num_double_stream_layers",  # Boogu
    "num_dit_layers",  # ACE-Step 1.5
    "patch_depth",  # PixelDiT
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
        inputs: The arguments of the first call, which say what the model is given, as
            :func:`~.cut.bind_arguments` orders them: the latent is the first.

    Raises:
        ValueError: No plan was exact, the copy is too large, or the first argument is not a latent. All ranks
            raise.
    """
    outcome: list[Any] = [None, None]  # the adapter, and why there is none
    cause: Exception | None = None  # on rank 0 alone, because an exception may not pickle
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            adapter = _propose(base, model, inputs)
            if dist.is_initialized():
                # The broadcast pickles it outside of this block, where an error would be of this rank alone.
                pickle.dumps(adapter)
            outcome[0] = adapter
        # The constructor and the model may raise anything, and the other ranks wait for the outcome.
        except Exception as error:
            cause = error
            outcome[1] = f"{type(error).__name__}: {error}"
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    proposed: Adapter = outcome[0]
    problem = outcome[1]
    if problem is not None:
        raise ValueError(
            f"no plan is recorded for {type(model).__name__}, and none was found on a small copy of it: {problem} "
            "Set ranks to 1 and cache to 0, or use ComfyUI's own loader."
        ) from cause
    return proposed


def _propose(base: Any, model: nn.Module, inputs: Mapping[str, Any]) -> Adapter:
    """Return a proposed adapter, on this rank alone. May raise anything."""
    small = _make_small_copy(base, original_of(type(model)))
    examples = [make_example(model, inputs, _HEIGHT, width) for width in _WIDTHS]
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


def make_example(model: nn.Module, inputs: Mapping[str, Any], height: int, width: int) -> dict[str, Any]:
    """Return ``inputs`` with random latents of ``height × width`` patches in place of tensors with the size
    of the latent. Arguments that ``forward`` does not take are left out.

    Raises:
        ValueError: The first argument is not a latent, ``[B, C, length]`` or ``[B, C, ..., H, W]``.
    """
    name, latent = next(iter(inputs.items()))
    if not isinstance(latent, torch.Tensor) or latent.ndim < 3:
        kind = f"tensor of {latent.ndim} dims" if isinstance(latent, torch.Tensor) else type(latent).__name__
        raise ValueError(
            f"its first argument, {name}, is a {kind}; expected the latent, a tensor [B, C, length] or "
            "[B, C, ..., H, W]."
        )
    rows, columns = _patch_of(model)
    size: tuple[int, ...] = (height * rows, width * columns)
    if latent.ndim == 3:  # sound
        size = (height * width * columns,)
    generator = torch.Generator().manual_seed(1)
    example = {key: _resize_latents(value, latent.shape, size, generator) for key, value in inputs.items()}
    accepted = inspect.signature(model.forward).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    return {key: value for key, value in example.items() if any_name or key in accepted}


def _patch_of(model: Any) -> tuple[int, int]:
    """Return the height and the width of a patch of ``model``; 2 for both if it has no attribute for them."""
    # One number for all dims, (rows, columns), or (frames, rows, columns).
    patch = getattr(model, "patch_size", getattr(model, "patch_spatial", 2))
    sizes = tuple(patch) if isinstance(patch, (list, tuple)) else (patch,)
    return sizes[max(0, len(sizes) - 2)], sizes[-1]


def _resize_latents(value: Any, latent: torch.Size, size: tuple[int, ...], generator: torch.Generator) -> Any:
    """Return ``value`` with random tensors, whose last dims are ``size``, in place of those with the size of
    the latent; other tensors in float32 on the CPU. ``latent`` is the shape of the latent.

    The entries of bools and ints, such as a mask, are drawn from those that the tensor has.
    """
    if isinstance(value, torch.Tensor):
        value = value.float().cpu() if value.is_floating_point() else value.cpu()
        if not _has_latent_size(value.shape, latent):
            return value
        shape = (*value.shape[: -len(size)], *size)
        if value.is_floating_point():
            return torch.randn(shape, generator=generator)
        return value.flatten()[torch.randint(value.numel(), shape, generator=generator)]
    if isinstance(value, Mapping):
        return {key: _resize_latents(entry, latent, size, generator) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_resize_latents(entry, latent, size, generator) for entry in value)
    return value


def _has_latent_size(shape: torch.Size, latent: torch.Size) -> bool:
    """Whether a tensor of ``shape`` has an entry for each pixel of a latent of the shape ``latent``.

    Sound, ``[B, C, length]``, has one number only to tell by, which the channels of a text ``[B, S, C]`` may
    equal. So a tensor beside it counts if it has the channels of the latent, or one as a mask.
    """
    if len(latent) == 3:
        return len(shape) == 3 and shape[2] == latent[2] and shape[1] in (1, latent[1])
    return len(shape) >= 4 and shape[-2:] == latent[-2:]
