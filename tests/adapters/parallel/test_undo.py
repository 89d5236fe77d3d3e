"""A call that is refused or fails leaves the pipeline with its earlier settings, on every rank."""

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from torch import nn

from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import (
    Adapter,
    apply_cache_on_pipe,
    cache_report,
    from_pretrained_sharded,
    parallelize_pipe,
    parallelize_transformer,
    parallelize_unet,
    parallelize_vae,
    remove_cache_from_pipe,
    shard_weights,
    unparallelize_pipe,
)
from para_core.adapters.parallel.call import parallel_call
from para_core.adapters.parallel.session import ParallelSession
from para_core.adapters.parallel.transformer import TransformerPart
from para_core.adapters.registry import adapter_for
from para_core.instance.modules import uncompiled
from para_core.instance.record import filled_slots
from para_core.weights.stack import stages_of
from tests.tiny import cpu_mesh, flux_call, flux_pipe, relative_error
from tests.together.snapshot import differences, snapshot
from tests.weights.pipes import make
from zoo.tiny.pipelines.unet import UNET_PIPELINES


def timeouts():
    """Return the time-out of each group in seconds, by the group's description and ranks."""
    groups = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
    return {
        f"group {group.group_desc} {dist.get_process_group_ranks(group)}": str(
            group._get_backend(torch.device("cpu")).options._timeout
        )
        for group in groups
    }


def state_of(pipe):
    """Return all state that a call may change: the snapshot, the filled slots of each instance, and the time-outs of
    groups.
    """
    state = {**snapshot(pipe), **timeouts()}
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    for name, part in {"": pipe, **parts}.items():
        modules = [(name, part)] if part is pipe else uncompiled(part).named_modules(prefix=name)
        for path, module in modules:
            state[f"slots of {path}"] = str(sorted(filled_slots(module)))
    return state


def image_of(pipe):
    return pipe(**flux_call())[0]


def changes_since(before, pipe):
    """Return the differences from ``before``, except new process groups, which later calls reuse."""
    now = {path: value for path, value in state_of(pipe).items() if not path.startswith("group ") or path in before}
    return differences(now, before)


@contextmanager
def same_pipe(pipe):
    """Raise unless ``pipe`` is the same after the context as before it."""
    before = state_of(pipe)
    yield
    changed = changes_since(before, pipe)
    assert not changed, "\n".join(changed)


@contextmanager
def require_restored(pipe):
    """Yield the image of ``pipe``. Raise unless the pipeline and its image are the same after the context."""
    image, before = image_of(pipe), state_of(pipe)
    yield image
    changed = changes_since(before, pipe)
    assert not changed, "\n".join(changed)
    assert torch.equal(image_of(pipe), image)


def timeouts_of_pipes():
    first, second = flux_pipe(), flux_pipe()
    mesh = cpu_mesh(1, 2)
    before = timeouts()
    of_mesh = next(key for key in before if "[0, 1]" in key)
    initial = [before[of_mesh]]
    steps = [
        lambda: parallelize_pipe(first, mesh=mesh, timeout=70),
        lambda: parallelize_pipe(second, mesh=mesh, timeout=timedelta(seconds=50)),
        lambda: parallelize_pipe(first, mesh=mesh, timeout=50),
        lambda: unparallelize_pipe(second),
        lambda: parallelize_pipe(first, mesh=mesh, timeout=40),
        lambda: unparallelize_pipe(first),
    ]
    group = mesh.get_group("ulysses")
    seconds = []
    for step in steps:
        step()
        seconds.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    image_of(parallelize_pipe(first, mesh=mesh, vae=True, timeout=30))
    unparallelize_pipe(first)
    # Sharded weights stay, and another call restores the time-out.
    image_of(parallelize_pipe(second, mesh=mesh, weights="fsdp", timeout=30))
    image_of(parallelize_pipe(second, mesh=mesh))
    after = timeouts()
    return initial, seconds, before, after, group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_unparallelize_pipe_restores_timeouts(rank_pool):
    for _, seconds, before, after, last in rank_pool.run(timeouts_of_pipes, 2):
        assert seconds[:-1] == [70, 50, 50, 50, 40]
        assert seconds[-1] == last not in (70, 50, 40, 30)
        assert {key: after[key] for key in before} == before
        # Groups that were created meanwhile have the time-out of the mesh.
        assert not {"0:00:30", "0:00:40", "0:00:50", "0:01:10"} & set(after.values())


# -- A failure in one step.

