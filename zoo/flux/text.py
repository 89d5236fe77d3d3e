"""The training of the T5 encoder on captions alone: it learns which words are about the same thing.

FLUX takes its text encoders as they come, trained on language long before. Here a minute of captions alone stands in
for that: the embedding of a thing's colour word and of its shape word must tell the whole thing, its size and place
included. Left to the denoiser's loss, 5,000 steps did not teach which attribute belongs to which of two things.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import T5TokenizerFast

from zoo.flux import grammar
from zoo.flux.models import T5_WIDTH
from zoo.training.loop import step_seed
from zoo.training.losses import TEXT_STAGE, vary

ATTRIBUTES = {
    "colour": list(grammar.COLOURS),
    "shape": list(grammar.SHAPES),
    "size": list(grammar.SIZES),
    "cell": list(grammar.CELLS),
}
NAMING = ("colour", "shape")  # each caption has exactly one word of each for a thing, and in the order of the things
THINGS = (0.2, 0.5, 0.3)  # of the captions name one, two, three things
LENGTHS = (32, 32, 32, 64)  # tokens, by turns; longer ones are more padding


class Reader(nn.Module):
    """The encoder, and one linear layer for each attribute; the layers are dropped afterwards."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.heads = nn.ModuleDict({name: nn.Linear(T5_WIDTH, len(values)) for name, values in ATTRIBUTES.items()})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings ``[B, S, C]`` of T5 ids ``[B, S]``."""
        embeddings: torch.Tensor = self.encoder(ids)[0]
        return embeddings


def naming_tokens(tokenizer: T5TokenizerFast, ids: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (caption, thing, position in the caption) of each colour word and each shape word in ``ids``,
    ``[B, S]``.
    """
    tokens = []
    for name in NAMING:
        words = [f"▁{form}" for word in ATTRIBUTES[name] for form in (word, word.capitalize())]
        word_ids = torch.tensor(tokenizer.convert_tokens_to_ids(words), device=ids.device)
        for caption, hits in enumerate(torch.isin(ids, word_ids)):
            positions = hits.nonzero().flatten().tolist()  # none in an empty caption
            tokens += [(caption, thing, position) for thing, position in enumerate(positions)]
    return tokens


@dataclass(frozen=True)
class TextLoss:
    """The summed cross-entropy of each thing's attributes. An attribute that a caption omits can only be guessed."""

    tokenizer: T5TokenizerFast
    seed: int
    batch: int

    def __call__(self, model: nn.Module, step: int) -> torch.Tensor:
        """Return the loss of one step, a scalar."""
        rng = np.random.default_rng(step_seed(self.seed, TEXT_STAGE, step))
        device = next(model.parameters()).device
        scenes = [grammar.training_scene(rng, THINGS) for _ in range(self.batch)]
        captions = vary([grammar.caption(scene, rng) for scene in scenes], rng)
        length = LENGTHS[step % len(LENGTHS)]
        ids = self.tokenizer(captions, padding="max_length", max_length=length, return_tensors="pt").input_ids
        places = naming_tokens(self.tokenizer, ids)
        rows, _, columns = zip(*places, strict=True)
        told = model(ids.to(device))[list(rows), list(columns)]
        return torch.stack(
            [
                F.cross_entropy(
                    model.heads[name](told),
                    torch.tensor(
                        [values.index(getattr(scenes[row].things[thing], name)) for row, thing, _ in places],
                        device=device,
                    ),
                )
                for name, values in ATTRIBUTES.items()
            ]
        ).sum()
