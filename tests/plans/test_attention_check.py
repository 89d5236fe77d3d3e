"""A planned model raises and names the module if attention of one module bypasses scaled_dot_product_attention."""

import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from para_core import ParallelWarning
from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, parallelize_transformer
from para_core.distributed.agreed_inputs import assume_agreed
from para_core.plans.region import region_of
from tests.adapters.test_transformers import SIZES, call
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error
from zoo.tiny.transformers.registry import MODELS

pytestmark = pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")


def scores(query, key):
    return query @ key.mT * query.shape[-1] ** -0.5


def by_matmul(query, key, value):
    return scores(query, key).softmax(-1) @ value


def by_einsum(query, key, value):
    weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", query, key) * query.shape[-1] ** -0.5, -1)
    return torch.einsum("bhij,bhjd->bhid", weights, value)


def by_exp(query, key, value):
    weights = scores(query, key).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


class Kernel(torch.autograd.Function):
    """A user's own kernel, in which no function of torch can be seen."""

    @staticmethod
    def forward(ctx, query, key, value):
        return by_matmul(query, key, value)


ways = {"matmul": by_matmul, "einsum": by_einsum, "exp": by_exp, "kernel": Kernel.apply}


def with_other_sdpa(processor, attend):
    """Return a processor that runs ``processor`` with ``attend`` in place of SDPA, and calls SDPA with a mask."""

    class Processor:
        def __call__(self, *args, **kwargs):
            original = torch.ops.aten.scaled_dot_product_attention

            def attention(query, key, value, attn_mask=None, **options):
                return attend(query, key, value) if attn_mask is None else original(query, key, value, attn_mask)

            # Replace the processor's own name for the function, and only while the processor runs.
            with mock.patch("torch.nn.functional.scaled_dot_product_attention", attention):
                return processor(*args, **kwargs)

    return Processor()


def bypass(way):
    """Return the errors of three FLUX transformers that have a user's processor in one block."""
    errors = []
    for path in ("transformer_blocks.1.attn", "single_transformer_blocks.0.attn"):
        transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2))
        transformer.get_submodule(path).set_processor(with_other_sdpa(FluxAttnProcessor(), ways[way]))
        with torch.no_grad():
            for _ in range(2):  # The second call is refused too.
                with pytest.raises(RuntimeError, match=rf"{path} .*Processor.* 2 ranks") as error:
                    transformer(**flux_inputs(13, 5))
                errors.append(str(error.value))
            transformer.get_submodule(path).set_processor(FluxAttnProcessor())
            errors.append(transformer(**flux_inputs(13, 5)).sample)
    return errors


@pytest.mark.parametrize("way", list(ways))
def test_one_module_that_bypasses_sdpa_is_named_on_every_rank(rank_pool, way):
    with torch.no_grad():
        expected = flux_transformer()(**flux_inputs(13, 5)).sample
    for outcomes in rank_pool.run(bypass, 2, way):
        assert all(relative_error(x, expected) < 1e-5 for x in outcomes if torch.is_tensor(x))


def bypass_wan(which):
    transformer = parallelize_transformer(MODELS["wan"].build(), mesh=cpu_mesh(2, 1))
    for block in transformer.blocks:
        getattr(block, which).set_processor(with_other_sdpa(WanAttnProcessor(), by_matmul))
    try:
        return call(transformer, "wan", SIZES[0])[0]
    except RuntimeError as error:
        return str(error)


def test_self_attention_next_to_cross_attention_is_named(rank_pool):
    for out in rank_pool.run(bypass_wan, 2, "attn1"):
        assert "blocks.0.attn1" in out


def test_cross_attention_to_replicated_text_may_be_anything(rank_pool):
    expected = call(MODELS["wan"].build(), "wan", SIZES[0])[0]
    for out in rank_pool.run(bypass_wan, 2, "attn2"):
        assert relative_error(out, expected) < 1e-5


def change_processors_between_generations(compiled):
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    if compiled:
        pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    first = pipe(**flux_call()).images
    attn = getattr(pipe.transformer, "_orig_mod", pipe.transformer).transformer_blocks[0].attn
    processor = attn.processor
    attn.set_processor(with_other_sdpa(FluxAttnProcessor(), by_matmul) if not compiled else HandMade())
    with pytest.raises(RuntimeError, match="2 ranks"):
        pipe(**flux_call())
    attn.set_processor(processor)
    return first, pipe(**flux_call()).images


class HandMade(FluxAttnProcessor):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return hidden_states, encoder_hidden_states


@pytest.mark.parametrize("compiled", [False, True])
def test_processors_that_change_are_checked_again(rank_pool, compiled):
    expected = flux_pipe()(**flux_call()).images
    for outs in rank_pool.run(change_processors_between_generations, 2, compiled):
        assert all(relative_error(out, expected) < 1e-5 for out in outs)


def processors_on_one_rank(rank):
    import torch.distributed as dist

    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    if dist.get_rank() == rank:
        pipe.transformer.transformer_blocks[0].attn.set_processor(HandMade())
    with pytest.raises(ValueError, match="HandMade"):
        pipe(**flux_call())
    return True


