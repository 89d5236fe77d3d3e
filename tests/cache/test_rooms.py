"""The rooms of the cache import one way."""

import ast
from pathlib import Path

CACHE = Path(__file__).parents[2] / "para_core" / "cache"
# From top to bottom.
ROOMS = [
    "apply",
    "report",
    "block_cache",
    "attachment",
    "branches",
    "residuals",
    "decision",
    "options",
    "forecasts",
    "operators",
    "blocks",
    "foreign",
    "plain_weights",
    "either",
]


def imported(room):
    tree = ast.parse((CACHE / f"{room}.py").read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [name.rsplit(".", maxsplit=1)[-1] for name in modules if name and name.startswith("para_core.cache.")]


def test_a_room_of_the_cache_imports_what_stands_below_it_alone():
    assert {path.stem for path in CACHE.glob("*.py")} == {"__init__", *ROOMS}
    for place, room in enumerate(ROOMS):
        assert set(imported(room)) <= set(ROOMS[place + 1 :]), room
    assert {"report", "block_cache"} <= set(imported("apply"))


def test_no_file_of_the_cache_is_longer_than_400_lines():
    adapters = CACHE.parents[1] / "adapters" / "caching"
    for path in [*CACHE.glob("*.py"), *adapters.rglob("*.py")]:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path.name
