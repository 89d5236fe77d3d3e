"""FLUX.1's decoder with random weights on two ranks that share the device, over gloo: error relative to one rank.

Both ranks compute on the same device, so seconds show the cost of the exchange and the host, not the gain of two
devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.job import OK, WRONG, SectionJob
from benchmarks.gpu.processes import run_world
from benchmarks.gpu.timing import synchronize
from benchmarks.gpu.vae_model import AutoencoderKL
from benchmarks.harness import relative_error

NEEDS = {"two ranks": 35.0}  # seconds, including the start of Python on each rank
# Without a halo, or with statistics of one rank's rows, the error is above 0.1. cuDNN takes other algorithms for other
# heights.
FLOAT32_BOUND = 1e-4
# This bound is relative to the error of the model itself in 16 bits.
SHARE_OF_16_BITS = 1.3
# An image of 1024 × 1024.
REAL: tuple[dict[str, Any], tuple[int, ...]] = ({}, (1, 16, 128, 128))
TINY: tuple[dict[str, Any], tuple[int, ...]] = (
    {"channels": (8, 16), "latent_channels": 4, "groups": 4},
    (1, 4, 9, 5),
)


def run(job: SectionJob) -> None:
    if job.has_time("two ranks", NEEDS["two ranks"]):
        run_world(job, decode_on_ranks, 2, job.tiny)


@torch.no_grad()
def decode_on_ranks(device: torch.device, _: float, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield a row in float32, and one in bfloat16 with the error of one rank in bfloat16."""
    from para_core.adapters import parallelize_vae

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    options, shape = TINY if tiny else REAL
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    exact: Tensor | None = None
    for dtype in (torch.float32, torch.bfloat16):
        z, vae = latents.to(dtype), decoder(device, options).to(dtype)
        alone, seconds_alone = _timed(lambda vae=vae, z=z: vae.decode(z), device)
        dist.barrier()
        parallelize_vae(vae)  # type: ignore[type-var]
        parallel, seconds = _timed(lambda vae=vae, z=z: vae.decode(z), device)
        exact = alone if exact is None else exact
        error, own = relative_error(parallel, exact), relative_error(alone, exact)
        bound = FLOAT32_BOUND if dtype == torch.float32 else SHARE_OF_16_BITS * own
        yield {
            "autoencoder": "FLUX.1",
            "dtype": str(dtype).removeprefix("torch."),
            "latents": list(shape),
            "verdict": OK if error <= bound else WRONG,
            "error": error,
            "error of one rank": own,
            "seconds": seconds,
            "seconds of one rank": seconds_alone,
        }


def decoder(device: torch.device, options: dict[str, Any]) -> AutoencoderKL:
    """Return the autoencoder with the same weights on every rank. It is made on ``device``, because on a CPU that
    takes seconds.
    """
    torch.manual_seed(0)
    with torch.device(device):
        return AutoencoderKL(**options).eval().requires_grad_(False)


def _timed(call: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """Return the result and the seconds of the second call."""
    call()
    synchronize(device)
    began = time.perf_counter()
    out = call()
    synchronize(device)
    return out, round(time.perf_counter() - began, 4)
