"""``para_core calibrate``: what it finds is what the library finds."""

import json
import logging
import re
import warnings

import pytest

from para_core.cli.app import run

SMALL = ["--size", "64x48", "--steps", "4"]


@pytest.fixture(autouse=True)
def settings_of_this_process():
    with warnings.catch_warnings():
        yield
    logging.disable(logging.NOTSET)


def test_the_threshold_for_so_many_computed_steps_is_found_and_written(tmp_path, capsys):
    path = tmp_path / "found.json"
    wanted = ["--metric", "computed_steps", "--target", "3", "--tries", "3", "--out", str(path)]
    assert run(["calibrate", "--prompt", "a red circle", *SMALL, *wanted]) == 0
    shown = capsys.readouterr().out
    threshold = float(re.search(r"residual_diff_threshold=(\S+) for", shown)[1])
    assert threshold > 0
    assert json.loads(path.read_text())["threshold"] == pytest.approx(threshold, rel=1e-3)


def test_no_prompt_and_an_unknown_metric_are_errors_before_anything_is_loaded(capsys):
    assert run(["calibrate"]) == 2
    assert "Give --prompt TEXT, or --prompts FILE" in " ".join(capsys.readouterr().err.split())
    assert run(["calibrate", "--prompt", "a", "--metric", "beauty"]) == 2
    assert "psnr, ssim, lpips" in capsys.readouterr().err
