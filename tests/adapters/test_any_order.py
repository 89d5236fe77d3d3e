"""Compiling, ranks, offload, a cache and LoRA may be applied to a pipe in any order."""

import random

import pytest
import torch
from peft import LoraConfig

from para_core.adapters import apply_cache_on_pipe, cache_report, parallelize_pipe
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer, relative_error

STEPS = ("compile", "parallel", "offload", "cache", "lora")
NUM_ORDERS = 30
# Two of four steps are skipped, whatever the differences are.
CACHE = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 1}


def orders():
    """Return random orders of the steps, each with a way to compile and one to offload."""
    chosen = random.Random(12)
    cases = []
    while len(cases) < NUM_ORDERS:
        order = chosen.sample(STEPS, len(STEPS))
        compiled = chosen.choice(["module", "in place", "blocks"])
        offloaded = chosen.choice(["model", "groups", "leaves"])
        # Dynamo does not trace the hooks of groups and leaves, and torch.cond cannot contain a graph break.
        if compiled == "blocks" or offloaded == "model":
            cases.append(pytest.param(order, compiled, offloaded, id=f"{', '.join(order)}; {compiled}; {offloaded}"))
    return cases


def add_lora(pipe):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "proj_out"], init_lora_weights=False))


def compile_it(pipe, how):
    if how == "module":
        pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    elif how == "in place":
        pipe.transformer.compile(backend="eager")
    else:
        pipe.transformer.compile_repeated_blocks(backend="eager")


def offload(pipe, how):
    device = torch.device("cpu")
    if how == "model":
        pipe.enable_model_cpu_offload(device="cpu")
    elif how == "groups":
        pipe.transformer.enable_group_offload(device, offload_type="block_level", num_blocks_per_group=1)
    else:
        pipe.transformer.enable_group_offload(device, offload_type="leaf_level")


def generate(pipe):
    out = pipe(**flux_call(num_inference_steps=4)).images
    return out, cache_report(pipe).hits


def small_pipe():
    """Return a pipeline with one block of each kind, because this test compiles it."""
    transformer = flux_transformer(num_layers=1, num_single_layers=1)
    return flux_pipe(shared_parts=False, transformer=transformer)


def draw_in_order(order, compiled, offloaded):
    pipe = small_pipe()
    steps = {
        "compile": lambda: compile_it(pipe, compiled),
        "parallel": lambda: parallelize_pipe(pipe, mesh=cpu_mesh(1, 2)),
        "offload": lambda: offload(pipe, offloaded),
        "cache": lambda: apply_cache_on_pipe(pipe, **CACHE),
        "lora": lambda: add_lora(pipe),
    }
    for step in order:
        steps[step]()
    return generate(pipe)


# The default run tests pairs of these steps: the cache in tests/cache/test_graph.py, LoRA and
# offload in test_lora_and_offload.py, all but compiling in tests/together.
@pytest.mark.long
@pytest.mark.parametrize(("order", "compiled", "offloaded"), orders())
def test_orders_of_compiling_ranks_offload_cache_and_lora(rank_pool, order, compiled, offloaded):
    pipe = small_pipe()
    add_lora(pipe)
    expected, hits = generate(apply_cache_on_pipe(pipe, **CACHE))
    assert hits == 2
    for out, hits in rank_pool.run(draw_in_order, 2, order, compiled, offloaded):
        assert hits == 2
        assert relative_error(out, expected) < 1e-5
