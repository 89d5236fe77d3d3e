"""The steps of ``para_core generate``: validate the input, show the plan, and generate what has no result
yet.

`generate.py` has the options and calls :func:`make_task`, and then :func:`show_plan` or :func:`run_task`. The
lines are generated in `fleet/lines.py`, with several replicas in `fleet/replicas.py`. Tests:
tests/cli/test_generate.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from para_core.cli.checks import require_images
from para_core.cli.options import FileOptions, GroupOptions
from para_core.cli.progress import Bars, showing_log, showing_phases
from para_core.cli.ranks import count_ranks, ending_on_error, from_first_rank, is_first_rank, process_group
from para_core.cli.signals import describe_signal, terminable
from para_core.cli.torchrun import in_torchrun
from para_core.distributed.mesh_shape import mesh_sizes
from para_core.fleet.build import dtype_of
from para_core.fleet.classical import check_ranks
from para_core.fleet.engine import open_ranks
from para_core.fleet.image_files import read_image_file
from para_core.fleet.lines import LineRun
from para_core.fleet.memory import Memory, bytes_of_device, foresee_mesh, predict_memory
from para_core.fleet.no_effect import warnings_of
from para_core.fleet.outputs import Result, choose_format, find_side_problem
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.prompt_file import Line, Problem, read_prompts
from para_core.fleet.rank import ReplicaOptions, load_rank
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import USUAL_PIXELS, Delivery, Request, estimate_pixels, make_request
from para_core.fleet.result_files import (
    choose_names,
    compute_digest,
    find_disk_problem,
    lock_folder,
    read_digest,
    require_room,
    write_result,
)
from para_core.fleet.without_weights import without_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationTask:
    """Validated input of one ``para_core generate`` command: what to generate, and how."""

    model: PipelineInfo
    recipe: Recipe
    lines: Sequence[Line]  # to generate, with digests and names
    finished: Sequence[Line]  # whose results are already in the folder
    problems: Sequence[Problem]  # lines that are invalid, or whose results would not fit on disk or in memory
    folder: Path
    format_: str
    bytes_: int  # upper estimate of the size of all results on disk
    ranks: int  # of each replica
    replicas: int
    room: float  # bytes that a rank may hold


def make_task(
    model: PipelineInfo,
    recipe: Recipe,
    common: dict[str, Any],
    seed: int,
    files: FileOptions,
    group: GroupOptions,
) -> GenerationTask:
    """Validate the input of one command, and choose what to generate.

    ``common`` has the fields of every request that does not set them itself. It is the only request if
    ``files`` names no file of prompts.

    Raises:
        typer.BadParameter, ValueError: An option is invalid.
        OSError: A file cannot be read, or the results cannot be written.
    """
    prompts, folder, replicas = files.prompts, files.out, group.replicas
    ranks = count_ranks(group.ranks, replicas)
    chosen = choose_format(model, files.format_)
    mesh_sizes(ranks, dict(recipe.mesh))  # raises if the mesh does not fit
    check_ranks(model, ranks)
    common = {**common, **{name: _make_absolute(common[name]) for name in model.images if name in common}}
    lines, problems = _read_lines(model, common, seed, prompts)
    delivery = Delivery(chosen, files.fps)
    lines = [replace(line, request=replace(line.request, delivery=delivery)) for line in lines]
    lines = [replace(line, digest=compute_digest(line.request, recipe, model.kind)) for line in lines]
    unfinished, finished = choose_names(folder, lines, files.name)
    room = group.room or bytes_of_device(ranks * replicas)
    reasons = _find_memory_problems(unfinished, model, recipe, ranks, room)
    for line in unfinished:
        reason = find_side_problem(line.request)
        if reason is None and prompts is not None:
            # Room for a single result is required below.
            reason = find_disk_problem(folder, line.request, model)
        if reason is not None:
            reasons[line.number] = reason
    if reasons and prompts is None:
        raise ValueError(reasons[1])  # of the only line
    problems = sorted([*problems, *starmap(Problem, reasons.items())], key=lambda problem: problem.number)
    accepted = [line for line in unfinished if line.number not in reasons]
    disk = require_room(folder, [line.request for line in accepted], model)
    return GenerationTask(
        model,
        recipe,
        lines=accepted,
        finished=finished,
        problems=problems,
        folder=folder,
        format_=chosen,
        bytes_=disk,
        ranks=ranks,
        replicas=replicas,
        room=room,
    )


def _read_lines(
    model: PipelineInfo, common: dict[str, Any], seed: int, prompts: Path | None
) -> tuple[list[Line], list[Problem]]:
    """Return the lines of the file ``prompts``, and a problem for each invalid one. Without a file,
    ``common`` are the fields of the only line.

    Raises:
        typer.BadParameter, ValueError: An option is invalid.
        OSError: A file cannot be read.
    """
    if prompts is None:
        if "prompt" in model.fields and "prompt" not in common:
            raise typer.BadParameter("there is no prompt; expected --prompt TEXT or --prompts FILE.")
        require_images(model, common)
        return [Line(1, make_request(common, model, seed=seed, read_image=read_image_file))], []
    fields = common
    if "prompt" in model.fields:
        fields = {**common, "prompt": common.get("prompt") or "a"}
    # Validate the options alone, so that an invalid one is reported once and not for every line.
    make_request(fields, replace(model, required=()), seed=seed, read_image=read_image_file)
    return read_prompts(prompts, model, common, seed=seed)


def _find_memory_problems(
    lines: Sequence[Line], model: PipelineInfo, recipe: Recipe, ranks: int, room: float
) -> dict[int, str]:
    """Return error messages, by number of line, for lines that are predicted to need more than ``room`` bytes
    of a rank.

    A prediction takes seconds, so if no line exceeds the usual size of a result, no prediction is made.
    """
    pixels = {line.number: _estimate_pixels_at_once(line.request, model) for line in lines}
    if all(number <= USUAL_PIXELS[model.kind] for number in pixels.values()):
        return {}
    _, memory = _foresee(model, recipe, ranks, room)
    if memory is None:
        return {}
    problems = {number: memory.problem(size) for number, size in pixels.items()}
    return {number: problem for number, problem in problems.items() if problem is not None}


def _estimate_pixels_at_once(request: Request, model: PipelineInfo) -> int:
    """Return the number of pixels that one call of the pipeline generates; a request may take several calls."""
    return estimate_pixels(request, model) // request.calls


def _foresee(
    model: PipelineInfo, recipe: Recipe, ranks: int, room: float
) -> tuple[dict[str, int], Memory | None]:
    """Return the mesh sizes that loading will choose, and the predicted memory of a rank.

    Without a prediction the memory is None, and the sizes are empty unless the recipe or a single rank
    determines them.
    """
    sizes: dict[str, int] = {}
    if recipe.mesh or ranks == 1:
        sizes = foresee_mesh(None, recipe, ranks)
    try:
        pipe = without_weights(model, dtype_of(recipe))
        sizes = foresee_mesh(pipe, recipe, ranks)
        return sizes, predict_memory(pipe, recipe, sizes, room)
    except Exception as error:
        # Reading another library's config may raise anything. The lines may fit nevertheless, so this is no
        # error.
        logger.debug("mesh and memory of %s cannot be predicted: %s", model, error)
        return sizes, None


def _make_absolute(value: Any) -> Any:
    # Options on the command line have paths relative to the current folder, unlike the lines of a prompt
    # file, whose paths are relative to that file.
    if isinstance(value, list):
        return [_make_absolute(item) for item in value]
    if isinstance(value, str):
        return str(Path(value).absolute())
    return value


def run_task(task: GenerationTask, debug: bool) -> int:
    """Generate the lines of ``task``, report on stderr, and return the exit code of the command.

    Under torchrun a collective call, which every rank makes with its own task.
    """
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
        with ExitStack() as stack:
            if first and task.lines:
                stack.enter_context(lock_folder(task.folder))
            stack.enter_context(terminable(report_end))
            # Under torchrun this rank may find all results where the first one does not.
            if task.lines or in_torchrun():
                failures = _generate_lines(task, debug)
    except KeyboardInterrupt as end:
        return report_end(end)
    except Exception:
        if _names_of_finished(task):
            _print_results(task, failures, console)
        raise
    _print_results(task, failures, console)
    # torchrun stops all ranks as soon as one of them exits with an error. Only the first rank reports failed
    # lines by its exit code, because it writes the results and ends last.
    return int(first and bool(task.problems or failures))


def _print_warnings(task: GenerationTask, console: Console) -> None:
    """Print one line for each different warning about the fields of the lines to generate."""
    numbers: dict[str, list[int]] = {}
    for line in task.lines:
        for warning in warnings_of(line.request, task.model):
            numbers.setdefault(warning, []).append(line.number)
    for warning, lines in numbers.items():
        text = f"warning: {warning}"
        if len(lines) > 1:
            text += f" (line {lines[0]} and {len(lines) - 1} more)"
        console.print(text, markup=False, soft_wrap=True)


def _print_results(task: GenerationTask, failures: Sequence[Problem], console: Console) -> None:
    """Print each line of the prompt file that failed, with the reason, and how many results were generated."""
    for problem in failures:
        console.print(f"line {problem.number}: {problem.reason}", markup=False)
    failed = len(task.problems) + len(failures)
    names = _names_of_finished(task)
    files = ""
    if len(names) == 1:
        files = f" ({names[0]})"
    elif names:
        files = f" ({names[0]} to {names[-1]})"
    text = f"{len(names)} generated in {task.folder}/{files}"
    if failed:
        text += f", {failed} failed"
    console.print(text, markup=False)


def _names_of_finished(task: GenerationTask) -> list[str]:
    """Return the names of the task's results that are complete in its folder."""
    return [line.name for line in task.lines if read_digest(task.folder, line.name) == line.digest]


