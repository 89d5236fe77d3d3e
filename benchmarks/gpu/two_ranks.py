"""Pipelines on two ranks that share one device, over gloo with CUDA tensors. The section ``nccl_ranks`` uses NCCL.

Each part runs in its own rank processes, so one that hangs leaves the results of the others. Nothing needs diffusers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu.flux import UNEVEN, flux_inputs, flux_transformer
from benchmarks.gpu.job import FAILED, OK, WRONG, SectionJob, first_line
from benchmarks.gpu.processes import Rows, run_ranks
from benchmarks.harness import relative_error
from para_core import PipeFusion, init_context_parallel_mesh
from para_core.distributed.groups import find_or_make_group
from para_core.spatial.mode import SpatialShardMode

# This is the bound for float32 without TF32 over a few blocks and steps. PipeFusion is compared with itself in one
# process.
BOUND = 1e-4
# These are the seconds of a part. Parts run at the same time.
NEEDS = {"a part": 115.0}
# A rank waits this long for a failed one, so that a hang becomes an error.
TIMEOUT = 25.0  # seconds
STEPS = 8


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


def small_flux(device: torch.device) -> SmallFluxPipeline:
    """Return a pipeline in float32 whose random weights are nonzero and equal on every rank."""
    return SmallFluxPipeline(flux_transformer(device, UNEVEN, torch.float32))


def small_call(device: torch.device, *, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of one generation."""
    conditions = flux_inputs(device, UNEVEN, torch.float32)
    shape = conditions.pop("hidden_states").shape
    del conditions["timestep"]
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
    return {"latents": noise, "conditions": conditions, "num_inference_steps": STEPS}


class PlannedFailure(Exception):
    """The error that all ranks raise during a generation."""


def run(job: SectionJob) -> None:
    if job.has_time("a part", NEEDS["a part"]):
        options = {"backend": "gloo", "seconds": job.seconds_left, "bind": job.part == "bound device"}
        add_part(job, job.part, 2, timeout=TIMEOUT, **options)


def add_part(job: SectionJob, part: str, num_ranks: int, *, backend: str, **options: Any) -> None:
    """Run ``part`` on ranks, and add a row per step with the worst result of its ranks, and a failed row for each rank
    that did not end.

    Args:
        options: arguments of :func:`run_ranks`.
    """
    common, before = {"group": f"{backend}, {num_ranks} rank(s)"}, list(job.rows)
    _, errors = run_ranks(
        rows_of_part,
        num_ranks,
        part,
        device=job.device,
        backend=backend,
        on_rows=lambda rows: job.replace_rows([*before, *[common | row for row in worst_of_ranks(rows)]]),
        **options,
    )
    for rank, error in errors.items():
        job.add(**common, step=f"rank {rank} ended", verdict=FAILED, raised=error.strip()[-1500:])


def worst_of_ranks(rows: list[Rows]) -> Rows:
    """Return a row per step: the worst verdict, the largest error, and what was raised."""
    worst_rows = []
    for step in dict.fromkeys(row["step"] for of_rank in rows for row in of_rank):
        of_step = [row for of_rank in rows for row in of_rank if row["step"] == step]
        verdicts = {row["verdict"] for row in of_step}
        worst = next(verdict for verdict in (WRONG, FAILED, OK) if verdict in verdicts)
        row: dict[str, Any] = {"step": step, "verdict": worst}
        numbers = [row["error"] for row in of_step if "error" in row]
        raised = dict.fromkeys(row["raised"] for row in of_step if "raised" in row)
        row |= {"error": max(numbers)} if numbers else {}
        row |= {"raised": " | ".join(raised)} if raised else {}
        worst_rows.append(row)
    return worst_rows


