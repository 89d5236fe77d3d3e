"""Pipelines that are loaded in parts equal whole ones. If a rank cannot load, shard, or raises, all ranks report it."""

import os
import re
import shutil
import socket
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL, FluxPipeline
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from benchmarks.harness import fake_group
from para_core.adapters import (
    apply_cache_on_pipe,
    from_pretrained_sharded,
    parallelize_pipe,
    parallelize_transformer,
    shard_weights,
    unparallelize_pipe,
    unparallelize_transformer,
)
from para_core.adapters.parallel.load_sharded import _cast_weights, _load_mapped, _move_unsharded
from para_core.adapters.parallel.mapped_files import dtypes_of, files_in, map_each_weight
from para_core.adapters.weights import fsdp_weights, staged_transformer, tensor_weights
from tests.adapters.parallel.unchanged import same_pipe
from tests.rank_pool import heartbeat
from tests.tiny import flux_call, flux_pipe, flux_transformer, relative_error
from tests.weights.hub import REPOSITORY, Hub, asking
from tests.weights.pipes import METHODS, generate, load_whole, make, mesh_of


def on_rank_1(context):
    return context if dist.get_rank() == 1 else nullcontext()


# Each row has a change of the pipe of the second rank, and the message of every rank.
DIFFERING = [
    (lambda pipe: quantize_(pipe.transformer.transformer_blocks, Int8WeightOnlyConfig()), "rank 1: .* Int8Tensor"),
    (lambda pipe: setattr(pipe, "transformer", flux_transformer(num_single_layers=3)), "transformer.* rank 0 .*rank 1"),
    (lambda pipe: pipe.transformer.bfloat16(), r"ranks .*transformer\..* float32, .* rank 1 .* bfloat16, "),
    (lambda pipe: pipe.transformer.proj_out.weight.data.add_(1), r"transformer\.proj_out\.weight: .* rank 1 "),
]


def shard_differing():
    for change, message in DIFFERING:
        heartbeat()
        pipe = flux_pipe()
        if dist.get_rank() == 1:
            change(pipe)
        with pytest.raises(ValueError, match=message):
            shard_weights(pipe, mesh_of({}), components=["transformer"])
        assert not isinstance(pipe.transformer, FSDPModule)
    for kind in (torch.OutOfMemoryError, MemoryError):
        failing = mock.patch.object(fsdp_weights, "shard_blocks", side_effect=kind("no room"))
        message = rf"mesh rank 1: .*{kind.__name__}: no room.* FluxPipeline\.from_pretrained"
        with on_rank_1(failing), pytest.raises(RuntimeError, match=message):
            shard_weights(flux_pipe(), mesh_of({}), components=["transformer"])


FUNCTIONS = {
    "fsdp": (fsdp_weights, "shard_blocks"),
    "tensor": (tensor_weights, "shard_tensors"),
    "stages": (staged_transformer, "free_other_blocks"),
}


def use_after_failure(method):
    """Let sharding fail on rank 1 after its weights have changed. Then use the pipe."""
    module, function = FUNCTIONS[method]
    dims, options = METHODS[method]
    change = getattr(module, function)

    def change_and_fail(*args, **kwargs):
        change(*args, **kwargs)
        raise OSError("disk")

    pipe, mesh = make("flux"), mesh_of(dims)
    group = next(dim for dim in mesh.get_all_groups() if dist.get_world_size(dim) == 2)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    message = r"disk.* Load the pipeline again: FluxPipeline\.from_pretrained"
    with on_rank_1(mock.patch.object(module, function, change_and_fail)), pytest.raises(RuntimeError, match=message):
        parallelize_pipe(pipe, mesh=mesh, timeout=33, **options)
    assert group._get_backend(torch.device("cpu")).options._timeout == timeout
    for use in (
        lambda: generate(pipe, "flux"),
        lambda: pipe.transformer(hidden_states=torch.zeros(1, 4, 16)),
        lambda: parallelize_pipe(pipe, mesh=mesh, **options),
        lambda: shard_weights(pipe, mesh_of({})),
        lambda: unparallelize_pipe(pipe),
        lambda: parallelize_transformer(pipe.transformer, mesh=mesh),
        lambda: unparallelize_transformer(pipe.transformer),
        lambda: generate(FluxPipeline(**pipe.components), "flux"),
    ):
        with pytest.raises(RuntimeError, match=message):
            use()


