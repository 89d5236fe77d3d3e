"""Models written by hand, with their own names for modules and arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of two heads over ``[B, S, 2 × 8]`` inputs."""
    q, k, v = (x.unflatten(2, (2, 8)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate ``x`` ``[B, S, 16]`` by ``angles`` ``[S, 8]``."""
    first, second = x.chunk(2, dim=2)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=2
    )


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
    """A model that subtracts the mean of all tokens between blocks, which no plan can express."""

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
    """A model that scales tokens by the largest of all. The module that does so has weights and must see all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens / (1 + self.weigh(tokens).abs().amax(dim=1, keepdim=True))


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
        """Scale the caption by ``words`` ``[B, text]``, which has a weight for each word, and paint with it."""
        return super().forward(
            latents, caption * words[:, :, None], torch.zeros(caption.shape[1] + latents.shape[1], 8)
        )


class Weighted(Painter):
    """A model that has a weight for each word and no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([UnplacedLayer(), UnplacedLayer()])

    def forward(self, latents: Tensor, caption: Tensor, words: Tensor) -> Tensor:
        return super().forward(latents, caption, words)


def weighted_inputs(tokens: int) -> dict[str, Tensor]:
    inputs = painter_inputs(tokens)
    return {"latents": inputs["latents"], "caption": inputs["caption"], "words": inputs["caption"][:, :, 0]}


class Controlled(Painter):
    """A model that adds a ControlNet's residuals between its layers and may leave layers out."""

    def forward(
        self,
        latents: Tensor,
        caption: Tensor,
        positions: Tensor,
        residuals: list[Tensor] | None = None,
        left_out: int | None = None,
    ) -> Tensor:
        latents = self.embed(latents)
        for index, layer in enumerate(self.layers):
            if index != left_out:
                caption, latents = layer(latents, caption, positions)
            if residuals is not None:
                latents = latents + residuals[index]
        return self.out(latents)


def controlled_inputs(tokens: int, **more: object) -> dict[str, object]:
    generator = torch.Generator().manual_seed(tokens)
    residuals = [torch.randn(2, tokens, 16, generator=generator) for _ in range(3)]
    return {**painter_inputs(tokens), "residuals": residuals, **more}


class Compared(Painter):
    """A model in which each sample depends on the other samples of its batch."""

    def forward(self, latents: Tensor, caption: Tensor, positions: Tensor) -> Tensor:
        out = super().forward(latents, caption, positions)
        return out - out.mean(dim=0, keepdim=True)


class OfTwo(Weighted):
    """A model that accepts batches of two samples only."""

    def forward(self, latents: Tensor, caption: Tensor, words: Tensor) -> Tensor:
        if latents.shape[0] != 2:
            raise RuntimeError("two")
        return super().forward(latents, caption, words)
