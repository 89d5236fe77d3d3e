"""A LoRA works with sharded weights, whichever came first, and with what else changes weights."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from diffusers.hooks import apply_group_offloading
from peft import LoraConfig
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, unparallelize_pipe
from tests.rank_pool import heartbeat
from tests.tiny import relative_error
from tests.weights.pipes import METHODS, generate, make, mesh_of

# peft warns about a second adapter, also on one device.
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

# These are a layer after the blocks (a LoRA layer of another class may replace it), layers that tensor ranks shard by
# columns and by rows, fused ones, and a layer that every tensor rank holds whole.
TARGETS = {
    "flux": (
        "proj_out",
        "x_embedder",
        "transformer_blocks.0.attn.to_q",
        "transformer_blocks.1.attn.to_out.0",
        "transformer_blocks.1.ff.net.0.proj",
        "transformer_blocks.1.norm1.linear",
        "single_transformer_blocks.0.attn.to_v",
        "single_transformer_blocks.0.proj_mlp",
        "single_transformer_blocks.0.proj_out",
        "single_transformer_blocks.1.proj_out",
    ),
    "wan": (
        "proj_out",
        "blocks.0.attn1.to_q",
        "blocks.0.attn2.to_k",
        "blocks.1.attn1.to_out.0",
        "blocks.1.ffn.net.0.proj",
        "blocks.1.ffn.net.2",
    ),
    "ltx": (
        "proj_out",
        "transformer_blocks.0.attn1.to_q",
        "transformer_blocks.0.attn2.to_out.0",
        "transformer_blocks.1.attn1.to_v",
        "transformer_blocks.1.ff.net.0.proj",
        "transformer_blocks.1.ff.net.2",
    ),
}
# FLUX has 4 heads here, and the others have 3.
CASES = [
    (name, method, when)
    for name in ("flux", "wan", "ltx")
    for method in ("fsdp", "tensor", "stages")
    for when in ("before", "after")
]

SHORT = [("flux", "fsdp", "before"), ("wan", "tensor", "after"), ("wan", "stages", "before")]


def lora_weights(name, rank=3, seed=11):
    """Return a LoRA in file format, by parameter name, large enough to change the output measurably."""
    generator = torch.Generator().manual_seed(seed)
    transformer = make(name).transformer
    weights = {}
    for target in TARGETS[name]:
        linear = transformer.get_submodule(target)
        shapes = {"lora_A": (rank, linear.in_features), "lora_B": (linear.out_features, rank)}
        for part, shape in shapes.items():
            weights[f"transformer.{target}.{part}.weight"] = 0.2 * torch.randn(shape, generator=generator)
    return weights


def share(pipe, method):
    dims, options = METHODS[method]
    if dist.get_world_size() == 3:
        dims = {"tensor": 3}
    return parallelize_pipe(pipe, mesh=mesh_of(dims), **options)


def draw(name, method, when):
    """Return the output at each stage. Without a method, return those of the unmodified pipe."""
    pipe, outs = make(name), {}
    outs["plain"] = generate(pipe, name)
    weights, other = lora_weights(name), lora_weights(name, rank=2, seed=12)
    if when == "after" and method is not None:
        share(pipe, method)
    pipe.load_lora_weights(weights, adapter_name="style")
    if when == "before" and method is not None:
        share(pipe, method)
    outs["loaded"] = generate(pipe, name)
    pipe.load_lora_weights(other, adapter_name="other")
    pipe.set_adapters(["style", "other"], [0.7, 0.5])
    outs["two"] = generate(pipe, name)
    pipe.delete_adapters("other")
    pipe.set_adapters(["style"], [1.0])
    outs["one again"] = generate(pipe, name)
    pipe.disable_lora()
    outs["disabled"] = generate(pipe, name)
    pipe.enable_lora()
    pipe.fuse_lora(safe_fusing=True)
    outs["fused"] = generate(pipe, name)
    pipe.unfuse_lora()
    outs["unfused"] = generate(pipe, name)
    pipe.unload_lora_weights()
    outs["unloaded"] = generate(pipe, name)
    pipe.load_lora_weights(weights, adapter_name="style")
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    outs["fused and unloaded"] = generate(pipe, name)
    return outs


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "method", "when"),
    [pytest.param(*case, marks=[] if case in SHORT else pytest.mark.long) for case in CASES],
)
def test_a_lora_is_exact_over_shared_weights(rank_pool, name, method, when):
    expected = draw(name, None, when)
    assert relative_error(expected["loaded"], expected["disabled"]) > 0.01
    assert relative_error(expected["two"], expected["loaded"]) > 0.01
    ranks = rank_pool.run(draw, 3 if method == "tensor" and name != "flux" else 2, name, method, when)
    for outs in ranks:
        errors = {key: relative_error(out, expected[key]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors
        assert all(torch.equal(out, ranks[0][key]) for key, out in outs.items())


def delete_last_and_refuse(methods):
    """Return the outputs after the only LoRA was deleted from sharded weights, and before they were sharded. Try
    LoRAs that begin from the weights.
    """
    outs = []
    for method in methods:
        heartbeat()
        pipe = share(make("flux"), method)
        for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
            with pytest.raises(ValueError, match=r"use_dora=True|pissa"):
                pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], **options))
        pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
        pipe.delete_adapters("style")
        outs.append(generate(pipe, "flux"))
        pipe = make("flux")
        pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
        pipe.delete_adapters("style")
        # The layers of peft stay in the model without a LoRA.
        outs.append(generate(share(pipe, method), "flux"))
    return outs


def test_deleting_the_last_lora_is_exact_and_late_dora_is_refused(rank_pool):
    expected = generate(make("flux"), "flux")
    for outs in rank_pool.run(delete_last_and_refuse, 2, list(METHODS)):
        assert max(relative_error(out, expected) for out in outs) < 1e-5


# -- Hotswap.


def without_names(weights):
    """Return ``weights`` without those of one layer, which a hotswap sets to zero."""
    return {name: x for name, x in weights.items() if ".transformer_blocks.1.attn." not in name}


def hotswap(method):
    """Return the outputs of LoRAs that all ranks replace in place in the same way."""
    pipe, outs = make("flux"), {}
    pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
    if method is not None:
        pipe = share(pipe, method)
    outs["first"] = generate(pipe, "flux")
    for name, weights in {
        "second": lora_weights("flux", seed=12),
        "zeros": {name: torch.zeros_like(x) for name, x in lora_weights("flux").items()},
        "part": without_names(lora_weights("flux", seed=13)),
    }.items():
        pipe.load_lora_weights(weights, adapter_name="style", hotswap=True)
        outs[name] = generate(pipe, "flux")
    for name, weight in pipe.transformer.named_parameters():
        # A rank that has freed a weight cannot know that another rank writes to it.
        if "lora_" in name:
            weight.data.mul_(1.5)
    outs["by hand"] = generate(pipe, "flux")
    pipe.set_adapters(["style"], [0.5])
    outs["scaled"] = generate(pipe, "flux")
    return outs


def hotswap_by_each_method():
    outs = {}
    for method in METHODS:
        heartbeat()
        outs[method] = hotswap(method)
    return outs


def test_hotswapped_lora_is_exact(rank_pool):
    expected = hotswap(None)
    assert relative_error(expected["first"], expected["second"]) > 0.01
    assert relative_error(expected["part"], expected["zeros"]) > 0.01
    assert relative_error(expected["by hand"], expected["part"]) > 0.01
    for by_method in rank_pool.run(hotswap_by_each_method, 2):
        for method, outs in by_method.items():
            errors = {key: relative_error(out, expected[key]) for key, out in outs.items()}
            assert max(errors.values()) < 1e-5, (method, errors)


# Tensor parallelism keeps the first rank's values of replicated parameters, and each rank's own part of sharded ones.
DIFFERENT = [(method, "after", swap) for method in METHODS for swap in (False, True)] + [("stages", "before", False)]


def load_different():
    """Return the kind of error for each row, in which the ranks load different LoRAs."""
    weights, errors = lora_weights("flux", seed=11 + dist.get_rank()), []
    for method, when, swap in DIFFERENT:
        heartbeat()
        pipe = make("flux")
        if when == "after":
            pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
            share(pipe, method)
        with pytest.raises(ValueError) as caught:
            pipe.load_lora_weights(weights, adapter_name="style" if swap else "other", hotswap=swap)
            if when == "before":
                share(pipe, method)
            generate(pipe, "flux")
        errors.append(str(caught.value))
    return errors


def test_different_loras_raise_on_all_ranks(rank_pool):
    for errors in rank_pool.run(load_different, 2):
        assert len(errors) == len(DIFFERENT)
        assert all("rank" in error for error in errors), errors


def differ_in_a_stage():
    pipe = make("flux")
    pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
    parallelize_pipe(pipe, mesh=init_context_parallel_mesh("cpu", max_pipe_dim_size=2, max_ring_dim_size=1))
    generate(pipe, "flux")
    if dist.get_rank() == 3:
        for name, weight in pipe.transformer.named_parameters():
            if "lora_" in name and "blocks" in name and not weight.is_meta:
                weight.data.neg_()
    return generate(pipe, "flux")


def test_lora_of_one_rank_of_a_stage_raises_on_all_ranks(rank_pool):
    errors = rank_pool.run_expecting_errors(differ_in_a_stage, 4)
    assert all(isinstance(error, ValueError) and "stage 1" in str(error) for error in errors), errors


# -- Together with quantized weights, offload and text encoders.


def quantize(pipe):
    quantize_(pipe.transformer, Int8WeightOnlyConfig())


def load_lora(pipe):
    pipe.load_lora_weights(lora_weights(pipe.name))


# Each row has the pipeline, the steps before it is parallel and those after, and the way. Without a way the ranks share
# the tokens.
STEPS = [
    ("flux", (quantize,), (), "stages"),
    ("wan", (quantize, load_lora), (), "stages"),
    ("wan", (load_lora,), (quantize,), "stages"),
    ("wan", (), (load_lora, quantize), "stages"),
    ("flux", (load_lora, quantize), (), None),
    ("wan", (load_lora, quantize), (), "stages"),
]


def in_steps():
    outs = []
    for name, before, after, method in STEPS:
        heartbeat()
        pipe, alone = make(name), make(name)
        for each in (pipe, alone):
            each.name = name
        for step in (*before, *after):
            step(alone)
        for step in before:
            step(pipe)
        if method is None:
            parallelize_pipe(pipe, mesh=mesh_of({}))
        else:
            share(pipe, method)
        for step in after:
            step(pipe)
        expected = generate(alone, name)
        outs.append(relative_error(generate(pipe, name), expected))
        if method is None:
            outs.append(relative_error(generate(unparallelize_pipe(pipe), name), expected))
    return outs


@pytest.mark.filterwarnings("ignore:In CPU autocast", "ignore:TorchaoLoraLinear was instantiated")
def test_quantized_weights_and_loras_are_exact_in_either_order(rank_pool):
    for errors in rank_pool.run(in_steps, 2):
        assert max(errors) < 1e-5, errors


def encoder_weights(seed=5):
    """Return a LoRA of CLIP and of the transformer in file format."""
    encoder = make("flux").text_encoder
    generator = torch.Generator().manual_seed(seed)
    weights = lora_weights("flux")
    names = [name for name, module in encoder.named_modules() if name.endswith(("q_proj", "out_proj"))]
    for name in names:
        linear = encoder.get_submodule(name)
        shapes = {"lora_A": (2, linear.in_features), "lora_B": (linear.out_features, 2)}
        for part, shape in shapes.items():
            weights[f"text_encoder.{name}.{part}.weight"] = 0.5 * torch.randn(shape, generator=generator)
    return weights


def draw_with_encoder(method, when):
    pipe, outs, components = make("flux"), {}, ["text_encoder", "transformer"]
    if when == "after":
        share(pipe, method)
    pipe.load_lora_weights(encoder_weights(), adapter_name="style")
    if when == "before":
        share(pipe, method)
    outs["loaded"] = generate(pipe, "flux")
    pipe.fuse_lora(components=components)
    outs["fused"] = generate(pipe, "flux")
    pipe.unfuse_lora(components=components)
    pipe.unload_lora_weights()
    outs["unloaded"] = generate(pipe, "flux")
    return outs


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_of_sharded_text_encoder_is_exact(rank_pool, when):
    expected = draw_with_encoder(None, "")
    for outs in rank_pool.run(draw_with_encoder, 2, "fsdp", when):
        errors = {key: relative_error(out, expected[key]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


def offload_leaves(pipe):
    apply_group_offloading(pipe.transformer, onload_device=torch.device("cpu"), offload_type="leaf_level")


def offload_blocks(pipe):
    options = {"offload_type": "block_level", "num_blocks_per_group": 1}
    pipe.transformer.enable_group_offload(onload_device=torch.device("cpu"), **options)


def refused_by_stages(folder):
    pipe = share(make("flux"), "stages")
    expected = generate(pipe, "flux")
    for refused in (
        lambda: pipe.save_pretrained(folder),
        lambda: pipe.transformer.save_pretrained(folder),
        lambda: pipe.to("cpu"),
        lambda: pipe.enable_model_cpu_offload(device="cpu"),
        lambda: offload_leaves(pipe),
        lambda: offload_blocks(pipe),
        lambda: pipe.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level"),
        lambda: pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        lambda: copy.deepcopy(pipe.transformer),
        lambda: pickle.dumps(pipe.transformer),
        lambda: copy.deepcopy(pipe),
    ):
        with pytest.raises((RuntimeError, TypeError), match=r"(FluxTransformer2DModel|FluxPipeline).* stage"):
            refused()
            generate(pipe, "flux")
    assert not folder.exists() or not list(folder.iterdir())
    return expected, generate(pipe, "flux")


def test_options_needing_all_blocks_are_refused_with_stages(rank_pool, tmp_path):
    expected = generate(make("flux"), "flux")
    for outs in rank_pool.run(refused_by_stages, 2, tmp_path / "saved"):
        assert all(torch.equal(out, expected) for out in outs)
