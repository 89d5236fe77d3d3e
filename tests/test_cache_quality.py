"""The parts of benchmarks/cache_quality, on two captions and few steps. They need no peer in addition to diffusers."""

import doctest
from importlib import import_module

import pytest
import torch

from benchmarks.cache import forecasts as cache_forecasts
from benchmarks.cache import ways
from benchmarks.cache.judged import images_of, judge, scenes_of
from benchmarks.cache.quality import psnr_difference
from benchmarks.harness import read_results
from para_core.adapters import cache_report
from para_core.cache.forecasts import FOCA
from zoo.flux import scenes as grammar

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.fixture(scope="module")
def without_cache():
    images, cost = images_of(ways.NO_CACHE, STEPS, 2)
    assert cost["computed"] == [STEPS, STEPS]
    return images


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "way",
    [
        ways.forecast(0.5),
        ways.easy_cache(0.5),
        ways.mag_cache(0.5),
        ways.taylor_seer(2),
        ways.sea_cache(0.9),
    ],
    ids=lambda way: way.cache,
)
def test_each_way_skips_steps_and_generates_nearly_the_same(without_cache, way):
    images, cost = images_of(way, STEPS, 2)
    judged = judge(images, without_cache)
    assert all(2 <= computed < STEPS for computed in cost["computed"])
    assert all(10 < psnr < 100 for psnr in judged["psnr"])


def test_the_counter_agrees_with_the_report():
    pipe, way = ways.load(), ways.ours(0.3)
    _, cost = images_of(way, STEPS, 1)
    way.put(pipe, STEPS)
    ways.generate(pipe, grammar.caption(scenes_of(1)[0]), steps=STEPS, seed=100_000)
    assert cost["computed"] == [cache_report(pipe).computed]


def test_threshold_zero_is_the_image_without_a_cache(without_cache):
    images, cost = images_of(ways.ours(0.0), STEPS, 2)
    judged = judge(images, without_cache)
    assert cost["computed"] == [STEPS, STEPS]
    assert judged["psnr"] == [100.0, 100.0]
    assert judged["ssim"] == [1.0, 1.0]
    assert judged["as without"] == [True, True]


def test_sea_cache_latents_are_the_decoded_ones():
    pipe, tokens = ways.load(), torch.randn(1, 64, 64)
    (latents,) = ways._latents(pipe.transformer, (), {"hidden_states": tokens})
    assert torch.equal(latents[:, 0], pipe._unpack_latents(tokens, 128, 128, pipe.vae_scale_factor)[0])


def test_psnr_difference_is_none_beyond_the_thresholds():
    baseline = [{"computed": [3, 3], "psnr": [20.0, 20.0]}, {"computed": [7, 7], "psnr": [30.0, 30.0]}]
    assert psnr_difference({"computed": [9, 9], "psnr": [30.0, 34.0]}, baseline) is None
    assert psnr_difference({"computed": [5, 5], "psnr": [26.0, 26.0]}, baseline) == [1.0, 0.0]


@pytest.mark.parametrize("name", ["quality", "speed"])
def test_examples_in_docstrings(name):
    results = doctest.testmod(import_module(f"benchmarks.cache.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


def taken_as_equal_steps(forecast, stored, distance):
    """Return ``forecast`` of residuals (newest first), one step apart from each other, ``distance`` steps later."""
    times = -torch.arange(len(stored), dtype=torch.float64)
    now, count = (torch.tensor(x, dtype=torch.float64) for x in (distance, len(stored)))
    return float(forecast.weights(times, now, count) @ torch.tensor(stored, dtype=torch.float64))


def test_foca_equals_its_equations():
    f0, f1, f2 = 3.0, 5.0, -4.0
    for h in (1.0, 3.0):
        predicted = 4 / 3 * f0 - f1 / 3 + 2 * h / 3 * (f0 - f1)  # Equation 7 of the paper.
        ahead = (3 * predicted - 4 * f0 + f1) / (2 * h)  # Equation 6 of the paper.
        behind = (3 * f0 - 4 * f1 + f2) / 2  # Equation 6 of the paper, at the last computed step.
        # Equation 8 of the paper.
        assert taken_as_equal_steps(FOCA, [f0, f1, f2], h) == pytest.approx(f0 + h / 2 * (behind + ahead))
        assert ahead == pytest.approx(f0 - f1)
    times, now = torch.tensor([0.0, -2.0, -3.0]).double(), torch.tensor(5.0).double()
    weights = FOCA.weights(times, now, torch.tensor(2.0).double())
    assert weights.tolist() == pytest.approx([3.5, -2.5, 0.0])


def test_conclusions_of_the_cache_page_follow_from_the_results():
    results = read_results("cache_forecasts")
    rows = {(row["name"], row["threshold"]): row for row in results["forecasts"]["rows"]}
    for threshold in cache_forecasts.THRESHOLDS:
        assert rows["order 0", threshold]["psnr difference from the first"][0] < 0
        mean, error = rows["order 2", threshold]["psnr difference from the first"]
        assert mean < -2 * error if threshold == 0.3 else abs(mean) < 2 * error
        mean, error = rows["FoCa", threshold]["psnr difference from the first"]
        assert abs(mean) < 2 * error if threshold == 0.3 else mean > 2 * error
    for row in results["rules"]["rows"]:
        if "at equal" in row:
            mean, error = row["psnr difference from first_block"]
            # At equal seconds modulated_input is ahead on 8 blocks; on 57 blocks the two would be level.
            assert mean > 2 * error if row["at equal"] == "seconds" else mean > -2 * error
