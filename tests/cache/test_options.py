"""The steps that each option skips, on a model with given residuals, in eager code and in a graph."""

import inspect
import math
import re
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler

from para_core import apply_cache, model_cache_report
from para_core.adapters import apply_cache_on_pipe, apply_cache_on_transformer, cache_report
from para_core.adapters.models import ADAPTERS
from para_core.cache.apply import cache_options
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.cache.forecast_rule import Forecast
from para_core.cache.forecasts import FOCA, forecast_weights
from para_core.cache.options import CacheOptions
from para_core.cache.rules import FIRST_BLOCK, Rule
from para_core.plans.plan import Plan
from para_core.user_warnings import ThresholdWarning
from tests.cache.scripted import ADAPTER, BLOCKS, STREAMS, Pipe, Scripted, verdicts
from zoo.tiny.pipelines import PIPELINES

pytestmark = pytest.mark.filterwarnings("ignore:.*cache ")


# The contribution of the scripted model's first block is known before it runs.
KNOWN_BEFORE = replace(
    ADAPTER,
    blocks=replace(
        BLOCKS, modulated=lambda block, arguments: torch.ones_like(arguments["hidden_states"]) * arguments["added"][0]
    ),
)


IN_GRAPHS_TOO = pytest.mark.parametrize("run", ["eager", pytest.param("graph", marks=pytest.mark.slow)], indirect=True)


# The long run also has all of these in graphs. The default run has one such test for each way to decide.
@pytest.fixture(params=["eager", pytest.param("graph", marks=pytest.mark.long)])
def run(request):
    """Return ``run(first, rest, **options)``, which returns the outputs and the report of a cached pipe."""

    def run(first, rest=None, *, scheduler=None, size=(1, 6, 8), **options):
        pipe = Pipe() if scheduler is None else Pipe(scheduler=scheduler)
        plain = {} if "forecast" in options else {"forecast_order": 0}
        apply_cache_on_pipe(pipe, **{"residual_diff_threshold": 0.1, "adapter": ADAPTER, **plain, **options})
        if request.param == "graph":
            torch._dynamo.reset()
            pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="eager")
        return pipe(first, rest, size=size), cache_report(pipe)

    return run


def added(outputs):
    """Return the contribution of the blocks at each step."""
    start = torch.linspace(-1, 1, outputs[0].numel()).reshape(outputs[0].shape)
    return [(out - start).mean().item() for out in outputs]


@pytest.mark.sample(1)
@IN_GRAPHS_TOO
def test_step_is_compared_with_last_computed_one(run):
    outputs, report = run([1.0, 1.05, 1.09, 1.12, 1.13], {"cond": [10.0, 20.0, 30.0, 40.0, 50.0]})
    assert verdicts(report) == ["warmup", "hit", "hit", "miss", "hit"]
    assert [row.difference for row in report.rows[1:]] == pytest.approx([0.05, 0.09, 0.12, 0.01 / 1.12], rel=1e-5)
    assert added(outputs) == pytest.approx([11.0, 11.05, 11.09, 41.12, 41.13], rel=1e-5)


@pytest.mark.sample(1)
@IN_GRAPHS_TOO
def test_early_rule_runs_no_block_at_a_hit(run):
    rest = {"cond": [10.0, 20.0, 30.0, 40.0, 50.0]}
    options = {"rule": "modulated_input", "adapter": KNOWN_BEFORE}
    outputs, report = run([1.0, 1.05, 1.09, 1.12, 1.13], rest, **options)
    assert verdicts(report) == ["warmup", "hit", "hit", "miss", "hit"]
    assert [row.difference for row in report.rows[1:]] == pytest.approx([0.05, 0.09, 0.12, 0.01 / 1.12], rel=1e-5)
    # The stored residual is the sum of the contributions of all blocks.
    assert added(outputs) == pytest.approx([11.0, 11.0, 11.0, 41.12, 41.12], rel=1e-5)
    assert report.rule == "modulated_input"
    first = [1.0, 2.0, 3.0, 4.0]
    outputs, report = run(first, {"cond": first}, compute_steps=[0, 2], **options)
    assert added(outputs) == pytest.approx([2.0, 2.0, 6.0, 6.0])
    outputs, report = run(first, {"cond": first}, residual_diff_threshold=0.0, **options)
    for out, wanted in zip(outputs, Pipe()(first, {"cond": first}), strict=True):
        assert torch.equal(out, wanted)
    pipe = apply_cache_on_pipe(Pipe(), residual_diff_threshold=0.1, **options)
    pipe([1.0, 1.05, 1.09, 1.12, 1.13])
    assert pipe.transformer.counts() == [2, 2, 2, 2]


