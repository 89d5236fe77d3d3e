"""Text encoders that are sharded, offloaded, or run on the first rank give the results of the unmodified pipeline."""

from itertools import permutations
from math import prod

import pytest
import torch
from diffusers.hooks import HookRegistry, apply_group_offloading
from torch import nn

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, shard_weights, unparallelize_pipe
from para_core.adapters.weights.offloaded_modules import offloader_of
from para_core.instance.modules import instances_in
from para_core.weights.fsdp import is_sharded
from tests.adapters.parallel.test_undo import failing_at_the_end
from tests.tiny import relative_error
from tests.weights.pipes import generate, make
from tests.weights.test_lora import require_as, state_of

PLACEMENTS = ("replicate", "fsdp", "offload", "first")


def encoders(pipe):
    return {
        name: part for name, part in pipe.components.items() if name.startswith("text_encoder") and part is not None
    }


def attributes(pipe):
    """Return the names of the attributes of every module, and its class, which a leftover hook would change."""
    return [(type(x), sorted(vars(x))) for part in encoders(pipe).values() for x in part.modules()]


def counted(pipe):
    """Count the calls of each text encoder's layers on this rank."""
    calls = []
    for part in encoders(pipe).values():
        layer = next(x for x in part.modules() if isinstance(x, nn.Linear))
        layer.register_forward_hook(lambda *_: calls.append(1))
    return calls


def mesh_of(dims):
    return init_context_parallel_mesh("cpu", **{f"max_{name}_dim_size": size for name, size in dims.items()})


def place(name, dims, options):
    splits = options.get("weights") or options["text_encoders"] == "fsdp" or "pipe" in dims
    pipe = make(name)
    generate(pipe, name)  # diffusers adds a registry of hooks to a transformer in its first call.
    before, classes = state_of(pipe), attributes(pipe)
    weights = {
        part: {key: x.clone() for key, x in module.state_dict().items()} for part, module in encoders(pipe).items()
    }
    calls = counted(pipe)
    parallelize_pipe(pipe, mesh=mesh_of(dims), **options)
    outs = [generate(pipe, name) for _ in range(2)]
    num_calls = len(calls)
    if splits:
        return outs, num_calls, True
    unparallelize_pipe(pipe)
    outs.append(generate(pipe, name))
    require_as(pipe, before)
    for part, module in encoders(pipe).items():
        assert all(torch.equal(x, weights[part][key]) for key, x in module.state_dict().items())
    return outs, num_calls, classes == attributes(pipe)


# Each case has the placements that the default run tries with it.
CASES = [
    (("flux", {"ulysses": 2}, {"weights": "fsdp"}), PLACEMENTS),
    (("flux", {"ring": 2, "tensor": 2}, {"weights": "tensor"}), ("fsdp",)),
    (("flux", {"pipe": 2}, {}), ("fsdp", "first")),
    (("wan 2.2", {"batch": 2}, {}), ("replicate", "first")),
    (("wan 2.2", {"batch": 2, "ring": 2}, {"weights": "fsdp"}), ("offload",)),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "dims", "options", "placement"),
    [
        pytest.param(*case, placement, marks=() if placement in short else pytest.mark.long)
        for case, short in CASES
        for placement in PLACEMENTS
    ],
)
def test_placed_text_encoders_are_exact_and_undone(rank_pool, name, dims, options, placement):
    expected = generate(make(name), name)
    results = rank_pool.run(place, prod(dims.values()), name, dims, {**options, "text_encoders": placement})
    for rank, (outs, num_calls, undone) in enumerate(results):
        assert max(relative_error(out, expected) for out in outs) < 1e-5
        assert (num_calls > 0) == (placement != "first" or rank == 0)
        assert undone


def default_with_tensor(name):
    pipe = parallelize_pipe(make(name), mesh=mesh_of({"tensor": 2}), weights="tensor")
    out = generate(pipe, name)
    sharded = [part for part, module in encoders(pipe).items() if is_sharded(module)]
    return out, sharded


def test_tensor_weights_shard_text_encoders_by_default(rank_pool):
    expected = generate(make("flux"), "flux")
    for out, sharded in rank_pool.run(default_with_tensor, 2, "flux"):
        assert relative_error(out, expected) < 1e-5
        assert sharded == ["text_encoder", "text_encoder_2"]


def place_again(name, first, second):
    """Place the encoders by ``first``, then by ``second`` with a failure, then by ``second``."""
    pipe, mesh = make(name), mesh_of({"ulysses": 2})
    options = {} if first is None else {"text_encoders": first}
    parallelize_pipe(pipe, mesh=mesh, **options)
    calls = counted(pipe)
    outs = [generate(pipe, name)]
    calls_before = len(calls)
    with failing_at_the_end():
        parallelize_pipe(pipe, mesh=mesh, text_encoders=second)
    calls.clear()
    outs.append(generate(pipe, name))
    calls_after = len(calls)
    parallelize_pipe(pipe, mesh=mesh, text_encoders=second)
    outs.append(generate(pipe, name))
    if second != "fsdp":
        parallelize_pipe(pipe, mesh=mesh)
        outs.append(generate(pipe, name))
    left = [part for part, module in encoders(pipe).items() if offloader_of(module)]
    return outs, calls_before, calls_after, left


