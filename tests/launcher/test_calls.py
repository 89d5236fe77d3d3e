"""Calls of a launched pipeline: results, random numbers, methods, ``run``, and what the handle refuses."""

import functools
import os

import numpy as np
import pytest
import torch

from para_core import launch
from tests.launcher.loads import images, load_flux, load_steps, pids


def draws_of_seeds(pipe):
    """Return images of a seed, of generators that go on, and of the default generator, and what each draws next."""
    first = images(pipe, generator=torch.Generator().manual_seed(7))
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    several = images(pipe, generator=generators, num_images_per_prompt=2)
    again = images(pipe, generator=generators[1])
    torch.manual_seed(3)
    by_default = images(pipe), images(pipe), torch.rand(3)
    return first, several, again, torch.rand(1, generator=generators[0]), *by_default


def test_images_and_seeds_are_those_of_one_process(flux, alone):
    results = [draws_of_seeds(pipe) for pipe in (flux, alone)]
    for own, expected in zip(*results, strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)
    first, several, again, *_ = results[0]
    assert np.abs(several[1] - again[0]).max() > 0.01
    assert first.flags.writeable
    first[0, 0, 0] = 0.5


def last_cuda_seed(pipe):
    """Return the seed that waits for CUDA, and whether it is the one of the previous call of this function."""
    from para_core.torch_internals import queued_cuda_seed

    seeding, seed = queued_cuda_seed()
    same = getattr(pipe, "seeding", None) is seeding
    pipe.seeding = seeding
    return seed, same


def test_ranks_seed_cuda_when_this_process_has_seeded_it(steps):
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        steps(1)
        assert steps.run(last_cuda_seed) == (seed, False)
        steps(1)
        assert steps.run(last_cuda_seed) == (seed, True)
    torch.cuda.manual_seed(8)
    steps(1)
    assert steps.run(last_cuda_seed) == (8, False)
    assert not torch.cuda.is_initialized()


def test_methods_run_on_every_rank(steps):
    steps.note("a")
    first, second = steps.run(lambda pipe: pipe.notes, all_ranks=True)
    assert first == second
    assert steps.note("b")[-2:] == ["a", "b"]
    assert steps.this() is steps
    assert "note" in dir(steps)
    assert len({*pids(steps), os.getpid()}) == 3

    def rank_and_sum(pipe, x, *, y):
        import torch.distributed as dist

        return dist.get_rank(), x + y

    (rank, total) = steps.run(rank_and_sum, torch.ones(3), y=torch.arange(3.0))
    assert rank == 0
    assert total.tolist() == [1.0, 2.0, 3.0]
    assert [rank for rank, _ in steps.run(rank_and_sum, 1, y=2, all_ranks=True)] == [0, 1]


@pytest.mark.parametrize(
    "use",
    [
        lambda pipe: pipe.notes,
        lambda pipe: pipe.guidance_scale,
        lambda pipe: pipe.unknown,
        lambda pipe: setattr(pipe, "scheduler", 1),
        lambda pipe: setattr(pipe, "note", 1),
        lambda pipe: delattr(pipe, "notes"),
    ],
)
def test_attributes_are_refused_and_name_run(steps, use):
    with pytest.raises(AttributeError, match=r"run\(lambda pipe"):
        use(steps)


def thread_state(pipe):
    x = torch.ones(2, 2)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (x @ x).dtype


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (torch.enable_grad, (True, False, torch.float32)),
        (torch.no_grad, (False, False, torch.float32)),
        (torch.inference_mode, (False, True, torch.float32)),
        (lambda: torch.autocast("cpu", torch.bfloat16), (True, False, torch.bfloat16)),
    ],
)
def test_calls_have_the_callers_autocast_and_gradients(steps, context, expected):
    with context():
        assert steps.run(thread_state, all_ranks=True) == [expected] * 2
    assert steps.run(thread_state) == (True, False, torch.float32)