def test_a_difference_equal_to_the_threshold_is_computed(run):
    # Both numbers are exact in binary, so they are equal.
    _, report = run([1.0, 1.25, 1.0], residual_diff_threshold=0.25)
    assert verdicts(report) == ["warmup", "miss", "hit"]


@pytest.mark.sample(1)
@IN_GRAPHS_TOO
def test_zero_and_nonfinite_residuals_are_computed_and_warn(run):
    with pytest.warns(UserWarning, match="residual"):
        outputs, report = run([0.0, 0.0, 1.0, math.nan, 1.0, 1.0, math.inf, 1.0], residual_diff_threshold=1e9)
    assert verdicts(report) == ["warmup", *["not_finite"] * 4, "hit", "not_finite", "not_finite"]
    assert added(outputs)[5] == pytest.approx(11.0)


def test_warmup_steps(run):
    _, report = run([1.0] * 5, warmup_steps=3)
    assert verdicts(report) == ["warmup"] * 3 + ["hit"] * 2
    assert [row.difference for row in report.rows[:3]] == [None] * 3


@pytest.mark.parametrize(("limit", "expected"), [(0, "wlllll"), (1, "whlhlh"), (3, "whhhlh")])
def test_max_consecutive_hits(run, limit, expected):
    _, report = run([1.0] * 6, max_consecutive_hits=limit)
    assert "".join(verdict[0] for verdict in verdicts(report)) == expected


def test_always_compute_last(run):
    _, report = run([1.0] * 4, always_compute_last=True)
    assert verdicts(report) == ["warmup", "hit", "hit", "schedule"]


def test_start_and_end_are_fractions_of_the_steps(run):
    _, report = run([1.0] * 10, start=0.3, end=0.7)
    assert verdicts(report) == ["warmup", *["schedule"] * 2, *["hit"] * 4, *["schedule"] * 3]


def test_two_calls_per_step_double_the_steps(run):
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps = lambda sigmas: FlowMatchHeunDiscreteScheduler.set_timesteps(scheduler, 3)
    _, report = run([1.0] * 5, scheduler=scheduler, always_compute_last=True)
    assert len(scheduler.timesteps) == 5
    assert verdicts(report) == ["warmup", "hit", "hit", "hit", "schedule"]


def test_first_and_last_blocks_always_run():
    pipe = Pipe()
    options = {"first_blocks": 2, "last_blocks": 1, "forecast_order": 0}
    apply_cache_on_pipe(pipe, residual_diff_threshold=1e9, adapter=ADAPTER, **options)
    outputs = pipe([1.0, 1.0, 2.0], {"cond": [3.0, 6.0, 9.0]})
    assert pipe.transformer.counts() == [3, 3, 1, 3]
    # The other blocks share the second number. The skipped block adds its contribution of the first step.
    assert added(outputs) == pytest.approx([1 + 3, 1 + 2 + 1 + 2, 2 + 3 + 1 + 3])
    # The difference is the change of the first two blocks together.
    assert cache_report(pipe).rows[2].difference == pytest.approx((2 + 3 - 1 - 1) / 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("run", "order"),
    [
        *[("eager", order) for order in (0, 1, 2)],
        *[pytest.param("graph", order, marks=pytest.mark.long) for order in (0, 1)],
        pytest.param("graph", 2, marks=pytest.mark.slow),
    ],
    indirect=["run"],
)
def test_a_forecast_is_exact_on_polynomials_at_uneven_distances(run, order):
    steps = 8
    # The schedule's own times are uneven because of a shift.
    pipe = Pipe()
    pipe.scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    times = (pipe.scheduler.timesteps / 1000).tolist()
    assert len({round(a - b, 3) for a, b in pairwise(times)}) > 3
    wanted = [sum((i + 1) * t**i for i in range(order + 1)) for t in times]
    # The first three steps are computed, and step 5, in which the first residual jumps.
    first = [1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 5.0]
    outputs, report = run(first, {"cond": wanted}, forecast_order=order, warmup_steps=3)
    assert verdicts(report) == ["warmup"] * 3 + ["hit"] * 2 + ["miss"] + ["hit"] * 2
    assert [a - b for a, b in zip(added(outputs), first, strict=True)] == pytest.approx(wanted, abs=2e-5)


