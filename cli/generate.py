"""``para_core generate``: generate one prompt, or a file of prompts, on one group of ranks or on several replicas."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing.api import SignalException

from para_core.cli import options
from para_core.cli.bars import Bars, NoBars
from para_core.cli.options import INPUT, RANKS, flag, option
from para_core.cli.ranks import RankJob, RankReport, in_torchrun, quiet, run_job
from para_core.fleet.foresee import foresee_mesh, given_mesh, without_weights
from para_core.fleet.models import Model, find_model, require_field
from para_core.fleet.outputs import alone_in, choose_format, is_finished, require_room, too_large, write_result
from para_core.fleet.prompts import Line, Problem, read_prompts
from para_core.fleet.recipe import Recipe, dtype_of, require_loras
from para_core.fleet.request import make_request
from para_core.fleet.work import Result, digest

logger = logging.getLogger(__name__)

_INTERRUPTED = 130


@dataclass(frozen=True)
class GenerationTask:
    """Validated input of one command: what to generate, and how.

    Args:
        lines (`tuple[Line, ...]`): Requests to generate.
        finished (`tuple[Line, ...]`): Requests with results in the folder.
        problems (`tuple[Problem, ...]`): Invalid lines.
        bytes_ (`int`): Largest number of bytes that the results may take.
        ranks (`int`): Ranks of a replica.
    """

    model: Model
    recipe: Recipe
    lines: tuple[Line, ...]
    finished: tuple[Line, ...]
    problems: tuple[Problem, ...]
    folder: Path
    format_: str
    bytes_: int
    ranks: int
    replicas: int


def generate(
    model: options.Model = None,
    prompt: Annotated[str | None, option("What to generate.", "TEXT", INPUT)] = None,
    prompts: options.Prompts = None,
    out: Annotated[Path, option("Folder of the results.", "FOLDER", INPUT)] = Path("out"),
    size: options.Size = None,
    steps: options.Steps = None,
    frames: Annotated[int | None, option("Frames of a video.", "N", INPUT)] = None,
    guidance: Annotated[float | None, option("Scale of guidance.", "X", INPUT)] = None,
    negative_prompt: Annotated[str | None, option("What to avoid.", "TEXT", INPUT)] = None,
    image: Annotated[str | None, option("Image file to start from.", "FILE", INPUT)] = None,
    seed: options.Seed = 0,
    set_: options.Fields = None,
    format_: options.Format = None,
    fps: options.Fps = 16,
    cache: options.Cache = None,
    compile_: options.Compile = "no",
    weights: options.Weights = "replicate",
    text_encoders: options.TextEncoders = None,
    backend: options.Backend = None,
    vae: options.Vae = False,
    dtype: options.Dtype = "auto",
    lora: options.Lora = None,
    ranks: Annotated[int | None, option("Default: one per GPU.", "N", RANKS)] = None,
    mesh: options.Mesh = "",
    rotate_method: options.RotateMethod = None,
    comm_dtype: options.CommDtype = None,
    replicas: Annotated[int, option("Groups of ranks, on Ray.", "N", RANKS)] = 1,
    timeout: options.Timeout = 600,
    dry_run: Annotated[bool, flag("--dry-run", "Show the plan; generate nothing.", RANKS)] = False,
    debug: options.Debug = False,
) -> None:
    """Generate images or videos. Results that exist in the folder are not generated again."""
    quiet(debug)
    named: dict[str, Any] = {"prompt": prompt, "size": size, "steps": steps, "frames": frames, "image": image}
    named |= {"guidance_scale": guidance, "negative_prompt": negative_prompt}
    common = {**{name: value for name, value in named.items() if value is not None}, **options.read_fields(set_)}
    pipeline = find_model(model)
    recipe = options.make_recipe(
        pipeline.name,
        mesh=mesh,
        cache=cache,
        lora=lora,
        dtype=dtype,
        rotate_method=rotate_method,
        compile=compile_,
        weights=weights,
        text_encoders=text_encoders,
        backend=backend,
        comm_dtype=comm_dtype,
        vae=vae,
        timeout=timeout,
    )
    task = _make_task(pipeline, recipe, common, prompts, out, format_, seed, count_ranks(ranks, replicas), replicas)
    if dry_run:
        _show_plan(task)
        raise typer.Exit(1 if task.problems else 0)
    raise typer.Exit(_run(task, fps, debug))


def _make_task(
    model: Model,
    recipe: Recipe,
    common: dict[str, Any],
    prompts: Path | None,
    folder: Path,
    format_: str | None,
    seed: int,
    ranks: int,
    replicas: int,
) -> GenerationTask:
    chosen = choose_format(model, format_)
    require_loras(recipe)
    if recipe.mesh:
        given_mesh(recipe, ranks)
    problems: Sequence[Problem] = ()
    common = {**common, **{name: _absolute(common[name]) for name in model.images if name in common}}
    if prompts is None:
        if "prompt" in model.fields and "prompt" not in common:
            raise typer.BadParameter("there is no prompt; expected --prompt TEXT or --prompts FILE.")
        request = make_request(common, model, seed=seed, read_image=lambda path: Path(path).read_bytes())
        lines: Sequence[Line] = (Line(1, request),)
    else:
        for name in common:
            if name not in ("size", "steps", "frames"):
                require_field(model, name)
        lines, problems = read_prompts(prompts, model, common, seed=seed)
        reasons = {line.number: too_large(folder, line.request, model, chosen) for line in lines}
        lines = [line for line in lines if reasons[line.number] is None]
        oversized = [Problem(number, reason) for number, reason in reasons.items() if reason is not None]
        problems = sorted([*problems, *oversized], key=lambda problem: problem.number)
    finished = [line for line in lines if is_finished(folder, line.name, digest(line.request, recipe))]
    left = tuple(line for line in lines if line not in finished)
    room = require_room(folder, [line.request for line in left], model, chosen)
    return GenerationTask(model, recipe, left, tuple(finished), tuple(problems), folder, chosen, room, ranks, replicas)


def _absolute(value: Any) -> Any:
    # Paths in options are relative to the current folder; those of a line are relative to the prompt file.
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    return str(Path(value).absolute()) if isinstance(value, str) else value


def _run(task: GenerationTask, fps: int, debug: bool) -> int:
    first = os.environ.get("RANK", "0") == "0"
    console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not first)
    for problem in task.problems:
        console.print(f"line {problem.number}: {problem.reason}", markup=False)
    if task.finished:
        console.print(f"{len(task.finished)} of {len(task.finished) + len(task.lines)} exist already.")
    report = RankReport((), ())
    if task.lines:
        try:
            with alone_in(task.folder) if first else nullcontext():
                report = _generate_lines(task, fps, debug)
        except (KeyboardInterrupt, SignalException):
            console.print("interrupted: run the same command again to continue.")
            return _INTERRUPTED
    for problem in report.problems:
        console.print(f"line {problem.number}: {problem.reason}", markup=False)
    failed = len(task.problems) + len(report.problems)
    console.print(
        f"{len(report.done)} generated in {task.folder}/" + (f", {failed} failed" if failed else ""), markup=False
    )
    # torchrun stops all ranks as soon as one exits with an error. Only the first rank, which writes and ends last, does
    # so.
    return 1 if failed and first else 0


def _generate_lines(task: GenerationTask, fps: int, debug: bool) -> RankReport:
    if task.replicas > 1:
        return _on_replicas(task, fps, debug)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        job = RankJob(task.recipe, task.lines, task.folder, task.format_, fps, journal, debug=debug)
        return run_job(job, task.ranks)


def _on_replicas(task: GenerationTask, fps: int, debug: bool) -> RankReport:
    try:
        from para_core.fleet.batch import generate_lines
        from para_core.fleet.group import ReplicaShape
    except ModuleNotFoundError as error:
        raise ImportError(f"--replicas needs {error.name}: pip install 'para_core[fleet]'.") from error
    done: list[int] = []
    bars: Bars | NoBars = Bars(len(task.lines), steps=False)

    def write(line: Line, result: Result) -> None:
        write_result(task.folder, line.name, result.outputs, {"line": line.number, **result.metadata})
        done.append(line.number)
        bars.end()

    with bars:
        problems = generate_lines(
            task.lines,
            task.recipe,
            ReplicaShape(task.ranks),
            task.replicas,
            format_=task.format_,
            fps=fps,
            write=write,
            debug=debug,
        )
    return RankReport(tuple(done), tuple(problems))


def count_ranks(requested: int | None, replicas: int) -> int:
    """Return the number of ranks of a replica: as requested, else those of torchrun, else one per GPU.

    Raises:
        typer.BadParameter: If the numbers contradict the ranks of torchrun or the GPUs of this machine.
    """
    if replicas < 1 or (requested is not None and requested < 1):
        numbers = f"--replicas {replicas}" if requested is None else f"--ranks {requested} and --replicas {replicas}"
        raise typer.BadParameter(f"{numbers}: expected at least 1 of each.")
    if in_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if requested not in (None, world) or replicas > 1:
            raise typer.BadParameter(f"torchrun started {world} ranks: omit --ranks and --replicas.")
        return world
    gpus = torch.cuda.device_count()
    ranks = requested or max(1, gpus // replicas)
    if gpus and replicas == 1 and ranks > gpus:
        raise typer.BadParameter(
            f"--ranks {ranks}, and this machine has {gpus} GPUs: expected at most one rank per GPU."
        )
    return ranks


def _show_plan(task: GenerationTask) -> None:
    """Print the task as a table on stdout."""
    recipe = task.recipe
    rows = {
        "model": f"{recipe.model} ({task.model.pipeline}, {task.model.kind}s)",
        "ranks": f"{task.replicas} × {task.ranks}" if task.replicas > 1 else str(task.ranks),
        "mesh": _mesh(task),
        "cache": "none" if recipe.cache is None else f"First Block Cache, threshold {recipe.cache}",
        "compile": recipe.compile,
        "weights": recipe.weights,
        "text encoders": recipe.text_encoders or ("fsdp" if recipe.weights != "replicate" else "replicate"),
        "VAE": "on all ranks" if recipe.vae else "on each rank",
        "dtype": recipe.dtype,
        "LoRA": ", ".join(recipe.lora) or "none",
        "to generate": f"{len(task.lines)}, {len(task.finished)} finished, {len(task.problems)} bad",
        "results": f"{task.folder}/*.{task.format_}, at most {task.bytes_ / 1e6:.1f} MB",
    }
    table = Table(show_header=False, title="plan")
    for name, text in rows.items():
        table.add_row(name, text)
    console = Console(highlight=False)
    console.print(table)
    for problem in task.problems:
        console.print(f"line {problem.number}: {problem.reason}", markup=False, soft_wrap=True)


def _mesh(task: GenerationTask) -> str:
    """Return the mesh sizes that loading will choose, in words. If they cannot be predicted, how they are chosen."""
    try:
        pipe = None if task.recipe.mesh else without_weights(task.model, dtype_of(task.recipe))
        sizes = foresee_mesh(pipe, task.recipe, task.ranks)
    except Exception as error:
        # Configs of other libraries may raise anything, and a dry run should still show the rest.
        logger.debug("the mesh of %s cannot be predicted: %s", task.model, error)
        return "chosen when loaded: the predicted fastest, or CFG branches first, then heads, then the ring"
    method = task.recipe.rotate_method
    return " × ".join(f"{name} {size}" for name, size in sizes.items()) + (
        f", rotate_method {method}" if method else ""
    )
