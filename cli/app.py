"""The commands and their error handling: an error is one sentence on stderr and an exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.markup import escape

from para_core.cli.calibrate import calibrate
from para_core.cli.generate import generate
from para_core.cli.plan import doctor, plan
from para_core.cli.ranks import in_torchrun
from para_core.cli.serve import serve
from para_core.fleet.work import sentence

FAILED = 1

app = typer.Typer(
    name="para_core",
    help="Run diffusion transformers on several devices with the exact results of one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate)
app.command("serve")(serve)
app.command("plan")(plan)
app.command("doctor")(doctor)
app.command("calibrate")(calibrate)


@app.callback()
def _commands() -> None:
    """Run diffusion transformers on several devices with the exact results of one."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line, and return its exit code. With ``--debug`` exceptions are raised."""
    try:
        app(list(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        if "--debug" in arguments:
            raise
        # Each rank prints its error, because it may be the only one that failed.
        _print_error(f"rank {os.environ['RANK']}: {sentence(error)}" if in_torchrun() else sentence(error))
        return FAILED
    return 0


def _print_error(text: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[red]error:[/red] {escape(text)}")
