"""What cannot run in parallel is an error that says so, on every rank, and what to do instead."""

import pytest
import torch
from diffusers import ConfigMixin, DiffusionPipeline, FluxTransformer2DModel, ModelMixin, SanaTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn

from benchmarks.tiny_images import stable_diffusion_3
from benchmarks.tiny_models import MODELS
from para_core.adapters import parallelize_pipe, parallelize_transformer
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer, relative_error

SUPPORTED = r"Supported are FLUX\.1: "


class NoTransformer(DiffusionPipeline):
    def __init__(self, unet):
        super().__init__()
        self.register_modules(unet=unet)


class OtherTransformer(DiffusionPipeline):
    def __init__(self, transformer):
        super().__init__()
        self.register_modules(transformer=transformer)


def sana():
    """Its linear attention is no scaled_dot_product_attention."""
    return SanaTransformer2DModel(
        num_attention_heads=1,
        attention_head_dim=4,
        num_layers=1,
        cross_attention_dim=4,
        num_cross_attention_heads=1,
        cross_attention_head_dim=4,
        caption_channels=4,
    )


def test_a_pipe_without_a_transformer_is_refused_with_what_is_supported():
    with pytest.raises(TypeError, match=r"NoTransformer is not supported: it has no transformer\. " + SUPPORTED):
        parallelize_pipe(NoTransformer(nn.Linear(1, 1)))


class OtherModel(ModelMixin, ConfigMixin):
    """Nobody described it."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            sana,
            r"SanaTransformer2DModel has no plan, for its linear attention is no .*\. Give each rank prompts of its own instead\.",
        ),
        (
            OtherModel,
            r"there is no plan for OtherModel\. .*adapter=Adapter\(transformer='OtherModel', .*plan=Plan\(.*docs/new_model\.md",
        ),
    ],
)
def test_another_transformer_is_refused_with_what_is_supported(make, message):
    model = make()
    for attempt, given in ((parallelize_pipe, OtherTransformer(model)), (parallelize_transformer, model)):
        expected = f"^{type(given).__name__} is not supported: {message} .*{SUPPORTED}"
        with pytest.raises(TypeError, match=expected) as error:
            attempt(given)
        # Which dim holds tokens depends on the model: of most image models dim 1 are channels.
        assert "dim=1" not in str(error.value)


def test_a_transformer_spread_over_devices_is_refused():
    pipe = flux_pipe()
    pipe.transformer.hf_device_map = {"transformer_blocks": 0, "single_transformer_blocks": 1}
    with pytest.raises(ValueError, match=r"spread over the devices \['0', '1'\] by its device_map"):
        parallelize_pipe(pipe)
    pipe.transformer.hf_device_map = {"": 0}
    parallelize_pipe(pipe)


def test_diffusers_own_parallelism_is_refused():
    pipe = flux_pipe()
    pipe.transformer._parallel_config = object()
    with pytest.raises(ValueError, match=r"already runs under diffusers' own enable_parallelism"):
        parallelize_pipe(pipe)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(TypeError, match="mesh is a int; expected a DeviceMesh or a ProcessGroup"):
        parallelize_pipe(flux_pipe(), mesh=2)


class HandMadeProcessor(FluxAttnProcessor):
    """Attention that no mode sees, as of a flash_attn kernel."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        tokens = hidden_states
        if encoder_hidden_states is not None:
            tokens = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        out = torch.softmax(tokens @ tokens.mT, dim=-1) @ tokens
        if encoder_hidden_states is None:
            return out
        text = encoder_hidden_states.shape[1]
        return out[:, text:], out[:, :text]


UNSEEN = r"called no scaled_dot_product_attention.*Switch its attention to a native backend"


def attend_unseen(compiled):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    processors = {name: part.processor for name, part in pipe.transformer.named_modules() if hasattr(part, "processor")}
    assert processors
    for name in processors:
        pipe.transformer.get_submodule(name).set_processor(HandMadeProcessor())
    if compiled == "blocks":
        pipe.transformer.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    if compiled == "whole":
        pipe.transformer = torch.compile(pipe.transformer, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=UNSEEN) as error:
        pipe(**flux_call())
    for name, processor in processors.items():
        getattr(pipe.transformer, "_orig_mod", pipe.transformer).get_submodule(name).set_processor(processor)
    return type(error.value).__name__, pipe(**flux_call()).images


@pytest.mark.parametrize("compiled", ["no", pytest.param("blocks", marks=pytest.mark.long), "whole"])
def test_attention_that_the_mode_cannot_see_is_an_error_on_every_rank(rank_pool, compiled):
    expected = flux_pipe()(**flux_call()).images
    for kind, out in rank_pool.run(attend_unseen, 2, compiled):
        assert compiled == "whole" or kind == "RuntimeError"
        assert relative_error(out, expected) < 1e-5


def give_kv_cache():
    model = MODELS["flux2"]
    transformer = parallelize_transformer(model.build(), mesh=cpu_mesh(1, 2))
    with pytest.raises(
        ValueError, match=r"(?s)was given kv_cache, which cannot be computed on several ranks: .*unparall"
    ):
        transformer(**model.inputs(3, 6, 10), kv_cache=object())


def test_a_cache_of_reference_images_is_refused_with_a_reason(rank_pool):
    rank_pool.run(give_kv_cache, 2)


def replace_transformer():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    pipe.transformer = flux_transformer()
    with pytest.raises(RuntimeError, match=r"pipe\.transformer is another one than when the pipe was parallelized"):
        pipe(**flux_call())
    assert type(pipe.transformer) is FluxTransformer2DModel
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
    return pipe(**flux_call()).images


def test_a_transformer_put_in_later_is_an_error_that_says_what_to_call(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for out in rank_pool.run(replace_transformer, 2):
        assert relative_error(out, expected) < 1e-5


def perturb():
    pipe = stable_diffusion_3("StableDiffusion3PAGPipeline")
    with pytest.raises(
        TypeError,
        match=r"StableDiffusion3PAGPipeline is not supported: its perturbed .*without perturbed.*" + SUPPORTED,
    ):
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2)["ring"])


def test_perturbed_attention_over_joint_tokens_is_refused_with_a_reason(rank_pool):
    rank_pool.run(perturb, 2)
