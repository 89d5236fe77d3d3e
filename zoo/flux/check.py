"""Image → what is in it, found without any network: colour, shape, size and cell of each object.

Backgrounds are greys and things are not, so an object is a connected patch of saturated pixels. Its colour is the
nearest of the palette, its shape the template, sharp or blurred, that overlaps best when laid over it, its cell the one
whose centre its box is centred on. A verdict that is not clear is None, which equals nothing that was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from skimage.measure import label

from zoo.flux.scenes import CELL_CENTRES, CELLS, COLOURS, GREYS, SHAPES, ImageScene, Thing, background, draw_shape

SATURATED = 60  # max − min over RGB; the palest colour of the palette has 125, so edges count from about one half
MIN_PIXELS = 40  # smaller patches are specks; the smallest true object has more than 100
COLOUR_DISTANCE = 70.0  # ‖RGB − palette‖; the closest two of the palette are 80 apart
MIN_OVERLAP = 0.75  # intersection over union
TEMPLATE_SIDE = 64  # pixels of a template's box
# Blurs in pixels of a template: none, and 1 and 2 pixels of an object that is 20 wide, as autoencoders blur edges. A
# blurred triangle has lost its tips, so a sharp template does not fit it. A larger blur makes a circle of a square.
BLURS = (0, 4, 7)
CELL_DISTANCE = 12.0  # pixels, each way; cells are 40 apart and true objects at most 2 off, triangles too
LARGE_FROM = 26.0  # pixels, the longer side of the box; small: at most 23.1, large: at least 28.7
BACKGROUND_DISTANCE = 30.0  # mean |difference| in grey levels; the closest two backgrounds are 53 apart


@dataclass(frozen=True)
class DetectedObject:
    """One object of an image. An attribute without a clear answer is None."""

    colour: str | None
    shape: str | None
    size: str
    cell: str | None
    num_pixels: int
    centre: tuple[float, float]  # of the box, (y, x) in pixels


@dataclass(frozen=True)
class ImageVerdict:
    """The parts of a scene that an image shows. The tuples follow the scene's things."""

    colour: tuple[bool, ...]
    shape: tuple[bool, ...]
    place: tuple[bool, ...]
    size: tuple[bool, ...]
    count: bool  # as many objects as the scene has
    background: bool

    @property
    def all_right(self) -> bool:
        """Whether nothing is wrong."""
        return all((*self.colour, *self.shape, *self.place, *self.size, self.count, self.background))


