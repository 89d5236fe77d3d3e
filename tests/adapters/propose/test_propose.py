"""A plan is proposed for models without an adapter, and only if it is exact."""

import re

import pytest
import torch

from para_core.adapters import Adapter, parallelize_transformer, propose_plan
from para_core.adapters.propose.proposal import source_of
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import (
    Attention,
    Count,
    FirstTokens,
    Gather,
    Halo,
    LinearAttention,
    OneForEach,
    Plan,
    Replicate,
    Split,
    SplitMask,
)
from tests.adapters.propose.models import (
    Centred,
    Choosing,
    Compared,
    Controlled,
    OfTwo,
    Painter,
    Weighted,
    controlled_inputs,
    painter_inputs,
    weighted_inputs,
)
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.base import fill
from zoo.tiny.transformers.registry import MODELS


def adapter_of(source):
    """Return the adapter that the source of a module defines."""
    names = {}
    exec(source, names)
    return names["ADAPTER"]


def run_in_parallel(source):
    transformer = fill(Painter(), seed=1)
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), adapter=adapter_of(source))
    with torch.no_grad():
        return transformer(**painter_inputs(23))


def test_proposed_plan_of_own_model_is_exact_on_ranks(rank_pool):
    transformer = fill(Painter(), seed=1)
    proposal = propose_plan(transformer, (painter_inputs(17), painter_inputs(31)))
    with torch.no_grad():
        expected = transformer(**painter_inputs(23))
    for out in rank_pool.run(run_in_parallel, 2, proposal.source()):
        assert relative_error(out, expected) < 1e-5


def test_its_source_says_what_it_holds():
    proposal = propose_plan(fill(Painter(), seed=1), (painter_inputs(17), painter_inputs(31)))
    assert adapter_of(proposal.source()) == Adapter("Painter", "Painter", plan=proposal.plan, blocks=proposal.blocks)
    assert proposal.blocks.groups[0].streams == ("caption", "latents")
    assert proposal.blocks.groups[0].chained
    assert "3 of 3 attention calls" in str(proposal)


def test_source_imports_every_rule_and_escapes_texts():
    image = Attention(("image",))
    plan = Plan(
        {"x": Split(1, segment="image"), "sizes": Count("image", (0,)), "mask": SplitMask(("image",))},
        {"": Gather(1, "image")},
        ("image",),
        attention={"a": OneForEach("parts", image, image), "b": LinearAttention("image", (("sum", 0),))},
        halos={"c": Halo(1, "image", 2)},
        refused={"y": 'it is "new"'},
    )
    adapter = Adapter("Painter", "Painter", plan)
    assert adapter_of(source_of(adapter)) == adapter


def test_unplannable_model_is_asked_about():
    proposal = propose_plan(fill(Centred(), seed=1), (painter_inputs(17), painter_inputs(31)))
    assert proposal.plan is None
    assert "layers.0" in " ".join(proposal.questions)
    with pytest.raises(ValueError, match="Centred"):
        proposal.source()


def test_answer_completes_a_plan():
    transformer, examples = fill(Choosing(), seed=1), (painter_inputs(17), painter_inputs(31))
    incomplete = propose_plan(transformer, examples)
    assert incomplete.plan is None
    assert incomplete.guess.inner["layers.0"]["latents"] == Split(1, segment="image")
    answers = {"layers.*.chosen(tokens)": Gather(1, "image"), "layers.*.chosen(0)": Split(1, like="image")}
    proposal = propose_plan(transformer, examples, answers=answers)
    assert proposal.error < 1e-5
    assert proposal.plan.inner["layers.*.chosen"] == {"tokens": Gather(1, "image"), 0: Split(1, like="image")}
    assert "layers.*.chosen(0): " in str(proposal)


def test_a_wrong_answer_is_no_plan():
    wrong = {"layers.*(positions)": Split(0, like="image", then_replicated=True)}
    proposal = propose_plan(fill(Painter(), seed=1), (painter_inputs(17), painter_inputs(31)), answers=wrong)
    assert proposal.plan is None
    assert proposal.guess.inner["layers.*"] == {"positions": Split(0, like="image", then_replicated=True)}


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("layers.*(positions)", "image"),
        ("out", FirstTokens("image")),
        ("layers.*", (Replicate(0, "text"),)),
        ("CachedBlocks", {"layers": ("latents",)}),
    ],
)
def test_answer_of_unknown_kind_raises(name, answer):
    with pytest.raises(TypeError, match=r"answers\[.*'module\(parameter\)'"):
        propose_plan(fill(Painter(), seed=1), (painter_inputs(17), painter_inputs(31)), answers={name: answer})


