"""The ``para_core`` command line: all commands, and how an exception becomes one sentence on stderr and an
exit code.

This module and the modules of the commands import torch and diffusers inside functions only, so that
``--help`` answers at once. ``para_core/__main__.py`` calls :func:`run`. Tests: tests/cli/test_help.py,
tests/cli/test_refusals.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from para_core.cli.option_files import ALIASES, options_in_files
from para_core.cli.options import expand_groups, name_options, option_of_field
from para_core.cli.torchrun import in_torchrun
from para_core.fleet.failures import describe_exception
from para_core.version import __version__

# The module of each command, in the order of the help. The command is a function of this name. To remove a
# command, delete its module and its line.
COMMANDS = {
    "generate": "para_core.cli.generate",
    "serve": "para_core.cli.serve",
    "bench": "para_core.cli.bench",
    "plan": "para_core.cli.plan",
    "doctor": "para_core.cli.doctor",
}
# Exit codes of a command, besides those of signals.py.
FAILED, WRONG_OPTION = 1, 2


class _HelpWithoutValue:
    """Mixin for typer commands that lists ``--help`` as a flag, without the placeholder ``<bool>``."""

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class _Command(_HelpWithoutValue, TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. For an unknown option that diffusers has as an argument, name the option for it."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # Only click's NoSuchOption, which typer does not export, has possibilities.
            if hasattr(error, "possibilities"):
                unknown: str = getattr(error, "option_name", "")
                option = option_of_field(unknown.lstrip("-").replace("-", "_"))
                if any(option in parameter.opts for parameter in self.params):
                    error.possibilities = [option]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command, and tell :func:`run` whether an option or a file of options has turned on ``debug``."""
        ctx.obj["debug"] = ctx.params["debug"]
        return super().invoke(ctx)


class _CommandGroup(_HelpWithoutValue, TyperGroup):
    pass


app = typer.Typer(
    name="para_core",
    cls=_CommandGroup,
    help="Run diffusion transformers on several devices with the exact results of one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _module in COMMANDS.items():
    app.command(_name, cls=_Command)(expand_groups(getattr(import_module(_module), _name)))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"para_core {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version.", metavar="", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Run diffusion transformers on several devices with the exact results of one."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line, and return its exit code: 0 if it succeeded, 1 if it failed, 2 if an option is
    wrong.

    An exception is printed as one sentence. With ``--debug`` it is raised. A ValueError or TypeError whose
    message names an option of the command line (:func:`~para_core.cli.options.name_options`) counts as a
    wrong option.
    """
    # Other programs call an option by another name, so that is accepted. If typer knew it as a second name of
    # the option, the help would need another column.
    for alias, name in ALIASES.items():
        arguments = [re.sub(rf"^--{alias}(?==|$)", f"--{name}", argument) for argument in arguments]
    settings = {"debug": False}
    try:
        app(list(arguments), obj=settings)
    except SystemExit as end:
        if isinstance(end.code, int):
            return end.code
        return int(end.code is not None)
    except Exception as error:
        if settings["debug"]:
            raise
        text = describe_exception(error)
        code = FAILED
        if isinstance(error, (ValueError, TypeError)):
            named = name_options(text, [*arguments, *options_in_files(arguments)])
            if named != text:
                text, code = named, WRONG_OPTION
        # Each rank prints its error, because it may be the only one that failed.
        if in_torchrun():
            text = f"rank {os.environ['RANK']}: {text}"
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"[red]error:[/red] {escape(text)}")
        return code
    return 0
