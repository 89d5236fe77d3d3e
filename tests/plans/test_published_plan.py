"""The plans that diffusers publishes are exact, or an error names the part that cannot be read."""

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import nn

from para_core.distributed.mesh import sequence_mesh
from para_core.plans.apply import apply_plan, remove_plan
from para_core.plans.published_plan import convert_published_plan
from para_core.plans.region import mesh_of_plan
from tests.tiny import cpu_mesh, flux_inputs, flux_transformer, relative_error


def cut(dim=1, dims=3, output=False):
    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=output)


GATHER = ContextParallelOutput(gather_dim=1, expected_dims=3)


def run_published_flux():
    transformer = flux_transformer()
    mesh = sequence_mesh(cpu_mesh(1, 2))
    apply_plan(transformer, FluxTransformer2DModel._cp_plan, mesh)
    assert mesh_of_plan(transformer) == mesh
    outs = [
        transformer(**flux_inputs(num_image, num_text)).sample for num_image, num_text in ((63, 13), (1, 1), (10, 5))
    ]
    with pytest.raises(ValueError, match=r"img_ids has 3 dims \[1, 10, 3\].* 2"):
        transformer(**{**flux_inputs(10, 5), "img_ids": torch.zeros(1, 10, 3)})
    remove_plan(transformer)
    assert type(transformer) is FluxTransformer2DModel
    assert type(transformer.proj_out) is nn.Linear
    return outs


def test_flux_is_exact_under_the_plan_that_diffusers_publishes(rank_pool):
    transformer = flux_transformer()
    expected = [transformer(**flux_inputs(*sizes)).sample for sizes in ((63, 13), (1, 1), (10, 5))]
    for outs in rank_pool.run(run_published_flux, 2):
        errors = [relative_error(out, alone) for out, alone in zip(outs, expected, strict=True)]
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"": {"hidden_states": cut()}}, "'hidden_states' .*gather"),
        ({"proj_out": GATHER}, "'hidden_states' .*gather"),
        ({"": {"hidden_states": cut(), 0: cut(output=True)}, "proj_out": GATHER}, r"outputs \[0\]"),
        ({"": {"hidden_states": [cut(), cut()]}, "proj_out": GATHER}, "list of tensors"),
        (
            {"": {"hidden_states": cut(output=True)}, "proj_out": GATHER},
            "split_output=False",
        ),
        (
            {"": {"hidden_states": cut()}, "proj_out": 1},
            "'proj_out' is 1.* 'gather_dim'",
        ),
    ],
)
def test_unreadable_published_plan_raises(plan, message):
    with pytest.raises(ValueError, match=message):
        convert_published_plan(plan)
