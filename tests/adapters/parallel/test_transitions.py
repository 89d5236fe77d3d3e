"""One call of parallelize_pipe replaces another: first it fails and changes nothing, then it succeeds and is undone."""

import traceback

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from para_core import PipeFusion
from para_core.adapters import AttentionSchedule, parallelize_pipe, unparallelize_pipe
from tests.adapters.parallel.test_undo import changes_since, failing_at_the_end, state_of
from tests.rank_pool import heartbeat
from tests.tiny import relative_error
from tests.weights.pipes import generate, make, mesh_of

# Each kind of settings has dims of the mesh, and options. Without dims each rank has its own mesh.
SETTINGS = {
    "ulysses": ({"ulysses": 2}, {}),
    "ring": ({"ring": 2}, {"rotate_method": "allgather", "text": "replicate", "timeout": 90}),
    "vae": ({"ring": 2}, {"vae": True}),
    "stages": ({"pipe": 2}, {}),
    "pipefusion": ({"pipe": 2}, {"pipefusion": PipeFusion(warmup_steps=1)}),
    "first in stages": ({"pipe": 2}, {"text_encoders": "first", "vae": True}),
    "fsdp": ({"ulysses": 2}, {"weights": "fsdp"}),
    "fsdp and offload": ({"ulysses": 2}, {"weights": "fsdp", "text_encoders": "offload", "vae_placement": "first"}),
    "tensor": ({"tensor": 2}, {"weights": "tensor"}),
    "text encoders": ({"ring": 2}, {"text_encoders": "fsdp", "vae_placement": "offload"}),
    "first": ({"ring": 2}, {"text_encoders": "first", "vae": True}),
    "offload": ({"ulysses": 2}, {"text_encoders": "offload", "vae_placement": "offload"}),
    "blocks": ({"ulysses": 2}, {"offload": "blocks", "backend": "math"}),
    "one rank": ({}, {"offload": "blocks", "text_encoders": "offload"}),
    "schedule": ({"ulysses": 2}, {"backend": AttentionSchedule("math", 1, 1)}),
    "8 bits": ({"ring": 2}, {"comm_dtype": torch.int8}),
}


# Settings that split or free weights, which nothing undoes. Those of one group may replace each other.
ONE_WAY = [{"stages", "pipefusion", "first in stages"}, {"fsdp"}, {"fsdp and offload"}, {"tensor"}, {"text encoders"}]


def may_follow(first, second):
    return all(second in group for group in ONE_WAY if first in group)


def parallelize(pipe, kind):
    dims, options = SETTINGS[kind]
    mesh = mesh_of(dims) if dims else init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "ulysses"))["ulysses"]
    return parallelize_pipe(pipe, mesh=mesh, **options)


def replace(pairs):
    """Return the faults that occur when the second settings of each pair replace the first."""
    expected = {}
    for kind in dict.fromkeys(kind for pair in pairs for kind in pair):
        heartbeat()
        expected[kind] = generate(parallelize(make("flux"), kind), "flux", num_inference_steps=8)
    plain = generate(make("flux"), "flux", num_inference_steps=8)
    problems = []
    for first, second in pairs:
        heartbeat()
        try:
            problems += replaced(first, second, expected, plain)
        except Exception:
            problems.append(f"{first} -> {second}: {traceback.format_exc()}")
    return problems


def replaced(first, second, expected, plain):
    """Apply ``first``, then ``second`` with a failure, then ``second``, then undo it. Return the faults."""
    out = []
    pipe = make("flux")
    generate(pipe, "flux", num_inference_steps=8)
    before = state_of(pipe)

    def check(what, target):
        error = relative_error(generate(pipe, "flux", num_inference_steps=8), target)
        if error > 1e-5:
            out.append(f"{first} -> {second}, {what}: error {error}")

    parallelize(pipe, first)
    check("first", expected[first])
    held = state_of(pipe)
    with failing_at_the_end():
        parallelize(pipe, second)
    out += [f"{first} -> {second}, failed: {change}" for change in changes_since(held, pipe)]
    check("failed", expected[first])
    parallelize(pipe, second)
    check("second", expected[second])
    if any(second in group for group in ONE_WAY):
        return out
    unparallelize_pipe(pipe)
    check("undone", plain)
    out += [f"{first} -> {second}, undone: {change}" for change in changes_since(before, pipe)]
    return out


# Each of these pairs begins or ends with weights in parts, or has offloaded ones.
SHORT = [("offload", "fsdp"), ("blocks", "tensor"), ("first", "stages"), ("stages", "pipefusion")]


def test_settings_replace_others(rank_pool):
    for problems in rank_pool.run(replace, 2, SHORT):
        assert not problems, "\n".join(problems)


@pytest.mark.long
@pytest.mark.parametrize("first", SETTINGS)
def test_settings_replace_all_others(rank_pool, first):
    for problems in rank_pool.run(
        replace, 2, [(first, second) for second in SETTINGS if second != first and may_follow(first, second)]
    ):
        assert not problems, "\n".join(problems)
