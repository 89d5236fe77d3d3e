"""FLUX.1 and Stable Diffusion 3 with IP adapters give the result of one device on every mesh."""

import pytest
import torch
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection

from para_core.adapters import parallelize_pipe, unparallelize_pipe
from tests.adapters.test_pipelines import build, generate, generated_alone, meshes_of
from tests.tiny import relative_error
from zoo.tiny.base import fill


def attach_to_flux(transformer):
    """Attach two IP adapters for images of 20 features."""
    generator = torch.Generator().manual_seed(11)

    def noise(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    width, text_width = transformer.inner_dim, transformer.config.joint_attention_dim
    of_images = {"proj": (4 * text_width, 20), "norm": (text_width,)}
    of_blocks = {"to_k_ip": (width, text_width), "to_v_ip": (width, text_width)}

    def weights(shapes, prefix=""):
        return {
            f"{prefix}{name}.{part}": noise(*(shape if part == "weight" else shape[:1]))
            for name, shape in shapes.items()
            for part in ("weight", "bias")
        }

    states = [
        {"image_proj": weights(of_images), "ip_adapter": weights(of_blocks, "0.") | weights(of_blocks, "1.")}
        for _ in range(2)
    ]
    transformer._load_ip_adapter_weights(states)


def attach_to_sd3(transformer):
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


# The function that attaches adapters, and the embeddings of images. For SD3 the first one is for the negative prompt.
CASES = {
    "flux": (
        attach_to_flux,
        {
            "ip_adapter_image_embeds": [torch.linspace(-1, 1, 20)[None, None], torch.linspace(1, 2, 20)[None, None]],
            "negative_ip_adapter_image_embeds": [torch.zeros(1, 1, 20), torch.zeros(1, 1, 20)],
        },
    ),
    "stable diffusion 3": (
        attach_to_sd3,
        {
            "ip_adapter_image_embeds": torch.stack(
                [torch.linspace(-1, 1, 40).view(2, 20), torch.linspace(2, 0, 40).view(2, 20)]
            )
        },
    ),
}


def build_with_adapter(name):
    pipe = build(name)
    CASES[name][0](pipe.transformer)
    return pipe


def generate_on(name):
    pipe, outs = build_with_adapter(name), []
    for mesh in meshes_of([(1, 1, 2), (1, 2, 1), (2, 1, 1)]).values():
        outs.append(generate(parallelize_pipe(pipe, mesh=mesh), name, **CASES[name][1]))
    return [*outs, generate(unparallelize_pipe(pipe), name, **CASES[name][1])]


@pytest.mark.parametrize("name", CASES)
def test_ip_adapters_are_exact(rank_pool, name):
    expected = generate(build_with_adapter(name), name, **CASES[name][1])
    assert relative_error(expected, generated_alone(name)) > 1e-3
    for outs in rank_pool.run(generate_on, 2, name):
        errors = [relative_error(out, expected) for out in outs]
        assert max(errors) < 1e-5, errors
