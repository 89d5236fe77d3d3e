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


def by_fsdp1(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def blocks_by_fsdp1(module):
    block = type(module.transformer_blocks[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"auto_wrap_policy": ModuleWrapPolicy({block}), "device_id": torch.device("cpu")}
        return FullyShardedDataParallel(module, **options).module


WRAPPERS = {
    "DistributedDataParallel": by_ddp,
    "DataParallel": nn.DataParallel,
    "Engine": Engine,
    "Engine of DataParallel": lambda module: Engine(nn.DataParallel(module)),
}


def errors_of_flux(name):
    """Return the errors of all entry points, and the result after the model was taken out of its wrapper."""
    mesh, wrap, errors = cpu_mesh(1, 2), WRAPPERS[name], []
    pipe = flux_pipe(shared_parts=False)
    pipe.transformer = wrap(pipe.transformer)
    for attempt in (
        lambda: parallelize_pipe(pipe, mesh=mesh),
        lambda: parallelize_pipe(pipe),
        lambda: parallelize_transformer(pipe.transformer, mesh=mesh),
        lambda: apply_cache_on_pipe(pipe),
        lambda: shard_weights(pipe, mesh),
        lambda: propose_plan(pipe.transformer, {}),
    ):
        with pytest.raises(TypeError) as caught:
            attempt()
        errors.append(str(caught.value))
    while hasattr(pipe.transformer, "module"):
        pipe.transformer = pipe.transformer.module
    return errors, parallelize_pipe(pipe, mesh=mesh)(**flux_call()).images


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_transformer_is_refused_and_exact_without_the_wrapper(rank_pool, name):
    expected = flux_pipe()(**flux_call()).images
    for errors, image in rank_pool.run(errors_of_flux, 2, name):
        for error in errors:
            assert name.split()[0] in error and "FluxTransformer2DModel" in error
            assert "transformer = " in error and "transformer.module" in error
        assert relative_error(image, expected) < 1e-5


def errors_of_fsdp1(wrap):
    errors = []
    for model in (flux_transformer(), MODELS["wan"].build()):
        if wrap is blocks_by_fsdp1 and not hasattr(model, "transformer_blocks"):
            continue
        with pytest.raises(TypeError) as caught:
            parallelize_transformer(wrap(model), mesh=cpu_mesh(1, 2))
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("wrap", [by_fsdp1, blocks_by_fsdp1])
def test_model_of_fsdp1_is_refused(rank_pool, wrap):
    for errors in rank_pool.run(errors_of_fsdp1, 2, wrap):
        for error in errors:
            assert "FullyShardedDataParallel" in error and "weights='fsdp'" in error


def errors_of_others():
    mesh, pipe, errors = cpu_mesh(1, 2), flux_pipe(shared_parts=False), []
    for attempt in (
        lambda: parallelize_vae(by_ddp(pipe.vae), mesh=mesh),
        lambda: parallelize_unet(by_ddp(UNET_PIPELINES["sd"].build().unet), mesh=mesh),
        # A wrapped transformer with its own component name would otherwise be left out.
        lambda: parallelize_pipe(with_reference(pipe), mesh=mesh),
    ):
        with pytest.raises(TypeError) as caught:
            attempt()
        errors.append(str(caught.value))
    return errors


def with_reference(pipe):
    pipe.transformer_ref = by_ddp(flux_transformer())
    return pipe


def test_wrapped_vae_unet_and_second_transformer_are_refused(rank_pool):
    for errors in rank_pool.run(errors_of_others, 2):
        for error, name in zip(errors, ("vae", "unet", "pipe.transformer_ref"), strict=True):
            assert error.endswith(f"{name}.module")


class OfItsOwn(nn.Module):
    """A model with a part named ``module`` that is no wrapper."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(3, 3)


def test_part_named_module_is_no_wrapper():
    with pytest.raises(TypeError, match=r"no plan for OfItsOwn"):
        parallelize_transformer(OfItsOwn())
