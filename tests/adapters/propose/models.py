"""Models written by hand, with names of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of two heads over ``[B, S, 2 × 8]`` inputs."""
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
    """A model of two streams, joined with text first. Positions of text and image are one argument."""

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
    """Subtracts the mean of all tokens between blocks, which no plan can express."""

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


class UnplacedLayer(Layer):
    def forward(self, latents: Tensor, caption: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """``words``: ``[B, text]``, how much each counts."""
        return super().forward(
            latents, caption * words[:, :, None], torch.zeros(caption.shape[1] + latents.shape[1], 8)
        )


class Weighted(Painter):
    """Has a weight for each word and no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([UnplacedLayer(), UnplacedLayer()])

    def forward(self, latents: Tensor, caption: Tensor, words: Tensor) -> Tensor:
        return super().forward(latents, caption, words)


def weighted_inputs(tokens: int) -> dict[str, Tensor]:
    inputs = painter_inputs(tokens)
    return {"latents": inputs["latents"], "caption": inputs["caption"], "words": inputs["caption"][:, :, 0]}


class Controlled(Painter):
    """A ControlNet's residuals are added between its layers, and layers may be left out."""

    def forward(
        self,
        latents: Tensor,
        caption: Tensor,
        positions: Tensor,
        residuals: list[Tensor] | None = None,
        left_out: int | None = None,
    ) -> Tensor:
        latents = self.embed(latents)
        for place, layer in enumerate(self.layers):
            if place != left_out:
                caption, latents = layer(latents, caption, positions)
            if residuals is not None:
                latents = latents + residuals[place]
        return self.out(latents)


def controlled_inputs(tokens: int, **more: object) -> dict[str, object]:
    generator = torch.Generator().manual_seed(tokens)
    residuals = [torch.randn(2, tokens, 16, generator=generator) for _ in range(3)]
    return {**painter_inputs(tokens), "residuals": residuals, **more}


class Compared(Painter):
    """Samples see each other."""

    def forward(self, latents: Tensor, caption: Tensor, positions: Tensor) -> Tensor:
        out = super().forward(latents, caption, positions)
        return out - out.mean(dim=0, keepdim=True)


class OfTwo(Weighted):
    """Accepts batches of two samples only."""

    def forward(self, latents: Tensor, caption: Tensor, words: Tensor) -> Tensor:
        if latents.shape[0] != 2:
            raise RuntimeError("two")
        return super().forward(latents, caption, words)
