"""All ranks of a node load a pipeline at once: they get the same images in the host memory of one copy, or all
raise.
"""

import ctypes
import gc
import re
import threading
import time
from pathlib import Path

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a pipeline in the format of published ones, and return its folder."""
    path = tmp_path_factory.mktemp("flux")
    flux_pipe().save_pretrained(path)
    return path


def load(folder, weights, dtype=None):
    mesh = init_context_parallel_mesh("cpu", max_tensor_dim_size=2 if weights == "tensor" else None)
    pipe = from_pretrained_sharded(FluxPipeline, folder, mesh=mesh, weights=weights, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe.text_encoder_2, FSDPModule) == (weights == "fsdp")
    assert dtype is None or {x.dtype for x in pipe.transformer.parameters()} == {dtype}
    shared = pipe(**flux_call())[0]
    whole = FluxPipeline.from_pretrained(folder, dtype=dtype)
    whole.set_progress_bar_config(disable=True)
    for part in (whole.transformer, whole.text_encoder, whole.text_encoder_2):
        for parameter in part.parameters():
            # Weights in the file are not aligned, so kernels would sum in another order.
            parameter.data = parameter.data.clone()
    if weights == "fsdp":
        parallelize_pipe(whole, mesh=mesh)
    return shared, whole(**flux_call())[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("weights", "dtype"), [("fsdp", None), ("fsdp", torch.bfloat16), ("tensor", None)])
def test_pipeline_loaded_in_parts_generates_the_same(rank_pool, folder, weights, dtype):
    for shared, whole in rank_pool.run(load, 2, folder, weights, dtype):
        assert torch.equal(shared, whole) if weights == "fsdp" else relative_error(shared, whole) < 1e-5


def load_stages(folder, dtype):
    mesh = init_context_parallel_mesh("cpu", max_pipe_dim_size=2)
    pipe = from_pretrained_sharded(FluxPipeline, folder, mesh=mesh, weights="stages", dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    whole = FluxPipeline.from_pretrained(folder, dtype=dtype)
    whole.set_progress_bar_config(disable=True)
    for part in (whole.transformer, whole.text_encoder, whole.text_encoder_2):
        for parameter in part.parameters():
            parameter.data = parameter.data.clone()
    with pytest.raises(ValueError, match=r"weights .*'fsdp', .*2 .*'pipe'"):
        from_pretrained_sharded(FluxPipeline, folder, mesh=mesh)
    held = {x.is_meta for x in pipe.transformer.parameters()}, {x.dtype for x in pipe.transformer.parameters()}
    return pipe(**flux_call())[0], whole(**flux_call())[0], held


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_pipeline_loaded_in_stages_generates_the_same(rank_pool, folder, dtype):
    for output, whole, held in rank_pool.run(load_stages, 2, folder, dtype):
        assert torch.equal(output, whole)
        assert held == ({True, False}, {dtype or torch.float32})


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


def load_expecting_an_error(folder, broken_on):
    name = folder / "broken" if dist.get_rank() in broken_on else folder / "whole"
    with pytest.raises(RuntimeError) as error:
        from_pretrained_sharded(FluxPipeline, name, mesh=init_context_parallel_mesh("cpu"))
    return str(error.value)


@pytest.mark.sample(2)
@pytest.mark.parametrize("broken_on", [(1,), (0, 1)])
@pytest.mark.parametrize("how", ["interrupted", "corrupt", "missing"])
def test_a_broken_file_is_an_error_on_every_rank(rank_pool, tmp_path, how, broken_on):
    for kind in ("whole", "broken"):
        flux_pipe().save_pretrained(tmp_path / kind)
    file = tmp_path / "broken/transformer/diffusion_pytorch_model.safetensors"
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2] if how == "interrupted" else b"\xff" * 64 + data[64:])
    for message in rank_pool.run(load_expecting_an_error, 2, tmp_path, broken_on):
        assert message.startswith(f"sequence rank {broken_on[0]}: {tmp_path}/broken ")


def load_incomplete(folder):
    with pytest.raises(RuntimeError) as error:
        from_pretrained_sharded(FluxPipeline, folder, mesh=init_context_parallel_mesh("cpu"))
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no file", r"transformer .*safetensors(?!.*save_pretrained)"),
        (
            "pickled",
            r"transformer .*safetensors.* diffusion_pytorch_model\.bin.*save_pretrained",
        ),
        (
            "no index",
            r"transformer .*diffusion_pytorch_model-00001-of-.* \(\*\.safetensors\.index\.json\)",
        ),
    ],
)
def test_missing_file_is_named_by_its_kind(rank_pool, tmp_path, how, message):
    flux_pipe().save_pretrained(tmp_path, max_shard_size="300KB" if how == "no index" else "1GB")
    part = tmp_path / "transformer"
    if how == "no index":
        (part / "diffusion_pytorch_model.safetensors.index.json").unlink()
    else:
        (part / "diffusion_pytorch_model.safetensors").unlink()
        if how == "pickled":
            (part / "diffusion_pytorch_model.bin").touch()
    for error in rank_pool.run(load_incomplete, 2, tmp_path):
        assert re.search(message, error), error


def load_differing(folder):
    message = r"ranks .*transformer.* rank 0 .* rank 1 "
    with pytest.raises(ValueError, match=message):
        from_pretrained_sharded(FluxPipeline, folder / str(dist.get_rank()), mesh=init_context_parallel_mesh("cpu"))


def test_ranks_that_load_other_models_are_told(rank_pool, tmp_path):
    for rank in (0, 1):
        flux_pipe(transformer=flux_transformer(num_layers=1 + rank)).save_pretrained(tmp_path / str(rank))
    rank_pool.run(load_differing, 2, tmp_path)


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