def linear_in_time(steps):
    """Return one value per step of the scripted pipe's schedule, linear in time."""
    pipe = Pipe()
    pipe.scheduler.set_timesteps(sigmas=[1 - i / steps for i in range(steps)])
    return (3 + pipe.scheduler.timesteps / 1000).tolist()


def test_schedule_enables_forecast_by_default(run):
    wanted, first = linear_in_time(6), [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    outputs, report = run(first, {"cond": wanted}, forecast_order=None)
    assert verdicts(report) == ["warmup", "miss", *["hit"] * 4]
    assert [a - b for a, b in zip(added(outputs), first, strict=True)] == pytest.approx(wanted, abs=2e-5)
    assert report.forecast == "taylor 1"
    assert [row.forecast_from for row in report.rows] == [0, 0, 2, 2, 2, 2]
    outputs, report = run(first, {"cond": wanted}, forecast_order=0)
    assert [a - b for a, b in zip(added(outputs), first, strict=True)] == pytest.approx([wanted[0], *[wanted[1]] * 5])
    assert report.forecast == "taylor 0"
    assert [row.forecast_from for row in report.rows] == [0, 0, 1, 1, 1, 1]


def test_refused_options_keep_the_cache_of_a_model():
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.1)
    cls, report = type(model), model_cache_report(model)
    with pytest.raises(ValueError, match="99"):
        apply_cache(model, BLOCKS, residual_diff_threshold=0.1, first_blocks=99)
    assert type(model) is cls
    assert model_cache_report(model).forecast == report.forecast


def test_without_a_schedule_the_stored_residual_is_added():
    alone = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.1)
    assert model_cache_report(alone).forecast == "taylor 0"
    without = apply_cache_on_pipe(Pipe(scheduler=None), residual_diff_threshold=0.1, adapter=ADAPTER)
    assert cache_report(without).forecast == "taylor 0"


def mean_of_two(times, now, num_residuals):
    assert times.dtype == now.dtype == torch.float64
    both = torch.full_like(times, 0.5)
    return torch.where(num_residuals >= 2, both, torch.tensor([1.0, 0.0], dtype=times.dtype, device=times.device))


@pytest.mark.sample(1)
@IN_GRAPHS_TOO
def test_own_forecast_weights_stored_residuals(run):
    forecast = Forecast("mean", 2, mean_of_two, source="a test")
    outputs, report = run([1.0, 1.0, 2.0, 2.0], {"cond": [4.0, 0.0, 6.0, 0.0]}, forecast=forecast)
    assert verdicts(report) == ["warmup", "hit", "miss", "hit"]
    assert added(outputs) == pytest.approx([5.0, 5.0, 8.0, 7.0])
    assert report.forecast == "mean"
    assert [row.forecast_from for row in report.rows] == [0, 1, 0, 2]


