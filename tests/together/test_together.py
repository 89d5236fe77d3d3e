"""Combined options give the result of the unmodified pipeline, or are refused: ``python -m tests.together CASE``."""

import pytest
import torch

from tests.together.covering import SEED, admissible_pairs, pairs_of, read_cases, refused_cases
from tests.together.options import exclusion_of, parse
from tests.together.run import Reference, judge, run

CASES = read_cases()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", [pytest.param(case.id, marks=() if is_short else pytest.mark.long) for case, is_short in CASES.items()]
)
def test_options_together_are_exact_or_refused(rank_pool, name):
    outcome = run(parse(name), rank_pool)
    assert outcome.status in ("exact", "refused"), f"seed {SEED}, python -m tests.together {name}\n{outcome.detail}"


@pytest.mark.long
@pytest.mark.parametrize("name", [case.id for case, _ in refused_cases()])
def test_refusals_have_a_reason(rank_pool, name):
    outcome = run(parse(name), rank_pool)
    assert outcome.status == "refused", f"python -m tests.together {name}\n{outcome}"


@pytest.mark.long
def test_array_holds_every_admissible_pair():
    covered = {pair for case in CASES for pair in pairs_of(case.by_axis)}
    assert covered >= set(admissible_pairs())
    assert len({case.id for case in CASES}) == len(CASES) >= 300
    assert all(exclusion_of(case.by_axis) is None for case in CASES)


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "exact"),
        ({"outs": [torch.tensor([1.0, 2.01])]}, "wrong"),
        ({"outs": [torch.tensor([1.0, 2.0000005])]}, "wrong"),  # The bits differ from those of the first rank.
        ({"outs": [torch.full((2,), torch.nan)]}, "wrong"),
        ({"undone": [torch.tensor([1.0, 2.0000005])]}, "wrong"),
        ({"state": {"pipe": "FluxPipeline", "pipe._para_core": "dict"}}, "wrong"),
    ],
)
def test_a_wrong_result_is_told_from_an_exact_one(changed, status):
    out, state = torch.tensor([1.0, 2.0]), {"pipe": "FluxPipeline"}
    exact = {"outs": [out], "undone": [out], "kept": [], "state": state, "stage": "done"}
    outcome = judge(parse("flux+ulysses2"), Reference([out], [out], None, state), [exact, {**exact, **changed}])
    assert outcome.status == status
