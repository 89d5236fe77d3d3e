"""LoRA and offload on video pipelines, set before or after parallelizing, give the results of one device."""

from functools import cache

import diffusers.hooks
import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from para_core.adapters import parallelize_pipe, unparallelize_pipe
from tests.adapters.test_pipelines import build, generate
from tests.tiny import cpu_mesh, relative_error

NAMES = ["hunyuan", "mochi", "cogvideox", "wan 2.2"]
CPU = torch.device("cpu")


def transformers_of(pipe):
    return [part for part in (pipe.transformer, getattr(pipe, "transformer_2", None)) if part is not None]


def offload_model(pipe):
    pipe.enable_model_cpu_offload(device="cpu")


def offload_sequentially(pipe):
    # enable_sequential_cpu_offload does this for each model. For text encoders it fails on a CPU, also without ranks.
    for transformer in transformers_of(pipe):
        cpu_offload(transformer, execution_device=CPU)


def offload_groups(pipe):
    for transformer in transformers_of(pipe):
        transformer.enable_group_offload(onload_device=CPU, offload_type="block_level", num_blocks_per_group=1)


def offload_leaves(pipe):
    for transformer in transformers_of(pipe):
        diffusers.hooks.apply_group_offloading(transformer, onload_device=CPU, offload_type="leaf_level")


OFFLOADS = {
    function.__name__: function for function in (offload_model, offload_sequentially, offload_groups, offload_leaves)
}
expected_of = cache(lambda name: generate(build(name), name))


def draw_offloaded(names, mesh_shape):
    outs = {}
    for name in names:
        for title, offload in OFFLOADS.items():
            for when in ("before", "after"):
                pipe = build(name, cpu_mesh(*mesh_shape) if when == "after" else None)
                offload(pipe)
                if when == "before":
                    parallelize_pipe(pipe, mesh=cpu_mesh(*mesh_shape))
                outs[name, title, when] = generate(pipe, name)
                if when == "after":
                    outs[name, title, "then alone"] = generate(unparallelize_pipe(pipe), name)
                # Pipes share their text encoders here.
                pipe.remove_all_hooks()
    return outs


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=marks, id=" and ".join(names))
        for names, marks in ((NAMES[:3], pytest.mark.long), (NAMES[3:], ()))
    ],
)
@pytest.mark.long
def test_offloaded_videos_are_exact(rank_pool, names):
    for outs in rank_pool.run(draw_offloaded, 2, names, (2, 1)):
        errors = {key: relative_error(out, expected_of(key[0])) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


def lora_weights(name):
    """Return LoRA weights in file format, for linear layers of the first block and for layers after which tokens are
    gathered.
    """
    generator = torch.Generator().manual_seed(11)
    transformer = build(name).transformer
    linears = [path for path, part in transformer.named_modules() if isinstance(part, nn.Linear)]
    blocks = [path for path in linears if "blocks.0." in path and not path.endswith("proj_out")]
    # peft takes the last part of a name to mean all layers with that name.
    last = [path for path in linears if path.endswith("proj_out")]
    weights = {}
    for path in (*blocks[:4], *last):
        linear = transformer.get_submodule(path)
        for part, shape in {"lora_A": (3, linear.in_features), "lora_B": (linear.out_features, 3)}.items():
            weights[f"transformer.{path}.{part}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    return weights


def load_lora(pipe, name):
    pipe.load_lora_weights(lora_weights(name))
    if name == "wan 2.2":
        pipe.load_lora_weights(lora_weights(name), load_into_transformer_2=True)


def draw_with_lora(when, mesh_shape=None):
    outs = {}
    for name in NAMES:
        pipe = build(name, cpu_mesh(*mesh_shape) if when == "after" else None)
        load_lora(pipe, name)
        if when == "before":
            parallelize_pipe(pipe, mesh=cpu_mesh(*mesh_shape))
        outs[name, "loaded"] = generate(pipe, name)
        pipe.fuse_lora(components=["transformer"])
        outs[name, "fused"] = generate(pipe, name)
        pipe.unfuse_lora(components=["transformer"])
        pipe.unload_lora_weights()
        outs[name, "unloaded"] = generate(pipe, name)
    return outs


@pytest.mark.long
def test_videos_with_a_lora_are_exact(rank_pool):
    expected = draw_with_lora("alone")
    for name in NAMES:
        assert relative_error(expected[name, "loaded"], expected[name, "unloaded"]) > 0.01
    for when in ("before", "after"):
        for outs in rank_pool.run(draw_with_lora, 2, when, (1, 2)):
            errors = {key: relative_error(out, expected[key]) for key, out in outs.items()}
            assert max(errors.values()) < 1e-5, (when, errors)