def _spread(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of the (y, x) of a mask's pixels."""
    pixels = np.argwhere(mask)
    return pixels.mean(axis=0), np.maximum(pixels.std(axis=0), 0.5)


@cache
def _template(shape: str, blur: int) -> np.ndarray:
    """Return a shape that fills the whole box of a template, with a margin for its blur."""
    image = Image.new("L", (240, 240), 0)
    draw_shape(ImageDraw.Draw(image), shape, 120, 120, 120, 255)
    box = image.crop(image.getbbox()).resize((TEMPLATE_SIDE, TEMPLATE_SIDE), Image.Resampling.BOX)
    sharp = np.pad(np.asarray(box) > 127, 3 * max(BLURS)).astype(np.uint8) * 255
    soft = np.asarray(Image.fromarray(sharp).filter(ImageFilter.GaussianBlur(blur)))
    return soft > soft.max() / 2


def _overlap(patch: np.ndarray, template: np.ndarray) -> float:
    """Return the intersection over union of a patch and a template moved and stretched to the same mean and deviation.

    These feel a lost tip or a frayed edge less than the bounding box does.
    """
    (mean, deviation), (own_mean, own_deviation) = _spread(patch), _spread(template)
    grid = np.moveaxis(np.indices(patch.shape), 0, -1)
    places = np.rint((grid - mean) / deviation * own_deviation + own_mean).astype(int)
    inside = ((places >= 0) & (places < template.shape)).all(axis=-1)
    laid = np.zeros_like(patch)
    laid[inside] = template[tuple(places[inside].T)]
    return float((laid & patch).sum() / (laid | patch).sum())


def _nearest(distance: dict[str, float], most: float) -> str | None:
    """Return the name with the least distance, or None if that is more than ``most``."""
    best = min(distance, key=distance.__getitem__)
    return best if distance[best] <= most else None


def _colour_of(pixels: np.ndarray) -> str | None:
    """Return the nearest colour of pixels ``[n, 3]``, or None."""
    median = np.median(pixels, axis=0)
    return _nearest({name: float(np.linalg.norm(median - rgb)) for name, rgb in COLOURS.items()}, COLOUR_DISTANCE)


def _shape_of(patch: np.ndarray) -> str | None:
    """Return the shape of a patch ``[height, width]``, or None. The mask has a margin for a larger template."""
    missed = {shape: -max(_overlap(patch, _template(shape, blur)) for blur in BLURS) for shape in SHAPES}
    return _nearest(missed, -MIN_OVERLAP)


def _cell_of(y: float, x: float) -> str | None:
    row, column = (int(np.argmin([abs(v - c) for c in CELL_CENTRES])) for v in (y, x))
    if max(abs(y - CELL_CENTRES[row]), abs(x - CELL_CENTRES[column])) > CELL_DISTANCE:
        return None
    return list(CELLS)[3 * row + column]


def _describe(image: np.ndarray, patch: np.ndarray) -> DetectedObject:
    rows, columns = np.flatnonzero(patch.any(axis=1)), np.flatnonzero(patch.any(axis=0))
    top, bottom, left, right = rows[0], rows[-1] + 1, columns[0], columns[-1] + 1
    centre = (top + bottom) / 2, (left + right) / 2
    return DetectedObject(
        colour=_colour_of(image[patch]),
        shape=_shape_of(np.pad(patch[top:bottom, left:right], max(bottom - top, right - left))),
        size="large" if max(bottom - top, right - left) >= LARGE_FROM else "small",
        cell=_cell_of(*centre),
        num_pixels=int(patch.sum()),
        centre=centre,
    )


def find(image: np.ndarray) -> list[DetectedObject]:
    """Return the objects of an image, ``[128, 128, 3]`` uint8 RGB, largest first."""
    labels = label(_saturation(image) >= SATURATED, connectivity=1)
    patches = sorted((labels == i + 1 for i in range(labels.max())), key=lambda patch: -int(patch.sum()))
    return [_describe(image, patch) for patch in patches if patch.sum() >= MIN_PIXELS]


def _saturation(image: np.ndarray) -> np.ndarray:
    return image.max(axis=-1).astype(int) - image.min(axis=-1)


def find_background(image: np.ndarray) -> str | None:
    """Return the background's name, judged by the unsaturated pixels, or None."""
    plain = _saturation(image) < SATURATED / 3  # edges are part of neither
    if not plain.any():
        return None
    true = {name: background(name, *image.shape[:2]).astype(float) for name in GREYS}
    distance = {name: float(np.abs(image - pixels)[plain].mean()) for name, pixels in true.items()}
    return _nearest(distance, BACKGROUND_DISTANCE)


def _agreement(thing: Thing, candidate: DetectedObject | None) -> list[bool]:
    """Return whether colour, shape, place and size agree; all are wrong for an object that was not found."""
    return [getattr(candidate, name, None) == getattr(thing, name) for name in ("colour", "shape", "cell", "size")]


def check(image: np.ndarray, scene: ImageScene) -> ImageVerdict:
    """Judge an image by the scene that was asked for.

    Things and found objects are paired so that most attributes agree: a red circle where a blue one was asked for
    beside a red square counts as one wrong colour, not as three wrong attributes.

    Raises:
        ValueError: the image is not ``[height, width, 3]`` uint8.
    """
    if image.ndim != 3 or image.shape[-1] != 3 or image.dtype != np.uint8:
        raise ValueError(f"check wants [height, width, 3] uint8, got {list(image.shape)} {image.dtype}")
    detected: list[DetectedObject | None] = [*find(image)]
    num_things = len(scene.things)
    # The largest few are enough; an image of noise has hundreds.
    candidates = detected[: num_things + 2] + [None] * num_things
    pairings = (
        [_agreement(thing, candidate) for thing, candidate in zip(scene.things, order, strict=True)]
        for order in permutations(candidates, num_things)
    )
    best = max(pairings, key=lambda pairing: sum(map(sum, pairing)))
    colour, shape, place, size = zip(*best, strict=True)
    count, background_right = len(detected) == num_things, find_background(image) == scene.background
    return ImageVerdict(colour, shape, place, size, count, background_right)
