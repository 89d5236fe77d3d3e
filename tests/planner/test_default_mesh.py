"""The mesh that a pipeline gets if none is given."""

import os
import re
from unittest import mock

import pytest
import torch.distributed as dist

from para_core import init_context_parallel_mesh
from para_core.adapters import default_mesh, features, parallelize_pipe
from para_core.adapters.default_mesh import MeshChoice
from para_core.adapters.inspect.guidance import default_guidance
from para_core.adapters.planner import default_mesh as chooser
from para_core.adapters.planner.default_mesh import choose_default_mesh, choose_mesh
from para_core.plans.region import region_of
from tests.gpus import gpu_named
from tests.tiny import flux_call, flux_pipe, relative_error
from zoo.tiny.pipelines import PIPELINES


@pytest.mark.parametrize(
    ("ranks", "heads", "guided", "shape", "options"),
    [
        (8, 24, False, (1, 1, 8, 1), {}),
        (8, 2, True, (2, 2, 2, 1), {}),
        (16, 12, False, (1, 2, 8, 1), {}),
        (6, 24, True, (2, 1, 3, 1), {}),
        (1, 24, True, (1, 1, 1, 1), {}),
        (4, None, False, (1, 1, 4, 1), {}),
        # Ulysses stays on a host, and each host has one branch of guidance.
        (16, 24, False, (1, 2, 8, 1), {"ranks_per_host": 8}),
        (16, 24, True, (2, 1, 8, 1), {"ranks_per_host": 8}),
        # FSDP2 shards weights over the ranks of one branch.
        (2, 24, True, (1, 1, 2, 1), {"weights": "fsdp"}),
        (2, 1, True, (1, 2, 1, 1), {"weights": "fsdp"}),
        # The tensor dim has the fewest ranks that divide the heads. No size divides both 5 ranks and 24 heads.
        (4, 24, True, (2, 1, 1, 2), {"weights": "tensor"}),
        (8, 4, False, (1, 2, 2, 2), {"weights": "tensor"}),
        (5, 24, False, (1, 1, 5, 1), {"weights": "tensor"}),
    ],
)
def test_guidance_comes_first_then_heads_then_the_ring(ranks, heads, guided, shape, options):
    choice = choose_mesh(ranks, heads, "guidance_scale is 6.0 by default" if guided else None, **options)
    assert (choice.batch, choice.ring, choice.ulysses, choice.tensor) == shape
    assert ("guidance_scale is 6.0" in choice.reason) >= (shape[0] > 1)
    if options == {"ranks_per_host": 8} and not guided:
        assert bool(re.search(r"8 .*host", choice.reason)) == (ranks > 8)


# These tiny pipelines are called with their default scales. The entry says what is special.
CALLED = [
    *[(name, {}) for name in ("hunyuan", "hunyuan 1.5", "ltx2", "auraflow", "flux2 klein")],
    ("flux2 klein, inpainting", {"is_distilled": True}),
    ("wan animate, replacing", {}),
]


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize(("name", "config"), CALLED)
def test_predicted_default_arguments_equal_the_call(name, config):
    pipe = PIPELINES[name].build()
    pipe.register_to_config(**config)
    guides = default_guidance(pipe, pipe.transformer) is not None
    samples = []
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: samples.append(len(args[0] if args else kwargs["hidden_states"])), with_kwargs=True
    )
    with mock.patch.object(pipe.scheduler, "step", wraps=pipe.scheduler.step) as steps:
        pipe(**PIPELINES[name].call())
    assert guides == (sum(samples) > steps.call_count), (samples, steps.call_count)


def choose_on_cuda(device):
    """Return the default mesh of FLUX on two ranks with the given device, and the log lines of its choice."""
    lines = []
    with gpu_named(device), mock.patch.object(default_mesh.logger, "info", lambda text, *x: lines.append(text % x)):
        choice = default_mesh._choose_default_mesh("cuda", flux_pipe(), None)
        default_mesh._create_mesh_of("cpu", choice)
    return choice, lines


def test_prediction_of_rank_0_is_used(rank_pool):
    results = rank_pool.run(choose_on_cuda, 2, device="NVIDIA H100 80GB HBM3")
    choices = [choice for choice, _ in results]
    assert choices[0] == choices[1] and choices[0].ring * choices[0].ulysses == 2
    assert re.search(r"the best of \d+", choices[0].reason)
    assert [len(lines) for _, lines in results] == [1, 0]