@pytest.mark.parametrize(
    "steps", [{0, 2, 5}, [5, 2], (2, -1), range(2, 6, 3), [True, False, True, False, False, True], torch.tensor([2, 5])]
)
def test_compute_steps_alone_decides_which_steps_are_computed(run, steps):
    # Without this option the rule would compute all steps.
    outputs, report = run([float(2**i) for i in range(6)], {"cond": [float(i) for i in range(6)]}, compute_steps=steps)
    assert verdicts(report) == ["warmup", "masked", "schedule", "masked", "masked", "schedule"]
    assert report.hits == 3
    assert [row.difference for row in report.rows] == [None] * 6
    assert [a - 2**i for i, a in enumerate(added(outputs))] == pytest.approx([0, 0, 2, 2, 2, 5], abs=1e-5)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([0, 1, 2, 5, -1], ["warmup", "schedule", "schedule", "schedule"]),
        ([9, 2], ["warmup", "masked", "schedule", "masked"]),
        ([-9, -4, -1], ["warmup", "masked", "masked", "schedule"]),
    ],
)
def test_compute_steps_of_a_longer_schedule_are_left_out(steps, expected):
    pipe = apply_cache_on_pipe(Pipe(), residual_diff_threshold=0.1, adapter=ADAPTER, compute_steps=steps)
    outputs = pipe([1.0, 2.0, 3.0, 4.0])
    assert verdicts(cache_report(pipe)) == expected
    computed = [row.verdict.name != "MASKED" for row in cache_report(pipe).rows]
    for out, exact, is_computed in zip(outputs, Pipe()([1.0, 2.0, 3.0, 4.0]), computed, strict=True):
        assert torch.equal(out, exact) == is_computed


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([4, 9], "compute_steps .*4, 9.* 0 to 3"),
        ([-5], "compute_steps .*-5.* 0 to 3"),
        ([True, False], "compute_steps .*2 .*4 steps"),
    ],
)
def test_compute_steps_outside_schedule_raise(steps, message):
    pipe = apply_cache_on_pipe(Pipe(), residual_diff_threshold=0.1, adapter=ADAPTER, compute_steps=steps)
    with pytest.raises(ValueError, match=message):
        pipe([1.0] * 4)
    assert pipe.transformer.counts() == [0] * 4


@pytest.mark.sample(1)
@IN_GRAPHS_TOO
def test_of_each_branch_at_most_max_hits_are_skipped(run):
    first = {"cond": [1.0] * 6, "uncond": [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]}
    _, report = run(first, max_hits=3, max_consecutive_hits=2)
    assert verdicts(report, "cond") == ["warmup", "hit", "hit", "limit", "hit", "limit"]
    assert verdicts(report, "uncond") == ["warmup", "miss", "hit", "hit", "limit", "hit"]
    _, report = run([1.0] * 4, max_hits=0)
    assert verdicts(report) == ["warmup", *["limit"] * 3]


def test_options_may_differ_for_one_of_several_transformers():
    pipe = PIPELINES["wan 2.2"].build()
    options = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 1}
    other = {"compute_steps": range(8), "max_consecutive_hits": None, "forecast_order": 0}
    apply_cache_on_pipe(pipe, **options, per_transformer={"transformer_2": other})
    pipe(**PIPELINES["wan 2.2"].call(num_inference_steps=8))
    report = cache_report(pipe)
    decisions = verdicts(report, "cond")
    changed = decisions.index("schedule")
    assert 1 < changed < 7
    # The second transformer begins where the first one ends, and has no stored residuals.
    assert decisions[: changed - 1] == ["warmup", *["hit", "limit"] * 4][: changed - 1]
    assert decisions[changed - 1 :] == ["warmup", *["schedule"] * (8 - changed)]
    assert report.forecast == "taylor 1 and taylor 0"
    with pytest.raises(ValueError, match=r"transformer_3.*has transformer, transformer_2"):
        apply_cache_on_pipe(pipe, per_transformer={"transformer_3": {}})
    with pytest.raises(TypeError, match=r"apply_cache_on_pipe .*'threshold'"):
        apply_cache_on_pipe(pipe, per_transformer={"transformer_2": {"threshold": 0.1}})


def test_foca_follows_a_line_and_half_of_a_curve(run):
    times = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    weights = FOCA.weights(times, torch.tensor(7.0, dtype=torch.float64), torch.tensor(3))
    assert float(weights @ torch.ones(3, dtype=torch.float64)) == pytest.approx(1.0)
    assert float(weights @ times) == pytest.approx(7.0)
    # t^2 at 4, 2, 1 has the slope 6 through two points, and the parabola has the slope 8 at the newest. Heun takes the
    # mean.
    assert float(weights @ times**2) == pytest.approx(16 + 3 * (6 + 8) / 2)
    now = torch.tensor(7.0, dtype=torch.float64)
    assert FOCA.weights(times, now, torch.tensor(2)).tolist() == pytest.approx([2.5, -1.5, 0.0])
    assert FOCA.weights(times, now, torch.tensor(1)).tolist() == [1.0, 0.0, 0.0]
    _, report = run([1.0, 1.0, 2.0, 2.0], {"cond": [4.0, 0.0, 6.0, 0.0]}, forecast="foca")
    assert report.forecast == "foca"


def test_forecast_with_few_points_uses_the_newest():
    times = torch.tensor([3.0, 3.0, 1.0])
    assert forecast_weights(times, torch.tensor(2.0), torch.tensor(3)).tolist() == [1.0, 0.0, 0.0]
    times = torch.tensor([3.0, 1.0, 0.0])
    assert forecast_weights(times, torch.tensor(5.0), torch.tensor(1)).tolist() == [1.0, 0.0, 0.0]
    assert forecast_weights(times, torch.tensor(5.0), torch.tensor(2)).tolist() == [2.0, -1.0, 0.0]


def test_downsample_compares_every_nth_channel(run):
    shapes = []

    def sums(now, before):
        shapes.append(tuple(now.shape))
        return FIRST_BLOCK.sums(now, before)

    rule = Rule("watched", sums, FIRST_BLOCK.difference, source="a test")
    _, report = run([1.0, 1.05], downsample=3, rule=rule)
    assert verdicts(report) == ["warmup", "hit"]
    assert shapes[-1] == (1, 6 * 3)


@pytest.mark.sample(1)
@IN_GRAPHS_TOO
def test_a_policy_decides_in_place_of_the_threshold(run):
    def skip_the_second_half(observation):
        return (
            (observation.step >= observation.num_steps / 2)
            & (observation.difference < 10 * observation.threshold)
            & (observation.hits_in_a_row < 2)
        )

    _, report = run([1.0] * 8, policy=skip_the_second_half)
    assert verdicts(report) == ["warmup", "miss", "miss", "miss", "hit", "hit", "miss", "hit"]


def test_halves_of_batch_are_compared_apart(run):
    adapter = replace(ADAPTER, plan=Plan(inputs={}, outputs={}, joint_order=(), batched={"hidden_states": 0}))
    # The change of both samples together would be below the threshold.
    _, report = run([(1.0, 9.0), (1.05, 9.0), (1.2, 9.0)], size=(2, 6, 8), adapter=adapter)
    assert verdicts(report, "cond/0") == verdicts(report, "cond/1") == ["warmup", "hit", "miss"]
    assert [row.difference for row in report.rows if row.branch == "cond/0"][1:] == pytest.approx([0.05, 0.2])
    assert [row.difference for row in report.rows if row.branch == "cond/1"][1:] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"residual_diff_threshold": -0.1}, ValueError, "residual_diff_threshold .*-0.1; .*0"),
        ({"residual_diff_threshold": "a lot"}, TypeError, "residual_diff_threshold .*'a lot'"),
        ({"residual_diff_threshold": math.nan}, TypeError, "residual_diff_threshold .*nan"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps .*-1; .*0"),
        ({"warmup_steps": 1.5}, TypeError, "warmup_steps .*1.5"),
        ({"max_consecutive_hits": True}, TypeError, "max_consecutive_hits .*True"),
        ({"start": 0.7, "end": 0.2}, ValueError, "start=0.7 .*end=0.2"),
        ({"end": 1.5}, ValueError, "end .*1.5; .*0.0 .*1.0"),
        ({"first_blocks": 0}, ValueError, "first_blocks .*0; .*1"),
        ({"first_blocks": 2, "last_blocks": 2}, ValueError, "4 blocks.*first_blocks=2 .*last_blocks=2"),
        ({"forecast_order": 3}, ValueError, "forecast_order .*3; .*0 .*2"),
        ({"forecast": "taylor"}, ValueError, "forecast .*'taylor'; .*'foca'"),
        ({"forecast": 1}, TypeError, "forecast .*1; .*Forecast"),
        (
            {"forecast": Forecast("mean", 2, mean_of_two, source="a test"), "forecast_order": 1},
            ValueError,
            "forecast_order=1 .*forecast=mean",
        ),
        ({"max_hits": -1}, ValueError, "max_hits .*-1; .*0"),
        ({"compute_steps": 5}, TypeError, "compute_steps .*5; .*bool"),
        ({"compute_steps": []}, TypeError, r"compute_steps .*\[\]"),
        ({"compute_steps": [1, True]}, TypeError, r"compute_steps .*\[1, True\]"),
        ({"compute_steps": [0.5]}, TypeError, r"compute_steps .*\[0\.5\]"),
        (
            {"compute_steps": [1], "warmup_steps": 2},
            ValueError,
            "compute_steps .*warmup_steps",
        ),
        ({"per_transformer": {"transformer_2": {}}}, ValueError, "'transformer_2'; .*Pipe .*transformer"),
        ({"downsample": 0}, ValueError, "downsample .*0; .*1"),
        ({"rule": "magic"}, ValueError, "rule .*'magic'; .*'first_block', 'modulated_input'"),
        (
            {"rule": "modulated_input"},
            ValueError,
            r"modulated_input .*Scripted.*CachedBlocks\(modulated=",
        ),
        (
            {"rule": "modulated_input", "residual_diff_threshold": None},
            ValueError,
            "modulated_input .*residual_diff_threshold",
        ),
        (
            {"rule": "modulated_input", "first_blocks": 2, "adapter": KNOWN_BEFORE},
            ValueError,
            "modulated_input .*first_blocks=2",
        ),
        ({"policy": 3}, TypeError, "policy .*3"),
        ({"per_transformer": {"transformer": 5}}, TypeError, "per_transformer .*5}; .*'transformer'"),
        ({"per_transformer": "transformer"}, TypeError, "per_transformer .*'transformer'; .*dict"),
        ({"per_transformer": 0}, TypeError, "per_transformer .*0; .*dict"),
    ],
)
def test_bad_options_raise_and_keep_the_earlier_cache(options, error, message):
    pipe = Pipe()
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.1, adapter=ADAPTER)
    with pytest.raises(error, match=message):
        apply_cache_on_pipe(pipe, **{"residual_diff_threshold": 0.5, "adapter": ADAPTER, **options})
    pipe([1.0, 1.05, 1.2])
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "miss"]


@pytest.mark.parametrize(
    "option",
    [{"always_compute_last": True}, {"start": 0.2}, {"end": 0.5}, {"forecast_order": 1}, {"compute_steps": (1,)}],
)
def test_options_that_need_a_schedule_raise_without_one(option):
    pipe = Pipe(scheduler=None)
    with pytest.raises(ValueError, match=rf"{next(iter(option))} .*scheduler.* Pipe "):
        apply_cache_on_pipe(pipe, residual_diff_threshold=0.1, adapter=ADAPTER, **option)


@pytest.mark.parametrize(
    "option",
    [{"always_compute_last": True}, {"start": 0.2}, {"end": 0.5}, {"forecast_order": 1}, {"compute_steps": (1,)}],
)
def test_schedule_options_raise_on_transformer_alone(option):
    with pytest.raises(
        ValueError,
        match=re.escape(f"{next(iter(option))}={next(iter(option.values()))} ") + ".*apply_cache_on_pipe",
    ):
        apply_cache_on_transformer(Scripted(), residual_diff_threshold=0.1, adapter=ADAPTER, **option)


