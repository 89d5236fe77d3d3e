"""Single files of Stable Diffusion in the names of the original code, which diffusers converts when it loads them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

_RESNET = {
    "norm1.": "in_layers.0.",
    "conv1.": "in_layers.2.",
    "norm2.": "out_layers.0.",
    "conv2.": "out_layers.3.",
    "time_emb_proj.": "emb_layers.1.",
    "conv_shortcut.": "skip_connection.",
}
_VAE = (
    (r"^(encoder|decoder)\.conv_norm_out", r"\1.norm_out"),
    (r"mid_block\.attentions\.0\.group_norm", "mid.attn_1.norm"),
    (r"mid_block\.attentions\.0\.to_(q|k|v)\.", r"mid.attn_1.\1."),
    (r"mid_block\.attentions\.0\.to_out\.0\.", "mid.attn_1.proj_out."),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"conv_shortcut", "nin_shortcut"),
    (r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2"),
    (r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample"),
    (r"up_blocks\.(\d+)\.upsamplers\.0", r"up_blocks.\1.upsample"),
    (r"up_blocks\.(\d+)\.resnets", r"up_blocks.\1.block"),
)


def write_checkpoint(pipe: Any, path: Path) -> None:
    """Write the weights of ``pipe``, a Stable Diffusion 1, as one file."""
    weights = {f"model.diffusion_model.{name}": x for name, x in _unet(pipe.unet).items()}
    weights |= {f"first_stage_model.{name}": x for name, x in _vae(pipe.vae).items()}
    clip = "cond_stage_model.transformer.text_model"
    weights |= {f"{clip}.{name.removeprefix('text_model.')}": x for name, x in pipe.text_encoder.state_dict().items()}
    save_file({name: x.contiguous().clone() for name, x in weights.items()}, path)


def _unet(unet: Any) -> dict[str, Any]:
    """Return the weights of a UNet by their original names."""
    return {_unet_name(name, unet): x for name, x in unet.state_dict().items()}


def _unet_name(name: str, unet: Any) -> str:
    layers = unet.config.layers_per_block
    fixed = {
        "time_embedding.linear_1.": "time_embed.0.",
        "time_embedding.linear_2.": "time_embed.2.",
        "conv_in.": "input_blocks.0.0.",
        "conv_norm_out.": "out.0.",
        "conv_out.": "out.2.",
        "mid_block.resnets.0.": "middle_block.0.",
        "mid_block.attentions.0.": "middle_block.1.",
        "mid_block.resnets.1.": "middle_block.2.",
    }
    for new, old in fixed.items():  # the parts outside the lists of blocks
        if name.startswith(new):
            return old + _resnet(name.removeprefix(new), "resnets" in new)
    side, block, kind, index, rest = re.fullmatch(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name).groups()
    first = (layers + 1) * int(block) + (1 if side == "down" else 0)
    prefix = "input_blocks" if side == "down" else "output_blocks"
    if kind == "downsamplers":
        return f"{prefix}.{first + layers}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":
        # The modules of an output block: resnet, attention if any, upsampler.
        position = 2 if hasattr(unet.up_blocks[int(block)], "attentions") else 1
        return f"{prefix}.{first + layers}.{position}.{rest}"
    return f"{prefix}.{first + int(index)}.{0 if kind == 'resnets' else 1}.{_resnet(rest, kind == 'resnets')}"


def _resnet(name: str, is_resnet: bool) -> str:
    for new, old in _RESNET.items() if is_resnet else ():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return name


def _vae(vae: Any) -> dict[str, Any]:
    blocks = len(vae.config.up_block_types)
    weights = {}
    for name, x in vae.state_dict().items():
        renamed = name
        for new, old in _VAE:
            renamed = re.sub(new, old, renamed)
        renamed = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{blocks - 1 - int(match[1])}", renamed)
        weights[renamed] = x
    return weights
