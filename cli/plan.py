"""``para_core plan``: the meshes of so many devices for one generation, the fastest first; and ``para_core doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from para_core.adapters import plan_mesh
from para_core.adapters.planner.published import PUBLISHED
from para_core.cli.ranks import quiet
from para_core.fleet.outputs import require_file
from para_core.fleet.recipe import MESH_NAMES
from para_core.planner.doctor import main as examine_machine
from para_core.planner.mesh_plan import MeshPlan, room_of


def plan(
    model: Annotated[str, typer.Option(help="A published model; --list shows all.", metavar="NAME")] = "FLUX.1-dev",
    ranks: Annotated[int, typer.Option(help="Devices.", metavar="N")] = 8,
    device: Annotated[str, typer.Option(help="Its name, as H100, A100 or B200.", metavar="NAME")] = "H100",
    link: Annotated[
        str | None, typer.Option(help="nvlink or pcie; left out: what such devices usually have.", metavar="NAME")
    ] = None,
    per_host: Annotated[
        int | None, typer.Option(help="Devices in one host; left out: 8, of a GB200 72.", metavar="N")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Width x height: 1024x768; left out: what was published.", metavar="WxH")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Of a video.", metavar="N")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.", metavar="N")] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="The transformer is compiled.")] = False,
    measured: Annotated[
        Path | None, typer.Option(help="JSON of `para_core doctor`: its figures go before the table's.", metavar="FILE")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="An image of the seconds of each mesh.", metavar="FILE")] = None,
    list_: Annotated[bool, typer.Option("--list", help="The published models that are known.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks, and all messages.")] = False,
) -> None:
    """Predict seconds, bytes and memory of every mesh for one generation; nothing is loaded, and nothing is computed."""
    quiet(debug)
    console = Console(soft_wrap=True, highlight=False)
    if list_:
        console.print("\n".join(PUBLISHED), markup=False)
        return
    require_file(out)
    width, height = _read_size(size)
    found = plan_mesh(
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
        measured=measured,
    )
    console.print(str(found), markup=False)
    command = _command(found)
    if command is not None:
        console.print(f"As a command: {command}", markup=False)
    if out is not None:
        found.plot(out)


def _command(plan: MeshPlan) -> str | None:
    """``para_core generate`` with the options that run the first row; None: it has none for it, or nothing fits."""
    row = plan.best
    sizes = {name[len("max_") : -len("_dim_size")]: size for name, size in row.mesh_options.items()}
    if row.problem is not None or row.memory > room_of(plan.machine, row.shape) or not set(sizes) <= set(MESH_NAMES):
        return None
    mesh = ",".join(f"{name}={size}" for name, size in sizes.items())
    rest = [f"--{name.replace('_', '-')} {value}" for name, value in row.options.items()]
    return " ".join([f"para_core generate --ranks {plan.ranks} --mesh {mesh}", *rest])


def _read_size(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise typer.BadParameter(f"--size {text}: expected width x height in pixels, as 1024x768.")
    return int(width), int(height)


def doctor(
    out: Annotated[
        Path | None, typer.Option(help="A JSON file, which `para_core plan --measured` takes.", metavar="FILE")
    ] = None,
    ring: Annotated[
        int | None, typer.Option(help="Size of the mesh dim ring; all other ranks are ulysses.", metavar="N")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="On the CPU, over gloo.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks, and all messages.")] = False,
) -> None:
    """Check this machine in a minute: versions, exactness, speed of devices and links, what to change. Under torchrun, of all ranks."""
    require_file(out)
    arguments = ["--output", str(out)] if out is not None else []
    arguments += ["--ring", str(ring)] if ring is not None else []
    arguments += ["--cpu"] if cpu else []
    broken = examine_machine(arguments)
    if broken:
        raise typer.Exit(broken)
