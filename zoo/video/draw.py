"""Scene → frames. Size, place and speed vary a little from video to video, all from one random generator."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from zoo.flux.draw import SUPERSAMPLING, background, draw_shape
from zoo.flux.grammar import COLOURS, SHAPES
from zoo.video.grammar import BACKGROUNDS, DIRECTIONS, Scene

SIDE = 64  # pixels
FRAMES = 17  # Wan's autoencoder makes one latent frame of the first and one of each four that follow: 4 k + 1
RADIUS = 10.0  # pixels; half of the width of a circle
RADIUS_JITTER = 0.1  # of the radius, each way
WAY = 22.0  # pixels from the first frame to the last, along each axis in which the shape moves
WAY_JITTER = 0.1  # of the way, each way
CENTRE_JITTER = 6.0  # pixels, of the middle of the way, each way


def _draw(
    background_name: str, things: list[tuple[str, str, np.ndarray, float]], numbers: range = range(FRAMES)
) -> np.ndarray:
    """Return frames of things: colour, shape, centres ``[FRAMES, 2]`` (x, y) in pixels, radius. Edges are
    antialiased.
    """
    k = SUPERSAMPLING
    empty = Image.fromarray(background(background_name, SIDE * k, SIDE * k))
    frames = []
    for i in numbers:
        image = empty.copy()
        canvas = ImageDraw.Draw(image)
        for colour, shape, centres, radius in things:
            x, y = centres[i] * k
            draw_shape(canvas, shape, x, y, radius * k, COLOURS[colour])
        frames.append(np.asarray(image.reduce(k)))
    return np.stack(frames)


def _move(direction: str, middle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return centres ``[FRAMES, 2]`` of a steady motion with ``middle`` halfway."""
    way = WAY * (1 + rng.uniform(-WAY_JITTER, WAY_JITTER))
    return middle + np.linspace(-0.5, 0.5, FRAMES)[:, None] * way * np.array(DIRECTIONS[direction])


def _radius(rng: np.random.Generator) -> float:
    return RADIUS * (1 + rng.uniform(-RADIUS_JITTER, RADIUS_JITTER))


def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Return the frames of a scene, ``[17, 64, 64, 3]`` uint8 RGB. The shape is whole in all of them."""
    middle = SIDE / 2 + rng.uniform(-CENTRE_JITTER, CENTRE_JITTER, size=2)
    thing = scene.colour, scene.shape, _move(scene.direction, middle, rng), _radius(rng)
    return _draw(scene.background, [thing])


def draw_crowded(rng: np.random.Generator, numbers: range = range(FRAMES)) -> np.ndarray:
    """Return frames with six things that cross each other. No caption describes such a scene; an autoencoder learns
    colours sooner from it.
    """

    def choose(options: list[str] | tuple[str, ...]) -> str:
        return options[int(rng.integers(len(options)))]

    things = []
    for _ in range(6):
        middle = rng.uniform(0, SIDE, size=2)
        path = _move(choose(list(DIRECTIONS)), middle, rng)
        things.append((choose(list(COLOURS)), choose(SHAPES), path, _radius(rng)))
    return _draw(choose(BACKGROUNDS), things, numbers)
