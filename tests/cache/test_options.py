"""The decision and the result of every step, for all options, compared with a plain reference; and what is refused."""

import math
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchHeunDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from para_core import apply_cache, model_cache_report
from para_core.adapters import apply_cache_on_pipe, apply_cache_on_transformer, cache_report
from para_core.adapters.cache.threshold_warnings import warn_of_outcomes
from para_core.cache import registry
from para_core.cache.apply import cache_options
from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.cache.decision import DecisionOutcome, Verdict
from para_core.cache.forecast_rule import Forecast
from para_core.cache.forecasts import FOCA, forecast_weights
from para_core.cache.options import CacheOptions
from para_core.cache.rules import Rule
from para_core.plans.plan import Plan
from tests.cache import scripted
from tests.cache.scripted import ADAPTER, BLOCKS, IN_TWO_STAGES, NUM_BLOCKS, STREAMS, Pipe, Scripted, cached, verdicts
from zoo.tiny.pipelines import PIPELINES

pytestmark = pytest.mark.filterwarnings("ignore::para_core.CacheWarning")


def mean_of_two(times, now, num_residuals):
    assert times.dtype == now.dtype == torch.float64
    both = torch.full_like(times, 0.5)
    return torch.where(num_residuals >= 2, both, torch.tensor([1.0, 0.0], dtype=times.dtype, device=times.device))


def generous(seen):
    """Skip up to twice the threshold: two steps in a row, and any number in the second half of the schedule."""
    return (seen.difference < 2 * seen.threshold) & ((seen.hits_in_a_row < 2) | (2 * seen.step >= seen.num_steps))


MEAN = Forecast("mean", 2, mean_of_two, source="a test")


@dataclass
class Branch:
    """A branch: the values compared at the last computed step, and times and contributions of skippable blocks."""

    calls: int = 0
    hits: int = 0
    in_a_row: int = 0
    compared: np.ndarray | None = None
    stored: list = field(default_factory=list)


def fixed_verdict(options, branch, index, total):
    """Return the verdict that options determine without a comparison; None if the step must be compared."""
    if branch.calls == 0:
        return "warmup"
    steps = options.get("compute_steps")
    if steps is not None:
        if isinstance(steps[0], bool):
            steps = [i for i, computes in enumerate(steps) if computes]
        return "schedule" if index in {i % total for i in steps if -total <= i < total} else "masked"
    if not options.get("start", 0.0) <= index / total < options.get("end", 1.0):
        return "schedule"
    if options.get("always_compute_last") and index == total - 1:
        return "schedule"
    if branch.calls < options.get("warmup_steps", 0):
        return "warmup"
    if branch.in_a_row == options.get("max_consecutive_hits") or branch.hits == options.get("max_hits"):
        return "limit"
    return None


def compared_verdict(options, branch, differences, index, total):
    if not np.isfinite(differences).all():
        return "not_finite"
    largest, threshold = float(differences.max()), options["residual_diff_threshold"]
    if "policy" not in options:
        return "hit" if largest < threshold else "miss"
    seen = SimpleNamespace(difference=largest, threshold=threshold, step=index, num_steps=total)
    seen.hits_in_a_row = branch.in_a_row
    return "hit" if options["policy"](seen) else "miss"


def forecast_at(now, options, stored):
    """Return the contribution of the skipped blocks at the time ``now``."""
    if "forecast" in options:
        return sum(value for _, value in stored[:2]) / len(stored[:2])
    times, values = zip(*stored[: options.get("forecast_order", 1) + 1], strict=True)
    # Neville's scheme evaluates the polynomial through all points.
    for width in range(1, len(times)):
        pairs = [(times[i], times[i + width]) for i in range(len(times) - width)]
        values = [((now - b) * values[i] - (now - a) * values[i + 1]) / (a - b) for i, (a, b) in enumerate(pairs)]
    return values[0]