def test_a_transformer_alone_may_be_cached():
    model = apply_cache_on_transformer(Scripted(), adapter=ADAPTER, rule="first_block", warmup_steps=1)
    assert cache_options(model).residual_diff_threshold == ADAPTER.threshold
    with torch.no_grad():
        for _ in range(2):
            model(torch.ones(1, 6, 8), torch.zeros(1, 3, 8), torch.tensor([1.0, 2.0]))
    assert verdicts(model_cache_report(model)) == ["warmup", "hit"]
    with pytest.raises(TypeError, match=r"Scripted\b.*CachedBlocks"):
        apply_cache_on_transformer(Scripted())
    with pytest.raises(TypeError, match=r"rule .*3; .*Rule"):
        apply_cache_on_transformer(Scripted(), adapter=ADAPTER, rule=3)


def test_unknown_transformer_asks_for_cached_blocks():
    with pytest.raises(TypeError, match=r"Scripted\b.*CachedBlocks"):
        apply_cache_on_pipe(Pipe())
    with pytest.raises(TypeError, match=r"Pipe.* transformer"):
        apply_cache_on_pipe(Pipe(transformer=None))
    with pytest.raises(ValueError, match=r"Pipe .*apply_cache_on_pipe"):
        cache_report(Pipe())


@pytest.mark.parametrize("apply", [apply_cache, apply_cache_on_pipe, apply_cache_on_transformer])
def test_every_option_is_a_keyword_and_others_raise(apply):
    shown = inspect.signature(apply).parameters
    for field in fields(CacheOptions):
        assert shown[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        if field.name != "residual_diff_threshold":
            assert shown[field.name].default == field.default
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in shown.values())
    assert all(
        re.search(rf"^ +([a-z_]+, )*{field.name}\b", CacheOptions.__doc__, re.M) for field in fields(CacheOptions)
    )
    thing = Pipe() if apply is apply_cache_on_pipe else Scripted()
    argument = {"blocks": BLOCKS} if apply is apply_cache else {"adapter": ADAPTER}
    with pytest.raises(TypeError, match=rf"{apply.__name__} .*'warm_up'.* residual_diff_threshold"):
        apply(thing, **argument, residual_diff_threshold=0.1, warm_up=3)


def test_own_model_needs_a_threshold():
    with pytest.raises(TypeError, match="apply_cache needs residual_diff_threshold="):
        apply_cache(Scripted(), BLOCKS)


def unsure(observation):
    return None


def cautious(observation):
    return observation.difference < observation.threshold and observation.hits_in_a_row < 2


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: apply_cache_on_pipe(Pipe(), adapter=BLOCKS),
            TypeError,
            r"adapter .*CachedBlocks\(.*adapter=Adapter\(transformer='Scripted', pipelines='…', blocks=",
        ),
        (
            lambda: apply_cache_on_transformer(Scripted(), adapter=BLOCKS),
            TypeError,
            r"adapter .*CachedBlocks\(.*Adapter",
        ),
        (lambda: apply_cache_on_pipe(None), TypeError, "got None"),
        (
            lambda: CachedBlocks(BlockGroup(("early",))),
            TypeError,
            r"groups=BlockGroup\(.*CachedBlocks\(\(BlockGroup",
        ),
        (lambda: CachedBlocks([BlockGroup(("early",))]), TypeError, r"groups=\[BlockGroup\(.*tuple"),
        (lambda: CachedBlocks((BlockGroup(("early",)),), conditions="text"), TypeError, r"conditions=\('text',\)"),
        (lambda: BlockGroup("early"), TypeError, r"BlockGroup\(lists='early'\).* lists=\('early',\)"),
        (lambda: BlockGroup(("early",), "hidden_states"), TypeError, r"streams=\('hidden_states',\)"),
        (
            lambda: apply_cache_on_pipe(Pipe(), adapter=ADAPTER, always_compute_last="no"),
            TypeError,
            "always_compute_last .*'no'; .*True .*False",
        ),
        (
            lambda: cache_report(apply_cache_on_pipe(Pipe(), adapter=ADAPTER)).plot("steps.png"),
            ValueError,
            "steps.png",
        ),
    ],
)
def test_bad_input_raises_with_value(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_schedule_defaults_are_accepted_by_transformer():
    model = apply_cache_on_transformer(
        Scripted(), adapter=ADAPTER, always_compute_last=False, start=0.0, warmup_steps=2
    )
    assert cache_options(model).warmup_steps == 2


def test_policy_returning_none_raises(run):
    with pytest.raises(Exception, match=r"policy .*None"):
        run([1.0, 1.0], policy=unsure)


@pytest.mark.parametrize("skips", [False, True])
def test_warning_names_a_policy_with_constant_decisions(skips):
    def constant(observation):
        return skips

    pipe = apply_cache_on_pipe(Pipe(), residual_diff_threshold=0.1, adapter=ADAPTER, policy=constant)
    with pytest.warns(ThresholdWarning, match=r"policy=.*constant") as caught:
        pipe([1.0, 1.0, 1.0])
    assert "residual_diff_threshold" not in str(caught[0].message)


def test_policy_reading_numbers_raises_in_graph():
    pipe = apply_cache_on_pipe(Pipe(), residual_diff_threshold=0.1, adapter=ADAPTER, policy=cautious)
    pipe([1.0, 1.0, 1.0, 1.0])
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "hit", "miss"]
    torch._dynamo.reset()
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"policy=cautious .*& .*\|"):
        pipe([1.0, 1.0])


