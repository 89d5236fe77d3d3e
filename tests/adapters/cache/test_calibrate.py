"""calibrate_cache finds the threshold for a target and sets it. After an error the pipe is as before."""

import json
import math
import sys
import types
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torch._dynamo.testing import CompileCounterWithBackend

from para_core.adapters import apply_cache_on_pipe, cache_report, calibrate_cache, parallelize_pipe
from para_core.adapters.cache.calibration.image_metrics import as_images, load_metric
from para_core.adapters.cache.generation import caching_of
from tests.tiny import cpu_mesh, flux_pipe, flux_transformer
from zoo.tiny.pipelines import PIPELINES

pytestmark = pytest.mark.slow

PROMPTS = ["a large red circle at the top left, on white", "a small blue square at the bottom, on grey"]
CALL = {"height": 72, "width": 56, "num_inference_steps": 6, "max_sequence_length": 13}


def calibrate(pipe, prompts=PROMPTS, **options):
    return calibrate_cache(pipe, prompts, **{"progress": False, **CALL, **options})


def generate(pipe, seed, **options):
    return pipe(generator=torch.Generator().manual_seed(seed), output_type="np", **CALL, **options).images


class BlockClock:
    """A stand-in for ``time`` in which each computed block takes a second."""

    def __init__(self, pipe):
        self.seconds = 0.0
        for block in [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]:
            block.register_forward_hook(self._count)

    def _count(self, *call):
        self.seconds += 1.0

    def perf_counter(self):
        return self.seconds


def test_calibration_keeps_largest_threshold_of_a_quality():
    pipe = flux_pipe()
    uncached = [generate(pipe, 5 + i, prompt=prompt) for i, prompt in enumerate(PROMPTS)]
    calibration = calibrate(pipe, target=30.0, seed=5)
    chosen = calibration.chosen
    assert chosen.metrics["psnr"] >= 30.0
    assert 2 < chosen.computed < chosen.steps == 2 * CALL["num_inference_steps"]
    assert all(row.metrics["psnr"] < 30.0 for row in calibration.rows if row.threshold > calibration.threshold)
    assert calibration.rows[0].threshold == 0.0
    assert calibration.rows[0].metrics["psnr"] == math.inf
    assert len(calibration.rows) <= 9

    computed, error = 0, 0.0
    for i, prompt in enumerate(PROMPTS):
        error += np.square(generate(pipe, 5 + i, prompt=prompt) - uncached[i]).mean() / 2
        computed += cache_report(pipe).computed
        assert cache_report(pipe).rows[0].threshold == calibration.threshold
    assert computed == chosen.computed
    assert chosen.metrics["psnr"] == pytest.approx(-10 * math.log10(error), rel=1e-4)


def test_the_smallest_threshold_that_is_fast_enough_is_found(monkeypatch):
    pipe = flux_pipe()
    monkeypatch.setattr("para_core.adapters.cache.calibration.calibrate.time", BlockClock(pipe))
    calibration = calibrate(pipe, target=1.8, metric="speedup")
    assert calibration.seconds == 4 * 6
    for row in calibration.rows:
        assert row.metrics["speedup"] == pytest.approx(4 * row.steps / (4 * row.computed + row.steps - row.computed))
    assert calibration.chosen.metrics["speedup"] >= 1.8
    assert all(row.metrics["speedup"] < 1.8 for row in calibration.rows if row.threshold < calibration.threshold)
    # The next smaller threshold computes one step more, so no whole number of steps is nearer to the target.
    less = [row.computed for row in calibration.rows if row.threshold < calibration.threshold]
    assert min(less) - calibration.chosen.computed <= 1


