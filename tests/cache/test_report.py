"""Reports, logs and errors that show a user the decisions of a cache."""

import json
import re
import warnings
from dataclasses import replace

import pytest
import torch
from PIL import Image

from para_core import apply_cache, model_cache_report, reset_cache
from para_core.adapters import apply_cache_on_pipe, cache_report
from para_core.cache import call_records
from para_core.plans.plan import Plan
from tests.cache.scripted import ADAPTER, BLOCKS, Pipe, Scripted


def warnings_of(pipe, first):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe(first)
    # Warnings point to the line of the user's call.
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


def cached(**options):
    return apply_cache_on_pipe(Pipe(), **{"residual_diff_threshold": 0.1, "adapter": ADAPTER, **options})


def test_useless_threshold_warns_once_with_range():
    pipe = cached()
    (message,) = warnings_of(pipe, [1.0, 1.5, 3.0])
    assert re.search(r"from 0.5 to 1, .*residual_diff_threshold is 0.1", message)
    assert warnings_of(pipe, [1.0, 1.5, 3.0]) == []
    (message,) = warnings_of(pipe, [1.0, 1.05, 1.02])
    assert re.search(r"from 0.02 to 0.05, .*residual_diff_threshold is 0.1", message)
    assert warnings_of(pipe, [1.0, 1.05, 1.02]) == []


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, [1.0, 1.05, 1.5]),  # Some steps are skipped.
        ({"residual_diff_threshold": 0.0}, [1.0, 2.0]),  # No step may be skipped.
        ({"max_consecutive_hits": 1}, [1.0, 1.0, 1.0]),
        ({"warmup_steps": 3}, [1.0, 2.0, 3.0]),  # Nothing was compared.
    ],
)
def test_good_threshold_does_not_warn(options, first):
    assert warnings_of(cached(**options), first) == []


def test_a_report_is_read_written_and_plotted(tmp_path):
    pipe = cached(warmup_steps=2)
    assert cache_report(pipe).rows == []
    pipe({"cond": [1.0, 1.0, 1.05, 2.0], "uncond": [5.0, 5.0, 5.0, 5.0]})
    report = cache_report(pipe)
    assert (report.computed, report.hits, len(report.rows)) == (5, 3, 8)
    assert report.seconds == pytest.approx(sum(row.seconds for row in report.rows))

    lines = str(report).splitlines()
    assert lines[0].split() == ["step", "branch", "difference", "threshold", "seconds"]
    assert lines[5].split()[:5] == ["2", "cond", "0.0500", "0.1000", "hit"]
    assert re.search(r"5 of 8 .*3 .*38%.*taylor 1.*first_block", lines[-1])
    assert ["forecast" in line and "2" in line.rpartition("forecast")[2] for line in lines[5:9]] == [
        True,
        True,
        False,
        True,
    ]

    report.to_json(tmp_path / "steps.json")
    written = json.loads((tmp_path / "steps.json").read_text())
    assert (written["computed"], written["hits"], written["rule"]) == (5, 3, "first_block")
    assert [row["verdict"] for row in written["rows"] if row["branch"] == "cond"] == ["warmup", "warmup", "hit", "miss"]
    assert written["rows"][0]["difference"] is None
    assert written["forecast"] == "taylor 1"
    assert [row["forecast_from"] for row in written["rows"] if row["branch"] == "cond"] == [0, 0, 2, 0]

    report.plot(tmp_path / "steps.png")
    with Image.open(tmp_path / "steps.png") as image:
        # The plot is not empty for any branch.
        assert image.height >= 500
        assert len(image.convert("RGB").getcolors(1 << 16)) > 20


def test_plots_have_whole_steps_and_legend():
    pipe = cached(warmup_steps=1)
    pipe({"cond": [1.0, 1.0, 1.05, 2.0], "uncond": [5.0, 5.0, 5.0, 5.0]})
    figure = cache_report(pipe)._figure()
    figure.canvas.draw()
    for axes, branch in zip(figure.axes, ("'cond'", "'uncond'"), strict=True):
        assert branch in axes.get_title()
    assert {(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes} == {("step", "first_block")}
    for axes in figure.axes:
        assert all(tick == int(tick) for tick in axes.get_xticks())
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == {
        "skipped",
        "computed",
        "computed without comparison",
        "threshold",
    }
    assert not any(legend.get_window_extent().overlaps(axes.get_tightbbox()) for axes in figure.axes)
    assert not any(axes.get_legend() for axes in figure.axes)


@pytest.mark.filterwarnings("ignore:.*cache ")
def test_seconds_cover_every_call():
    adapter = replace(ADAPTER, plan=Plan(inputs={}, outputs={}, joint_order=(), batched={"hidden_states": 0}))
    values = [(1.0, 9.0), (1.05, 9.0)]
    pipe = apply_cache_on_pipe(Pipe(), residual_diff_threshold=0.1, adapter=adapter)
    pipe({"cond/1": values, "other": values}, size=(2, 6, 8))
    report = cache_report(pipe)
    # Each of four calls runs two branches.
    assert len(report.rows) == 8
    assert report.seconds == pytest.approx(sum(row.seconds for row in report.rows) / 2)
    pipe = cached()
    pipe({"a/1": [1.0, 1.0]})
    assert cache_report(pipe).seconds == sum(row.seconds for row in cache_report(pipe).rows) > 0


def run_by_hand(model, num_calls):
    for call in range(num_calls):
        model(torch.zeros(1, 6, 8), torch.zeros(1, 2, 8), torch.tensor([1.0 + call, 1.0]))


def test_endless_loop_keeps_last_calls_and_counts_others(monkeypatch, tmp_path):
    monkeypatch.setattr(call_records, "MOST_READINGS", 5)
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.0)
    run_by_hand(model, 3)
    assert (len(model_cache_report(model).rows), model_cache_report(model).dropped) == (3, 0)
    run_by_hand(model, 9)
    report = model_cache_report(model)
    assert (len(report.rows), report.dropped) == (5, 7)
    assert report.seconds == pytest.approx(sum(row.seconds for row in report.rows))
    assert "7 earlier calls" in str(report)
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["dropped"] == 7
    reset_cache(model)
    run_by_hand(model, 2)
    assert (len(model_cache_report(model).rows), model_cache_report(model).dropped) == (2, 0)
