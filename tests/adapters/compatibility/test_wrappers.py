"""A model inside a training wrapper is refused on all ranks, and the error says how to take it out. The inner model is
exact.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from para_core.adapters import (
    apply_cache_on_pipe,
    parallelize_pipe,
    parallelize_transformer,
    parallelize_unet,
    parallelize_vae,
    propose_plan,
    shard_weights,
)
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer, relative_error
from zoo.tiny.pipelines.unet import UNET_PIPELINES
from zoo.tiny.transformers.registry import MODELS


class Engine(nn.Module):
    """A wrapper from a library that is not installed here."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def by_ddp(module):
    return nn.parallel.DistributedDataParallel(module.requires_grad_())


def by_fsdp1(module, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)


def blocks_by_fsdp1(module):
    return by_fsdp1(module, auto_wrap_policy=ModuleWrapPolicy({type(module.transformer_blocks[0])})).module


WRAPPERS = {
    "DistributedDataParallel": by_ddp,
    "DataParallel": nn.DataParallel,
    "Engine": Engine,
    "Engine of DataParallel": lambda module: Engine(nn.DataParallel(module)),
}


def message_of(function, *args, **options):
    with pytest.raises(TypeError) as caught:
        function(*args, **options)
    return str(caught.value)


def errors_of_wrapped():
    """Return the errors of all entry points by wrapper, the images without it, and the errors of other models."""
    mesh, errors, images = cpu_mesh(1, 2), {}, []
    for name, wrap in WRAPPERS.items():
        pipe = flux_pipe(shared_parts=False)
        pipe.transformer = wrap(pipe.transformer)
        errors[name] = [
            message_of(parallelize_pipe, pipe, mesh=mesh),
            message_of(parallelize_pipe, pipe),
            message_of(parallelize_transformer, pipe.transformer, mesh=mesh),
            message_of(apply_cache_on_pipe, pipe),
            message_of(shard_weights, pipe, mesh),
            message_of(propose_plan, pipe.transformer, {}),
        ]
        while hasattr(pipe.transformer, "module"):
            pipe.transformer = pipe.transformer.module
        images.append(parallelize_pipe(pipe, mesh=mesh)(**flux_call()).images)
    pipe = flux_pipe(shared_parts=False)
    # A wrapped transformer with its own component name would otherwise be left out.
    pipe.transformer_ref = by_ddp(flux_transformer())
    others = {
        "pipe.transformer_ref": message_of(parallelize_pipe, pipe, mesh=mesh),
        "vae": message_of(parallelize_vae, by_ddp(pipe.vae), mesh=mesh),
        "unet": message_of(parallelize_unet, by_ddp(UNET_PIPELINES["sd"].build().unet), mesh=mesh),
    }
    sharded = [by_fsdp1(flux_transformer()), by_fsdp1(MODELS["wan"].build()), blocks_by_fsdp1(flux_transformer())]
    return errors, images, others, [message_of(parallelize_transformer, model, mesh=mesh) for model in sharded]


def test_wrapped_models_are_refused_and_exact_without_the_wrapper(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for errors, images, others, sharded in rank_pool.run(errors_of_wrapped, 2):
        for name, messages in errors.items():
            for message in messages:
                assert name.split()[0] in message and "FluxTransformer2DModel" in message
                assert "transformer = " in message and "transformer.module" in message
        assert max(relative_error(image, expected) for image in images) < 1e-5
        for name, message in others.items():
            assert message.endswith(f"{name}.module")
        for message in sharded:
            assert "FullyShardedDataParallel" in message and "weights='fsdp'" in message


class OfItsOwn(nn.Module):
    """A model with a part named ``module`` that is no wrapper."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 3)


def test_part_named_module_is_no_wrapper():
    with pytest.raises(TypeError, match=r"no plan for OfItsOwn"):
        parallelize_transformer(OfItsOwn())
