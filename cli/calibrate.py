"""``para_core calibrate``: the threshold of the cache for a quality, or for a speed; on one process, or on torchrun's ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from para_core.adapters import calibrate_cache
from para_core.adapters.cache.calibration.result import Metric
from para_core.cli.generate import read_fields
from para_core.cli.ranks import process_group, quiet
from para_core.fleet.models import find_model
from para_core.fleet.outputs import require_file
from para_core.fleet.prompts import read_prompts
from para_core.fleet.recipe import Dtype, Recipe, build, read_mesh_sizes
from para_core.fleet.request import call_arguments, make_request


def calibrate(
    model: Annotated[
        str | None, typer.Option(help="Folder or Hub name; left out: a tiny FLUX.", metavar="NAME")
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="One, or several times one.", metavar="TEXT")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines, as of generate.", metavar="FILE")] = None,
    metric: Annotated[str, typer.Option(help="psnr, ssim, lpips, speedup or computed_steps.", metavar="NAME")] = "psnr",
    target: Annotated[float, typer.Option(help="Of the metric: in dB for psnr.", metavar="X")] = 30.0,
    tries: Annotated[int, typer.Option(help="Thresholds that are tried, at most.", metavar="N")] = 8,
    size: Annotated[str | None, typer.Option(help="Width x height: 1024x768.", metavar="WxH")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.", metavar="N")] = None,
    seed: Annotated[int, typer.Option(help="Of the first prompt; each next has the next.", metavar="N")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any other field of the call.", metavar="FIELD=JSON")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.", metavar="TYPE")] = "auto",
    mesh: Annotated[str, typer.Option(help="batch=2,ring=2: largest sizes; left out: chosen.", metavar="DIMS")] = "",
    out: Annotated[Path | None, typer.Option(help="A JSON file with all that was tried.", metavar="FILE")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks, and all messages.")] = False,
) -> None:
    """Find the threshold of First Block Cache for a quality or a speed, on your prompts."""
    quiet(debug)
    require_file(out)
    if metric not in get_args(Metric):
        raise typer.BadParameter(f"--metric {metric}: expected one of {', '.join(get_args(Metric))}.")
    found = find_model(model)
    common: dict[str, Any] = {"size": size, "steps": steps, **read_fields(set_ or [])}
    common = {name: value for name, value in common.items() if value is not None}
    if prompts is not None:
        lines, problems = read_prompts(prompts, found, common, seed=seed)
        if problems:
            raise ValueError(f"{prompts}, line {problems[0].number}: {problems[0].reason}")
        requests = [line.request for line in lines]
    else:
        requests = [make_request({**common, "prompt": text}, found) for text in prompt or []]
    if not requests:
        raise typer.BadParameter("on which prompts? Give --prompt TEXT, or --prompts FILE.")
    recipe = Recipe(found.name, dtype=cast(Dtype, dtype), mesh=read_mesh_sizes(mesh))
    with process_group(recipe):
        calibration = calibrate_cache(
            build(recipe),
            [call_arguments(request) for request in requests],
            target=target,
            metric=cast(Metric, metric),
            tries=tries,
            seed=seed,
        )
    if os.environ.get("RANK", "0") == "0":
        Console(soft_wrap=True, highlight=False).print(str(calibration), markup=False)
        if out is not None:
            calibration.to_json(out)