PARALLEL = "para_core.adapters.parallel"
WEIGHTS = "para_core.adapters.weights"
# Each module has the functions that a step calls and looks up there. All of these steps come before weights change.
STEPS_OF_PIPE = (
    f"{PARALLEL}.transformer.apply_plan",
    "para_core.plans.region.fill_slot",
    f"{PARALLEL}.parts.override_timeouts",
    "para_core.distributed.timeouts.set_group_timeout",
    f"{PARALLEL}.call.fill_slot",
    "para_core.adapters.vae.pipeline.parallelize_vae",
    "para_core.adapters.vae.vae.fill_slot",
    f"{WEIGHTS}.shard.components_of",
    f"{WEIGHTS}.shard.check_not_offloaded",
)
# All ranks make the group and prepare together, and would wait for one that fails until the time-out.
STEPS_OF_ALL_RANKS = (f"{PARALLEL}.resolve.prepare_sharding", f"{WEIGHTS}.fsdp_weights.weights_mesh")
RESOLVE = (
    "models_to_parallelize", "check_parallelize", "transformers_of", "denoisers_by_kind",
    "require_method", "text_encoders_of", "resolve_transformer", "check_shard", "changes_for", "groups_among",
    "weights_groups", "as_timedelta", "ParallelCall",
)  # fmt: skip
STEPS_OF_CACHE = (
    "para_core.adapters.cache.pipeline.BlockCache",
    "para_core.cache.block_cache.attach",
    "para_core.cache.attachment.fill_slot",
)
REFUSED = (
    {"weights": "typo"},
    {"text": "typo"},
    {"rotate_method": "typo"},
    {"backend": "typo"},
    {"backend": "math", "attn_func": lambda *args: None},
    {"pipefusion": 4},
    {"adapter": "flux"},
    {"timeout": 0},
    {"timeout": "long"},
    {"comm_dtype": torch.int16},
    {"weights": "tensor"},  # The mesh has no tensor ranks.
    {"mesh": "a mesh"},
)


class Injected(Exception):
    """The error of a step that a test makes fail."""


def fails_here(rank):
    return rank is None or rank == dist.get_rank()


@contextmanager
def failing(step, rank, after=0):
    """Make the function ``step`` raise on ``rank`` (on all ranks if None) from its call number ``after`` on."""
    owner, _, name = step.rpartition(".")
    original, calls = getattr(__import__(owner, fromlist=[name]), name), []

    @wraps(original)
    def raising(*args, **kwargs):
        calls.append(name)
        if len(calls) > after and fails_here(rank):
            raise Injected("step 17")
        return original(*args, **kwargs)

    with mock.patch(step, raising):
        yield
    # A step that never ran would test nothing.
    assert len(calls) > after or not fails_here(rank), step


@contextmanager
def failing_at_the_end():
    """Make parallelize_pipe raise ``OSError`` on all ranks after its last change that another call can undo."""
    start = ParallelSession.start

    def start_and_fail(session):
        start(session)
        raise OSError("disk")

    with mock.patch.object(ParallelSession, "start", start_and_fail), pytest.raises(OSError, match="disk"):
        yield


@dataclass(frozen=True)
class Attempt:
    """A call that fails.

    Args:
        call: The call.
        steps: Functions that fail one after another; the call is refused if there is none.
        after: Number of calls of each step that do not fail.
        words: Words of the error of a refused call.
    """

    call: Callable[[], Any]
    steps: tuple[str, ...] = ()
    after: int = 0
    words: str = ""


def require_same_after(pipe, attempts, rank, draw=image_of):
    """Make each attempt fail on ``rank``, and compare the pipeline before and after it."""
    image = draw(pipe)
    for attempt in attempts:
        if not attempt.steps:
            with same_pipe(pipe), pytest.raises((ValueError, TypeError), match=attempt.words):
                attempt.call()
        for step in attempt.steps:
            try:
                error_of_step = pytest.raises((RuntimeError, Injected), match="17")
                with same_pipe(pipe), error_of_step, failing(step, rank, attempt.after):
                    attempt.call()
            except BaseException as error:
                error.add_note(f"step {step}, rank {rank}")
                raise
    # Links and groups still work, and the earlier settings compute.
    assert torch.equal(draw(pipe), image)


EARLIER = {"fresh": None, "parallel": {}, "fsdp": {"weights": "fsdp", "vae": True, "timeout": 77}}


def fail_in_pipe(earlier, rank):
    pipe, mesh = flux_pipe(shared_parts=False), cpu_mesh(1, 2)
    is_sharded = EARLIER[earlier] is not None and "weights" in EARLIER[earlier]
    if EARLIER[earlier] is not None:
        parallelize_pipe(pipe, mesh=mesh, **EARLIER[earlier])

    def parallelize(**options):
        parallelize_pipe(pipe, **{"mesh": mesh, **options})

    all_options = {"vae": True, "timeout": 33, "weights": "fsdp"}
    steps = STEPS_OF_PIPE + (STEPS_OF_ALL_RANKS if rank is None else ())
    resolve = tuple(f"{PARALLEL}.resolve.{name}" for name in RESOLVE)
    if is_sharded:
        attempts = [Attempt(partial(parallelize, **all_options, text="replicate"), steps)]
    else:
        steps = (*steps, f"{WEIGHTS}.offloaded_modules.execution_device")
        call = partial(parallelize, **all_options, text="replicate", text_encoders="offload")
        attempts = [Attempt(call, steps)]
    # These calls may make groups, whose time-out the next call changes to that of the earlier settings.
    attempts.append(Attempt(partial(parallelize, **all_options, text_encoders="fsdp"), resolve))
    for options in REFUSED:
        words = "|".join(map(str, [*options, *options.values()]))
        attempts.append(Attempt(partial(parallelize, **options), words=words))
    require_same_after(pipe, attempts, rank)


