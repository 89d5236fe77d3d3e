"""Pipeline stages and PipeFusion: exactness, bytes sent, and the share of time that a stage waits.

    python -m benchmarks.pipelines.exactness stages  # tiny transformers, bit by bit, without stages too
    python -m benchmarks.pipelines.stages             # times of the FLUX that was trained here, on 2 stages

Both write benchmarks/results/stages.json (docs/stages.md). `benchmarks.pipelines.lossy` measures how PipeFusion changes
images.
"""

from __future__ import annotations

import time
import warnings
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cache.ways import TEXT_TOKENS, load
from benchmarks.harness import (
    markdown_table,
    measure_on_ranks,
    parser_of,
    read_results,
    true_on_all_ranks,
    write_results,
)
from benchmarks.pipelines.weights import NAMES, build, result
from para_core import PipeFusion
from para_core.adapters import parallelize_pipe, parallelize_transformer, pipefusion_report
from para_core.adapters.inspect.components import blocks_of
from para_core.weights.stack import stages_of
from zoo.tiny.transformers.registry import MODELS

DIMS = ("pipe", "batch", "ring", "ulysses")
# Each heading has mesh shapes by number of ranks.
CELLS = {
    2: {"alone": (2, 1, 1, 1), "cache": (2, 1, 1, 1), "blocks compiled": (2, 1, 1, 1)},
    4: {
        "alone": (4, 1, 1, 1),
        "Ulysses": (2, 1, 1, 2),
        "ring": (2, 1, 2, 1),
        "batch": (2, 2, 1, 1),
        "cache": (2, 1, 1, 2),
        "blocks compiled": (2, 1, 1, 2),
    },
}
HEADINGS = ("alone", "Ulysses", "ring", "batch", "cache", "blocks compiled")
TIMED_STEPS = 10
# For times, an image has this many pixels along a side, which gives 1,024 tokens.
LARGE = 512
# These are the sizes of FLUX.1 [dev] at 1024 × 1024, for calculated bytes.
BLOCKS, WIDTH, TOKENS = 57, 3072, 4096 + 512


def deep(name: str) -> nn.Module:
    """Return a model with four blocks of each kind."""
    counts = [key for key in ("num_layers", "n_layers", "num_single_layers") if key in MODELS[name].config]
    return build(name, **dict.fromkeys(counts or ["num_layers"], 4))


# -- Exact stages, on ranks.


def exact_cell(name: str, heading: str, shape: tuple[int, ...]) -> bool:
    """Return whether all ranks have the bits of the same mesh without stages."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMS)
    whole, staged = deep(name), deep(name)
    rest = mesh["batch", "ring", "ulysses"]
    if rest.size() > 1:
        parallelize_transformer(whole, mesh=rest)
    parallelize_transformer(staged, mesh=mesh)
    if heading == "blocks compiled":
        for block in (*blocks_of(whole), *blocks_of(staged)):
            # compile_repeated_blocks does this, but CogVideoX and Mochi do not have it.
            block.compile(backend="aot_eager", fullgraph=True)
    expected, out = (result(each, name, heading) for each in (whole, staged))
    return true_on_all_ranks(torch.equal(expected, out))


def measure(titles: list[str]) -> dict[str, Any]:
    """Return the rows of models on meshes with this number of ranks."""
    cells = CELLS[dist.get_world_size()]
    return {
        title: {"same bits": {heading: exact_cell(NAMES[title], heading, shape) for heading, shape in cells.items()}}
        for title in titles
    }


def problems(by_ranks: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for each model that has other bits on some mesh than without stages."""
    return [
        f"stages of {title} on {ranks} ranks: not the same bits: {row['same bits']}"
        for ranks, rows in by_ranks.items()
        for title, row in rows.items()
        if not all(row["same bits"].values())
    ]


# -- PipeFusion, on ranks.


