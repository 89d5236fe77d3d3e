"""A step that fails on one rank raises on all ranks, whether it resolves options, loads a pipeline or restores one."""

import pytest
import torch
from diffusers import FluxPipeline

from para_core import init_context_parallel_mesh
from para_core.adapters import (
    apply_cache_on_pipe,
    cache_report,
    from_pretrained_sharded,
    parallelize_pipe,
    remove_cache_from_pipe,
    unparallelize_pipe,
)
from para_core.adapters.parallel.call import parallel_call
from tests.adapters.parallel.test_undo import (
    PARALLEL,
    WEIGHTS,
    Injected,
    changes_since,
    failing,
    image_of,
    same_pipe,
    state_of,
    timeouts,
)
from tests.tiny import cpu_mesh, flux_call, flux_pipe, relative_error


def require_restored(pipe, before):
    changed = changes_since(before, pipe)
    assert not changed, "\n".join(changed)


RESOLVE = (
    "models_to_parallelize",
    "check_parallelize",
    "transformers_of",
    "denoisers_by_kind",
    "require_method",
    "text_encoders_of",
    "resolve_transformer",
    "check_shard",
    "changes_for",
    "groups_among",
    "weights_groups",
    "as_timedelta",
    "ParallelCall",
)


def fail_in_resolve(earlier):
    pipe, mesh = flux_pipe(shared_parts=False), cpu_mesh(1, 2)
    if earlier:
        parallelize_pipe(pipe, mesh=mesh, weights="fsdp", vae=True, timeout=77)
    image = image_of(pipe)
    for name in RESOLVE:
        with same_pipe(pipe), pytest.raises(RuntimeError, match="17"), failing(f"{PARALLEL}.resolve.{name}", rank=1):
            parallelize_pipe(pipe, mesh=mesh, vae=True, timeout=33, weights="fsdp", text_encoders="fsdp")
    assert torch.equal(image_of(pipe), image)


@pytest.mark.sample(1)
@pytest.mark.parametrize("earlier", [False, True])
def test_a_failing_step_of_resolve_raises_on_all_ranks(rank_pool, earlier):
    rank_pool.run(fail_in_resolve, 2, earlier)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("flux")
    flux_pipe().save_pretrained(path)
    return path


LOAD = (
    f"{PARALLEL}.load_sharded._cache_of",
    f"{PARALLEL}.load_sharded.folder_of",
    f"{PARALLEL}.load_sharded._require_safetensors",
    f"{PARALLEL}.load_sharded._files_in",
    f"{PARALLEL}.load_sharded._dtypes_of",
    f"{PARALLEL}.load_sharded._map_each_weight",
    f"{PARALLEL}.transformer.apply_plan",
    f"{WEIGHTS}.shard.components_of",
    f"{WEIGHTS}.fsdp_weights.shard_blocks",
    f"{WEIGHTS}.sharded_component.fill_slot",
    f"{PARALLEL}.load_sharded._copy_from_files",
    f"{PARALLEL}.load_sharded._cast",
)


def fail_in_load(folder):
    mesh = init_context_parallel_mesh("cpu")
    before, fills = timeouts(), torch.utils.deterministic.fill_uninitialized_memory
    for step in LOAD:
        with pytest.raises(RuntimeError, match="17"), failing(step, rank=1):
            from_pretrained_sharded(FluxPipeline, folder, mesh=mesh, dtype=torch.float32)
        assert torch.utils.deterministic.fill_uninitialized_memory == fills, step
    assert {key: timeouts()[key] for key in before} == before
    pipe = from_pretrained_sharded(FluxPipeline, folder, mesh=mesh)
    pipe.set_progress_bar_config(disable=True)
    return image_of(pipe)


@pytest.mark.long
def test_a_failing_step_of_load_raises_on_all_ranks(rank_pool, folder):
    first, second = rank_pool.run(fail_in_load, 2, folder)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("step", "after"),
    [
        ("para_core.adapters.cache.generation.empty_slot", 0),
        ("para_core.cache.block_cache.detach", 0),
        ("para_core.adapters.cache.pipeline.empty_slot", 0),
    ],
)
@pytest.mark.filterwarnings("ignore:the cache of the")
def test_cache_stays_after_a_failed_removal(step, after):
    pipe = flux_pipe()
    plain, before = pipe(**flux_call(num_inference_steps=3))[0], state_of(pipe)
    apply_cache_on_pipe(pipe, residual_diff_threshold=10.0)
    cached = pipe(**flux_call(num_inference_steps=3))[0]
    with pytest.raises(Injected), failing(step, None, after):
        remove_cache_from_pipe(pipe)
    assert torch.equal(pipe(**flux_call(num_inference_steps=3))[0], cached)
    assert cache_report(pipe).hits > 0
    remove_cache_from_pipe(pipe)
    require_restored(pipe, before)
    assert torch.equal(pipe(**flux_call(num_inference_steps=3))[0], plain)


UNPARALLELIZE = (
    f"{PARALLEL}.transformer.remove_plan",
    "para_core.adapters.vae.vae.empty_slots",
    f"{WEIGHTS}.offloaded_modules._remove_offload",
    f"{WEIGHTS}.block_offload.empty_slot",
    "para_core.distributed.timeouts.set_group_timeout",
)


def fail_in_unparallelize():
    mesh = cpu_mesh(1, 2)
    for step in UNPARALLELIZE:
        pipe = flux_pipe(shared_parts=False)
        image, before = image_of(pipe), state_of(pipe)
        parallelize_pipe(pipe, mesh=mesh, vae=True, timeout=33, text_encoders="offload", offload="blocks")
        with pytest.raises(Injected), failing(step, None):
            unparallelize_pipe(pipe)
        assert parallel_call(pipe) is not None, step
        try:
            meanwhile = image_of(pipe)
        except RuntimeError as error:
            assert "parallelize_pipe(pipe" in str(error)
        else:  # The plan is still applied.
            assert relative_error(meanwhile, image) < 1e-5, step
        unparallelize_pipe(pipe)
        require_restored(pipe, before)
        assert torch.equal(image_of(pipe), image), step


@pytest.mark.long
def test_second_unparallelize_pipe_completes_a_failed_step(rank_pool):
    rank_pool.run(fail_in_unparallelize, 2)
