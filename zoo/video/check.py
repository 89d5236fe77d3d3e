"""Judge a video by its scene without any network: the one patch of saturated pixels of each frame, and its way.

Colour, shape and background are those of most frames, found as `zoo.flux.check` finds them in an image.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from zoo.flux.check import DetectedObject, find, find_background
from zoo.video.grammar import DIRECTIONS, Scene

MOST = 0.75  # of the frames
MIN_WAY = 8.0  # pixels from the first frame to the last; true ones go 19 or more
MAX_TURN = 22.5  # degrees between the way and the direction asked for; directions are 45 apart
MAX_STRAY = 3.0  # pixels, median distance of a frame's centre from the straight and steady way


@dataclass(frozen=True)
class Verdict:
    """The parts of a scene that a video shows."""

    colour: bool
    shape: bool
    direction: bool
    steady: bool  # the way is straight and its speed level
    one: bool  # one object in most frames, neither none nor two
    background: bool

    @property
    def all_right(self) -> bool:
        """Whether nothing is wrong."""
        return all((self.colour, self.shape, self.direction, self.steady, self.one, self.background))


def most(values: Iterable[str | None]) -> str | None:
    """Return the value of at least `MOST` of the frames, or None."""
    values = list(values)
    value, count = Counter(values).most_common(1)[0]
    return value if count >= MOST * len(values) else None


def line(objects: list[DetectedObject | None]) -> tuple[np.ndarray, float] | None:
    """Return the pixels (x, y) per frame of the best straight line through the centres, and the median distance from
    it.

    None where fewer than `MOST` of the frames have an object.
    """
    times = np.array([i for i, detected in enumerate(objects) if detected is not None])
    if len(times) < MOST * len(objects):
        return None
    centres = np.array([detected.centre for detected in objects if detected is not None])[:, ::-1]
    speed, start = np.polyfit(times, centres, 1)
    stray = float(np.median(np.linalg.norm(centres - (start + times[:, None] * speed), axis=1)))
    return speed, stray


def direction_of(way: np.ndarray) -> str | None:
    """Return the direction of a motion (x, y) in pixels; None if it is too short or between two directions."""
    length = float(np.linalg.norm(way))
    if length < MIN_WAY:
        return None
    cosine = {name: float(way @ step) / length / float(np.linalg.norm(step)) for name, step in DIRECTIONS.items()}
    best = max(cosine, key=cosine.__getitem__)
    return best if cosine[best] >= np.cos(np.radians(MAX_TURN)) else None


def check(frames: np.ndarray, scene: Scene) -> Verdict:
    """Judge a video by the scene that was asked for.

    Raises:
        ValueError: the video is not ``[frames, height, width, 3]`` uint8.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8:
        raise ValueError(f"check wants [frames, height, width, 3] uint8, got {list(frames.shape)} {frames.dtype}")
    by_frame = [find(frame) for frame in frames]
    objects = [objects[0] if objects else None for objects in by_frame]
    way = line(objects)
    return Verdict(
        colour=most(thing and thing.colour for thing in objects) == scene.colour,
        shape=most(thing and thing.shape for thing in objects) == scene.shape,
        direction=way is not None and direction_of(way[0] * (len(frames) - 1)) == scene.direction,
        steady=way is not None and way[1] <= MAX_STRAY,
        one=bool(np.mean([len(objects) == 1 for objects in by_frame]) >= MOST),
        background=most(find_background(frame) for frame in frames) == scene.background,
    )
