"""Milliseconds of one attention call and of one step, next to PyTorch's own kernels and torch.compile, in one run.

The calls have the sizes of FLUX.1 at 1024 × 1024, in bfloat16. A step runs 2 + 4 of its blocks. "of ...'s time" are
ratios: 0.5 is half the time. A share of a rank of 8 should be near 0.125, plus what packing and merging take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.flux import (
    STACK,
    TINY,
    Variant,
    cached,
    measure_variants,
    parallel,
    plain,
    triton,
    variant_name,
)
from benchmarks.gpu.job import SectionJob
from benchmarks.gpu.processes import interpreted_on_cpu
from benchmarks.gpu.timing import milliseconds, phases, profiled
from benchmarks.harness import fake_group
from para_core import UnifiedAttnMode

SDPA = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}
RANKS = 8
# The shape is ring × ulysses.
MESHES = {"Ulysses 8": (1, 8), "ring 8": (8, 1), "ring 2 × Ulysses 4": (2, 4)}
VARIANTS: tuple[Variant, ...] = (
    (plain, "eager"),
    (parallel, "eager"),
    (cached, "eager"),
    (triton, "eager"),
    (plain, "blocks"),
    (parallel, "blocks"),
)
_SECONDS = {"eager": 4.0, "blocks": 25.0}
NEEDS = {"attention": 25.0, "the model": 10.0, **{variant_name(x): _SECONDS[x[1]] for x in VARIANTS}}  # seconds


def run(job: SectionJob) -> None:
    if job.has_time("attention", NEEDS["attention"]):
        attention(job)
    measure_variants(job, TINY if job.tiny else STACK, VARIANTS, NEEDS)


def attention(job: SectionJob) -> None:
    """Add a row per way to attend: PyTorch's kernels, ours, our mode on one rank, and the share of a rank of 8."""
    tokens, heads, head_dim = (24, 8, 16) if job.tiny else (4608, 24, 128)
    sdpa_ms: dict[str, float] = {}
    for name, enter, heads_here, tokens_here in _ways(job.device, tokens, heads):
        size = {"tokens": tokens_here, "heads": heads_here, "D": head_dim}
        job.measure(_timed, job, enter, size, sdpa_ms, name, what="attention", way=name, **size)


Enter = Callable[[], AbstractContextManager[Any]]


def _ways(device: torch.device, tokens: int, heads: int) -> Iterator[tuple[str, Enter, int, int]]:
    """Yield a name, a context in which to call SDPA, and the heads and tokens of the call."""
    for name, backend in SDPA.items():
        yield name, nullcontext if device.type == "cpu" else partial(sdpa_kernel, backend), heads, tokens
    yield "ours, 1 rank", partial(_mode, device, (1, 1)), heads, tokens
    yield "ours, 1 rank, Triton kernel", partial(_mode, device, (1, 1), backend="triton"), heads, tokens
    # A share has all heads of an eighth of the tokens, or all tokens of an eighth of the heads.
    yield "SDPA, share of 8 ranks", nullcontext, heads // RANKS, tokens
    for name, shape in MESHES.items():
        yield f"ours, share of a rank of {name}", partial(_mode, device, shape), heads, tokens // RANKS


@contextmanager
def _mode(device: torch.device, shape: tuple[int, int], **options: Any) -> Iterator[None]:
    """Enter our mode on a mesh of PyTorch's fake backend, whose collectives move nothing and return at once."""
    with fake_group(shape[0] * shape[1]):
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("ring", "ulysses"))
        with UnifiedAttnMode(mesh, assume_equal=True, **options):
            yield


@torch.no_grad()
def _timed(job: SectionJob, enter: Enter, size: dict[str, int], sdpa_ms: dict[str, float], way: str) -> dict[str, Any]:
    """Return the milliseconds of a call, and their ratio to those of PyTorch's kernels for all heads and tokens.

    Args:
        sdpa_ms: milliseconds of PyTorch's kernels by name, to which this adds its own.
    """
    torch.manual_seed(0)
    shape = (1, size["tokens"], size["heads"], size["D"])  # Models have it so in memory.
    query, key, value = (torch.randn(shape, device=job.device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    with interpreted_on_cpu(job.device), enter():

        def call() -> Tensor:
            return F.scaled_dot_product_attention(query, key, value)

        call()
        times = milliseconds(call, job.device, repeats=3 if job.tiny else 20)
        parts = phases(profiled(call, job.device).kernels)
    if way in SDPA:
        sdpa_ms[way] = times["ms"]
    ratios = {f"of {name}'s time": round(times["ms"] / max(ms, 1e-6), 3) for name, ms in sdpa_ms.items()}
    return {**times, **ratios, "ms of": parts}
