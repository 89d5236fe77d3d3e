"""``para_core generate``: generate one prompt, or a file of prompts, on one group of ranks or on several replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from para_core.cli import options
from para_core.cli.options import INPUT, RANKS, flag, option


def generate(
    *,
    model: options.Model = None,
    prompt: Annotated[str | None, option("What to generate.", "TEXT", INPUT)] = None,
    prompts: options.Prompts = None,
    out: Annotated[Path, option("Folder of the results.", "FOLDER", INPUT, parser=options.read_folder)] = Path("out"),
    name: Annotated[str | None, option("Beginning of the file names.", "TEXT", INPUT)] = None,
    call: options.CallOptions,
    format_: options.Format = None,
    fps: options.Fps = 16,
    run: options.RunOptions,
    ranks: options.Ranks = None,
    memory: Annotated[float | None, option("Of a rank. Default: its device's.", "GB", RANKS)] = None,
    replicas: Annotated[int, option("Groups of ranks, on Ray.", "N", RANKS)] = 1,
    dry_run: Annotated[bool, flag("--dry-run", "Show the plan; generate nothing.", RANKS)] = False,
    debug: options.Debug = False,
) -> None:
    """Generate images or videos. Results that exist in the folder are not generated again."""
    from para_core.cli.generation import make_task, run_task, show_plan
    from para_core.cli.ranks import count_ranks, quiet

    quiet(debug)
    if memory is not None and not memory > 0:
        raise typer.BadParameter(f"--memory {memory:g}: expected more than 0 GB.")
    if prompt is not None and prompts is not None:
        raise typer.BadParameter("--prompt and --prompts: expected one of them.")
    common = call.fields(prompt=prompt)
    pipeline, recipe = options.model_and_recipe(model, run)
    task = make_task(
        pipeline,
        recipe,
        common,
        prompts=prompts,
        folder=out,
        prefix=name,
        format_=format_,
        fps=fps,
        seed=call.seed,
        ranks=count_ranks(ranks, replicas),
        replicas=replicas,
        room=None if memory is None else memory * 1e9,
    )
    if dry_run:
        show_plan(task)
        raise typer.Exit(1 if task.problems else 0)
    raise typer.Exit(run_task(task, debug))
