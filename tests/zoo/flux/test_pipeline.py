"""Plain diffusers loads the committed pipeline folder offline, and it generates the objects of a caption."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny import load_pipe
from zoo.flux import PIPELINE
from zoo.flux.check import check
from zoo.flux.scenes import ImageScene, Thing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pipe():
    return load_pipe(PIPELINE)


def large(colour, shape, cell="centre", background="white"):
    return ImageScene((Thing(colour, shape, "large", cell),), background)


# Captions of the pages and of the examples, with the scenes that they describe.
NAMED = [
    (large("red", "circle"), "a red circle"),
    (large("blue", "square", background="grey"), "a blue square on a grey background"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("scene", "text"), NAMED, ids=[text for _, text in NAMED])
def test_captions_of_the_pages_show_what_they_say(pipe, scene, text):
    options = {"height": 128, "width": 128, "num_inference_steps": 20, "num_images_per_prompt": 3}
    images = pipe(text, generator=torch.Generator().manual_seed(0), **options).images
    assert [check(np.asarray(image), scene).all_right for image in images] == [True] * 3
