"""Plans applied through the names that diffusers and MindONE use."""

import diffusers
import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from para_core import ContextParallelConfig, ParallelConfig, apply_context_parallel, remove_context_parallel
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.transformers.registry import MODELS

PLAN = WanTransformer3DModel._cp_plan
OURS, THEIRS = ContextParallelConfig, diffusers.ContextParallelConfig


def call(transformer):
    with torch.no_grad():
        return transformer(**MODELS["wan"].inputs(3, 6, 10), return_dict=False)[0]


CONFIGS = {
    "ring, gathered": lambda: OURS(ring_degree=2, rotate_method="allgather"),
    "inside a ParallelConfig": lambda: ParallelConfig(context_parallel_config=OURS(ring_degree=2)),
    "theirs, Ulysses": lambda: diffusers.ParallelConfig(
        context_parallel_config=THEIRS(ulysses_degree=2, ulysses_anything=True)
    ),
    "theirs, a mesh": lambda: THEIRS(ring_degree=2, ring_anything=True, mesh=cpu_mesh(2, 1)),
    "a further dim": lambda: OURS(mesh=init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("ulysses", "ring", "fsdp"))),
}
BAD = {
    "too many": (lambda: OURS(ring_degree=3), ValueError, r"3 × 1 = 3.* 2 ranks"),
    "none": (lambda: OURS(ring_degree=0), ValueError, "ring_degree.* 0"),
    "another mesh": (lambda: OURS(ring_degree=2, mesh=cpu_mesh(1, 2)), ValueError, r"ulysses = 1 × 2.* 2 × None"),
    "no ring": (lambda: OURS(ring_degree=1, mesh=cpu_mesh(2, 1)), ValueError, "2 × 1.* 1 × None"),
    "weights": (lambda: diffusers.ParallelConfig(tensor_parallel_config=1), ValueError, "tensor_parallel_config"),
    "no mesh": (lambda: OURS(mesh="cuda"), TypeError, "mesh is a str"),
    "something else": (dict, TypeError, r"parallel_config.* \{\}.* ContextParallelConfig"),
}


def run_configs():
    for make, error, message in BAD.values():
        with pytest.raises(error, match=message):
            apply_context_parallel(MODELS["wan"].build(), make(), PLAN)
    outs = {}
    for name, make in CONFIGS.items():
        transformer = MODELS["wan"].build()
        apply_context_parallel(transformer, make(), PLAN)
        with CommDebugMode() as counter:
            outs[name] = (call(transformer), counter.get_total_counts())
        remove_context_parallel(transformer, PLAN)
        assert type(transformer) is WanTransformer3DModel
        outs[name, "alone"] = (call(transformer), 0)
    return outs


def test_every_config_is_exact_or_refused_on_every_rank(rank_pool):
    expected = call(MODELS["wan"].build())
    for outs in rank_pool.run(run_configs, 2):
        for name, (out, collectives) in outs.items():
            assert relative_error(out, expected) < 1e-5, name
            assert (collectives > 0) == (name in CONFIGS), name


def test_one_rank_needs_no_process_group_and_changes_nothing():
    transformer = MODELS["wan"].build()
    apply_context_parallel(transformer, OURS(), PLAN)
    assert type(transformer) is WanTransformer3DModel
    with pytest.raises(RuntimeError, match="apply_context_parallel needs a process group"):
        apply_context_parallel(transformer, OURS(ring_degree=2), PLAN)
