"""The grammars of images and videos: which scenes are held out, captions that identify scenes, and tokenizers."""

import numpy as np
import pytest

from zoo.flux import scenes as images
from zoo.flux.models import build_tokenizers
from zoo.video import scenes as videos
from zoo.video.train import build_tokenizer


def rng(*seed):
    return np.random.default_rng(seed)


def draw_image_scene(seed):
    return images.training_scene(rng(2, seed))


def draw_video_scene(seed):
    return videos.random_scene(rng(2, seed), held_out=False)


# The grammar, what draws its training scenes, the sizes of its attributes, and how many triples are held out.
GRAMMARS = {
    "images": (images, draw_image_scene, (8, 5, 9), range(45, 61)),
    "videos": (videos, draw_video_scene, (8, 5, 8), range(40, 53)),
}
CASES = pytest.mark.parametrize("what", GRAMMARS)


def triples_of(scene):
    things = getattr(scene, "things", (scene,))
    return {(thing.colour, thing.shape, getattr(thing, "cell", None) or thing.direction) for thing in things}


@CASES
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


def test_held_out_scenes_hold_held_out_things():
    for i in range(600):
        num_things = 1 + i % 3
        scene = images.held_out_scene(rng(1, i), num_things)
        assert len({thing.cell for thing in scene.things}) == len(scene.things) == num_things
        assert all(images.is_held_out(thing.colour, thing.shape, thing.cell) for thing in scene.things)
    drawn = [videos.random_scene(rng(1, i), held_out=True) for i in range(500)]
    assert set().union(*map(triples_of, drawn)) == set(videos.triples(held_out=True))
    with pytest.raises(ValueError, match="num_things is 4"):
        images.held_out_scene(rng(0), 4)


@CASES
def test_full_captions_identify_scenes(what):
    grammar, draw, *_ = GRAMMARS[what]
    words, scenes = set(grammar.words()), {}
    for i in range(1000):
        scene = draw(i)
        assert set(grammar.caption(scene, rng(3, i)).replace(",", " ,").split()) <= words
        assert scenes.setdefault(grammar.caption(scene), scene) == scene


@CASES
def test_tokenizers_know_every_word_and_cut_no_caption(what):
    grammar, draw, *_ = GRAMMARS[what]
    t5, most = (build_tokenizers().t5, 48) if grammar is images else (build_tokenizer(), 16)
    clip = build_tokenizers().clip
    for i in range(200):
        text = grammar.caption(draw(i), rng(20, i))
        for caption in (text, text.capitalize()):
            ids = t5(caption).input_ids
            assert len(ids) == len(text.replace(",", " ,").split()) + 1 <= most
            assert t5.unk_token_id not in ids
            if grammar is images:
                clip_ids = clip(caption).input_ids
                assert len(clip_ids) <= clip.model_max_length
                assert clip.decode(clip_ids, skip_special_tokens=True).replace(" ,", ",").strip() == text
