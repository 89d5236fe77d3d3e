"""A LoRA works with sharded weights, whichever came first."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe
from tests.tiny import relative_error
from tests.weights.pipes import generate, make

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
MESHES = {
    "fsdp": ({}, "fsdp"),
    "tensor": ({"max_tensor_dim_size": 3}, "tensor"),
    "stages": ({"max_pipe_dim_size": 2}, None),
}
# FLUX has 4 heads here, and the others have 3.
CASES = [
    (name, method, when)
    for name in ("flux", "wan", "ltx")
    for method in ("fsdp", "tensor", "stages")
    for when in ("before", "after")
]

SHORT = [("flux", "fsdp", "before"), ("wan", "tensor", "after"), ("wan", "stages", "before")]


def num_ranks(name, method):
    return 3 if method == "tensor" and name != "flux" else 2


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


def shared(pipe, method):
    sizes, weights = MESHES[method]
    return parallelize_pipe(pipe, mesh=init_context_parallel_mesh("cpu", **sizes), weights=weights)


def draw(name, method, when):
    """Return the output at each stage. Without a method, return those of the unmodified pipe."""
    pipe, outs = make(name), {}
    outs["plain"] = generate(pipe, name)
    weights, other = lora_weights(name), lora_weights(name, rank=2, seed=12)
    if when == "after" and method is not None:
        shared(pipe, method)
    pipe.load_lora_weights(weights, adapter_name="style")
    if when == "before" and method is not None:
        shared(pipe, method)
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
    ranks = rank_pool.run(draw, num_ranks(name, method), name, method, when)
    for outs in ranks:
        errors = {key: relative_error(out, expected[key]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors
        assert all(torch.equal(out, ranks[0][key]) for key, out in outs.items())


def delete_last(method):
    """Return the outputs after the only LoRA was deleted from sharded weights, and before they were sharded."""
    pipe = shared(make("flux"), method)
    pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
    pipe.delete_adapters("style")
    deleted = generate(pipe, "flux")
    pipe = make("flux")
    pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
    pipe.delete_adapters("style")
    # The layers of peft stay in the model without a LoRA.
    return deleted, generate(shared(pipe, method), "flux")


@pytest.mark.parametrize("method", ["tensor", *[pytest.param(x, marks=pytest.mark.long) for x in ("fsdp", "stages")]])
def test_deleting_the_last_lora_is_exact(rank_pool, method):
    expected = generate(make("flux"), "flux")
    for outs in rank_pool.run(delete_last, 2, method):
        assert max(relative_error(out, expected) for out in outs) < 1e-5


def add_late(method, options):
    pipe = shared(make("flux"), method)
    with pytest.raises(ValueError, match=r"use_dora=True|pissa"):
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], **options))
    return generate(pipe, "flux")


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}])
@pytest.mark.parametrize("method", MESHES)
def test_late_lora_that_begins_from_the_weights_is_refused(rank_pool, method, options):
    expected = generate(make("flux"), "flux")
    for out in rank_pool.run(add_late, 2, method, options):
        assert relative_error(out, expected) < 1e-5


# -- Hotswap.


def without_names(weights):
    """Return ``weights`` without those of one layer, which a hotswap sets to zero."""
    return {name: x for name, x in weights.items() if ".transformer_blocks.1.attn." not in name}


def hotswap(method):
    """Return the outputs of LoRAs that all ranks replace in place in the same way."""
    pipe, outs = make("flux"), {}
    pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
    if method is not None:
        pipe = shared(pipe, method)
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


@pytest.mark.parametrize("method", MESHES)
def test_hotswapped_lora_is_exact(rank_pool, method):
    expected = hotswap(None)
    assert relative_error(expected["first"], expected["second"]) > 0.01
    assert relative_error(expected["part"], expected["zeros"]) > 0.01
    assert relative_error(expected["by hand"], expected["part"]) > 0.01
    for outs in rank_pool.run(hotswap, 2, method):
        errors = {key: relative_error(out, expected[key]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


def load_different(method, when, swap):
    weights = lora_weights("flux", seed=11 + dist.get_rank())
    pipe = make("flux")
    if when == "before":
        pipe.load_lora_weights(weights, adapter_name="style")
        return generate(shared(pipe, method), "flux")
    pipe.load_lora_weights(lora_weights("flux"), adapter_name="style")
    shared(pipe, method)
    pipe.load_lora_weights(weights, adapter_name="style" if swap else "other", hotswap=swap)
    return generate(pipe, "flux")


# Tensor parallelism keeps the first rank's values of replicated parameters, and each rank's own part of sharded ones.
@pytest.mark.parametrize(
    ("method", "when", "swap"),
    [(method, "after", swap) for method in MESHES for swap in (False, True)] + [("stages", "before", False)],
)
def test_different_loras_raise_on_all_ranks(rank_pool, method, when, swap):
    errors = rank_pool.run_expecting_errors(load_different, 2, method, when, swap)
    assert all(isinstance(error, ValueError) for error in errors), errors


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


# -- Quantized weights.


def draw_quantized(name, when):
    pipe = make(name)
    if when == "after":
        shared(pipe, "stages")
    pipe.load_lora_weights(lora_weights(name))
    if when == "before":
        shared(pipe, "stages")
    quantize_(pipe.transformer, Int8WeightOnlyConfig())
    return generate(pipe, name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lora_that_is_quantized_in_stages_is_exact(rank_pool, when):
    pipe = make("wan")
    pipe.load_lora_weights(lora_weights("wan"))
    quantize_(pipe.transformer, Int8WeightOnlyConfig())
    expected = generate(pipe, "wan")
    for out in rank_pool.run(draw_quantized, 2, "wan", when):
        assert relative_error(out, expected) < 1e-5


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
    pipe, outs = make("flux"), {}
    if when == "after" and method is not None:
        shared(pipe, method)
    pipe.load_lora_weights(encoder_weights(), adapter_name="style")
    if when == "before" and method is not None:
        shared(pipe, method)
    outs["loaded"] = generate(pipe, "flux")
    pipe.fuse_lora(components=["text_encoder", "transformer"])
    outs["fused"] = generate(pipe, "flux")
    pipe.unfuse_lora(components=["text_encoder", "transformer"])
    pipe.unload_lora_weights()
    outs["unloaded"] = generate(pipe, "flux")
    return outs


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.long)])
def test_lora_of_sharded_text_encoder_is_exact(rank_pool, when):
    expected = draw_with_encoder(None, when)
    for outs in rank_pool.run(draw_with_encoder, 2, "fsdp", when):
        errors = {key: relative_error(out, expected[key]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors
