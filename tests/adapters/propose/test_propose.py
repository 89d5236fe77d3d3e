"""A plan is proposed for models that nobody described, and only where it is exact."""

import pytest
import torch

from benchmarks.random_weights import fill
from benchmarks.tiny_models import MODELS
from para_core.adapters import Adapter, parallelize_transformer, propose_plan
from tests.adapters.propose.models import Centred, Painter, painter_inputs
from tests.tiny import cpu_mesh, relative_error


def adapter_of(source):
    """What the text of a module describes."""
    names = {}
    exec(source, names)
    return names["ADAPTER"]


def run_in_parallel(source):
    transformer = fill(Painter(), seed=1)
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), adapter=adapter_of(source))
    with torch.no_grad():
        return transformer(**painter_inputs(23))


def test_what_is_proposed_for_a_model_of_ones_own_is_exact_on_real_ranks(rank_pool):
    transformer = fill(Painter(), seed=1)
    proposal = propose_plan(transformer, (painter_inputs(17), painter_inputs(31)))
    with torch.no_grad():
        expected = transformer(**painter_inputs(23))
    for out in rank_pool.run(run_in_parallel, 2, proposal.source()):
        assert relative_error(out, expected) < 1e-5


def test_its_source_says_what_it_holds():
    proposal = propose_plan(fill(Painter(), seed=1), (painter_inputs(17), painter_inputs(31)))
    assert adapter_of(proposal.source()) == Adapter("Painter", "Painter", plan=proposal.plan, blocks=proposal.blocks)
    assert proposal.blocks.stages[0].streams == ("caption", "latents")
    assert proposal.blocks.stages[0].chained
    assert "3 of 3 attention calls are between sharding and gathering" in str(proposal)


def test_what_no_plan_can_say_is_asked_for_and_not_proposed():
    proposal = propose_plan(fill(Centred(), seed=1), (painter_inputs(17), painter_inputs(31)))
    assert proposal.plan is None
    assert "No plan that begins at layers.0 was exact" in " ".join(proposal.questions)
    with pytest.raises(ValueError, match="no plan was found for Centred"):
        proposal.source()


def test_what_is_no_pair_of_calls_is_an_error():
    with pytest.raises(TypeError, match=r"example_inputs holds \['dict'\]; expected two dicts of arguments"):
        propose_plan(fill(Painter(), seed=1), (painter_inputs(17),))


def test_two_calls_of_one_size_are_an_error():
    with pytest.raises(ValueError, match="no stream of tokens of Painter's module lists"):
        propose_plan(fill(Painter(), seed=1), (painter_inputs(17), painter_inputs(17)))


@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan, image by token replacement"])
def test_known_models_are_found_without_what_is_known_of_them(name):
    model = MODELS[name]
    proposal = propose_plan(model.build(), (model.inputs(3, 6, 6), model.inputs(3, 6, 10)))
    assert proposal.error is not None
    assert proposal.error < 1e-5
    assert proposal.blocks is not None
    assert adapter_of(proposal.source()) == proposal.adapter()