def _generate_lines(task: GenerationTask, debug: bool) -> list[Problem]:
    """Generate the lines on one group of ranks or on replicas, and return a problem for each that failed."""
    if task.replicas == 1:
        with ending_on_error(debug=debug), process_group(task.recipe):
            return _generate_on_one_group(task, debug)
    from para_core.fleet.choice_of_ray import uses_ray
    from para_core.fleet.replicas import generate_lines

    options = ReplicaOptions(task.ranks)
    text = f"starting {min(task.replicas, len(task.lines))} replicas of {task.ranks} ranks"
    if uses_ray(spread=options.spread):
        text += " on Ray"
    Console(stderr=True, highlight=False).print(text)
    bars = Bars(len(task.lines), steps=False)

    def write(line: Line, result: Result) -> None:
        write_result(task.folder, line, result)
        bars.end()

    with bars, showing_log(bars.console):
        return generate_lines(task.lines, task.recipe, options, task.replicas, write=write, debug=debug)


def _generate_on_one_group(task: GenerationTask, debug: bool) -> list[Problem]:
    # Ranks of torchrun may see different finished results in the folder, so the first rank's lines count.
    lines = from_first_rank(task.lines)
    if not lines:
        return []
    first = is_first_rank()
    options = ReplicaOptions(task.ranks)
    load = partial(load_rank, task.recipe, options, encode_first=len(lines) > 1, debug=debug)
    with closing(open_ranks(load, task.ranks, timeout=task.recipe.timeout, debug=debug)) as ranks:
        with showing_phases(shown=first):
            ranks.start()
        bars = Bars(len(lines), shown=first)
        # If a rank dies, all of them load again.
        with bars, ExitStack() as stack:
            if first:
                stack.enter_context(showing_log(bars.console))
            return LineRun(ranks, lines, partial(write_result, task.folder), bars, debug).run()


