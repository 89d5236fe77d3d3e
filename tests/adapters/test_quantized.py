"""A model that torchao quantized before or after parallelizing computes the same on several ranks as alone."""

from functools import partial

import pytest
import torch
from diffusers import TorchAoConfig, WanTransformer3DModel
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from para_core.adapters import parallelize_pipe, parallelize_transformer, unparallelize_transformer
from tests.adapters.test_lora_and_offload import add_lora
from tests.adapters.test_pipelines import build, generate
from tests.adapters.test_transformers import SIZES
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, each_rank_alone, flux_inputs, flux_transformer, relative_error
from zoo.tiny.transformers.registry import MODELS

# Mochi asks for an autocast that the CPU does not have.
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")

# A CPU can compute with these configurations. fp8 with dynamic activations needs a GPU for quantizing.
WEIGHTS = {"int8 weights": Int8WeightOnlyConfig(), "fp8 weights": Float8WeightOnlyConfig()}
CONFIGS = {**WEIGHTS, "int8 activations": Int8DynamicActivationInt8WeightConfig()}
NAMES = ["flux", "hunyuan", "mochi", "cogvideox", "wan", "qwen-image", "ltx"]


def build_transformer(name, config=None):
    heartbeat()
    transformer = flux_transformer() if name == "flux" else MODELS[name].build()
    if config is not None:
        quantize_(transformer, CONFIGS[config])
    return transformer


def inputs_of(name):
    return flux_inputs(63, 13) if name == "flux" else MODELS[name].inputs(*SIZES[0])


def compute(transformer, name, **changed):
    with torch.no_grad():
        return transformer(**{**inputs_of(name), **changed}, return_dict=False)[0]


def call_quantized(configs, mesh_shape):
    """Return three outputs: quantized before parallelizing, after undoing, and quantized after parallelizing."""
    outs = {}
    for name in NAMES:
        for config in configs:
            transformer = parallelize_transformer(build_transformer(name, config), mesh=cpu_mesh(*mesh_shape))
            outs[name, config, "before"] = compute(transformer, name)
            outs[name, config, "then alone"] = compute(unparallelize_transformer(transformer), name)
            transformer = parallelize_transformer(build_transformer(name), mesh=cpu_mesh(*mesh_shape))
            quantize_(transformer, CONFIGS[config])
            outs[name, config, "after"] = compute(transformer, name)
    return outs


