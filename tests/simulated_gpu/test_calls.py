"""Attention, transformers and pipelines on simulated GPUs: right numbers, no fault, and counts within their budgets.

``gpu_ranks`` itself fails a test at any fault. Budgets are the counts of benchmarks/results/simulated_gpu.json.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.harness import read_results
from para_core import UnifiedAttnMode
from para_core.adapters import parallelize_pipe
from tests.simulated_gpu.calls import KINDS, attend, call_transformer, generate, mesh_of
from tests.simulated_gpu.cases import ATTENTION, PIPELINES
from tests.tiny import flux_pipe, relative_error
from zoo.tiny.transformers.registry import MODELS

BUDGETS = read_results("simulated_gpu")
# One model for each structure of attention, on Ulysses and a ring in turn: cross-attention with replicated keys, joint
# and single streams, text after the image, masks, sound beside the image, frames apart, convolutions between blocks.
MESHES = {"Ulysses": (1, 2), "ring": (2, 1)}
STRUCTURES = {
    "Ulysses": ("wan, image context", "qwen-image, masked", "z-image", "latte", "stable audio"),
    "ring": ("mochi", "cogvideox, rotary", "ltx2, masked, split rope", "hunyuandit", "sana"),
}
APPROXIMATE = {
    "8-bit exchange": 1e-2,
    "ring 2, 8 bits": 2e-2,
    "cache, hits": 1.0,
    "Ulysses 2, half of the keys": 2.0,
    "PipeFusion, 8 steps": 0.5,
}
# These differ from other cases in numbers alone, so the long run has them.
LONG = {"ring, bfloat16", "CFG", "cache, no hits", "8-bit exchange", "offload of the VAE"}
LONG |= {"ring 4", "ring 4 in 2-D", "ring 2, gathered first", "ring 2, gradients", "ring 2, finite mask"}
LONG |= {f"ring 2 × Ulysses 2, {name}" for name in ("float32", "causal", "float32 mask", "grouped heads")}
LONG |= {f"Ulysses 2, {name}" for name in ("bfloat16", "causal", "3 heads", "one token", "key padding")}


def named(cases):
    return [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in cases]


def within(added: dict[str, float], budget: dict[str, float]) -> bool:
    return all(added[kind] <= budget[kind] for kind in KINDS)


@pytest.mark.parametrize("name", named(ATTENTION))
def test_attention(gpu_ranks, name):
    ranks, case = ATTENTION[name]
    for call in gpu_ranks.run(attend, ranks, case, nccl_alone=True):
        # The reference has the same dtype, and rounds in other places.
        assert call.error < APPROXIMATE.get(name, 1e-2 if case.dtype == torch.bfloat16 else 1e-5)
        # Choosing keys reads how many each head keeps.
        once = int(case.mode == "half of the keys")
        assert call.added["waits"] <= once and call.added["copies to the device"] <= once, call.lines
        assert within(call.added, BUDGETS["attention"][name]), call


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if name in STRUCTURES[mesh] else pytest.mark.long)
        for name in MODELS
        for mesh in MESHES
    ],
)
def test_transformer(gpu_ranks, name, mesh):
    for call in gpu_ranks.run(call_transformer, 2, name, *MESHES[mesh]):
        assert call.error < 1e-4
        # The comparison of the arguments' digests between the ranks is the one wait: a pipeline makes it once per call.
        assert call.added["waits"] <= 1 and call.added["copies to the device"] == 0, call.lines


@pytest.mark.parametrize("name", named(PIPELINES))
def test_feature_of_a_pipeline(gpu_ranks, name):
    ranks, pipeline, options = PIPELINES[name]
    bound = APPROXIMATE.get(name, 0.1 if options.get("dtype") == torch.bfloat16 else 1e-4)
    for (call,) in gpu_ranks.run(generate, ranks, pipeline, **options):
        assert call.error < bound
        assert within(call.added, BUDGETS["generations"][name]), call


def test_a_step_adds_no_wait_and_no_copy_and_a_cached_one_adds_one_of_each():
    for name in {*PIPELINES} - {"offload of blocks", "PipeFusion, 8 steps"}:
        step, most = BUDGETS["steps"][name], int(name.startswith("cache"))
        assert step["waits"] <= most and step["copies to the device"] <= most, name


DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES += (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn)


def gather_dtypes() -> list[torch.Tensor]:
    x = torch.arange(7, device="cuda")
    with UnifiedAttnMode(mesh_of(ring=1, ulysses=2)) as cp:
        query = torch.ones(1, 2, 4, 8, device="cuda")
        F.scaled_dot_product_attention(query, query, query)  # The mode warns if there is no attention in it.
        parts = [cp.shard(x.to(dtype), dim=0) for dtype in DTYPES]
        return [cp.gather(part, dim=0).double() for part in parts]


def test_each_dtype_is_gathered(gpu_ranks):
    for gathered in gpu_ranks.run(gather_dtypes, 2, nccl_alone=True):
        for dtype, x in zip(DTYPES, gathered, strict=True):
            assert torch.equal(x, torch.arange(7).to(dtype).double()), dtype


def change_offloaded_weights() -> list[torch.Tensor]:
    pipe = flux_pipe(shared_parts=False)
    pipe.to("cuda").set_progress_bar_config(disable=True)
    # Latents come back as soon as the last kernel is launched: nothing has waited for the device.
    call = {"prompt": "a red circle", "height": 64, "width": 64, "output_type": "latent", "num_inference_steps": 1}
    parallelize_pipe(pipe, mesh=mesh_of(ring=1, ulysses=2), offload="blocks")
    images = []
    with torch.no_grad():
        for _ in range(2):
            images.append(pipe(**call, generator=torch.Generator().manual_seed(7)).images)
            # The weights are in pinned host memory, from which nothing may be on its way any more.
            for parameter in pipe.transformer.parameters():
                parameter.mul_(0.5)
    return images


def test_offloaded_weights_may_change_right_after_a_call(gpu_ranks):
    for first, second in gpu_ranks.run(change_offloaded_weights, 2):
        assert relative_error(second, first) > 1e-3
