"""The mesh that a pipeline gets where none is given."""

import diffusers
import pytest

from para_core.adapters.mesh_choice import choose_mesh, default_guidance


@pytest.mark.parametrize(
    ("ranks", "heads", "guided", "shape"),
    [
        (8, 24, True, (2, 1, 4)),
        (8, 24, False, (1, 1, 8)),
        (8, 2, True, (2, 2, 2)),
        (16, 12, False, (1, 2, 8)),
        (6, 24, True, (2, 1, 3)),
        (3, 24, True, (1, 1, 3)),
        (7, 3, False, (1, 7, 1)),
        (2, 1, True, (2, 1, 1)),
        (1, 24, True, (1, 1, 1)),
        (4, None, False, (1, 1, 4)),
    ],
)
def test_guidance_comes_first_then_heads_then_the_ring(ranks, heads, guided, shape):
    choice = choose_mesh(ranks, heads, "guidance_scale is 6.0 by default" if guided else None)
    assert (choice.batch, choice.ring, choice.ulysses) == shape
    assert ("guidance_scale is 6.0" in choice.reason) == guided


class Transformer:
    def __init__(self, **config):
        self.config = type("Config", (), config)()


# Pipelines of diffusers by whether their calls guide with default arguments.
GUIDES = {
    "CogVideoXPipeline": True,
    "MochiPipeline": True,
    "WanPipeline": True,
    "WanImageToVideoPipeline": True,
    "LTXPipeline": True,
    "StableDiffusion3Pipeline": True,
    # A negative prompt turns it on, and there is none by default.
    "FluxPipeline": False,
    "QwenImagePipeline": False,
    "HunyuanVideoPipeline": False,
}


@pytest.mark.parametrize("name", GUIDES)
def test_default_arguments_say_whether_a_pipeline_guides(name):
    cls = getattr(diffusers, name)
    found = default_guidance(cls.__new__(cls), Transformer())
    assert (found is not None) == GUIDES[name]


def test_guidance_that_a_model_embeds_has_no_branches():
    cls = diffusers.Flux2Pipeline
    assert default_guidance(cls.__new__(cls), Transformer(guidance_embeds=True)) is None
