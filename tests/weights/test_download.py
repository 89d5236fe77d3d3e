"""Pipelines of a stand-in for the Hub: each node downloads once, or every rank raises the same error."""

import socket
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline

from para_core import init_context_parallel_mesh
from para_core.adapters import from_pretrained_sharded, parallelize_pipe
from tests.tiny import flux_call, flux_pipe
from tests.weights.hub import REPOSITORY, Hub, asking


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("published")
    flux_pipe().save_pretrained(path)
    return path


def load(endpoint, folder, cache, hosts=("here", "here"), patience=None, **options):
    mesh = init_context_parallel_mesh("cpu") if patience is None else dist.new_group(timeout=patience)
    rank = dist.get_rank()
    with asking(endpoint), mock.patch.object(socket, "gethostname", lambda: hosts[rank]):
        own = cache if hosts[0] == hosts[1] else cache / str(rank)
        pipe = from_pretrained_sharded(FluxPipeline, REPOSITORY, mesh=mesh, cache_dir=own, **options)
    pipe.set_progress_bar_config(disable=True)
    out = pipe(**flux_call())[0]
    whole = FluxPipeline.from_pretrained(folder)
    whole.set_progress_bar_config(disable=True)
    for part in (whole.transformer, whole.text_encoder, whole.text_encoder_2):
        for parameter in part.parameters():
            # Weights in the file are not aligned, and kernels would then add in another order.
            parameter.data = parameter.data.clone()
    return out, parallelize_pipe(whole, mesh=mesh)(**flux_call())[0]


@pytest.mark.long
@pytest.mark.parametrize("hosts", [pytest.param(("here", "here"), marks=pytest.mark.long), ("one", "other")])
def test_each_node_downloads_each_file_once(rank_pool, folder, tmp_path, hosts):
    with Hub(folder) as hub:
        for out, whole in rank_pool.run(load, 2, hub.endpoint, folder, tmp_path, hosts):
            assert torch.equal(out, whole)
    assert "transformer/diffusion_pytorch_model.safetensors" in hub.downloaded
    assert all(hub.downloaded.count(name) == len(set(hosts)) for name in hub.downloaded), hub.downloaded


@pytest.mark.long
def test_download_may_exceed_group_timeout(rank_pool, folder, tmp_path):
    with Hub(folder, seconds=3.0) as hub:
        rank_pool.run(load, 2, hub.endpoint, folder, tmp_path, patience=timedelta(seconds=2))


@pytest.mark.long
def test_cached_repository_needs_no_connection(rank_pool, folder, tmp_path):
    with Hub(folder) as hub, asking(hub.endpoint):
        FluxPipeline.download(REPOSITORY, cache_dir=tmp_path)
    # The server has stopped, so only the cache can answer.
    rank_pool.run(load, 2, hub.endpoint, folder, tmp_path)
    rank_pool.run(load, 2, hub.endpoint, folder, tmp_path, local_files_only=True)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            rf"sequence rank 0: {REPOSITORY} .*OSError: ",
        ),
        ({"local_files_only": True}, rf"sequence rank 0: {REPOSITORY} .*LocalEntryNotFoundError"),
    ],
)
def test_without_a_connection_every_rank_is_told(rank_pool, folder, tmp_path, options, message):
    with Hub(folder) as hub:
        pass
    errors = rank_pool.run_expecting_errors(load, 2, hub.endpoint, folder, tmp_path, **options)
    for error in errors:
        assert isinstance(error, RuntimeError)
        with pytest.raises(RuntimeError, match=message):
            raise error
