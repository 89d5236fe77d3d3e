"""Command-line options that several commands share.

The commands take them as parameters or groups, and `app.py` expands the groups by :func:`expand_groups`.
Options of a recipe are declared in `fleet/recipe.py` and `para_core/pipeline_options.py`, and only turned
into parameters here; values are checked in `checks.py`. Tests: tests/cli/test_help.py,
tests/cli/test_refusals.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import typer

from para_core.cli.option_files import read_option_files, read_option_files_only
from para_core.declared_options import Command, Declaration, declarations
from para_core.fleet.recipe import Recipe
from para_core.pipeline_options import PIPELINE, RANKS

INPUT, LIMITS = "Input and output", "Limits"


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
        ValueError: ``text`` is empty, as from an unset variable of the shell.
    """
    if text == "":
        raise ValueError("expected a folder")
    return Path(text)


ModelOption = Annotated[str | None, option("Folder, Hub name or file; default: tiny FLUX.", "NAME", INPUT)]
PromptsOption = Annotated[Path | None, option(".jsonl or .txt, one request a line.", "FILE", INPUT)]
SizeOption = Annotated[str | None, option("Width x height: 1024x768.", "WxH", INPUT)]
StepsOption = Annotated[int | None, option("Denoising steps.", "N", INPUT)]
ImageOption = Annotated[str | None, option("Image file to start from.", "FILE", INPUT)]
SeedOption = Annotated[int, option("Seed of the first prompt; each next adds 1.", "N", INPUT, min=0)]
FieldsOption = Annotated[
    list[str] | None, option("Any other argument of the call.", "FIELD=JSON", INPUT, "--set")
]
FormatOption = Annotated[str | None, option("png, jpg, webp; mp4, gif, webp.", "EXT", INPUT, "--format")]
FpsOption = Annotated[int, option("Frames per second.", "N", INPUT, min=1, max=1000)]

MemoryOption = Annotated[float | None, option("Of a rank. Default: its device's.", "GB", RANKS)]
RanksOption = Annotated[int | None, option("Of each replica. Default: one per GPU.", "N", RANKS)]
DebugOption = Annotated[bool, flag("--debug", "Show tracebacks and all log messages.")]
# Both are read before the other options, because files of options set their defaults.
ConfigOption = Annotated[
    list[str] | None,
    option(
        "YAML of options; or configs of a file.", "FILE", INPUT, is_eager=True, callback=read_option_files
    ),
]
OptionFiles = Annotated[
    list[str] | None,
    option("YAML, JSON or TOML of options.", "FILE", is_eager=True, callback=read_option_files_only),
]


@dataclass(frozen=True)
class CallOptions:
    """Options of the commands that generate, for fields of a request. Each field is an option."""

    size: SizeOption = None
    steps: StepsOption = None
    frames: Annotated[int | None, option("Frames of a video.", "N", INPUT)] = None
    guidance: Annotated[float | None, option("Scale of guidance.", "X", INPUT)] = None
    negative_prompt: Annotated[str | None, option("What to avoid.", "TEXT", INPUT)] = None
    image: ImageOption = None
    seed: SeedOption = 0
    set_: FieldsOption = None

    def fields(self, **others: Any) -> dict[str, Any]:
        """Return the fields of a request except the seed: options that are given, and entries of ``others``
        but None.

        Raises:
            typer.BadParameter: Two options set the same field.
        """
        named: dict[str, Any] = {
            "size": self.size,
            "steps": self.steps,
            "frames": self.frames,
            "image": self.image,
        }
        named |= {"guidance_scale": self.guidance, "negative_prompt": self.negative_prompt, **others}
        common = {name: value for name, value in named.items() if value is not None}
        fields = read_fields(self.set_)
        set_by_options = set(common)
        if self.seed:
            set_by_options.add("seed")
        for field in set_by_options & fields.keys():
            raise typer.BadParameter(f"--set {field} and the option for it: expected one of them.")
        if "size" in common and fields.keys() & {"height", "width"}:
            raise typer.BadParameter("--size and --set height or width: expected one of them.")
        return common | fields


class RecipeOptions(SimpleNamespace):
    """Options for the fields of a recipe, as the class :class:`~para_core.fleet.recipe.Recipe` declares them.

    Each option is an attribute, also ``attention_schedule``, which is no field, and ``config`` except in
    ``para_core plan``.
    """

    @classmethod
    def parameters(cls) -> list[Parameter]:
        """Return the options as keyword parameters for typer."""
        return [_CONFIG_PARAMETER, *_parameters_of_recipe(lambda command: True)]


class RunOptions(RecipeOptions):
    """Options of the commands that generate."""


class PlanOptions(RecipeOptions):
    """Options of ``para_core plan`` that are those of a recipe."""

    @classmethod
    def parameters(cls) -> list[Parameter]:
        return _parameters_of_recipe(lambda command: command.plans)


def _parameters_of_recipe(has: Callable[[Command], bool]) -> list[Parameter]:
    """Return a parameter for each field of a recipe whose :class:`Command` ``has`` accepts, as the help is sorted."""
    commands = [(declaration, declaration.option.command) for declaration in declarations(Recipe)]
    declared = [
        (declaration, command) for declaration, command in commands if command is not None and has(command)
    ]
    parameters: list[Parameter] = []
    for declaration, command in sorted(declared, key=lambda each: each[1].panel):
        parameters.append(_make_parameter(declaration, command))
        if declaration.name == "backend":
            parameters.append(_SCHEDULE_PARAMETER)
    return parameters


