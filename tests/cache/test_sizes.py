"""A cached transformer in one graph computes inputs with other sizes than the first, on one device and on two ranks."""

import warnings

import pytest
import torch

from para_core import reset_cache
from para_core.adapters import (
    apply_cache_on_pipe,
    apply_cache_on_transformer,
    parallelize_pipe,
    parallelize_transformer,
)
from tests.cache.test_graph import Counter
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer, relative_error
from zoo.tiny.transformers.registry import MODELS

# Dynamo compiles the second size with symbolic sizes. The numbers of tokens are even and odd.
SIZES = [(3, 6, 10), (1, 6, 6), (2, 8, 6)]
# Steps 0 and 2 are computed, and steps 1 and 3 are skipped.
ALTERNATE = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 1}
NUM_STEPS = 4
NAMES = ["wan", "ltx", "cogvideox", "sd3", "mochi", "flux"]


def run_sizes(transformer, name, sizes, called=None):
    """Return the outputs of all steps at each size. ``called`` is the compiled transformer."""
    outputs = []
    with torch.no_grad(), warnings.catch_warnings():
        # Mochi asks for an autocast that the CPU does not have.
        warnings.filterwarnings("ignore", message="In CPU autocast")
        for size in sizes:
            if transformer is not None:
                reset_cache(transformer)
            for step in range(NUM_STEPS):
                inputs = MODELS[name].inputs(*size)
                inputs["hidden_states"] = inputs["hidden_states"] * (1 + 0.05 * step)
                # Two calls of one branch at one timestep would both be computed.
                inputs["timestep"] = inputs["timestep"].float() - step
                outputs.append((transformer if called is None else called)(**inputs, return_dict=False)[0])
    return outputs


def run_uncached(name, sizes, backend):
    """Return the outputs of the unmodified model, compiled, and its number of graphs."""
    counter = Counter(backend)
    compiled = torch.compile(MODELS[name].build(), fullgraph=True, backend=counter)
    outputs = run_sizes(None, name, sizes, compiled)
    torch._dynamo.reset()
    return outputs, len(counter.graphs)


def run_cached(name, sizes, backend="aot_eager", ranks=1):
    """Return the outputs of the cached model, compiled, and its number of graphs. On several ranks it is parallelized
    first.
    """
    counter = Counter(backend)
    transformer = MODELS[name].build()
    if ranks > 1:
        parallelize_transformer(transformer, mesh=cpu_mesh(1, ranks))
    apply_cache_on_transformer(transformer, **ALTERNATE)
    compiled = torch.compile(transformer, fullgraph=True, backend=counter)
    return run_sizes(transformer, name, sizes, compiled), len(counter.graphs)


def check(outputs, graphs, name, sizes, backend="aot_eager", bound=1e-5):
    uncached, uncached_graphs = run_uncached(name, sizes, backend)
    eager = run_sizes(apply_cache_on_transformer(MODELS[name].build(), **ALTERNATE), name, sizes)
    # The first call of a generation is one more graph, as docs/cache.md says.
    assert uncached_graphs < graphs <= 2 * uncached_graphs
    for step, (output, of_eager, of_uncached) in enumerate(zip(outputs, eager, uncached, strict=True)):
        assert relative_error(output, of_eager) < bound, step
        if step % 2 == 0:
            assert relative_error(output, of_uncached) < bound, step


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.long  # The default run has a pipeline on two ranks.
@pytest.mark.parametrize("name", NAMES)
def test_further_sizes_are_exact_in_a_graph(name):
    check(*run_cached(name, SIZES), name, SIZES)


@pytest.mark.long
def test_further_sizes_are_exact_with_inductor():
    check(*run_cached("sd3", SIZES[:2], "inductor"), "sd3", SIZES[:2], "inductor")


@pytest.mark.long  # The default run has a pipeline on two ranks.
@pytest.mark.parametrize("name", NAMES)
def test_further_sizes_are_exact_in_graph_on_ranks(rank_pool, name):
    for outputs, graphs in rank_pool.run(run_cached, 2, name, SIZES, ranks=2):
        check(outputs, graphs, name, SIZES)


IMAGES = [(72, 56), (48, 64), (64, 48)]


def generate_images(option=None, backend="aot_eager", mesh=None):
    """Generate three sizes with FLUX.1 and a LoRA or a parallel VAE. Return the images and the number of graphs."""
    torch.manual_seed(0)
    pipe = flux_pipe(transformer=flux_transformer(num_layers=1, num_single_layers=1), shared_parts=option != "vae")
    if option == "lora":
        # peft is slow to import.
        from peft import LoraConfig

        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False))
    if mesh is not None:
        parallelize_pipe(pipe, mesh=cpu_mesh(*mesh), vae=option == "vae")
    apply_cache_on_pipe(pipe, **ALTERNATE)
    counter = Counter(backend)
    if mesh is not None:
        pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=counter)
    output = "pt" if option == "vae" else "latent"
    calls = [
        flux_call(height=height, width=width, num_inference_steps=NUM_STEPS, output_type=output)
        for height, width in IMAGES
    ]
    return [pipe(**call).images for call in calls], len(counter.graphs)


@pytest.mark.long
@pytest.mark.parametrize(
    ("option", "backend"),
    [(None, "eager"), (None, "aot_eager"), ("lora", "aot_eager"), ("vae", "aot_eager")],
)
def test_cached_pipeline_takes_three_sizes_in_graphs(rank_pool, option, backend):
    expected, _ = generate_images(option)
    for images, graphs in rank_pool.run(generate_images, 2, option, backend, mesh=(1, 2)):
        assert graphs <= 4
        for image, alone in zip(images, expected, strict=True):
            assert relative_error(image, alone) < 1e-5
