"""LoRA and offload can be added to a parallel pipe and removed in any order."""

import itertools

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig

from para_core.adapters import (
    parallelize_pipe,
    parallelize_transformer,
    unparallelize_pipe,
    unparallelize_transformer,
)
from tests.tiny import cpu_mesh, flux_call, flux_pipe, relative_error
from zoo.tiny.transformers.registry import MODELS

# proj_out is the last module of the transformer, and peft replaces it. The name also matches the blocks' proj_out.
TARGETS = (
    "x_embedder",
    "proj_out",
    "transformer_blocks.0.attn.to_q",
    "single_transformer_blocks.0.proj_out",
    "single_transformer_blocks.1.proj_out",
)


def lora_weights(rank=3):
    """Return the weights of a LoRA under the names that files use, large enough to change the output measurably."""
    generator = torch.Generator().manual_seed(11)
    transformer = flux_pipe().transformer
    weights = {}
    for name in TARGETS:
        linear = transformer.get_submodule(name)
        shapes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank)}
        for part, shape in shapes.items():
            weights[f"transformer.{name}.{part}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    return weights


def draw_with_lora(mesh_shape, when):
    """Return the image at each stage. Without a mesh, return those of the unmodified pipe."""
    pipe = flux_pipe(shared_parts=False)
    outs = {}

    def parallelize(at):
        if mesh_shape is not None and at == when:
            parallelize_pipe(pipe, mesh=cpu_mesh(*mesh_shape))

    parallelize("before")
    pipe.load_lora_weights(lora_weights())
    parallelize("after")
    outs["loaded"] = pipe(**flux_call()).images
    outs["scaled by the call"] = pipe(**flux_call(joint_attention_kwargs={"scale": 0.5})).images
    pipe.disable_lora()
    outs["disabled"] = pipe(**flux_call()).images
    pipe.enable_lora()
    pipe.fuse_lora()
    outs["fused"] = pipe(**flux_call()).images
    pipe.unfuse_lora()
    outs["unfused"] = pipe(**flux_call()).images
    if mesh_shape is not None and when == "after":
        unparallelize_pipe(pipe)
    pipe.unload_lora_weights()
    outs["unloaded"] = pipe(**flux_call()).images
    return outs


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_is_exact_at_every_stage(rank_pool, when):
    expected = draw_with_lora(None, when)
    assert relative_error(expected["loaded"], expected["disabled"]) > 0.01
    assert relative_error(expected["loaded"], expected["scaled by the call"]) > 0.01
    for outs in rank_pool.run(draw_with_lora, 2, (1, 2), when):
        errors = {name: relative_error(outs[name], out) for name, out in expected.items()}
        assert max(errors.values()) < 1e-5, errors


def offload_model(pipe):
    pipe.enable_model_cpu_offload(device="cpu")


def offload_sequentially(pipe):
    # enable_sequential_cpu_offload does this for each model. For text encoders it fails on a CPU, also without ranks.
    cpu_offload(pipe.transformer, execution_device=torch.device("cpu"))


def offload_groups(pipe):
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )


def offload_leaves(pipe):
    apply_group_offloading(pipe.transformer, onload_device=torch.device("cpu"), offload_type="leaf_level")


OFFLOADS = {
    function.__name__: function for function in (offload_model, offload_sequentially, offload_groups, offload_leaves)
}


def undo_offload(pipe, name):
    if name == "offload_model":
        pipe.remove_all_hooks()
    elif name == "offload_sequentially":
        remove_hook_from_submodules(pipe.transformer)
    else:
        for module in pipe.transformer.modules():
            for hook in ("group_offloading", "lazy_prefetch_group_offloading"):
                if hasattr(module, "_diffusers_hook"):
                    module._diffusers_hook.remove_hook(hook, recurse=False)


def draw_offloaded(name):
    outs = {}
    for first_on, first_off in itertools.product(("offload", "parallel"), repeat=2):
        pipe = flux_pipe(shared_parts=False)
        on = {
            "offload": lambda pipe=pipe: OFFLOADS[name](pipe),
            "parallel": lambda pipe=pipe: parallelize_pipe(pipe, mesh=cpu_mesh(1, 2)),
        }
        off = {
            "offload": lambda pipe=pipe: undo_offload(pipe, name),
            "parallel": lambda pipe=pipe: unparallelize_pipe(pipe),
        }
        for key in sorted(on, key=lambda key: key != first_on):
            on[key]()
        outs[f"{first_on} on first"] = pipe(**flux_call()).images
        for key in sorted(off, key=lambda key: key != first_off):
            off[key]()
            outs[f"{first_on} on first, {first_off} off first, after {key} off"] = pipe(**flux_call()).images
    return outs


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OFFLOADS)
def test_offload_goes_on_and_off_in_every_order(rank_pool, name):
    expected = flux_pipe()(**flux_call()).images
    for outs in rank_pool.run(draw_offloaded, 2, name):
        errors = {name: relative_error(out, expected) for name, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


def add_lora(transformer):
    """Add a LoRA to a layer in the middle of the model, and to the layer after which tokens are gathered."""
    transformer.add_adapter(
        LoraConfig(r=3, target_modules=["proj_out", "attn1.to_q", "attn2.to_v"], init_lora_weights=False)
    )
    generator = torch.Generator().manual_seed(11)
    for name, parameter in sorted(transformer.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def call_wan_with_lora(when):
    model = MODELS["wan"]
    transformer = model.build()
    inputs = model.inputs(3, 6, 10)
    outs = []
    with torch.no_grad():
        if when == "before":
            add_lora(transformer)
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2))
        if when == "after":
            outs.append(transformer(**inputs).sample)
            add_lora(transformer)
        outs.append(transformer(**inputs).sample)
        if when == "after":
            transformer.delete_adapters("default")
            outs.append(transformer(**inputs).sample)
        unparallelize_transformer(transformer)
        outs.append(transformer(**inputs).sample)
    return outs


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_may_replace_layer_before_gather(rank_pool, when):
    model = MODELS["wan"]
    inputs = model.inputs(3, 6, 10)
    with torch.no_grad():
        plain = model.build()(**inputs).sample
        transformer = model.build()
        add_lora(transformer)
        with_lora = transformer(**inputs).sample
    assert relative_error(with_lora, plain) > 0.01
    expected = {"before": [with_lora, with_lora], "after": [plain, with_lora, plain, plain]}[when]
    for outs in rank_pool.run(call_wan_with_lora, 2, when):
        assert max(relative_error(out, wanted) for out, wanted in zip(outs, expected, strict=True)) < 1e-5