def expect(pipe_times, options, groups, first, rest):
    """Return the added contribution of each call and sample, the rows of the report, and the calls of each block."""
    outputs, rows, branches = [], [], {name: Branch() for name in first}
    always = 0 if "rule" in options else options.get("first_blocks", 1)
    counts, last, total = np.zeros(NUM_BLOCKS, int), NUM_BLOCKS - options.get("last_blocks", 0), len(pipe_times)
    for index, now in enumerate(pipe_times):
        for number, (name, branch) in enumerate(branches.items()):
            contributions = np.stack([first[name][index]] + [np.divide(rest[name][index], 4)] * 4).astype(np.float32)
            head, middle, tail = (x.sum(0) for x in np.split(contributions, [always, last]))
            compared = contributions[: max(always, 1)].sum(0)
            forecast = middle
            verdict, differences = fixed_verdict(options, branch, index, total), None
            if verdict is None:
                differences = np.abs(compared - branch.compared) / np.abs(branch.compared)
                verdict = compared_verdict(options, branch, differences, index, total)
            skips, known = verdict in ("hit", "masked"), len(branch.stored)
            branch.calls += 1
            if skips:
                forecast = forecast_at(now, options, branch.stored)
                branch.hits, branch.in_a_row = branch.hits + 1, branch.in_a_row + 1
            else:
                branch.in_a_row, branch.compared = 0, compared
                # A residual is a difference, so that of a step that is not finite is not a number.
                branch.stored = [(now, (head + middle - head).astype(float)), *branch.stored]
            counts[:always] += 1
            counts[last:] += 1
            counts[always:last] += not skips
            outputs.append(head + forecast + tail + number + NUM_BLOCKS)
            rows += rows_of(name, index, groups, verdict, differences, known, options, len(compared))
    return outputs, rows, counts.tolist()


def rows_of(name, index, groups, verdict, differences, known, options, samples):
    branches = [f"{name}/{i}" if groups > 1 else name for i in range(groups)]
    each, held = samples // groups, ()
    if verdict == "miss" and "policy" not in options:
        names = [f"{branch} sample {i}" if each > 1 else branch for branch in branches for i in range(each)]
        held = [x for x, d in zip(names, differences, strict=True) if d >= options["residual_diff_threshold"]]
        held = () if len(held) == samples else tuple(held)
    room = 2 if "forecast" in options else options.get("forecast_order", 1) + 1
    used = min(known, room) if verdict in ("hit", "masked") else 0
    parts = [None] * groups if differences is None else np.split(differences, groups)
    return [(index, branch, verdict, held, used, part) for branch, part in zip(branches, parts, strict=True)]


BATCHED = Plan(inputs={}, outputs={}, joint_order=(), batched={"hidden_states": 0})


def finite_or_nan(values):
    return np.where(np.isfinite(values), values, np.nan)


def check(pipe, structure, limits, first, rest, *, is_eager=True):
    """Compare a generation with the reference. ``structure`` has the options that change a graph, ``limits`` others."""
    chosen = {**structure, **limits}
    samples, blocks = chosen.pop("samples"), chosen.pop("blocks")
    guided = chosen.pop("guided") and samples > 1
    modulated = replace(blocks, modulated=lambda _, args: torch.ones_like(args["hidden_states"]) * args["added"][0])
    adapter = replace(ADAPTER, blocks=modulated, plan=BATCHED if guided else None)
    apply_cache_on_pipe(pipe, adapter=adapter, **chosen)
    outputs, report = pipe(first, rest, size=(samples, 6, 8)), cache_report(pipe)
    times = pipe.scheduler.timesteps.tolist()
    with np.errstate(all="ignore"):
        expected, rows, counts = expect(times, chosen, 2 if guided else 1, first, rest)
    assert report.rule == chosen.get("rule", "first_block")
    assert report.forecast == ("mean" if "forecast" in chosen else f"taylor {chosen.get('forecast_order', 1)}")
    # A call with two branches has two rows.
    assert report.seconds == pytest.approx(sum(row.seconds for row in report.rows) / (2 if guided else 1))
    for row, wanted in zip(report.rows, rows, strict=True):
        found = (row.step, row.branch, row.verdict.name.lower(), row.held_back_by, row.forecast_from)
        assert found == wanted[:-1]
        if wanted[-1] is None:
            assert set(row.samples) == {None}
        else:
            assert row.samples == pytest.approx(wanted[-1], rel=1e-6, nan_ok=True)
            assert row.difference == pytest.approx(np.max(wanted[-1]), rel=1e-6, nan_ok=True)
    start = scripted.inputs_of((samples, 6, 8))
    for out, wanted in zip(outputs, expected, strict=True):
        contribution = finite_or_nan((out - start).mean(dim=(1, 2)))
        # Without a forecast all sums of these numbers are exact.
        repeats = chosen.get("forecast_order") == 0 and "forecast" not in chosen
        close = pytest.approx(finite_or_nan(wanted), abs=1e-6 if repeats else 2e-3, rel=1e-5, nan_ok=True)
        assert contribution == close
    if is_eager:
        assert pipe.transformer.counts() == counts