def fail_before_sharding(rank):
    """Let each step of shard_weights fail that comes before the first weight changes."""
    pipe, mesh = flux_pipe(shared_parts=False), init_context_parallel_mesh("cpu")
    tensor_mesh = init_context_parallel_mesh("cpu", max_tensor_dim_size=2)
    storage = {name: x.data_ptr() for name, x in pipe.transformer.named_parameters()}
    by_tensor = partial(shard_weights, pipe, tensor_mesh, method="tensor")
    check = f"{WEIGHTS}.fsdp_weights.check_shardable"
    attempts = [
        Attempt(lambda: shard_weights(pipe, mesh), (f"{WEIGHTS}.shard.components_of", check)),
        Attempt(lambda: shard_weights(pipe, mesh), (check,), after=1),
        Attempt(by_tensor, (f"{WEIGHTS}.tensor_weights.check_tensor_plan",)),
        Attempt(lambda: shard_weights(pipe, mesh, method="typo"), words="typo"),
    ]
    require_same_after(pipe, attempts, rank)
    assert storage == {name: x.data_ptr() for name, x in pipe.transformer.named_parameters()}


def fail_in_cache(rank, parallel=True):
    for cached in (True,) if parallel else (False, True):
        pipe = flux_pipe()
        if parallel:
            parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
        if cached:
            apply_cache_on_pipe(pipe, residual_diff_threshold=10.0)
        steps = (*STEPS_OF_CACHE, "para_core.cache.block_cache.detach")
        if not cached:
            steps = (*STEPS_OF_CACHE, "para_core.adapters.cache.pipeline.fill_slot")
        attempts = [
            # The other options give blocks other roles, so the wrappers of the earlier cache do not fit.
            Attempt(partial(apply_cache_on_pipe, pipe, residual_diff_threshold=0.1, last_blocks=1), steps),
            Attempt(partial(apply_cache_on_pipe, pipe, residual_diff_threshold=-1.0), words="threshold"),
        ]
        require_same_after(pipe, attempts, rank, lambda pipe: pipe(**flux_call(num_inference_steps=3))[0])


def fail_in_models(rank):
    mesh, stages = cpu_mesh(1, 2), init_context_parallel_mesh("cpu", max_pipe_dim_size=2)
    for earlier in (None, mesh, stages):
        pipe = flux_pipe(shared_parts=False)
        if earlier is not None:
            parallelize_transformer(pipe.transformer, mesh=earlier)
        if earlier is mesh:
            parallelize_vae(pipe.vae, mesh=mesh)
        on_mesh = partial(parallelize_transformer, pipe.transformer, mesh=mesh)
        in_stages = partial(parallelize_transformer, pipe.transformer, mesh=stages)
        rows = partial(parallelize_vae, pipe.vae, mesh=mesh)
        steps = tuple(f"{WEIGHTS}.staged_transformer.{name}" for name in ("stack_of", "fill_slot"))
        attempts = [
            Attempt(in_stages, steps),
            Attempt(partial(on_mesh, text="typo"), words="typo"),
            Attempt(rows, ("para_core.adapters.vae.vae.fill_slot",), after=1),
            Attempt(partial(rows, method="typo"), words="typo"),
        ]
        if earlier is not stages:  # Freed blocks do not come back.
            attempts.append(Attempt(on_mesh, (f"{PARALLEL}.transformer.apply_plan",)))
        require_same_after(pipe, attempts, rank)


def fail_in_unet(rank):
    pipe, mesh = UNET_PIPELINES["sd"].build(), cpu_mesh(1, 2)
    steps = "para_core.adapters.vae.unet.fill_slot", "para_core.adapters.parallel.unet.make_denoiser_run"
    attempts = [Attempt(partial(parallelize_unet, pipe.unet, mesh=mesh, batched=False), steps)]
    for _ in range(2):
        require_same_after(pipe, attempts, rank, lambda pipe: pipe(**UNET_PIPELINES["sd"].call())[0])
        parallelize_unet(pipe.unet, mesh=mesh)


