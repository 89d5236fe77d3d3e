"""``para_core plan``: the meshes of so many devices for one generation, the fastest first; and ``para_core doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from para_core.adapters import plan_mesh
from para_core.adapters.planner.published import PUBLISHED
from para_core.planner.doctor import main as examine_machine


def plan(
    model: Annotated[str, typer.Option(help="A published model; --list shows all.")] = "FLUX.1-dev",
    ranks: Annotated[int, typer.Option(help="Devices.")] = 8,
    device: Annotated[str, typer.Option(help="Its name, as H100, A100 or B200.")] = "H100",
    link: Annotated[str | None, typer.Option(help="nvlink or pcie; left out: what such devices usually have.")] = None,
    per_host: Annotated[int | None, typer.Option(help="Devices in one host; left out: 8, of a GB200 72.")] = None,
    size: Annotated[str | None, typer.Option(help="Width x height: 1024x768; left out: what was published.")] = None,
    frames: Annotated[int | None, typer.Option(help="Of a video.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    compiled: Annotated[bool, typer.Option("--compiled", help="The transformer is compiled.")] = False,
    measured: Annotated[
        Path | None, typer.Option(help="JSON of `para_core doctor`: its figures go before the table's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A picture of the seconds of each mesh.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="The published models that are known.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks, and all messages.")] = False,
) -> None:
    """Predict seconds, bytes and memory of every mesh for one generation; nothing is loaded, and nothing is computed."""
    console = Console(soft_wrap=True, highlight=False)
    if list_:
        console.print("\n".join(PUBLISHED), markup=False)
        return
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
    if out is not None:
        found.plot(out)


def _read_size(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit()):
        raise typer.BadParameter(f"--size {text}: expected width x height in pixels, as 1024x768.")
    return int(width), int(height)


def doctor(
    out: Annotated[Path | None, typer.Option(help="A JSON file, which `para_core plan --measured` takes.")] = None,
    ring: Annotated[int | None, typer.Option(help="Size of the mesh dim ring; all other ranks are ulysses.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="On the CPU, over gloo.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks, and all messages.")] = False,
) -> None:
    """Check this machine in a minute: versions, exactness, speed of devices and links, what to change. Under torchrun, of all ranks."""
    arguments = ["--output", str(out)] if out is not None else []
    arguments += ["--ring", str(ring)] if ring is not None else []
    arguments += ["--cpu"] if cpu else []
    broken = examine_machine(arguments)
    if broken:
        raise typer.Exit(broken)