EVENT = st.sampled_from([1.0, 1.0, 1.0, 1.0625, 1.25, 1.5, 4.0, -1.0, 0.0, math.nan, math.inf])


@st.composite
def generations(draw, samples):
    """Draw what the blocks add in a generation of one or two branches, and options that change no graph."""
    total = draw(st.integers(2, 8))
    of_steps = st.lists(st.tuples(*[EVENT] * samples), min_size=total, max_size=total)
    contributions = st.lists(st.tuples(*[st.integers(-4, 8).map(float)] * samples), min_size=total, max_size=total)
    names = ["cond", "uncond"][: draw(st.integers(1, 2))]
    limits = {"residual_diff_threshold": draw(st.sampled_from([0.0, 0.0625, 0.25, 0.25, 0.5, 1e9]))}
    if draw(st.integers(0, 4)) == 0:
        indices = st.lists(st.integers(-total - 2, total + 1), max_size=4)
        bools = st.lists(st.booleans(), min_size=total, max_size=total)
        steps = draw(st.one_of(indices.map(lambda some: [*some, draw(st.integers(-total, total - 1))]), bools))
        limits["compute_steps"] = steps
    else:
        start, end = sorted(draw(st.tuples(*[st.sampled_from([0.0, 0.0, 0.25, 0.3, 0.75, 1.0, 1.0])] * 2)))
        optional = {
            "warmup_steps": st.integers(0, 3),
            "max_consecutive_hits": st.integers(0, 3),
            "max_hits": st.integers(0, 4),
            "always_compute_last": st.booleans(),
            "start": st.just(start),
            "end": st.just(end),
        }
        limits |= draw(st.fixed_dictionaries({}, optional=optional))
    return limits, {name: draw(of_steps) for name in names}, {name: draw(contributions) for name in names}


STRUCTURES = st.fixed_dictionaries(
    {
        "samples": st.sampled_from([1, 2, 4]),
        "guided": st.booleans(),
        "blocks": st.sampled_from([BLOCKS, IN_TWO_STAGES]),
    },
    optional={
        "forecast_order": st.integers(0, 2),
        "forecast": st.just(MEAN),
        "rule": st.just("modulated_input"),
        "first_blocks": st.integers(1, 2),
        "last_blocks": st.integers(0, 2),
        "policy": st.just(generous),
    },
)


@settings(max_examples=150)
@given(data=st.data())
def test_any_options_decide_and_forecast_as_the_reference(data):
    structure = data.draw(STRUCTURES)
    if "forecast" in structure:
        structure.pop("forecast_order", None)
    if "rule" in structure:
        structure.pop("first_blocks", None)
    generation = data.draw(generations(structure["samples"]))
    if "compute_steps" in generation[0]:
        structure.pop("policy", None)
    check(Pipe(), structure, *generation)


@pytest.mark.slow
@pytest.mark.parametrize(
    "structure",
    [
        {"samples": 2, "blocks": IN_TWO_STAGES, "guided": False, "forecast_order": 2},
        {"samples": 2, "blocks": BLOCKS, "guided": True, "rule": "modulated_input", "forecast_order": 0},
        {"samples": 1, "blocks": BLOCKS, "guided": False, "forecast": MEAN, "first_blocks": 2, "last_blocks": 1},
    ],
)
def test_any_numbers_decide_in_one_graph_as_the_reference(structure):
    torch._dynamo.reset()
    pipe, counter = Pipe(), CompileCounterWithBackend("eager")
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=counter)

    @settings(max_examples=25)
    @given(generation=generations(structure["samples"]))
    def check_all(generation):
        check(pipe, structure, *generation, is_eager=False)

    check_all()
    # One graph fills the state, and the other one uses it.
    assert counter.frame_count == 2


def test_two_model_calls_per_timestep_are_two_steps():
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps = lambda sigmas: FlowMatchHeunDiscreteScheduler.set_timesteps(scheduler, 3)
    pipe = cached(Pipe(scheduler=scheduler), always_compute_last=True)
    pipe([1.0, 1.01, 1.5, 1.51, 1.52])
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "miss", "hit", "schedule"]