@pytest.mark.long
def test_calibration_finds_smallest_threshold_for_computed_steps(monkeypatch):
    class Jumping:
        """A stand-in for ``time`` whose values carry no information."""

        def __init__(self):
            self.ticks = iter([7.0, 1.0, 30.0, 2.0] * 1000)

        def perf_counter(self):
            return next(self.ticks)

    expected = calibrate(flux_pipe(), computed_steps=4)
    monkeypatch.setattr("para_core.adapters.cache.calibration.calibrate.time", Jumping())
    pipe = flux_pipe()
    calibration = calibrate(pipe, computed_steps=4)
    assert calibration.threshold == expected.threshold
    # The metric is the average over the two prompts.
    assert calibration.chosen.metrics["computed_steps"] == calibration.chosen.computed / 2 <= 4
    assert all(row.computed > 2 * 4 for row in calibration.rows if row.threshold < calibration.threshold)
    # The search also tried thresholds other than the one that skips nothing.
    assert sum(row.threshold < calibration.threshold for row in calibration.rows) > 1
    assert f"{calibration.threshold:.4g}" in str(calibration).splitlines()[-1]
    with pytest.raises(ValueError, match=r"computed_steps ≤ 1: .*\d"):
        calibrate(apply_cache_on_pipe(pipe, warmup_steps=3), PROMPTS[0], computed_steps=1, tries=3)


def test_calibration_curve_is_printed_plotted_and_written(tmp_path):
    calibration = calibrate(flux_pipe(), PROMPTS[0], metric="ssim", target=0.5, thresholds=[1e3, 0.5, 0.8])
    assert [row.threshold for row in calibration.rows] == [0.0, 0.5, 0.8, 1e3]
    assert calibration.threshold == 1e3
    assert calibration.rows[0].metrics["ssim"] == pytest.approx(1.0)
    assert all(0.5 <= row.metrics["ssim"] <= 1.0 for row in calibration.rows)
    assert [row.computed for row in calibration.rows] == sorted(
        (row.computed for row in calibration.rows), reverse=True
    )

    printed = str(calibration).splitlines()
    assert printed[-2].startswith("→      1000")
    assert "ssim ≥ 0.5;" in printed[-1]
    calibration.to_json(tmp_path / "curve.json")
    written = json.loads((tmp_path / "curve.json").read_text())
    assert written["threshold"] == 1e3
    assert written["rows"][0]["psnr"] is None
    assert [row["computed"] for row in written["rows"]] == [row.computed for row in calibration.rows]
    calibration.plot(tmp_path / "curve.png")
    with Image.open(tmp_path / "curve.png") as plot:
        assert plot.size == (800, 400)
    figure = calibration._figure()
    figure.canvas.draw()
    assert "ssim" in figure.axes[0].get_title()
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["ssim", "target: ssim ≥ 0.5", "chosen: 1000", "computed steps"]
    assert not any(legend.get_window_extent().overlaps(axes.get_tightbbox()) for axes in figure.axes)


def test_unreachable_target_names_best_and_changes_nothing():
    pipe = flux_pipe()
    cls, transformer_cls = type(pipe), type(pipe.transformer)
    with pytest.raises(ValueError, match=r"psnr ≥ 90 dB: .*\d\d\.\d+ .* 6 steps"):
        calibrate(pipe, PROMPTS[0], target=90.0, tries=2)
    assert (type(pipe), type(pipe.transformer)) == (cls, transformer_cls)

    with pytest.raises(AttributeError):
        calibrate(pipe, PROMPTS[0], target=1.0, generator=5)
    assert caching_of(pipe) is None and type(pipe) is cls

    apply_cache_on_pipe(pipe, residual_diff_threshold=0.1, warmup_steps=6)
    before = caching_of(pipe).caches
    with pytest.raises(ValueError, match=r"threshold .*0 .*psnr ≥ 1 dB"):
        calibrate(pipe, PROMPTS[0], target=1.0)
    assert caching_of(pipe).caches is before
    with pytest.raises(ValueError, match=r"threshold .*5 .*psnr ≥ 1 dB"):
        calibrate(pipe, PROMPTS[0], target=1.0, thresholds=[5.0])
    with pytest.raises(TypeError, match="no_such_argument"):
        calibrate(pipe, PROMPTS[0], target=1.0, no_such_argument=1)
    assert caching_of(pipe).caches is before
    # This is the setting of tests.tiny.
    assert pipe._progress_bar_config == {"disable": True}


