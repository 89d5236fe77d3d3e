"""Models of diffusers that attend by flex attention and keep keys from call to call, compared with the unmodified
model.
"""

import copy
from unittest import mock

import diffusers.models.transformers.transformer_kandinsky6_sr as kandinsky6_sr
import diffusers.models.transformers.transformer_wan_animate_2 as wan_animate_2
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from para_core.adapters import parallelize_transformer
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.transformers.registry import MODELS
from zoo.tiny.transformers.video import wan_animate_2_inputs

SIZE = (3, 6, 10)


def generate_chunks(transformer):
    """Return the predictions of AnyFlow FAR for three chunks. Each chunk attends to the keys of the earlier ones."""
    num_chunks, height, width = SIZE
    inputs = MODELS["anyflow far"].inputs(*SIZE)
    inputs = {name: value for name, value in inputs.items() if "timestep" not in name}
    latents, config = inputs.pop("hidden_states"), transformer.config
    full, compressed = (height // 2) * (width // 2), (height // 4) * (width // 4)
    shape = 2, 2, config.num_attention_heads
    kv_cache = [
        {
            "full_cache": torch.zeros(*shape, config.full_chunk_limit * full, config.attention_head_dim),
            "compressed_cache": torch.zeros(*shape, 2 * compressed, config.attention_head_dim),
        }
        for _ in range(config.num_layers)
    ]
    flag, outs = {"num_cached_chunks": 0, "is_cache_step": False}, []
    for chunk in range(num_chunks):
        kwargs = {**inputs, "chunk_partition": [1] * (chunk + 1), "kv_cache": kv_cache, "return_dict": False}
        for is_cache_step, first in ((False, chunk), (True, 0)):
            frames_given = chunk + 1 - first
            out, _ = transformer(
                **kwargs,
                hidden_states=latents[:, first : chunk + 1],
                timestep=torch.full((2, frames_given), 600.0),
                r_timestep=torch.full((2, frames_given), 500.0),
                kv_cache_flag={**flag, "is_cache_step": is_cache_step},
            )
            outs += [] if out is None else [out]
        flag["num_cached_chunks"] += 1
    return outs


def without_compilation(*args, _compile, **kwargs):
    """Create the mask without the compilation that the model asks for, which takes half a minute on a CPU."""
    return create_block_mask(*args, **kwargs)


def animation_step(kv_cache):
    """Return the inputs of a step after the reference pass. Its additional frame has no reference frame."""
    frames, height, width = SIZE
    step = wan_animate_2_inputs(frames + 1, height, width)
    step.pop("offset_grid_sizes")
    return step | {
        "kv_cache": kv_cache,
        "kv_cache_mode": "cached",
        "reference_grid_sizes": torch.tensor([[frames, height // 2, width // 2]]),
        "origin_len": 4 * frames - 3,
        "origin_area": [8 * height, 8 * width],
    }


def generate_from_reference(transformer):
    """Return the predictions of Wan Animate 2 in two steps that attend to the keys of the reference pass.

    The first step has fewer frames than the whole video.
    """
    reference = MODELS["wan animate 2"].inputs(*SIZE)
    outs = [transformer(**reference, return_dict=False)[0][0]]
    for _ in range(2):
        step = animation_step(reference["kv_cache"])
        with mock.patch.object(wan_animate_2, "create_block_mask", without_compilation):
            outs.append(transformer(**step, return_dict=False)[0][0])
    return outs


GENERATE = {"anyflow far": generate_chunks, "wan animate 2": generate_from_reference}


def generate_in_parallel(name, ring, ulysses):
    transformer = parallelize_transformer(MODELS[name].build(), mesh=cpu_mesh(ring, ulysses))
    with torch.no_grad():
        return GENERATE[name](transformer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", GENERATE)
@pytest.mark.parametrize(
    ("ring", "ulysses"),
    [(1, 2), pytest.param(2, 1, marks=pytest.mark.long), pytest.param(2, 2, marks=pytest.mark.long)],
)
def test_keys_of_earlier_calls_are_those_of_one_device(rank_pool, name, ring, ulysses):
    with torch.no_grad():
        expected = GENERATE[name](MODELS[name].build())
    for rank, outs in enumerate(rank_pool.run(generate_in_parallel, ring * ulysses, name, ring, ulysses)):
        errors = [relative_error(out, whole) for out, whole in zip(outs, expected, strict=True)]
        assert max(errors) < 1e-5, f"rank {rank}: {errors}"
        # Each step attends to earlier tokens, so a step alone gives another output.
        assert relative_error(expected[1], expected[0]) > 1e-3


def masks_of_blocks(ring, ulysses):
    """Return the block mask that Kandinsky computes for each head in each block of the model."""
    masks, find = [], kandinsky6_sr.nabla_block_mask

    def noting(*args, **kwargs):
        mask = find(*args, **kwargs)
        masks.append(mask.to_dense())
        return mask

    transformer = MODELS["kandinsky 6 sr"].build()
    if ring * ulysses > 1:
        parallelize_transformer(transformer, mesh=cpu_mesh(ring, ulysses))
    kandinsky6_sr.nabla_block_mask = noting
    try:
        with torch.no_grad():
            transformer(**MODELS["kandinsky 6 sr"].inputs(3, 16, 16))
    finally:
        kandinsky6_sr.nabla_block_mask = find
    return copy.deepcopy(masks)


@pytest.mark.long
def test_kandinsky_6_sr_shards_masks_by_heads(rank_pool):
    # On a CPU, flex attention without compilation ignores a mask that consists of blocks only, so an output would not
    # show it.
    expected = masks_of_blocks(1, 1)
    assert 0 < torch.cat(expected).float().mean() < 1
    for masks in zip(*rank_pool.run(masks_of_blocks, 2, 1, 2), expected, strict=True):
        assert torch.equal(torch.cat(masks[:-1], dim=1), masks[-1])


def too_few_heads():
    transformer = parallelize_transformer(MODELS["kandinsky 6 sr"].build(), mesh=cpu_mesh(1, 5))
    with pytest.raises(ValueError, match="4 heads, and 5 ranks"), torch.no_grad():
        transformer(**MODELS["kandinsky 6 sr"].inputs(*SIZE))


@pytest.mark.long
def test_more_ranks_than_heads_raise_everywhere(rank_pool):
    rank_pool.run(too_few_heads, 5)