def test_forecast_with_few_or_equal_times_uses_the_newest():
    for times, now, known, expected in [
        ([3.0, 3.0, 1.0], 2.0, 3, [1.0, 0.0, 0.0]),
        ([3.0, 1.0, 0.0], 5.0, 1, [1.0, 0.0, 0.0]),
        ([3.0, 1.0, 0.0], 5.0, 2, [2.0, -1.0, 0.0]),
        ([3.0, 2.0, 2.0], 5.0, 3, [3.0, -2.0, 0.0]),
        ([5.0, 3.0, 5.0], 1.0, 3, [-1.0, 2.0, 0.0]),
    ]:
        for forecast in (forecast_weights, FOCA.weights):
            weights = forecast(torch.tensor(times), torch.tensor(now), torch.tensor(known))
            assert (weights.dtype, weights.tolist()) == (torch.float64, expected)


def test_own_rule_compares_every_nth_channel():
    rule = Rule("part", lambda now, _: torch.full((1, 1), now.shape[1] / 48), lambda sums: sums[:, 0], source="a test")
    pipe = cached(downsample=3, rule=rule, residual_diff_threshold=1.0)
    pipe([1.0, 5.0])
    assert [row.difference for row in cache_report(pipe).rows] == [None, 3 / 8]
    assert cache_report(pipe).rule == "part"


@pytest.mark.parametrize("name", [pytest.param("wan 2.2", id="WanTransformer3DModel")])
def test_options_may_differ_for_one_of_several_transformers(name):
    pipe = PIPELINES[name].build()
    options = {"residual_diff_threshold": 1e9, "max_consecutive_hits": 1}
    other = {"compute_steps": range(8), "max_consecutive_hits": None, "forecast_order": 0}
    apply_cache_on_pipe(pipe, **options, per_transformer={"transformer_2": other})
    pipe(**PIPELINES[name].call(num_inference_steps=8))
    report = cache_report(pipe)
    decisions = verdicts(report, "cond")
    changed = decisions.index("schedule")
    assert 1 < changed < 7
    # The second transformer begins where the first one ends, and has no stored residuals.
    assert decisions[: changed - 1] == ["warmup", *["hit", "limit"] * 4][: changed - 1]
    assert decisions[changed - 1 :] == ["warmup", *["schedule"] * (8 - changed)]
    assert report.forecast == "taylor 1 and taylor 0"
    with pytest.raises(TypeError, match=r"apply_cache_on_pipe .*'threshold'"):
        apply_cache_on_pipe(pipe, per_transformer={"transformer_2": {"threshold": 0.1}})


KNOWN_BEFORE = replace(ADAPTER, blocks=replace(BLOCKS, modulated=lambda block, arguments: arguments["hidden_states"]))
# tests/test_declared_options.py checks the rules of types and ranges.
BAD_OPTIONS = [
    ({"start": 0.7, "end": 0.2}, ValueError, "start=0.7 .*end=0.2"),
    ({"first_blocks": 4, "adapter": replace(ADAPTER, blocks=IN_TWO_STAGES)}, ValueError, "3 blocks in .* not 4"),
    ({"first_blocks": 3, "last_blocks": 2}, ValueError, "5 blocks.*first_blocks=3 .*last_blocks=2"),
    ({"forecast_order": 3}, ValueError, "forecast_order .*3; .*0 .*2"),
    ({"forecast": "taylor"}, ValueError, "forecast .*'taylor'; .*'foca'"),
    ({"forecast": MEAN, "forecast_order": 1}, ValueError, "forecast_order=1 .*forecast=mean"),
    *[({"compute_steps": x}, TypeError, f"compute_steps .*{re.escape(str(x))}; .*bool") for x in (5, [], [0.5])],
    ({"compute_steps": [1], "warmup_steps": 2}, ValueError, "compute_steps .*warmup_steps"),
    ({"compute_steps": [1], "policy": generous}, ValueError, "compute_steps .*policy"),
    ({"rule": "magic"}, ValueError, "rule .*'magic'; .*'first_block', 'modulated_input'"),
    ({"rule": "modulated_input"}, ValueError, r"modulated_input .*Scripted.*CachedBlocks\(modulated="),
    ({"rule": "modulated_input", "residual_diff_threshold": None}, ValueError, "modulated_input .*residual_diff_"),
    ({"rule": "modulated_input", "first_blocks": 2, "adapter": KNOWN_BEFORE}, ValueError, "first_blocks=2"),
    ({"per_transformer": {"transformer_2": {}}}, ValueError, "'transformer_2'; .*Pipe .*transformer"),
    ({"per_transformer": {"transformer": 5}}, TypeError, "per_transformer .*5}; .*'transformer'"),
    ({"warm_up": 3}, TypeError, "apply_cache_on_pipe .*'warm_up'.* residual_diff_threshold"),
    ({"adapter": BLOCKS}, TypeError, r"adapter .*CachedBlocks\(.*adapter=Adapter\(transformer='Scripted'"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_OPTIONS, ids=[str(list(row[0])) for row in BAD_OPTIONS])
def test_bad_options_raise_and_keep_the_earlier_cache(options, error, message):
    pipe = cached()
    with pytest.raises(error, match=message):
        apply_cache_on_pipe(pipe, **{"residual_diff_threshold": 0.5, "adapter": ADAPTER, **options})
    pipe([1.0, 1.05, 1.2])
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "miss"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("always_compute_last", True), ("start", 0.2), ("end", 0.5), ("forecast_order", 1), ("compute_steps", (1,))],
)
def test_options_that_need_a_schedule_raise_without_one(name, value):
    with pytest.raises(ValueError, match=rf"{name} .*scheduler.* Pipe "):
        cached(Pipe(scheduler=None), **{name: value})
    with pytest.raises(ValueError, match=re.escape(f"{name}={value} ") + ".*apply_cache_on_pipe"):
        apply_cache_on_transformer(Scripted(), residual_diff_threshold=0.1, adapter=ADAPTER, **{name: value})


