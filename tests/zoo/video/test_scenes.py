"""The grammar's split, the drawn videos, and the checker that judges them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zoo.video import scenes as grammar
from zoo.video.scenes import FRAMES, SIDE, VideoScene, check, draw, draw_crowded

RED_RIGHT = VideoScene("red", "circle", "right", "white")


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.long
def test_training_never_draws_held_out_scenes():
    held_out, training = set(grammar.triples(held_out=True)), set(grammar.triples(held_out=False))
    assert len(held_out) + len(training) == 8 * 5 * 8
    assert 40 <= len(held_out) <= 52
    drawn = [grammar.random_scene(rng(0, i), held_out=False) for i in range(2000)]
    assert {(scene.colour, scene.shape, scene.direction) for scene in drawn} == training
    excluded = [grammar.random_scene(rng(1, i), held_out=True) for i in range(500)]
    assert {(scene.colour, scene.shape, scene.direction) for scene in excluded} == held_out


def test_every_pair_of_attributes_is_seen_in_training():
    training = list(grammar.triples(held_out=False))
    for a, b, size in [(0, 1, 8 * 5), (0, 2, 8 * 8), (1, 2, 5 * 8)]:
        assert len({(triple[a], triple[b]) for triple in training}) == size


def test_full_captions_identify_scenes():
    words = set(grammar.words())
    scenes: dict[str, VideoScene] = {}
    for i in range(500):
        scene = grammar.random_scene(rng(2, i), held_out=False)
        assert set(grammar.caption(scene, rng(3, i)).split()) <= words
        assert scenes.setdefault(grammar.caption(scene), scene) == scene


def test_same_seed_draws_same_video():
    for i in range(10):
        scene = grammar.random_scene(rng(4, i), held_out=False)
        video = draw(scene, rng(5, i))
        assert video.shape == (FRAMES, SIDE, SIDE, 3)
        assert np.array_equal(video, draw(scene, rng(5, i)))
        for edge in (video[:, 0], video[:, -1], video[:, :, 0], video[:, :, -1]):
            assert (edge == video[0, 0, 0]).all()
    assert not np.array_equal(draw_crowded(rng(6)), draw_crowded(rng(7)))


@pytest.mark.parametrize(
    "direction",
    [pytest.param(x, marks=pytest.mark.long if i % 4 else ()) for i, x in enumerate(grammar.DIRECTIONS)],
)
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


def test_checker_names_the_expected_input():
    with pytest.raises(ValueError, match=r"got \[64, 64, 3\] uint8"):
        check(np.zeros((64, 64, 3), np.uint8), RED_RIGHT)
