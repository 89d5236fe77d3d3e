"""Counts without data equal those of the whole model, and give the bytes that ranks then hold and send."""

import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import diffusers
import pytest
import torch

from benchmarks.harness import PeakMemory
from benchmarks.planner import counts
from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, pipefusion_report, plan_mesh, unparallelize_pipe
from para_core.adapters.planner.count import _extrapolated, bytes_of, count_calls, on_meta, without_data
from para_core.adapters.planner.inputs import INPUTS
from para_core.adapters.planner.pipe_workload import counted_workload, published_modules
from para_core.adapters.planner.plan_mesh import workload
from para_core.adapters.planner.published import PUBLISHED, find_published
from para_core.adapters.planner.sizes import GenerationSizes
from para_core.adapters.planner.stored import COUNTS, stored_workload
from para_core.adapters.registry import plan_for, tensor_plan_for
from para_core.planner.cost import Seconds
from para_core.planner.observe import observed
from para_core.planner.prediction import MeshPrediction
from para_core.planner.traffic import CallWork, CountedAttention, MeshShape, Product
from tests.tiny import flux_call, flux_pipe, relative_error
from zoo.tiny.transformers.registry import MODELS

# The first tiny model of each class that has planner inputs.
TINY = {model.cls: name for name, model in reversed(MODELS.items()) if model.cls in INPUTS}
# CogVideoX's positions are learned for one size; Mochi remains as a model whose samples are in one batch.
del TINY["CogVideoXTransformer3DModel"]
QUICK = ("FluxTransformer2DModel", "WanTransformer3DModel")
SIZES = GenerationSizes(height=64, width=96, frames=9, text=5, dtype=torch.float32)


def of_all_blocks(model):
    with observed(model, plan_for(model), tensor=tensor_plan_for(model)) as calls:
        model(**INPUTS[type(model).__name__](model.config, SIZES), return_dict=False)
    return calls[0].parts[0]


def by_kind(part: CallWork, kind):
    return sorted(str(event) for event in part.operations.elements() if isinstance(event, kind))


@pytest.mark.parametrize(
    "name", [pytest.param(name, id=cls, marks=[] if cls in QUICK else pytest.mark.long) for cls, name in TINY.items()]
)
def test_a_block_of_each_kind_tells_what_all_do(name):
    config = dict(MODELS[name].build().config)
    cls = getattr(diffusers, MODELS[name].cls)
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    with on_meta(torch.float32):
        module = cls(**config)
    with without_data(torch.float32):
        counted = count_calls(module, SIZES)[1].parts[0]
        expected = of_all_blocks(cls(**config).eval())
    for kind in (CountedAttention, Product):
        assert by_kind(counted, kind) == by_kind(expected, kind)
    assert counted.launches == expected.launches
    assert counted.moved == expected.moved
    assert counted.returned == expected.returned


def test_operations_of_flux_are_those_that_diffusers_publishes():
    # The table of https://huggingface.co/datasets/diffusers/benchmarks has 59,523.04 GFLOP, of products only.
    products = [x for x in workload("FLUX.1-dev").calls[1].parts[0].operations.elements() if isinstance(x, Product)]
    counted = sum(2 * x.samples * sum(y.total for y in x.rows) * x.inner * x.columns for x in products)
    assert counted == pytest.approx(59_523.04e9, rel=1e-3)


