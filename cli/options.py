"""Command-line options that several commands share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from para_core.fleet.recipe import Recipe

INPUT, PIPELINE, RANKS, LIMITS = "Input and output", "Pipeline", "Ranks", "Limits"


def option(help_: str | None, metavar: str, panel: str | None = None, *names: str, **rest: Any) -> Any:
    """Return a typer option. It is named after its parameter unless ``names`` are given."""
    return typer.Option(*names, help=help_, metavar=metavar, rich_help_panel=panel, **rest)


def flag(name: str, help_: str, panel: str | None = None) -> Any:
    """Return a typer option without a value. ``name`` may include the opposite: ``--vae/--no-vae``."""
    # Without an empty metavar the help shows <bool>, as if a value were expected.
    return typer.Option(name, help=help_, metavar="", rich_help_panel=panel)


def read_folder(text: str | Path) -> Path:
    """Return the folder as a path.

    Raises:
        ValueError: If ``text`` is empty, for example from an unset shell variable: it must not mean the current folder.
    """
    if text == "":
        raise ValueError("expected a folder")
    return Path(text)


Model = Annotated[str | None, option("Folder or Hub name; default: tiny FLUX.", "NAME", INPUT)]
Prompts = Annotated[Path | None, option(".jsonl or .txt, one request a line.", "FILE", INPUT)]
Frames = Annotated[int | None, option("Frames of a video.", "N", INPUT)]
Guidance = Annotated[float | None, option("Scale of guidance.", "X", INPUT)]
NegativePrompt = Annotated[str | None, option("What to avoid.", "TEXT", INPUT)]
Image = Annotated[str | None, option("Image file to start from.", "FILE", INPUT)]
Size = Annotated[str | None, option("Width x height: 1024x768.", "WxH", INPUT)]
Steps = Annotated[int | None, option("Denoising steps.", "N", INPUT)]
Seed = Annotated[int, option("Seed of the first prompt; each next adds 1.", "N", INPUT, min=0)]
Fields = Annotated[list[str] | None, option("Any other argument of the call.", "FIELD=JSON", INPUT, "--set")]
Format = Annotated[str | None, option("png, jpg, webp; mp4, gif, webp.", "EXT", INPUT, "--format")]
Fps = Annotated[int, option("Frames per second.", "N", INPUT, min=1, max=1000)]

Cache = Annotated[str | None, option("First Block Cache: threshold or default.", "X", PIPELINE)]
Compile = Annotated[str, option("no, blocks or whole.", "HOW", PIPELINE, "--compile")]
Weights = Annotated[str, option("replicate, fsdp or tensor.", "HOW", PIPELINE)]
TextEncoders = Annotated[str | None, option("replicate, fsdp, offload or first.", "HOW", PIPELINE)]
Offload = Annotated[str | None, option("Wait in host memory: blocks or model.", "WHAT", PIPELINE)]
PipeFusionPatches = Annotated[int | None, option("Patches of stages; not exact.", "N", RANKS, "--pipefusion", min=1)]
ResidentBlocks = Annotated[int, option("Blocks that stay on the device.", "N", PIPELINE, min=0)]
Quantize = Annotated[str | None, option("int8, fp8, int8-dynamic, fp8-dynamic.", "HOW", PIPELINE)]
Backend = Annotated[str | None, option("Local attention: cudnn, flash3, sage...", "NAME", PIPELINE)]
CommDtype = Annotated[str | None, option("int8 or float8_e4m3fn; not exact.", "TYPE", RANKS)]
Vae = Annotated[bool, flag("--vae/--no-vae", "Run the VAE on all ranks.", PIPELINE)]
VaePlacement = Annotated[str | None, option("replicate, offload or first.", "HOW", PIPELINE)]
Dtype = Annotated[str, option("auto, float32, bfloat16 or float16.", "TYPE", PIPELINE)]
Lora = Annotated[list[str] | None, option("File or Hub name[:scale].", "NAME", PIPELINE)]
TrustRemoteCode = Annotated[bool, flag("--trust-remote-code", "Run a modular repository's code.", PIPELINE)]

Ranks = Annotated[int | None, option("Default: one per GPU.", "N", RANKS)]
Mesh = Annotated[str, option("Largest sizes: batch=2,ring=2.", "DIMS", RANKS)]
RotateMethod = Annotated[str | None, option("Ring: alltoall, allgather or 2d.", "HOW", RANKS)]
Timeout = Annotated[float, option("Seconds that ranks wait.", "S", RANKS)]
Debug = Annotated[bool, flag("--debug", "Show tracebacks and all log messages.")]


def read_fields(texts: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``FIELD=JSON`` options into a dict. A value that is not JSON is kept as a string.

    Raises:
        typer.BadParameter: If an option has no ``=``, or two options set the same field.
    """
    fields: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--set {text}: expected FIELD=VALUE, such as guidance_scale=4.5.")
        if name in fields:
            raise typer.BadParameter(f"--set {name} is given twice.")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def call_fields(named: Mapping[str, Any], texts: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields of a request: entries of ``named`` that are not None, and those of the options ``--set``.

    Args:
        named: Fields that have an option of their own.
        texts: Values of the options ``--set``, each ``FIELD=JSON``.

    Raises:
        typer.BadParameter: If two options set the same field.
    """
    common, fields = {name: value for name, value in named.items() if value is not None}, read_fields(texts)
    for field in common.keys() & fields.keys():
        raise typer.BadParameter(f"--set {field} and the option for it: expected one of them.")
    if "size" in common and fields.keys() & {"height", "width"}:
        raise typer.BadParameter("--size and --set height or width: expected one of them.")
    return common | fields


# Arguments and fields whose command-line option has a different name, and that name.
_OPTIONS = {
    "num_inference_steps": "steps",
    "num_frames": "frames",
    "guidance_scale": "guidance",
    "ranks_per_host": "per-host",
    **dict.fromkeys(("height", "width"), "size"),
}
_SUBJECT = re.compile(r"^(?P<argument>\w+)(?= (is|are|has) )|\bfield '(?P<field>\w+)'")


def name_options(text: str, arguments: Sequence[str]) -> str:
    """Return the error message ``text`` with each argument or field replaced by the option that set it.

    Args:
        arguments (`Sequence[str]`): The command line. An argument that no option in it sets keeps its name.

    >>> name_options("field 'num_inference_steps' is 0: expected at least 1.", ["generate", "--steps", "0"])
    '--steps is 0: expected at least 1.'
    """

    def option_of(match: re.Match[str]) -> str:
        name = match["argument"] or match["field"]
        option = _OPTIONS.get(name, name).replace("_", "-")
        for candidate in (f"--{option}", f"--max-{option}"):
            if any(argument == candidate or argument.startswith(f"{candidate}=") for argument in arguments):
                return candidate
        return f"--set {name}" if any(argument.startswith(f"{name}=") for argument in arguments) else match[0]

    return _SUBJECT.sub(option_of, text)


def make_recipe(
    model: str, *, mesh: str = "", cache: str | None = None, lora: Sequence[str] | None = None, **rest: Any
) -> Recipe:
    """Validate command-line options, and return the recipe that they describe.

    Args:
        rest: Other fields of :class:`Recipe`, passed on unchanged.

    Raises:
        ImportError: If ``backend`` names a library that is not installed.
        typer.BadParameter: If ``cache`` is neither a number nor ``"default"``.
        ValueError: If another option is invalid.
    """
    from para_core.attention.libraries import require_library
    from para_core.fleet.recipe import Recipe, read_lora, read_mesh_sizes

    require_library(rest.get("backend"))
    if lora and find_spec("peft") is None:
        raise ModuleNotFoundError("--lora needs peft", name="peft")
    for text in lora or ():
        name, scale = read_lora(text)
        if not name or not math.isfinite(scale):
            raise typer.BadParameter(f"--lora {text!r}: expected a file or Hub name, and a finite scale if any.")
    threshold: Any = cache
    if cache is not None and cache != "default":
        try:
            threshold = float(cache)
        except ValueError:
            threshold = math.nan
        if not math.isfinite(threshold):
            raise typer.BadParameter(f"--cache {cache}: expected a threshold such as 0.08, or default.")
    return Recipe(model, mesh=read_mesh_sizes(mesh), cache=threshold, lora=tuple(lora or ()), **rest)
