"""The steps of ``para_core generate``: validate the input, show the plan, and generate what has no result yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from para_core.cli.checks import require_images
from para_core.cli.options import FileOptions, GroupOptions
from para_core.cli.progress import Bars, showing_log, showing_phases
from para_core.cli.ranks import count_ranks, ending_on_error, from_first_rank, is_first_rank, process_group
from para_core.cli.signals import describe_signal, terminable
from para_core.fleet.build import dtype_of
from para_core.fleet.classical import refuse_ranks
from para_core.fleet.engine import open_ranks
from para_core.fleet.foresee import (
    Memory,
    bytes_of_device,
    foresee_mesh,
    mesh_of_recipe,
    predict_memory,
    without_weights,
)
from para_core.fleet.lines import LineRun
from para_core.fleet.no_effect import warnings_of
from para_core.fleet.outputs import (
    Result,
    alone_in,
    choose_format,
    choose_names,
    digest,
    digest_of,
    require_room,
    too_large,
    write_result,
)
from para_core.fleet.pipeline_info import Model
from para_core.fleet.prompt_file import Line, Problem, read_prompts
from para_core.fleet.rank import ReplicaOptions, load_rank
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import USUAL_PIXELS, Delivery, estimated_pixels, make_request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationTask:
    """Validated input of one ``para_core generate`` command: what to generate, and how."""

    model: Model
    recipe: Recipe
    lines: Sequence[Line]  # to generate
    finished: Sequence[Line]  # whose results are already in the folder
    problems: Sequence[Problem]  # lines that are invalid, or whose results would not fit on disk or in memory
    folder: Path
    format_: str
    bytes_: int  # upper bound on the size of all results on disk
    ranks: int  # of each replica
    replicas: int
    room: float  # bytes that a rank may hold


def make_task(
    model: Model, recipe: Recipe, common: dict[str, Any], seed: int, files: FileOptions, group: GroupOptions
) -> GenerationTask:
    """Validate the input of one command, and choose what to generate.

    ``common`` has the fields of every request that does not set them itself. It is the only request if ``files`` names
    no file of prompts. Raise typer.BadParameter, ValueError or OSError if an option is invalid, or the results cannot
    be written.
    """
    prompts, folder, replicas = files.prompts, files.out, group.replicas
    ranks = count_ranks(group.ranks, replicas)
    chosen = choose_format(model, files.format_)
    mesh_of_recipe(recipe, ranks)  # raises if the mesh is too small
    refuse_ranks(model, ranks)
    common = {**common, **{name: _absolute(common[name]) for name in model.images if name in common}}
    if prompts is None and "prompt" in model.fields and "prompt" not in common:
        raise typer.BadParameter("there is no prompt; expected --prompt TEXT or --prompts FILE.")
    fields = common
    if prompts is not None and "prompt" in model.fields:
        fields = {**common, "prompt": common.get("prompt") or "a"}
    # With a prompt file this validates the options alone, so that an invalid option is reported once and not for every
    # line.
    if prompts is None:
        require_images(model, common)
    alone = replace(model, required=()) if prompts is not None else model
    request = make_request(fields, alone, seed=seed, read_image=lambda path: Path(path).read_bytes())
    lines, problems = [Line(1, request)], list[Problem]()
    if prompts is not None:
        lines, problems = read_prompts(prompts, model, common, seed=seed)
    delivery = Delivery(chosen, files.fps)
    lines = [replace(line, request=replace(line.request, delivery=delivery)) for line in lines]
    lines = [replace(line, digest=digest(line.request, recipe, model.kind)) for line in lines]
    left, finished = choose_names(folder, lines, files.name)
    room = group.room or bytes_of_device(ranks * replicas)
    reasons = _memory_problems(left, model, recipe, ranks, room)
    if reasons and prompts is None:
        raise ValueError(reasons[1])
    if prompts is not None:
        reasons |= {line.number: reason for line in left if (reason := too_large(folder, line.request, model.kind))}
    problems = sorted([*problems, *starmap(Problem, reasons.items())], key=lambda problem: problem.number)
    left = [line for line in left if line.number not in reasons]
    disk = require_room(folder, [line.request for line in left], model.kind)
    return GenerationTask(model, recipe, left, finished, problems, folder, chosen, disk, ranks, replicas, room)


def _memory_problems(lines: Sequence[Line], model: Model, recipe: Recipe, ranks: int, room: float) -> dict[int, str]:
    """Return error messages by number for the lines that are predicted to need more than ``room`` bytes on a rank.

    A prediction takes seconds, so if no line exceeds the usual size of a result, no prediction is made.
    """
    pixels = {line.number: estimated_pixels(line.request, model.kind) for line in lines}
    if all(number <= USUAL_PIXELS[model.kind] for number in pixels.values()):
        return {}
    _, memory = _foresee(model, recipe, ranks, room)
    return {number: reason for number, size in pixels.items() if memory and (reason := memory.problem(size))}


def _foresee(model: Model, recipe: Recipe, ranks: int, room: float) -> tuple[dict[str, int], Memory | None]:
    """Return the mesh sizes that loading will choose, and the memory of a rank: ``({}, None)`` without a prediction."""
    sizes = foresee_mesh(None, recipe, ranks) if recipe.mesh or ranks == 1 else {}
    try:
        pipe = without_weights(model, dtype_of(recipe))
        sizes = foresee_mesh(pipe, recipe, ranks)
        return sizes, predict_memory(pipe, recipe, sizes, room)
    except Exception as error:
        # Reading another library's config may raise anything. The lines may fit nevertheless, so this is no error.
        logger.debug("mesh and memory of %s cannot be predicted: %s", model, error)
        return sizes, None


def _absolute(value: Any) -> Any:
    # Options on the command line have paths relative to the current folder, unlike the lines of a prompt file, whose
    # paths are relative to that file.
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    return str(Path(value).absolute()) if isinstance(value, str) else value


def run_task(task: GenerationTask, debug: bool) -> int:
    """Generate the lines of ``task``, report on stderr, and return the exit code of the command."""
    first = is_first_rank()
    console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not first)
    for problem in task.problems:
        console.print(f"line {problem.number}: {problem.reason}", markup=False)
    _print_warnings(task, console)
    if task.finished:
        console.print(f"{len(task.finished)} of {len(task.finished) + len(task.lines)} exist already.")
    failures: list[Problem] = []

    def report_end(end: KeyboardInterrupt) -> int:
        ended, code = describe_signal(end)
        console.show_cursor()  # which progress bars hide
        console.print(f"{ended}: run the same command again to continue.")
        _print_results(task, failures, console)
        return code

    try:
        with alone_in(task.folder) if first and task.lines else nullcontext(), terminable(report_end):
            failures = _generate_lines(task, debug) if task.lines else []
    except KeyboardInterrupt as end:
        return report_end(end)
    except Exception:
        if _finished_names(task):
            _print_results(task, failures, console)
        raise
    _print_results(task, failures, console)
    # torchrun stops all ranks as soon as one of them exits with an error. Only the first rank reports failed lines by
    # its exit code, because it writes the results and ends last.
    return 1 if first and (task.problems or failures) else 0


def _print_warnings(task: GenerationTask, console: Console) -> None:
    """Print one line for each different warning about the fields of the lines to generate."""
    numbers: dict[str, list[int]] = {}
    for line in task.lines:
        for warning in warnings_of(line.request, task.model):
            numbers.setdefault(warning, []).append(line.number)
    for warning, lines in numbers.items():
        where = f" (line {lines[0]} and {len(lines) - 1} more)" if len(lines) > 1 else ""
        console.print(f"warning: {warning}{where}", markup=False, soft_wrap=True)


def _print_results(task: GenerationTask, failures: Sequence[Problem], console: Console) -> None:
    """Print each line of the prompt file that failed, with the reason, and how many results were generated."""
    for problem in failures:
        console.print(f"line {problem.number}: {problem.reason}", markup=False)
    failed = len(task.problems) + len(failures)
    names = _finished_names(task)
    files = ""
    if len(names) == 1:
        files = f" ({names[0]})"
    elif names:
        files = f" ({names[0]} to {names[-1]})"
    failures_text = f", {failed} failed" if failed else ""
    console.print(f"{len(names)} generated in {task.folder}/{files}{failures_text}", markup=False)


def _finished_names(task: GenerationTask) -> list[str]:
    """Return the names of the task's results that are complete in its folder."""
    return [line.name for line in task.lines if digest_of(task.folder, line.name) == line.digest]


