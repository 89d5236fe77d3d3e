"""Command-line options that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from para_core.attention import attention_options
from para_core.fleet import recipe
from para_core.fleet.recipe import Recipe

INPUT, PIPELINE, RANKS, LIMITS = "Input and output", "Pipeline", "Ranks", "Limits"


def option(help_: str | None, metavar: str, panel: str | None = None, *names: str, **rest: Any) -> Any:
    """Return a typer option. With ``names`` it is not called like its parameter."""
    return typer.Option(*names, help=help_, metavar=metavar, rich_help_panel=panel, **rest)


def flag(name: str, help_: str, panel: str | None = None) -> Any:
    """Return a typer option without a value."""
    return typer.Option(name, help=help_, rich_help_panel=panel)


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
Vae = Annotated[bool, flag("--vae", "Run the VAE on all ranks.", PIPELINE)]
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
    model: str,
    dtype: str,
    mesh: str,
    rotate_method: str | None,
    cache: str | None,
    compile_: str,
    weights: str,
    vae: bool,
    lora: Sequence[str] | None,
    timeout: float,
) -> Recipe:
    """Return the recipe of these options, which it validates.

    Raises:
        typer.BadParameter: If ``cache`` is neither a number nor ``"default"``.
        ValueError: If another option is invalid.
    """
    threshold: Any = cache
    if cache is not None and cache != "default":
        try:
            threshold = float(cache)
        except ValueError:
            raise typer.BadParameter(f"--cache {cache}: expected a threshold such as 0.08, or default.") from None
    return Recipe(
        model,
        dtype=cast(recipe.Dtype, dtype),
        mesh=recipe.read_mesh_sizes(mesh),
        rotate_method=cast(attention_options.RotateMethod | None, rotate_method),
        cache=threshold,
        compile=cast(recipe.Compile, compile_),
        weights=cast(recipe.Weights, weights),
        vae=vae,
        lora=tuple(lora or ()),
        timeout=timeout,
    )
