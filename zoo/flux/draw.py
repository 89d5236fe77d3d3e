"""Scene → image. Sizes and places vary a little from image to image, all from one random generator."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from zoo.flux.grammar import CELLS, COLOURS, Scene

SIDE = 128  # pixels
CELL_CENTRES = (24, 64, 104)  # pixels, of rows and of columns
RADII = {"small": 11.0, "large": 17.0}  # pixels; half of the width of a circle
SQUARE_HALF_SIDE = 0.89  # of the radius: between equal width and equal area
CROSS_HALF_ARM = 0.34  # of the radius
RING_HOLE = 0.52  # of the radius
JITTER = 2.0  # pixels, of the centre, each way
RADIUS_JITTER = 0.05  # of the radius, each way
BACKGROUND_GREYS = {"white": (245, 245), "grey": (128, 128), "black": (15, 15), "striped": (225, 160)}
STRIPE = 8  # pixels
SUPERSAMPLING = 3


def background(name: str, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Return ``[height, width, 3]`` uint8: one grey, or upright stripes of two greys."""
    light, dark = BACKGROUND_GREYS[name]
    columns = np.where((np.arange(width) // STRIPE) % 2 == 0, light, dark)
    return np.broadcast_to(columns[None, :, None], (height, width, 3)).astype(np.uint8)


def draw_shape(
    canvas: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, ink: tuple[int, ...] | int
) -> None:
    """Draw ``shape`` of radius ``r`` around (``x``, ``y``), all in pixels of the canvas."""
    if shape == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=ink)
    elif shape == "square":
        a = SQUARE_HALF_SIDE * r
        canvas.rectangle((x - a, y - a, x + a, y + a), fill=ink)
    elif shape == "triangle":
        canvas.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=ink)
    elif shape == "cross":
        a = CROSS_HALF_ARM * r
        canvas.rectangle((x - r, y - a, x + r, y + a), fill=ink)
        canvas.rectangle((x - a, y - r, x + a, y + r), fill=ink)
    elif shape == "ring":
        # Pillow's line grows inwards from the box.
        canvas.ellipse((x - r, y - r, x + r, y + r), outline=ink, width=max(1, round((1 - RING_HOLE) * r)))
    else:
        raise ValueError(f"unknown shape {shape!r}; draw_shape knows circle, square, triangle, cross and ring")


def shape_mask(shape: str, height: int, width: int) -> np.ndarray:
    """Return ``[height, width]`` bool: ``shape`` stretched to fill the whole box."""
    side = 240
    image = Image.new("L", (side, side), 0)
    draw_shape(ImageDraw.Draw(image), shape, side / 2, side / 2, side / 2, 255)
    box = image.getbbox()
    return np.asarray(image.crop(box).resize((width, height), Image.Resampling.BOX)) > 127


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
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
