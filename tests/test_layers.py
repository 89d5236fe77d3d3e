"""No room imports a room above it, so there are no import cycles. Imports inside functions count too."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.lift_out import ROOT, module_files

# Each entry is a folder, or a file at the top of para_core or adapters. Rooms in one line do not import each other.
LAYERS = """\
kernels para_core/declared_options.py para_core/option_values.py para_core/progress.py para_core/torch_functions.py \
para_core/torch_internals.py para_core/user_warnings.py para_core/version.py para_core/devices.py
para_core/dataclass_fields.py
para_core/lazy_tensors.py para_core/instance para_core/triton_support.py \
para_core/foreign_errors.py
para_core/call_checks.py para_core/dataclass_json.py
para_core/launcher
para_core/distributed
para_core/layout
para_core/attention
para_core/pipeline_options.py para_core/modes
para_core/recorder
para_core/plans
para_core/cfg
para_core/spatial para_core/weights para_core/cache
para_core/same_bits para_core/products.py
para_core/comparison
para_core/verify
para_core/api.py
para_core/__init__.py
para_core/doctor_report.py
para_core/doctor.py
adapters/adapter.py adapters/refusal.py adapters/features.py
adapters/default_mesh.py
adapters/models
adapters/denoisers.py
adapters/registry.py
adapters/closest_names.py
adapters/model_checks.py
adapters/inspect
adapters/planner adapters/agree
adapters/weights
adapters/vae
adapters/compatibility
adapters/cache
adapters/parallel adapters/propose adapters/cfg adapters/same_bits.py adapters/products.py
adapters/api.py
adapters/__init__.py
fleet
cli
para_core/__main__.py
"""
LEVEL = {room: level for level, rooms in enumerate(LAYERS.splitlines()) for room in rooms.split()}
FILES = {name: path for name, path in module_files(ROOT).items() if name.startswith("para_core")}


def room_of(path):
    parts = path.parts
    return "/".join(parts[:2]) if parts[0] in ("para_core", "adapters") else parts[0]


@cache
def imported_by(path):
    """Return the files of the library that ``path`` imports, at any level of nesting, with the line."""
    files = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else node.module for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name in FILES:
                files.append((FILES[name], node.lineno))
    return files


def test_every_room_has_a_layer_and_imports_none_above_it():
    assert {room_of(path) for path in FILES.values()} <= set(LEVEL)
    upwards = [
        f"{path}:{line} imports {room_of(target)}"
        for path in FILES.values()
        for target, line in imported_by(path)
        if room_of(path) != room_of(target) and LEVEL[room_of(target)] >= LEVEL[room_of(path)]
    ]
    assert not upwards, "\n".join(upwards)


def test_imports_of_files_have_no_cycle():
    """Check that files of one folder have no import cycle at import time."""
    for top in ("adapters", "fleet", "cli"):
        graph = {path: {target for target, _ in imported_by(path)} for path in FILES.values() if path.parts[0] == top}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(" is imported by ".join(map(str, error.args[1])))