def test_activations_of_a_call_are_those_that_are_measured():
    model = MODELS["flux"].build().eval()
    inputs = INPUTS["FluxTransformer2DModel"](model.config, SIZES)
    inputs = {key: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    with torch.no_grad(), PeakMemory() as measured:
        model(**inputs, return_dict=False)
    with observed(model, plan_for(model)) as calls, torch.no_grad():
        model(**inputs, return_dict=False)
    assert sum(calls[0].parts[0].peak) == pytest.approx(measured.peak, rel=0.05)


def test_a_published_model_has_a_plan_without_a_hub():
    plan = plan_mesh("FLUX.1-dev", ranks=4, device="H100", compiled=True)
    assert plan.best.problem is None and plan.best.seconds < plan.fewer[1].seconds
    assert plan.best.memory > plan.work.weights.transformer.total / 4


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_is_counted(name):
    work = workload(name)
    assert work.weights.transformer.total > 2e9 and work.decoder > 1e12 and work.encoder > 1e12 and work.heads >= 12
    products = [x for x in work.calls[1].parts[0].operations.elements() if isinstance(x, Product)]
    sharded = sum(
        x.samples * sum(y.total for y in x.rows) * x.inner * x.columns * any(y.sharded for y in x.rows)
        for x in products
    )
    all_of_them = sum(x.samples * sum(y.total for y in x.rows) * x.inner * x.columns for x in products)
    assert sharded > 0.99 * all_of_them


# All models are counted again in the long tests.
STORED = [pytest.param(x, marks=[] if x in ("FLUX.1-dev", "Wan 2.1 1.3B") else pytest.mark.long) for x in PUBLISHED]


@pytest.mark.parametrize("name", STORED)
def test_stored_counts_equal_those_of_the_model_at_other_sizes(name):
    model, modules = PUBLISHED[name], published_modules(name)
    videos = model.sizes.frames > 1
    changes = [{}, {"height": 704, "width": 1152, **({"frames": 2 * model.sizes.temporal + 1} if videos else {})}]
    # A side that is no whole number of tokens, and with few tokens.
    changes.append({"height": 520, "width": 392, "frames": 1})
    for change in changes:
        sizes = replace(model.sizes, **change)
        stored, counted = stored_workload(name, sizes, 7), counted_workload(name, sizes, 7, modules)
        assert stored.calls.keys() == counted.calls.keys()
        for batch, call in counted.calls.items():
            for own, part in zip(stored.calls[batch].parts, call.parts, strict=True):
                assert own.operations == part.operations
                assert own.returned == part.returned
                # A video model copies some views of one frame, and modulations decide the peak of few tokens.
                usual = sizes.frames > 1 or not videos
                assert own.launches == pytest.approx(part.launches, rel=0 if usual else 0.03)
                assert sum(own.moved) == pytest.approx(sum(part.moved), rel=1e-3 if usual else 0.05)
                assert sum(own.peak) == pytest.approx(sum(part.peak), rel=1e-3, abs=0 if usual else 2e7)
        assert stored.weights == counted.weights
        assert stored.decoder == pytest.approx(counted.decoder)
        fixed = ("name", "branches", "steps", "encoder", "heads", "frames", "encodings")
        assert [getattr(stored, x) for x in fixed] == [getattr(counted, x) for x in fixed]


def test_stored_runs_are_those_of_the_published_tables():
    assert json.loads(COUNTS.with_name("runs.json").read_text()) == counts.runs()


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("flux.1-dev", "FLUX.1-dev"),
        ("FLUX 2 dev", "FLUX.2-dev"),
        ("wan2.2 a14b", "Wan 2.2 A14B"),
        ("Qwen/Qwen-Image", "Qwen-Image"),
        ("black-forest-labs/flux.1-DEV", "FLUX.1-dev"),
    ],
)
def test_published_models_are_found_in_any_spelling(spelling, name):
    assert find_published(spelling) == name


@pytest.mark.parametrize(("typo", "meant"), [("FLUX.1-dve", "FLUX.1-dev"), ("hunyuan", "HunyuanVideo")])
def test_misspelt_model_names_what_was_meant(typo, meant):
    with pytest.raises(ValueError, match=f"did you mean .*{re.escape(meant)}"):
        find_published(typo)


@pytest.mark.long
def test_a_pipeline_is_planned_for_at_its_own_defaults():
    pipe = flux_pipe()
    plan = plan_mesh(pipe, ranks=2, height=64, width=64)
    assert "64 × 64" in str(plan)
    weights = plan.work.weights
    assert weights.transformer.total == bytes_of(pipe.transformer)
    assert (weights.vae, weights.other) == (bytes_of(pipe.vae), 0)
    assert plan_mesh(pipe, ranks=2, height=128, width=128).work.calls[1].inputs != plan.work.calls[1].inputs