def test_a_transformer_alone_may_be_cached():
    plain = {"always_compute_last": False, "start": 0.0, "rule": "first_block"}
    model = apply_cache_on_transformer(Scripted(), adapter=ADAPTER, warmup_steps=2, **plain)
    assert cache_options(model).residual_diff_threshold == ADAPTER.threshold
    scripted.call_model(model, 1.0, 1.0, 1.0)
    assert verdicts(model_cache_report(model)) == ["warmup", "warmup", "hit"]
    # Without a schedule the stored residual is added.
    assert model_cache_report(model).forecast == "taylor 0"
    assert cache_report(cached(Pipe(scheduler=None))).forecast == "taylor 0"
    assert cache_report(cached(forecast="foca")).forecast == "foca"
    # A refused change keeps the cache.
    with pytest.raises(ValueError, match="99"):
        apply_cache(model, BLOCKS, residual_diff_threshold=0.1, first_blocks=99)
    assert len(model_cache_report(model).rows) == 3


def cut_tokens_at_first_block():
    pipe = cached()
    pipe.transformer.early[0].register_forward_pre_hook(lambda _, args: (args[0][:, :3], *args[1:]))
    pipe([1.0, 1.0])


def with_a_shared_block():
    pipe = Pipe()
    pipe.transformer.early.append(pipe.transformer.early[0])
    cached(pipe)


def with_blocks(group):
    cached(adapter=replace(ADAPTER, blocks=CachedBlocks((group,))))([1.0, 1.0])


