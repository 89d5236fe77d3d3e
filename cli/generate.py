"""``para_core generate``: one prompt, or a file of them, on one group of ranks or on replicas of it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.distributed.elastic.multiprocessing.api import SignalException

from para_core.attention.options import RotateMethod
from para_core.cli.bars import Bars, NoBars
from para_core.cli.ranks import RankJob, RankReport, in_torchrun, quiet, run_job
from para_core.fleet.foresee import foresee_mesh, given_mesh, without_weights
from para_core.fleet.models import Model, find_model, require_field
from para_core.fleet.outputs import alone_in, choose_format, is_finished, require_room, too_large, write_result
from para_core.fleet.prompts import Line, Problem, read_prompts
from para_core.fleet.recipe import Compile, Dtype, Recipe, Weights, dtype_of, read_mesh_sizes, require_loras
from para_core.fleet.request import make_request
from para_core.fleet.work import Result, digest

_INTERRUPTED = 130
WHAT, HOW, RANKS = "What", "How", "On what"


@dataclass(frozen=True)
class GenerationTask:
    """Everything that is to be generated, read and checked."""

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
    model: Annotated[
        str | None,
        typer.Option(help="Folder or Hub name; left out: a tiny FLUX.", metavar="NAME", rich_help_panel=WHAT),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What to generate.", metavar="TEXT", rich_help_panel=WHAT)] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines, a request each.", metavar="FILE", rich_help_panel=WHAT)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results.", metavar="FOLDER", rich_help_panel=WHAT)] = Path(
        "out"
    ),
    size: Annotated[
        str | None, typer.Option(help="Width x height: 1024x768.", metavar="WxH", rich_help_panel=WHAT)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.", metavar="N", rich_help_panel=WHAT)] = None,
    frames: Annotated[int | None, typer.Option(help="Of a video.", metavar="N", rich_help_panel=WHAT)] = None,
    image: Annotated[
        str | None, typer.Option(help="File of an image to start from.", metavar="FILE", rich_help_panel=WHAT)
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of the first line; then one more each.", metavar="N", rich_help_panel=WHAT)
    ] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other field of the call.", metavar="FIELD=JSON", rich_help_panel=WHAT),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="png, jpg, webp; videos: mp4, gif, webp.", metavar="EXT", rich_help_panel=WHAT),
    ] = None,
    fps: Annotated[
        int, typer.Option(min=1, help="Frames per second of a video.", metavar="N", rich_help_panel=WHAT)
    ] = 16,
    cache: Annotated[
        str | None, typer.Option(help="First Block Cache: a threshold, or default.", metavar="X", rich_help_panel=HOW)
    ] = None,
    compile_: Annotated[
        str, typer.Option("--compile", help="no, blocks or whole.", metavar="HOW", rich_help_panel=HOW)
    ] = "no",
    weights: Annotated[
        str, typer.Option(help="replicate, fsdp or tensor.", metavar="HOW", rich_help_panel=HOW)
    ] = "replicate",
    vae: Annotated[bool, typer.Option("--vae", help="The VAE on all ranks, too.", rich_help_panel=HOW)] = False,
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16.", metavar="TYPE", rich_help_panel=HOW)
    ] = "auto",
    lora: Annotated[
        list[str] | None, typer.Option(help="File or Hub name[:scale].", metavar="NAME", rich_help_panel=HOW)
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Left out: one per GPU.", metavar="N", rich_help_panel=RANKS)
    ] = None,
    mesh: Annotated[
        str,
        typer.Option(help="At most, as batch=2,ring=2; left out: chosen.", metavar="DIMS", rich_help_panel=RANKS),
    ] = "",
    rotate_method: Annotated[
        str | None,
        typer.Option(help="Of keys in a ring: alltoall, allgather, 2d.", metavar="HOW", rich_help_panel=RANKS),
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="Groups of so many ranks, on Ray.", metavar="N", rich_help_panel=RANKS)
    ] = 1,
    timeout: Annotated[
        float, typer.Option(help="Seconds ranks wait for others.", metavar="S", rich_help_panel=RANKS)
    ] = 600,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; generate nothing.", rich_help_panel=RANKS)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Tracebacks, and all messages.", rich_help_panel=RANKS)
    ] = False,
) -> None:
    """Generate images or videos; what is finished in the folder is not made again."""
    quiet(debug)
    given = {"prompt": prompt, "size": size, "steps": steps, "frames": frames, "image": image}
    common = {**{name: value for name, value in given.items() if value is not None}, **read_fields(set_ or [])}
    found = find_model(model)
    recipe = Recipe(
        found.name,
        dtype=cast(Dtype, dtype),
        mesh=read_mesh_sizes(mesh),
        rotate_method=cast(RotateMethod | None, rotate_method),
        cache=read_threshold(cache),
        compile=cast(Compile, compile_),
        weights=cast(Weights, weights),
        vae=vae,
        lora=tuple(lora or ()),
        timeout=timeout,
    )
    order = _order(found, recipe, common, prompts, out, format_, seed, count_ranks(ranks, replicas), replicas)
    if dry_run:
        _show_plan(order)
        raise typer.Exit(1 if order.problems else 0)
    raise typer.Exit(_carry_out(order, fps, debug))


def _order(
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
    common = {**common, **{name: _from_here(common[name]) for name in model.images if name in common}}
    if prompts is None:
        if "prompt" in model.fields and "prompt" not in common:
            raise typer.BadParameter("what to generate? Give --prompt TEXT or --prompts FILE.")
        request = make_request(common, model, seed=seed, read_image=lambda path: Path(path).read_bytes())
        lines: Sequence[Line] = (Line(1, request),)
    else:
        for name in common:
            if name not in ("size", "steps", "frames"):
                require_field(model, name)
        lines, problems = read_prompts(prompts, model, common, seed=seed)
        found = [(line, too_large(folder, line.request, model, chosen)) for line in lines]
        lines = [line for line, reason in found if reason is None]
        problems = sorted(
            [*problems, *(Problem(line.number, reason) for line, reason in found if reason is not None)],
            key=lambda problem: problem.number,
        )
    finished = [line for line in lines if is_finished(folder, line.name, digest(line.request, recipe))]
    left = tuple(line for line in lines if line not in finished)
    room = require_room(folder, [line.request for line in left], model, chosen)
    return GenerationTask(model, recipe, left, tuple(finished), tuple(problems), folder, chosen, room, ranks, replicas)


def _from_here(value: Any) -> Any:
    """Files that an option names are looked for here; those of a line beside the file of prompts."""
    if isinstance(value, list):
        return [_from_here(item) for item in value]
    return str(Path(value).absolute()) if isinstance(value, str) else value


def _carry_out(order: GenerationTask, fps: int, debug: bool) -> int:
    first = os.environ.get("RANK", "0") == "0"
    console = Console(stderr=True, soft_wrap=True, highlight=False, quiet=not first)
    for problem in order.problems:
        console.print(f"line {problem.number}: {problem.reason}", markup=False)
    if order.finished:
        console.print(f"{len(order.finished)} of {len(order.finished) + len(order.lines)} are finished already.")
    report = RankReport((), ())
    if order.lines:
        try:
            with alone_in(order.folder) if first else nullcontext():
                report = _generate_lines(order, fps, debug)
        except (KeyboardInterrupt, SignalException):
            console.print("interrupted: the same command goes on where this one stopped.")
            return _INTERRUPTED
    for problem in report.problems:
        console.print(f"line {problem.number}: {problem.reason}", markup=False)
    failed = len(order.problems) + len(report.problems)
    console.print(
        f"{len(report.done)} generated in {order.folder}/" + (f", {failed} failed" if failed else ""), markup=False
    )
    # Torchrun ends all ranks as soon as one fails: the first, which writes, is the one to say so, and the last to end.
    return 1 if failed and first else 0


def _generate_lines(order: GenerationTask, fps: int, debug: bool) -> RankReport:
    if order.replicas > 1:
        return _on_replicas(order, fps, debug)
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        job = RankJob(order.recipe, order.lines, order.folder, order.format_, fps, journal, debug=debug)
        return run_job(job, order.ranks)


def _on_replicas(order: GenerationTask, fps: int, debug: bool) -> RankReport:
    try:
        from para_core.fleet.batch import generate_lines
        from para_core.fleet.group import ReplicaShape
    except ModuleNotFoundError as error:
        raise ImportError(f"--replicas needs {error.name}: pip install 'para_core[fleet]'.") from error
    done: list[int] = []
    bars: Bars | NoBars = Bars(len(order.lines), steps=False)

    def write(line: Line, result: Result) -> None:
        write_result(order.folder, line.name, result.outputs, {"line": line.number, **result.metadata})
        done.append(line.number)
        bars.end()

    with bars:
        problems = generate_lines(
            order.lines,
            order.recipe,
            ReplicaShape(order.ranks),
            order.replicas,
            format_=order.format_,
            fps=fps,
            write=write,
            debug=debug,
        )
    return RankReport(tuple(done), tuple(problems))


def count_ranks(asked: int | None, replicas: int) -> int:
    """How many ranks a group has."""
    if replicas < 1 or (asked is not None and asked < 1):
        given = f"--replicas {replicas}" if asked is None else f"--ranks {asked} and --replicas {replicas}"
        raise typer.BadParameter(f"{given}: expected at least 1 of each.")
    if in_torchrun():
        world = int(os.environ["WORLD_SIZE"])
        if asked not in (None, world) or replicas > 1:
            raise typer.BadParameter(f"torchrun started {world} ranks: leave --ranks and --replicas out.")
        return world
    gpus = torch.cuda.device_count()
    ranks = asked or max(1, gpus // replicas)
    if gpus and replicas == 1 and ranks > gpus:
        raise typer.BadParameter(
            f"--ranks {ranks}, and this machine has {gpus} GPUs: expected at most one rank per GPU."
        )
    return ranks


def read_threshold(text: str | None) -> Any:
    if text is None or text == "default":
        return text
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"--cache {text}: expected a threshold, as in 0.08, or default.") from None


def read_fields(texts: Sequence[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {text}: expected FIELD=VALUE, as in guidance_scale=4.5.")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value  # a text without quotes
    return fields


def _show_plan(order: GenerationTask) -> None:
    """What would be done, as a table on stdout."""
    recipe = order.recipe
    rows = {
        "model": f"{recipe.model} ({order.model.pipeline}, {order.model.kind}s)",
        "ranks": f"{order.replicas} × {order.ranks}" if order.replicas > 1 else str(order.ranks),
        "mesh": _mesh(order),
        "cache": "none" if recipe.cache is None else f"First Block Cache, threshold {recipe.cache}",
        "compile": recipe.compile,
        "weights": recipe.weights,
        "VAE": "on all ranks" if recipe.vae else "on each rank",
        "dtype": recipe.dtype,
        "LoRA": ", ".join(recipe.lora) or "none",
        "to generate": f"{len(order.lines)}, {len(order.finished)} finished, {len(order.problems)} bad",
        "results": f"{order.folder}/*.{order.format_}, at most {order.bytes_ / 1e6:.1f} MB",
    }
    table = Table(show_header=False, title="plan")
    for name, text in rows.items():
        table.add_row(name, text)
    console = Console(highlight=False)
    console.print(table)
    for problem in order.problems:
        console.print(f"line {problem.number}: {problem.reason}", markup=False, soft_wrap=True)


def _mesh(order: GenerationTask) -> str:
    """The sizes that it will have; of a model whose configs do not make a pipeline, how they are chosen."""
    try:
        pipe = None if order.recipe.mesh else without_weights(order.model, dtype_of(order.recipe))
        sizes = foresee_mesh(pipe, order.recipe, order.ranks)
    except Exception:
        # Whatever a config of another library's makes of it: a plan that cannot be shown stops nothing.
        return "chosen when loaded: what is predicted to be fastest, or branches of guidance, then heads, then the ring"
    method = order.recipe.rotate_method
    return " × ".join(f"{name} {size}" for name, size in sizes.items()) + (
        f", rotate_method {method}" if method else ""
    )
