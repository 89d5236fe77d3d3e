"""The commands, and what becomes of their errors: a sentence on stderr, and an exit code."""

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
    help="Run diffusion transformers on several devices exactly as on one.",
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
    """Run diffusion transformers on several devices exactly as on one."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    try:
        app(list(arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        if "--debug" in arguments:
            raise
        # Of several ranks each says it, as it may be one of them alone.
        _complain(f"rank {os.environ['RANK']}: {sentence(error)}" if in_torchrun() else sentence(error))
        return FAILED
    return 0


def _complain(text: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[red]error:[/red] {escape(text)}")
