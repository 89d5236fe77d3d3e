"""The grammars of images and videos: which scenes are held out."""

import numpy as np
import pytest

from zoo.flux import scenes as images
from zoo.video import scenes as videos


def rng(*seed):
    return np.random.default_rng(seed)


# The grammar, what draws its training scenes, the sizes of its attributes, and how many triples are held out.
GRAMMARS = {
    "images": (images, lambda seed: images.training_scene(rng(2, seed)), (8, 5, 9), range(45, 61)),
    "videos": (videos, lambda seed: videos.random_scene(rng(2, seed), held_out=False), (8, 5, 8), range(40, 53)),
}


def triples_of(scene):
    things = getattr(scene, "things", (scene,))
    return {(thing.colour, thing.shape, getattr(thing, "cell", None) or thing.direction) for thing in things}


@pytest.mark.parametrize("what", GRAMMARS)
def test_training_never_draws_held_out_scenes(what):
    grammar, draw, sizes, num_held_out = GRAMMARS[what]
    held_out, training = set(grammar.triples(held_out=True)), set(grammar.triples(held_out=False))
    assert len(held_out) + len(training) == np.prod(sizes)
    assert len(held_out) in num_held_out
    drawn = set().union(*(triples_of(draw(seed)) for seed in range(4000)))
    assert drawn == training
    # Every pair of attributes is seen.
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        assert len({(triple[a], triple[b]) for triple in training}) == sizes[a] * sizes[b]
