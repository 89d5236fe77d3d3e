"""Importing para_core changes nothing outside the package, and needs and tries no optional package."""

import json
import subprocess
import sys

import pytest

from tests.lift_out import ROOT

pytestmark = pytest.mark.slow


def run(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, **options).stdout.strip()


def observe(module, first=()):
    """Import ``module`` in a fresh interpreter after the modules ``first``. Return the changes by kind."""
    # This process has imported everything already.
    return json.loads(run("-m", "tests.observe_import", module, input=json.dumps(list(first))).splitlines()[-1])


def test_import_of_para_core_changes_nothing_of_others():
    # Modules of other packages that the import loads are imported first.
    changes = observe("para_core.adapters.api", first=observe("para_core.adapters.api")["modules"])
    assert changes["attributes"] == []
    assert changes["process"] == []
    assert changes["warning filters"] == []
    # Operators of its own namespace are the only way in which torch.library puts a function into a compiled graph.
    assert [name for name in changes["registrations"] if not name.startswith("para_core::")] == []
    # gloo's threads need the GIL for a moment after the last collective, and a script that ends at once aborts without
    # it (pytorch/pytorch#190489). Sleeping for 50 ms gives it to them.
    assert changes["exit hooks"] == ["time.sleep"]


WITHOUT_OPTIONAL_PACKAGES = """
import builtins, sys

OPTIONAL = {"diffusers", "transformers", "accelerate", "triton", "typer", "ray"}
# What the import system and find_spec() take for a package that is not installed.
sys.modules.update(dict.fromkeys(OPTIONAL))
import torch

tried, real_import = [], builtins.__import__

def record(name, globals=None, *args):
    if name.partition(".")[0] in OPTIONAL and globals and globals["__name__"].startswith("para_core"):
        tried.append(name)
    return real_import(name, globals, *args)

builtins.__import__ = record
import para_core
for name in para_core.__all__:
    getattr(para_core, name)
print(sorted({*tried} - {"triton"}))
"""


def test_importing_needs_and_tries_no_optional_package():
    assert run("-c", WITHOUT_OPTIONAL_PACKAGES) == "[]"
