"""Each optional feature can be deleted: everything else imports, and README's main job runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from para_core.adapters.models import FAMILIES
from para_core.adapters.weights import features
from tests.lift_out import FEATURES, OF_MODELS, ROOT, imports_of, module_files, public_names
from tests.mutants import names_module
from tests.test_layers import FILES, imported_by
from tests.touching import importers_of

# Runs in a process of its own, because a fork of this one would have imported para_core already.
# An editable installation would find a deleted module whose folder is para_core itself.
PROGRAM = """
from tests.lift_out import *
pipe = load_pipe()
print(failure_without(*[FEATURES[name] for name in TOGETHER], pipe=pipe))
print(failure_without(Feature('para_core/call_checks.py'), pipe=pipe))
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_main_job_runs_without_all_features_but_not_without_others():
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    everything, needed = run.stdout.split("\n", 1)
    assert everything == "None", run.stdout
    assert "No module named 'para_core.call_checks'" in needed


@pytest.mark.long
@pytest.mark.parametrize("name", FEATURES)
def test_everything_else_works_without_each_feature(name):
    subprocess.run([sys.executable, "-m", "tests.lift_out", name, "--tests"], cwd=ROOT, check=True)


def test_families_and_options_of_features_are_in_tables():
    options = {feature.option for feature in features.features().values()} - {None}
    assert options <= {*features._SWITCHES, *features._PLACEMENTS}
    assert [name.removeprefix(OF_MODELS) for name in FEATURES if name.startswith(OF_MODELS)] == [*FAMILIES]
    files = {path.stem for path in (ROOT / "adapters/models").glob("*.py")}
    assert files == {*FAMILIES, "__init__", "unets", "unsupported"}


def test_words_name_tests_that_exist():
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    sources = "\n".join([*map(str, files), *[path.read_text() for path in files]])
    words = {word for feature in FEATURES.values() for word in feature.words.split()}
    assert [word for word in words if "test_" in word and word not in sources] == []


# The command `plan` is of the planner, and api.py loses the lines of a feature.
USERS = {"planner": {"cli/plan.py"}}
API = {"para_core/api.py", "adapters/api.py"}
ALL_FILES = set(module_files(ROOT).values())


@pytest.mark.parametrize("name", FEATURES)
def test_no_other_module_imports_a_feature(name):
    feature = FEATURES[name]
    own = {path for path in ALL_FILES for part in feature.files.split() if path.is_relative_to(part)}
    assert own
    users = API | USERS.get(name, set()) | {feature.line[0] if feature.line else ""}
    others = [path for path in ALL_FILES if path not in own and str(path) not in users]
    assert [f"{path}:{line}" for path in others for target, line in imported_by(path) if target in own] == []
    public = public_names({module for module, path in FILES.items() if path in own})
    assert [str(path) for path in others if imports_of(ROOT / path) & public] == []


def test_modules_are_found_in_imports_and_in_tables():
    for source, module in (
        ("from para_core.kernels import (\n    merge_reference,\n    norm,\n)", "para_core.kernels.norm"),
        ('fused = load_kernel("norm", device)', "para_core.kernels.norm"),
        ('gradient = "gradients.ring:ring_backward"', "para_core.attention.gradients.ring"),
    ):
        assert names_module(source, module)
        assert not names_module(source, f"{module}s")
    for file, table in (
        ("comfyui_para_core/plans/wan.py", "comfyui_para_core/plans/__init__.py"),
        ("adapters/models/sana.py", "adapters/models/__init__.py"),
        ("adapters/products.py", "adapters/weights/features.py"),
    ):
        assert importers_of(file) == [table]
