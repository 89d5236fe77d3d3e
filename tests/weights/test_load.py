"""All ranks of a node load a pipeline at once, from a folder or a stand-in for the Hub: they get the same images in the
host memory of one copy, or all raise.
"""

import ctypes
import gc
import re
import shutil
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

from benchmarks.harness import fake_group
from para_core import init_context_parallel_mesh
from para_core.adapters import from_pretrained_sharded, parallelize_pipe
from para_core.adapters.parallel.load_sharded import _dtypes_of, _files_in
from tests.rank_pool import heartbeat
from tests.tiny import flux_call, flux_pipe, flux_transformer, relative_error
from tests.weights.hub import REPOSITORY, Hub, asking
from tests.weights.pipes import METHODS, load_whole, mesh_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a pipeline in the format of published ones, and return its folder."""
    path = tmp_path_factory.mktemp("flux")
    flux_pipe().save_pretrained(path)
    return path


def load(folder, weights, dtype=None):
    mesh = mesh_of(METHODS[weights][0])
    pipe = from_pretrained_sharded(FluxPipeline, folder, mesh=mesh, weights=weights, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe.text_encoder_2, FSDPModule) == (weights == "fsdp")
    assert {x.dtype for x in pipe.transformer.parameters()} == {dtype or torch.float32}
    assert any(x.is_meta for x in pipe.transformer.parameters()) == (weights == "stages")
    whole = load_whole(FluxPipeline, folder, dtype)
    if weights == "fsdp":
        parallelize_pipe(whole, mesh=mesh)
    if weights == "stages":
        with pytest.raises(ValueError, match=r"weights .*'fsdp', .*2 .*'pipe'"):
            from_pretrained_sharded(FluxPipeline, folder, mesh=mesh)
    return pipe(**flux_call())[0], whole(**flux_call())[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        ("fsdp", None),
        ("fsdp", torch.bfloat16),
        ("tensor", None),
        ("stages", None),
        pytest.param("stages", torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_pipeline_loaded_in_parts_generates_the_same(rank_pool, folder, weights, dtype):
    for shared, whole in rank_pool.run(load, 2, folder, weights, dtype):
        assert relative_error(shared, whole) < 1e-5 if weights == "tensor" else torch.equal(shared, whole)


def host_memory():
    """Return the bytes of this process: its own pages, and its share of file pages that other processes map too.

    This is not PSS. Ranks are forked, and when one writes a reference count, a shared page of the interpreter becomes
    its own. That is 8 MB a rank whatever is loaded, and ranks of torchrun have these pages from the start.
    """
    rows = [line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    return 1024 * sum(int(size) for row, size in rows if row in ("Anonymous:", "Pss_File:", "Pss_Shmem:"))


def peak_while_loading(small, large):
    """Return samples of this rank's host memory above its value before loading, with times on a clock that all ranks
    share, and the bytes of the transformer.
    """
    mesh = init_context_parallel_mesh("cpu")
    # The first load does late imports and one-time setup.
    from_pretrained_sharded(FluxPipeline, small, mesh=mesh)
    # Memory that malloc keeps from earlier tests would hide the loaded weights.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, samples, done = host_memory(), [], threading.Event()

    def watch():
        while not done.is_set():
            samples.append((time.monotonic(), host_memory() - before))
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    heartbeat()
    pipe = from_pretrained_sharded(FluxPipeline, large, mesh=mesh)
    heartbeat()
    dist.barrier()
    done.set()
    thread.join()
    return samples, sum(x.numel() * x.element_size() for x in pipe.transformer.parameters())


def most_at_one_time(of_ranks):
    """Return the largest sum over the ranks at any time, with the latest sample of each rank."""
    held, most = [0] * len(of_ranks), 0
    for _, rank, size in sorted((moment, rank, size) for rank, some in enumerate(of_ranks) for moment, size in some):
        held[rank] = size
        most = max(most, sum(held))
    return most


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux' /proc/self/smaps_rollup")
def test_four_loading_ranks_hold_about_one_copy(rank_pool, folder, tmp_path):
    # The model has 290 MB in many blocks. The pages of a block are read before they are freed, and ranks allocate some
    # 4 MB in addition.
    size = {"attention_head_dim": 128, "axes_dims_rope": (32, 48, 48), "num_layers": 1, "num_single_layers": 16}
    transformer = flux_transformer(**size)
    flux_pipe(transformer=transformer).save_pretrained(tmp_path)
    results = rank_pool.run(peak_while_loading, 4, folder, tmp_path)
    assert results[0][1] > 250e6
    most = most_at_one_time([samples for samples, _ in results])
    assert most < 1.2 * results[0][1], most / results[0][1]


# -- Files that cannot be loaded.


def remove(part):
    next(part.glob("*.safetensors")).unlink()


def interrupt(part):
    file = next(part.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def corrupt(part):
    file = next(part.glob("*.safetensors"))
    file.write_bytes(b"\xff" * 64 + file.read_bytes()[64:])


def pickle_instead(part):
    remove(part)
    (part / "diffusion_pytorch_model.bin").touch()


def split_without_index(part):
    flux_transformer().save_pretrained(part, max_shard_size="300KB")
    (part / "diffusion_pytorch_model.safetensors").unlink()
    (part / "diffusion_pytorch_model.safetensors.index.json").unlink()


def narrow(part):
    flux_transformer(num_layers=1).save_pretrained(part)


# Each row has a change of the files, the ranks that load them, and what the message of every rank has.
BROKEN = {
    "interrupted": (interrupt, (1,), r"^sequence rank 1: .*/interrupted "),
    "interrupted on all": (interrupt, (0, 1), r"^sequence rank 0: .*/interrupted on all "),
    "corrupt": (corrupt, (1,), r"^sequence rank 1: .*/corrupt "),
    "missing": (remove, (1,), r"^sequence rank 1: .*/missing "),
    "missing on all": (remove, (0, 1), r"transformer .*safetensors(?!.*save_pretrained)"),
    "pickled": (
        pickle_instead,
        (0, 1),
        r"transformer .*safetensors.* diffusion_pytorch_model\.bin.*save_pretrained",
    ),
    "no index": (
        split_without_index,
        (0, 1),
        r"transformer .*diffusion_pytorch_model-00001-of-.* \(\*\.safetensors\.index\.json\)",
    ),
    "another model": (narrow, (1,), r"ranks .*transformer.* rank 0 .* rank 1 "),
}


def load_broken(whole, folder):
    """Return the message of each row."""
    messages, mesh = {}, init_context_parallel_mesh("cpu")
    for name, (_, ranks, _) in BROKEN.items():
        heartbeat()
        path = folder / name if dist.get_rank() in ranks else whole
        with pytest.raises((RuntimeError, ValueError)) as error:
            from_pretrained_sharded(FluxPipeline, path, mesh=mesh)
        messages[name] = str(error.value)
    return messages


def test_files_that_cannot_be_loaded_are_an_error_on_every_rank(rank_pool, folder, tmp_path):
    for name, (change, _, _) in BROKEN.items():
        shutil.copytree(folder, tmp_path / name)
        change(tmp_path / name / "transformer")
    for messages in rank_pool.run(load_broken, 2, folder, tmp_path):
        wrong = {name: text for name, text in messages.items() if not re.search(BROKEN[name][2], text)}
        assert wrong == {}


@pytest.mark.parametrize(
    ("variant", "dtype"), [(None, torch.float32), ("fp16", torch.float16), ("bf16", torch.float32)]
)
def test_weights_are_mapped_in_the_dtype_of_their_variant(tmp_path, variant, dtype):
    part = tmp_path / "transformer"
    part.mkdir()
    for name, count, kind in (("model", 1, torch.float32), ("model.fp16", 3, torch.float16)):
        for shard in range(count):
            save_file({f"weight_{shard}": torch.ones(2, dtype=kind)}, part / f"{name}-{shard}-of-{count}.safetensors")
    assert _dtypes_of(_files_in(tmp_path, variant))["transformer"] == dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "balanced"}, "device_map"),
        ({"torch_dtype": torch.float16}, "torch_dtype.* dtype="),
        ({"weights": "zero"}, "weights .*'zero'; .*'fsdp', 'tensor' or 'stages'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with fake_group(2), pytest.raises(ValueError, match=message):
        from_pretrained_sharded(FluxPipeline, "anywhere", **options)


# -- A stand-in for the Hub.


def download(endpoint, folder, cache, hosts=("here", "here"), patience=None, **options):
    mesh = init_context_parallel_mesh("cpu") if patience is None else dist.new_group(timeout=patience)
    rank = dist.get_rank()
    with asking(endpoint), mock.patch.object(socket, "gethostname", lambda: hosts[rank]):
        own = cache if hosts[0] == hosts[1] else cache / str(rank)
        pipe = from_pretrained_sharded(FluxPipeline, REPOSITORY, mesh=mesh, cache_dir=own, **options)
    pipe.set_progress_bar_config(disable=True)
    out = pipe(**flux_call())[0]
    return torch.equal(out, parallelize_pipe(load_whole(FluxPipeline, folder), mesh=mesh)(**flux_call())[0])


@pytest.mark.long
@pytest.mark.parametrize("hosts", [("here", "here"), ("one", "other")])
def test_each_node_downloads_each_file_once(rank_pool, folder, tmp_path, hosts):
    # The download takes longer than the time-out of the group.
    with Hub(folder, seconds=3.0 if hosts[0] == "here" else 0.0) as hub:
        patience = timedelta(seconds=2) if hosts[0] == "here" else None
        assert all(rank_pool.run(download, 2, hub.endpoint, folder, tmp_path, hosts, patience))
    assert "transformer/diffusion_pytorch_model.safetensors" in hub.downloaded
    assert all(hub.downloaded.count(name) == len(set(hosts)) for name in hub.downloaded), hub.downloaded
    if hosts[0] == "here":
        # The server has stopped, so only the cache can answer.
        assert all(rank_pool.run(download, 2, hub.endpoint, folder, tmp_path))
        assert all(rank_pool.run(download, 2, hub.endpoint, folder, tmp_path, local_files_only=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "kind"), [({}, "OSError: "), ({"local_files_only": True}, "LocalEntryNotFoundError")]
)
def test_without_a_connection_every_rank_is_told(rank_pool, folder, tmp_path, options, kind):
    with Hub(folder) as hub:
        pass
    for error in rank_pool.run_expecting_errors(download, 2, hub.endpoint, folder, tmp_path, **options):
        assert isinstance(error, RuntimeError)
        assert re.search(rf"sequence rank 0: {REPOSITORY} .*{kind}", str(error))
