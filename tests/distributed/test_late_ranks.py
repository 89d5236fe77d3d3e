"""Exchanges that wait for ranks that are late, or that never make the call."""

import logging
import re
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from para_core.adapters import parallelize_pipe
from para_core.distributed import late_ranks
from para_core.distributed.agree import agree
from para_core.distributed.mesh import guided_mesh
from tests.tiny import flux_call, flux_pipe


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def logged(function):
    """Return the lines that ``function`` logs about late ranks, and its error."""
    handler, error = Lines(), None
    late_ranks.logger.addHandler(handler)
    try:
        with mock.patch.object(late_ranks, "FIRST_LOOK", 1.5):
            function()
    except RuntimeError as caught:
        error = str(caught)
    finally:
        late_ranks.logger.removeHandler(handler)
    return handler.lines, error


def arrive_late(late, seconds):
    mesh = guided_mesh(init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("ring", "ulysses")))
    if dist.get_rank() in late:
        time.sleep(seconds)
    return logged(lambda: agree({}, mesh, call="the TestPipeline"))


def test_late_ranks_are_logged_by_one_rank_and_then_the_call_goes_on(rank_pool):
    results = rank_pool.run(arrive_late, 4, [1, 2], 3.0)
    assert [error for _, error in results] == [None] * 4
    assert [len(lines) for lines, _ in results] == [1, 0, 0, 0]
    (line,) = results[0][0]
    assert "the TestPipeline" in line
    assert re.search(r"rank 1, rank 2\b", line)
    assert "rank 3" not in line


def test_ranks_on_time_log_nothing(rank_pool):
    assert rank_pool.run(arrive_late, 2, [1], 0.5) == [([], None)] * 2


def call_on_one_rank(kind):
    """Make a call on rank 0 only, while rank 1 lives on. Return the lines logged there and the error."""
    ranks = dist.new_group(timeout=timedelta(seconds=5))
    options = {
        "vae": {"vae": True},
        "encode_prompt": {"text_encoders": "fsdp"},
        "first": {"vae_placement": "first", "vae": False},
    }
    pipe = parallelize_pipe(flux_pipe(shared_parts=False), mesh=ranks, timeout=5.0, **options.get(kind, {}))
    latents = torch.zeros(1, 4, 8, 8)
    calls = {
        "pipeline": lambda: pipe(**flux_call()),
        "vae": lambda: pipe.vae.decode(latents),
        "first": lambda: pipe.vae.decode(latents),
        "encode_prompt": lambda: pipe.encode_prompt("a cat", "a cat"),
    }
    if dist.get_rank() == 1:
        time.sleep(9)
        return None
    return logged(calls[kind])


@pytest.mark.parametrize(
    ("kind", "name"),
    [("pipeline", "FluxPipeline"), ("vae", "AutoencoderKL"), ("first", "pipe.vae"), ("encode_prompt", "CLIPTextModel")],
)
def test_call_on_one_rank_names_the_absent_ranks(rank_pool, kind, name):
    (lines, error), _ = rank_pool.run(call_on_one_rank, 2, kind)
    for text in (lines[0], error):
        assert name in text
        assert "rank 1" in text
