"""The grammar's split, the drawn videos, and the checker that judges them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.zoo.test_grammars import rng
from zoo.video import scenes as grammar
from zoo.video.scenes import FRAMES, VideoScene, check, draw

RED_RIGHT = VideoScene("red", "circle", "right", "white")


@pytest.mark.parametrize("direction", list(grammar.DIRECTIONS)[::4])
def test_the_checker_accepts_true_videos(direction):
    for i, shape in enumerate(("circle", "square", "triangle", "cross", "ring")):
        scene = replace(grammar.random_scene(rng(8, i), held_out=False), shape=shape, direction=direction)
        verdict = check(draw(scene, rng(9, i)), scene)
        assert verdict.all_right, (scene, verdict)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "value"),
    [("colour", "blue"), ("shape", "square"), ("direction", "left"), ("direction", "up right"), ("background", "grey")],
)
def test_checker_names_exactly_the_differences(name, value):
    verdict = check(draw(RED_RIGHT, rng(10)), replace(RED_RIGHT, **{name: value}))
    wrong = {key for key, right in vars(verdict).items() if not right}
    assert wrong == {name}


def test_the_checker_wants_one_object_that_moves_steadily():
    video = draw(RED_RIGHT, rng(10))
    still = np.repeat(video[:1], FRAMES, axis=0)
    assert not check(still, RED_RIGHT).direction
    assert not check(video[::-1].copy(), RED_RIGHT).direction
    jumpy = video[[0, 16, 1, 15, 2, 14, 3, 13, 8, 12, 4, 11, 5, 10, 6, 9, 7]]
    assert not check(jumpy, RED_RIGHT).steady
    two = video.copy()
    two[:, :10, :10] = (45, 80, 220)
    assert not check(two, RED_RIGHT).single
    assert not check(np.full_like(video, 245), RED_RIGHT).single
