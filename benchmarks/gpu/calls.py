"""The calls whose launches and waits are counted: on a GPU by the section ``host``, and on the simulated device by
``simulated_counts``.

The process is rank 0 of PyTorch's fake backend, whose collectives move nothing, so each launch and wait is
para_core's own, and results are undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu.exact import make_inputs
from benchmarks.gpu.flux import STACK, TINY_STACK, Generation, cached, flux_inputs, flux_transformer, parallel, plain
from benchmarks.harness import fake_group
from para_core import UnifiedAttnMode

WARM_UP = 2  # The first calls compute what later calls look up.
RANKS = 4
# The shape is ring × ulysses.
MESHES = {"Ulysses 4": (1, 4), "ring 4": (4, 1), "ring 2 × Ulysses 2": (2, 2)}


@dataclass(frozen=True)
class Case:
    """An attention call. Sizes are those of the whole sequence."""

    name: str
    tokens: int
    heads: int
    key_heads: int | None = None
    mask: str = "none"
    dtype: torch.dtype = torch.bfloat16
    comm_dtype: torch.dtype | None = None  # It is not exact, and has no gradients.


def cases(tokens: int) -> list[Case]:
    """Return the cases. ``tokens`` is a multiple of 4."""
    return [
        Case("even", tokens, RANKS),
        Case("uneven tokens and heads", tokens - 1, RANKS - 1),
        Case("causal", tokens - 1, RANKS, mask="causal"),
        Case("bool mask", tokens - 1, RANKS, mask="bool full"),
        Case("key padding", tokens, RANKS, mask="bool key padding"),
        Case("float32 mask", tokens, RANKS, mask="float32"),
        Case("GQA", tokens, RANKS, key_heads=2),
        Case("8 bits", tokens, RANKS, comm_dtype=torch.int8),
    ]


@dataclass(frozen=True)
class CountedCall:
    """A call to count, which belongs to the context in which it is yielded.

    Args:
        steps: the denoising steps of the call, 0 if it is one of attention.
    """

    name: str
    run: Callable[[], Any]
    steps: int = 0


def attention_calls(device: torch.device, *, tiny: bool) -> Iterator[CountedCall]:
    """Yield the attention calls of a rank of 4. The counts do not depend on ``tiny`` sizes."""
    tokens, head_dim = (16, 16) if tiny else (1024, 64)
    with fake_group(RANKS), torch.no_grad():
        for mesh_name, shape in MESHES.items():
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("ring", "ulysses"))
            for case in cases(tokens):
                inputs = make_inputs(
                    (1, case.heads, case.tokens, head_dim),
                    case.dtype,
                    device,
                    mask=case.mask,
                    memory="transposed",
                    key_heads=case.key_heads,
                )
                with UnifiedAttnMode(mesh, assume_equal=True, comm_dtype=case.comm_dtype) as cp:
                    parts = [cp.shard(x, dim=2) for x in inputs.qkv]
                    options = {"is_causal": inputs.is_causal, "enable_gqa": inputs.heads_per_key_head > 1}
                    attend = partial(F.scaled_dot_product_attention, *parts, inputs.mask, **options)
                    yield CountedCall(f"attention, {mesh_name}, {case.name}", attend)


def step_calls(device: torch.device, *, tiny: bool) -> Iterator[CountedCall]:
    """Yield steps of a stack of FLUX.1's blocks: unmodified, parallel, and cached."""
    size = TINY_STACK if tiny else STACK
    with torch.no_grad():
        transformer, kwargs = flux_transformer(device, size), flux_inputs(device, size)

        def steps(generation: Generation, number: int) -> None:
            for _ in range(number):
                generation.step()

        for ranks, name, way, number in (
            (1, "step, unmodified", plain, 1),
            (1, "step, parallel, 1 rank", parallel, 1),
            (RANKS, "step, parallel, a rank of Ulysses 4", parallel, 1),
            (RANKS, "step, parallel, a rank of ring 4", partial(parallel, ring=True), 1),
            (1, "a computed and a skipped step, cached", cached, 2),
        ):
            with fake_group(ranks), way(transformer, device):
                yield CountedCall(name, partial(steps, Generation(transformer, kwargs), number), number)