class Unsendable:
    def __getstate__(self):
        raise ValueError("its own")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (lambda pipe, handle: None, True, "cannot be sent"),
        (lambda pipe: (x for x in range(3)), False, "cannot be sent"),
        (lambda pipe: Unsendable(), False, "ValueError: its own"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_leaves_the_ranks(steps, function, arguments, message):
    before = pids(steps)
    with pytest.raises(TypeError, match=message):
        steps.run(function, *[steps] * arguments)
    assert pids(steps) == before


def test_progress_function_gets_steps():
    seen = []
    with launch(load_steps, ranks=1, progress=lambda done, total: seen.append((done, total))) as pipe:
        pipe(3)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_lines_and_bars_are_shown_here(capfd):
    def load():
        pipe = load_flux()
        pipe.set_progress_bar_config(desc="denoising")
        return pipe

    with launch(load, ranks=2) as pipe:
        lines = capfd.readouterr().err.splitlines()
        assert any("loading" in line and "9.19 MB" in line for line in lines)
        assert any("loaded transformer (6.34 MB)" in line for line in lines)
        images(pipe)
        bars = capfd.readouterr().err
        pipe.set_progress_bar_config(disable=True)
        images(pipe)
        assert "2/2" not in capfd.readouterr().err
    assert "denoising: 100%" in bars
    assert bars.count("2/2") >= 1


def test_init_process_group_in_load_is_taken_as_done_or_refused():
    def load(**options):
        import torch.distributed as dist

        dist.init_process_group("gloo", **options)
        return lambda: (dist.get_rank(), dist.get_world_size())

    for ranks in (1, 2):
        with launch(load, ranks=ranks, progress=False) as pipe:
            assert pipe() == (0, ranks)
    with pytest.raises(ValueError, match=r"world_size=3.*inside load: launch has made the process group"):
        launch(functools.partial(load, world_size=3, rank=0), ranks=2, progress=False)


CLASSES = """
import dataclasses
from para_core import launch

class Model:
    mode = "slow"
    hits = 0

    def __call__(self):
        type(self).hits += 1
        return type(self).mode

@dataclasses.dataclass
class Point:
    x: int

class Out:
    made = 0

    def __init__(self):
        Out.made += 1

def load():
    Model.mode = "fast"
    return Model()

def make(pipe):
    return Out(), Point(3)

pipe = launch(load, ranks=1, progress=False)
Out.made = 100
print(pipe(), pipe.run(lambda p: isinstance(p, Model)), pipe(), pipe.run(lambda p: Model.hits))
print([type(x).__name__ for x in pipe.run(make)], isinstance(pipe.run(make)[0], Out), Out.made, pipe.run(make)[1].x)
"""


def test_classes_of_a_script_keep_their_state_in_each_process(run):
    assert run(CLASSES)[0] == "fast True fast 2\n['Out', 'Point'] True 100 3\n"


def test_closed_pipeline_raises_until_it_restarts_in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("here")

    def load():
        from pathlib import Path

        text = Path("file").read_text()
        return lambda: text

    with launch(load, ranks=1, progress=False, timeout=float("inf")) as pipe:
        assert pipe() == "here"
    monkeypatch.chdir("/")
    for use in (pipe, lambda: pipe.run(lambda pipe: None)):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    pipe.restart()
    assert pipe() == "here"
    pipe.close()
    pipe.close()


def test_launch_on_a_rank_raises(steps, monkeypatch):
    with pytest.raises(RuntimeError, match="called on a rank"):
        steps.run(lambda pipe: launch(load_steps, ranks=1))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="rank 1 of 2"):
        launch(load_steps, ranks=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"load": 3}, TypeError, "expected a function"),
        ({"ranks": 0}, ValueError, "at least 1"),
        ({"ranks": 1.5}, TypeError, "expected an integer"),
        ({"ranks": True}, TypeError, "expected an integer"),
        ({"ranks": 2, "devices": [0]}, ValueError, "one device for each rank"),
        ({"devices": "0,1"}, TypeError, "expected a list"),
        ({"timeout": 0}, ValueError, "positive"),
        ({"timeout": "3"}, TypeError, "a number of seconds"),
        ({"timeout": None}, TypeError, "a number of seconds"),
        ({"env": {"RANK": "5"}}, ValueError, "env has RANK"),
        ({"env": {"A": 1}}, TypeError, "expected strings"),
    ],
)
def test_invalid_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        launch(**{"load": load_steps, **arguments})


def test_env_and_devices_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("SLURM_PROCID", "7")
    with launch(load_steps, devices=[2, 0], env={"OWN": "1"}, progress=False) as pipe:
        names = ("CUDA_VISIBLE_DEVICES", "OWN", "LOCAL_RANK", "SLURM_PROCID")
        environments = pipe.run(lambda pipe: [os.environ.get(name) for name in names], all_ranks=True)
    assert environments == [["6,4", "1", "0", None], ["6,4", "1", "1", None]]


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


def test_functions_by_name_need_no_cloudpickle(run):
    assert run(BY_NAME)[0] == "[('a', 2)]\nTrue\n"
