"""If a rank cannot shard, raises or dies, the other ranks end and report the cause."""

import os
import re
import signal
import time
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from torch.distributed.fsdp import FSDPModule
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import (
    apply_cache_on_pipe,
    from_pretrained_sharded,
    parallelize_pipe,
    parallelize_transformer,
    shard_weights,
    unparallelize_pipe,
    unparallelize_transformer,
)
from para_core.adapters.weights import fsdp_weights, staged_transformer, tensor_weights
from tests.adapters.parallel.test_undo import same_pipe
from tests.rank_pool import RankPoolError, heartbeat
from tests.tiny import flux_pipe, flux_transformer, relative_error
from tests.weights.pipes import METHODS, generate, make, mesh_of


def quantize_one():
    pipe = flux_pipe()
    if dist.get_rank() == 1:
        quantize_(pipe.transformer.transformer_blocks, Int8WeightOnlyConfig())
    return pipe


def narrow_one():
    return flux_pipe(transformer=flux_transformer(num_single_layers=2 + dist.get_rank()))


def cast_one():
    pipe = flux_pipe()
    if dist.get_rank() == 1:
        pipe.transformer.to(torch.bfloat16)
    return pipe


def seed_one():
    pipe = flux_pipe()
    with torch.no_grad():
        pipe.transformer.proj_out.weight.add_(dist.get_rank())
    return pipe


DIFFERING = [
    (quantize_one, r"sequence rank 1: .* Int8Tensor"),
    (narrow_one, r"ranks .*transformer\..* rank 0 .*rank 1 "),
    (cast_one, r"ranks .*transformer\..* float32, .* rank 1 .* bfloat16, "),
    (seed_one, r"ranks .*transformer\.proj_out\.weight: .* float32, .* rank 1 .* float32, "),
]


def shard_differing():
    for make_one, message in DIFFERING:
        heartbeat()
        pipe = make_one()
        with pytest.raises(ValueError, match=message):
            shard_weights(pipe, mesh_of({}), components=["transformer"])
        assert not isinstance(pipe.transformer, FSDPModule), make_one


def shard_out_of_memory():
    for kind in (torch.OutOfMemoryError, MemoryError):
        failing = mock.patch.object(fsdp_weights, "shard_blocks", side_effect=kind("no room"))
        message = rf"sequence rank 1: .*{kind.__name__}: no room.* FluxPipeline\.from_pretrained"
        on_one_rank = failing if dist.get_rank() == 1 else nullcontext()
        with on_one_rank, pytest.raises(RuntimeError, match=message):
            shard_weights(flux_pipe(), mesh_of({}), components=["transformer"])


@pytest.mark.parametrize("job", [shard_differing, shard_out_of_memory])
def test_rank_that_cannot_shard_is_an_error_on_all(rank_pool, job):
    rank_pool.run(job, 2)


FUNCTIONS = {
    "fsdp": (fsdp_weights, "shard_blocks"),
    "tensor": (tensor_weights, "shard_tensors"),
    "stages": (staged_transformer, "free_other_blocks"),
}


def use_after_failure(method):
    """Let sharding fail on rank 1 after its weights have changed. Return the messages of this and of later calls."""
    module, function = FUNCTIONS[method]
    dims, options = METHODS[method]
    change = getattr(module, function)

    def change_and_fail(*args, **kwargs):
        change(*args, **kwargs)
        raise OSError("disk")

    pipe, mesh = make("flux"), mesh_of(dims)
    group = next(dim for dim in mesh.get_all_groups() if dist.get_world_size(dim) == 2)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    on_one_rank = mock.patch.object(module, function, change_and_fail) if dist.get_rank() == 1 else nullcontext()
    messages = []
    with on_one_rank, pytest.raises(RuntimeError) as caught:
        parallelize_pipe(pipe, mesh=mesh, timeout=33, **options)
    messages.append(str(caught.value))
    assert group._get_backend(torch.device("cpu")).options._timeout == timeout
    for use in (
        lambda: generate(pipe, "flux"),
        lambda: pipe.transformer(hidden_states=torch.zeros(1, 4, 16)),
        lambda: parallelize_pipe(pipe, mesh=mesh, **options),
        lambda: parallelize_pipe(pipe, mesh=mesh),
        lambda: shard_weights(pipe, init_context_parallel_mesh("cpu")),
        lambda: unparallelize_pipe(pipe),
        lambda: parallelize_transformer(pipe.transformer, mesh=mesh),
        lambda: unparallelize_transformer(pipe.transformer),
        lambda: generate(FluxPipeline(**pipe.components), "flux"),
    ):
        with pytest.raises(RuntimeError) as caught:
            use()
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("method", METHODS)
def test_pipeline_whose_weights_failed_half_way_must_be_loaded_again(rank_pool, method):
    for messages in rank_pool.run(use_after_failure, 2, method):
        for message in messages:
            assert re.search(r"disk.* Load the pipeline again: FluxPipeline\.from_pretrained", message), message


def settings_after(method, folder):
    """Return the messages of calls that would need weights which the other ranks hold, and an image after them."""
    meshes = {name: mesh_of(dims) for name, (dims, _) in METHODS.items()}
    mesh, options = meshes[method], METHODS[method][1]
    pipe, messages = make("flux"), {}
    parallelize_pipe(pipe, mesh=mesh, text_encoders="fsdp", **options)
    image = generate(pipe, "flux")
    calls = {
        "unparallelize_pipe": lambda: unparallelize_pipe(pipe),
        "unparallelize_transformer": lambda: unparallelize_transformer(pipe.transformer),
        "replicate": lambda: parallelize_pipe(pipe, mesh=mesh, weights="replicate"),
        "text encoders": lambda: parallelize_pipe(pipe, mesh=mesh, text_encoders="offload"),
        "text encoders, replicate": lambda: parallelize_pipe(pipe, mesh=mesh, text_encoders="replicate"),
        **{
            name: partial(parallelize_pipe, pipe, mesh=meshes[name], **METHODS[name][1])
            for name in METHODS
            if name != method
        },
    }
    if method != "stages":
        calls["fuse"] = pipe.transformer.fuse_qkv_projections
        calls["save"] = lambda: pipe.save_pretrained(folder)
    for name, call in calls.items():
        with same_pipe(pipe), pytest.raises(RuntimeError) as caught:
            call()
        messages[name] = str(caught.value)
    assert torch.equal(generate(pipe, "flux"), image)
    # All other options may be replaced, with the same settings of weights and without any.
    for others in ({"text_encoders": "fsdp", **options}, {}):
        parallelize_pipe(pipe, mesh=mesh, vae=True, timeout=77, backend="math", **others)
        assert relative_error(generate(pipe, "flux"), image) < 1e-5
    if method != "stages":
        shard_weights(pipe, mesh, method=method)
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    return messages, relative_error(generate(pipe, "flux", num_inference_steps=4), image) < 1


@pytest.mark.filterwarnings("ignore:the cache of the")
@pytest.mark.parametrize("method", METHODS)
def test_other_weight_settings_say_to_load_again(rank_pool, tmp_path, method):
    for messages, is_finite in rank_pool.run(settings_after, 2, method, tmp_path):
        assert is_finite
        for name, message in messages.items():
            assert re.search(r"Load the (pipeline|model) again", message), (name, message)
            assert "from_pretrained" in message or name in ("fuse", "save")


class Dying(FluxPipeline):
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        pipe = super().from_pretrained(*args, **kwargs)
        if dist.get_rank() == 1:
            time.sleep(1)  # The other rank waits for this one.
            os.kill(os.getpid(), signal.SIGKILL)
        return pipe


def die_while_loading(folder):
    from_pretrained_sharded(Dying, folder, mesh=mesh_of({}))


def test_rank_that_dies_while_it_loads_is_noticed(rank_pool, tmp_path):
    flux_pipe().save_pretrained(tmp_path)
    with pytest.raises(RankPoolError, match=r"(?s)RuntimeError: .*rank 1 died"):
        rank_pool.run(die_while_loading, 2, tmp_path)


BETWEEN = {
    "fsdp": ({}, {"weights": "fsdp"}),
    "stages": ({"pipe": 2}, {}),
    "PipeFusion": ({"pipe": 2}, {"pipefusion": PipeFusion(4)}),
}


def raise_in_a_block(kind):
    """End a generation by an exception on one rank. The other begins another one after the time-out."""
    dims, options = BETWEEN[kind]
    pipe = parallelize_pipe(make("flux"), mesh=mesh_of(dims), timeout=3.0, **options)
    calls = []

    def fail(*_):
        calls.append(0)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise ValueError("only here")

    pipe.transformer.single_transformer_blocks[-1].register_forward_pre_hook(fail)
    begun = time.monotonic()
    try:
        generate(pipe, "flux", num_inference_steps=9)
    finally:
        if dist.get_rank() == 1:
            time.sleep(4)  # The rank lives on while the others wait.
        assert time.monotonic() - begun < 30


@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hook only raises.
@pytest.mark.parametrize(
    "kind", ["PipeFusion", *[pytest.param(kind, marks=pytest.mark.long) for kind in ("fsdp", "stages")]]
)
def test_rank_raising_between_blocks_ends_others(rank_pool, kind):
    first, second = rank_pool.run_expecting_errors(raise_in_a_block, 2, kind)
    assert isinstance(second, ValueError)
    assert isinstance(first, RuntimeError)
    assert re.search(r"rank 1 .*ValueError: only here", str(first))
