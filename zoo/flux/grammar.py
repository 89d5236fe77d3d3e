"""Scenes of one to three coloured shapes, their captions, and which of them training never sees.

A scene is what is drawn; a caption is what is said about it. Each object sits in one cell of a 3 × 3 grid. A caption
may name the cell ("in the top left") or, for two objects facing each other, the relation ("left of"). What a caption
leaves out is drawn at random.

Held out are the triples (colour, shape, cell) that `is_held_out` names, one in seven. Every pair of the three occurs in
training, the held-out triples never, whether the caption states the cell or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

COLOURS = {
    "red": (220, 40, 40),
    "orange": (240, 125, 20),
    "yellow": (235, 205, 30),
    "green": (40, 165, 65),
    "cyan": (35, 195, 215),
    "blue": (45, 80, 220),
    "purple": (130, 50, 190),
    "pink": (245, 105, 175),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring")
SIZES = ("small", "large")
BACKGROUNDS = ("white", "grey", "black", "striped")

# Row by row; the index is the cell: row = cell // 3, column = cell % 3.
CELLS = {
    "top left": "in the top left",
    "top": "at the top",
    "top right": "in the top right",
    "left": "on the left",
    "centre": "in the centre",
    "right": "on the right",
    "bottom left": "in the bottom left",
    "bottom": "at the bottom",
    "bottom right": "in the bottom right",
}
# Relation: the cells of the first and of the second object.
RELATIONS = {
    "left of": ("left", "right"),
    "right of": ("right", "left"),
    "above": ("top", "bottom"),
    "below": ("bottom", "top"),
}
HELD_OUT_MODULUS = 7


@dataclass(frozen=True)
class Thing:
    """One object: ``colour``, ``shape``, ``size`` and ``cell`` are keys of the tables above."""

    colour: str
    shape: str
    size: str
    cell: str


@dataclass(frozen=True)
class Scene:
    """Things in different cells (one to three where there is a caption), in the order in which a caption names them."""

    things: tuple[Thing, ...]
    background: str
    relation: str | None = None  # a key of RELATIONS; only with two things, which then sit in its cells


def is_held_out(colour: str, shape: str, cell: str) -> bool:
    """Whether this triple is kept from training.

    Seven is a prime and no weight is a multiple of it, so for each colour and shape one or two of the nine cells are
    held out, and for each colour and cell, or shape and cell, at most two values of the third.
    """
    index = list(COLOURS).index(colour) + 2 * SHAPES.index(shape) + 3 * list(CELLS).index(cell)
    return index % HELD_OUT_MODULUS == 0


def in_training(scene: Scene) -> bool:
    """Whether training may draw the scene: none of its things is held out."""
    return not any(is_held_out(thing.colour, thing.shape, thing.cell) for thing in scene.things)


def triples(*, held_out: bool) -> Iterator[tuple[str, str, str]]:
    """Yield all (colour, shape, cell) that are held out, or all that are not."""
    for colour, shape, cell in product(COLOURS, SHAPES, CELLS):
        if is_held_out(colour, shape, cell) == held_out:
            yield colour, shape, cell


def caption(scene: Scene, rng: np.random.Generator | None = None, *, plain: float = 0.6) -> str:
    """Return the words for a scene: the full caption without ``rng``; with it, some words may be left out or moved.

    Args:
        plain: probability that none is, all the same.

    >>> caption(Scene((Thing("red", "circle", "small", "top left"),), "white"))
    'a small red circle in the top left on a white background'
    """
    full = rng is None or rng.random() < plain
    drop = (lambda: False) if full or rng is None else (lambda: bool(rng.random() < 0.3))
    nouns = [" ".join(["a", *([] if drop() else [thing.size]), thing.colour, thing.shape]) for thing in scene.things]
    if scene.relation is None:
        nouns = [
            noun if drop() else f"{noun} {CELLS[thing.cell]}" for noun, thing in zip(nouns, scene.things, strict=True)
        ]
        text = nouns[0] if len(nouns) == 1 else f"{', '.join(nouns[:-1])} and {nouns[-1]}"
    else:
        text = f"{nouns[0]} {scene.relation} {nouns[1]}"
    if drop():
        return text
    where = f"on a {scene.background} background"
    # The two orders are equally common among the captions that are not plain.
    return f"{where}, {text}" if not full and rng is not None and rng.random() < 0.5 else f"{text} {where}"


def words() -> list[str]:
    """Return every word and sign that a caption can hold, sorted: the vocabulary of both tokenizers."""
    text = " ".join([*COLOURS, *SHAPES, *SIZES, *BACKGROUNDS, *CELLS.values(), *RELATIONS, "a and , on background"])
    return sorted(set(text.split()))


def _choice(rng: np.random.Generator, options: list[str] | tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def _random_scene(rng: np.random.Generator, num_things: int) -> Scene:
    relation = _choice(rng, list(RELATIONS)) if num_things == 2 and rng.random() < 0.5 else None
    if relation is None:
        cells = [list(CELLS)[i] for i in rng.permutation(len(CELLS))[:num_things]]
    else:
        cells = list(RELATIONS[relation])
    things = tuple(
        Thing(_choice(rng, list(COLOURS)), _choice(rng, SHAPES), _choice(rng, SIZES), cell) for cell in cells
    )
    return Scene(things, _choice(rng, BACKGROUNDS), relation)


def training_scene(rng: np.random.Generator, weights: tuple[float, float, float] = (0.6, 0.25, 0.15)) -> Scene:
    """Return a random scene with one, two or three things (with these probabilities), no thing of it held out."""
    num_things = 1 + int(rng.choice(3, p=weights))
    while True:
        scene = _random_scene(rng, num_things)
        if in_training(scene):
            return scene


def crowded_scene(rng: np.random.Generator) -> Scene:
    """Return a thing in nearly every cell, none of them held out. No caption describes such a scene; an autoencoder
    learns colours sooner from it.
    """
    allowed = list(triples(held_out=False))
    things = []
    for cell in CELLS:
        here = [triple for triple in allowed if triple[2] == cell]
        colour, shape, _ = here[int(rng.integers(len(here)))]
        if rng.random() < 0.8:
            things.append(Thing(colour, shape, _choice(rng, SIZES), cell))
    return Scene(tuple(things), _choice(rng, BACKGROUNDS))


def held_out_scene(rng: np.random.Generator, num_things: int) -> Scene:
    """Return a random scene of which *every* thing is held out.

    Raises:
        ValueError: ``num_things`` is not 1, 2 or 3.
    """
    if num_things not in (1, 2, 3):
        raise ValueError(f"num_things is {num_things}; a caption of this grammar names 1, 2 or 3 things")
    held_out = list(triples(held_out=True))
    scene = _random_scene(rng, num_things)
    things = []
    for thing in scene.things:
        here = [triple for triple in held_out if triple[2] == thing.cell]
        colour, shape, cell = here[int(rng.integers(len(here)))]
        things.append(Thing(colour, shape, thing.size, cell))
    return Scene(tuple(things), scene.background, scene.relation)
