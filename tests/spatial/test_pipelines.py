"""Pipelines whose VAE also runs on all ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline

from para_core.adapters import parallelize_pipe, unparallelize_pipe
from para_core.instance.record import is_filled
from para_core.instance.slots import Slot
from tests.adapters.test_pipelines import generate
from tests.attention.one_device import relative_error
from tests.tiny import cpu_mesh
from zoo.tiny.pipelines import PIPELINES

ROOT = Path(__file__).parents[2]
# The pipelines start from text or from an image, which is encoded. Some have videos, and one also has sound.
NAMES = [
    "ovis",
    "chroma, image",
    *[pytest.param(name, marks=pytest.mark.long) for name in ("wan, image", "ltx, image", "ltx2", "longcat-audio")],
]


def generate_on_ranks(name):
    pipe = PIPELINES[name].build()
    alone = generate(pipe, name, output_type="pt")
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), vae=True)
    vaes = [pipe.vae, *([pipe.audio_vae] if name == "ltx2" else [])]
    assert all(is_filled(vae, Slot.PARALLEL_VAE) for vae in vaes)
    image = generate(pipe, name, output_type="pt")
    unparallelize_pipe(pipe)
    assert not any(is_filled(vae, Slot.PARALLEL_VAE) for vae in vaes)
    return relative_error(image, alone)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NAMES)
def test_pipeline_with_parallel_vae_equals_one_device(rank_pool, name):
    for error in rank_pool.run(generate_on_ranks, 2, name):
        assert error < 1e-4


def test_pipeline_without_vae_raises(rank_pool):
    for error in rank_pool.run_expecting_errors(ask_for_no_vae, 2):
        assert isinstance(error, TypeError) and "pipe.vae" in str(error)


def ask_for_no_vae():
    pipe = PIPELINES["ovis"].build()
    pipe.vae = None
    with torch.no_grad():
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), vae=True)


def decode_in_a_callback():
    """Return how many images a callback decoded after steps, as for a preview."""
    pipe = parallelize_pipe(PIPELINES["ovis"].build(), mesh=cpu_mesh(1, 2), vae=True)
    shown = []

    def show(pipe, step, time, kwargs):
        shown.append(pipe.vae.decode(torch.ones(1, pipe.vae.config.latent_channels, 6, 10)).sample)
        return {}

    generate(pipe, "ovis", callback_on_step_end=show)
    return len(shown)


@pytest.mark.long
def test_preview_in_callback_is_decoded_on_all_ranks(rank_pool):
    assert min(rank_pool.run(decode_in_a_callback, 2)) > 0


def demo_images():
    """Return images of the trained FLUX on two ranks, with the VAE on one of them and on both."""
    pipe = FluxPipeline.from_pretrained(ROOT / "zoo/flux/pipeline", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    images = []
    for vae in (False, True):
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), vae=vae)
        options = {"num_inference_steps": 1, "height": 80, "width": 48, "max_sequence_length": 16}
        image = pipe("a red circle", generator=torch.Generator().manual_seed(0), **options).images[0]
        images.append(np.asarray(image))
    return images


@pytest.mark.long
def test_demo_image_with_parallel_vae_is_the_same(rank_pool):
    for without, with_vae in rank_pool.run(demo_images, 2):
        assert without.std() > 1
        # Sums in another order may round to the next of 256 values.
        assert np.abs(without.astype(int) - with_vae).max() <= 1
