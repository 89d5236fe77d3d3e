"""A LoRA works with sharded weights, whichever came first, and with what else changes weights."""

import copy
import pickle
from functools import cache

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from para_core.adapters import parallelize_pipe
from para_core.weights.parameters import stand_ins, weights_of
from tests.rank_pool import heartbeat
from tests.tiny import relative_error
from tests.weights.pipes import METHODS, generate, make, mesh_of

# peft warns about a second adapter, also on one device.
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

# These are a layer after the blocks (a LoRA layer of another class may replace it), layers that tensor ranks shard by
# columns and by rows, fused ones, and a layer that every tensor rank holds whole.
TARGETS = {
    "flux": "proj_out x_embedder transformer_blocks.0.attn.to_q transformer_blocks.1.attn.to_out.0 "
    "transformer_blocks.1.ff.net.0.proj transformer_blocks.1.norm1.linear single_transformer_blocks.0.attn.to_v "
    "single_transformer_blocks.0.proj_mlp single_transformer_blocks.0.proj_out single_transformer_blocks.1.proj_out",
    "wan": "proj_out blocks.0.attn1.to_q blocks.0.attn2.to_k blocks.1.attn1.to_out.0 blocks.1.ffn.net.0.proj "
    "blocks.1.ffn.net.2",
}


@cache
def sizes_of(name, encoder):
    """Return the numbers of outputs and inputs of the layers, by path."""
    pipe = make(name)
    layers = {f"transformer.{path}": pipe.transformer.get_submodule(path) for path in TARGETS[name].split()}
    if encoder and name == "flux":
        path = "encoder.layers.0.self_attn.q_proj"
        layers[f"text_encoder.{path}"] = pipe.text_encoder.get_submodule(path)
    return {path: (layer.out_features, layer.in_features) for path, layer in layers.items()}