def show_plan(task: GenerationTask) -> None:
    """Print the task as a table on stdout."""
    recipe = task.recipe
    sizes, memory = _foresee(task.model, recipe, task.ranks, task.room)
    rows = {
        "model": f"{recipe.model} ({task.model.pipeline}, {task.model.kind}s)",
        "configs": recipe.config,
        "ControlNet": ", ".join(recipe.controlnet),
        "ranks": _describe_ranks(task),
        "mesh": _describe_mesh(recipe, sizes),
        "cache": _describe_cache(recipe),
        "compile": recipe.compile,
        "weights": _describe_weights(recipe),
        "text encoders": recipe.encoders_placement,
        "in host memory": {"blocks": "blocks", "model": "what does not run"}.get(
            recipe.offload or "", "nothing"
        ),
        "VAE": _describe_vae(recipe),
        "dtype": recipe.dtype,
        "LoRA": ", ".join(recipe.lora) or "none",
        "memory": _describe_memory(task, memory),
        "to generate": f"{len(task.lines)}, {len(task.finished)} finished, {len(task.problems)} bad",
        "results": f"{task.folder}/*.{task.format_}, at most {task.bytes_ / 1e6:.1f} MB",
    }
    table = Table(show_header=False, title="plan")
    for name, text in rows.items():
        if text:
            table.add_row(name, Text(text))  # A path may have brackets, which are markup in a str.
    console = Console(highlight=False)
    console.print(table)
    for problem in task.problems:
        console.print(f"line {problem.number}: {problem.reason}", markup=False, soft_wrap=True)
    _print_warnings(task, console)


def _describe_ranks(task: GenerationTask) -> str:
    if task.replicas > 1:
        return f"{task.replicas} × {task.ranks}"
    return str(task.ranks)


def _describe_mesh(recipe: Recipe, sizes: dict[str, int]) -> str:
    if not sizes:
        return "chosen when loaded: the predicted fastest, or CFG branches first, then heads, then the ring"
    mesh = " × ".join(f"{name} {size}" for name, size in sizes.items())
    if recipe.rotate_method is not None:
        mesh += f", rotate_method {recipe.rotate_method}"
    return mesh


def _describe_cache(recipe: Recipe) -> str:
    if recipe.cache is None:
        return "none"
    return f"First Block Cache, threshold {recipe.cache}"


def _describe_weights(recipe: Recipe) -> str:
    if recipe.quantize is None:
        return recipe.weights
    return f"{recipe.weights}, {recipe.quantize} (not exact)"


def _describe_memory(task: GenerationTask, memory: Memory | None) -> str:
    pixels = max((_estimate_pixels_at_once(line.request, task.model) for line in task.lines), default=0)
    if memory is None or pixels == 0:
        return "not predicted"
    needed = memory.bytes_of(pixels) / 1e9
    return f"{needed:.3g} of {task.room / 1e9:.3g} GB on each rank, predicted without the VAE"


def _describe_vae(recipe: Recipe) -> str:
    if recipe.vae_on_first_rank:
        return "on the first rank, in host memory"
    where = "on each rank"
    if recipe.vae:
        where = "on all ranks"
    if recipe.vae_in_host_memory:
        return f"{where}, in host memory"
    return where
