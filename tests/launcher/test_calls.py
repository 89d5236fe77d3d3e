"""Calls of a launched pipeline: results, random numbers, methods, ``run``, and what the handle refuses."""

import asyncio
import copy
import ctypes
import functools
import os
import re
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed import init_process_group

from para_core import launch
from para_core.launcher.process_group import join_process_group
from para_core.launcher.processes import start_local_ranks
from tests.launcher.loads import images, load_steps, pids


def draws_of_seeds(pipe):
    """Return images of a seed, of generators that go on, and of the default generator, and what each draws next."""
    first = images(pipe, generator=torch.Generator().manual_seed(7))
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    several = images(pipe, generator=generators, num_images_per_prompt=2)
    again = images(pipe, generator=generators[1])
    torch.manual_seed(3)
    return first, several, again, torch.rand(1, generator=generators[0]), images(pipe), images(pipe), torch.rand(3)


def test_images_and_seeds_are_those_of_one_process(flux, alone):
    results = [draws_of_seeds(pipe) for pipe in (flux, alone)]
    for own, expected in zip(*results, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)
    _, several, again, *_ = results[0]
    assert np.abs(several[1] - again[0]).max() > 0.01


def rank_and_sum(pipe, x, *, y):
    return torch.distributed.get_rank(), x + y


def test_methods_run_on_every_rank(steps):
    steps.note("a")
    first, second = steps.run(lambda pipe: pipe.notes, all_ranks=True)
    assert first == second
    assert steps.note("b")[-2:] == ["a", "b"]
    assert steps.this() is steps
    assert "note" in dir(steps)
    assert len({*pids(steps), os.getpid()}) == 3
    rank, total = steps.run(rank_and_sum, torch.ones(3), y=torch.arange(3.0))
    assert (rank, total.tolist()) == (0, [1.0, 2.0, 3.0])
    for inner in (lambda pipe: copy.deepcopy(pipe).decoder_pipe, lambda pipe: pipe._blocks.sub_blocks["denoise"]):
        assert steps.run(lambda pipe, inner: inner(pipe)(1), inner) == {}


def thread_state(pipe):
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.mm(torch.eye(2), torch.eye(2)).dtype


def test_calls_have_the_callers_autocast_and_gradients(steps):
    for context, expected in (
        (torch.enable_grad(), (True, False, torch.float32)),
        (torch.no_grad(), (False, False, torch.float32)),
        (torch.inference_mode(), (False, True, torch.float32)),
        (torch.autocast("cpu", torch.bfloat16), (True, False, torch.bfloat16)),
    ):
        with context:
            assert steps.run(thread_state, all_ranks=True) == [expected] * 2
            assert asyncio.run(steps.call(1, callback_on_step_end=lambda *_: thread_state(None))) == expected
    assert steps.run(thread_state) == (True, False, torch.float32)


# What is done with a handle, the error, and its words. All leave the ranks.
ATTRIBUTE = (AttributeError, r"run\(lambda pipe")
REFUSED = {
    "a property": (lambda pipe: pipe.guidance_scale, *ATTRIBUTE),
    "a new value": (lambda pipe: setattr(pipe, "scheduler", 1), *ATTRIBUTE),
    "a value deleted": (lambda pipe: delattr(pipe, "notes"), *ATTRIBUTE),
    "a handle as argument": (lambda pipe: pipe.run(lambda pipe, handle: None, pipe), TypeError, "cannot be sent"),
    "a result's own error": (lambda pipe: pipe.run(lambda _: ctypes.c_char_p(b"a")), TypeError, "ValueError: ctypes"),
    "launch on ranks": (lambda pipe: pipe.run(lambda _: launch(load_steps, ranks=1)), RuntimeError, "called on a rank"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_handle_refuses_is_named(steps, name):
    use, error, message = REFUSED[name]
    before = pids(steps)
    with pytest.raises(error, match=message):
        use(steps)
    assert pids(steps) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"load": 3}, TypeError, "expected a function"),
        ({"ranks": 0}, ValueError, "at least 1"),
        ({"ranks": 2, "devices": [0]}, ValueError, "one device for each rank"),
        *[({"devices": devices}, TypeError, "expected a list") for devices in ("0,1", {0, 1}, 1.5)],
        *[({"ranks": ranks}, TypeError, f"ranks={ranks}; expected an integer") for ranks in (1.5, True)],
        ({"devices": [0, 1.0]}, TypeError, "devices has 1.0; expected numbers"),
        *[({"devices": [0, name]}, ValueError, f"devices has {name!r}; expected") for name in (-1, "-1", " ")],
        *[({"devices": devices}, ValueError, "has GPU 1 more than once") for devices in ([1, 1], [1, "1"])],
        ({"timeout": 0}, ValueError, "positive"),
        ({"progress": 1}, TypeError, "progress=1; expected True"),
        ({"timeout": "3"}, TypeError, "a number of seconds"),
        ({"env": {"RANK": "5"}}, ValueError, "env has RANK"),
        ({"env": {"A": 1}}, TypeError, "expected strings"),
        ({"ranks": 3, "hosts": 2}, ValueError, "as many ranks on each host"),
        ({"hosts": 2}, ValueError, "without ranks"),
        ({"ranks": 2, "hosts": 2, "devices": [0, 1]}, ValueError, "hosts= with devices="),
    ],
)
def test_invalid_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        launch(**{"load": load_steps, **arguments})