def settings_after(method, folder):
    """Try calls that would need weights which the other ranks hold, and those that do not."""
    meshes = {name: mesh_of(dims) for name, (dims, _) in METHODS.items()}
    mesh, options, pipe = meshes[method], METHODS[method][1], make("flux")
    parallelize_pipe(pipe, mesh=mesh, text_encoders="fsdp", **options)
    image = generate(pipe, "flux")
    calls = [
        lambda: unparallelize_pipe(pipe),
        lambda: unparallelize_transformer(pipe.transformer),
        lambda: parallelize_pipe(pipe, mesh=mesh, weights="replicate"),
        lambda: parallelize_pipe(pipe, mesh=mesh, text_encoders="replicate"),
        *[partial(parallelize_pipe, pipe, mesh=meshes[name], **METHODS[name][1]) for name in METHODS if name != method],
    ]
    if method != "stages":
        calls += [pipe.transformer.fuse_qkv_projections, lambda: pipe.save_pretrained(folder)]
    with same_pipe(pipe):
        for call in calls:
            with pytest.raises(RuntimeError, match=r"Load the (pipeline|model) again"):
                call()
    assert torch.equal(generate(pipe, "flux"), image)
    # All other options may be replaced, with the same settings of weights and without any.
    for others in ({"text_encoders": "fsdp", **options}, {}):
        parallelize_pipe(pipe, mesh=mesh, vae=True, timeout=77, backend="math", **others)
        assert relative_error(generate(pipe, "flux"), image) < 1e-5
    if method != "stages":
        shard_weights(pipe, mesh, method=method)
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    assert relative_error(generate(pipe, "flux"), image) < 1e-5


def fail_and_change_settings(folder):
    shard_differing()
    for method in METHODS:
        heartbeat()
        use_after_failure(method)
        settings_after(method, folder)


@pytest.mark.filterwarnings("ignore:the cache of the")
def test_failed_sharding_is_an_error_on_all_and_needs_another_load(rank_pool, tmp_path):
    rank_pool.run(fail_and_change_settings, 2, tmp_path)


# -- All ranks of a node load a pipeline at once: they share one copy in host memory, or all raise.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save a pipeline in the format of published ones, and return its folder."""
    path = tmp_path_factory.mktemp("flux")
    flux_pipe().save_pretrained(path)
    # A folder that the index does not name is not loaded.
    shutil.copytree(path / "vae", path / "vae_decoder", ignore=shutil.ignore_patterns("*.safetensors"))
    return path


def test_each_weight_has_its_own_mapping_unless_the_loader_changed_it(folder):
    pipe = _load_mapped(FluxPipeline, folder, {})
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    pages = [line[0].split("-") for line in lines if line[-1].endswith(".safetensors")]
    addresses = [x.data_ptr() for x in (*pipe.transformer.parameters(), *pipe.vae.parameters())]
    held = [{start for start, end in pages if int(start, 16) <= x < int(end, 16)} for x in addresses]
    assert all(held) and len(set.union(*held)) == len(addresses)
    bias = pipe.transformer.proj_out.bias
    bias.data = changed = bias.data + 1
    map_each_weight(pipe.transformer, weights_of(folder / "transformer"))
    assert bias.data_ptr() == changed.data_ptr() and torch.utils.deterministic.fill_uninitialized_memory


def load(folder, weights, dtype):
    mesh = mesh_of(METHODS[weights][0])
    # A component of the caller keeps its dtype and its weights, also one that differs from the file in the middle.
    vae = AutoencoderKL.from_pretrained(folder / "vae")
    largest = max(vae.parameters(), key=torch.numel)
    largest.data.view(-1)[largest.numel() // 2] = 7
    pipe = from_pretrained_sharded(FluxPipeline, folder, mesh=mesh, weights=weights, dtype=dtype, vae=vae)
    assert pipe.vae is vae and vae.dtype == torch.float32 and largest.numel() > 4096 and largest.max() == 7
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe.text_encoder_2, FSDPModule) == (weights == "fsdp")
    assert {x.dtype for x in pipe.transformer.parameters()} == {dtype or torch.float32}
    assert any(x.is_meta for x in pipe.transformer.parameters()) == (weights == "stages")
    assert pipe.text_encoder_2.shared.weight is pipe.text_encoder_2.encoder.embed_tokens.weight
    whole = load_whole(FluxPipeline, folder, dtype)
    if weights == "fsdp":
        parallelize_pipe(whole, mesh=mesh)
    if weights == "stages":
        with pytest.raises(ValueError, match=r"weights .*'fsdp', .*2 .*'pipe'"):
            from_pretrained_sharded(FluxPipeline, folder, mesh=mesh)
    out, expected = pipe(**flux_call())[0], whole(**flux_call())[0]
    assert relative_error(out, expected) < 1e-5 if weights == "tensor" else torch.equal(out, expected)
    if weights != "stages":
        # On a mesh of GPUs, what is not sharded must leave host memory, also text encoders that FSDP2 could shard.
        _move_unsharded(pipe, "meta")
        assert all(x.is_meta for x in pipe.vae.parameters())
        assert all(x.is_meta for x in pipe.text_encoder_2.parameters()) == (weights == "tensor")


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [("fsdp", None), ("fsdp", torch.bfloat16), ("tensor", None), ("stages", None)])
def test_pipeline_loaded_in_parts_generates_the_same(rank_pool, folder, case):
    rank_pool.run(load, 2, folder, *case)


# -- Files that cannot be loaded.


def weights_of(part):
    return next(part.glob("*.safetensors"))


def split_without_index(part):
    weights_of(part).unlink()
    flux_transformer().save_pretrained(part, max_shard_size="300KB")
    (part / "diffusion_pytorch_model.safetensors.index.json").unlink()


# Each row has a change of the files, the ranks that load them, and what the message of every rank has.
BROKEN = {
    "interrupted": (lambda part: os.truncate(weights_of(part), 100_000), (1,), r"^mesh rank 1: .*/interrupted "),
    "corrupt": (lambda part: weights_of(part).write_bytes(b"\xff" * 64), (0, 1), r"^mesh rank 0: .*/corrupt "),
    "none": (lambda part: weights_of(part).unlink(), (0, 1), r"transformer .*safetensors(?!.*save_pretrained)"),
    "pickled": (
        lambda part: weights_of(part).rename(part / "diffusion_pytorch_model.bin"),
        (0, 1),
        r"transformer .*safetensors.* diffusion_pytorch_model\.bin.*save_pretrained",
    ),
    "no index": (split_without_index, (0, 1), r"model-00001-of-.* \(\*\.safetensors\.index\.json\)"),
    "smaller": (lambda part: flux_transformer(num_layers=1).save_pretrained(part), (1,), "ranks .*rank 0 .* rank 1 "),
}


def load_broken(whole, folder):
    mesh = mesh_of({})
    for name, (_, ranks, message) in BROKEN.items():
        heartbeat()
        path = folder / name if dist.get_rank() in ranks else whole
        with pytest.raises((RuntimeError, ValueError), match=message):
            from_pretrained_sharded(FluxPipeline, path, mesh=mesh)


def test_files_that_cannot_be_loaded_are_an_error_on_every_rank(rank_pool, folder, tmp_path):
    for name, (change, _, _) in BROKEN.items():
        shutil.copytree(folder, tmp_path / name)
        change(tmp_path / name / "transformer")
    rank_pool.run(load_broken, 2, folder, tmp_path)


@pytest.mark.parametrize(("name", "dtype"), [(None, torch.float32), ("fp16", torch.float16), ("bf16", torch.float32)])
def test_weights_are_mapped_in_the_dtype_of_their_variant(tmp_path, name, dtype):
    part = tmp_path / "transformer"
    part.mkdir()
    for model, count, kind in (("model", 1, torch.float32), ("model.fp16", 3, torch.float16)):
        for shard in range(count):
            save_file({f"weight_{shard}": torch.ones(2, dtype=kind)}, part / f"{model}-{shard}-of-{count}.safetensors")
    assert dtypes_of(files_in([part], name))["transformer"] == dtype


def test_stored_buffers_are_cast_like_weights_and_what_a_class_keeps_in_float32():
    layer, other = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    layer.register_buffer("made", torch.ones(2), persistent=False)
    other.running_mean = layer.running_mean
    wo, tied = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16()
    tied.weight = wo.weight
    model = torch.nn.ModuleDict({"layer": layer, "other": other, "wo": wo, "tied": tied})
    model._keep_in_fp32_modules = ["wo.weight", "bias"]
    _cast_weights(model, torch.float16)
    assert (layer.running_mean.dtype, layer.made.dtype) == (torch.float16, torch.float32)
    assert other.running_mean is layer.running_mean and tied.weight is wo.weight
    assert {(x.dtype, x.requires_grad) for x in (*wo.parameters(), tied.bias)} == {(torch.float32, True)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"torch_dtype": torch.float16}, "torch_dtype.* dtype="),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16'; .*torch.bfloat16"),
        ({"weights": "zero"}, "weights .*'zero'; .*'fsdp', 'tensor' or 'stages'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with fake_group(2), pytest.raises(ValueError, match=message):
        from_pretrained_sharded(FluxPipeline, "anywhere", **options)


def download(endpoint, cache, hosts):
    rank = dist.get_rank()
    with asking(endpoint), mock.patch.object(socket, "gethostname", lambda: hosts[rank]):
        own = cache if hosts[0] == hosts[1] else cache / str(rank)
        from_pretrained_sharded(FluxPipeline, REPOSITORY, mesh=mesh_of({}), cache_dir=own)


@pytest.mark.sample(1)
@pytest.mark.parametrize("hosts", [("here", "here"), ("one", "other")])
def test_each_node_downloads_each_file_once(rank_pool, folder, tmp_path, hosts):
    with Hub(folder) as hub:
        rank_pool.run(download, 2, hub.endpoint, tmp_path, hosts)
    assert "transformer/diffusion_pytorch_model.safetensors" in hub.downloaded
    assert all(hub.downloaded.count(name) == len(set(hosts)) for name in hub.downloaded), hub.downloaded
    # The server has stopped, so only the cache can answer.
    rank_pool.run(download, 2, hub.endpoint, tmp_path, hosts)
    for error in rank_pool.run_expecting_errors(download, 2, hub.endpoint, tmp_path / "empty", hosts):
        assert isinstance(error, RuntimeError)
        assert re.search(rf"mesh rank 0: {REPOSITORY} .*OSError: ", str(error))
