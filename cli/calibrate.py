"""``para_core calibrate``: find the First Block Cache threshold that gives a quality or a speed.

Runs in one process, or on the ranks that torchrun started.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console

from para_core.cli import checks, options
from para_core.cli.options import INPUT, option
from para_core.cli.progress import announce_imports
from para_core.fleet.outputs import require_file
from para_core.fleet.prompt_file import read_prompts, require_contents
from para_core.fleet.request import call_arguments, make_request
from para_core.option_values import Metric


def calibrate(
    *,
    model: options.Model = None,
    prompt: Annotated[list[str] | None, option("May be repeated.", "TEXT", INPUT)] = None,
    prompts: options.Prompts = None,
    size: options.Size = None,
    steps: options.Steps = None,
    seed: options.Seed = 0,
    image: options.Image = None,
    set_: options.Fields = None,
    out: Annotated[Path | None, option("JSON file for all tried thresholds.", "FILE", INPUT)] = None,
    metric: Annotated[str, option("psnr, ssim, lpips, speedup or computed_steps.", "NAME")] = "psnr",
    target: Annotated[float, option("Value of the metric, for psnr in dB.", "X")] = 30.0,
    tries: Annotated[int, option("Largest number of thresholds to try.", "N")] = 8,
    load: options.LoadOptions,
    debug: options.Debug = False,
) -> None:
    """Find the threshold of First Block Cache for a quality or a speed, on your prompts."""
    require_file(out)
    if prompt and prompts is not None:
        raise typer.BadParameter("--prompt and --prompts: expected one of them.")
    if not prompt and prompts is None:
        raise typer.BadParameter("there is no prompt; expected --prompt TEXT or --prompts FILE.")
    if prompts is not None:
        require_contents(prompts)
    if metric not in get_args(Metric):
        raise typer.BadParameter(f"--metric {metric}: expected one of {', '.join(get_args(Metric))}.")
    common = options.CallOptions(size=size, steps=steps, image=image, set_=set_).fields()
    checked = checks.check(model, load, debug=debug)
    checked.require_ranks(None, 1)
    for text in prompt or ("",):
        checked.require_request({**common, "prompt": text}, seed, several=prompts is not None)

    announce_imports()
    from para_core.adapters import calibrate_cache
    from para_core.cli.progress import showing_phases
    from para_core.cli.ranks import is_first_rank, process_group
    from para_core.fleet.build import build
    from para_core.fleet.classical import refuse_ranks
    from para_core.fleet.libraries import quiet
    from para_core.fleet.modular import set_guidance

    quiet(debug)
    recipe, pipeline = checked.recipe, checks.describe_model(model, checked)
    if prompts is not None:
        lines, problems = read_prompts(prompts, pipeline, common, seed=seed)
        if problems:
            raise ValueError(f"{prompts}, line {problems[0].number}: {problems[0].reason}")
        requests = [line.request for line in lines]
    else:
        texts = [{**common, "prompt": text} for text in prompt or ()]
        requests = [make_request(values, pipeline, seed=seed, read_image=_read_file) for values in texts]
    if not requests:
        raise typer.BadParameter("there is no prompt; expected --prompt TEXT or --prompts FILE.")
    refuse_ranks(pipeline, int(os.environ.get("WORLD_SIZE", "1")))
    with process_group(recipe):
        with showing_phases(shown=is_first_rank()):
            pipe, calls = build(recipe), [call_arguments(request) for request in requests]
        calibration = calibrate_cache(
            pipe,
            set_guidance(pipe, calls) if pipeline.modular else calls,
            target=target,
            metric=cast(Metric, metric),
            tries=tries,
            seed=seed,
        )
    if is_first_rank():
        Console(soft_wrap=True, highlight=False).print(str(calibration), markup=False)
        if out is not None:
            calibration.to_json(out)


def _read_file(path: str) -> bytes:
    return Path(path).read_bytes()
