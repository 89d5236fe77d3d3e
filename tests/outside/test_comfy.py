"""Options of a ComfyUI prompt that may replace blocks, on several ranks."""

from tests.outside.inputs import build, inputs_of
from tests.outside.recipes import comfy
from tests.tiny import cpu_mesh, relative_error


def scaled(args, extra):
    """Run the original block, and scale its output, as a patch of ComfyUI does."""
    out = extra["original_block"](args)
    return {**out, "img": 1.5 * out["img"]}


def with_patch():
    options = {"patches_replace": {"dit": {("double_block", 0): scaled}}}
    return {**inputs_of("ComfyUI's FLUX"), "transformer_options": options}


def run():
    return comfy(build("ComfyUI's FLUX"), with_patch(), cpu_mesh(2, 1))


def test_a_replaced_block_that_calls_the_original_is_exact(rank_pool):
    expected = build("ComfyUI's FLUX")(**with_patch())
    assert relative_error(expected, build("ComfyUI's FLUX")(**inputs_of("ComfyUI's FLUX"))) > 0.01
    for out in rank_pool.run(run, 2):
        assert relative_error(out, expected) < 1e-5
