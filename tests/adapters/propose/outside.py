"""Models with the structure of timm, SD3.5's and DiT's official code, vit-pytorch and x-transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.modes.fake_flash_attn import flash_attn_func


class Attention(nn.Module):
    """The attention of timm, with fused projections."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class HandAttention(Attention):
    """The attention of vit-pytorch, which computes the softmax itself."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


class FlashAttention(Attention):
    """The attention of official repositories, which call FlashAttention with ``[B, S, H, D]``."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out: Tensor = flash_attn_func(q, k, v)
        return out.transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class VitBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(dim), Attention(dim), nn.LayerNorm(dim), Mlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """The structure of timm's VisionTransformer: blocks in nn.Sequential, a class token, a pooled head, any image
    size.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 16, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.blocks = nn.Sequential(VitBlock(), VitBlock(), VitBlock())
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


def image(height: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(width))}


class JointBlock(nn.Module):
    """The joint block of SD3.5, whose ``forward(*args, **kwargs)`` calls a function."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.context_qkv, self.x_qkv = nn.Linear(16, 48), nn.Linear(16, 48)
        self.context_proj, self.x_proj, self.modulation = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.last = last

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor | None, Tensor]:
        return _mix(self, *args, **kwargs)


def _mix(block: JointBlock, context: Tensor, x: Tensor, c: Tensor) -> tuple[Tensor | None, Tensor]:
    text = context.shape[1]
    shift = block.modulation(c)[:, None]
    joint = torch.cat([block.context_qkv(context + shift), block.x_qkv(x + shift)], dim=1)
    q, k, v = joint.unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + block.x_proj(out[:, text:])
    return None if block.last else context + block.context_proj(out[:, :text]), x


class Joint(nn.Module):
    """The structure of SD3.5's MMDiTX, with its names of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder, self.context_embedder = nn.Conv2d(4, 16, 2, 2), nn.Linear(8, 16)
        self.t_embedder, self.y_embedder = nn.Linear(1, 16), nn.Linear(6, 16)
        self.joint_blocks = nn.ModuleList([JointBlock(), JointBlock(), JointBlock(last=True)])
        self.final_layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, t: Tensor, y: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        height, width = x.shape[2] // 2, x.shape[3] // 2
        x = self.x_embedder(x).flatten(2).transpose(1, 2)
        c = self.t_embedder(t[:, None]) + self.y_embedder(y)
        context = self.context_embedder(context)
        for block in self.joint_blocks:
            context, x = block(context, x, c=c)
        x = self.final_layer(x).unflatten(1, (height, width)).unflatten(3, (2, 2, 4))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def joint_inputs(height: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(width)
    return {
        "x": torch.randn(2, 4, height, width, generator=generator),
        "t": torch.rand(2, generator=generator),
        "y": torch.randn(2, 6, generator=generator),
        "context": torch.randn(2, 5, 8, generator=generator),
    }


class DitBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(16, elementwise_affine=False)
        self.attn, self.mlp, self.modulation = Attention(), Mlp(), nn.Linear(16, 32)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.modulation(F.silu(c)).chunk(2, dim=1)
        x = x + self.attn(self.norm1(x) * (1 + scale[:, None]) + shift[:, None])
        return x + self.mlp(x)


class Dit(nn.Module):
    """The structure of facebookresearch's DiT: position embeddings of a fixed length, for square images only."""

    def __init__(self) -> None:
        super().__init__()
        self.x_embedder = nn.Conv2d(4, 16, 2, 2)
        self.pos_embed = nn.Parameter(torch.zeros(1, 25, 16), requires_grad=False)
        self.t_embedder, self.y_embedder = nn.Linear(1, 16), nn.Embedding(11, 16)
        self.blocks = nn.ModuleList([DitBlock(), DitBlock()])
        self.final_layer = nn.Linear(16, 16)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t[:, None].float()) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x))

    def unpatchify(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        if side * side != x.shape[1]:
            raise AssertionError
        return x.reshape(x.shape[0], side, side, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], 4, 2 * side, -1)


def dit_inputs(side: int = 10) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(side)
    return {
        "x": torch.randn(2, 4, side, side, generator=generator),
        "t": torch.tensor([7, 7]),
        "y": torch.tensor([3, 10]),
    }


class Lists(nn.Module):
    """The structure of vit-pytorch's Transformer: a list of lists, with residuals added outside the modules."""

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.ModuleList([attention(), Mlp()]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in self.layers:
            x = attention(x) + x
            x = mlp(x) + x
        return self.norm(x)


class NormLists(nn.Module):
    """The structure of x-transformers' layers: lists of a list of norms and a module."""

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        modules = [attention(), Mlp(), attention(), Mlp()]
        self.layers = nn.ModuleList(nn.ModuleList([nn.ModuleList([nn.LayerNorm(16)]), module]) for module in modules)

    def forward(self, x: Tensor) -> Tensor:
        for norms, module in self.layers:
            x = x + module(norms[0](x))
        return x


class PaddedAttention(nn.Module):
    """Attention that pads all tokens to a multiple of 4, and masks the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (self.q, self.k, self.v))
        tokens = q.shape[2]
        q, k, v = (F.pad(y, (0, 0, 0, -tokens % 4)) for y in (q, k, v))
        valid = torch.arange(q.shape[2]) < tokens
        out = F.scaled_dot_product_attention(q, k, v, valid[None, None, None])[:, :, :tokens]
        return self.out(out.transpose(1, 2).flatten(2))


class PaddedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = PaddedAttention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class PaddedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, 16), nn.ModuleList([PaddedBlock(), PaddedBlock()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class HalfByHand(nn.Module):
    """The structure of timm's Cait: blocks that compute a softmax by hand, then a class token that attends by SDPA to
    their tokens.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.blocks = nn.Conv2d(3, 16, 4, 4), Lists(HandAttention)
        self.query = nn.Parameter(torch.zeros(1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch_embed(x).flatten(2).transpose(1, 2))
        return F.scaled_dot_product_attention(self.query.expand(x.shape[0], -1, -1), x, x)


class ListVit(nn.Module):
    def __init__(self, attention: type[Attention] = Attention, lists: type[nn.Module] = Lists) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Conv2d(3, 16, 4, 4)
        self.transformer, self.linear_head = lists(attention), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.to_patch_embedding(x).flatten(2).transpose(1, 2)
        return self.linear_head(self.transformer(x).mean(dim=1))


class EncoderModel(nn.Module):
    """A model of torch's own encoder, in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.embed(x))
