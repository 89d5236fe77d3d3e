"""Tiny diffusers pipelines. All parameters are random, nonzero, and the same in every process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from diffusers import FluxPipeline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from para_core import UnifiedAttnMode
from para_core.adapters.weights.features import method_of
from para_core.attention.mesh_attention import MeshAttention
from para_core.attention.sdpa_call import SdpaCall
from para_core.distributed.mesh import MeshDim
from para_core.instance.record import is_filled
from para_core.instance.slots import Slot
from para_core.plans import exchange
from zoo.flux.models import CLIP_WIDTH, SHIFT, T5_WIDTH, FluxDenoiser
from zoo.tiny.base import fill
from zoo.tiny.pipelines.components import LATENT_CHANNELS, small_vae
from zoo.tiny.pipelines.encoders import tokenizers

# Two blocks of each kind suffice for residuals to pass from one list to the other.
_FLUX = {"num_layers": 2, "num_single_layers": 2, "joint_attention_dim": T5_WIDTH, "pooled_projection_dim": CLIP_WIDTH}
_FLUX |= {"num_attention_heads": 4, "attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}
_vae = cache(small_vae)
# A token is 2 × 2 latent pixels.
FLUX_CHANNELS = 4 * LATENT_CHANNELS
_CONTROL = (diffusers.FluxControlPipeline, diffusers.FluxControlImg2ImgPipeline, diffusers.FluxControlInpaintPipeline)


@cache
def _encoders() -> dict[str, nn.Module]:
    flux = FluxDenoiser(tokenizers())
    return {"text_encoder": fill(flux.text_encoder, seed=3), "text_encoder_2": fill(flux.text_encoder_2, seed=4)}


def _forget_sharded_parts() -> None:
    """Make the shared parts anew if an earlier test has sharded their weights, which is one way."""
    for module in (*_encoders().values(), _vae()):
        if method_of(module) is not None or is_filled(module, Slot.UNUSABLE):
            _encoders.cache_clear()
            _vae.cache_clear()
            return


def flux_transformer(seed: int = 1, **config: Any) -> diffusers.FluxTransformer2DModel:
    """Return a transformer of 2 double and 2 single blocks with 4 heads × 16."""
    return fill(diffusers.FluxTransformer2DModel(**{**_FLUX, "in_channels": FLUX_CHANNELS, **config}), seed)


def flux_controlnet(seed: int = 5) -> diffusers.FluxControlNetModel:
    config = {**_FLUX, "num_layers": 1, "num_single_layers": 1, "in_channels": FLUX_CHANNELS}
    return fill(diffusers.FluxControlNetModel(**config), seed)


def flux_pipe(cls: type = diffusers.FluxPipeline, *, shared_parts: bool = True, **components: Any) -> Any:
    """Return a pipeline with its own transformer.

    Args:
        shared_parts: whether the text encoders and the VAE are those of all pipes of this process.
        components: components to add or replace.
    """
    if "transformer" not in components:
        # A control image is as wide as the image. Fill adds the masked image and 4 × 4 pixels of its mask.
        beside = FLUX_CHANNELS if cls in _CONTROL else 0
        if cls is diffusers.FluxFillPipeline:
            beside = FLUX_CHANNELS + 4 * 4 * 4
        components["transformer"] = flux_transformer(in_channels=FLUX_CHANNELS + beside, out_channels=FLUX_CHANNELS)
    if shared_parts:
        _forget_sharded_parts()
        encoders, vae = _encoders(), _vae()
    else:
        encoders, vae = _encoders.__wrapped__(), small_vae()
    pipe = cls(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        tokenizer=tokenizers().clip,
        tokenizer_2=tokenizers().t5,
        **encoders,
        **components,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def flux_call(**options: Any) -> dict[str, Any]:
    """Return the arguments of a short call: 63 image and 13 text tokens, two steps, latents, a seed."""
    defaults = {
        "prompt": "a large red circle at the top left, on white",
        "height": 72,
        "width": 56,
        "num_inference_steps": 2,
        "max_sequence_length": 13,
        "output_type": "latent",
    }
    if "generator" not in options:
        options["generator"] = torch.Generator().manual_seed(7)
    return {**defaults, **options}


def flux_inputs(num_image: int, num_text: int, *, batch: int = 1, channels: int = FLUX_CHANNELS) -> dict[str, Tensor]:
    """Return the arguments of one call of the transformer, with positions in a row of ``num_image`` tokens."""
    generator = torch.Generator().manual_seed(num_image)
    ids = torch.zeros(num_image, 3)
    ids[:, 2] = torch.arange(num_image)
    return {
        "hidden_states": torch.randn(batch, num_image, channels, generator=generator),
        "encoder_hidden_states": torch.randn(batch, num_text, T5_WIDTH, generator=generator),
        "pooled_projections": torch.randn(batch, CLIP_WIDTH, generator=generator),
        "timestep": torch.full((batch,), 0.6),
        "img_ids": ids,
        "txt_ids": torch.zeros(num_text, 3),
    }


@contextmanager
def each_rank_alone() -> Iterator[None]:
    """Compute every attention call in this context on this rank's tokens only, as a plan without collectives would."""

    def attend_alone(over_mesh: MeshAttention, call: SdpaCall) -> Tensor:
        query, key, value, mask = call[:4]
        if mask is not None:
            mask = mask[..., -1:, -key.shape[2] :].expand(-1, -1, query.shape[2], -1)
        with UnifiedAttnMode.disable():
            return call.with_tensors(query, key, value, mask).original()

    own_sum = mock.patch.object(exchange, "sum_over_ranks", lambda x, mesh: x)
    own_tokens = mock.patch.object(exchange, "all_to_all", _all_to_all_alone)
    with mock.patch.object(MeshAttention, "__call__", attend_alone), own_sum, own_tokens:
        yield


def _all_to_all_alone(x: Tensor, send_sizes: list[int], receive_sizes: list[int], dim: MeshDim) -> Tensor:
    """Return the result of an all-to-all in which other ranks send zeros."""
    received = list(x.new_zeros(sum(receive_sizes)).split(receive_sizes))
    received[dim.index] = x.split(send_sizes)[dim.index]
    return torch.cat(received)


def load_pipe(folder: str | Path, cls: type = FluxPipeline) -> Any:
    """Return the pipeline of a folder as diffusers alone loads it, in float32 and without progress bars."""
    pipe = cls.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return ``‖out − expected‖ / ‖expected‖`` in float64, or infinity if shapes differ or a number is NaN."""
    if out.shape != expected.shape:
        return math.inf
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    return float(error.nan_to_num(nan=math.inf))


def relative_errors(out: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Return :func:`relative_error` by name. The names must be the same."""
    assert out.keys() == expected.keys()
    return {name: relative_error(out[name], expected[name]) for name in expected}


def cpu_mesh(ring: int, ulysses: int, *, batch: int = 1) -> DeviceMesh:
    """Return a mesh of all ranks, ``ring × ulysses`` or ``batch × ring × ulysses``."""
    if batch > 1:
        return init_device_mesh("cpu", (batch, ring, ulysses), mesh_dim_names=("batch", "ring", "ulysses"))
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
