"""Models with the structure of vit-pytorch, x-transformers and timm's Cait. tests/outside has others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class Mlp(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def image(height: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(width))}


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
