"""What an example cannot run ends in a sentence before anything is loaded."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def options_of(folder):
    spec = importlib.util.spec_from_file_location(f"{folder}_options", ROOT / folder / "options.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("folder", "arguments", "message"),
    [
        ("parallel_examples", "--ring 2", "--ring 2 needs ranks: torchrun --nproc_per_node=N"),
        ("parallel_examples", "--batch 2 --ulysses 2", "--batch 2 --ulysses 2 needs ranks"),
        ("parallel_examples", "--steps 0", "--steps is 0; expected a positive integer"),
        ("parallel_examples", "--output nowhere/flux.png", "there is no folder .*nowhere"),
        ("parallel_examples", "--output flux", r"expected a name that ends in \.png or"),
        ("cache_examples", "--steps 0", "--steps is 0; expected a positive integer"),
        ("cache_examples", "--threshold -1", r"--threshold is -1; expected 0 \(skips nothing\) or more"),
        ("cache_examples", "--threshold nan", "--threshold is nan; expected 0"),
        ("cache_examples", "--runs 0", "--runs is 0; expected a positive integer"),
        ("cache_examples", "--output nowhere/flux.png", "there is no folder .*nowhere"),
    ],
)
def test_what_cannot_run_is_a_sentence_before_anything_runs(folder, arguments, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["run_flux.py", *arguments.split()])
    with pytest.raises(SystemExit):
        options_of(folder).parse_options("FLUX", steps=4, height=64, width=64, output="flux.png")
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "needs ranks: torchrun --nproc_per_node=N"),
        ("--steps 0", "--steps is 0; expected a positive integer"),
        ("--weights tensor --tensor 0", "--tensor is 0; expected a positive integer"),
        ("--output nowhere/sharded.png", "its folder does not exist"),
    ],
)
def test_sharding_that_cannot_run_is_a_sentence_before_anything_is_loaded(
    arguments, message, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["run_sharded.py", *arguments.split()])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "parallel_examples/run_sharded.py"))
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_a_ring_under_torchrun_and_an_output_that_can_be_written_are_taken(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    output = str(tmp_path / "flux.gif")
    monkeypatch.setattr(sys, "argv", ["run_wan.py", "--ring", "2", "--output", output])
    options = options_of("parallel_examples").parse_options("Wan", steps=4, frames=5, output="wan.gif")
    assert (options.ring, options.output, options.runs) == (2, output, 1)
