"""FLUX.1-dev's transformer with random weights at 1024 × 1024: the time of a step, and the host's share of it.

It is the transformer of diffusers if that is installed, else the same in plain PyTorch (flux_model.py). Compiled
variants come last, because they take longest and may be left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.flux_model import FluxTransformer2DModel
from benchmarks.gpu.job import OK, WRONG, SectionJob, SectionSkipped
from benchmarks.gpu.processes import group_of_one
from benchmarks.gpu.timing import milliseconds, synchronize
from benchmarks.harness import relative_error
from para_core import init_context_parallel_mesh, model_cache_report, remove_cache

# These are the published sizes.
REAL: dict[str, Any] = {size.name: size.default for size in signature(FluxTransformer2DModel).parameters.values()}
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
# Published for FLUX.1-dev on one H100: 67.4 s to compile the whole transformer, 9.6 s to compile its repeated blocks,
# and 6.7 s (eager) for 28 steps (docs.pytorch.org/devlogs/inductor/2026-05-11-torch-compile-and-diffusers). Each is
# allowed twice that, for slower hosts and cards, and 11 steps (of a cached variant 21, half of them skipped) of at most
# a second.
STEPS = 15.0  # seconds
BLOCKS = 2 * 10.0 + STEPS
ONE_GRAPH = 2 * 67.4 + STEPS
# 12 billion parameters of 2 bytes are 23.8 GB. Activations, workspaces and CUDA graphs need the rest.
LEAST_FREE = 30e9  # bytes
# Compiled kernels in bfloat16 round in other places, which adds up over 57 blocks. A step with wrong attention has a
# larger error.
BOUND = 0.1


def has_diffusers() -> bool:
    try:
        from diffusers import FluxTransformer2DModel  # noqa: F401
    except (ImportError, RuntimeError):  # diffusers raises RuntimeError if a module that it imports does not import.
        return False
    return True


def require_diffusers() -> None:
    if not has_diffusers():
        raise SectionSkipped("needs diffusers, which this Python does not have")


def flux_transformer(device: torch.device, *, tiny: bool) -> Any:
    """Return FLUX.1's transformer in bfloat16, initialized on ``device`` with the defaults of its layers."""
    config = TINY if tiny else REAL
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            if has_diffusers():
                import diffusers

                transformer: Any = diffusers.FluxTransformer2DModel(**config, guidance_embeds=True)
            else:
                transformer = FluxTransformer2DModel(**config)
            return transformer.eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def flux_inputs(device: torch.device, *, tiny: bool) -> dict[str, Tensor]:
    # There are 4,096 tokens of the image and 512 of text.
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


def run(job: SectionJob) -> None:
    if job.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(job.device)
        require_memory(free, total)
    backend = "gloo" if job.device.type == "cpu" else "nccl"
    with group_of_one(backend, job.device), torch.no_grad():
        if not job.has_time("the model", NEEDS["the model"]):
            return
        transformer, kwargs = flux_transformer(job.device, tiny=job.tiny), flux_inputs(job.device, tiny=job.tiny)
        job.add(transformer=f"{type(transformer).__module__}.{type(transformer).__name__}")
        expected = transformer(**kwargs, return_dict=False)[0]
        for way, kind in VARIANTS:
            _measure(job, transformer, kwargs, expected, way, kind)


def require_memory(free: int, total: int) -> None:
    """Raise :class:`SectionSkipped` if the model does not fit into ``free`` bytes."""
    if free < LEAST_FREE:
        raise SectionSkipped(
            f"needs {LEAST_FREE / 1e9:.0f} GB of free GPU memory; this device has {free / 1e9:.1f} of "
            f"{total / 1e9:.1f} GB free"
        )


@contextmanager
def plain(transformer: Any, device: torch.device) -> Iterator[None]:
    """Leave the transformer unmodified."""
    yield


@contextmanager
def parallel(transformer: Any, device: torch.device, **options: Any) -> Iterator[None]:
    """Parallelize the transformer on 1 rank."""
    from para_core.adapters import parallelize_transformer, unparallelize_transformer

    parallelize_transformer(transformer, mesh=init_context_parallel_mesh(device.type), **options)
    try:
        yield
    finally:
        unparallelize_transformer(transformer)


@contextmanager
def triton(transformer: Any, device: torch.device) -> Iterator[None]:
    """Parallelize the transformer on 1 rank, with attention by the Triton kernel."""
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
def compiled(transformer: Any, kind: str, device: torch.device) -> Iterator[Callable[..., Any]]:
    """Yield the compiled form of ``transformer`` for this ``kind``, and undo the compilation."""
    # Inductor would take minutes on a CPU.
    backend = {"backend": "eager"} if device.type == "cpu" else {}
    try:
        if kind == "eager":
            yield transformer
        elif kind == "blocks":
            transformer.compile_repeated_blocks(fullgraph=True, **backend)
            yield transformer
        elif kind == "one graph":
            yield torch.compile(transformer, fullgraph=True, **backend)
        else:
            yield torch.compile(transformer, fullgraph=True, mode="reduce-overhead")
    finally:
        for module in transformer.modules():
            if module._compiled_call_impl is not None:
                module._compiled_call_impl = None  # nn.Module.compile sets it, and has no inverse.
        torch.compiler.reset()