def large(pipe: Any) -> None:
    sizes = {"height": LARGE, "width": LARGE, "max_sequence_length": TEXT_TOKENS, "output_type": "latent"}
    noise_of = torch.Generator().manual_seed(0)
    pipe("a large red circle", num_inference_steps=TIMED_STEPS, generator=noise_of, **sizes)


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def timed(run: Any, seconds: list[float]) -> Any:
    """Return ``run`` with the CPU seconds of each call added to ``seconds``. Waiting for other ranks takes no CPU
    seconds.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return run(*args, **kwargs)
        finally:
            seconds.append(time.thread_time() - start)

    return call


def exact_time() -> dict[str, Any]:
    """Return the CPU seconds of a call on each exact stage, and the seconds of all calls with waiting."""
    pipe = parallelize_pipe(load(), mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pipe",)))
    stages, seconds = stages_of(pipe.transformer), []
    assert stages is not None
    # Bind it before it is wrapped, because code around the model is looked up on its class.
    pipe.transformer.forward = timed(pipe.transformer.forward, seconds)
    start = time.perf_counter()
    large(pipe)
    elapsed = time.perf_counter() - start
    return {
        "cpu seconds": gathered(median(seconds)),
        "seconds": gathered(elapsed),
        "seconds waited": gathered(stages.links.seconds_waited),
    }


def fused_time(num_patches: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pipe",))
    pipe = parallelize_pipe(load(), mesh=mesh, pipefusion=PipeFusion(num_patches))
    seconds: list[float] = []
    pipe.transformer.forward = timed(pipe.transformer.forward, seconds)
    large(pipe)
    report = pipefusion_report(pipe)
    patches = [median(seconds[1 + index :: num_patches]) for index in range(num_patches)]
    return {
        "cpu seconds": gathered(patches),
        "seconds": gathered(report.seconds),
        "seconds waited": gathered(report.seconds_waited),
    }


def measure_fused() -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {"exact": exact_time(), **{str(count): fused_time(count) for count in (2, 4, 8)}}


def scheduled(patches: list[list[float]], steps: int = 100) -> tuple[float, list[float]]:
    """Return the seconds of a step and the share that each stage waits, if every stage has its own core and links take
    no time.

    Args:
        patches: the seconds of each patch, for each stage.
    """
    stages = len(patches)
    free, back = [0.0] * stages, [0.0] * len(patches[0])
    for _ in range(steps):
        for index in range(len(back)):
            ready = back[index]
            for stage in range(stages):
                free[stage] = ready = max(free[stage], ready) + patches[stage][index]
            back[index] = ready
    step = max(free) / steps
    return step, [1 - sum(own) / step for own in patches]


# -- The page.


def time_table(fused: dict[str, Any]) -> list[str]:
    """Return a row for each number of patches: the seconds of a scheduled step, and the shares that ranks wait."""
    rows = []
    for name in ("exact", "2", "4", "8"):
        run, exact = fused[name], name == "exact"
        step, waits = scheduled([[x] if exact else x for x in run["cpu seconds"]])
        cells = [
            "exact stages" if exact else f"PipeFusion({name})",
            f"{step * 1000:.0f} ms",
            " · ".join(f"{x:.0%}" for x in waits),
            " · ".join(f"{waited / x:.0%}" for waited, x in zip(run["seconds waited"], run["seconds"], strict=True)),
        ]
        rows.append(cells)
    return markdown_table(["", "a step, scheduled", "waits, scheduled", "waited, measured"], rows)


def paper_table() -> list[str]:
    """Return the megabytes that a rank sends per step, for FLUX.1 [dev] at 1024 × 1024 in bfloat16."""
    rows = []
    for ranks in (2, 4, 8):
        stages = TOKENS * WIDTH * 2
        ulysses = BLOCKS * 4 * TOKENS * WIDTH * 2 * (ranks - 1) / ranks**2
        ring = BLOCKS * 2 * TOKENS * WIDTH * 2 * (ranks - 1) / ranks
        rows.append([ranks, *(f"{sent / 1e6:,.0f}" for sent in (stages, ulysses, ring))])
    return markdown_table(["ranks", "stages, PipeFusion", "Ulysses", "ring"], rows, right=range(4))


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/stages.md, except that of `benchmarks.pipelines.lossy`."""
    results = read_results("stages")
    by_ranks = results["by ranks"].values()
    cells = [cell for rows in by_ranks for row in rows.values() for cell in row["same bits"].values()]
    summary = (
        f"{len(set().union(*by_ranks))} tiny models on 2 and 4 ranks, alone, with Ulysses, a ring, `batch`, a cache, "
        f"and compiled blocks: {sum(cells)} of {len(cells)} cells have the same bits as the same mesh without stages."
    )
    return {"exactness": [summary], "times": time_table(results["fused, 2 ranks"]), "sent": paper_table()}


def main() -> None:
    """Measure the times on two ranks, and write them next to the results of `benchmarks.pipelines.exactness stages`."""
    parser_of(__doc__).parse_args()
    results = read_results("stages")
    fused = measure_on_ranks(measure_fused, 2)
    print(write_results("stages", {"by ranks": results["by ranks"], "fused, 2 ranks": fused}, "diffusers"))


if __name__ == "__main__":
    main()