def test_blocks_that_are_said_are_tried_too():
    transformer, examples = fill(Painter(), seed=1), (painter_inputs(17), painter_inputs(31))
    right = CachedBlocks((BlockGroup(("layers",), ("caption", "latents"), measured="latents", chained=True),))
    wrong = CachedBlocks((BlockGroup(("layers",), ("latents", "caption"), measured="latents", chained=True),))
    assert propose_plan(transformer, examples, answers={"CachedBlocks": right}).blocks == right
    incomplete = propose_plan(transformer, examples, answers={"CachedBlocks": wrong})
    assert incomplete.blocks is None
    assert incomplete.questions[0].startswith("CachedBlocks: ")


def run_samples_in_parallel(source):
    transformer = fill(Painter(), seed=1)
    parallelize_transformer(transformer, mesh=cpu_mesh(1, 1, batch=2), adapter=adapter_of(source))
    with torch.no_grad():
        return transformer(**painter_inputs(23))


def test_samples_that_are_said_are_distributed(rank_pool):
    transformer = fill(Painter(), seed=1)
    proposal = propose_plan(transformer, (painter_inputs(17), painter_inputs(31)), answers={"samples": 2})
    assert proposal.plan.batched == {"latents": 0, "caption": 0}
    assert proposal.plan.common == ("positions",)
    with torch.no_grad():
        expected = transformer(**painter_inputs(23))
    for out in rank_pool.run(run_samples_in_parallel, 2, proposal.source()):
        assert relative_error(out, expected) < 1e-5


def run_with_text(source):
    outs = []
    for text in ("shard", "replicate"):
        transformer = fill(Weighted(), seed=1)
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), text=text, adapter=adapter_of(source))
        with torch.no_grad():
            outs.append(transformer(**weighted_inputs(23)))
    return outs


def test_text_and_its_weights_are_sharded(rank_pool):
    transformer = fill(Weighted(), seed=1)
    proposal = propose_plan(transformer, (weighted_inputs(17), weighted_inputs(31)))
    assert proposal.plan.cuts("text")
    assert "text" in str(proposal)
    with torch.no_grad():
        expected = transformer(**weighted_inputs(23))
    for outs in rank_pool.run(run_with_text, 2, proposal.source()):
        assert max(relative_error(out, expected) for out in outs) < 1e-5


def test_text_is_replicated_if_positions_are_joint():
    proposal = propose_plan(fill(Painter(), seed=1), (painter_inputs(17), painter_inputs(31)))
    assert proposal.plan is not None
    assert not proposal.plan.cuts("text")


def test_arguments_that_do_something_between_blocks_are_named():
    proposal = propose_plan(fill(Controlled(), seed=1), (controlled_inputs(17), controlled_inputs(31)))
    assert proposal.blocks.groups[0].chained
    assert proposal.blocks.groups[0].between == ("residuals",)
    assert proposal.blocks.uncached == ()
    assert re.search(r"residuals: .*blocks of layers", str(proposal))


def test_arguments_that_leave_out_blocks_are_named():
    examples = controlled_inputs(17, left_out=1), controlled_inputs(31, left_out=1)
    proposal = propose_plan(fill(Controlled(), seed=1), examples)
    assert proposal.blocks.groups[0].between == ("residuals",)
    assert proposal.blocks.uncached == ("left_out",)
    assert "left_out: " in str(proposal)


def test_independent_samples_are_asked_about():
    examples = painter_inputs(17), painter_inputs(31)
    incomplete = propose_plan(fill(Painter(), seed=1), examples)
    assert incomplete.plan.batched == {}
    assert "answers={'samples': 2}" in incomplete.questions[0]
    proposal = propose_plan(fill(Compared(), seed=1), examples)
    assert proposal.plan is not None
    assert proposal.questions == ()


def test_samples_that_need_each_other_are_reported():
    examples = weighted_inputs(17), weighted_inputs(31)
    proposal = propose_plan(fill(OfTwo(), seed=1), examples, answers={"samples": 2})
    assert proposal.plan is not None
    assert re.search(r"samples: .*2 .*RuntimeError: two", " ".join(proposal.questions))


def test_two_calls_of_one_size_are_an_error():
    with pytest.raises(ValueError, match=r"Painter.* module lists"):
        propose_plan(fill(Painter(), seed=1), (painter_inputs(17), painter_inputs(17)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["flux", "wan", "hunyuan, image by token replacement"])
@pytest.mark.slow
def test_known_models_are_found_without_their_adapters(name):
    model = MODELS[name]
    proposal = propose_plan(model.build(), (model.inputs(3, 6, 6), model.inputs(3, 6, 10)))
    assert proposal.error is not None
    assert proposal.error < 1e-5
    assert proposal.blocks is not None
    assert adapter_of(proposal.source()) == proposal.adapter()
