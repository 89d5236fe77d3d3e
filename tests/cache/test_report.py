"""Reports and warnings that show a user the decisions of a cache."""

import json
import re
from dataclasses import replace

import pytest

from para_core import apply_cache, model_cache_report, remove_cache, reset_cache
from para_core.adapters import cache_report
from para_core.cache import call_readings
from tests.cache.scripted import BLOCKS, Scripted, cached, call_model
from tests.modes.outcomes import warnings_of


def test_useless_threshold_warns_once_with_range():
    pipe = cached()
    for first, differences in (([1.0, 1.5, 3.0], "from 0.5 to 1"), ([1.0, 1.05, 1.02], "from 0.02 to 0.05")):
        (message,) = warnings_of(lambda: pipe(first))  # noqa: B023
        # The warning points to the line of the user's call.
        assert re.search(rf"{__file__}: .*{differences}, .*residual_diff_threshold is 0.1", message)
        assert warnings_of(lambda: pipe(first)) == []  # noqa: B023
    (message,) = warnings_of(lambda: cached()([1.0, 1.0, 0.0, float("nan"), 1.0, 1.01, 1.5]))
    assert re.search(f"{__file__}: .*not finite", message)
    # The user wants no step to be skipped.
    assert warnings_of(lambda: cached(residual_diff_threshold=0.0)([1.0, 2.0])) == []


def test_a_report_is_read_written_and_plotted(tmp_path):
    pipe = cached(warmup_steps=2)
    assert "no steps yet" in str(cache_report(pipe))
    pipe({"cond": [1.0, 1.0, 1.05, 2.0], "uncond": [5.0, 5.0, 5.0, 5.0]})
    report = cache_report(pipe)
    assert (report.computed, report.hits, len(report.rows)) == (5, 3, 8)
    assert report.seconds > 0
    assert report.differences() == pytest.approx([0.05, 0.0, 1.0, 0.0])

    lines = str(report).splitlines()
    assert lines[0].split() == ["step", "branch", "difference", "threshold", "seconds"]
    assert lines[5].split()[:5] == ["2", "cond", "0.0500", "0.1000", "hit"]
    assert re.search(r"5 of 8 .*3 .*38%.*taylor 1.*first_block", lines[-1])
    assert ["forecast from 2" in line for line in lines[5:9]] == [True, True, False, True]

    report.to_json(tmp_path / "steps.json")
    written = json.loads((tmp_path / "steps.json").read_text())
    assert (written["computed"], written["hits"], written["dropped"]) == (5, 3, 0)
    assert (written["rule"], written["forecast"]) == ("first_block", "taylor 1")
    rows = [row for row in written["rows"] if row["branch"] == "cond"]
    assert rows[0]["difference"] is None
    assert [row["verdict"] for row in rows] == ["warmup", "warmup", "hit", "miss"]
    assert [row["forecast_from"] for row in rows] == [0, 0, 2, 0]

    report.plot(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    figure = report._figure()
    assert [axes.get_title().split(":")[0] for axes in figure.axes] == ["Branch 'cond'", "Branch 'uncond'"]
    (points, computed, others) = (each.get_offsets().tolist() for each in figure.axes[0].collections)
    assert (points, computed, others) == ([[2, pytest.approx(0.05)]], [[3, pytest.approx(1.0)]], [[0, 0], [1, 0]])


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize(
    ("options", "first", "crosses"),
    [
        ({"compute_steps": [0, 2]}, [1.0] * 4, {"skipped without": [1, 3], "computed without": [0, 2]}),
        ({}, [1.0, float("nan"), 1.0, 1.0], {"computed: not finite": [1, 2], "computed without": [0]}),
    ],
)
def test_plot_says_why_a_step_has_no_difference(options, first, crosses):
    pipe = cached(**options)
    pipe(first)
    (axes,) = cache_report(pipe)._figure().axes
    points = {each.get_label(): each.get_offsets()[:, 0].tolist() for each in axes.collections[2:]}
    assert points == {next(x for x in points if x.startswith(label)): steps for label, steps in crosses.items()}
    # The difference of another branch in the batch was not finite.
    rows = [replace(row, difference=0.5) for row in cache_report(pipe).rows]
    assert len(replace(cache_report(pipe), rows=rows)._figure().axes[0].collections) == 2


def test_endless_loop_keeps_last_calls_and_counts_others(monkeypatch, tmp_path):
    monkeypatch.setattr(call_readings, "MOST_READINGS", 5)
    model = apply_cache(Scripted(), BLOCKS, residual_diff_threshold=0.0)
    call_model(model, *range(1, 13))
    report = model_cache_report(model)
    assert (len(report.rows), report.dropped) == (5, 7)
    assert report.seconds == pytest.approx(sum(row.seconds for row in report.rows))
    assert "7 earlier calls" in str(report)
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["dropped"] == 7
    reset_cache(model)
    call_model(model, 1.0, 2.0)
    assert (len(model_cache_report(model).rows), model_cache_report(model).dropped) == (2, 0)
    with pytest.raises(ValueError, match=r"Scripted .*apply_cache\("):
        reset_cache(remove_cache(model))