def test_streams_in_wrong_order_raise(run):
    adapter = replace(ADAPTER, blocks=CachedBlocks((BlockGroup(("early", "late"), STREAMS[::-1]),)))
    with pytest.raises(Exception, match=r"Block .*\('hidden_states', 'encoder_hidden_states'\) .*shapes"):
        run([1.0, 1.0], adapter=adapter)
    single = replace(ADAPTER, blocks=CachedBlocks((BlockGroup(("early", "late")),)))
    with pytest.raises(Exception, match=r"Block .*\('hidden_states',\) .*shapes"):
        run([1.0, 1.0], adapter=single)


# These values were read in the sources that the adapters name.
PUBLISHED = {
    "FluxTransformer2DModel": 0.08,
    "HunyuanVideoTransformer3DModel": 0.06,
    "HunyuanVideoFramepackTransformer3DModel": 0.06,
    "CogVideoXTransformer3DModel": 0.025,
    "MochiTransformer3DModel": 0.035,
}


def test_default_thresholds_are_the_published_ones():
    for adapter in ADAPTERS:
        if adapter.blocks is not None:
            assert adapter.threshold == PUBLISHED.get(adapter.transformer, 0.05)


@pytest.mark.sample(1)
@IN_GRAPHS_TOO
def test_each_sample_is_compared_with_itself(run):
    # The change of both samples together would be a tenth of the threshold at the second step.
    values = [(1.0, 100.0), (1.2, 100.0), (1.25, 101.0), (1.25, 150.0)]
    _, report = run(values, size=(2, 6, 8))
    assert verdicts(report, "cond") == ["warmup", "miss", "hit", "miss"]
    assert [row.samples for row in report.rows] == [
        (None, None),
        pytest.approx((0.2, 0.0), rel=1e-5),
        pytest.approx((0.05 / 1.2, 0.01), rel=1e-4),
        pytest.approx((0.05 / 1.2, 0.5), rel=1e-4),
    ]
    assert [row.difference for row in report.rows[1:]] == [max(row.samples) for row in report.rows[1:]]
    assert [row.held_back_by for row in report.rows] == [(), ("cond sample 0",), (), ("cond sample 1",)]
    assert str(report).splitlines()[2].endswith("cond sample 0")


def test_branches_in_a_batch_have_samples_of_their_own(run):
    adapter = replace(ADAPTER, plan=Plan(inputs={}, outputs={}, joint_order=(), batched={"hidden_states": 0}))
    _, report = run([(1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.5)], size=(4, 6, 8), adapter=adapter)
    assert [row.branch for row in report.rows] == ["cond/0", "cond/1"] * 2
    assert [row.samples for row in report.rows[2:]] == [(0.0, 0.0), (0.0, 0.5)]
    assert {row.held_back_by for row in report.rows[2:]} == {("cond/1 sample 1",)}