def rows_of_part(device: torch.device, part: str) -> Iterator[dict[str, Any]]:
    """Yield a row per step of ``part``. After a step that raised, ranks may disagree, so its row is the last."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for name, step in PARTS[part].items():
        try:
            error = step(device)
        except Exception as problem:
            yield {"step": name, "verdict": FAILED, "raised": first_line(problem)}
            raise
        yield {"step": name, "verdict": OK if error <= BOUND else WRONG, "error": error}


def _generate(pipe: SmallFluxPipeline, device: torch.device, **options: Any) -> Tensor:
    return pipe(**{**small_call(device), **options})


def _parallel(device: torch.device, *, stages: bool = False, ring: bool = False, **options: Any) -> SmallFluxPipeline:
    from para_core.adapters import parallelize_pipe

    ranks = dist.get_world_size()
    mesh = init_context_parallel_mesh(
        device.type, max_pipe_dim_size=ranks if stages else None, max_ring_dim_size=ranks if ring else 1
    )
    return parallelize_pipe(small_flux(device), mesh=mesh, **options)


def generation(device: torch.device, **mesh: bool) -> float:
    """Compare the ring, the stages or, without an option, Ulysses over all ranks with one rank."""
    return relative_error(_generate(_parallel(device, **mesh), device), _generate(small_flux(device), device))


def pipefusion(device: torch.device) -> float:
    """Compare patches on all ranks with the same patches in one process."""
    from para_core.adapters import pipefusion_report

    pipe = _parallel(device, stages=True, pipefusion=PipeFusion(4))
    expected = _generate(_alone(device, pipefusion=PipeFusion(4)), device)
    error = max(relative_error(_generate(pipe, device), expected) for _ in range(2))
    if pipefusion_report(pipe).patched_calls == 0:
        raise RuntimeError("no call ran on patches")
    return error


def _alone(device: torch.device, **options: Any) -> SmallFluxPipeline:
    """Return the pipeline with ``options`` on a mesh of this rank alone, which exchanges nothing."""
    from para_core.adapters import parallelize_pipe

    group = find_or_make_group(f"gpu-check: rank {dist.get_rank()} alone", [dist.get_rank()])
    return parallelize_pipe(small_flux(device), mesh=group, **options)


def group_of_some(device: torch.device) -> float:
    """Create a group of the first rank alone, on that rank only, and reduce over it."""
    x = torch.ones(3, device=device)
    if dist.get_rank() == 0:
        dist.all_reduce(x, group=find_or_make_group("gpu-check: the first rank", [0]))
    dist.barrier()
    return relative_error(x, torch.ones(3, device=device))


def rows_of_an_image(device: torch.device) -> float:
    """Run a convolution and a group norm on rows, which exchange halos and statistics."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 8, 13, 9, generator=generator), torch.randn(8, 8, 3, 3, generator=generator)
    x, weight = x.to(device), weight.to(device)

    def model(x: Tensor) -> Tensor:
        return F.group_norm(F.conv2d(x, weight, padding=1), 4)

    expected = model(x)
    with SpatialShardMode(init_context_parallel_mesh(device.type, max_ring_dim_size=1)) as rows:
        return relative_error(rows.gather(model(rows.shard(x))), expected)


def _after(device: torch.device, fail: Callable[[SmallFluxPipeline], Tensor], **options: Any) -> float:
    """Generate, fail on all ranks in the same way, and generate again with other latents. Return the error of the last
    generation.
    """
    pipe = _parallel(device, stages=True, **options)
    _generate(pipe, device)
    try:
        fail(pipe)
    except PlannedFailure:
        pass
    else:
        raise RuntimeError("the generation that should have failed did not")
    # The latents differ from those of the failed generation, so that one of its messages would give another result.
    other = {"latents": small_call(device, seed=1)["latents"]}
    out = _generate(pipe, device, **other)
    alone = _alone(device, **options) if options else small_flux(device)
    return relative_error(out, _generate(alone, device, **other))


def _fail_in_callback(pipe: SmallFluxPipeline) -> Tensor:
    def callback(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == 3:
            raise PlannedFailure("in the callback")
        return tensors

    device = next(pipe.transformer.parameters()).device
    return _generate(pipe, device, callback_on_step_end=callback)


def _fail_in_call(pipe: SmallFluxPipeline) -> Tensor:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise PlannedFailure("in the fifth call of the transformer")

    device = next(pipe.transformer.parameters()).device
    handle = pipe.transformer.register_forward_pre_hook(count)
    try:
        return _generate(pipe, device)
    finally:
        handle.remove()


Steps = dict[str, Callable[[torch.device], float]]
EXACT: Steps = {
    "sequence": generation,
    "ring": partial(generation, ring=True),
    "a group of some ranks": group_of_some,
    "stages": partial(generation, stages=True),
    "rows of an image": rows_of_an_image,
}
PARTS: dict[str, Steps] = {
    "exact": EXACT,
    "bound device": {f"{name}, device_id given": step for name, step in EXACT.items()},
    "pipefusion": {"PipeFusion": pipefusion},
    "stages, failed call": {"stages after a failed call": partial(_after, fail=_fail_in_call)},
    "PipeFusion, failed callback": {
        "PipeFusion after a failed callback": partial(_after, fail=_fail_in_callback, pipefusion=PipeFusion(4))
    },
    "PipeFusion, failed call": {
        "PipeFusion after a failed call": partial(_after, fail=_fail_in_call, pipefusion=PipeFusion(4))
    },
}