@pytest.mark.parametrize(
    "mesh_shape",
    [pytest.param((1, 2), id="ulysses 2"), pytest.param((2, 1), id="ring 2", marks=pytest.mark.long)],
)
def test_quantized_weights_are_exact_on_every_family(rank_pool, mesh_shape):
    expected = {(name, config): compute(build_transformer(name, config), name) for name in NAMES for config in WEIGHTS}
    for name in NAMES:
        plain = compute(build_transformer(name), name)
        assert min(relative_error(expected[name, config], plain) for config in WEIGHTS) > 1e-3
    for outs in rank_pool.run(call_quantized, 2, list(WEIGHTS), mesh_shape):
        errors = {key: relative_error(out, expected[key[:2]]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


def change_by_float_order(transformer, name):
    """Return how much the model's output changes if its input changes by a float32 rounding error."""
    expected, errors = compute(transformer, name), []
    hidden_states = inputs_of(name)["hidden_states"]
    for seed in range(3):
        noise = torch.randn(hidden_states.shape, generator=torch.Generator().manual_seed(seed))
        errors.append(
            relative_error(compute(transformer, name, hidden_states=hidden_states * (1 + 1e-7 * noise)), expected)
        )
    return max(errors)


def call_quantized_without_exchange():
    outs = {}
    with each_rank_alone():
        for name in NAMES:
            transformer = build_transformer(name, "int8 activations")
            outs[name] = compute(parallelize_transformer(transformer, mesh=cpu_mesh(1, 2)), name)
    return outs


@pytest.mark.long
def test_quantized_activations_differ_by_float_order_only(rank_pool):
    # The last bit of a value between two of 256 levels decides to which it is rounded, and a level is 1e5 times that
    # bit. Each token has its own scale, so it does not matter otherwise which tokens a rank has.
    expected, budget = {}, {}
    for name in NAMES:
        transformer = build_transformer(name, "int8 activations")
        expected[name] = compute(transformer, name)
        budget[name] = 2 * change_by_float_order(transformer, name)
    for outs in rank_pool.run(call_quantized, 2, ["int8 activations"], (1, 2)):
        errors = {key: (relative_error(out, expected[key[0]]), budget[key[0]]) for key, out in outs.items()}
        assert all(error < allowed for error, allowed in errors.values()), errors
    for outs in rank_pool.run(call_quantized_without_exchange, 2):
        errors = {name: (relative_error(out, expected[name]), budget[name]) for name, out in outs.items()}
        assert all(error > 1.5 * allowed for error, allowed in errors.values()), errors


def call_compiled(cases):
    outs = {}
    for name, config in cases:
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        transformer = parallelize_transformer(build_transformer(name, config), mesh=cpu_mesh(1, 2))
        compiled = torch.compile(transformer, fullgraph=True, backend=counter)
        outs[name, config] = [compute(compiled, name) for _ in range(2)][1], counter.frame_count
        heartbeat()
    return outs


@pytest.mark.long
def test_quantized_they_are_one_graph(rank_pool):
    cases = [(name, config) for name in NAMES for config in CONFIGS]
    expected = {case: compute(build_transformer(*case), case[0]) for case in cases}
    for outs in rank_pool.run(call_compiled, 2, cases):
        for case, (out, graphs) in outs.items():
            bound = 1e-5 if case[1] in WEIGHTS else 2 * change_by_float_order(build_transformer(*case), case[0])
            assert (graphs, relative_error(out, expected[case]) < bound) == (1, True), case


# -- With the other options of a pipeline.


def offload(transformer):
    transformer.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")


def quantize(transformer):
    quantize_(transformer, CONFIGS["int8 weights"])


def cast(transformer):
    """Store the weights in 8 bits. Each layer casts its own weights before it computes."""
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


OPTIONS = {
    "quantized": [quantize],
    "quantized, with a LoRA": [quantize, partial(add_lora, targets=["attn1.to_q", "attn2.to_v"])],
    "quantized, offloaded": [quantize, offload],
    "cast": [cast],
    "cast, offloaded": [cast, offload],
}


def draw_with_options(mesh_shape=None):
    outs = {}
    for title, options in OPTIONS.items():
        for when in ("before", "after") if mesh_shape else ("alone",):
            pipe = build("wan 2.2", cpu_mesh(*mesh_shape) if when == "after" else None)
            for transformer in (pipe.transformer, pipe.transformer_2):
                for option in options:
                    option(transformer)
            if when == "before":
                parallelize_pipe(pipe, mesh=cpu_mesh(*mesh_shape))
            outs[title, when] = generate(pipe, "wan 2.2")
    return outs


@pytest.mark.long
# This layer cannot be merged, also on one device.
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")
def test_quantized_pipes_are_exact_with_a_lora_and_offloaded(rank_pool):
    expected = draw_with_options()
    assert relative_error(expected["quantized, with a LoRA", "alone"], expected["quantized", "alone"]) > 1e-3
    for outs in rank_pool.run(draw_with_options, 2, (2, 1)):
        errors = {key: relative_error(out, expected[key[0], "alone"]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


def load_quantized(folder):
    config = TorchAoConfig(Int8WeightOnlyConfig())
    return WanTransformer3DModel.from_pretrained(folder, quantization_config=config, dtype=torch.float32).eval()


def call_loaded(folder):
    return compute(parallelize_transformer(load_quantized(folder), mesh=cpu_mesh(1, 2)), "wan")


def test_weights_loaded_quantized_are_exact(rank_pool, tmp_path):
    build_transformer("wan").save_pretrained(tmp_path)
    expected = compute(load_quantized(tmp_path), "wan")
    assert relative_error(expected, compute(build_transformer("wan"), "wan")) > 1e-3
    for out in rank_pool.run(call_loaded, 2, tmp_path):
        assert relative_error(out, expected) < 1e-5
