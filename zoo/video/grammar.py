"""Scenes of one coloured shape that moves, their captions, and which of them training never sees.

Held out are the triples (colour, shape, direction) that `is_held_out` names, one in seven. Every pair of the three
occurs in training, the held-out triples never, whether the caption states the direction or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from zoo.flux.grammar import COLOURS, HELD_OUT_MODULUS, SHAPES

# Per unit of time, x to the right and y downwards.
DIRECTIONS = {
    "right": (1, 0),
    "down right": (1, 1),
    "down": (0, 1),
    "down left": (-1, 1),
    "left": (-1, 0),
    "up left": (-1, -1),
    "up": (0, -1),
    "up right": (1, -1),
}
BACKGROUNDS = ("white", "grey", "black")


@dataclass(frozen=True)
class Scene:
    """The content of a video; ``colour``, ``shape``, ``direction`` and ``background`` are keys of the tables."""

    colour: str
    shape: str
    direction: str
    background: str


def is_held_out(colour: str, shape: str, direction: str) -> bool:
    """Whether this triple is kept from training.

    Seven is a prime and no weight is a multiple of it, so for any two of the three at most two values of the third are
    held out.
    """
    index = list(COLOURS).index(colour) + 2 * SHAPES.index(shape) + 3 * list(DIRECTIONS).index(direction)
    return index % HELD_OUT_MODULUS == 0


def triples(*, held_out: bool) -> Iterator[tuple[str, str, str]]:
    """Yield all (colour, shape, direction) that are held out, or all that are not."""
    for colour, shape, direction in product(COLOURS, SHAPES, DIRECTIONS):
        if is_held_out(colour, shape, direction) == held_out:
            yield colour, shape, direction


def random_scene(rng: np.random.Generator, *, held_out: bool) -> Scene:
    """Return a scene whose triple is held out, or is not."""
    options = list(triples(held_out=held_out))
    return Scene(*options[int(rng.integers(len(options)))], BACKGROUNDS[int(rng.integers(len(BACKGROUNDS)))])


def caption(scene: Scene, rng: np.random.Generator | None = None) -> str:
    """Return the words for a scene: the full caption without ``rng``; with it, direction or background may be left out.

    >>> caption(Scene("red", "circle", "up left", "white"))
    'a red circle moving up left on a white background'
    """
    background = [f"a {scene.colour} {scene.shape}", f"moving {scene.direction}", f"on a {scene.background} background"]
    if rng is not None:
        background = [background[0], *(part for part in background[1:] if rng.random() >= 0.1)]
    return " ".join(background)


def words() -> list[str]:
    """Return every word that a caption can hold, sorted: the vocabulary of the tokenizer."""
    text = " ".join([*COLOURS, *SHAPES, *DIRECTIONS, *BACKGROUNDS, "a moving on background"])
    return sorted(set(text.split()))
