"""FLUX.1-dev's transformer with random weights at 1024 × 1024: the time of a step, and the host's share of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.flux_model import FluxTransformer2DModel
from benchmarks.gpu.job import OK, WRONG, SectionJob, SectionSkipped
from benchmarks.gpu.timing import milliseconds, synchronize
from benchmarks.harness import fake_group, relative_error
from para_core import init_context_parallel_mesh, model_cache_report, remove_cache

# These are the published sizes.
PUBLISHED: dict[str, Any] = {size.name: size.default for size in signature(FluxTransformer2DModel).parameters.values()}


@dataclass(frozen=True)
class FluxSize:
    """The size of a transformer and of its inputs.

    Args:
        changes: arguments of the transformer that differ from the published ones.
        side: tokens of a side of the image.
        text: tokens of the text.
    """

    side: int = 64
    text: int = 512
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        return PUBLISHED | self.changes

    @property
    def layers(self) -> str:
        return f"{self.config['num_layers']} + {self.config['num_single_layers']} blocks"


_FEW = {"num_layers": 2, "num_single_layers": 4}
_NARROW = {
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
FULL = FluxSize()
# A stack of the published blocks takes a tenth of the memory and time.
STACK = FluxSize(changes=_FEW)
TINY_STACK = FluxSize(4, 8, _FEW | _NARROW)
TINY = FluxSize(4, 8, {"num_layers": 1, "num_single_layers": 1} | _NARROW)
# Two ranks share 25 tokens of the image, 5 of text, and 3 heads unevenly.
UNEVEN = FluxSize(5, 5, {"num_layers": 3, "num_single_layers": 3} | _NARROW | {"num_attention_heads": 3})


def flux_transformer(device: torch.device, size: FluxSize, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a transformer on ``device`` with random weights, which are equal in every process on that device.

    No weight is 0, so each block changes the result. Queries and keys are large, so that attention picks a few keys: a
    mean over thousands of random values would be nearly 0, and its errors would not be seen.
    """
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(**size.config).to(dtype).eval().requires_grad_(False)
    transformer.to_empty(device=device)
    torch.manual_seed(0)
    for module in transformer.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.RMSNorm):
                parameter.normal_(2.0, 0.2)
            elif parameter.ndim == 1:
                parameter.normal_(0.0, 0.2)
            else:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5)
    return transformer