def _generate_lines(task: GenerationTask, debug: bool) -> list[Problem]:
    if task.replicas == 1:
        with ending_on_error(debug=debug), process_group(task.recipe):
            return _generate_on_one_group(task, debug)
    from para_core.fleet.choice_of_ray import uses_ray
    from para_core.fleet.replicas import generate_lines

    options = ReplicaOptions(task.ranks)
    where = " on Ray" if uses_ray(spread=options.spread) else ""
    Console(stderr=True, highlight=False).print(f"starting {task.replicas} replicas of {task.ranks} ranks{where}")
    bars = Bars(len(task.lines), steps=False)

    def write(line: Line, result: Result) -> None:
        write_result(task.folder, line, result)
        bars.end()

    with bars, showing_log(bars.console):
        return generate_lines(task.lines, task.recipe, options, task.replicas, write=write, debug=debug)


def _generate_on_one_group(task: GenerationTask, debug: bool) -> list[Problem]:
    # Ranks of torchrun may see different finished results in the folder, so the first rank's lines count.
    lines, first = from_first_rank(task.lines), is_first_rank()
    options = ReplicaOptions(task.ranks)
    load = partial(load_rank, task.recipe, options, encode_first=len(lines) > 1, debug=debug)
    with closing(open_ranks(load, task.ranks, timeout=task.recipe.timeout, debug=debug)) as ranks:
        with showing_phases(shown=first):
            ranks.start()
        bars = Bars(len(lines), shown=first)
        # If a rank dies, all of them load again.
        with bars, showing_log(bars.console) if first else nullcontext():
            return LineRun(ranks, lines, partial(write_result, task.folder), bars, debug).run()


