"""Importing para_core changes nothing outside the package. Unavoidable changes are listed with a reason."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# The package defines operators in its own namespace, because torch.library has no other way to put a function into a
# compiled graph.
OWN_NAMESPACE = "para_core::"

# gloo's threads need the GIL for a moment after the last collective, and a script that ends at once aborts without it
# (pytorch/pytorch#190489). Sleeping for 50 ms gives it to them. Nothing else of the process is changed.
EXIT_HOOKS = ["time.sleep"]


def observe(module, first=()):
    """Import ``module`` in a fresh interpreter after the modules ``first``. Return the changes by kind."""
    # This process has imported everything already.
    program = subprocess.run(
        [sys.executable, "-m", "tests.observe_import", module],
        input=json.dumps(list(first)),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    return json.loads(program.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def changes():
    """Return what importing all of para_core.adapters, which imports para_core, changes once all modules of other
    packages are imported.
    """
    return observe("para_core.adapters.api", first=observe("para_core.adapters.api")["modules"])


def test_no_attribute_of_torch_or_diffusers_changes(changes):
    assert changes["attributes"] == []


def test_no_class_of_torch_gets_another_name(changes):
    assert changes["class names"] == []


def test_import_registers_own_operators_only(changes):
    assert [name for name in changes["registrations"] if not name.startswith(OWN_NAMESPACE)] == []
    assert changes["fallbacks"] == []


def test_flags_and_hooks_of_torch_stay(changes):
    assert changes["flags"] == []


def test_warning_filters_logging_and_exit_hooks_stay(changes):
    assert changes["warning filters"] == []
    assert changes["loggers"] == []
    assert changes["exit hooks"] == EXIT_HOOKS


def test_the_process_stays_as_it_was(changes):
    assert changes["process"] == []


def test_the_observer_sees_changes():
    report = observe("tests.import_with_changes")
    assert "torch.distributed.distributed_c10d._hash_ranks_to_str" in report["attributes"]
    assert "torch.nn.Linear.forward" in report["attributes"]
    assert "torch.nn.Conv1d" in report["class names"]
    assert report["registrations"] == ["aten::scaled_dot_product_attention TESTING_ONLY_GenericMode"]
    assert report["fallbacks"] == ["TESTING_ONLY_GenericMode"]
    assert report["flags"] == ["default dtype"]
    assert report["process"] == ["environment", "excepthook"]
    assert len(report["warning filters"]) == 1
    assert report["loggers"] == ["torch level"]
    assert len(report["exit hooks"]) == 1
