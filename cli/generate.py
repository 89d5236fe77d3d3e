"""``para_core generate``: generate a prompt, or a file of prompts, on one group of ranks or on replicas."""

from __future__ import annotations

from typing import Annotated

import typer

from para_core.cli import checks, options
from para_core.cli.options import INPUT, flag, option
from para_core.cli.progress import announce_imports
from para_core.fleet.choice_of_ray import uses_ray
from para_core.fleet.prompt_file import require_contents
from para_core.fleet.result_files import require_name
from para_core.pipeline_options import RANKS


def generate(
    *,
    model: options.ModelOption = None,
    prompt: Annotated[str | None, option("What to generate.", "TEXT", INPUT)] = None,
    files: options.FileOptions,
    call: options.CallOptions,
    run: options.RunOptions,
    group: options.GroupOptions,
    dry_run: Annotated[bool, flag("--dry-run", "Show the plan; generate nothing.", RANKS)] = False,
    debug: options.DebugOption = False,
) -> None:
    """Generate images or videos. Results that exist in the folder are not generated again."""
    if prompt is not None and files.prompts is not None:
        raise typer.BadParameter("--prompt and --prompts: expected one of them.")
    common = call.fields(prompt=prompt)
    group.require_valid()
    require_name(files.name)
    if files.prompts is not None:
        require_contents(files.prompts)
    checked = checks.validate(model, run, debug=debug)
    checked.require_ranks(group.ranks, group.replicas)
    checked.require_format(files.format_)
    checked.require_request(common, call.seed, several=files.prompts is not None)
    if group.replicas > 1 and uses_ray(spread=False):
        checks.require_package("ray", "RAY_ADDRESS")

    announce_imports()
    from para_core.cli.generation import make_task, run_task, show_plan
    from para_core.fleet.libraries import quiet

    quiet(debug)
    pipeline = checks.describe_model(model, checked)
    task = make_task(pipeline, checked.recipe, common, call.seed, files, group)
    if dry_run:
        show_plan(task)
        if task.problems:
            raise typer.Exit(1)
        raise typer.Exit
    raise typer.Exit(run_task(task, debug))