def show_plan(task: GenerationTask) -> None:
    """Print the task as a table on stdout."""
    recipe = task.recipe
    sizes, memory = _foresee(task.model, recipe, task.ranks, task.room)
    mesh = " × ".join(f"{name} {size}" for name, size in sizes.items())
    method = f", rotate_method {recipe.rotate_method}" if recipe.rotate_method else ""
    unknown = "chosen when loaded: the predicted fastest, or CFG branches first, then heads, then the ring"
    pixels = max((estimated_pixels(line.request, task.model.kind) for line in task.lines), default=0)
    needed = f"{memory.bytes_of(pixels) / 1e9:.3g} of {task.room / 1e9:.3g} GB on each rank" if memory else ""
    rows = {
        "model": f"{recipe.model} ({task.model.pipeline}, {task.model.kind}s)",
        **({} if recipe.config is None else {"configs": recipe.config}),
        **({"ControlNet": ", ".join(recipe.controlnet)} if recipe.controlnet else {}),
        "ranks": f"{task.replicas} × {task.ranks}" if task.replicas > 1 else str(task.ranks),
        "mesh": mesh + method if mesh else unknown,
        "cache": "none" if recipe.cache is None else f"First Block Cache, threshold {recipe.cache}",
        "compile": recipe.compile,
        "weights": recipe.weights + (f", {recipe.quantize} (not exact)" if recipe.quantize else ""),
        "text encoders": recipe.encoders_placement,
        "in host memory": {"blocks": "blocks", "model": "what does not run"}.get(recipe.offload or "", "nothing"),
        "VAE": _vae(recipe),
        "dtype": recipe.dtype,
        "LoRA": ", ".join(recipe.lora) or "none",
        "memory": f"{needed}, predicted without the VAE" if needed and pixels else "not predicted",
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
    _print_warnings(task, console)


def _vae(recipe: Recipe) -> str:
    if recipe.vae_on_first_rank:
        return "on the first rank, in host memory"
    where = "on each rank"
    if recipe.vae:
        where = "on all ranks"
    if recipe.vae_in_host_memory:
        return f"{where}, in host memory"
    return where