BAD_INPUT = [
    (lambda: apply_cache_on_pipe(Pipe()), TypeError, r"Scripted\b.*CachedBlocks"),
    (lambda: cache_report(Pipe()), ValueError, "Pipe .*apply_cache_on_pipe"),
    (lambda: cache_report(cached()).plot("steps.png"), ValueError, "steps.png"),
    (lambda: apply_cache(Scripted(), BLOCKS), TypeError, "apply_cache needs residual_diff_threshold="),
    (lambda: CachedBlocks(BlockGroup(("early",))), TypeError, r"groups=BlockGroup\(.*CachedBlocks\(\(BlockGroup"),
    (lambda: CachedBlocks(()), ValueError, "at least one BlockGroup"),
    (lambda: CachedBlocks((BlockGroup(("early",)),), conditions="text"), TypeError, r"conditions=\('text',\)"),
    (lambda: BlockGroup("early"), TypeError, r"BlockGroup\(lists='early'\).* lists=\('early',\)"),
    (lambda: BlockGroup(()), ValueError, "at least one list"),
    (lambda: BlockGroup(("early",), ("x",)), ValueError, r"measured is 'hidden_states'.*\('x',\)"),
    (lambda: BlockGroup(("early",), samples=2), ValueError, "samples is 2; expected 0"),
    (with_a_shared_block, ValueError, r"6 in its lists are the same"),
    (lambda: with_blocks(BlockGroup(("middle",), STREAMS)), ValueError, "Scripted has no 'middle'"),
    (lambda: with_blocks(BlockGroup(("early",), ("x",), "x")), ValueError, "Block has no parameter 'x'"),
    (lambda: with_blocks(BlockGroup(("early",), STREAMS[::-1])), ValueError, r"Block .*\('hidden_states', 'en.*shapes"),
    (cut_tokens_at_first_block, ValueError, r"\(1, 6, 8\).*sharded.*hook"),
    (lambda: cached(policy=lambda seen: None)([1.0, 1.0]), TypeError, "policy .*None"),
    (lambda: cached(compute_steps=[4, 9])([1.0] * 4), ValueError, "compute_steps .*4, 9.* 0 to 3"),
    (lambda: cached(compute_steps=[True, False])([1.0] * 4), ValueError, "compute_steps .*2 .*4 steps"),
    (lambda: Forecast("x", 0, mean_of_two, "a test"), ValueError, "num_residuals is 0"),
    (lambda: Rule("x", max, abs, "a test", compares="inputs"), ValueError, "compares is 'inputs'; expected 'residual'"),
    (lambda: cached(rule=Rule("first_block", max, abs, "a test")), ValueError, "rule .* 'first_block'; .*modulated_"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD_INPUT)
def test_bad_input_raises_with_value(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("names", "policy", "patterns"),
    [
        ("", None, ["the last call was given image"]),
        ("WARMUP SCHEDULE REPEATED MASKED LIMIT", None, []),
        ("WARMUP MISS", None, [r"no step: .*0\.04 .*threshold is 0\.1\. Raise"]),
        ("HIT SCHEDULE REPEATED", None, [r"every step .*threshold is 0\.1\. Lower"]),
        ("HIT SCHEDULE REPEATED", generous, [r"every step .*0\.04, and policy=\S*generous decides"]),
        ("HIT LIMIT", None, []),
        ("HIT MISS", None, []),
        ("HIT NOT_FINITE", None, ["difference .*not finite"]),
        ("MISS NOT_FINITE", generous, ["difference .*not finite", r"no step: .*0\.04, and policy=\S*generous decides"]),
    ],
)
def test_warnings_follow_from_the_outcomes(names, policy, patterns):
    outcomes = [DecisionOutcome([0.04], Verdict[name], 0, 1) for name in names.split()]
    threshold = 0.0 if policy else 0.1
    options = CacheOptions(residual_diff_threshold=threshold, policy=policy)
    cache, log = SimpleNamespace(outcomes=outcomes, uncached_by="image", threshold=threshold, options=options), []
    warn_of_outcomes("Pipe", cache, SimpleNamespace(warn=lambda key, text, category: log.append(text)))
    assert len(log) == len(patterns)
    assert all(map(re.search, patterns, log)), log


def test_policy_reading_numbers_raises_in_graph():
    def cautious(observation):
        return observation.difference < observation.threshold and observation.hits_in_a_row < 2

    pipe = cached(policy=cautious)
    pipe([1.0] * 4)
    assert verdicts(cache_report(pipe)) == ["warmup", "hit", "hit", "miss"]
    torch._dynamo.reset()
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"policy=.*cautious .*& .*\|"):
        pipe([1.0, 1.0])


def test_a_copy_without_features_names_what_it_lacks_and_each_is_registered_once(monkeypatch):
    monkeypatch.setattr(registry, "_FEATURES", registry._Features())
    assert registry.order_on_schedule() == 0
    with pytest.raises(ValueError, match=r"forecast_order is 2, .*no forecasts"):
        CacheOptions(residual_diff_threshold=0.1, forecast_order=2)
    with pytest.raises(RuntimeError, match=r"no cache inside compiled graphs.*compile_repeated_blocks"):
        registry.traced_form(None).enter({})
    registry.register_traced_form(lambda cache: cache)
    registry.register_orders(lambda order: MEAN, on_schedule=3)
    assert (registry.traced_form("a cache"), registry.order_on_schedule()) == ("a cache", 3)
    monkeypatch.setitem(registry.FORECASTS, "mean", MEAN)
    with pytest.raises(RuntimeError, match="two features register a cache inside graphs"):
        registry.register_traced_form(lambda cache: cache)
    with pytest.raises(RuntimeError, match="two features register forecasts of an order"):
        registry.register_orders(lambda order: MEAN, on_schedule=1)
    with pytest.raises(ValueError, match="'mean'"):
        registry.register_forecast(MEAN)