def test_the_other_options_of_the_cache_stay():
    pipe = apply_cache_on_pipe(flux_pipe(), residual_diff_threshold=0.0, warmup_steps=3, always_compute_last=True)
    calibration = calibrate(pipe, PROMPTS[0], target=1.0, thresholds=[1e3])
    assert (calibration.chosen.computed, calibration.chosen.steps) == (4, 6)
    threshold, options = caching_of(pipe).thresholds["transformer"], caching_of(pipe).caches["transformer"].options
    assert (threshold, options.warmup_steps, options.always_compute_last) == (1e3, 3, True)


def test_calibration_arguments_may_differ_between_prompts():
    pipe = flux_pipe()
    generator = torch.Generator().manual_seed(3)
    calls = [{"prompt": PROMPTS[0], "generator": generator}, {"prompt": PROMPTS[1], "height": 56}]
    calibration = calibrate(pipe, calls, target=1.0, thresholds=[1e-9, 1e3])
    # Each trial starts from the same noise. Otherwise a threshold that skips nothing would change the image.
    assert calibration.rows[1].metrics["psnr"] == math.inf


def test_frames_of_videos_are_images():
    name = "wan"
    call = {**PIPELINES[name].call(num_inference_steps=3)}
    del call["output_type"]
    call.pop("generator", None)
    calibration = calibrate_cache(PIPELINES[name].build(), [call], target=1.0, thresholds=[1e9], progress=False)
    assert calibration.chosen.metrics["psnr"] > 1.0
    # Each of the three steps runs two branches.
    assert (calibration.chosen.computed, calibration.chosen.steps) == (2, 6)
    assert as_images(np.zeros((2, 9, 48, 80, 3))).shape == (18, 48, 80, 3)
    assert as_images([np.zeros((9, 48, 80, 3))]).shape == (9, 48, 80, 3)


def test_metrics_by_hand():
    generator = torch.Generator().manual_seed(0)
    # Two images have the same size, and one has another.
    references = [torch.rand(2, 16, 24, 3, generator=generator), torch.rand(1, 16, 16, 3, generator=generator)]
    equal = [x.clone() for x in references]
    brighter = [x + 0.1 for x in references]
    psnr, ssim = load_metric("psnr"), load_metric("ssim")
    assert psnr(equal, references) == math.inf
    assert psnr(brighter, references) == pytest.approx(20.0, abs=1e-4)
    # A third of the images changed, so the squared error is a third.
    assert psnr([references[0], brighter[1]], references) == pytest.approx(20.0 + 10 * math.log10(3), abs=1e-4)
    assert ssim(equal, references) == pytest.approx(1.0)
    assert ssim([1 - x for x in references], references) < 0