@pytest.mark.parametrize("rank", [0, 1])
def test_different_processors_raise_before_the_model_runs(rank_pool, rank):
    assert all(rank_pool.run(processors_on_one_rank, 2, rank))


def replace_sdpa():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    original = F.scaled_dot_product_attention

    def patched(query, key, value, **options):
        return original(query, key, value, **options)

    with (
        mock.patch.object(F, "scaled_dot_product_attention", patched),
        pytest.raises(RuntimeError, match=r"replace_sdpa\.<locals>\.patched.* 2 ranks"),
    ):
        pipe(**flux_call())
    return pipe(**flux_call()).images


def test_replaced_sdpa_raises_before_a_pipeline_runs(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for out in rank_pool.run(replace_sdpa, 2):
        assert relative_error(out, expected) < 1e-5


def old_processor_of_diffusers():
    """Run PixArt's self-attention with a processor of diffusers that computes scores itself."""
    transformer = parallelize_transformer(MODELS["pixart"].build(), mesh=cpu_mesh(1, 2))
    transformer.transformer_blocks[1].attn1.set_processor(AttnProcessor())
    with pytest.raises(RuntimeError, match=r"transformer_blocks\.1\.attn1 .*AttnProcessor"):
        call(transformer, "pixart", SIZES[0])
    return True


def test_old_processor_of_diffusers_is_named(rank_pool):
    assert all(rank_pool.run(old_processor_of_diffusers, 2))


def skip_all_blocks():
    """Run a model whose forward skips all blocks in every second call, as a step cache in the model does."""
    transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2))
    for block in [*transformer.transformer_blocks, *transformer.single_transformer_blocks]:
        block.forward = lambda hidden_states, encoder_hidden_states, **_: (encoder_hidden_states, hidden_states)
    with torch.no_grad(), pytest.raises(RuntimeError, match="apply_cache_on_pipe"):
        transformer(**flux_inputs(13, 5))
    return True


def test_skipped_blocks_name_the_cache_and_not_the_backend(rank_pool):
    assert all(rank_pool.run(skip_all_blocks, 2))


def softmax_outside_of_attention():
    """Run a model that attends by hand in a module that the plan does not know, and by SDPA in the known ones."""
    transformer = flux_transformer()
    forward = transformer.transformer_blocks[0].ff.forward

    def mixing(x):
        return forward((x @ x.mT).softmax(-1) @ x)

    transformer.transformer_blocks[0].ff.forward = mixing
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 2))
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always", ParallelWarning)
        for _ in range(2):
            transformer(**flux_inputs(13, 5))
    return [str(x.message) for x in caught if x.category is ParallelWarning]


def test_scores_by_hand_outside_of_attention_modules_warn_once(rank_pool):
    for messages in rank_pool.run(softmax_outside_of_attention, 2):
        assert len(messages) == 1
        assert "transformer_blocks.0.ff" in messages[0]


def frames_of_the_check():
    """Return the number of Python functions that the check runs in each of four calls with verified inputs."""
    transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2))
    numbers = []
    with torch.no_grad(), assume_agreed([region_of(transformer)]):
        for _ in range(4):
            numbers.append(0)

            def count(frame, event, _):
                code = frame.f_code
                if event == "call" and (
                    code.co_filename.endswith(("attention_check.py", "handwritten.py", "foreign_code.py"))
                ):
                    numbers[-1] += 1

            sys.setprofile(count)
            transformer(**flux_inputs(13, 5))
            sys.setprofile(None)
    return numbers


def test_calls_after_the_first_run_without_the_check(rank_pool):
    for first, *later in rank_pool.run(frames_of_the_check, 2):
        assert first > 0
        assert later == [0, 0, 0]


def cached_and_checked():
    pipe = apply_cache_on_pipe(
        parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2)), residual_diff_threshold=10.0, max_consecutive_hits=1
    )
    return pipe(**{**flux_call(), "num_inference_steps": 4}).images


def test_steps_that_a_cache_skips_pass_the_check(rank_pool):
    alone = apply_cache_on_pipe(flux_pipe(), residual_diff_threshold=10.0, max_consecutive_hits=1)
    expected = alone(**{**flux_call(), "num_inference_steps": 4}).images
    for out in rank_pool.run(cached_and_checked, 2):
        assert relative_error(out, expected) < 1e-4


def change_processors_in_a_callback():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))

    def bypass_from_now_on(pipe, step, timestep, tensors):
        pipe.transformer.transformer_blocks[0].attn.set_processor(HandMade())
        return tensors

    with pytest.raises(RuntimeError, match=r"transformer_blocks\.0\.attn .*HandMade"):
        pipe(**{**flux_call(), "num_inference_steps": 3}, callback_on_step_end=bypass_from_now_on)
    return True


def test_processors_that_a_callback_sets_are_checked(rank_pool):
    assert all(rank_pool.run(change_processors_in_a_callback, 2))
