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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from para_core import init_context_parallel_mesh
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
from tests.rank_pool import RankPoolError
from tests.tiny import flux_call, flux_pipe, flux_transformer, relative_error
from tests.weights.pipes import generate, make


def mesh_for(method):
    return init_context_parallel_mesh("cpu", max_tensor_dim_size=2 if method == "tensor" else None)


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


def shard_differing(make_one, method, message):
    pipe = make_one()
    with pytest.raises(ValueError, match=message):
        shard_weights(pipe, mesh_for(method), method=method, components=["transformer"])
    assert not isinstance(pipe.transformer, FSDPModule)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (quantize_one, r"sequence rank 1: .* Int8Tensor"),
        (narrow_one, r"ranks .*transformer\..* rank 0 .*rank 1 "),
        (cast_one, r"ranks .*transformer\..* float32, .* rank 1 .* bfloat16, "),
        (seed_one, r"ranks .*transformer\.proj_out\.weight: .* float32, .* rank 1 .* float32, "),
    ],
)
def test_weights_of_one_rank_differing_raise_on_all(rank_pool, make_one, message):
    rank_pool.run(shard_differing, 2, make_one, "fsdp", message)


def shard_out_of_memory(kind):
    def fail(*args, **kwargs):
        raise kind("no room")

    pipe = flux_pipe()
    failing = mock.patch.object(fsdp_weights, "shard_blocks", fail) if dist.get_rank() == 1 else mock.MagicMock()
    message = rf"sequence rank 1: .*{kind.__name__}: no room.* FluxPipeline\.from_pretrained"
    with failing, pytest.raises(RuntimeError, match=message):
        shard_weights(pipe, mesh_for("fsdp"), components=["transformer"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_a_rank_without_memory_is_an_error_on_all(rank_pool, kind):
    rank_pool.run(shard_out_of_memory, 2, kind)


WAYS = {
    "fsdp": (fsdp_weights, "shard_blocks", {}, {"weights": "fsdp"}),
    "tensor": (tensor_weights, "shard_tensors", {"max_tensor_dim_size": 2}, {"weights": "tensor"}),
    "stages": (staged_transformer, "free_other_blocks", {"max_pipe_dim_size": 2}, {}),
}


def use_after_failure(way):
    """Let sharding fail on rank 1 after its weights have changed. Return the messages of this and of later calls."""
    module, function, sizes, options = WAYS[way]
    change = getattr(module, function)

    def change_and_fail(*args, **kwargs):
        change(*args, **kwargs)
        raise OSError("disk")

    pipe, mesh = make("flux"), init_context_parallel_mesh("cpu", **sizes)
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


@pytest.mark.parametrize("way", WAYS)
def test_pipeline_whose_weights_failed_half_way_must_be_loaded_again(rank_pool, way):
    for messages in rank_pool.run(use_after_failure, 2, way):
        for message in messages:
            assert re.search(r"disk.* Load the pipeline again: FluxPipeline\.from_pretrained", message), message


def settings_after(method):
    """Return the messages of calls that would need weights which the other ranks hold, and an image after them."""
    sizes = {"fsdp": {}, "tensor": {"max_tensor_dim_size": 2}, "stages": {"max_pipe_dim_size": 2}}
    mesh = init_context_parallel_mesh("cpu", **sizes[method])
    pipe, messages = make("flux"), {}
    weights = None if method == "stages" else method
    parallelize_pipe(pipe, mesh=mesh, weights=weights, text_encoders="fsdp")
    image = generate(pipe, "flux")
    others = {name: init_context_parallel_mesh("cpu", **sizes[name]) for name in sizes if name != method}
    calls = {
        "unparallelize_pipe": lambda: unparallelize_pipe(pipe),
        "unparallelize_transformer": lambda: unparallelize_transformer(pipe.transformer),
        "replicate": lambda: parallelize_pipe(pipe, mesh=mesh, weights="replicate"),
        "text encoders": lambda: parallelize_pipe(pipe, mesh=mesh, text_encoders="offload"),
        "text encoders, replicate": lambda: parallelize_pipe(pipe, mesh=mesh, text_encoders="replicate"),
        **{
            name: partial(parallelize_pipe, pipe, mesh=other, weights=None if name == "stages" else name)
            for name, other in others.items()
        },
    }
    for name, call in calls.items():
        with same_pipe(pipe), pytest.raises(RuntimeError) as caught:
            call()
        messages[name] = str(caught.value)
    assert torch.equal(generate(pipe, "flux"), image)
    # All other options may be replaced, with the same settings of weights and without any.
    for options in ({"weights": weights, "text_encoders": "fsdp"}, {}):
        parallelize_pipe(pipe, mesh=mesh, vae=True, timeout=77, backend="math", **options)
        assert relative_error(generate(pipe, "flux"), image) < 1e-5
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    return messages, relative_error(generate(pipe, "flux", num_inference_steps=4), image) < 1


@pytest.mark.filterwarnings("ignore:the cache of the")
@pytest.mark.parametrize("method", ["fsdp", "tensor", "stages"])
def test_other_weight_settings_say_to_load_again(rank_pool, method):
    for messages, is_finite in rank_pool.run(settings_after, 2, method):
        assert is_finite
        for name, message in messages.items():
            assert re.search(r"Load the (pipeline|model) again.*from_pretrained", message), (name, message)


class Dying(FluxPipeline):
    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        pipe = super().from_pretrained(*args, **kwargs)
        if dist.get_rank() == 1:
            time.sleep(1)  # The other rank waits for this one.
            os.kill(os.getpid(), signal.SIGKILL)
        return pipe


def die_while_loading(folder):
    begun = time.monotonic()
    try:
        from_pretrained_sharded(Dying, folder, mesh=mesh_for("fsdp"))
    finally:
        assert time.monotonic() - begun < 30


def test_a_rank_that_dies_while_it_loads_is_noticed(rank_pool, tmp_path):
    flux_pipe().save_pretrained(tmp_path)
    with pytest.raises(RankPoolError, match=r"(?s)RuntimeError: .*rank 1 died"):
        rank_pool.run(die_while_loading, 2, tmp_path)


def raise_in_a_block(order):
    pipe, mesh = make("flux"), init_context_parallel_mesh("cpu")
    if order == "sharded first":
        shard_weights(pipe, mesh)
        parallelize_pipe(pipe, mesh=mesh, timeout=3.0)
    else:
        parallelize_pipe(pipe, mesh=mesh, timeout=3.0, weights="fsdp")

    def fail(*_):
        raise ValueError("only here")

    if dist.get_rank() == 1:
        # The second block is the next one to be gathered.
        pipe.transformer.single_transformer_blocks[0].register_forward_pre_hook(fail)
    begun = time.monotonic()
    try:
        generate(pipe, "flux")
    finally:
        if dist.get_rank() == 1:
            time.sleep(4)  # The rank lives on while the others wait.
        assert time.monotonic() - begun < 25


@pytest.mark.long
@pytest.mark.parametrize("order", [pytest.param("sharded first", marks=pytest.mark.long), "at once"])
def test_rank_raising_between_blocks_ends_others(rank_pool, order):
    first, second = rank_pool.run_expecting_errors(raise_in_a_block, 2, order)
    assert isinstance(second, ValueError)
    assert isinstance(first, RuntimeError)
    assert re.search(r"rank 1 .*ValueError: only here", str(first))


def change_late(method, path):
    mesh = mesh_for(method)
    pipe = parallelize_pipe(make("flux"), mesh=mesh, weights=method)
    for call in (pipe.transformer.fuse_qkv_projections, lambda: pipe.save_pretrained(path)):
        with pytest.raises(RuntimeError, match=r"are sharded\. .*Load the pipeline again"):
            call()
    before = generate(pipe, "flux")
    # The same settings once more change nothing.
    shard_weights(pipe, mesh, method=method)
    return before, generate(pipe, "flux")


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["fsdp", "tensor"])
def test_changes_of_sharded_weights_are_refused(rank_pool, tmp_path, method):
    for before, again in rank_pool.run(change_late, 2, method, tmp_path):
        assert torch.equal(before, again)


def change_early(how):
    pipe, mesh = flux_pipe(), mesh_for("tensor")
    if how == "fused":
        pipe.transformer.fuse_qkv_projections()
        message = r"transformer_blocks\.0\.attn\.to_qkv .* in no tensor plan.*unfuse_qkv_projections\(\)"
    else:
        quantize_(pipe.transformer, Int8WeightOnlyConfig())
        message = r"transformer_blocks\.0\.attn\.to_q .* Int8Tensor "
    before = pipe(**flux_call())[0]
    with pytest.raises(ValueError, match=message):
        shard_weights(pipe, mesh, method="tensor")
    assert torch.equal(pipe(**flux_call())[0], before)


@pytest.mark.parametrize("how", ["fused", "quantized"])
def test_model_without_fitting_tensor_plan_is_unchanged(rank_pool, how):
    rank_pool.run(change_early, 2, how)


def bad_meshes():
    pipe = flux_pipe()
    three = init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"mesh .*3 dims .*\(2, 1, 1\)"):
        shard_weights(pipe, three)
    other = init_device_mesh("cpu", (1,), mesh_dim_names=("alone",))
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"rank 1 .*mesh of 1 "):
            shard_weights(pipe, other)


def test_meshes_that_fsdp_does_not_take_are_refused(rank_pool):
    rank_pool.run(bad_meshes, 2)
