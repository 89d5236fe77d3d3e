"""``para_core plan``: predict all meshes for one generation, the fastest first; and ``para_core doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from para_core.cli import options
from para_core.cli.options import flag, option
from para_core.fleet.outputs import require_file

if TYPE_CHECKING:
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
    compiled: Annotated[bool, flag("--compiled", "The transformer is compiled.")] = False,
    measured: Annotated[
        Path | None, option("JSON of `para_core doctor`, whose figures replace the table's.", "FILE")
    ] = None,
    out: Annotated[Path | None, option("Image file for a chart of the meshes.", "FILE")] = None,
    list_: Annotated[bool, flag("--list", "List the published models.")] = False,
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
    width, height = _read_size(size)
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
        measured=measured,
    )
    console.print(str(mesh_plan), markup=False)
    command = _command(mesh_plan)
    if command is not None:
        console.print(f"As a command: {command}", markup=False)
    if out is not None:
        mesh_plan.plot(out)


def _command(plan: MeshPlan) -> str | None:
    """Return the ``para_core generate`` command for the first mesh. None if it has no such options, or nothing fits."""
    from para_core.fleet.recipe import MESH_NAMES
    from para_core.planner.mesh_plan import room_of

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
        raise typer.BadParameter(f"--size {text}: expected width x height in pixels, such as 1024x768.")
    return int(width), int(height)


def doctor(
    out: Annotated[Path | None, option("JSON file for `para_core plan --measured`.", "FILE")] = None,
    ring: Annotated[int | None, option("Size of the ring mesh dim; other ranks go to ulysses.", "N")] = None,
    cpu: Annotated[bool, flag("--cpu", "Use the CPU and gloo.")] = False,
    debug: options.Debug = False,
) -> None:
    """Check versions, exactness and speed of this machine in a minute; under torchrun, of all ranks."""
    from para_core.planner.doctor import main as examine_machine

    require_file(out)
    arguments = ["--output", str(out)] if out is not None else []
    arguments += ["--ring", str(ring)] if ring is not None else []
    arguments += ["--cpu"] if cpu else []
    broken = examine_machine(arguments)
    if broken:
        raise typer.Exit(broken)
