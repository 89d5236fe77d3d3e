"""parallelize_pipe changes one instance only, and can be undone."""

import copy
import io
import logging
import pickle
import re
import tempfile

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch.overrides import _get_current_function_mode_stack

from para_core.adapters import (
    apply_cache_on_pipe,
    parallelize_pipe,
    parallelize_transformer,
    remove_cache_from_pipe,
    unparallelize_pipe,
    unparallelize_transformer,
)
from para_core.plans.region import mesh_of_plan
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error


def live_beside_each_other():
    other = flux_pipe()
    alone = other(**flux_call()).images
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2))
    parallel = pipe(**flux_call()).images
    assert torch.equal(other(**flux_call()).images, alone)
    assert type(other) is FluxPipeline
    assert type(other.transformer) is FluxTransformer2DModel
    assert relative_error(parallel, alone) < 1e-5

    assert type(pipe).__name__ == "FluxPipeline"
    assert type(pipe.transformer).__name__ == "FluxTransformer2DModel"
    assert repr(pipe) == repr(other)
    assert dict(pipe.config) == dict(other.config)
    assert pipe.components.keys() == other.components.keys()
    assert pipe.transformer.state_dict().keys() == other.transformer.state_dict().keys()
    assert pipe.transformer.config == other.transformer.config
    assert pipe.dtype == other.dtype

    unparallelize_pipe(pipe)
    assert type(pipe) is FluxPipeline
    assert type(pipe.transformer) is FluxTransformer2DModel
    assert vars(pipe).keys() == vars(other).keys()
    assert vars(pipe.transformer).keys() == vars(other.transformer).keys()
    assert torch.equal(pipe(**flux_call()).images, alone)
    unparallelize_pipe(pipe)  # Nothing is left to undo.
    assert not _get_current_function_mode_stack()


def test_other_pipe_of_same_class_is_untouched(rank_pool):
    rank_pool.run(live_beside_each_other, 2)


def save(x):
    torch.save(x, io.BytesIO())


def refuse_copies(x):
    for way in (copy.deepcopy, copy.copy, pickle.dumps, save):
        with pytest.raises(TypeError, match=r"unparallelize_pipe.*remove_cache_from_pipe"):
            way(x)


def copy_a_parallel_pipe():
    plain = flux_pipe(shared_parts=False)
    alone = plain(**flux_call()).images
    pipe = parallelize_pipe(plain, mesh=cpu_mesh(1, 2), vae=True)
    for part in (pipe, pipe.transformer, pipe.vae):
        refuse_copies(part)
    with pytest.raises(TypeError, match="FluxTransformer2DModel"):
        copy.deepcopy(torch.compile(pipe.transformer, backend="eager"))
    with tempfile.TemporaryDirectory() as folder:  # transformers itself saves on the first rank only.
        if dist.get_rank() == 0:
            pipe.save_pretrained(folder)
            loaded = FluxPipeline.from_pretrained(folder)
            loaded.set_progress_bar_config(disable=True)
            # Loaded parameters have other addresses in memory, which changes the last bits, also without para_core.
            assert relative_error(loaded(**flux_call()).images, alone) < 1e-6
    # A refused copy leaves the pipe parallel.
    assert mesh_of_plan(pipe.transformer) is not None
    assert relative_error(pipe(**flux_call()).images, alone) < 1e-5
    unparallelize_pipe(pipe)
    for other in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert type(other) is FluxPipeline
        assert torch.equal(other(**flux_call()).images, alone)


def test_parallel_pipe_refuses_copies_until_undone(rank_pool):
    rank_pool.run(copy_a_parallel_pipe, 2)


def test_cached_pipe_refuses_copies_until_removed():
    pipe = apply_cache_on_pipe(flux_pipe(), residual_diff_threshold=0.1)
    refuse_copies(pipe)
    remove_cache_from_pipe(pipe)
    expected = pipe(**flux_call()).images
    assert torch.equal(copy.deepcopy(pipe)(**flux_call()).images, expected)


def change_mesh():
    pipe = flux_pipe()
    alone = pipe(**flux_call()).images
    for ring, ulysses in ((1, 4), (4, 1), (2, 2)):
        parallelize_pipe(pipe, mesh=cpu_mesh(ring, ulysses))
        mesh = mesh_of_plan(pipe.transformer)
        assert (mesh.ring.size, mesh.ulysses.size) == (ring, ulysses)
        assert relative_error(pipe(**flux_call()).images, alone) < 1e-5
        assert type(pipe).__mro__[1] is FluxPipeline  # There is one private class, not one for each call.


def test_parallelizing_again_takes_effect(rank_pool):
    rank_pool.run(change_mesh, 4)


def parallelize_without_mesh():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("para_core")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        pipe = parallelize_pipe(flux_pipe())
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    out = pipe(**flux_call()).images
    mesh = mesh_of_plan(pipe.transformer)
    group = parallelize_pipe(flux_pipe(), mesh=dist.group.WORLD)(**flux_call()).images
    return out, group, mesh.ranks, records


def test_without_mesh_all_ranks_work_and_log_once(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    for rank, (out, group, ranks, records) in enumerate(rank_pool.run(parallelize_without_mesh, 2)):
        assert relative_error(out, expected) < 1e-5
        assert relative_error(group, expected) < 1e-5
        assert ranks == 2
        assert len(records) == (1 if rank == 0 else 0)
        for record in records:
            assert re.search(r"batch × ring × ulysses = 1 × 1 × 2 .*4 heads", record)
            assert "init_context_parallel_mesh('cpu', max_batch_dim_size=1, max_ring_dim_size=1)" in record


@pytest.mark.parametrize("world_size", [None, "1"])
def test_without_a_process_group_one_process_works_alone(monkeypatch, world_size):
    pipe = flux_pipe()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE .*2, .*init_process_group"):
        parallelize_pipe(pipe)
    monkeypatch.delenv("WORLD_SIZE")
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    alone = pipe(**flux_call()).images
    assert parallelize_pipe(pipe) is pipe
    assert type(pipe) is FluxPipeline
    assert type(pipe.transformer) is FluxTransformer2DModel
    assert torch.equal(pipe(**flux_call()).images, alone)
    unparallelize_pipe(pipe)


def use_transformer_alone():
    transformer = flux_transformer()
    inputs = flux_inputs(63, 13, batch=2)
    alone = transformer(**inputs).sample
    mesh = cpu_mesh(1, 2)
    assert parallelize_transformer(transformer, mesh=mesh) is transformer
    outs = {
        "by name": transformer(**inputs).sample,
        "as a tuple": transformer(**inputs, return_dict=False)[0],
        "by position": transformer(*inputs.values()).sample,
        "ids with a batch dim": transformer(
            **{**inputs, "img_ids": inputs["img_ids"][None], "txt_ids": inputs["txt_ids"][None]}
        ).sample,
    }
    with pytest.raises(ValueError, match=r"img_ids .*62 .*dim -2; .*63"):
        transformer(**{**inputs, "img_ids": inputs["img_ids"][1:]})
    outs["after an error"] = transformer(**inputs).sample
    errors = {name: relative_error(out, alone) for name, out in outs.items()}
    assert max(errors.values()) < 1e-5, errors
    assert unparallelize_transformer(transformer) is transformer
    assert torch.equal(transformer(**inputs).sample, alone)


def test_a_transformer_alone_takes_its_arguments_in_every_form(rank_pool):
    rank_pool.run(use_transformer_alone, 2)
