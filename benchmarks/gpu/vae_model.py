"""The decoder of FLUX.1's autoencoder in plain PyTorch, for machines without diffusers.

The modules, parameter names and results are those of ``diffusers.AutoencoderKL`` 0.42 without ``quant_conv``, so
para_core's adapter applies to it by the name of the class. It has no encoder and no tiling.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


class AutoencoderKL(nn.Module):
    """The autoencoder of FLUX.1, of which only the decoder is there.

    Args:
        channels: channels of each level, from the image to the latents. Each level but the first doubles the size.
        groups: groups of each norm.
    """

    def __init__(
        self, channels: tuple[int, ...] = (128, 256, 512, 512), latent_channels: int = 16, groups: int = 32
    ) -> None:
        super().__init__()
        self.config = {"block_out_channels": channels}
        self.use_tiling = False
        self.decoder = _Decoder(channels, latent_channels, groups)

    def _encode(self, x: Tensor) -> Tensor:
        raise NotImplementedError("the encoder needs diffusers.")

    def _decode(self, z: Tensor) -> Tensor:
        image: Tensor = self.decoder(z)
        return image

    def decode(self, z: Tensor) -> Tensor:
        """Return the image ``[B, 3, 8 H, 8 W]`` of latents ``[B, C, H, W]``."""
        return self._decode(z)


class _Decoder(nn.Module):
    def __init__(self, channels: tuple[int, ...], latent_channels: int, groups: int) -> None:
        super().__init__()
        inner = channels[::-1]
        self.conv_in = nn.Conv2d(latent_channels, inner[0], 3, padding=1)
        self.mid_block = _MidBlock(inner[0], groups)
        self.up_blocks = nn.ModuleList(
            _UpBlock(before, after, groups, doubles=index < len(inner) - 1)
            for index, (before, after) in enumerate(zip((inner[0], *inner), inner, strict=False))
        )
        self.conv_norm_out = nn.GroupNorm(groups, inner[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(inner[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x)
        image: Tensor = self.conv_out(F.silu(self.conv_norm_out(x)))
        return image


class _MidBlock(nn.Module):
    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_Resnet(channels, channels, groups) for _ in range(2))
        self.attentions = nn.ModuleList([_Attention(channels, groups)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.attentions[0](self.resnets[0](x))
        out: Tensor = self.resnets[1](x)
        return out


class _UpBlock(nn.Module):
    """Three residual blocks, then an upsampling to twice the size if it ``doubles``."""

    def __init__(self, before: int, after: int, groups: int, *, doubles: bool) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_Resnet(before if index == 0 else after, after, groups) for index in range(3))
        self.upsamplers = nn.ModuleList([_Upsampler(after)] if doubles else [])

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.resnets, *self.upsamplers):
            x = layer(x)
        return x


class _Upsampler(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return out


class _Resnet(nn.Module):
    def __init__(self, before: int, after: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, before, eps=1e-6), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, after, eps=1e-6), nn.Conv2d(after, after, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x)))
        out = self.conv2(F.silu(self.norm2(out)))
        result: Tensor = self.conv_shortcut(x) + out
        return result


class _Attention(nn.Module):
    """Attention of all pixels, with one head."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        tokens = self.group_norm(x.view(batch, channels, height * width)).transpose(1, 2)
        query, key, value = (layer(tokens).unsqueeze(1) for layer in (self.to_q, self.to_k, self.to_v))
        out: Any = self.to_out[0](F.scaled_dot_product_attention(query, key, value).squeeze(1))
        return x + out.transpose(1, 2).reshape(batch, channels, height, width)
