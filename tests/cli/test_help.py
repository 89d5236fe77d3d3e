"""``--help`` and ``--version`` answer at once, without the libraries that only a generation needs."""

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import para_core
from para_core.cli.app import app, run
from para_core.declared_options import declarations
from para_core.fleet.recipe import Recipe

ROOT = Path(__file__).parents[2]
COMMANDS = [command.name for command in app.registered_commands]
# The probe runs its command lines, and prints the modules that were imported for them.
PROBE = """
import json, sys
sys.argv = ["para_core"]
from para_core.__main__ import main
for arguments in json.loads(sys.stdin.read()):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        assert end.code == 0, (arguments, end.code)
print([name for name in ("torch", "diffusers", "transformers", "numpy", "ray") if name in sys.modules])
"""


def python(*arguments, **rest):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment, timeout=120, **rest
    ).stdout


def test_help_and_version_import_neither_torch_nor_diffusers():
    lines = [["--help"], ["--version"], *[[command, "--help"] for command in COMMANDS]]
    shown = python("-c", PROBE, input=str(lines).replace("'", '"'))
    assert f"para_core {para_core.__version__}" in shown
    assert shown.splitlines()[-1] == "[]"


def test_each_help_fits_a_terminal_and_shows_flags_without_a_value(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ([], *[[name] for name in COMMANDS]):
        assert run([*command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert any(line.strip() for line in shown.splitlines())
        assert "bool" not in shown and "…" not in shown, f"{command}: an option's help is cut off"
    run(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "--vae --no-vae Run the VAE on all ranks. [default: no-vae]" in shown


def test_every_field_with_a_command_is_an_option_of_generate():
    generate = next(command for command in app.registered_commands if command.name == "generate")
    options = inspect.signature(generate.callback).parameters
    declared = [each for each in declarations(Recipe) if each.option.command is not None]
    assert {each.name for each in declared} <= {*options}
    fields = {field.name for field in dataclasses.fields(Recipe)}
    # The model is one of the command's inputs, and files of options are values of --config as well.
    assert fields - {each.name for each in declared} == {"model", "config"}


@pytest.mark.slow
def test_public_names_are_imported_when_used():
    code = """
import sys, para_core
assert "torch" not in sys.modules
assert "UnifiedAttnMode" in dir(para_core)
from para_core import *
assert UnifiedAttnMode is para_core.UnifiedAttnMode is para_core.api.UnifiedAttnMode
assert not hasattr(para_core, "nonsense")
print(para_core.attention.spec.__name__)
"""
    assert python("-c", code).strip() == "para_core.attention.spec"
