"""``--help``, ``--version`` and plans of known models answer at once, without the libraries of a generation."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

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
import para_core
assert "torch" not in sys.modules
assert "UnifiedAttnMode" in dir(para_core)
from para_core import *
assert UnifiedAttnMode is para_core.UnifiedAttnMode is para_core.api.UnifiedAttnMode
assert not hasattr(para_core, "nonsense")
print(para_core.attention.spec.__name__)
"""


def test_help_version_and_plans_import_neither_torch_nor_diffusers():
    lines = [["--help"], ["--version"], *[[command, "--help"] for command in COMMANDS]]
    models = ["FLUX.1-dev"], ["Wan-AI/Wan2.1-T2V-14B-Diffusers", "--ranks", "8"]
    lines += [["plan", "--model", *model, "--size", "768x512", "--mesh", "ring=4"] for model in models]
    options = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}}
    shown = subprocess.run([sys.executable, "-c", PROBE], input=json.dumps(lines), check=True, **options).stdout
    # Public names are imported when they are used.
    assert shown.splitlines()[-2:] == ["[]", "para_core.attention.spec"]
    assert f"para_core {para_core.__version__}" in shown and "FLUX.1-dev, 768 × 512" in shown


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
    declared = {each.name for each in declarations(Recipe) if each.option.command is not None}
    assert declared <= {*inspect.signature(generate.callback).parameters}
    # The model is one of the command's inputs, and files of options are values of --config as well.
    assert {field.name for field in dataclasses.fields(Recipe)} - declared == {"model", "config"}
