"""Virtual ranks compute the results of ranks in processes, and a failure of one ends the others."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from para_core import Gather, Plan, Split
from para_core.adapters.models.shared.flux import FLUX_PLAN
from para_core.distributed.collectives import all_gather
from para_core.instance.record import is_filled
from para_core.instance.slots import Slot
from para_core.verify.virtual_ranks import RanksDiffer, outcomes_on_virtual_ranks, run_on_virtual_ranks
from tests.tiny import relative_error
from zoo.tiny.transformers.registry import MODELS


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (3, 1), (2, 2)])
def test_known_plan_is_exact_and_model_untouched(ring, ulysses):
    module, inputs = MODELS["flux"].build(), MODELS["flux"].inputs(1, 5, 7)
    with torch.no_grad():
        expected = module(**inputs).sample
    for out in run_on_virtual_ranks(module, FLUX_PLAN, inputs, ring=ring, ulysses=ulysses):
        assert relative_error(out.sample, expected) < 1e-5
    assert not any(is_filled(part, Slot.PLAN) for part in module.modules())


def test_a_wrong_order_of_text_and_image_is_seen():
    module, inputs = MODELS["flux"].build(), MODELS["flux"].inputs(1, 5, 7)
    # The wrong order matters with replicated text. If both segments are sharded and nothing is masked, any order is
    # exact.
    wrong = replace(FLUX_PLAN.with_replicated("text"), joint_order=("image", "text"), attention={})
    with torch.no_grad():
        expected = module(**inputs).sample
    for out in run_on_virtual_ranks(module, wrong, inputs, ulysses=2):
        assert relative_error(out.sample, expected) > 1e-3


class OneRankFails(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[1] == 2:
            raise ArithmeticError("the shorter part")
        return self.proj(torch.nn.functional.scaled_dot_product_attention(x, x, x))


def test_an_error_of_one_rank_ends_the_others():
    plan = Plan({"x": Split(1, "image")}, {"": Gather(1, "image")}, ("image",))
    with pytest.raises(ArithmeticError, match="the shorter part"):
        run_on_virtual_ranks(OneRankFails(), plan, {"x": torch.randn(2, 5, 4)}, ulysses=2)


def test_ranks_that_meet_in_different_collectives_end_at_once():
    def run(mesh):
        dim = mesh.ulysses
        # Rank 2 returns without calling the collective in which the others wait.
        return None if mesh.rank == 2 else all_gather(torch.ones(1), [1, 1, 1], 0, dim)

    began = time.perf_counter()
    outcomes = outcomes_on_virtual_ranks(run, ulysses=3, device=torch.device("cpu"))
    assert time.perf_counter() - began < 30
    assert [isinstance(outcome.error, RanksDiffer) for outcome in outcomes] == [True, True, False]


def test_a_rank_that_compiles_is_alone():
    compiling, observed = threading.Event(), threading.Event()

    def backend(graph, _):
        compiling.set()
        observed.wait(timeout=1)
        return graph

    def run(mesh):
        if mesh.rank == 0:
            torch.compile(torch.sin, backend=backend)(torch.ones(1))
            return None
        compiling.wait(timeout=1)
        state = torch.compiler.is_compiling()
        observed.set()
        return state

    torch.compiler.reset()
    outcomes = outcomes_on_virtual_ranks(run, ring=2, device=torch.device("cpu"))
    assert [outcome.output for outcome in outcomes] == [None, False]


def test_threads_inherit_autocast():
    def run(mesh):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.autocast("cpu", torch.bfloat16):
        outcomes = outcomes_on_virtual_ranks(run, ring=2, device=torch.device("cpu"))
    assert [outcome.output for outcome in outcomes] == [torch.bfloat16] * 2
