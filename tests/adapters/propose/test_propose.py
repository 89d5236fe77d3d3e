"""A plan is proposed for models without an adapter, and only if it is exact."""

import re

import pytest
import torch

from para_core.adapters import Adapter, parallelize_transformer, propose_plan
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import (
    FirstTokens,
    Gather,
    Replicate,
    Split,
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
from tests.tiny import cpu_mesh, relative_errors
from zoo.tiny.base import fill
from zoo.tiny.transformers.registry import MODELS

PAINTER = painter_inputs(17), painter_inputs(31)


def adapter_of(source):
    """Return the adapter that the source of a module defines."""
    names = {}
    exec(source, names)
    return names["ADAPTER"]


def test_its_source_says_what_it_holds():
    proposal = propose_plan(fill(Painter(), seed=1), PAINTER)
    assert adapter_of(proposal.source()) == Adapter("Painter", "Painter", plan=proposal.plan, blocks=proposal.blocks)
    assert proposal.blocks.groups[0].streams == ("caption", "latents")
    assert proposal.blocks.groups[0].chained
    assert "3 of 3 attention calls" in str(proposal)


def test_unplannable_model_is_asked_about():
    proposal = propose_plan(fill(Centred(), seed=1), PAINTER)
    assert proposal.plan is None
    assert "layers.0" in " ".join(proposal.questions)
    with pytest.raises(ValueError, match="Centred"):
        proposal.source()


def test_answer_completes_a_plan():
    transformer, examples = fill(Choosing(), seed=1), PAINTER
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
    proposal = propose_plan(fill(Painter(), seed=1), PAINTER, answers=wrong)
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
        propose_plan(fill(Painter(), seed=1), PAINTER, answers={name: answer})


def test_blocks_that_are_said_are_tried_too():
    transformer, examples = fill(Painter(), seed=1), PAINTER
    right = CachedBlocks((BlockGroup(("layers",), ("caption", "latents"), measured="latents", chained=True),))
    wrong = CachedBlocks((BlockGroup(("layers",), ("latents", "caption"), measured="latents", chained=True),))
    assert propose_plan(transformer, examples, answers={"CachedBlocks": right}).blocks == right
    incomplete = propose_plan(transformer, examples, answers={"CachedBlocks": wrong})
    assert incomplete.blocks is None
    assert incomplete.questions[0].startswith("CachedBlocks: ")


# The model, its examples and the inputs of the ranks, answers, the mesh as batch × ring × ulysses, and text=.
ON_RANKS = {
    "its own plan": (Painter, PAINTER, painter_inputs(23), {}, (1, 1, 2), None),
    "samples": (Painter, PAINTER, painter_inputs(23), {"samples": 2}, (2, 1, 1), None),
    **{
        f"text, {text}": (
            Weighted,
            (weighted_inputs(17), weighted_inputs(31)),
            weighted_inputs(23),
            {},
            (1, 1, 2),
            text,
        )
        for text in ("shard", "replicate")
    },
}


def run_in_parallel(sources):
    outs = {}
    for what, (make, _, inputs, _, (batch, ring, ulysses), text) in ON_RANKS.items():
        mesh = cpu_mesh(ring, ulysses, batch=batch)
        transformer = parallelize_transformer(
            fill(make(), seed=1), mesh=mesh, text=text, adapter=adapter_of(sources[what])
        )
        with torch.no_grad():
            outs[what] = transformer(**inputs)
    return outs


def test_proposed_plans_are_exact_on_ranks(rank_pool):
    proposals, expected = {}, {}
    for what, (make, examples, inputs, answers, _, _) in ON_RANKS.items():
        transformer = fill(make(), seed=1)
        proposals[what] = propose_plan(transformer, examples, answers=answers)
        with torch.no_grad():
            expected[what] = transformer(**inputs)
    assert proposals["samples"].plan.batched == {"latents": 0, "caption": 0}
    assert proposals["samples"].plan.common == ("positions",)
    assert proposals["text, shard"].plan.cuts("text")
    assert "text" in str(proposals["text, shard"])
    # Positions of text and image are one argument.
    assert not proposals["its own plan"].plan.cuts("text")
    for outs in rank_pool.run(run_in_parallel, 2, {what: proposal.source() for what, proposal in proposals.items()}):
        errors = relative_errors(outs, expected)
        assert max(errors.values()) < 1e-5, errors


def test_arguments_between_blocks_and_that_leave_out_blocks_are_named():
    proposal = propose_plan(fill(Controlled(), seed=1), (controlled_inputs(17), controlled_inputs(31)))
    assert proposal.blocks.groups[0].chained
    assert proposal.blocks.groups[0].between == ("residuals",)
    assert proposal.blocks.uncached == ()
    assert re.search(r"residuals: .*blocks of layers", str(proposal))
    examples = controlled_inputs(17, left_out=1), controlled_inputs(31, left_out=1)
    proposal = propose_plan(fill(Controlled(), seed=1), examples)
    assert proposal.blocks.groups[0].between == ("residuals",)
    assert proposal.blocks.uncached == ("left_out",)
    assert "left_out: " in str(proposal)


def test_independent_samples_are_asked_about():
    examples = PAINTER
    incomplete = propose_plan(fill(Painter(), seed=1), examples)
    assert incomplete.plan.batched == {}
    assert "answers={'samples': 2}" in incomplete.questions[0]
    proposal = propose_plan(fill(Compared(), seed=1), examples)
    assert proposal.plan is not None
    assert proposal.questions == ()
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
