"""A call that is refused or fails leaves the pipeline with its earlier settings, on every rank."""

import warnings
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import (
    Adapter,
    apply_cache_on_pipe,
    parallelize_pipe,
    parallelize_transformer,
    parallelize_unet,
    parallelize_vae,
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
from tests.tiny import cpu_mesh, flux_call, flux_pipe
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


REFUSED = {
    "weights": {"weights": "typo"},
    "text": {"text": "typo"},
    "rotate_method": {"rotate_method": "typo"},
    "backend": {"backend": "typo"},
    "backend and attn_func": {"backend": "math", "attn_func": lambda *args: None},
    "pipefusion": {"pipefusion": 4},
    "adapter": {"adapter": "flux"},
    "timeout": {"timeout": 0},
    "timeout of another type": {"timeout": "long"},
    "comm_dtype": {"comm_dtype": torch.int16},
    "tensor weights without tensor ranks": {"weights": "tensor"},
}


def refused_calls(earlier):
    pipe = flux_pipe(shared_parts=False)
    mesh = cpu_mesh(1, 2)
    if earlier is not None:
        parallelize_pipe(pipe, mesh=mesh, **earlier)
    image, raised = image_of(pipe), {}
    for name, options in REFUSED.items():
        with same_pipe(pipe), pytest.raises((ValueError, TypeError)) as caught:
            parallelize_pipe(pipe, mesh=mesh, **options)
        raised[name] = str(caught.value)
    with same_pipe(pipe), pytest.raises((ValueError, TypeError)):
        parallelize_pipe(pipe, mesh="a mesh")
    assert torch.equal(image_of(pipe), image)
    return raised


EARLIER = {"fresh": None, "parallel": {}, "fsdp": {"weights": "fsdp", "vae": True, "timeout": 77}}


@pytest.mark.sample(1)
@pytest.mark.parametrize("earlier", EARLIER.values(), ids=EARLIER)
def test_a_refused_call_changes_nothing(rank_pool, earlier):
    for raised in rank_pool.run(refused_calls, 2, earlier):
        assert "typo" in raised["weights"] and "typo" in raised["text"]


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
STEPS_OF_PIPE = {
    "plan": f"{PARALLEL}.transformer.apply_plan",
    "submodules": "para_core.plans.region.fill_slot",
    "time-out": f"{PARALLEL}.parts.override_timeouts",
    "one group": "para_core.distributed.timeouts.set_group_timeout",
    "call": f"{PARALLEL}.call.fill_slot",
    "VAE": "para_core.adapters.vae.pipeline.parallelize_vae",
    "methods of the VAE": "para_core.adapters.vae.vae.fill_slot",
    "text encoders": f"{WEIGHTS}.offloaded_modules.execution_device",
    "weights": f"{PARALLEL}.resolve.prepare_sharding",
    "components": f"{WEIGHTS}.shard.components_of",
    "weights mesh": f"{WEIGHTS}.fsdp_weights.weights_mesh",
    "offloaded weights": f"{WEIGHTS}.shard.check_not_offloaded",
}


# A failure of all ranks is the easier case.
RANKS = [pytest.param(None, marks=pytest.mark.long), 1]


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


def fail_in(earlier, steps, rank):
    """Make each of ``steps`` fail, and compare the pipeline before and after it."""
    pipe, mesh = flux_pipe(shared_parts=False), cpu_mesh(1, 2)
    if earlier is not None:
        parallelize_pipe(pipe, mesh=mesh, **earlier)
    image = image_of(pipe)
    for name in steps:
        if name in ("weights", "weights mesh") and rank is not None:
            continue  # All ranks make the group and prepare together, and would wait for one until the time-out.
        sharded = earlier is not None and "weights" in earlier
        options = {"weights": "fsdp"} if sharded else {"weights": "fsdp", "text_encoders": "offload"}
        if sharded and name == "text encoders":
            continue
        try:
            with same_pipe(pipe), pytest.raises(RuntimeError, match="17"), failing(STEPS_OF_PIPE[name], rank):
                parallelize_pipe(pipe, mesh=mesh, vae=True, timeout=33, text="replicate", **options)
        except BaseException as error:
            error.add_note(f"step {name}, rank {rank}")
            raise
    # Links and groups still work, and the earlier settings compute.
    assert torch.equal(image_of(pipe), image)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("earlier", EARLIER.values(), ids=EARLIER)
def test_a_failing_step_of_parallelize_pipe_changes_nothing(rank_pool, earlier, rank):
    rank_pool.run(fail_in, 2, earlier, list(STEPS_OF_PIPE), rank)


def fail_before_sharding(rank):
    """Let each step of shard_weights fail that comes before the first weight changes."""
    pipe, data = flux_pipe(shared_parts=False), init_context_parallel_mesh("cpu")
    mesh = init_context_parallel_mesh("cpu", max_tensor_dim_size=2)
    image = image_of(pipe)
    storage = {name: x.data_ptr() for name, x in pipe.transformer.named_parameters()}
    check = f"{WEIGHTS}.fsdp_weights.check_shardable"
    for step, after in ((f"{WEIGHTS}.shard.components_of", 0), (check, 0), (check, 1)):
        with same_pipe(pipe), pytest.raises(RuntimeError, match="17"), failing(step, rank, after):
            shard_weights(pipe, data)
    with (
        same_pipe(pipe),
        pytest.raises(RuntimeError, match="17"),
        failing(f"{WEIGHTS}.tensor_weights.check_tensor_plan", rank),
    ):
        shard_weights(pipe, mesh, method="tensor")
    with pytest.raises(ValueError), same_pipe(pipe):
        shard_weights(pipe, data, method="typo")
    assert storage == {name: x.data_ptr() for name, x in pipe.transformer.named_parameters()}
    assert torch.equal(image_of(pipe), image)


@pytest.mark.parametrize("rank", RANKS)
def test_failure_before_weights_are_sharded_changes_nothing(rank_pool, rank):
    rank_pool.run(fail_before_sharding, 2, rank)


STEPS_OF_CACHE = {
    "cache": "para_core.adapters.cache.pipeline.BlockCache",
    "call": "para_core.adapters.cache.pipeline.fill_slot",
    "blocks": "para_core.cache.block_cache.attach",
    "wrappers": "para_core.cache.attachment.fill_slot",
    "earlier blocks": "para_core.cache.block_cache.detach",
}


def fail_in_cache(cached, parallel, rank=None):
    pipe = flux_pipe()
    if parallel:
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
    if cached:
        apply_cache_on_pipe(pipe, residual_diff_threshold=10.0)
    image = pipe(**flux_call(num_inference_steps=3))[0]
    for name, step in STEPS_OF_CACHE.items():
        if (name == "earlier blocks" and not cached) or (name == "call" and cached):
            continue
        before = state_of(pipe)
        with pytest.raises((RuntimeError, Injected), match="17"), failing(step, rank):
            # The other options give blocks other roles, so the wrappers of the earlier cache do not fit.
            apply_cache_on_pipe(pipe, residual_diff_threshold=0.1, last_blocks=1)
        assert changes_since(before, pipe) == [], name
        assert torch.equal(pipe(**flux_call(num_inference_steps=3))[0], image), name
    with pytest.raises(ValueError):
        apply_cache_on_pipe(pipe, residual_diff_threshold=-1.0)
    assert torch.equal(pipe(**flux_call(num_inference_steps=3))[0], image)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.filterwarnings("ignore:the cache of the")
def test_failing_apply_cache_on_pipe_changes_nothing(cached):
    fail_in_cache(cached, parallel=False)


@pytest.mark.parametrize("rank", RANKS)
def test_failing_cache_of_parallel_pipe_changes_nothing(rank_pool, rank):
    rank_pool.run(fail_in_parallel_cache, 2, rank)


def fail_in_parallel_cache(rank):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the cache of the")
        fail_in_cache(True, True, rank)


def fail_in_models(rank):
    mesh = cpu_mesh(1, 2)
    stages = init_context_parallel_mesh("cpu", max_pipe_dim_size=2)
    for earlier in (None, mesh, stages):
        pipe = flux_pipe(shared_parts=False)
        vae = pipe.vae
        if earlier is not None:
            parallelize_transformer(pipe.transformer, mesh=earlier)
            if earlier is mesh:
                parallelize_vae(vae, mesh=mesh)
        image = image_of(pipe)
        for target, step in [
            (mesh, f"{PARALLEL}.transformer.apply_plan"),
            (stages, f"{WEIGHTS}.staged_transformer.stack_of"),
            (stages, f"{WEIGHTS}.staged_transformer.fill_slot"),
        ]:
            if earlier is stages and target is mesh:
                continue  # Freed blocks do not come back.
            with same_pipe(pipe), pytest.raises(RuntimeError, match="17"), failing(step, rank):
                parallelize_transformer(pipe.transformer, mesh=target)
        with same_pipe(pipe), pytest.raises(ValueError):
            parallelize_transformer(pipe.transformer, mesh=mesh, text="typo")
        with (
            same_pipe(pipe),
            pytest.raises(RuntimeError, match="17"),
            failing("para_core.adapters.vae.vae.fill_slot", rank, 1),
        ):
            parallelize_vae(vae, mesh=mesh)
        with same_pipe(pipe), pytest.raises(ValueError):
            parallelize_vae(vae, mesh=mesh, method="typo")
        assert torch.equal(image_of(pipe), image)


@pytest.mark.parametrize("rank", RANKS)
def test_a_failing_step_of_a_model_changes_nothing(rank_pool, rank):
    rank_pool.run(fail_in_models, 2, rank)


def unet_image(pipe):
    return pipe(**UNET_PIPELINES["sd"].call())[0]


def fail_in_unet(rank):
    pipe, mesh = UNET_PIPELINES["sd"].build(), cpu_mesh(1, 2)
    for earlier in (False, True):
        if earlier:
            parallelize_unet(pipe.unet, mesh=mesh)
        image = unet_image(pipe)
        before = state_of(pipe)
        for step in (
            "para_core.adapters.vae.unet.fill_slot",
            "para_core.adapters.parallel.unet.make_denoiser_run",
        ):
            with pytest.raises(RuntimeError, match="17"), failing(step, rank):
                parallelize_unet(pipe.unet, mesh=mesh, batched=False)
            assert changes_since(before, pipe) == []
        assert torch.equal(unet_image(pipe), image)


@pytest.mark.parametrize("rank", RANKS)
def test_a_failing_step_of_parallelize_unet_changes_nothing(rank_pool, rank):
    rank_pool.run(fail_in_unet, 2, rank)


def fail_in_stages(rank):
    """Make PipeFusion on stages fail, on a new pipeline and on one that already runs it."""
    pipe, stages = make("flux"), init_context_parallel_mesh("cpu", max_pipe_dim_size=2)
    steps = (
        f"{WEIGHTS}.fused_pipe.FusedPipe",
        f"{WEIGHTS}.fused_pipe.fill_slot",
        f"{WEIGHTS}.staged_transformer.fill_slots",
    )
    for earlier in (None, PipeFusion(2)):
        if earlier is not None:
            parallelize_pipe(pipe, mesh=stages, pipefusion=earlier)
        image = image_of(pipe)
        for step in steps:
            with same_pipe(pipe), pytest.raises(RuntimeError, match="17"), failing(step, rank):
                parallelize_pipe(pipe, mesh=stages, pipefusion=PipeFusion(3), timeout=44)
        assert torch.equal(image_of(pipe), image)
    parallelize_pipe(pipe, mesh=stages)
    assert torch.equal(image_of(pipe), image_of(make("flux")))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.filterwarnings("ignore:PipeFusion was off")
def test_a_failing_step_in_stages_changes_nothing(rank_pool, rank):
    rank_pool.run(fail_in_stages, 2, rank)


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
