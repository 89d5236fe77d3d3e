"""The drawings, and the checker that judges them, on which the published figures depend."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.zoo.test_grammars import rng
from zoo.flux import scenes as grammar
from zoo.flux.check import check
from zoo.flux.scenes import ImageScene, Thing, draw

pytestmark = pytest.mark.slow


def test_checker_accepts_every_true_drawing_of_one_thing():
    options = list(itertools.product(grammar.COLOURS, grammar.SHAPES, grammar.SIZES, grammar.CELLS))
    # No attribute has a multiple of seven values, so each value occurs.
    for i, attributes in enumerate(options[::7]):
        scene = ImageScene((Thing(*attributes),), grammar.BACKGROUNDS[i % 4])
        assert check(draw(scene, rng(7, i)), scene).all_right, scene


@pytest.mark.sample(1)
@pytest.mark.parametrize("attribute", ["colour", "shape", "size", "cell"])
@pytest.mark.parametrize("num_things", [1, 3])
def test_checker_rejects_exactly_the_altered_parts(attribute, num_things):
    values = {"colour": [*grammar.COLOURS], "shape": grammar.SHAPES, "size": grammar.SIZES, "cell": [*grammar.CELLS]}
    for i in range(25):
        scene = grammar.held_out_scene(rng(10, i), num_things)
        first, *others = scene.things
        taken = {getattr(thing, attribute) for thing in (scene.things if attribute == "cell" else (first,))}
        options = [value for value in values[attribute] if value not in taken]
        altered = replace(first, **{attribute: options[i % len(options)]})
        image = draw(replace(scene, things=(altered, *others)), rng(11, i))
        verdict = check(image, scene)
        assert not verdict.all_right
        right = {"colour": verdict.colour, "shape": verdict.shape, "size": verdict.size, "cell": verdict.place}
        for name, values_right in right.items():
            # With several objects, another pairing may explain the image as well as the intended one.
            wrong = values_right.count(False)
            assert wrong == (name == attribute) or num_things > 1, (name, scene, altered)


def test_checker_rejects_wrong_background_and_count():
    scene = grammar.held_out_scene(rng(12), 2)
    for other in grammar.BACKGROUNDS:
        verdict = check(draw(replace(scene, background=other), rng(13)), scene)
        assert verdict.background == (other == scene.background)
    verdict = check(draw(replace(scene, things=scene.things[:1]), rng(13)), scene)
    assert not verdict.count
    assert verdict.colour.count(True) == 1
