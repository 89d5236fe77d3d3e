"""Scenes of one to three coloured shapes, their captions, their images, and which of them training never sees.

A scene is what is drawn; a caption is what is said about it. Each object sits in one cell of a 3 × 3 grid. A caption
may name the cell ("in the top left") or, for two objects facing each other, the relation ("left of"). What a caption
leaves out is drawn at random.

Held out are the triples (colour, shape, cell) that `is_held_out` names, one in seven. Every pair of the three occurs in
training, the held-out triples never, whether the caption states the cell or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

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


@dataclass(frozen=True)
class Thing:
    """One object: ``colour``, ``shape``, ``size`` and ``cell`` are keys of the tables above."""

    colour: str
    shape: str
    size: str
    cell: str


@dataclass(frozen=True)
class ImageScene:
    """Things in different cells (one to three where there is a caption), in the order in which a caption names them."""

    things: tuple[Thing, ...]
    background: str
    relation: str | None = None  # a key of RELATIONS; only with two things, which then sit in its cells


def is_held_out(colour: str, shape: str, place: str, places: Iterable[str] = CELLS) -> bool:
    """Whether this triple is kept from training; ``place`` is a cell or another of ``places``.

    Seven is a prime and no weight is a multiple of it, so for any two of the three at most two values of the third are
    held out.
    """
    index = list(COLOURS).index(colour) + 2 * SHAPES.index(shape) + 3 * list(places).index(place)
    return index % 7 == 0


def triples(*, held_out: bool, places: Iterable[str] = CELLS) -> Iterator[tuple[str, str, str]]:
    """Yield all (colour, shape, place) that are held out, or all that are not."""
    for triple in product(COLOURS, SHAPES, places):
        if is_held_out(*triple, places) == held_out:
            yield triple


def caption(scene: ImageScene, rng: np.random.Generator | None = None) -> str:
    """Return the words for a scene: the full caption without ``rng``, and in 60 % of the cases with it; in the others
    some words may be left out or moved.

    >>> caption(ImageScene((Thing("red", "circle", "small", "top left"),), "white"))
    'a small red circle in the top left on a white background'
    """
    full = rng is None or rng.random() < 0.6
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


# What a short caption leaves out: of each thing the size, the place, and the background, if they are these.
USUAL_SIZE, USUAL_BACKGROUND = "large", "white"
USUAL_CELLS = {1: ("centre",), 2: ("left", "right"), 3: ("left", "centre", "right")}  # by the number of things


def short_caption(scene: ImageScene, rng: np.random.Generator | None = None) -> str:
    """Return the caption without the words that name what is usual; with ``rng`` each of them may stay.

    Places are left out together or not at all.

    >>> short_caption(ImageScene((Thing("red", "circle", "large", "centre"),), "white"))
    'a red circle'
    """

    def leaves_out(usual: bool) -> bool:
        return usual and (rng is None or bool(rng.random() < 0.8))

    nouns = []
    for thing in scene.things:
        size = "" if leaves_out(thing.size == USUAL_SIZE) else f"{thing.size} "
        nouns.append(f"a {size}{thing.colour} {thing.shape}")
    cells = tuple(thing.cell for thing in scene.things)
    if scene.relation is not None:
        text = f"{nouns[0]} {scene.relation} {nouns[1]}"
    else:
        if not leaves_out(cells == USUAL_CELLS[len(cells)]):
            nouns = [f"{noun} {CELLS[cell]}" for noun, cell in zip(nouns, cells, strict=True)]
        text = nouns[0] if len(nouns) == 1 else f"{', '.join(nouns[:-1])} and {nouns[-1]}"
    return text if leaves_out(scene.background == USUAL_BACKGROUND) else f"{text} on a {scene.background} background"


def words() -> list[str]:
    """Return every word and sign that a caption can hold, sorted: the vocabulary of both tokenizers."""
    text = " ".join([*COLOURS, *SHAPES, *SIZES, *BACKGROUNDS, *CELLS.values(), *RELATIONS, "a and , on background"])
    return sorted(set(text.split()))


# -- random scenes


def choice(rng: np.random.Generator, options: Iterable[Any]) -> Any:
    """Return one of ``options``, each with the same probability."""
    options = list(options)
    return options[int(rng.integers(len(options)))]


def _random_scene(rng: np.random.Generator, num_things: int) -> ImageScene:
    relation = choice(rng, RELATIONS) if num_things == 2 and rng.random() < 0.5 else None
    if relation is None:
        cells = [list(CELLS)[i] for i in rng.permutation(len(CELLS))[:num_things]]
    else:
        cells = list(RELATIONS[relation])
    things = tuple(Thing(choice(rng, COLOURS), choice(rng, SHAPES), choice(rng, SIZES), cell) for cell in cells)
    return ImageScene(things, choice(rng, BACKGROUNDS), relation)


def training_scene(rng: np.random.Generator, weights: Sequence[float] = (0.6, 0.25, 0.15)) -> ImageScene:
    """Return a random scene with one, two or three things (with these probabilities), no thing of it held out."""
    num_things = 1 + int(rng.choice(3, p=weights))
    while True:
        scene = _random_scene(rng, num_things)
        if not any(is_held_out(thing.colour, thing.shape, thing.cell) for thing in scene.things):
            return scene


def usual_scene(rng: np.random.Generator, weights: Sequence[float]) -> ImageScene:
    """Return a random training scene, of which two thirds have the sizes, the places or the background that a short
    caption leaves out.

    ``weights`` are the probabilities of one, two, three things.
    """
    while True:
        scene = training_scene(rng, weights)
        if rng.random() < 2 / 3:
            scene = replace(scene, background=USUAL_BACKGROUND)
        cells = tuple(thing.cell for thing in scene.things)
        if scene.relation is None and rng.random() < 2 / 3:
            cells = USUAL_CELLS[len(cells)]
        sizes = [USUAL_SIZE if rng.random() < 2 / 3 else thing.size for thing in scene.things]
        things = tuple(
            replace(thing, size=size, cell=cell) for thing, size, cell in zip(scene.things, sizes, cells, strict=True)
        )
        if not any(is_held_out(thing.colour, thing.shape, thing.cell) for thing in things):
            return replace(scene, things=things)


def crowded_scene(rng: np.random.Generator) -> ImageScene:
    """Return a thing in nearly every cell, none held out. An autoencoder learns colours sooner from such a scene."""
    things = []
    for cell in CELLS:
        colour, shape, _ = choice(rng, [triple for triple in triples(held_out=False) if triple[2] == cell])
        if rng.random() < 0.8:
            things.append(Thing(colour, shape, choice(rng, SIZES), cell))
    return ImageScene(tuple(things), choice(rng, BACKGROUNDS))


def held_out_scene(rng: np.random.Generator, num_things: int) -> ImageScene:
    """Return a random scene of which *every* thing is held out.

    Raises:
        ValueError: ``num_things`` is not 1, 2 or 3.
    """
    if num_things not in (1, 2, 3):
        raise ValueError(f"num_things is {num_things}; a caption of this grammar names 1, 2 or 3 things")
    scene = _random_scene(rng, num_things)
    things = []
    for thing in scene.things:
        colour, shape, cell = choice(rng, [triple for triple in triples(held_out=True) if triple[2] == thing.cell])
        things.append(Thing(colour, shape, thing.size, cell))
    return ImageScene(tuple(things), scene.background, scene.relation)


# -- images: sizes and places vary a little from image to image

SIDE = 128  # pixels
CELL_CENTRES = (24, 64, 104)  # pixels, of rows and of columns
RADII = {"small": 11.0, "large": 17.0}  # pixels; half of the width of a circle
SQUARE_HALF_SIDE = 0.89  # of the radius: between equal width and equal area
CROSS_HALF_ARM = 0.34  # of the radius
RING_HOLE = 0.52  # of the radius
JITTER = 2.0  # pixels, of the centre, each way
RADIUS_JITTER = 0.05  # of the radius, each way
GREYS = {"white": (245, 245), "grey": (128, 128), "black": (15, 15), "striped": (225, 160)}
STRIPE = 8  # pixels
SUPERSAMPLING = 3


def background(name: str, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Return ``[height, width, 3]`` uint8: one grey, or upright stripes of two greys."""
    light, dark = GREYS[name]
    columns = np.where((np.arange(width) // STRIPE) % 2 == 0, light, dark)
    return np.broadcast_to(columns[None, :, None], (height, width, 3)).astype(np.uint8)


def draw_shape(
    canvas: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, ink: tuple[int, ...] | int
) -> None:
    """Draw ``shape`` of radius ``r`` around (``x``, ``y``), all in pixels of the canvas."""
    box, a, b = (x - r, y - r, x + r, y + r), SQUARE_HALF_SIDE * r, CROSS_HALF_ARM * r
    if shape == "circle":
        canvas.ellipse(box, fill=ink)
    elif shape == "square":
        canvas.rectangle((x - a, y - a, x + a, y + a), fill=ink)
    elif shape == "triangle":
        canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=ink)
    elif shape == "cross":
        canvas.rectangle((x - r, y - b, x + r, y + b), fill=ink)
        canvas.rectangle((x - b, y - r, x + b, y + r), fill=ink)
    elif shape == "ring":
        # Pillow's line grows inwards from the box.
        canvas.ellipse(box, outline=ink, width=max(1, round((1 - RING_HOLE) * r)))
    else:
        raise ValueError(f"unknown shape {shape!r}; draw_shape knows {', '.join(SHAPES)}")


def draw(scene: ImageScene, rng: np.random.Generator) -> np.ndarray:
    """Return the image of a scene, ``[128, 128, 3]`` uint8 RGB, with antialiased edges.

    Cells are 40 pixels apart, two centres at least 36, and no thing is wider than 35.7: things never touch.
    """
    k = SUPERSAMPLING
    image = Image.fromarray(background(scene.background)).resize((SIDE * k, SIDE * k), Image.Resampling.NEAREST)
    canvas = ImageDraw.Draw(image)
    for thing in scene.things:
        row, column = divmod(list(CELLS).index(thing.cell), 3)
        dx, dy = rng.uniform(-JITTER, JITTER, size=2)
        r = RADII[thing.size] * (1 + rng.uniform(-RADIUS_JITTER, RADIUS_JITTER))
        x, y = CELL_CENTRES[column] + dx, CELL_CENTRES[row] + dy
        draw_shape(canvas, thing.shape, x * k, y * k, r * k, COLOURS[thing.colour])
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))


def to_tensor(images: list[np.ndarray]) -> torch.Tensor:
    """Convert uint8 images or videos to ``[B, 3, …, height, width]`` in −1 … 1, channels last in memory."""
    return (torch.from_numpy(np.stack(images)).float() / 127.5 - 1).movedim(-1, 1)
