"""LoRA and offload can be added to a parallel pipe and removed in any order."""

import itertools
from functools import cache, partial

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig
from torch import nn

from para_core.adapters import (
    parallelize_pipe,
    parallelize_transformer,
    unparallelize_pipe,
    unparallelize_transformer,
)
from tests.adapters import test_pipelines
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, flux_call, flux_pipe, relative_error
from zoo.tiny.transformers.registry import MODELS

CPU = torch.device("cpu")
VIDEOS = ["hunyuan", "mochi", "cogvideox", "wan 2.2"]
NAMES = ["flux", *[pytest.param(name, marks=pytest.mark.long) for name in VIDEOS]]


def build(name):
    heartbeat()
    return flux_pipe(shared_parts=False) if name == "flux" else test_pipelines.build(name)


def generate(pipe, name, **options):
    if name == "flux":
        return pipe(**flux_call(**options)).images
    return test_pipelines.generate(pipe, name, **options)


@cache
def generated_alone(name):
    return generate(build(name), name)


def transformers_of(pipe):
    return [part for part in (pipe.transformer, getattr(pipe, "transformer_2", None)) if part is not None]


# -- LoRA.


def lora_weights(name):
    """Return LoRA weights in file format, for linear layers of the first block and for layers after which tokens are
    gathered. They are large enough to change the output measurably.
    """
    generator = torch.Generator().manual_seed(11)
    transformer = build(name).transformer
    linears = [path for path, part in transformer.named_modules() if isinstance(part, nn.Linear)]
    blocks = [path for path in linears if "blocks.0.attn" in path and not path.endswith("proj_out")]
    # peft takes the last part of a name to mean all layers with that name.
    last = [path for path in linears if path.endswith("proj_out")]
    weights = {}
    for path in (*blocks[:4], *last):
        linear = transformer.get_submodule(path)
        for part, shape in {"lora_A": (3, linear.in_features), "lora_B": (linear.out_features, 3)}.items():
            weights[f"transformer.{path}.{part}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    return weights


def draw_with_lora(name, mesh_shape=None, when="alone"):
    """Return the output at each stage. Without a mesh, return those of the unmodified pipe."""
    pipe, outs = build(name), {}
    if when == "before":
        parallelize_pipe(pipe, mesh=cpu_mesh(*mesh_shape))
    pipe.load_lora_weights(lora_weights(name))
    if name == "wan 2.2":
        pipe.load_lora_weights(lora_weights(name), load_into_transformer_2=True)
    if when == "after":
        parallelize_pipe(pipe, mesh=cpu_mesh(*mesh_shape))
    outs["loaded"] = generate(pipe, name)
    if name == "flux":
        outs["scaled by the call"] = generate(pipe, name, joint_attention_kwargs={"scale": 0.5})
        pipe.disable_lora()
        outs["disabled"] = generate(pipe, name)
        pipe.enable_lora()
    pipe.fuse_lora(components=["transformer"])
    outs["fused"] = generate(pipe, name)
    pipe.unfuse_lora(components=["transformer"])
    outs["unfused"] = generate(pipe, name)
    if when == "after":
        unparallelize_pipe(pipe)
    pipe.unload_lora_weights()
    outs["unloaded"] = generate(pipe, name)
    return outs


def draw_in_both_orders(name):
    return {when: draw_with_lora(name, (1, 2), when) for when in ("before", "after")}


@pytest.mark.parametrize("name", NAMES)
def test_lora_is_exact_at_every_stage(rank_pool, name):
    expected = draw_with_lora(name)
    for other in expected.keys() & {"scaled by the call", "disabled", "unloaded"}:
        assert relative_error(expected["loaded"], expected[other]) > 0.01
    for by_order in rank_pool.run(draw_in_both_orders, 2, name):
        for when, outs in by_order.items():
            errors = {stage: relative_error(outs[stage], out) for stage, out in expected.items()}
            assert max(errors.values()) < 1e-5, (when, errors)


def add_lora(transformer, targets=("proj_out", "attn1.to_q", "attn2.to_v")):
    """Add a LoRA to layers in the middle of the model, and to the layer after which tokens are gathered."""
    transformer.add_adapter(LoraConfig(r=3, target_modules=[*targets], init_lora_weights=False))
    generator = torch.Generator().manual_seed(11)
    for name, parameter in sorted(transformer.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def call_wan_with_lora():
    """Return outputs with a LoRA from before parallelizing until after it, then with one that comes and goes."""
    model = MODELS["wan"]
    inputs, mesh, outs = model.inputs(3, 6, 10), cpu_mesh(1, 2), []
    transformer = model.build()
    add_lora(transformer)
    parallelize_transformer(transformer, mesh=mesh)
    outs.append(transformer(**inputs).sample)
    unparallelize_transformer(transformer)
    outs.append(transformer(**inputs).sample)
    transformer = parallelize_transformer(model.build(), mesh=mesh)
    outs.append(transformer(**inputs).sample)
    add_lora(transformer)
    outs.append(transformer(**inputs).sample)
    transformer.delete_adapters("default")
    outs.append(transformer(**inputs).sample)
    unparallelize_transformer(transformer)
    return [*outs, transformer(**inputs).sample]


@torch.no_grad()
def test_lora_may_replace_layer_before_gather(rank_pool):
    model = MODELS["wan"]
    inputs, transformer = model.inputs(3, 6, 10), model.build()
    plain = transformer(**inputs).sample
    add_lora(transformer)
    with_lora = transformer(**inputs).sample
    assert relative_error(with_lora, plain) > 0.01
    expected = [with_lora, with_lora, plain, with_lora, plain, plain]
    for outs in rank_pool.run(call_wan_with_lora, 2):
        assert max(relative_error(out, wanted) for out, wanted in zip(outs, expected, strict=True)) < 1e-5


# -- Offload.


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
        apply_group_offloading(transformer, onload_device=CPU, offload_type="leaf_level")


def undo_offload(pipe, offload):
    if offload is offload_model:
        pipe.remove_all_hooks()
    for transformer in transformers_of(pipe):
        if offload is offload_sequentially:
            remove_hook_from_submodules(transformer)
        for module in transformer.modules():
            for hook in ("group_offloading", "lazy_prefetch_group_offloading"):
                if hasattr(module, "_diffusers_hook"):
                    module._diffusers_hook.remove_hook(hook, recurse=False)


def draw_offloaded(name, offload):
    outs = {}
    for first_on, first_off in itertools.product(("offload", "parallel"), repeat=2):
        pipe = build(name)
        on = {"offload": partial(offload, pipe), "parallel": partial(parallelize_pipe, pipe, mesh=cpu_mesh(1, 2))}
        off = {"offload": partial(undo_offload, pipe, offload), "parallel": partial(unparallelize_pipe, pipe)}
        for key in sorted(on, key=lambda key: key != first_on):
            on[key]()
        outs[f"{first_on} on first"] = generate(pipe, name)
        for key in sorted(off, key=lambda key: key != first_off):
            off[key]()
            outs[f"{first_on} on first, {first_off} off first, after {key} off"] = generate(pipe, name)
    return outs


@pytest.mark.sample(1)
@pytest.mark.parametrize("offload", [offload_model, offload_sequentially, offload_groups, offload_leaves])
@pytest.mark.parametrize("name", NAMES)
def test_offload_goes_on_and_off_in_every_order(rank_pool, name, offload):
    for outs in rank_pool.run(draw_offloaded, 2, name, offload):
        errors = {order: relative_error(out, generated_alone(name)) for order, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors
