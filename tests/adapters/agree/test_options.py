"""Options that differ between ranks, or are invalid on one, raise on every rank before anything is sent or changed."""

import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OffloadPolicy

from para_core import init_context_parallel_mesh
from para_core.adapters import (
    AttentionSchedule,
    parallelize_pipe,
    parallelize_transformer,
    parallelize_unet,
    parallelize_vae,
    shard_weights,
)
from tests.adapters.parallel.unchanged import image_of, same_pipe
from tests.tiny import cpu_mesh, flux_pipe
from zoo.tiny.pipelines.unet import UNET_PIPELINES


def attend(*args, **kwargs):
    raise NotImplementedError


# Each option has two values, one for rank 0 and one for rank 1.
OF_PIPE = {
    "text": ("shard", "replicate"),
    "assume_equal": (True, False),
    "vae": (False, True),
    "weights": ("fsdp", None),
    "text_encoders": ("fsdp", "replicate"),
    "offload": (None, "blocks"),
    "timeout": (timedelta(seconds=30), timedelta(seconds=40)),
    "rotate_method": ("2d", "alltoall"),
    "comm_dtype": (None, torch.int8),
    "attn_func": (attend, None),
    "backend": ("math", "typo"),
}


def differ():
    rank, meshes = dist.get_rank(), (cpu_mesh(2, 1), cpu_mesh(1, 2))
    pipe, unet = flux_pipe(shared_parts=False), UNET_PIPELINES["sd"].build().unet
    messages = []

    def refuse(option, function, *args, **options):
        with pytest.raises(ValueError) as caught:
            function(*args, **options)
        messages.append((option, str(caught.value)))

    with same_pipe(pipe):
        for name, values in OF_PIPE.items():
            refuse(name, parallelize_pipe, pipe, mesh=meshes[0], **{name: values[rank]})
        refuse("backend", parallelize_pipe, pipe, mesh=meshes[0], backend=AttentionSchedule("math", last=rank))
        refuse("mesh", parallelize_pipe, pipe, mesh=meshes[rank])
        refuse("mesh", parallelize_pipe, pipe, mesh=[None, meshes[1]][rank])
        refuse("weights", parallelize_pipe, pipe, weights=[None, "fsdp"][rank])
        refuse("text", parallelize_transformer, pipe.transformer, mesh=meshes[0], text=OF_PIPE["text"][rank])
        refuse("gather", parallelize_vae, pipe.vae, mesh=meshes[0], gather=["all", "first"][rank])
        refuse("method", parallelize_vae, pipe.vae, mesh=meshes[0], method=["exact", "tiled"][rank])
    refuse("batched", parallelize_unet, unet, mesh=meshes[0], batched=rank == 0)
    refuse("mesh", shard_weights, pipe, meshes[rank])
    refuse("mesh", shard_weights, pipe, [None, meshes[1]][rank])
    refuse("offload_policy", shard_weights, pipe, meshes[0], offload_policy=[None, OffloadPolicy()][rank])
    refuse("max_ring_dim_size", init_context_parallel_mesh, "cpu", max_ring_dim_size=1 + rank)
    # The ranks make the same calls again.
    parallelize_pipe(pipe, mesh=meshes[0])
    return messages, image_of(pipe)


def test_options_that_differ_raise_on_every_rank(rank_pool):
    expected = image_of(flux_pipe())
    for messages, image in rank_pool.run(differ, 2):
        for option, message in messages:
            assert re.search(rf"{option}.*: rank 0 .*, rank 1 ", message), message
        text = " ".join(message for _, message in messages)
        for value in ("torch.int8", "0:00:40", "attend", "'typo'", "ring 2", "ulysses 2"):
            assert value in text
        assert torch.allclose(image, expected, atol=1e-4)


def refuse_on_one_rank():
    pipe, mesh, is_last = flux_pipe(), cpu_mesh(1, 2), dist.get_rank() == 1
    with same_pipe(pipe):
        with mock.patch("para_core.adapters.parallel.options.check_library") as require:
            require.side_effect = ImportError("library 17") if is_last else None
            with pytest.raises(ImportError, match="17"):
                parallelize_pipe(pipe, mesh=mesh)
        for function, bad, good, named in (
            (parallelize_transformer, pipe.vae, pipe.transformer, "AutoencoderKL"),
            (parallelize_vae, torch.nn.Linear(1, 1), pipe.vae, "Linear"),
            (lambda model: shard_weights(model, mesh), pipe.transformer, pipe, "FluxTransformer2DModel"),
        ):
            with pytest.raises(TypeError, match=named):
                function(bad if is_last else good)
        for options in ({"method": "zero"}, {"offload_policy": 17}, {"components": ["unet"]}):
            for ranks in (mesh, None):
                with pytest.raises((TypeError, ValueError), match=r"zero|17|unet"):
                    shard_weights(pipe, ranks, **(options if is_last else {}))
        # Invalid on both: the mesh has no tensor ranks, or is of another device.
        with pytest.raises(ValueError, match="tensor"):
            parallelize_pipe(pipe, mesh=mesh, weights="tensor")
        meta = init_device_mesh("meta", (2,), mesh_dim_names=("tensor",))
        for function, options in ((parallelize_pipe, {"weights": "tensor"}), (shard_weights, {"method": "tensor"})):
            with pytest.raises(ValueError, match=r"meta.*cpu"):
                function(pipe, mesh=meta, **options)
        # The default mesh, if the models of the ranks are on devices of two types, or hold no data.
        for devices, message in ((("cuda", "cpu"), "rank 0 has cuda, rank 1 has cpu"), (("meta", "meta"), "no data")):
            device = mock.patch("para_core.adapters.default_mesh._device_type_of", return_value=devices[is_last])
            with device, pytest.raises(ValueError, match=message):
                parallelize_pipe(pipe)
        group = dist.new_group([0])
        if is_last:
            uses = (parallelize_pipe, pipe), (parallelize_transformer, pipe.transformer), (parallelize_vae, pipe.vae)
            for function, model in uses:
                with pytest.raises(ValueError, match="rank 1"):
                    function(model, mesh=group)
    if not is_last:
        parallelize_pipe(pipe, mesh=group)


def test_refused_options_and_meshes_raise_on_every_rank_and_change_nothing(rank_pool):
    rank_pool.run(refuse_on_one_rank, 2)
