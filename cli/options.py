"""Command-line options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from para_core.fleet.recipe import Recipe

INPUT, PIPELINE, RANKS, LIMITS = "Input and output", "Pipeline", "Ranks", "Limits"


def option(help_: str | None, metavar: str, panel: str | None = None, *names: str, **rest: Any) -> Any:
    """Return a typer option. With ``names`` it is not called like its parameter."""
    return typer.Option(*names, help=help_, metavar=metavar, rich_help_panel=panel, **rest)


def flag(name: str, help_: str, panel: str | None = None) -> Any:
    """Return a typer option without a value. ``name`` may name the opposite, too: ``--vae/--no-vae``."""
    # Without a metavar the help shows <bool>, as if a value were expected.
    return typer.Option(name, help=help_, metavar="", rich_help_panel=panel)


# -- input and output
Model = Annotated[str | None, option("Folder or Hub name; default: tiny FLUX.", "NAME", INPUT)]
Prompts = Annotated[Path | None, option("JSON lines, one request each.", "FILE", INPUT)]
Size = Annotated[str | None, option("Width x height: 1024x768.", "WxH", INPUT)]
Steps = Annotated[int | None, option("Denoising steps.", "N", INPUT)]
Seed = Annotated[int, option("Seed of the first prompt; each next adds 1.", "N", INPUT)]
Fields = Annotated[list[str] | None, option("Any other argument of the call.", "FIELD=JSON", INPUT, "--set")]
Format = Annotated[str | None, option("png, jpg, webp; mp4, gif, webp.", "EXT", INPUT, "--format")]
Fps = Annotated[int, option("Frames per second.", "N", INPUT, min=1)]

# -- pipeline
Cache = Annotated[str | None, option("First Block Cache: threshold or default.", "X", PIPELINE)]
Compile = Annotated[str, option("no, blocks or whole.", "HOW", PIPELINE, "--compile")]
Weights = Annotated[str, option("replicate, fsdp or tensor.", "HOW", PIPELINE)]
TextEncoders = Annotated[str | None, option("replicate, fsdp, offload or first.", "HOW", PIPELINE)]
Offload = Annotated[str | None, option("Wait in host memory: blocks or model.", "WHAT", PIPELINE)]
ResidentBlocks = Annotated[int, option("Blocks that stay on the device.", "N", PIPELINE, min=0)]
Quantize = Annotated[str | None, option("int8, fp8, int8-dynamic, fp8-dynamic.", "HOW", PIPELINE)]
Backend = Annotated[str | None, option("Local attention: flash, cudnn, triton, ...", "NAME", PIPELINE)]
CommDtype = Annotated[str | None, option("int8 or float8_e4m3fn; not exact.", "TYPE", RANKS)]
Vae = Annotated[bool, flag("--vae/--no-vae", "Run the VAE on all ranks.", PIPELINE)]
Dtype = Annotated[str, option("auto, float32, bfloat16 or float16.", "TYPE", PIPELINE)]
Lora = Annotated[list[str] | None, option("File or Hub name[:scale].", "NAME", PIPELINE)]

# -- ranks
Mesh = Annotated[str, option("Largest sizes: batch=2,ring=2.", "DIMS", RANKS)]
RotateMethod = Annotated[str | None, option("Ring: alltoall, allgather or 2d.", "HOW", RANKS)]
Timeout = Annotated[float, option("Seconds that ranks wait.", "S", RANKS)]
Debug = Annotated[bool, flag("--debug", "Show tracebacks and all log messages.")]


def read_fields(texts: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``FIELD=JSON`` options; a value that is not JSON is a text.

    Raises:
        typer.BadParameter: If one has no ``=``.
    """
    fields: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {text}: expected FIELD=VALUE, such as guidance_scale=4.5.")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def make_recipe(
    model: str, *, mesh: str = "", cache: str | None = None, lora: Sequence[str] | None = None, **rest: Any
) -> Recipe:
    """Return the recipe of these options, which it validates.

    Args:
        rest: Fields of :class:`Recipe` as they are.

    Raises:
        typer.BadParameter: If ``cache`` is neither a number nor ``"default"``.
        ValueError: If another option is invalid.
    """
    from para_core.fleet.recipe import Recipe, read_mesh_sizes

    if lora and find_spec("peft") is None:
        raise ModuleNotFoundError("--lora needs peft", name="peft")
    threshold: Any = cache
    if cache is not None and cache != "default":
        try:
            threshold = float(cache)
        except ValueError:
            raise typer.BadParameter(f"--cache {cache}: expected a threshold such as 0.08, or default.") from None
    return Recipe(model, mesh=read_mesh_sizes(mesh), cache=threshold, lora=tuple(lora or ()), **rest)