def _make_parameter(declaration: Declaration, words: Command) -> Parameter:
    """Return the parameter of a command, from which typer makes the option of a field.

    Values are texts or numbers here: :class:`Recipe` refuses those that are no valid choice.
    """
    default = declaration.default
    if bool in declaration.members:
        names = f"--{declaration.name.replace('_', '-')}"
        if words.opposite:
            names += f"/--no-{declaration.name.replace('_', '-')}"
        annotation: Any = Annotated[bool, flag(names, words.help, words.panel)]
        return Parameter(declaration.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    limits: dict[str, Any] = {}
    if declaration.option.at_least != -inf:
        limits["min"] = declaration.option.at_least
    kind: Any = str
    if tuple[str, ...] in declaration.members:
        kind, default = list[str] | None, None
    elif default == ():
        # A mesh is one text.
        default = ""
    elif not declaration.choices:
        kind = next((number for number in (int, float) if number in declaration.members), str)
    if declaration.is_optional:
        kind = kind | None
    annotation = Annotated[kind, option(words.help, words.metavar, words.panel, **limits)]
    return Parameter(declaration.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_SCHEDULE_PARAMETER = Parameter(
    "attention_schedule",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[str | None, option("Middle steps: sage:4:4, keys=0.5:4:4.", "HOW:N:N", PIPELINE)],
)
_CONFIG_PARAMETER = Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=ConfigOption)


def require_memory(gigabytes: float | None) -> None:
    """Check the value of ``--memory``, which may be None.

    Raises:
        typer.BadParameter: The value is not positive, or not finite.
    """
    if gigabytes is not None and not 0 < gigabytes < inf:
        raise typer.BadParameter(f"--memory {gigabytes:g}: expected a finite number of GB, more than 0.")


@dataclass(frozen=True)
class GroupOptions:
    """Options of the commands that run replicas. Each field is an option."""

    ranks: RanksOption = None
    memory: MemoryOption = None
    replicas: Annotated[int, option("Groups of ranks that work at once.", "N", RANKS)] = 1

    def require_valid(self) -> None:
        """Check the memory. The numbers of ranks and replicas are checked by
        :func:`~para_core.cli.torchrun.read_stated_ranks`, which knows those of torchrun.

        Raises:
            typer.BadParameter: The memory is not positive or not finite.
        """
        require_memory(self.memory)

    @property
    def room(self) -> float | None:
        """Bytes that a rank may hold, None for the memory of its device."""
        if self.memory is None:
            return None
        return self.memory * 1e9


@dataclass(frozen=True)
class FileOptions:
    """Options for the prompts and the results of ``para_core generate``. Each field is an option."""

    prompts: PromptsOption = None
    out: Annotated[Path, option("Folder of the results.", "FOLDER", INPUT, parser=read_folder)] = Path("out")
    name: Annotated[str | None, option("Beginning of the file names.", "TEXT", INPUT)] = None
    format_: FormatOption = None
    fps: FpsOption = 16


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` with each parameter that is a group of options replaced by these, as typer needs.

    A group is a dataclass, whose fields are the options, or :class:`RecipeOptions`.

    Example:
        >>> def bench(*, group: GroupOptions, runs: int = 3) -> None: ...
        >>> list(signature(expand_groups(bench)).parameters)
        ['ranks', 'memory', 'replicas', 'runs']
    """
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation) or _is_of_recipe(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _parameters_in_group(parameter.annotation)
        else:
            parameters.append(parameter)

    @wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            names = [parameter.name for parameter in _parameters_in_group(group)]
            values[name] = group(**{option_name: values.pop(option_name) for option_name in names})
        command(**values)

    run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _is_of_recipe(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, RecipeOptions)


def _parameters_in_group(group: Any) -> list[Parameter]:
    """Return the options of a group as keyword parameters."""
    if _is_of_recipe(group):
        parameters: list[Parameter] = group.parameters()
        return parameters
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]


def read_fields(texts: Sequence[str] | None) -> dict[str, Any]:
    """Parse ``FIELD=JSON`` options into a dict. A value that is not JSON is kept as a string.

    Raises:
        typer.BadParameter: An option has no ``=``, or two options set the same field.
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


# Maps an argument or field to the command-line option that sets it, if the names differ. Messages of other
# modules name arguments and fields, so :func:`name_options` looks for these words in them.
_OPTION_NAMES = {
    "num_inference_steps": "steps",
    "num_frames": "frames",
    "guidance_scale": "guidance",
    "ranks_per_host": "per-host",
    **dict.fromkeys(("height", "width"), "size"),
}


def option_of_field(name: str) -> str:
    """Return the option, with dashes in front, that sets an argument or field of this name.

    >>> option_of_field("num_inference_steps")
    '--steps'
    """
    return "--" + _OPTION_NAMES.get(name, name).replace("_", "-")


# Messages about an argument begin with its name, and those about a field of a request have "field 'NAME'". A
# message in another form keeps its words, and its command ends with the exit code of a failure instead of a
# wrong option.
_SUBJECT_PATTERN = re.compile(r"^(?P<argument>\w+)(?= (is|are|has) )|\bfield '(?P<field>\w+)'")


def name_options(text: str, arguments: Sequence[str]) -> str:
    """Return the error message ``text`` with each argument or field replaced by its option in the command
    line, if any.

    >>> name_options("field 'num_inference_steps' is 0: expected at least 1.", ["generate", "--steps", "0"])
    '--steps is 0: expected at least 1.'
    """

    def option_of(match: re.Match[str]) -> str:
        name = match["argument"] or match["field"]
        if any(argument.startswith(f"{name}=") for argument in arguments):
            return f"--set {name}"
        option = option_of_field(name)
        for candidate in (option, f"--max-{option[2:]}"):
            if any(argument == candidate or argument.startswith(f"{candidate}=") for argument in arguments):
                return candidate
        return match[0]

    return _SUBJECT_PATTERN.sub(option_of, text)
