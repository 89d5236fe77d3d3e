"""Stand-ins for timm's vision transformer, and for FLUX as ComfyUI runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.outside.official import HEADS, WIDTH, DoubleStreamBlock, EmbedND, LastLayer, Mlp, grid, heads, sdpa

# -- timm: the class token and positions are added before an nn.Sequential of blocks, and the class token is read after.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(sdpa(*heads(self.qkv(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """The structure of ``timm.models.vision_transformer.VisionTransformer`` with ``dynamic_img_size=True``."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, WIDTH, 6, 6))
        self.blocks = nn.Sequential(*[Block() for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = x + F.interpolate(self.pos_embed, x.shape[2:], mode="bilinear")
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], dim=1)
        return self.norm(self.blocks(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)[:, 0])


# -- ComfyUI: attention is a function of ``[B, S, H * D]``, the model computes positions, and a prompt's options
# (``transformer_options``) may replace blocks.


def attention_pytorch(q: Tensor, k: Tensor, v: Tensor, num_heads: int, mask: Tensor | None = None) -> Tensor:
    return sdpa(*(x.unflatten(2, (num_heads, -1)) for x in (q, k, v)), mask)


# ComfyUI chooses this function with --use-pytorch-cross-attention.
optimized_attention = attention_pytorch


class ComfyDoubleBlock(DoubleStreamBlock):
    def attend(self, *qkv: Tensor) -> Tensor:
        return optimized_attention(*(x.flatten(2) for x in qkv), HEADS)


class ComfyFlux(nn.Module):
    """The structure of ``comfy.ldm.flux.model.Flux``."""

    def __init__(self) -> None:
        super().__init__()
        self.pe_embedder = EmbedND()
        self.img_in, self.txt_in, self.vector_in = nn.Linear(16, WIDTH), nn.Linear(20, WIDTH), nn.Linear(12, WIDTH)
        self.double_blocks = nn.ModuleList(ComfyDoubleBlock() for _ in range(2))
        self.final_layer = LastLayer(16)

    def forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, y: Tensor, transformer_options: dict[str, Any] | None = None
    ) -> Tensor:
        height, width = x.shape[2] // 2, x.shape[3] // 2
        img = self.img_in(F.pixel_unshuffle(x, 2).flatten(2).transpose(1, 2))
        txt = self.txt_in(context)
        vec = self.vector_in(y) + timestep[:, None]
        img_ids = F.pad(grid(height, width).float(), (1, 0)).expand(len(x), -1, -1)
        pe = self.pe_embedder(torch.cat([img_ids.new_zeros(len(x), context.shape[1], 3), img_ids], dim=1))
        replaced = ((transformer_options or {}).get("patches_replace") or {}).get("dit", {})
        for i, block in enumerate(self.double_blocks):
            if ("double_block", i) in replaced:
                args = {"img": img, "txt": txt, "vec": vec, "pe": pe}

                def original_block(args: dict[str, Tensor], block: nn.Module = block) -> dict[str, Tensor]:
                    return dict(zip(("img", "txt"), block(**args), strict=True))

                out = replaced["double_block", i](args, {"original_block": original_block})
                img, txt = out["img"], out["txt"]
            else:
                img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
        out = self.final_layer(img, vec).transpose(1, 2).unflatten(2, (height, width))
        return F.pixel_shuffle(out, 2)