def fail_in_stages(rank):
    """Make PipeFusion on stages fail, on a new pipeline and on one that already runs it."""
    pipe, stages = make("flux"), init_context_parallel_mesh("cpu", max_pipe_dim_size=2)
    steps = ("fused_pipe.FusedPipe", "fused_pipe.fill_slot", "staged_transformer.fill_slots")
    call = partial(parallelize_pipe, pipe, mesh=stages, pipefusion=PipeFusion(3), timeout=44)
    for _ in range(2):
        require_same_after(pipe, [Attempt(call, tuple(f"{WEIGHTS}.{step}" for step in steps))], rank)
        parallelize_pipe(pipe, mesh=stages, pipefusion=PipeFusion(2))
    parallelize_pipe(pipe, mesh=stages)
    assert torch.equal(image_of(pipe), image_of(make("flux")))


FAILING = {
    **{f"parallelize_pipe, {earlier}": partial(fail_in_pipe, earlier) for earlier in EARLIER},
    "shard_weights": fail_before_sharding,
    "apply_cache_on_pipe": fail_in_cache,
    "parallelize_transformer and parallelize_vae": fail_in_models,
    "parallelize_unet": fail_in_unet,
    "PipeFusion": fail_in_stages,
}


def fail(name, rank):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the cache of the|PipeFusion was off")
        FAILING[name](rank)


LONG = ("parallelize_pipe, parallel", "parallelize_pipe, fsdp")


# A failure of all ranks is the easier case.
@pytest.mark.parametrize("rank", [pytest.param(None, marks=pytest.mark.long), 1])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in FAILING]
)
def test_a_failing_step_changes_nothing(rank_pool, name, rank):
    rank_pool.run(fail, 2, name, rank)


@pytest.mark.filterwarnings("ignore:the cache of the")
def test_failing_apply_cache_on_pipe_changes_nothing_without_ranks():
    fail_in_cache(None, parallel=False)


@pytest.mark.parametrize(
    "step",
    [
        "para_core.adapters.cache.generation.empty_slot",
        "para_core.cache.block_cache.detach",
        "para_core.adapters.cache.pipeline.empty_slot",
    ],
)
@pytest.mark.filterwarnings("ignore:the cache of the")
def test_cache_stays_after_a_failed_removal(step):
    pipe = flux_pipe()
    with require_restored(pipe):
        apply_cache_on_pipe(pipe, residual_diff_threshold=10.0)
        cached = pipe(**flux_call(num_inference_steps=3))[0]
        with pytest.raises(Injected), failing(step, None):
            remove_cache_from_pipe(pipe)
        assert torch.equal(pipe(**flux_call(num_inference_steps=3))[0], cached)
        assert cache_report(pipe).hits > 0
        remove_cache_from_pipe(pipe)


# -- A failure while a pipeline is loaded or restored.

LOAD = (
    *[
        f"{PARALLEL}.load_sharded.{name}"
        for name in (
            "_cache_of", "folder_of", "_check_safetensors", "_files_in", "_dtypes_of", "_map_each_weight",
            "_copy_from_files", "_cast",
        )
    ],
    f"{PARALLEL}.transformer.apply_plan",
    f"{WEIGHTS}.shard.components_of",
    f"{WEIGHTS}.fsdp_weights.shard_blocks",
    f"{WEIGHTS}.sharded_component.fill_slot",
)  # fmt: skip


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
def test_a_failing_step_of_load_raises_on_all_ranks(rank_pool, tmp_path):
    flux_pipe().save_pretrained(tmp_path)
    first, second = rank_pool.run(fail_in_load, 2, tmp_path)
    assert torch.equal(first, second)


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
        with require_restored(pipe) as image:
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


@pytest.mark.long
def test_second_unparallelize_pipe_completes_a_failed_step(rank_pool):
    rank_pool.run(fail_in_unparallelize, 2)


def adapters_with_perturbed_guidance():
    """Return the batched inputs of the plan, and whether blocks run in stages, for a pipeline that perturbs
    attention.
    """
    pipe, stages = make("flux"), init_context_parallel_mesh("cpu", max_pipe_dim_size=2)
    pipe.pag_applied_layers = []
    registered = adapter_for(pipe.transformer)
    adapter = Adapter(
        registered.transformer, "mine", blocks=registered.blocks, plan=registered.plan, tensor=registered.tensor
    )
    parallelize_pipe(pipe, mesh=stages, adapter=adapter, pipefusion=PipeFusion(2))
    (part,) = [part for part in parallel_call(pipe).session.parts if isinstance(part, TransformerPart)]
    return part.plan.batched, stages_of(pipe.transformer) is not None


def test_perturbed_guidance_keeps_the_adapter(rank_pool):
    for batched, staged in rank_pool.run(adapters_with_perturbed_guidance, 2):
        assert batched == {} and staged