def flux_inputs(device: torch.device, size: FluxSize, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    side, config = size.side, size.config

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    image_ids = torch.zeros(side, side, 3)
    image_ids[..., 1] += torch.arange(side)[:, None]
    image_ids[..., 2] += torch.arange(side)[None, :]
    return {
        "hidden_states": normal(1, side * side, config["in_channels"]),
        "encoder_hidden_states": normal(1, size.text, config["joint_attention_dim"]),
        "pooled_projections": normal(1, config["pooled_projection_dim"]),
        # The model multiplies both by 1000, and bfloat16 holds these products exactly.
        "timestep": torch.tensor([0.5], device=device, dtype=dtype),
        "guidance": torch.tensor([4.0], device=device, dtype=dtype),
        "img_ids": image_ids.reshape(side * side, 3).to(device, dtype),
        "txt_ids": torch.zeros(size.text, 3, device=device, dtype=dtype),
    }


class Generation:
    """The steps of a generation. The timestep falls from step to step, because a cache asks which step it is."""

    def __init__(self, call: Callable[..., tuple[Tensor]], kwargs: dict[str, Tensor]) -> None:
        self._call, self._kwargs = call, kwargs
        first = kwargs["timestep"]
        # bfloat16 holds these numbers exactly. After the last one a generation begins.
        falling = first * (1 - torch.arange(128, device=first.device).to(first.dtype) / 256)
        self._timesteps = itertools.cycle(falling.split(1))

    def step(self) -> Tensor:
        return self._call(**self._kwargs | {"timestep": next(self._timesteps)})[0]


# -- Ways to run a transformer. Each needs a process group.


@contextmanager
def plain(transformer: Any, device: torch.device) -> Iterator[None]:
    """Leave the transformer unmodified."""
    yield


@contextmanager
def parallel(transformer: Any, device: torch.device, *, ring: bool = False, **options: Any) -> Iterator[None]:
    """Parallelize the transformer over all ranks, by Ulysses or by a ring."""
    from para_core.adapters import parallelize_transformer, unparallelize_transformer

    mesh = init_context_parallel_mesh(device.type, max_ring_dim_size=dist.get_world_size() if ring else 1)
    parallelize_transformer(transformer, mesh=mesh, **options)
    try:
        yield
    finally:
        unparallelize_transformer(transformer)


@contextmanager
def triton(transformer: Any, device: torch.device) -> Iterator[None]:
    """Parallelize the transformer, with attention by the Triton kernel."""
    with parallel(transformer, device, backend="triton"):
        yield


@contextmanager
def cached(transformer: Any, device: torch.device) -> Iterator[None]:
    """Cache the transformer so that every second step is skipped."""
    from para_core.adapters import apply_cache_on_transformer

    apply_cache_on_transformer(transformer, residual_diff_threshold=1e9, max_consecutive_hits=1)
    try:
        yield
    finally:
        remove_cache(transformer)


@contextmanager
def compiled(transformer: Any, kind: str, backend: str) -> Iterator[Callable[..., Any]]:
    """Yield the compiled form of ``transformer`` for this ``kind``, and undo the compilation."""
    try:
        if kind == "eager":
            yield transformer
        elif kind == "blocks":
            transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
            yield transformer
        elif kind == "one graph":
            yield torch.compile(transformer, fullgraph=True, backend=backend)
        else:
            yield torch.compile(transformer, fullgraph=True, mode="reduce-overhead")
    finally:
        for module in transformer.modules():
            if module._compiled_call_impl is not None:
                module._compiled_call_impl = None  # nn.Module.compile sets it, and has no inverse.
        torch.compiler.reset()


# A variant has a way and a kind.
Variant = tuple[Callable[..., Any], str]


def variant_name(variant: Variant) -> str:
    way, kind = variant
    return f"{way.__name__}, {kind}"


# Compiled variants come last, because they take longest and may be left out.
VARIANTS: tuple[Variant, ...] = (
    (plain, "eager"),
    (parallel, "eager"),
    (cached, "eager"),
    (plain, "blocks"),
    (parallel, "blocks"),
    (cached, "blocks"),
    (triton, "eager"),
)
# Published for FLUX.1-dev on one H100: 9.6 s to compile its repeated blocks, 67.4 s to compile the whole, and 6.7 s
# (eager) for 28 steps (docs.pytorch.org/devlogs/inductor/2026-05-11-torch-compile-and-diffusers).
_SECONDS = {"eager": 6.0, "blocks": 22.0}
NEEDS = {"the model": 15.0, **{variant_name(variant): _SECONDS[variant[1]] for variant in VARIANTS}}
# 12 billion parameters of 2 bytes are 23.8 GB. Activations, workspaces and CUDA graphs need the rest.
LEAST_FREE = 30e9  # bytes
# Compiled kernels in bfloat16 round in other places, which adds up over 57 blocks. A step with wrong attention has a
# larger error.
BOUND = 0.04


def run(job: SectionJob) -> None:
    measure_variants(job, TINY if job.tiny else FULL, VARIANTS, NEEDS)


def measure_variants(job: SectionJob, size: FluxSize, variants: Sequence[Variant], needs: dict[str, float]) -> None:
    """Add a row per variant of a transformer on one rank."""
    if job.device.type == "cuda" and size is FULL:
        require_memory(*torch.cuda.mem_get_info(job.device))
    with fake_group(1), torch.no_grad():
        if not job.has_time("the model", needs["the model"]):
            return
        transformer, kwargs = flux_transformer(job.device, size), flux_inputs(job.device, size)
        expected = transformer(**kwargs)[0]
        eager: dict[str, float] = {}
        for variant in variants:
            name = variant_name(variant)
            if job.device.type == "cpu" and variant[0] is triton:
                job.leave_out(name, "needs a CUDA device")
            elif job.has_time(name, needs[name]):
                job.measure(_measured, job, transformer, kwargs, expected, variant, eager, way=name, model=size.layers)


def require_memory(free: int, total: int) -> None:
    """Raise :class:`SectionSkipped` if the model does not fit into ``free`` bytes."""
    if free < LEAST_FREE:
        raise SectionSkipped(
            f"needs {LEAST_FREE / 1e9:.0f} GB of free GPU memory; this device has {free / 1e9:.1f} of "
            f"{total / 1e9:.1f} GB free"
        )


def _measured(
    job: SectionJob,
    transformer: Any,
    kwargs: dict[str, Tensor],
    expected: Tensor,
    variant: Variant,
    plain_ms: dict[str, float],
) -> dict[str, Any]:
    """Return milliseconds per step, peak memory, and the error against the plain eager model.

    Args:
        plain_ms: milliseconds of the plain model by kind, to which this adds its own.
    """
    way, kind = variant
    # A cached model alternates between two kinds of step.
    per_call = 2 if way is cached else 1
    with way(transformer, job.device), compiled(transformer, kind, job.compile_backend) as call:
        row = _timed(job, transformer, call, kwargs, expected, per_call)
    if way is plain:
        plain_ms[kind] = row["ms per step"]
    ratios = {
        f"of {variant_name((plain, of_kind))}'s time": round(row["ms per step"] / max(ms, 1e-6), 3)
        for of_kind, ms in plain_ms.items()
    }
    return {**row, **ratios}


def _timed(
    job: SectionJob,
    transformer: Any,
    call: Callable[..., tuple[Tensor]],
    kwargs: dict[str, Tensor],
    expected: Tensor,
    per_call: int,
) -> dict[str, Any]:
    generation = Generation(call, kwargs)

    def steps() -> None:
        for _ in range(per_call):
            torch.compiler.cudagraph_mark_step_begin()
            generation.step()

    began = time.monotonic()
    error = relative_error(generation.step(), expected)
    synchronize(job.device)
    first = time.monotonic() - began
    # The other kind of step of a cache, and the recording of a CUDA graph, are not measured.
    for _ in range(2):
        steps()
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    times = milliseconds(steps, job.device, repeats=3 if job.tiny else 8)
    # The timestep is the first one again, so a cache begins and computes.
    torch.compiler.cudagraph_mark_step_begin()
    error = max(error, relative_error(call(**kwargs)[0], expected))
    row: dict[str, Any] = {f"{kind} per step": round(value / per_call, 3) for kind, value in times.items()}
    row |= {
        "verdict": OK if error <= BOUND else WRONG,
        "seconds of the first step": round(first, 1),
        "error against plain": error,
    }
    if per_call > 1:
        report = model_cache_report(transformer)
        if report.rows:  # A graph keeps no rows.
            row["steps skipped"] = f"{report.hits} of {len(report.rows)}"
    if job.device.type == "cuda":
        row["peak GB"] = round(torch.cuda.max_memory_allocated(job.device) / 1e9, 2)
    return row