def lora_weights(name, rank=3, seed=11, encoder=False):
    """Return a LoRA in file format, by parameter name, large enough to change the output measurably."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for path, (outputs, inputs) in sizes_of(name, encoder).items():
        for part, shape in {"A": (rank, inputs), "B": (outputs, rank)}.items():
            weights[f"{path}.lora_{part}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    return weights


def share(pipe, method):
    dims, options = METHODS[method]
    return parallelize_pipe(pipe, mesh=mesh_of({"tensor": 3} if dist.get_world_size() == 3 else dims), **options)


def steps(pipe, name):
    """Change the LoRA of ``pipe`` step by step, and yield the name of each."""
    pipe.load_lora_weights(lora_weights(name, seed=12), adapter_name="style", hotswap=True)
    yield "hotswapped"
    part = {key: 2 * x for key, x in lora_weights(name, seed=13).items() if "to_out" not in key}
    # This sets the layers that the file lacks to zero.
    pipe.load_lora_weights(part, adapter_name="style", hotswap=True)
    yield "a part hotswapped"
    for key, weight in pipe.transformer.named_parameters():
        # A rank that has freed a weight cannot know that another rank writes to it.
        if "lora_" in key:
            weight.data.mul_(1.5)
    yield "changed by hand"
    pipe.load_lora_weights(lora_weights(name, rank=2, seed=14), adapter_name="other")
    pipe.set_adapters(["style", "other"], [0.7, 0.5])
    yield "two"
    pipe.delete_adapters("other")
    pipe.set_adapters(["style"], [1.0])
    yield "one again"
    pipe.disable_lora()
    yield "disabled"
    pipe.enable_lora()
    pipe.fuse_lora(safe_fusing=True)
    yield "fused"
    pipe.unfuse_lora()
    yield "unfused"
    pipe.delete_adapters("style")
    yield "deleted"
    pipe.unload_lora_weights()
    pipe.load_lora_weights(lora_weights(name, encoder=True), adapter_name="style")
    yield "with an encoder's"
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    yield "fused and unloaded"


def draw(name, method, when):
    """Return the output after each step. Without a method, return those of the unmodified pipe."""
    pipe, outs = make(name), {}
    if when == "after" and method is not None:
        share(pipe, method)
        # These begin from the weights.
        for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}, {"modules_to_save": ["x_embedder"]}):
            with pytest.raises(ValueError, match=r"use_dora=True|pissa|modules_to_save"):
                pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], **options))
        metadata = {"transformer.init_lora_weights": "pissa", "text_encoder.init_lora_weights": True}
        with pytest.raises(ValueError, match=r"init_lora_weights='pissa' .* all weights"):
            pipe.transformer.load_lora_adapter(lora_weights(name), metadata=metadata)
        pipe.transformer.load_lora_adapter({}, "text_encoder", metadata=metadata)
    outs["plain"] = generate(pipe, name)
    pipe.load_lora_weights(lora_weights(name), adapter_name="style")
    if when == "before" and method is not None:
        share(pipe, method)
    outs["loaded"] = generate(pipe, name)
    for step in steps(pipe, name):
        outs[step] = generate(pipe, name)
    return outs


@pytest.mark.parametrize(
    ("name", "method", "when"),
    [
        ("flux", "tensor", "after"),
        # tests/together loads LoRAs before FSDP2, too.
        pytest.param("flux", "fsdp", "before", marks=pytest.mark.long),
        *[pytest.param(*case, "after", marks=pytest.mark.long) for case in (("wan", "tensor"), ("flux", "stages"))],
    ],
)
def test_a_lora_is_exact_over_shared_weights(rank_pool, name, method, when):
    expected = draw(name, None, when)
    for first, second in (("loaded", "disabled"), ("two", "loaded"), ("hotswapped", "a part hotswapped")):
        assert relative_error(expected[first], expected[second]) > 0.01
    # FLUX has 4 heads here, and Wan has 3.
    ranks = rank_pool.run(draw, 3 if (name, method) == ("wan", "tensor") else 2, name, method, when)
    for outs in ranks:
        errors = {key: relative_error(out, expected[key]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors
        assert all(torch.equal(out, ranks[0][key]) for key, out in outs.items())


def load_different():
    """Load another LoRA on each rank, or in the place of an equal one."""
    weights = lora_weights("flux", seed=11 + dist.get_rank())
    # Tensor ranks keep the first one's values of replicated parameters, and each its own part of sharded ones.
    for method, swap in (("fsdp", False), ("tensor", True), ("stages", False), ("stages", True)):
        heartbeat()
        pipe = make("flux")
        pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
        share(pipe, method)
        with pytest.raises(ValueError, match="argument 1"):
            pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), f"of rank {dist.get_rank()}")
        with pytest.raises(ValueError, match="argument 0"):
            pipe.fuse_lora(lora_scale=1.0 + dist.get_rank())
        with pytest.raises(ValueError, match="rank"):
            pipe.load_lora_weights(dict(weights), adapter_name="style" if swap else "other", hotswap=swap)
            generate(pipe, "flux")
    pipe = make("flux")
    pipe.load_lora_weights(weights)
    with pytest.raises(ValueError, match="rank"):
        share(pipe, "stages")


def differ_in_a_stage():
    pipe = make("flux")
    pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
    parallelize_pipe(pipe, mesh=mesh_of({"pipe": 2, "ring": 1}))
    if dist.get_rank() == 3:
        for name, weight in pipe.transformer.named_parameters():
            if "lora_" in name and "blocks" in name and not weight.is_meta:
                weight.data.neg_()
    with pytest.raises(ValueError, match="stage 1"):
        generate(pipe, "flux")


@pytest.mark.parametrize(("check", "ranks"), [(load_different, 2), (differ_in_a_stage, 4)])
def test_different_loras_raise_on_all_ranks(rank_pool, check, ranks):
    rank_pool.run(check, ranks)


def stages_with_other_features(folder):
    pipe, here = make("flux"), torch.device("cpu")
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["proj_mlp"]))
    transformer = share(pipe, "stages").transformer
    transformer.fuse_lora()  # This adds zeros.
    for refused in (
        lambda: pipe.save_pretrained(folder),
        lambda: transformer.save_pretrained(folder),
        lambda: pipe.to("cpu"),
        transformer.cpu,
        lambda: pipe.enable_model_cpu_offload(device="cpu"),
        lambda: apply_group_offloading(transformer, onload_device=here, offload_type="leaf_level"),
        lambda: transformer.enable_group_offload(here, offload_type="block_level", num_blocks_per_group=1),
        lambda: transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        lambda: copy.deepcopy(transformer),
        lambda: pickle.dumps(transformer),
    ):
        with pytest.raises((RuntimeError, TypeError), match=r"(FluxTransformer2DModel|FluxPipeline).* stage"):
            refused()
            generate(pipe, "flux")
    assert not folder.exists() or not list(folder.iterdir())
    assert torch.equal(generate(pipe, "flux"), generate(make("flux"), "flux"))
    # Quantized weights and a LoRA are exact in any order with stages.
    pipes = [make("wan") for _ in range(3)]
    for pipe in pipes:
        pipe.load_lora_weights(lora_weights("wan"))
        if pipe is pipes[1]:
            share(pipe, "stages")
        quantize_(pipe.transformer, Int8WeightOnlyConfig())
        if pipe is pipes[2]:
            share(pipe, "stages")
    expected, *outs = [generate(pipe, "wan") for pipe in pipes]
    assert max(relative_error(out, expected) for out in outs) < 1e-5


@pytest.mark.filterwarnings("ignore:In CPU autocast", "ignore:TorchaoLoraLinear was instantiated")
def test_other_features_are_exact_in_stages_or_refused(rank_pool, tmp_path):
    rank_pool.run(stages_with_other_features, 2, tmp_path / "saved")


def test_weights_are_back_if_a_stand_in_cannot_be_made():
    layer = nn.Linear(2, 2)
    weight, entry = layer.weight, weights_of(layer)[0]
    with pytest.raises(AttributeError), stand_ins([entry, (None, [])], torch.device("meta")):
        pass
    assert layer.weight is weight
