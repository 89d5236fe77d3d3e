"""A call that is refused or fails leaves the pipeline with its earlier settings, on every rank."""

from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from para_core.adapters import AttentionSchedule, apply_cache_on_pipe, parallelize_pipe, unparallelize_pipe
from para_core.adapters.parallel.parts import TimeoutPart
from para_core.adapters.parallel.session import ParallelSession
from para_core.distributed.groups import find_or_make_group
from para_core.distributed.timeouts import override_timeouts
from para_core.instance.record import filled_slots
from tests.adapters.parallel.unchanged import changes_since, image_of, state_of, timeouts
from tests.tiny import cpu_mesh, flux_call, flux_pipe, relative_error
from tests.weights.pipes import make, mesh_of


def change_timeouts():
    first, second, mesh = flux_pipe(), flux_pipe(), cpu_mesh(1, 2)
    before, group = timeouts(), mesh.get_group("ulysses")._get_backend(torch.device("cpu")).options
    initial = group._timeout
    steps = [
        (lambda: parallelize_pipe(first, mesh=mesh, timeout=70), 70),
        (lambda: parallelize_pipe(second, mesh=mesh, timeout=timedelta(seconds=50)), 50),
        (lambda: parallelize_pipe(first, mesh=mesh, timeout=50), 50),
        (lambda: unparallelize_pipe(second), 50),
        (lambda: parallelize_pipe(first, mesh=mesh, timeout=40), 40),
        (lambda: unparallelize_pipe(first), initial.total_seconds()),
    ]
    for number, (step, seconds) in enumerate(steps):
        step()
        assert group._timeout.total_seconds() == seconds, number
    # A group that is created during one override, and overridden by a later one, keeps the time-out of neither.
    world, ranks = mesh.get_group("ulysses"), [0, 1]
    undo_first = override_timeouts([world], timedelta(seconds=70), ranks)
    created = find_or_make_group("created", ranks, timeout=timedelta(seconds=70))
    undo_second = override_timeouts([world, created], timedelta(seconds=50), ranks)
    undo_first(), undo_second()
    own = find_or_make_group("own", ranks, timeout=timedelta(seconds=66))
    override_timeouts([world, own], timedelta(seconds=66), ranks)()
    assert timeouts()["group para_core: own [0, 1]"] == "0:01:06"
    image_of(parallelize_pipe(first, mesh=mesh, vae=True, timeout=30))
    # An earlier part that cannot be finished on one rank raises on all, and the new settings are in effect.
    late = mock.patch.object(TimeoutPart, "finish", lambda part, undo: (undo(), 1 // (1 - dist.get_rank())))
    with late, pytest.raises(RuntimeError, match=r"earlier settings.*ZeroDivisionError"):
        parallelize_pipe(first, mesh=mesh)
    image_of(first)
    unparallelize_pipe(first)
    # Sharded weights stay, and another call restores the time-out.
    image_of(parallelize_pipe(second, mesh=mesh, weights="fsdp", timeout=30))
    assert timeouts()["group para_core: weights of ranks [0, 1] [0, 1]"] == "0:00:30"
    image_of(parallelize_pipe(second, mesh=mesh))
    after = timeouts()
    assert {key: after[key] for key in before} == before
    # Groups that were created meanwhile have the time-out of the mesh.
    assert group._timeout == initial and not {"0:00:30", "0:00:40", "0:00:50", "0:01:10"} & set(after.values())


def test_unparallelize_pipe_restores_timeouts(rank_pool):
    rank_pool.run(change_timeouts, 2)


# -- A failure in one step.

PARALLEL, WEIGHTS = "para_core.adapters.parallel", "para_core.adapters.weights"
# Each module has the functions that a step calls and looks up there. All of these steps come before weights change.
STEPS_OF_PIPE = (
    f"{PARALLEL}.transformer.apply_plan",
    "para_core.plans.region.fill_slot",
    f"{PARALLEL}.parts.override_timeouts",
    "para_core.distributed.timeouts.set_group_timeout",
    f"{PARALLEL}.call.fill_slot",
    "para_core.adapters.vae.pipeline.parallelize_vae",
    "para_core.adapters.vae.run.fill_slot",
    f"{WEIGHTS}.shard.components_with_blocks",
    f"{WEIGHTS}.shard.check_not_offloaded",
    f"{WEIGHTS}.offloaded_modules.execution_device",
)
STEPS_OF_CACHE = (
    "para_core.adapters.cache.pipeline.BlockCache",
    "para_core.cache.block_cache.attach",
    "para_core.cache.attachment.fill_slot",
)


class Injected(Exception):
    """The error of a step that a test makes fail."""


def failing(step, rank):
    """Return a context in which the function ``step`` raises on ``rank``, or on all ranks if None."""
    if rank is None or rank == dist.get_rank():
        return mock.patch(step, side_effect=Injected("step 17"))
    return nullcontext()


@contextmanager
def failing_at_the_end():
    """Make parallelize_pipe raise ``OSError`` on all ranks after its last change that another call can undo."""
    start = ParallelSession.start

    def start_and_fail(session):
        start(session)
        raise OSError("disk")

    with mock.patch.object(ParallelSession, "start", start_and_fail), pytest.raises(OSError, match="disk"):
        yield


def require_same_after(pipe, rank, call, steps, *, draw=image_of):
    """Make each of ``steps`` fail in ``call`` on ``rank``, and compare the pipeline before and after it."""
    image, before = draw(pipe), state_of(pipe)
    for step in steps:
        try:
            with pytest.raises((RuntimeError, Injected), match="17"), failing(step, rank):
                call()
            assert not changes_since(before, pipe), changes_since(before, pipe)
        except BaseException as error:
            error.add_note(f"step {step}, rank {rank}")
            raise
    # Links and groups still work, and the earlier settings compute.
    assert torch.equal(draw(pipe), image)


def fail_in_pipe(rank):
    pipe = flux_pipe(shared_parts=False)
    options = {"mesh": cpu_mesh(1, 2), "vae": True, "timeout": 33, "weights": "fsdp"}
    call = partial(parallelize_pipe, pipe, **options, text="replicate", text_encoders="offload")
    require_same_after(pipe, rank, call, STEPS_OF_PIPE)
    # These calls may make groups, whose time-out the next call changes to that of the earlier settings.
    resolve = [f"{PARALLEL}.resolve.{name}" for name in ("check_parallelize", "make_changes", "ParallelCall")]
    require_same_after(pipe, rank, partial(parallelize_pipe, pipe, **options, text_encoders="fsdp"), resolve)
    # Settings that came back before their first call can be undone.
    unused = parallelize_pipe(flux_pipe(), mesh=options["mesh"], timeout=44)
    with pytest.raises(RuntimeError, match="17"), failing(STEPS_OF_PIPE[0], rank):
        parallelize_pipe(unused, mesh=options["mesh"])
    # A step of the undo that failed is repeated by the next call.
    with pytest.raises(Injected), failing(STEPS_OF_PIPE[3], None):
        unparallelize_pipe(unused)
    assert not any(map(filled_slots, unparallelize_pipe(unused).transformer.modules()))
    assert "0:00:44" not in timeouts().values()


def fail_in_cache(rank, parallel=True):
    for cached in (True,) if parallel else (False, True):
        pipe = flux_pipe()
        if parallel:
            parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
        if cached:
            apply_cache_on_pipe(pipe, residual_diff_threshold=10.0)
        last = "para_core.cache.block_cache.detach" if cached else "para_core.adapters.cache.pipeline.fill_slot"
        # The other options give blocks other roles, so the wrappers of the earlier cache do not fit.
        call = partial(apply_cache_on_pipe, pipe, residual_diff_threshold=0.1, last_blocks=1)
        require_same_after(
            pipe, rank, call, (*STEPS_OF_CACHE, last), draw=lambda pipe: pipe(**flux_call(num_inference_steps=3))[0]
        )


@pytest.mark.filterwarnings("ignore:the cache of the")
@pytest.mark.parametrize("fail", [fail_in_pipe, fail_in_cache])
def test_a_failing_step_changes_nothing(rank_pool, fail):
    rank_pool.run(fail, 2, 1)


@pytest.mark.filterwarnings("ignore:the cache of the")
def test_failing_cache_changes_nothing_without_ranks():
    fail_in_cache(None, parallel=False)


# -- One call of parallelize_pipe replaces another: first it fails, then it succeeds and is undone.

# Each kind of exact settings has dims of the mesh, and options.
SETTINGS = {
    "fsdp": ({"ulysses": 2}, {"weights": "fsdp", "text_encoders": "offload", "vae_placement": "first"}),
    "tensor": ({"tensor": 2}, {"weights": "tensor"}),
    "offload": ({"ulysses": 2}, {"text_encoders": "offload", "vae_placement": "offload"}),
    "blocks": ({"ulysses": 2}, {"offload": "blocks", "backend": "math"}),
    "schedule": ({"ring": 2}, {"backend": AttentionSchedule("math", 1, 1), "vae": True}),
}


def parallelize(pipe, kind):
    dims, options = SETTINGS[kind]
    return parallelize_pipe(pipe, mesh=mesh_of(dims), **options)


def replace_by(first, second):
    """Apply the first settings, then the second with a failure, then the second, then undo these."""
    pipe = make("flux")
    expected, before = image_of(pipe), state_of(pipe)
    parallelize(pipe, first)
    assert relative_error(image_of(pipe), expected) < 1e-5
    held = state_of(pipe)
    with failing_at_the_end():
        parallelize(pipe, second)
    assert not changes_since(held, pipe), changes_since(held, pipe)
    assert relative_error(image_of(pipe), expected) < 1e-5
    parallelize(pipe, second)
    assert relative_error(image_of(pipe), expected) < 1e-5
    if second == "schedule":  # The others split weights, which nothing undoes.
        unparallelize_pipe(pipe)
        assert torch.equal(image_of(pipe), expected)
        assert not changes_since(before, pipe), changes_since(before, pipe)


@pytest.mark.parametrize(("first", "second"), [("offload", "fsdp"), ("blocks", "tensor"), ("blocks", "schedule")])
def test_settings_replace_others(rank_pool, first, second):
    rank_pool.run(replace_by, 2, first, second)
