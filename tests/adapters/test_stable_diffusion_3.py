"""Stable Diffusion 3 with an IP-Adapter, or guided by a call that skips layers, gives the result of one device on every
mesh.
"""

import pytest
import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection

from para_core.adapters import parallelize_pipe, unparallelize_pipe
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.base import fill
from zoo.tiny.pipelines import PIPELINES

NAME = "stable diffusion 3"
# The first embedding is for the negative prompt, the second for the image.
IMAGES = torch.stack([torch.linspace(-1, 1, 40).view(2, 20), torch.linspace(2, 0, 40).view(2, 20)])
# Layers are skipped from the second step on.
WINDOW = {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
OPTIONS = {
    "an IP-Adapter": {"ip_adapter_image_embeds": IMAGES},
    "the first layer skipped": {"skip_guidance_layers": [0], **WINDOW},
    "two layers skipped": {"skip_guidance_layers": [0, 2], **WINDOW},
}


def build(what):
    pipe = PIPELINES[NAME].build()
    if what == "an IP-Adapter":
        attach_ip_adapter(pipe.transformer)
    return pipe


def attach_ip_adapter(transformer):
    """Attach a small IP adapter as ``load_ip_adapter`` does."""
    heads, width = transformer.config.num_attention_heads, transformer.inner_dim
    image_proj = IPAdapterTimeImageProjection(20, 24, 16, depth=1, dim_head=8, heads=2, num_queries=3)
    transformer.image_proj = fill(image_proj, seed=11)
    joint = {name: processor for name, processor in transformer.attn_processors.items() if ".attn." in name}
    ours = {
        name: fill(SD3IPAdapterJointAttnProcessor2_0(width, 24, width // heads, timesteps_emb_dim=16), seed)
        for seed, name in enumerate(joint, start=12)
    }
    transformer.set_attn_processor({**transformer.attn_processors, **ours})


def generate(pipe, what):
    return pipe(**PIPELINES[NAME].call(**OPTIONS.get(what, {}))).images


def generate_on(what, shapes):
    pipe, outs = build(what), []
    for batch, ring, ulysses in shapes:
        parallelize_pipe(pipe, mesh=cpu_mesh(ring, ulysses, batch=batch))
        outs.append(generate(pipe, what))
    return [*outs, generate(unparallelize_pipe(pipe), what)]


# With a batch dim, the call that skips layers has one sample, so all ranks compute it.
@pytest.mark.sample(1)
@pytest.mark.filterwarnings(r"ignore:.* 1 sample.*'batch'")
@pytest.mark.parametrize("what", OPTIONS)
def test_sd3_image_prompt_and_skipped_layers_are_exact(rank_pool, what):
    expected = generate(build(what), what)
    assert relative_error(expected, generate(build(what), None)) > 1e-3
    for outs in rank_pool.run(generate_on, 2, what, [(2, 1, 1), (1, 1, 2), (1, 2, 1)]):
        errors = [relative_error(out, expected) for out in outs]
        assert max(errors) < 1e-5, errors
