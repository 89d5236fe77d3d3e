"""``para_core calibrate`` finds what the library finds."""

import json
import re

import pytest

from para_core.cli.app import run

SMALL = ["--size", "64x48", "--steps", "4"]


def test_calibrate_writes_threshold_for_computed_steps(tmp_path, capsys):
    path = tmp_path / "found.json"
    wanted = ["--metric", "computed_steps", "--target", "3", "--tries", "3", "--out", str(path)]
    assert run(["calibrate", "--prompt", "a red circle", *SMALL, *wanted]) == 0
    shown = capsys.readouterr().out
    threshold = float(re.search(r"residual_diff_threshold=(\S+) for", shown)[1])
    assert threshold > 0
    assert json.loads(path.read_text())["threshold"] == pytest.approx(threshold, rel=1e-3)


@pytest.mark.parametrize("command", [["calibrate", "--prompt", "a"], ["plan"], ["doctor", "--cpu"]])
def test_unwritable_file_is_refused_at_once(tmp_path, capsys, command):
    for path, message in ((tmp_path / "absent/found.json", "No such file or directory"), (tmp_path, "Is a directory")):
        assert run([*command, "--out", str(path)]) == 1
        assert re.match(rf"error: {re.escape(str(path))} .*{message}.*--out", capsys.readouterr().err)


def test_missing_prompt_and_unknown_metric_are_refused(capsys):
    assert run(["calibrate"]) == 2
    assert re.search(r"--prompt .*--prompts ", capsys.readouterr().err)
    assert run(["calibrate", "--prompt", "a", "--metric", "beauty"]) == 2
    assert "psnr, ssim, lpips" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "-1"], "--seed"),
        (["--seed", str(2**63)], f"--seed is {2**63}; expected"),
        (["--prompts", "prompts.jsonl"], "--prompt and --prompts"),
        (["--tries", "0"], "--tries is 0"),
        (["--target", "nan"], "--target is nan"),
        (["--steps", "0"], "--steps is 0"),
        (["--mesh", "ring=2,ring=3"], "--mesh has two sizes for ring"),
    ],
)
def test_impossible_options_exit_with_2(capsys, options, message):
    assert run(["calibrate", "--prompt", "a", *options]) == 2
    assert message in capsys.readouterr().err
