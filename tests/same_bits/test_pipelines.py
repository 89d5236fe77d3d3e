"""``same_bits=True``: pipelines on several ranks have the bytes of one process, or raise and say why not."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from benchmarks.pipelines.latents import generate
from para_core import PipeFusion
from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe, unparallelize_pipe
from para_core.adapters.agree.loras import lora_layers
from para_core.same_bits.call import SameBitsCalls
from para_core.same_bits.row_check import RowCheck
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer
from tests.weights.test_lora import lora_weights
from zoo.tiny.pipelines import PIPELINES

CACHED = {"num_inference_steps": 6}
GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}


def flux_on(mesh_sizes, dtype, options, has_8_bit_weights):
    transformer = flux_transformer(attention_head_dim=64, axes_dims_rope=(16, 24, 24))
    pipe = flux_pipe(shared_parts=False, transformer=transformer).to(dtype)
    if has_8_bit_weights:
        quantize_(transformer, Int8WeightOnlyConfig())
    expected = pipe(**flux_call(**options)).images
    parallelize_pipe(pipe, mesh=cpu_mesh(*mesh_sizes[1:], batch=mesh_sizes[0]), same_bits=True)
    outputs = [pipe(**flux_call(**options)).images for _ in range(2)]
    unparallelize_pipe(pipe)
    assert torch.equal(pipe(**flux_call(**options)).images, expected)
    return [torch.equal(out, expected) for out in outputs]


@pytest.mark.parametrize(
    ("mesh", "dtype", "options", "has_8_bit_weights"),
    [
        ((1, 1, 3), torch.float32, {}, False),
        ((1, 1, 2), torch.bfloat16, {}, False),
        ((1, 2, 1), torch.bfloat16, {}, False),
        ((2, 1, 1), torch.float32, GUIDED, False),
        ((2, 1, 2), torch.float32, GUIDED, False),
        ((1, 1, 2), torch.float32, {}, True),
    ],
)
def test_flux_has_the_bytes_of_one_process(rank_pool, mesh, dtype, options, has_8_bit_weights):
    for results in rank_pool.run(flux_on, mesh[0] * mesh[1] * mesh[2], mesh, dtype, options, has_8_bit_weights):
        assert results == [True, True]


# Cross-attention of few queries; a text with as many tokens as a rank has of the image, whole and shared; a mean.
OF_FEW_TOKENS = ["pixart", "hunyuan, image", "qwen-image", "ace-step"]


def on_four_ranks():
    results = []
    for name in OF_FEW_TOKENS:
        expected = generate(PIPELINES[name].build(), name)
        pipe = parallelize_pipe(PIPELINES[name].build(), mesh=cpu_mesh(1, 4), same_bits=True)
        with mock.patch.object(RowCheck, "compare_splits") as compare_splits:
            results.append((torch.equal(generate(pipe, name), expected), compare_splits.call_count > 0))
    return results


def test_few_tokens_on_a_rank_have_the_bytes_of_one_process(rank_pool):
    assert rank_pool.run(on_four_ranks, 4) == [[(True, True)] * len(OF_FEW_TOKENS)] * 4


def cached_flux_on(mesh_sizes, options):
    pipe = flux_pipe(shared_parts=False)
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.8)
    expected = pipe(**flux_call(**CACHED, **options)).images
    skipped = [row.hit for row in cache_report(pipe).rows]
    parallelize_pipe(pipe, mesh=cpu_mesh(*mesh_sizes[1:], batch=mesh_sizes[0]), same_bits=True)
    out = pipe(**flux_call(**CACHED, **options)).images
    # With CFG on ranks, a rank has the rows of its own branch.
    assert [row.hit for row in cache_report(pipe).rows] == skipped or mesh_sizes[0] > 1
    return torch.equal(out, expected), skipped


@pytest.mark.parametrize(("mesh", "options"), [((1, 1, 2), {}), ((1, 3, 1), {}), ((2, 1, 1), GUIDED)])
def test_a_cache_skips_the_steps_of_one_process(rank_pool, mesh, options):
    for same, skipped in rank_pool.run(cached_flux_on, mesh[0] * mesh[1] * mesh[2], mesh, options):
        assert same
        assert {True, False} == {*skipped}


REFUSED = [
    ((2, 1), "", {"rotate_method": "2d"}, "rotate_method='2d'"),
    ((1, 2), "", {"rotate_method": "alltoall"}, "rotate_method='alltoall'"),
    ((1, 2), "", {"comm_dtype": torch.int8}, "comm_dtype"),
    ((1, 2), "", {"pipefusion": PipeFusion()}, "pipefusion"),
    ((1, 2), "sana video", {}, "pipe.transformer, a SanaVideoTransformer3DModel"),
]


def refuse():
    for mesh, name, options, words in REFUSED:
        pipe = PIPELINES[name].build() if name else flux_pipe()
        with pytest.raises(ValueError, match=re.escape(f"same_bits=True with {words}")):
            parallelize_pipe(pipe, mesh=cpu_mesh(*mesh), same_bits=True, **options)


def compiled():
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2), same_bits=True)
    transformer = pipe.transformer
    pipe(**flux_call())
    pipe.transformer = torch.compile(transformer, backend="eager")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="same_bits=True runs eager models"):
            pipe(**flux_call())
        pipe.transformer = transformer
        transformer.compile_repeated_blocks(backend="eager")


def guide_with_one_row():
    pipe = parallelize_pipe(PIPELINES["cogvideox 1.5, image"].build(), mesh=cpu_mesh(1, 1, batch=2), same_bits=True)
    with pytest.raises(ValueError, match="ofs of CogVideoXTransformer3DModel has one row for all 2 samples"):
        generate(pipe, "cogvideox 1.5, image")


def change_functions():
    """Call a pipeline again after each change of the functions that its transformer runs."""
    pipe = parallelize_pipe(flux_pipe(shared_parts=False), mesh=cpu_mesh(1, 2), same_bits=True)
    changes = {
        "first": lambda: None,
        "processor": lambda: pipe.transformer.transformer_blocks[0].attn.set_processor(FluxAttnProcessor()),
        "processor of one rank": lambda: dist.get_rank() or pipe.transformer.set_attn_processor(FluxAttnProcessor()),
        "lora": lambda: pipe.load_lora_weights(lora_weights("flux")),
        "fused": lambda: [(x.merge(), setattr(x, "_active_adapter", [])) for x in lora_layers(pipe.transformer)],
        "no lora": lambda: ([x.unmerge() for x in lora_layers(pipe.transformer)], pipe.disable_lora()),
        "8 bits": lambda: quantize_(pipe.transformer.context_embedder, Int8WeightOnlyConfig()),
    }
    with mock.patch.object(SameBitsCalls, "_conclude") as conclude:
        for count, (name, change) in enumerate(changes.items(), start=1):
            change()
            for _ in range(2):
                pipe(**flux_call(num_inference_steps=2))
                assert conclude.call_count == count, name


@pytest.mark.parametrize("check", [refuse, compiled, guide_with_one_row, change_functions])
def test_other_bits_are_refused_and_other_functions_checked(rank_pool, check):
    rank_pool.run(check, 2)