def test_devices_that_are_hidden_or_too_few_are_refused(monkeypatch):
    for visible, gpus in (("", 0), ("-1", 0), ("7,-1,8", 1), ("7", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ValueError, match=rf"CUDA_VISIBLE_DEVICES={visible!r} has {gpus} of them"):
            start_local_ranks(2, [0, 1], {})
    monkeypatch.setattr(os, "environ", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})
    gpus = mock.patch.multiple(torch.cuda, is_available=lambda: True, device_count=lambda: 1)
    with gpus, pytest.raises(ValueError, match="2 ranks on a host with 1 GPUs"):
        join_process_group(0, 2, "localhost", int, None)


def test_launch_under_torchrun_raises(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="rank 1 of 2"):
        launch(load_steps, ranks=1)


def test_options_reach_the_ranks_until_they_are_closed_and_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("SLURM_PROCID", "7")
    seen = []

    def load():
        pipe = load_steps()
        pipe.note(Path("file").read_text())
        # A process group is made already. To make it again does nothing, and to make another is refused.
        torch.distributed.init_process_group("gloo", device_id=torch.device("cpu"))
        try:
            init_process_group("gloo", world_size=3, rank=0, _ranks=[0])
        except ValueError as error:
            pipe.note(str(error))
        return pipe

    options = {"devices": [2, 0], "env": {"OWN": "1"}, "timeout": float("inf")}
    with launch(functools.partial(load), progress=lambda done, total: seen.append((done, total)), **options) as pipe:
        names = ("CUDA_VISIBLE_DEVICES", "OWN", "LOCAL_RANK", "SLURM_PROCID")
        environments = pipe.run(lambda pipe: [os.environ.get(name) for name in names], all_ranks=True)
        assert environments == [["6,4", "1", "0", None], ["6,4", "1", "1", None]]
        pipe(3)
        assert seen == [(1, 3), (2, 3), (3, 3)]
        text, error = pipe.run(lambda pipe: pipe.notes)
        assert text == "here"
        assert "(world_size=3, _ranks=[0]) inside load: launch has made the process group" in error
    monkeypatch.chdir("/")
    for use in (pipe, lambda: pipe.run(lambda pipe: None)):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    pipe.restart()
    assert pipe.run(lambda pipe: pipe.notes[0]) == "here"
    pipe.close()
    pipe.close()


def test_lines_and_bars_are_shown_here(flux_and_lines, capfd):
    pipe, lines = flux_and_lines
    assert re.search(r"loading.* 9\.19 MB(?s:.*)loaded transformer \(6\.34 MB\)", lines)
    for options, shown in (({"desc": "denoising"}, True), ({"disable": True}, False), ({}, True)):
        pipe.set_progress_bar_config(**options)
        if not options:
            pipe.run(lambda pipe: pipe.set_progress_bar_config(desc="denoising", file=sys.stderr))
        images(pipe)
        assert bool(re.search("denoising: 100%.*2/2", capfd.readouterr().err)) == shown


CLASSES = """
from para_core import launch

class Model:
    mode, hits = "slow", 0

    def __call__(self):
        type(self).hits += 1
        return type(self).mode

class Out:
    made = 0

    def __init__(self):
        Out.made += 1

def load():
    Model.mode = "fast"
    return Model()

pipe = launch(load, ranks=1, progress=False)
Out.made = 100
print(pipe(), pipe.run(lambda p: isinstance(p, Model)), pipe(), pipe.run(lambda p: Model.hits))
print(isinstance(pipe.run(lambda p: Out()), Out), Out.made)
"""
BY_NAME = """
import sys
sys.modules["cloudpickle"] = None
from para_core import launch
from collections import Counter
if __name__ == "__main__":
    with launch(Counter, ranks=1, progress=False) as pipe:
        pipe.update("aab")
        print(pipe.most_common(1))
    try:
        launch(lambda: None, ranks=1, progress=False)
    except TypeError as error:
        print("cloudpickle" in str(error))
"""


@pytest.mark.parametrize(
    ("program", "out"),
    [(CLASSES, "fast True fast 2\nTrue 100\n"), (BY_NAME, "[('a', 2)]\nTrue\n")],
    ids=["classes of a script keep their state in each process", "functions by name need no cloudpickle"],
)
def test_programs_launch_what_they_define(start, program, out):
    with start(program) as process:
        shown, err = process.communicate(timeout=120)
    assert (process.returncode, shown) == (0, out), err
