"""What is counted without data is what a whole model does, and what ranks then hold and send."""

import diffusers
import pytest
import torch

from benchmarks.peak_memory import PeakMemory
from benchmarks.tiny_models import MODELS
from para_core.adapters import plan_mesh
from para_core.adapters.planner.count import bytes_of, count_calls, on_meta, without_data
from para_core.adapters.planner.inputs import INPUTS, Sizes
from para_core.adapters.planner.plan import workload
from para_core.adapters.planner.published import PUBLISHED
from para_core.adapters.supported import plan_for, tensor_plan_for
from para_core.planner.observe import observed
from para_core.planner.traffic import AttentionCall, Part, Product
from tests.tiny import flux_pipe

# The first tiny model of each class for which inputs are known.
TINY = {model.cls: name for name, model in reversed(MODELS.items()) if model.cls in INPUTS}
# Its positions are learned for one size; Mochi is one more whose samples are in one batch.
del TINY["CogVideoXTransformer3DModel"]
QUICK = ("FluxTransformer2DModel", "WanTransformer3DModel")
SIZES = Sizes(height=64, width=96, frames=9, text=5, dtype=torch.float32)


def of_all_blocks(model):
    with observed(model, plan_for(model), tensor=tensor_plan_for(model)) as calls:
        model(**INPUTS[type(model).__name__](model.config, SIZES), return_dict=False)
    return calls[0].parts[0]


def by_kind(part: Part, kind):
    return sorted(str(event) for event in part.events if isinstance(event, kind))


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
        found = count_calls(module, SIZES)[1].parts[0]
        expected = of_all_blocks(cls(**config).eval())
    for kind in (AttentionCall, Product):
        assert by_kind(found, kind) == by_kind(expected, kind)
    assert found.launches == expected.launches
    assert found.moved == expected.moved
    assert found.returned == expected.returned


def test_operations_of_flux_are_those_that_diffusers_publishes():
    # 59,523.04 GFLOP in the table of https://huggingface.co/datasets/diffusers/benchmarks, which has products alone.
    products = [x for x in workload("FLUX.1-dev").calls[1].parts[0].events if isinstance(x, Product)]
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
    assert plan.best.memory > plan.work.weights / 4


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_model_is_counted(name):
    found = workload(name)
    assert found.weights > 5e9 and found.decoder > 1e12 and found.encoder > 1e12 and found.heads >= 24
    products = [x for x in found.calls[1].parts[0].events if isinstance(x, Product)]
    sharded = sum(
        x.samples * sum(y.total for y in x.rows) * x.inner * x.columns * any(y.cut for y in x.rows) for x in products
    )
    all_of_them = sum(x.samples * sum(y.total for y in x.rows) * x.inner * x.columns for x in products)
    assert sharded > 0.99 * all_of_them


def test_a_pipeline_is_planned_for_at_its_own_defaults():
    pipe = flux_pipe()
    plan = plan_mesh(pipe, ranks=2, height=64, width=64)
    assert "64 × 64" in str(plan)
    assert plan.work.weights == bytes_of(pipe.transformer)
    assert plan_mesh(pipe, ranks=2, height=128, width=128).work.calls[1].inputs != plan.work.calls[1].inputs


def test_what_is_not_known_is_said_with_what_is():
    with pytest.raises(ValueError, match=r"known are FLUX\.1-dev"):
        plan_mesh("FLUX.9", ranks=2)
    with pytest.raises(ValueError, match="height is -1; expected a positive integer"):
        plan_mesh("FLUX.1-dev", ranks=2, height=-1)
    with pytest.raises(TypeError, match="has no transformer"):
        plan_mesh(object(), ranks=2)