def test_what_is_not_known_is_said_with_what_is():
    with pytest.raises(ValueError, match=r"FLUX\.9.* FLUX\.1-dev"):
        plan_mesh("FLUX.9", ranks=2)
    with pytest.raises(ValueError, match=r"height .*-1; "):
        plan_mesh("FLUX.1-dev", ranks=2, height=-1)
    with pytest.raises(TypeError, match="has no transformer"):
        plan_mesh(object(), ranks=2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ranks": 0}, ValueError, "ranks .*0; "),
        ({"steps": 0}, ValueError, "steps .*0; "),
        ({"device": "TPU v5"}, ValueError, "device .*'TPU v5'; .*H100"),
        ({"device": None}, TypeError, "device .*None; .*'H100'"),
        ({"link": "string"}, ValueError, "link .*'string'; .*nvlink"),
        ({"between": 10}, TypeError, "link .*10; .*'nvlink'"),
        ({"ranks_per_host": -8}, ValueError, "ranks_per_host .*-8; "),
        ({"frames": 81}, ValueError, r"frames .*81, .*FLUX\.1-dev "),
        ({"height": 8}, ValueError, r"1024 × 8 .*FLUX\.1-dev; .*16 × 16"),
        ({"weights": "stages"}, ValueError, "weights .*'stages'; .*'replicate', 'fsdp', 'tensor'"),
        ({"weights": ["fsdp", "blocks"]}, ValueError, r"weights .*'blocks'.*\('tensor', 'stages', 'fsdp'\)"),
        ({"weights": "fsdp", "offload": "blocks"}, ValueError, "weights .*'fsdp' with offload 'blocks'"),
        ({"weights": "tensor", "mesh": {"ring": 2}}, ValueError, "tensor=2"),
        ({"weights": "fsdp", "mesh": {"batch": 2}}, ValueError, "'batch=2' and weights 'fsdp'"),
        ({"weights": "fsdp", "quantize": "fp8"}, ValueError, "quantize .*'fp8' with weights 'fsdp'"),
        ({"offload": "disk"}, ValueError, "offload .*'disk'; .*'blocks', 'model'"),
        ({"offload": "model", "text_encoders": "first"}, ValueError, "text_encoders .*'first' with offload 'model'"),
        ({"mesh": {"rings": 2}}, ValueError, "mesh .*'rings'; .*ring, ulysses"),
        ({"mesh": {"ring": 0}}, ValueError, "mesh has 0 ranks along ring"),
        ({"mesh": {"ring": 2, "ulysses": 1}, "ranks": 4}, ValueError, "mesh is too small"),
        ({"memory": -1.0}, ValueError, "memory .*-1.0; "),
        ({"memory": float("nan")}, ValueError, "memory .*nan; "),
        ({"pipefusion": 4}, TypeError, "pipefusion .*4; .*PipeFusion"),
    ],
)
def test_unplannable_arguments_raise(arguments, error, words):
    with pytest.raises(error, match=words):
        plan_mesh("FLUX.1-dev", **{"ranks": 2, **arguments})


def test_an_image_pipeline_has_no_frames():
    with pytest.raises(ValueError, match=r"frames .*9, .*FluxPipeline "):
        plan_mesh(flux_pipe(), ranks=2, height=64, width=64, frames=9)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [3, 7])
def test_every_number_of_ranks_and_size_has_a_plan(ranks):
    best = plan_mesh(flux_pipe(), ranks=ranks, height=71, width=57, steps=1).best
    assert best.problem is None and best.shape.ranks == ranks


ROWS = [
    MeshShape(ring=4, ring_method="2d"),
    MeshShape(ulysses=2, ring=2, fsdp=True),
    MeshShape(ring=2, tensor=2),
    MeshShape(pipe=2, ulysses=2),
]
FUSED = MeshShape(pipe=4, pipefusion=PipeFusion(num_patches=2, warmup_steps=7))


def run_rows():
    """Run a pipeline as each row says. Return the results by row, and the number of calls on patches."""
    results = {}
    for shape in (*ROWS, FUSED):
        names = {
            "pipe": flux_pipe(shared_parts=False),
            "parallelize_pipe": parallelize_pipe,
            "init_context_parallel_mesh": partial(init_context_parallel_mesh, "cpu"),
            "PipeFusion": PipeFusion,
        }
        row = MeshPrediction(shape, Seconds(), 0.0, 0.0, 0.0, 0, 0.0)
        exec(row.call, names)
        steps = {"num_inference_steps": 8} if shape is FUSED else {}
        results[str(shape)] = names["pipe"](**flux_call(**steps)).images
        patched = pipefusion_report(names["pipe"]).patched_calls if shape is FUSED else 0
        unparallelize_pipe(names["pipe"])
    return results, patched


@pytest.mark.long
def test_the_line_that_a_row_says_runs_it(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for outputs, patched in rank_pool.run(run_rows, 4):
        errors = {str(shape): relative_error(outputs[str(shape)], expected) for shape in ROWS}
        assert max(errors.values()) < 1e-4, errors
        assert patched == 1


def test_added_blocks_keep_the_order_of_counting():
    # A sum over a set differs in its last digits from process to process.
    products = [Product(1, (), inner, 1, 4) for inner in range(20, 0, -1)]
    whole = _extrapolated(CallWork(Counter(products[:1])), [(3, CallWork(Counter(products)))])
    assert [*whole.operations] == products
