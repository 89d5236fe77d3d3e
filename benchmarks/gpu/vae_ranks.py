"""FLUX's and Wan's autoencoders with random weights on 2 and 4 ranks of one device, over gloo: error relative to one
rank, seconds, memory.

It needs diffusers. All ranks compute on the same device, so seconds show the cost of the exchange and the host, not the
gain of several devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.flux import require_diffusers
from benchmarks.gpu.job import OK, WRONG, SectionJob
from benchmarks.gpu.processes import run_worlds
from benchmarks.gpu.timing import synchronize
from benchmarks.harness import relative_error

# These are the seconds of all decoders by the number of ranks, including the start of Python and the import of
# diffusers on each rank.
NEEDS = {"2 ranks": 42.0, "4 ranks": 48.0}
# Without a halo, or with statistics of one rank's rows, the error is above 0.1. cuDNN takes other algorithms for other
# heights.
FLOAT32_BOUND = 1e-4
# This bound is relative to the error of the model itself in 16 bits.
SHARE_OF_16_BITS = 1.3


@dataclass(frozen=True)
class Decoder:
    """One autoencoder, and the latents that it decodes."""

    cls: str
    options: dict[str, Any]
    latents: tuple[int, ...]

    def make(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the autoencoder with the same weights on every rank. It is made on ``device``, because on a CPU that
        takes half a minute.
        """
        import diffusers

        with torch.device(device):
            torch.manual_seed(0)
            vae = getattr(diffusers, self.cls)(**self.options)
        return vae.to(dtype).eval().requires_grad_(False)


def _kl(channels: tuple[int, ...], latent_channels: int, groups: int) -> dict[str, Any]:
    return {
        "block_out_channels": channels,
        "latent_channels": latent_channels,
        "norm_num_groups": groups,
        "down_block_types": ("DownEncoderBlock2D",) * len(channels),
        "up_block_types": ("UpDecoderBlock2D",) * len(channels),
        "layers_per_block": 2,
    }


# The sizes are 1024 × 1024, and 480 × 832 with 5 frames.
REAL = {
    "FLUX": Decoder("AutoencoderKL", _kl((128, 256, 512, 512), 16, 32), (1, 16, 128, 128)),
    "Wan 2.1": Decoder("AutoencoderKLWan", {}, (1, 16, 2, 60, 104)),
}
TINY = {
    "FLUX": Decoder("AutoencoderKL", _kl((8, 16), 4, 4), (1, 4, 9, 5)),
    "Wan 2.1": Decoder(
        "AutoencoderKLWan",
        {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4},
        (1, 4, 2, 9, 5),
    ),
}


def run(job: SectionJob) -> None:
    require_diffusers()
    run_worlds(job, decode_on_ranks, (2,) if job.tiny else (2, 4), NEEDS, job.tiny)


def decode_on_ranks(device: torch.device, _: float, tiny: bool) -> Iterator[dict[str, Any]]:
    """Yield two rows per autoencoder on rank 0: float32, and bfloat16 with the error of one rank in bfloat16."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for name, decoder in (TINY if tiny else REAL).items():
        z = torch.randn(decoder.latents, generator=torch.Generator().manual_seed(1))
        exact: Tensor | None = None
        for dtype in (torch.float32, torch.bfloat16):
            alone, parallel, row = _both(decoder.make(device, dtype), z.to(device, dtype), device)
            exact = alone if exact is None else exact
            if alone is None or exact is None:
                continue
            error, own = relative_error(parallel, exact), relative_error(alone, exact)
            bound = FLOAT32_BOUND if dtype == torch.float32 else SHARE_OF_16_BITS * own
            yield {
                "autoencoder": name,
                "dtype": str(dtype).removeprefix("torch."),
                "latents": list(z.shape),
                "verdict": OK if error <= bound else WRONG,
                "error": error,
                "error of one rank": own,
                **row,
            }


def _both(vae: Any, z: Tensor, device: torch.device) -> tuple[Tensor | None, Tensor, dict[str, Any]]:
    """Decode on rank 0 alone, then on all ranks. Measure the second call of each, and its peak memory."""
    from para_core.adapters import parallelize_vae

    row: dict[str, Any] = {}
    alone = None
    if dist.get_rank() == 0:
        alone = _measured(vae, z, device, row, "one rank")
    dist.barrier()
    parallelize_vae(vae, gather="first")
    parallel = _measured(vae, z, device, row, "a rank")
    return alone, parallel, row


@torch.no_grad()
def _measured(vae: Any, z: Tensor, device: torch.device, row: dict[str, Any], who: str) -> Tensor:
    vae.decode(z)
    synchronize(device)
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    image: Tensor = vae.decode(z).sample
    synchronize(device)
    row[f"seconds, {who}"] = round(time.perf_counter() - start, 4)
    if device.type == "cuda":
        row[f"GB of activations, {who}"] = round((torch.cuda.max_memory_allocated(device) - before) / 1e9, 3)
    return image
