"""One rank's share of an attention call on 8 ranks: pack, attention, merge and unpack separately, without the exchange
itself.

The process is rank 0 of PyTorch's fake backend: collectives move nothing and return at once. All else runs as on the
real group, on uninitialized memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.gpu.job import SectionJob, first_line, is_fatal
from benchmarks.gpu.timing import kernels_of, largest, milliseconds, phases
from benchmarks.harness import fake_group
from para_core import UnifiedAttnMode

RANKS = 8
MESHES = {"Ulysses 8": (1, 8), "ring 8": (8, 1), "ring 2 × Ulysses 4": (2, 4)}
# These are the seconds of each size on each mesh, with profiling. 24 heads of 118,800 tokens are 87 TFLOP, and an
# eighth of them takes 20 ms on an H100.
SECONDS = 8.0
NEEDS = {"sizes": 3 * 4 * SECONDS}  # There are sizes × meshes.
MANY = 10_000  # From this number of tokens on, a call takes so long that it is timed only three times.


@dataclass(frozen=True)
class ModelSize:
    """The size of a call. ``padded`` says whether a mask hides the last keys, as for HunyuanVideo's text."""

    name: str
    tokens: int
    heads: int
    head_dim: int
    padded: bool = False


REAL = (
    ModelSize("FLUX.1, 1024 × 1024", 4096 + 512, 24, 128),
    # There are 33 latent frames of 45 × 80 tokens, and 256 tokens of text.
    ModelSize("HunyuanVideo, 1280 × 720 × 129", 33 * 45 * 80 + 256, 24, 128),
    ModelSize("HunyuanVideo, 1280 × 720 × 129, key padding", 33 * 45 * 80 + 256, 24, 128, padded=True),
)
TINY = (ModelSize("tiny", 64, 8, 16), ModelSize("tiny, key padding", 64, 8, 16, padded=True))


def run(job: SectionJob) -> None:
    with fake_group(RANKS), torch.no_grad():
        meshes = {
            name: init_device_mesh(job.device.type, shape, mesh_dim_names=("ring", "ulysses"))
            for name, shape in MESHES.items()
        }
        for size in TINY if job.tiny else REAL:
            for name, mesh in [*meshes.items(), ("none: SDPA alone", None)]:
                if not job.tiny and job.seconds_left < SECONDS:
                    job.run_out(f"{size.name}, {name}")
                    continue
                row = {"size": size.name, "tokens": size.tokens, "heads": size.heads, "D": size.head_dim, "mesh": name}
                try:
                    job.add(**row, **_measure(job.device, size, mesh))
                except RuntimeError as error:
                    if is_fatal(error):
                        raise
                    job.add(**row, raised=first_line(error))


def _measure(device: torch.device, size: ModelSize, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Return the times of one call, or without a mesh those of SDPA over all tokens of an eighth of the heads."""
    if size.tokens % RANKS or size.heads % RANKS:
        raise ValueError(
            f"{size.tokens} tokens, {size.heads} heads; expected multiples of {RANKS}: all shares are equal."
        )
    heads, tokens = (size.heads // RANKS, size.tokens) if mesh is None else (size.heads, size.tokens // RANKS)
    # Models have [B, S, H, D] in memory.
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    qkv = [torch.randn(1, tokens, heads, size.head_dim, **options).transpose(1, 2) for _ in range(3)]
    mask = None
    if size.padded:  # The mask hides the last keys, at most 100.
        visible = size.tokens - min(100, size.tokens // 8)
        mask = (torch.arange(size.tokens, device=device) < visible)[None, None, None]

    def call() -> None:
        F.scaled_dot_product_attention(*qkv, mask)

    with contextlib.nullcontext() if mesh is None else UnifiedAttnMode(mesh, assume_equal=True):
        call()
        times = milliseconds(call, device, repeats=3 if size.tokens > MANY else 20)
        kernels = kernels_of(call, device)
    return {**times, "kernels": len(kernels), "ms of": phases(kernels), "largest": largest(kernels)}
