"""Combined options give the result of the unmodified pipeline, or are refused with a reason. ``python -m tests.together
CASE`` runs one case.
"""

import random

import pytest
import torch
import torch._dynamo

from para_core.adapters import parallelize_pipe
from tests.together.covering import SEED, admissible_pairs, pairs_of, read_cases, refused_cases
from tests.together.options import AXES, EXCLUSIONS, case_of, exclusion_of, parse
from tests.together.run import Reference, described, judge, run
from zoo.tiny.pipelines import PIPELINES

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


@pytest.mark.long
def test_excluded_pairs_have_a_reason():
    """Check that each inadmissible pair matches an exclusion, or that every way to complete it does."""
    admissible = set(admissible_pairs())
    axes = list(AXES)
    rng = random.Random(3)
    for _ in range(300):
        first, second = rng.sample(axes, 2)
        values = {first: rng.choice(AXES[first]), second: rng.choice(AXES[second])}
        (pair,) = pairs_of(values)
        if exclusion_of(values) is not None:
            assert pair not in admissible


def test_an_id_names_its_case():
    for case in CASES:
        assert parse(case.id) == case
    assert parse("wan+ring2") == case_of({"pipeline": "wan", "mesh": "ring2"})
    with pytest.raises(ValueError, match="fsdp"):
        parse("wan+ring2+fsdp+tensor")
    with pytest.raises(ValueError, match="ring17"):
        parse("wan+ring17")


def test_every_exclusion_names_values_that_there_are():
    for exclusion in EXCLUSIONS:
        assert all(set(values) <= set(AXES[axis]) and values for axis, values in exclusion.values.items())


def test_each_refused_combination_is_tried_alone():
    tried = refused_cases()
    assert {exclusion.reason for _, exclusion in tried} == {
        exclusion.reason for exclusion in EXCLUSIONS if exclusion.refused
    }
    for case, exclusion in tried:
        assert [other for other in EXCLUSIONS if other.excludes(case.by_axis)] == [exclusion]


def judged(**changed):
    """Return the verdict on two ranks, of which the second differs from an exact rank in ``changed``."""
    case, out = parse("flux+ulysses2"), torch.arange(1.0, 5.0)
    exact = {"outs": [out], "undone": [out], "kept": [], "state": {"pipe": "FluxPipeline"}, "stage": "done"}
    alone = Reference([out], [out], None, {"pipe": "FluxPipeline"})
    return judge(case, alone, [exact, {**exact, **changed}]).status


def raised(error):
    try:
        raise error
    except Exception as caught:
        return {"raised": described(caught), "stage": "generating"}


def refused():
    try:
        parallelize_pipe(None, weights="fdsp")
    except Exception as caught:
        return {"raised": described(caught), "stage": "applying"}


OFF, SLIGHTLY = torch.tensor([1.0, 2.0, 3.0, 4.01]), torch.tensor([1.0, 2.0, 3.0, 4.0000005])


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "exact"),
        ({"outs": [OFF]}, "wrong"),
        ({"outs": [SLIGHTLY]}, "wrong"),  # The bits differ from those of the first rank.
        ({"outs": [torch.full((4,), torch.nan)]}, "wrong"),
        ({"undone": [SLIGHTLY]}, "wrong"),
        ({"state": {"pipe": "FluxPipeline", "pipe._para_core": "dict"}}, "wrong"),
        ({"kept": ["pipe.scheduler.model_outputs holds para_core.lazy_tensors.LazyTensor"]}, "wrong"),
        (refused(), "wrong"),  # Only one rank is refused, so the other one would wait for it.
    ],
)
def test_a_wrong_result_is_told_from_an_exact_one(changed, status):
    assert judged(**changed) == status


def test_refusal_differs_from_unexplained_error():
    case = parse("flux+ulysses2")
    assert judge(case, None, [refused(), refused()]).status == "refused"
    for error in (KeyError("x"), RuntimeError("not ours"), torch._dynamo.exc.Unsupported("graph break")):
        assert judge(case, None, [raised(error), raised(error)]).status == "obscure"


def test_hook_on_a_tiny_pipeline_is_temporary():
    first, second = (PIPELINES["hunyuan"].build() for _ in range(2))
    encoders = [pipe.text_encoder_2 for pipe in (first, second)]
    encoders[0].register_forward_hook(lambda *_: None)
    assert not encoders[1]._forward_hooks and encoders[0].state_dict().keys() == encoders[1].state_dict().keys()
