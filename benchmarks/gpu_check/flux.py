"""FLUX.1-dev's transformer with random weights, at 1024 × 1024: what a step takes, and how much of it is the host's.

Needs diffusers. What is compiled comes last: it takes longest, and is what is left out first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.exact import relative_error
from benchmarks.gpu_check.job import Job, SectionSkipped, first_line, is_fatal
from benchmarks.gpu_check.processes import group_of_one
from benchmarks.gpu_check.timing import milliseconds, synchronize
from para_core import init_context_parallel_mesh, model_cache_report, remove_cache

# As published: 4,096 tokens of the image and 512 of text, 24 heads × 128.
REAL: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
TINY = {
    **REAL,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
# Seconds that a variant needs, at real size, to be worth beginning.
EAGER, COMPILED = 10.0, 45.0


def require_diffusers() -> None:
    try:
        import diffusers  # noqa: F401
    except ImportError as error:
        raise SectionSkipped(f"needs diffusers, which this Python does not have ({error})") from error


def flux_transformer(device: torch.device, *, tiny: bool) -> Any:
    """Made where it runs, in bfloat16, with the weights that its layers begin with."""
    from diffusers import FluxTransformer2DModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            return FluxTransformer2DModel(**(TINY if tiny else REAL)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def flux_inputs(device: torch.device, *, tiny: bool) -> dict[str, Tensor]:
    side, text, config = (4, 5, TINY) if tiny else (64, 512, REAL)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    image_ids = torch.zeros(side, side, 3)
    image_ids[..., 1] += torch.arange(side)[:, None]
    image_ids[..., 2] += torch.arange(side)[None, :]
    return {
        "hidden_states": normal(1, side * side, config["in_channels"]),
        "encoder_hidden_states": normal(1, text, config["joint_attention_dim"]),
        "pooled_projections": normal(1, config["pooled_projection_dim"]),
        "timestep": torch.tensor([0.5], device=device, dtype=torch.bfloat16),
        "guidance": torch.tensor([3.5], device=device, dtype=torch.bfloat16),
        "img_ids": image_ids.reshape(side * side, 3).to(device, torch.bfloat16),
        "txt_ids": torch.zeros(text, 3, device=device, dtype=torch.bfloat16),
    }


def run(job: Job) -> None:
    require_diffusers()
    backend = "gloo" if job.device.type == "cpu" else "nccl"
    with group_of_one(backend, job.device), torch.no_grad():
        transformer, given = flux_transformer(job.device, tiny=job.tiny), flux_inputs(job.device, tiny=job.tiny)
        expected = transformer(**given, return_dict=False)[0]
        kinds = _kinds(job.device)
        # What is asked for most comes first.
        order = [(way, kind) for kind in kinds for way in (plain, parallel)]
        order += [(cached, kind) for kind in kinds if kind != "eager"]
        order = [order[0], (cached, "eager"), (triton, "eager"), *order[1:], (triton, "fullgraph")]
        for way, kind in order:
            _measure(job, transformer, given, expected, way, kind, kinds[kind])


# What torch.compile is given; None: eager.
CompileOptions = dict[str, Any] | None


def _kinds(device: torch.device) -> dict[str, CompileOptions]:
    if device.type == "cpu":  # Inductor would take minutes there, and has no CUDA graphs
        return {"eager": None, "fullgraph": {"fullgraph": True, "backend": "eager"}}
    return {
        "eager": None,
        "fullgraph": {"fullgraph": True},
        "reduce-overhead": {"fullgraph": True, "mode": "reduce-overhead"},
    }


@contextmanager
def plain(transformer: Any, device: torch.device) -> Iterator[None]:
    """As it is."""
    yield


@contextmanager
def parallel(transformer: Any, device: torch.device) -> Iterator[None]:
    """Parallel, on 1 rank."""
    from para_core.adapters import parallelize_transformer, unparallelize_transformer

    parallelize_transformer(transformer, mesh=init_context_parallel_mesh(device.type))
    try:
        yield
    finally:
        unparallelize_transformer(transformer)


@contextmanager
def triton(transformer: Any, device: torch.device) -> Iterator[None]:
    """Its attention by the Triton kernel, on 1 rank."""
    from para_core.adapters import parallelize_transformer, unparallelize_transformer

    parallelize_transformer(transformer, mesh=init_context_parallel_mesh(device.type), backend="triton")
    try:
        yield
    finally:
        unparallelize_transformer(transformer)


@contextmanager
def cached(transformer: Any, device: torch.device) -> Iterator[None]:
    """Cache, every second step skipped."""
    from para_core.adapters import apply_cache_on_transformer

    apply_cache_on_transformer(transformer, residual_diff_threshold=1e9, max_consecutive_hits=1)
    try:
        yield
    finally:
        remove_cache(transformer)


def _measure(
    job: Job,
    transformer: Any,
    given: dict[str, Tensor],
    expected: Tensor,
    way: Callable[..., Any],
    kind: str,
    options: CompileOptions,
) -> None:
    """A row: milliseconds per step, peak memory, and how far the result is from the plain model's."""
    name = f"{way.__name__}, {kind}"
    if way is triton and job.device.type == "cpu":
        job.leave_out(name, "the kernel needs a CUDA device")
        return
    needed = 0 if job.tiny else EAGER if options is None else COMPILED
    if job.seconds_left < needed:
        job.leave_out(name, f"out of time: {job.seconds_left:.0f} s left, it may need {needed:.0f}")
        return
    # A cached model alternates between two kinds of step.
    per_call = 2 if way is cached else 1
    try:
        with way(transformer, job.device):
            row = _timed(job, transformer, given, expected, per_call, options)
    except Exception as error:
        if is_fatal(error):
            raise
        job.add(way=name, raised=first_line(error))
        return
    finally:
        torch.compiler.reset()
    job.add(way=name, **row)


def _timed(
    job: Job,
    transformer: Any,
    given: dict[str, Tensor],
    expected: Tensor,
    per_call: int,
    options: CompileOptions,
) -> dict[str, Any]:
    called = transformer if options is None else torch.compile(transformer, **options)

    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        found: Tensor = called(**given, return_dict=False)[0]
        return found

    def steps() -> None:
        for _ in range(per_call):
            step()

    began = time.monotonic()
    error = relative_error(step(), expected)
    synchronize(job.device)
    first = time.monotonic() - began
    # The next ones: a cache's other kind of step, the recording of a CUDA graph.
    for _ in range(2):
        steps()
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    times = milliseconds(steps, job.device, repeats=3 if job.tiny else 8)
    row: dict[str, Any] = {f"{kind} per step": round(value / per_call, 3) for kind, value in times.items()}
    row |= {"seconds of the first step": round(first, 1), "error against plain": error}
    if per_call > 1:
        report = model_cache_report(transformer)
        if report.rows:  # a graph keeps none
            row["steps skipped"] = f"{report.hits} of {len(report.rows)}"
    if job.device.type == "cuda":
        row["peak GB"] = round(torch.cuda.max_memory_allocated(job.device) / 1e9, 2)
    return row