@pytest.mark.parametrize(
    ("owner", "device_type", "on_host", "reason"),
    [
        (flux_pipe, "cpu", 2, "for cuda devices"),
        (flux_pipe, "cuda", 1, "several hosts"),
        (lambda: flux_pipe().transformer, "cuda", 2, "no pipeline"),
        (flux_pipe, "cuda", 2, "Some Accelerator"),
    ],
)
def test_what_is_not_predicted_is_left_to_the_rule(owner, device_type, on_host, reason):
    with gpu_named("Some Accelerator"), mock.patch.object(chooser.logger, "warning") as warning:
        choice = choose_default_mesh(owner(), 2, device_type, on_host)
    assert choice.ulysses * choice.ring == 2 and reason in choice.reason
    warning.assert_not_called()


def test_failed_prediction_is_a_warning():
    with (
        gpu_named("NVIDIA H100 80GB HBM3"),
        mock.patch.object(chooser, "plan_mesh", side_effect=KeyError("n_17")),
        mock.patch("diffusers.FluxPipeline.do_classifier_free_guidance", property(lambda _: {}["x"]), create=True),
        mock.patch.object(chooser.logger, "warning") as warning,
    ):
        choice = choose_default_mesh(flux_pipe(), 2, "cuda", 2)
    assert choice.ulysses == 2 and "17" in choice.reason
    text = warning.call_args.args[0] % warning.call_args.args[1:]
    assert "17" in text and "mesh=" in text


def choose_by_other_features():
    """Return the error of a feature that fails, and the choice without the feature."""

    class LocalError(Exception):
        """An error that does not pickle."""

    def fail(*_):
        raise LocalError("by 17" if dist.get_rank() == 0 else "another rank chose")

    with mock.patch.object(default_mesh, "feature", lambda name: fail), pytest.raises(RuntimeError) as caught:
        default_mesh._choose_default_mesh("cuda", flux_pipe(), None)
    with mock.patch.object(features, "FEATURES", ()):
        return str(caught.value), default_mesh._choose_default_mesh("cuda", flux_pipe(), None)


def test_error_of_the_choice_is_raised_on_every_rank_and_the_planner_is_optional(rank_pool):
    for error, choice in rank_pool.run(choose_by_other_features, 2):
        assert "LocalError: by 17." in error
        assert (choice.batch, choice.ring, choice.ulysses) == (1, 1, 2)
        assert "ulysses" in choice.reason


def run_as_planned():
    """Run as if a mesh of two dims were predicted to be best."""
    planned = mock.patch.object(default_mesh, "_choose_default_mesh", lambda *_: MeshChoice(1, 2, 1, "predicted", "2d"))
    with planned, mock.patch.object(default_mesh.logger, "info") as info:
        pipe, explicit = parallelize_pipe(flux_pipe()), parallelize_pipe(flux_pipe(), rotate_method="allgather")
    lines = [call.args[0] % call.args[1:] for call in info.call_args_list]
    methods = [region_of(x.transformer).options.rotate_method for x in (pipe, explicit)]
    return pipe(**flux_call()).images, methods, lines


def test_planned_two_dim_ring_runs_and_is_logged(rank_pool):
    expected = flux_pipe()(**flux_call()).images
    results = rank_pool.run(run_as_planned, 2)
    for images, methods, _ in results:
        assert relative_error(images, expected) < 1e-4
        # The user's option takes precedence over the prediction.
        assert methods == ["2d", "allgather"]
    assert "1 × 2 × 1, rotate_method='2d' (predicted)" in results[0][2][0]


def shapes_on_hosts(cases):
    """Return ring and Ulysses sizes for host names of the ranks, the first of which torchrun tells two hosts."""
    shapes = {"tensor": default_mesh.guided_mesh_for(None, flux_pipe(), "tensor").tensor.size}
    for names, told in cases:
        variables = {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"} if dist.get_rank() < told else {}
        named = mock.patch("socket.gethostname", lambda names=names: names[dist.get_rank()])
        with named, mock.patch.dict(os.environ, variables):
            sequence = default_mesh.guided_mesh_for(None, flux_pipe()).sequence
            assert init_context_parallel_mesh("cpu").mesh.shape == (1, sequence.ring.size, sequence.ulysses.size)
        shapes[names, told] = sequence.ring.size, sequence.ulysses.size
    return shapes


# FLUX has 4 heads: Ulysses takes all ranks of a host, and the ring goes between the hosts.
HOSTS = {("aabb", 0): (2, 2), ("abab", 0): (4, 1), ("aaab", 4): (4, 1), ("aaaa", 1): (2, 2), ("aaaa", 0): (1, 4)}


def test_ranks_compare_host_names_and_what_a_launcher_tells(rank_pool):
    assert rank_pool.run(shapes_on_hosts, 4, list(HOSTS)) == [{**HOSTS, "tensor": 2}] * 4