def test_lpips_is_used_or_its_absence_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(ImportError, match=r"pip install lpips.*metric='ssim' .*metric='psnr'"):
        calibrate(flux_pipe(), target=0.1, metric="lpips")

    def no_weights(**options):
        raise URLError("no route to host")

    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=no_weights))
    with pytest.raises(RuntimeError, match=r"no route to host.*alexnet-owt-7be5be79\.pth .*checkpoints"):
        calibrate(flux_pipe(), target=0.1, metric="lpips")

    class Distance(torch.nn.Module):
        def __init__(self, net, verbose):
            super().__init__()

        def forward(self, x, y):
            assert x.shape == (1, 3, 72, 56)
            return (x - y).abs().mean().view(1, 1, 1, 1)

    monkeypatch.setitem(sys.modules, "lpips", types.SimpleNamespace(LPIPS=Distance))
    calibration = calibrate(flux_pipe(), PROMPTS[0], target=0.5, metric="lpips", thresholds=[0.5, 1e3])
    assert [0.0 <= row.metrics["lpips"] <= 0.5 for row in calibration.rows] == [True] * 3
    assert calibration.threshold == 1e3
    with pytest.raises(ValueError, match=r"lpips ≤ 0: .*0\.\d+ "):
        calibrate(flux_pipe(), PROMPTS[0], target=0.0, metric="lpips", thresholds=[0.8, 1e3])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"metric": "fid"}, r"metric .*'fid'; .*'psnr', 'ssim', 'lpips', 'speedup', 'computed_steps'"),
        ({"metric": "ssim", "target": 1.5}, r"target .*1\.5; .*0 to 1 .*metric='ssim'"),
        ({"target": float("nan")}, r"target .*nan; .*0 to inf"),
        ({"computed_steps": 4}, r"target .*30\.0 .*computed_steps .*4"),
        ({"target": None}, "target .*None .*computed_steps .*None"),
        ({"prompts": []}, "prompts is empty"),
        ({"thresholds": []}, "thresholds is empty"),
        ({"tries": 0}, "tries .*0; .*1"),
        ({"thresholds": [0.1, float("nan")]}, "thresholds .*nan"),
        ({"thresholds": [0.1, -0.5]}, r"thresholds .*-0\.5"),
        ({"thresholds": 0.1}, r"thresholds .*0\.1"),
        ({"thresholds": ["a lot"]}, "thresholds .*'a lot'"),
        ({"target": "high"}, "target .*'high'"),
        ({"tries": "many"}, "tries .*'many'"),
        ({"seed": 0.5}, r"seed .*0\.5"),
        ({"prompts": 5}, "prompts .*5"),
        ({"prompts": ["a circle", 5]}, "prompts .*5"),
        ({"output_type": "pil"}, "output_type .*calibrate_cache"),
    ],
)
def test_bad_arguments_are_errors_before_anything_is_generated(options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        calibrate(flux_pipe(), **{"target": 30.0, **options})


@pytest.mark.long
def test_another_threshold_recompiles_nothing():
    torch._dynamo.reset()
    # The number of graphs does not depend on the backend, and this one is the fastest.
    counter = CompileCounterWithBackend("eager")
    pipe = flux_pipe(transformer=flux_transformer(num_layers=1, num_single_layers=1))
    apply_cache_on_pipe(pipe)
    pipe.transformer = torch.compile(pipe.transformer, backend=counter, fullgraph=True)
    for _ in range(2):
        calibration = calibrate(pipe, PROMPTS[0], target=1.0, thresholds=[0.5, 1e3], num_inference_steps=3)
        # One graph runs without the cache, one in the first call of a cached generation, and one in its other calls.
        assert counter.frame_count == 3
        assert calibration.chosen.computed == 1
    for threshold in (0.7, 0.0):
        apply_cache_on_pipe(pipe, residual_diff_threshold=threshold)
        generate(pipe, 0, prompt=PROMPTS[1])
    assert counter.frame_count == 3


def calibrate_on_rank(shape):
    """Calibrate on ranks whose clocks disagree about which threshold is fast."""
    from unittest import mock

    ring, ulysses, batch = shape
    pipe = flux_pipe()
    parallelize_pipe(pipe, mesh=cpu_mesh(ring, ulysses, batch=batch))
    clock = BlockClock(pipe)
    if torch.distributed.get_rank() > 0:
        clock.perf_counter = lambda: 1000.0 * clock.seconds**3
    guided = {"true_cfg_scale": 2.0, "negative_prompt": ""} if batch > 1 else {}
    with mock.patch("para_core.adapters.cache.calibration.calibrate.time", clock):
        calibration = calibrate(pipe, PROMPTS[0], target=1.8, metric="speedup", **guided)
    threshold = caching_of(pipe).thresholds["transformer"]
    apply_cache_on_pipe(pipe, residual_diff_threshold=calibration.threshold, max_consecutive_hits=2)
    image = generate(pipe, 0, prompt=PROMPTS[0], **guided)
    return calibration, image, threshold


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2)])
def test_ranks_calibrate_by_measurements_of_first_rank(rank_pool, shape):
    (first, image, threshold), (other, same_image, _) = rank_pool.run(calibrate_on_rank, 2, shape=shape)
    assert first == other
    assert threshold == first.threshold
    assert first.chosen.metrics["speedup"] >= 1.8
    assert np.abs(image - same_image).max() < 1e-4