# Each placement comes first once and second once, but those that follow "fsdp", which nothing undoes.
CHANGES = [
    ("replicate", "fsdp"),
    ("offload", "first"),
    ("first", "replicate"),
    ("replicate", "offload"),
    (None, "offload"),
]
ALL_CHANGES = [(first, second) for first, second in permutations(PLACEMENTS, 2) if first != "fsdp"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("first", "second"),
    [*CHANGES, *[pytest.param(*x, marks=pytest.mark.long) for x in ALL_CHANGES if x not in CHANGES]],
)
def test_another_placement_replaces_the_first(rank_pool, first, second):
    expected = generate(make("flux"), "flux")
    for outs, before, after, left in rank_pool.run(place_again, 2, "flux", first, second):
        assert max(relative_error(out, expected) for out in outs) < 1e-5
        assert before == after
        assert left == []


def shard_offloaded(options, rest):
    pipe, mesh = make("flux"), mesh_of({"ulysses": 2})
    if options:
        parallelize_pipe(pipe, mesh=mesh, **options)
    elif mesh.get_rank() == 1:
        apply_group_offloading(pipe.text_encoder_2, torch.device("cpu"), offload_type="leaf_level")
    before = [(type(x), sorted(vars(x))) for x in instances_in(pipe)]
    with pytest.raises(ValueError) as error:
        shard_weights(pipe, mesh)
    assert before == [(type(x), sorted(vars(x))) for x in instances_in(pipe)]
    if rest:
        shard_weights(pipe, mesh, components=rest)
    return str(error.value), generate(pipe, "flux")


@pytest.mark.parametrize(
    ("options", "name", "rest"),
    [
        ({"text_encoders": "first"}, "text_encoder", ["transformer"]),
        ({"offload": "blocks"}, "transformer", ["text_encoder", "text_encoder_2"]),
        ({}, "text_encoder_2", []),
    ],
)
def test_sharding_offloaded_parts_is_refused_on_every_rank(rank_pool, options, name, rest):
    expected = generate(make("flux"), "flux")
    for error, out in rank_pool.run(shard_offloaded, 2, options, rest):
        assert f"pipe.{name} " in error
        assert "components=" in error
        assert relative_error(out, expected) < 1e-5


def remove_group_offload(module):
    """Remove diffusers' group offload as para_core's messages say."""
    for name in ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading"):
        HookRegistry.check_if_exists_or_initialize(module).remove_hook(name)


@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
def test_group_offload_can_be_removed_as_advised(offload_type):
    pipe = make("flux")
    expected = generate(pipe, "flux")
    pipe.text_encoder_2.requires_grad_(False)
    apply_group_offloading(pipe.text_encoder_2, torch.device("cpu"), offload_type=offload_type, num_blocks_per_group=1)
    with pytest.raises(ValueError, match=r"pipe\.text_encoder_2 .*remove_hook\(.*group_offloading"):
        parallelize_pipe(pipe, text_encoders="offload")
    remove_group_offload(pipe.text_encoder_2)
    parallelize_pipe(pipe, text_encoders="offload")
    assert torch.equal(generate(pipe, "flux"), expected)


def test_text_encoders_are_offloaded_on_one_rank_and_restored():
    expected, pipe = generate(make("flux"), "flux"), make("flux")
    before = attributes(pipe)
    parallelize_pipe(pipe, text_encoders="offload")
    assert all(offloader_of(module) for module in encoders(pipe).values())
    assert torch.equal(generate(pipe, "flux"), expected)
    unparallelize_pipe(pipe)
    assert attributes(pipe) == before
    assert torch.equal(generate(pipe, "flux"), expected)


def encode_badly():
    pipe = parallelize_pipe(make("flux"), mesh=mesh_of({"ring": 2}), text_encoders="first")
    with pytest.raises(RuntimeError, match="IndexError") as error:
        # Token 10**6 is outside the vocabulary.
        pipe.text_encoder_2(torch.tensor([[10**6]]))
    generate(pipe, "flux")
    return str(error.value)


def test_an_error_of_the_first_rank_is_raised_on_all(rank_pool):
    first, second = rank_pool.run(encode_badly, 2)
    assert "text_encoder_2" in first
    assert "text_encoder_2" in second


def test_refused_placements_change_nothing():
    pipe = make("flux")
    before = attributes(pipe)
    with pytest.raises(ValueError, match="disk"):
        parallelize_pipe(pipe, text_encoders="disk")
    assert attributes(pipe) == before
    apply_group_offloading(pipe.text_encoder, torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(ValueError, match="text_encoder "):
        parallelize_pipe(pipe, text_encoders="offload")
    pipe.text_encoder = pipe.text_encoder_2 = None
    with pytest.raises(ValueError, match="no text encoder"):
        parallelize_pipe(pipe, text_encoders="first")