Way = Callable[[Any, torch.device], Any]
# The most common variants come first. A cache and CUDA graphs do not combine: the cache's state would be outputs of a
# graph, which its next run overwrites.
VARIANTS: tuple[tuple[Way, str], ...] = (
    (plain, "eager"),
    (parallel, "eager"),
    (cached, "eager"),
    (triton, "eager"),
    (plain, "blocks"),
    (parallel, "blocks"),
    (cached, "blocks"),
    (triton, "blocks"),
    (parallel, "one graph"),
    (parallel, "reduce-overhead"),
)


def variant_name(way: Way, kind: str) -> str:
    return f"{way.__name__}, {kind}"  # type: ignore[attr-defined]


_BY_KIND = {"eager": STEPS, "blocks": BLOCKS, "one graph": ONE_GRAPH, "reduce-overhead": ONE_GRAPH}
# These are the allowed seconds of each step of the section.
NEEDS = {"the model": 20.0, **{variant_name(way, kind): _BY_KIND[kind] for way, kind in VARIANTS}}


def _measure(
    job: SectionJob, transformer: Any, kwargs: dict[str, Tensor], expected: Tensor, way: Way, kind: str
) -> None:
    """Add a row: milliseconds per step, peak memory, and the error against the plain eager model."""
    name = variant_name(way, kind)
    if job.device.type == "cpu" and (way is triton or kind == "reduce-overhead"):
        job.leave_out(name, "needs a CUDA device")
        return
    if not job.has_time(name, NEEDS[name]):
        return
    # A cached model alternates between two kinds of step.
    per_call = 2 if way is cached else 1

    def timed() -> dict[str, Any]:
        with way(transformer, job.device), compiled(transformer, kind, job.device) as call:
            return _timed(job, transformer, partial(call, **kwargs, return_dict=False), expected, per_call)

    job.measure(timed, way=name)


def _timed(
    job: SectionJob, transformer: Any, call: Callable[[], Any], expected: Tensor, per_call: int
) -> dict[str, Any]:
    def step() -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        out: Tensor = call()[0]
        return out

    def steps() -> None:
        for _ in range(per_call):
            step()

    began = time.monotonic()
    error = relative_error(step(), expected)
    synchronize(job.device)
    first = time.monotonic() - began
    # The other kind of step of a cache, and the recording of a CUDA graph, are not measured.
    for _ in range(2):
        steps()
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
    times = milliseconds(steps, job.device, repeats=3 if job.tiny else 8)
    error = max(error, relative_error(step(), expected))
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


class EulerScheduler:
    """Euler steps of rectified flow from noise (1) to an image (0)."""

    def __init__(self) -> None:
        self.timesteps = torch.empty(0)
        self.step_index = 0

    def set_timesteps(self, num_inference_steps: int) -> None:
        self.timesteps = torch.linspace(1.0, 0.0, num_inference_steps + 1)[:-1]
        self.step_index = 0

    def step(self, velocity: Tensor, latents: Tensor) -> Tensor:
        self.step_index += 1
        return latents - velocity / len(self.timesteps)


class SmallFluxPipeline:
    """A pipeline that denoises latents with a transformer of FLUX.1's form."""

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer, self.scheduler = transformer, EulerScheduler()

    @torch.no_grad()
    def __call__(
        self,
        latents: Tensor,
        conditions: dict[str, Tensor],
        num_inference_steps: int,
        callback_on_step_end: Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Tensor:
        """Return the denoised latents.

        Args:
            latents: ``[B, S_image, C]``.
            conditions: the other arguments of the transformer, without the timestep.
        """
        self.scheduler.set_timesteps(num_inference_steps)
        for index, timestep in enumerate(self.scheduler.timesteps):
            time = timestep.to(latents).expand(latents.shape[0])
            velocity = self.transformer(hidden_states=latents, timestep=time, return_dict=False, **conditions)[0]
            latents = self.scheduler.step(velocity, latents)
            if callback_on_step_end is not None:
                callback_on_step_end(self, index, timestep, {"latents": latents})
        return latents


def small_flux(device: torch.device, *, blocks: tuple[int, int] = (3, 3)) -> SmallFluxPipeline:
    """Return a pipeline in float32 whose random weights are nonzero and equal on every rank."""
    config = {**TINY, "num_layers": blocks[0], "num_single_layers": blocks[1]}
    transformer = FluxTransformer2DModel(**config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return SmallFluxPipeline(transformer.eval().requires_grad_(False).to(device))


def small_call(device: torch.device, *, steps: int = 8, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of one generation with uneven numbers of tokens: 20 of the image and 5 of text."""
    conditions = {name: x.float() for name, x in flux_inputs(device, tiny=True).items()}
    shape = conditions.pop("hidden_states").shape
    del conditions["timestep"]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return {"latents": noise, "conditions": conditions, "num_inference_steps": steps}
