"""Models written by hand, with names of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of ``[B, S, 2 × 8]`` each, two heads."""
    q, k, v = (x.unflatten(2, (2, 8)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """``[B, S, 16]`` by ``[S, 8]``."""
    one, other = x.chunk(2, dim=2)
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], dim=2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mlp = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, latents: Tensor, caption: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(torch.cat([caption, latents], dim=1)).chunk(3, dim=2)
        out = attend(rotate(q, positions), rotate(k, positions), v)
        text, image = out[:, : caption.shape[1]], out[:, caption.shape[1] :]
        return caption + self.mlp(text), latents + self.mlp(image)


class Painter(nn.Module):
    """Two streams, joined with text first; positions are passed in, for text and image together."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.out = (
            nn.Linear(4, 16),
            nn.ModuleList([Layer(), Layer(), Layer()]),
            nn.Linear(16, 4),
        )

    def forward(self, latents: Tensor, caption: Tensor, positions: Tensor) -> Tensor:
        latents = self.embed(latents)
        for layer in self.layers:
            caption, latents = layer(latents, caption, positions)
        return self.out(latents)


class Centred(Painter):
    """Takes the mean of all tokens off between blocks, which no plan can say."""

    def forward(self, latents: Tensor, caption: Tensor, positions: Tensor) -> Tensor:
        latents = self.embed(latents)
        for layer in self.layers:
            caption, latents = layer(latents, caption, positions)
            latents = latents - latents.mean(dim=1, keepdim=True)
        return self.out(latents)


def painter_inputs(tokens: int, text: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return {
        "latents": torch.randn(2, tokens, 4, generator=generator),
        "caption": torch.randn(2, text, 16, generator=generator),
        "positions": torch.randn(text + tokens, 8, generator=generator),
    }


class Chosen(nn.Module):
    """Scales tokens by the largest of all, in a module that must see all of them."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens / (1 + tokens.abs().amax(dim=1, keepdim=True))


class ChoosingLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.chosen = Chosen()

    def forward(self, latents: Tensor, caption: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        caption, latents = super().forward(latents, caption, positions)
        return caption, self.chosen(latents)


class Choosing(Painter):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ChoosingLayer(), ChoosingLayer()])
