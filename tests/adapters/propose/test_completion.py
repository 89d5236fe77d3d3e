"""A proposal is completed: samples are split only if they give the same result one by one, up to rounding."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from para_core.adapters.propose import completion
from para_core.adapters.propose.plan_check import PlanCheck
from para_core.adapters.propose.proposal import Proposal
from para_core.adapters.propose.samples import InseparableSamplesError, with_samples
from para_core.adapters.propose.stack import StackGuess
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.plans.plan import Plan

INPUTS, PLAN = {"hidden_states": torch.ones(2, 3)}, Plan({}, {}, ("image",))


class RoundsByBatch(nn.Linear):
    """Returns its input with a relative error that depends on the number of samples, as kernels in 16 bits do."""

    def forward(self, hidden_states):
        return hidden_states * (1 + 1e-3 / len(hidden_states))


CHECK = PlanCheck(RoundsByBatch(1, 1), [INPUTS])


def test_samples_that_differ_by_rounding_do_not_depend_on_each_other():
    plan = with_samples(CHECK.module, replace(PLAN, common=("table",)), INPUTS, 2, tolerance=5e-2)
    assert (plan.batched, plan.common) == ({"hidden_states": 0}, ("table",))
    with pytest.raises(InseparableSamplesError):
        with_samples(CHECK.module, PLAN, INPUTS, 2, tolerance=1e-5)
    with pytest.raises(InseparableSamplesError, match="zero-dimensional"):
        with_samples(lambda hidden_states: (hidden_states, hidden_states.sum()), PLAN, INPUTS, 2, tolerance=1e-5)
    with pytest.raises(InseparableSamplesError, match=r"of 2 .*inf"):
        with_samples(lambda hidden_states: [hidden_states] * len(hidden_states), PLAN, INPUTS, 2, tolerance=1e-5)


def test_text_without_tokens_is_checked_on_ranks_that_divide_the_image_unevenly():
    assert list(CHECK._meshes(0, [(4,), (0,)])) == [(1, 3), (3, 1)]


def test_answered_dims_of_samples_stay():
    plan, answers = replace(PLAN, batched={"hidden_states": 1}), {"samples": 2, "CachedBlocks": None}
    assert completion.complete_proposal(Proposal("a", plan, error=0.0), CHECK, answers, None).plan is plan


@pytest.mark.parametrize(("samples", "problem"), [(1, "the number of samples is 1;"), (5, "no argument has a dim of")])
def test_answer_of_a_wrong_number_of_samples_gives_a_question(samples, problem):
    answers = {"samples": samples, "CachedBlocks": None}
    proposal = completion.complete_proposal(Proposal("a", PLAN, error=0.0), CHECK, answers, None)
    assert proposal.plan == PLAN
    assert proposal.questions[0].startswith(f"samples: {problem}")


def test_question_about_blocks_shows_the_likeliest_guess(monkeypatch):
    guesses = [StackGuess(CachedBlocks((BlockGroup((name,)),)), INPUTS) for name in ("likeliest", "other")]
    monkeypatch.setattr(completion, "guess_stacks", lambda *_: guesses)
    proposal = completion._add_blocks(Proposal("a", PLAN, error=0.0), CHECK, None, object())
    assert "likeliest" in proposal.questions[0] and "other" not in proposal.questions[0]
