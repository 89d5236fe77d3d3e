"""``para_core plan``: predict all meshes for one generation, fastest first. ``para_core doctor``: check a machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from para_core.cli import options
from para_core.cli.options import flag, option
from para_core.fleet.outputs import require_file
from para_core.fleet.request import read_size

if TYPE_CHECKING:
    from para_core.option_values import Quantize, TextEncoders, VaePlacement
    from para_core.planner.mesh_plan import MeshPlan


def plan(
    model: Annotated[str, option("Published model; --list shows all.", "NAME")] = "FLUX.1-dev",
    ranks: Annotated[int, option("Number of devices.", "N")] = 8,
    device: Annotated[str, option("Device, such as H100, A100 or B200.", "NAME")] = "H100",
    link: Annotated[str | None, option("nvlink or pcie. Default: usual for the device.", "NAME")] = None,
    per_host: Annotated[int | None, option("Devices per host. Default: 8, for a GB200 72.", "N")] = None,
    size: Annotated[str | None, option("Width x height: 1024x768. Default: published.", "WxH")] = None,
    frames: Annotated[int | None, option("Frames of a video.", "N")] = None,
    steps: Annotated[int | None, option("Denoising steps.", "N")] = None,
    compiled: Annotated[bool, flag("--compiled/--eager", "Whether the transformer is compiled.")] = True,
    text_encoders: options.TextEncoders = None,
    vae_placement: options.VaePlacement = None,
    quantize: options.Quantize = None,
    measured: Annotated[
        Path | None, option("JSON of `para_core doctor`, whose figures replace the table's.", "FILE")
    ] = None,
    out: Annotated[Path | None, option("Image file for a chart of the meshes.", "FILE")] = None,
    list_: Annotated[bool, flag("--list", "List the published models.")] = False,
    config: options.OptionFiles = None,
    debug: options.Debug = False,
) -> None:
    """Predict seconds, bytes and memory of every mesh for one generation. Nothing is loaded or computed."""
    from para_core.adapters import plan_mesh
    from para_core.adapters.planner.published import PUBLISHED
    from para_core.cli.ranks import quiet

    quiet(debug)
    console = Console(soft_wrap=True, highlight=False)
    if list_:
        console.print("\n".join(PUBLISHED), markup=False)
        return
    require_file(out)
    _require_chart(out)
    width, height = (None, None) if size is None else read_size(size)
    mesh_plan = plan_mesh(
        model,
        ranks=ranks,
        device=device,
        link=link,
        ranks_per_host=per_host,
        height=height,
        width=width,
        frames=frames,
        steps=steps,
        compiled=compiled,
        text_encoders=cast("TextEncoders | None", text_encoders),
        vae_placement=cast("VaePlacement | None", vae_placement),
        quantize=cast("Quantize | None", quantize),
        measured=measured,
    )
    if console.is_terminal:
        _print_table(mesh_plan, console)
    else:
        console.print(mesh_plan.markdown(), markup=False)
    command = _command(mesh_plan, model, size, frames, steps, compiled=compiled)
    if command is not None:
        console.print(f"\nAs a command: {command}", markup=False)
    if out is not None:
        mesh_plan.plot(out)


def _print_table(plan: MeshPlan, console: Console) -> None:
    """Print the plan: its title, a table that fits the terminal, and its notes."""
    from para_core.planner.mesh_plan import duration

    table = Table(
        "s", "s/step", "compute", "waits", "GB", "mesh, and why it loses", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in table.columns[:-1]:
        column.justify, column.no_wrap = "right", True
    for row in plan.printed:
        step = row.step
        figures = [f"{seconds:.3f}" for seconds in (step.total, step.compute, step.communication + step.host)]
        reason = row.problem or row.why
        text = Text.assemble((str(row), "bold"), f": {reason}" if reason else "")
        table.add_row(duration(row.seconds), *figures, f"{row.memory / 1e9:.0f}", text)
    console.print(plan.title, markup=False)
    console.print(table, soft_wrap=False)
    console.print("\n\n".join([*plan.notes, plan.advice]), markup=False, soft_wrap=False)


def _require_chart(path: Path | None) -> None:
    """Raise BadParameter if matplotlib cannot write a file with the suffix of ``path``. None is accepted."""
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise typer.BadParameter(f"--out {path}: expected a suffix of {', '.join(sorted(formats))}.")


def _command(
    plan: MeshPlan, model: str, size: str | None, frames: int | None, steps: int | None, *, compiled: bool
) -> str | None:
    """Return the shell command that generates on the plan's fastest mesh. None if that mesh cannot run."""
    from para_core.adapters.planner.published import PUBLISHED

    row = plan.best
    if not plan.runs(row):
        return None
    sizes = [f"{name[len('max_') : -len('_dim_size')]}={size}" for name, size in row.mesh_options.items()]
    options = {
        "model": PUBLISHED[model].repository or f"'{model}'",
        "size": size,
        "frames": frames,
        "steps": steps,
        "compile": "blocks" if compiled and (row.shape.fsdp or row.placement.resident is not None) else None,
        "mesh": ",".join(sizes) if row.shape.ranks > 1 else None,
        **row.options,
        "quantize": row.placement.quantize,
    }
    if compiled and options["compile"] is None:
        options["compile"] = "whole"
    named = [f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value is not None]
    per_host = plan.machine.topology.per_host
    start = f"para_core generate --ranks {plan.ranks}"
    if plan.ranks > per_host:
        hosts = -(-plan.ranks // per_host)
        start = f"torchrun --nnodes={hosts} --nproc_per_node={per_host} … -m para_core generate"
    return " ".join([start, *named, "--prompt TEXT"])


def doctor(
    out: Annotated[Path | None, option("JSON file for `para_core plan --measured`.", "FILE")] = None,
    ring: Annotated[int | None, option("Size of the ring mesh dim; other ranks go to ulysses.", "N")] = None,
    cpu: Annotated[bool, flag("--cpu", "Use the CPU and gloo.")] = False,
    config: options.OptionFiles = None,
    debug: options.Debug = False,
) -> None:
    """Check versions, exactness and speed of this machine in a minute; under torchrun, of all ranks."""
    from para_core.planner.doctor import examine_machine

    require_file(out)
    broken = examine_machine(out, ring=ring, cpu=cpu)
    if broken:
        raise typer.Exit(broken)
