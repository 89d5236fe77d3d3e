"""Sharded weights combine with quantization, offload and LoRA in any order, or an error says why not and changes
nothing.
"""

import copy
import pickle

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from torch.distributed.tensor import DTensor
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, unparallelize_pipe
from tests.tiny import relative_error
from tests.weights.pipes import generate, make
from tests.weights.test_lora import lora_weights, num_ranks, shared

# Mochi's and Wan's pipelines ask for an autocast that the CPU does not have. peft says that a quantized layer cannot be
# merged.
pytestmark = [
    pytest.mark.filterwarnings("ignore:In CPU autocast"),
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]
QUANTIZED = {"int8": Int8WeightOnlyConfig(), "fp8": Float8WeightOnlyConfig()}


def alone(name, *changes):
    pipe = make(name)
    for change in changes:
        change(pipe)
    return generate(pipe, name)


def check(expected, ranks):
    """Assert that each rank's outputs equal ``expected``, with equal bits on all ranks."""
    for outs in ranks:
        errors = {key: relative_error(out, expected) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors
        assert all(torch.equal(out, ranks[0][key]) for key, out in outs.items())


# -- Quantized weights.


def quantized_stages(name, kind, with_lora):
    pipe = make(name)
    quantize_(pipe.transformer, QUANTIZED[kind])
    if with_lora:
        pipe.load_lora_weights(lora_weights(name))
    outs = {}
    shared(pipe, "stages")
    outs["in stages"] = generate(pipe, name)
    return outs


@pytest.mark.parametrize(
    ("name", "kind", "with_lora"),
    [("flux", "int8", False), ("wan", "int8", True), pytest.param("ltx", "fp8", False, marks=pytest.mark.long)],
)
def test_quantized_weights_run_in_stages(rank_pool, name, kind, with_lora):
    changes = [lambda pipe: quantize_(pipe.transformer, QUANTIZED[kind])]
    if with_lora:
        changes.append(lambda pipe: pipe.load_lora_weights(lora_weights(name)))
    check(alone(name, *changes), rank_pool.run(quantized_stages, 2, name, kind, with_lora))


def load_and_quantize(pipe, name):
    """Load a LoRA and quantize the transformer, with the LoRA's own matrices."""
    pipe.load_lora_weights(lora_weights(name))
    quantize_(pipe.transformer, QUANTIZED["int8"])


def lora_then_quantized(name, method):
    pipe, outs = make(name), {}
    load_and_quantize(pipe, name)
    if method is None:
        parallelize_pipe(pipe, mesh=init_context_parallel_mesh("cpu"))
    else:
        shared(pipe, method)
    outs["shared"] = generate(pipe, name)
    if method is None:
        outs["undone"] = generate(unparallelize_pipe(pipe), name)
    return outs


@pytest.mark.parametrize(
    ("name", "method"), [("flux", None), ("wan", "stages"), pytest.param("ltx", None, marks=pytest.mark.long)]
)
def test_a_lora_that_was_quantized_is_compared_and_exact(rank_pool, name, method):
    check(alone(name, lambda pipe: load_and_quantize(pipe, name)), rank_pool.run(lora_then_quantized, 2, name, method))


# -- Offload.


def offload_model(pipe):
    pipe.enable_model_cpu_offload(device="cpu")


def offload_leaves(pipe):
    apply_group_offloading(pipe.transformer, onload_device=torch.device("cpu"), offload_type="leaf_level")


def offload_blocks(pipe):
    pipe.transformer.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1
    )


OFFLOADS = {"model": offload_model, "leaves": offload_leaves, "blocks": offload_blocks}


def offloaded(name, method, kind, with_lora):
    outs = {}
    for first in ("offload", "weights"):
        pipe = make(name)
        if with_lora:
            pipe.load_lora_weights(lora_weights(name))
        generate(pipe, name)
        if first == "offload":
            OFFLOADS[kind](pipe)
        shared(pipe, method)
        if first == "weights":
            generate(pipe, name)
            OFFLOADS[kind](pipe)
        outs[f"{first} first"] = generate(pipe, name)
        outs[f"{first} first, again"] = generate(pipe, name)
        assert any(isinstance(x, DTensor) for x in pipe.transformer.parameters())
    return outs


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "method", "kind", "with_lora"),
    [
        ("ltx", "tensor", "leaves", False),
        *[
            (name, method, kind, with_lora)
            for name in ("flux", "wan", "ltx")
            for method in ("fsdp", "tensor")
            for kind in OFFLOADS
            for with_lora in (False, True)
        ],
    ],
)
def test_offload_and_shared_weights_go_in_either_order(rank_pool, name, method, kind, with_lora):
    expected = alone(name, *([lambda pipe: pipe.load_lora_weights(lora_weights(name))] if with_lora else []))
    check(expected, rank_pool.run(offloaded, num_ranks(name, method), name, method, kind, with_lora))


# -- Refusals of stages.


def refused_by_stages(name, folder):
    pipe = make(name)
    expected = generate(shared(pipe, "stages"), name)
    cls = type(pipe.transformer).__name__
    for refused in (
        lambda: pipe.save_pretrained(folder),
        lambda: pipe.transformer.save_pretrained(folder),
        lambda: pipe.enable_model_cpu_offload(device="cpu"),
        lambda: offload_leaves(pipe),
        lambda: offload_blocks(pipe),
        lambda: pipe.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level"),
        lambda: pipe.transformer.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        lambda: copy.deepcopy(pipe.transformer),
        lambda: pickle.dumps(pipe.transformer),
        lambda: copy.deepcopy(pipe),
    ):
        with pytest.raises((RuntimeError, TypeError), match=rf"({cls}|{type(pipe).__name__}).* stage"):
            refused()
            generate(pipe, name)
    assert not folder.exists() or not list(folder.iterdir())
    return {"in stages": generate(pipe, name), "before": expected}


@pytest.mark.parametrize("name", ["flux", pytest.param("wan", marks=pytest.mark.long)])
def test_options_needing_all_blocks_are_refused_with_stages(rank_pool, tmp_path, name):
    check(alone(name), rank_pool.run(refused_by_stages, 2, name, tmp_path / "saved"))
