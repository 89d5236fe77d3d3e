"""A planned model raises and names the module if attention bypasses SDPA, or if tokens were added or left whole."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch import nn

from para_core import Attention, ContextParallelConfig, Gather, ParallelWarning, Plan, Split, apply_context_parallel
from para_core.adapters import parallelize_pipe, parallelize_transformer
from para_core.plans.attention_check import AttentionCheck
from tests.adapters.test_transformers import SIZES, call
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error
from zoo.tiny.transformers.registry import MODELS

pytestmark = pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")


class HandMade(FluxAttnProcessor):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return hidden_states, encoder_hidden_states


def parallel_pipe():
    return parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))


def change_processors():
    """Change processors between generations, in a callback, and on one rank. Return generations without these."""
    pipe, images = parallel_pipe(), []
    for path in ("single_transformer_blocks.0.attn", "transformer_blocks.0.attn"):
        attn, processor = pipe.transformer.get_submodule(path), FluxAttnProcessor()
        attn.set_processor(HandMade())
        for run in (lambda: pipe(**flux_call()), lambda: pipe.transformer(**flux_inputs(13, 5))):
            with torch.no_grad(), pytest.raises(RuntimeError, match=rf"{path} .*HandMade.* 2 ranks"):
                run()
        attn.set_processor(processor)
        images.append(pipe(**flux_call()).images)

    def bypass_from_now_on(pipe, step, timestep, tensors):
        attn.set_processor(HandMade())
        return tensors

    with pytest.raises(RuntimeError, match=r"transformer_blocks\.0\.attn .*HandMade"):
        pipe(**{**flux_call(), "num_inference_steps": 3}, callback_on_step_end=bypass_from_now_on)
    if dist.get_rank() == 0:
        attn.set_processor(processor)
    # Before the model runs, the ranks compare their processors.
    with pytest.raises(ValueError, match="HandMade"):
        pipe(**flux_call())
    return images


def replace_sdpa():
    """Return a generation after one that raised before the pipeline ran, because SDPA was replaced."""
    pipe = parallel_pipe()
    patch = mock.patch.object(F, "scaled_dot_product_attention", lambda *args, **options: None)
    with patch, pytest.raises(RuntimeError, match=r"replace_sdpa\.<locals>\.<lambda>.* 2 ranks"):
        pipe(**flux_call())
    return [pipe(**flux_call()).images]


@pytest.mark.parametrize("job", [change_processors, replace_sdpa])
def test_code_that_changes_is_checked_again(rank_pool, job):
    expected = flux_pipe()(**flux_call()).images
    for images in rank_pool.run(job, 2):
        assert max(relative_error(out, expected) for out in images) < 1e-5


def test_attention_module_that_was_replaced_can_be_copied():
    model, check = flux_transformer(), AttentionCheck(2, None, [])
    check.begin(model, {})
    block = model.transformer_blocks[0]
    replaced, block.attn = block.attn, flux_transformer().transformer_blocks[0].attn
    check.reset()
    check.begin(model, {})
    copy.deepcopy(replaced)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(block.attn)


def skip_all_blocks():
    """Run a model whose forward skips all blocks, as a step cache in the model does: the error names that cache."""
    transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2))
    for block in [*transformer.transformer_blocks, *transformer.single_transformer_blocks]:
        block.forward = lambda hidden_states, encoder_hidden_states, **_: (encoder_hidden_states, hidden_states)
    with torch.no_grad(), pytest.raises(RuntimeError, match="apply_cache_on_pipe"):
        transformer(**flux_inputs(13, 5))


class WeighingProcessor(FluxAttnProcessor):
    """A user's processor that scales image tokens, in blocks where image and text are separate."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, token_weights=None, **kwargs):
        if encoder_hidden_states is not None and isinstance(token_weights, torch.Tensor):
            hidden_states = hidden_states * token_weights
        elif encoder_hidden_states is not None and token_weights is not None:
            hidden_states = hidden_states[:, token_weights["keep"][0]]
        return super().__call__(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


def use_tokens_that_do_not_fit():
    model = parallelize_transformer(MODELS["glm-image"].build(), mesh=cpu_mesh(1, 2))
    caches = GlmImageKVCache(num_layers=model.config.num_layers)
    caches.set_mode("write")
    call(model, "glm-image", SIZES[0], kv_caches=caches)
    caches.set_mode("read")
    with pytest.raises(ValueError, match=r"GlmImageAttnProcessor .*\d+ .*\d+\b.*unparallelize_pipe\(pipe\)"):
        call(model, "glm-image", SIZES[0], kv_caches=caches)
    model = parallelize_transformer(MODELS["pixart"].build(), mesh=cpu_mesh(1, 2))
    attention = model.transformer_blocks[0].attn1
    attention.register_forward_pre_hook(lambda _, args: (torch.cat([args[0], args[0][:, :1]], dim=1), *args[1:]))
    with pytest.raises(ValueError, match=r"AttnProcessor2_0 .*\d+ .*\d+\b.*unparallelize_pipe\(pipe\)"):
        call(model, "pixart", SIZES[0])
    named = rf"FluxTransformer2DModel .*joint_attention_kwargs\['token_weights'\]%s.* {32 - dist.get_rank()} "
    for weights, error, message in [
        (torch.rand(1, 63, 1), ValueError, named % r" \[1, 63, 1\]"),
        ({"keep": [torch.ones(63, dtype=torch.bool)]}, ValueError, named % r"\['keep'\]\[0\] \[63\]"),
        # Other errors of sizes stay as they are.
        (torch.rand(1, 7, 1), RuntimeError, r"\(7\)"),
    ]:
        pipe = parallel_pipe()
        pipe.transformer.set_attn_processor(WeighingProcessor())
        with pytest.raises(error, match=message):
            pipe(**flux_call(joint_attention_kwargs={"token_weights": weights}))


class Attends(nn.Module):
    def forward(self, x, text=None, inside=True, weights=False, bias=0):
        if inside:  # of each token
            x = F.scaled_dot_product_attention(*[x[:, :, None]] * 3)[:, :, 0]
        x = F.scaled_dot_product_attention(x, *[x if text is None else text] * 2) + bias
        return (x @ x.mT).softmax(-1) @ x if weights else x


class Outer(nn.ModuleList):
    def forward(self, x, **options):
        return self[0](x, **options)


def switch_on_other_code():
    """Calls with other arguments than the first one attend by hand, or not as the plan says."""
    models, x = {}, torch.randn(2, 13, 8)
    for keys in (None, ("text",)):
        calls = {"0": (Attention(("one",)), Attention(("image",), keys))}
        plan = Plan({"x": Split(1, "image")}, {"": Gather(1, "image")}, ("image",), attention=calls)
        models[keys] = Outer([Attends()])
        apply_context_parallel(models[keys], ContextParallelConfig(mesh=cpu_mesh(1, 2)), plan)
        models[keys](x, text=None if keys is None else x[:, :5], weights=False)
    with pytest.warns(ParallelWarning, match="by hand"):
        models[None](x, weights=True)
    for keys, options, message in [
        (None, {"inside": False}, "1 of the 2 attention calls"),
        (("text",), {}, "keys that differ"),
        (None, {"bias": x}, r"\(13\)"),
    ]:
        with pytest.raises(RuntimeError, match=message) as caught:
            models[keys](x, **options)
    assert f"holds {7 - dist.get_rank()} of the 13 image tokens" in caught.value.__notes__[0]


@pytest.mark.parametrize("job", [skip_all_blocks, use_tokens_that_do_not_fit, switch_on_other_code])
def test_errors_name_what_skips_blocks_and_which_tokens_do_not_fit(rank_pool, job):
    rank_pool.run(job, 2)
