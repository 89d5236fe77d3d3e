"""Counts without data equal what is measured, those that are stored, and those that others publish."""

import re
from dataclasses import replace

import pytest
import torch

from benchmarks.harness import PeakMemory
from benchmarks.planner.published_models import PUBLISHED, counted_workload, published_modules
from para_core.adapters import plan_mesh
from para_core.adapters.planner.count import bytes_of, count_call, without_data
from para_core.adapters.planner.inputs import make_inputs
from para_core.adapters.planner.plan_mesh import workload_of
from para_core.adapters.planner.published import find_published, published_workload
from para_core.adapters.planner.work import GenerationSizes
from tests.tiny import flux_pipe
from zoo.tiny.transformers.registry import MODELS

SIZES = GenerationSizes(height=64, width=96, frames=9, text=5)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_counts_of_a_model_equal_those_with_data(name):
    model = MODELS[name].build().eval()
    inputs = make_inputs(model, SIZES)
    inputs = {key: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    attention = []
    original = torch.nn.functional.scaled_dot_product_attention

    class Attended(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is original:
                attention.append(args[0].shape[:-1].numel() if args else kwargs["query"].shape[:-1].numel())
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), PeakMemory() as measured, Attended():
        model(**inputs, return_dict=False)
    with without_data(torch.float32):
        call = count_call(model, SIZES)
    assert sum(x.calls * x.samples * x.heads * x.queries for x in call.attention) == sum(attention)
    if name == "flux":
        assert sum(call.peak) == pytest.approx(measured.peak, rel=0.05)
        for config, words in (({"joint_attention_dim": None}, "none of"), ({"use_additional_t_cond": True}, "layers")):
            model.register_to_config(**config)
            with pytest.raises(TypeError, match=words):
                make_inputs(model, SIZES)


def test_operations_of_flux_are_those_that_diffusers_publishes():
    # The table of https://huggingface.co/datasets/diffusers/benchmarks has 59,523.04 GFLOP, of products only.
    assert workload_of("FLUX.1-dev").call.products == pytest.approx(59_523.04e9, rel=1e-3)


STORED = [pytest.param(x, marks=pytest.mark.long) for x in PUBLISHED if x != "Wan 2.1 1.3B"]
STORED += [pytest.param("Wan 2.1 1.3B", id="WanTransformer3DModel, Wan 2.1 1.3B")]


@pytest.mark.parametrize("name", STORED)
def test_stored_counts_equal_those_of_the_model_at_other_sizes(name):
    model, modules = PUBLISHED[name], published_modules(name)
    frames = {"frames": 2 * model.sizes.temporal + 1} if model.sizes.frames > 1 else {}
    for change in ({}, {"height": 704, "width": 1152, **frames}):
        stored = published_workload(name, change, 7)
        counted = counted_workload(name, replace(model.sizes, **change), 7, modules)
        assert stored.call.attention == counted.call.attention
        assert stored.call.launches == counted.call.launches
        assert sum(stored.call.peak) == pytest.approx(sum(counted.call.peak), rel=0.01)
        for number in ("products", "moved", "summed"):
            assert getattr(stored.call, number) == pytest.approx(getattr(counted.call, number), rel=0.01)
        for field in ("weights", "name", "sizes", "branches", "batched", "steps", "heads"):
            assert getattr(stored, field) == getattr(counted, field), field


def test_published_models_are_found_in_any_spelling():
    for spelling, name in (
        ("flux.1-dev", "FLUX.1-dev"),
        ("wan2.2 a14b", "Wan 2.2 A14B"),
        ("black-forest-labs/flux.1-DEV", "FLUX.1-dev"),
    ):
        assert find_published(spelling) == name
    for typo, meant in (("FLUX.1-dve", "FLUX.1-dev"), ("hunyuan", "HunyuanVideo")):
        with pytest.raises(ValueError, match=f"did you mean .*{re.escape(meant)}"):
            find_published(typo)


def test_a_pipeline_is_planned_for_at_its_own_defaults():
    pipe = flux_pipe()
    plan = plan_mesh(pipe, ranks=2, height=64, width=64)
    assert "64 × 64" in str(plan)
    weights = plan.work.weights
    assert weights.transformer.total == bytes_of(pipe.transformer)
    assert (weights.vae, weights.other) == (bytes_of(pipe.vae), 0)
    assert plan_mesh(pipe, ranks=2, height=128, width=128).best.memory > plan.best.memory
    with pytest.raises(ValueError, match=r"frames .*9, .*FluxPipeline "):
        plan_mesh(pipe, ranks=2, height=64, width=64, frames=9)
    best = plan_mesh(pipe, ranks=3, height=71, width=57, steps=1).best
    assert not best.problem and best.shape.ranks == 3
    pipe.pag_applied_layers = ["blocks.1"]
    with pytest.raises(TypeError, match="perturbed attention"):
        plan_mesh(pipe, ranks=2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"pipe_or_name": object()}, TypeError, "has no transformer"),
        *[({name: 0}, ValueError, f"{name} .*0; ") for name in ("ranks", "steps", "height")],
        ({"ranks": 100_000_000}, ValueError, "ranks .*100000000; .*65536"),
        ({"ranks_per_host": -8}, ValueError, "ranks_per_host .*-8; "),
        ({"frames": 81}, ValueError, r"frames .*81, .*FLUX\.1-dev "),
        ({"height": 8}, ValueError, r"1024 × 8 .*FLUX\.1-dev; .*16 × 16"),
        ({"weights": "stages"}, ValueError, "weights .*'stages'; .*'replicate', 'fsdp', 'tensor'"),
        ({"weights": "fsdp", "offload": "blocks"}, ValueError, "weights .*'fsdp' with offload 'blocks'"),
        ({"weights": "tensor", "mesh": {"ring": 2}}, ValueError, "'ring=2' and weights 'tensor'"),
        ({"quantize": "int4"}, ValueError, "quantize .*'int4'; .*'int8'"),
        ({"offload": "disk"}, ValueError, "offload .*'disk'; .*'blocks', 'model'"),
        ({"mesh": {"ring": 0}}, ValueError, "mesh has 'ring=0'"),
        ({"memory": -1.0}, ValueError, "memory .*-1.0; "),
    ],
)
def test_unplannable_arguments_raise(arguments, error, words):
    with pytest.raises(error, match=words):
        plan_mesh(**{"pipe_or_name": "FLUX.1-dev", "ranks": 2, **arguments})
