"""Scenes of one coloured shape that moves: captions, videos, a checker, and the scenes that are held out.

Held out are triples (colour, shape, direction), one in seven. Every pair of the three occurs in training, and a
held-out triple never does, whether the caption states the direction or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from PIL import Image, ImageDraw

from zoo.flux import scenes
from zoo.flux.check import DetectedObject, find, find_background
from zoo.flux.scenes import COLOURS, SHAPES, SUPERSAMPLING, background, choice, draw_shape

# Directions are per unit of time, with x to the right and y downwards.
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
class VideoScene:
    """The content of a video. ``colour``, ``shape``, ``direction`` and ``background`` are keys of the tables."""

    colour: str
    shape: str
    direction: str
    background: str


# Return all (colour, shape, direction) that are held out, or all others.
triples = partial(scenes.triples, places=DIRECTIONS)


def random_scene(rng: np.random.Generator, *, held_out: bool) -> VideoScene:
    """Return a scene whose triple is held out, or is not."""
    return VideoScene(*choice(rng, triples(held_out=held_out)), choice(rng, BACKGROUNDS))


def caption(scene: VideoScene, rng: np.random.Generator | None = None) -> str:
    """Return the words for a scene: the full caption without ``rng``. With ``rng``, direction or background may be left
    out.

    >>> caption(VideoScene("red", "circle", "up left", "white"))
    'a red circle moving up left on a white background'
    """
    further = [f"moving {scene.direction}", f"on a {scene.background} background"]
    if rng is not None:
        further = [part for part in further if rng.random() >= 0.1]
    return " ".join([f"a {scene.colour} {scene.shape}", *further])


def words() -> list[str]:
    """Return every word that a caption can contain, sorted. This is the vocabulary of the tokenizer."""
    text = " ".join([*COLOURS, *SHAPES, *DIRECTIONS, *BACKGROUNDS, "a moving on background"])
    return sorted(set(text.split()))


# -- Videos. Size, place and speed vary a little from one to another.

SIDE = 64  # pixels
FRAMES = 17  # Wan's autoencoder turns the first frame, and each four frames after it, into one latent frame: 4 k + 1.
RADIUS = 10.0  # pixels, half of the width of a circle
WAY = 22.0  # pixels from the first frame to the last, along each axis in which the shape moves
JITTER = 0.1  # This is a share of the radius and of the way, in both directions.
CENTRE_JITTER = 6.0  # pixels by which the middle of the way varies, in both directions


def _draw(
    background_name: str, things: list[tuple[str, str, np.ndarray, float]], numbers: range = range(FRAMES)
) -> np.ndarray:
    """Return antialiased frames of objects: colour, shape, centres ``[FRAMES, 2]`` (x, y) and radius in pixels."""
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


def _vary(value: float, rng: np.random.Generator) -> float:
    return value * (1 + rng.uniform(-JITTER, JITTER))


def _move(direction: str, middle: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return centres ``[FRAMES, 2]`` of a steady motion with ``middle`` halfway."""
    way = _vary(WAY, rng)
    return middle + np.linspace(-0.5, 0.5, FRAMES)[:, None] * way * np.array(DIRECTIONS[direction])


def draw(scene: VideoScene, rng: np.random.Generator) -> np.ndarray:
    """Return the frames of a scene, ``[17, 64, 64, 3]`` uint8 RGB. The shape is whole in all of them."""
    middle = SIDE / 2 + rng.uniform(-CENTRE_JITTER, CENTRE_JITTER, size=2)
    path = _move(scene.direction, middle, rng)
    return _draw(scene.background, [(scene.colour, scene.shape, path, _vary(RADIUS, rng))])


def draw_crowded(rng: np.random.Generator, numbers: range = range(FRAMES)) -> np.ndarray:
    """Return frames with six objects that cross each other, from which an autoencoder learns colours sooner."""
    things = []
    for _ in range(6):
        middle = rng.uniform(0, SIDE, size=2)
        path = _move(choice(rng, DIRECTIONS), middle, rng)
        things.append((choice(rng, COLOURS), choice(rng, SHAPES), path, _vary(RADIUS, rng)))
    return _draw(choice(rng, BACKGROUNDS), things, numbers)


# -- The checker. It uses the one patch of saturated pixels of each frame, and its way. Colour, shape and background are
# those of most frames, which `zoo.flux.check` finds in an image.

MOST = 0.75  # a share of the frames
MIN_WAY = 8.0  # pixels from the first frame to the last. True ways have 19 or more.
MAX_TURN = 22.5  # degrees between the way and the requested direction. Directions are 45 degrees apart.
MAX_STRAY = 3.0  # pixels, as the median distance of a frame's centre from the straight and steady way


@dataclass(frozen=True)
class VideoVerdict:
    """The parts of a scene that a video shows."""

    colour: bool
    shape: bool
    direction: bool
    steady: bool  # The way is straight, and the speed is constant.
    single: bool  # Most frames have one object, neither none nor two.
    background: bool

    @property
    def all_right(self) -> bool:
        """Return whether all parts of the scene are right."""
        return all((self.colour, self.shape, self.direction, self.steady, self.single, self.background))


def most(values: Iterable[str | None]) -> str | None:
    """Return the value of at least `MOST` of the frames, or None."""
    values = list(values)
    value, count = Counter(values).most_common(1)[0]
    return value if count >= MOST * len(values) else None


def line(objects: list[DetectedObject | None]) -> tuple[np.ndarray, float] | None:
    """Return the pixels (x, y) per frame of the best straight line through the centres, and the median distance from
    it.

    Return None if fewer than `MOST` of the frames have an object.
    """
    times = np.array([i for i, detected in enumerate(objects) if detected is not None])
    if len(times) < MOST * len(objects):
        return None
    centres = np.array([detected.centre for detected in objects if detected is not None])[:, ::-1]
    speed, start = np.polyfit(times, centres, 1)
    stray = float(np.median(np.linalg.norm(centres - (start + times[:, None] * speed), axis=1)))
    return speed, stray


def direction_of(way: np.ndarray) -> str | None:
    """Return the direction of a motion (x, y) in pixels, or None if it is too short or between two directions."""
    length = float(np.linalg.norm(way))
    if length < MIN_WAY:
        return None
    cosine = {name: float(way @ step) / length / float(np.linalg.norm(step)) for name, step in DIRECTIONS.items()}
    best = max(cosine, key=cosine.__getitem__)
    return best if cosine[best] >= np.cos(np.radians(MAX_TURN)) else None


def check(frames: np.ndarray, scene: VideoScene) -> VideoVerdict:
    """Judge a video by the requested scene.

    Raises:
        ValueError: The video is not ``[frames, height, width, 3]`` uint8.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8:
        raise ValueError(f"check wants [frames, height, width, 3] uint8, got {list(frames.shape)} {frames.dtype}")
    by_frame = [find(frame) for frame in frames]
    objects = [objects[0] if objects else None for objects in by_frame]
    way = line(objects)
    return VideoVerdict(
        colour=most(thing and thing.colour for thing in objects) == scene.colour,
        shape=most(thing and thing.shape for thing in objects) == scene.shape,
        direction=way is not None and direction_of(way[0] * (len(frames) - 1)) == scene.direction,
        steady=way is not None and way[1] <= MAX_STRAY,
        single=bool(np.mean([len(objects) == 1 for objects in by_frame]) >= MOST),
        background=most(find_background(frame) for frame in frames) == scene.background,
    )
