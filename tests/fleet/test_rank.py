"""One rank, and its actor as a plain object without Ray: its errors, and the part of the environment that it keeps."""

import contextlib
import os
import threading

import pytest
import torch
import torch.distributed as dist

from para_core.fleet import rank as rank_module
from para_core.fleet.log_relay import Position
from para_core.fleet.pipeline_info import find_tiny_flux
from para_core.fleet.rank import Rank, ReplicaOptions
from para_core.fleet.rank_actor import RankActor
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.launcher.errors import Cancelled
from para_core.progress import logger

SECONDS = 10.0


@contextlib.contextmanager
def environment_restored():
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def make_rank(monkeypatch, outcomes):
    """Return a rank whose requests end with these outcomes, one after the other. An exception is raised, and anything
    else returned.
    """
    remaining = iter(outcomes)

    def generate(*_, **__):
        outcome = next(remaining)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(rank_module, "generate_batch", generate)
    monkeypatch.setattr(rank_module, "build", lambda recipe, encode_first: None)
    return Rank(Recipe(""))


def outcome(rank):
    """Run a request, and return the type and the text of what it raises."""
    try:
        rank.generate_batch([Request({}, seed=0)])
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def test_failed_request_is_answered_on_busy_device(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(torch.cuda, "empty_cache", released.wait)
    rank = make_rank(monkeypatch, [torch.OutOfMemoryError("out of 80 GB")])
    answers = []
    thread = threading.Thread(target=lambda: answers.append(outcome(rank)), daemon=True)
    thread.start()
    thread.join(SECONDS)
    in_time = list(answers)
    released.set()
    thread.join()
    assert in_time == [("OutOfMemoryError", "out of 80 GB")]


def test_request_after_failure_releases_memory_once(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("release"))
    outcomes = [None, ValueError("no"), RuntimeError("no"), None, Cancelled("no"), None]
    rank = make_rank(monkeypatch, outcomes)
    run = rank_module.generate_batch

    def generate(*args, **kwargs):
        calls.append("generate")
        return run(*args, **kwargs)

    monkeypatch.setattr(rank_module, "generate_batch", generate)
    kinds = [outcome(rank) for _ in outcomes]
    assert kinds == [None, ("ValueError", "no"), ("RuntimeError", "no"), None, ("Cancelled", "no"), None]
    first_three = ["generate", "generate", "release", "generate"]
    assert calls == [*first_three, "release", "generate", "generate", "generate"]


TORCHRUN = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
    ),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
)
SLURM = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NNODES",
    "SLURM_JOB_ID",
)
KEPT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "HF_HOME", "RAY_ADDRESS")


@pytest.mark.parametrize("launcher", [TORCHRUN, SLURM])
def test_rank_is_not_the_launcher_process(monkeypatch, launcher):
    at_build = {}
    monkeypatch.setattr(rank_module, "build", lambda recipe, encode_first: at_build.update(os.environ))
    with environment_restored():
        os.environ.update(dict.fromkeys((*launcher, *KEPT), "3"))
        RankActor(Recipe(""), 0, ReplicaOptions()).join("127.0.0.1", 0)
    assert [name for name in launcher if name in at_build] == []
    assert [at_build[name] for name in KEPT] == ["3"] * len(KEPT)


def test_rank_ignores_launcher_local_rank(rank_pool):
    assert rank_pool.run(local_rank_at_build, 2) == [None, None]


def local_rank_at_build():
    # The rank joins its own group, as a fresh actor does.
    index = dist.get_rank()
    ports = [None, None]
    rank = RankActor(Recipe("", timeout=30), index, ReplicaOptions(ranks=2))
    dist.all_gather_object(ports, rank.open_store("127.0.0.1") if index == 0 else 0)
    dist.destroy_process_group()
    at_build = []

    def build(recipe, encode_first):
        assert dist.get_world_size() == 2
        at_build.append(os.environ.get("LOCAL_RANK"))

    with environment_restored(), pytest.MonkeyPatch.context() as patched:
        os.environ["LOCAL_RANK"] = "5"
        patched.setattr(rank_module, "build", build)
        rank.join("127.0.0.1", ports[0])
    return at_build[0]


def test_loading_is_logged_for_the_process_that_asks():
    handlers = list(logger.handlers)
    rank = RankActor(Recipe(str(find_tiny_flux())), 0, ReplicaOptions())
    with environment_restored():
        rank.join("127.0.0.1", 0)
    position, entries = rank.loading_log(Position())
    messages = [entry.message for entry in entries]
    assert "7 components" in messages[0]
    assert sum(message.startswith("loaded component") for message in messages) == 7
    assert rank.loading_log(position)[1] == []
    assert logger.handlers == handlers
