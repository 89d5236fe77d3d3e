"""Tables of pages equal the JSON that a program of benchmarks/ wrote: each page is written again and compared. Measures
nothing.
"""

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.harness import read_results
from benchmarks.pages import PAGES, render
from benchmarks.planner import published

ROOT = Path(__file__).parents[1]


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_tables_equal_the_results(page):
    assert render(page) == (ROOT / page).read_text(), "run python -m benchmarks.pages"


@pytest.mark.long
def test_predictions_equal_the_recorded_ones():
    results = read_results("planner_check")
    for table in published.TABLES:
        slowdown, checked = published.check(table, published.workload_of(table.model, **dict(table.sizes)))
        assert slowdown == pytest.approx(results["fits"][table.name]["slowdown"])
        recorded = [row["predicted"] for row in results["rows"] if row["table"] == table.name]
        assert [row.predicted for row in checked] == pytest.approx(recorded)


def names_imported(file):
    """Yield each module of this repository from which a file imports, with the name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("para_core", "benchmarks"):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.slow
def test_late_imports_of_programs_exist():
    pytest.importorskip("ray")
    for file in sorted((ROOT / "benchmarks").rglob("*.py")):
        for module, name in names_imported(file):
            is_module = find_spec(f"{module}.{name}") if hasattr(import_module(module), "__path__") else None
            assert is_module or hasattr(import_module(module), name), (file, module, name)


def test_tiny_flux_readme_equals_results():
    lines = (ROOT / "zoo/flux/README.md").read_text().splitlines()
    cells = {line.split("|")[1].strip(" *"): line.split("|")[2:-1] for line in lines if line.startswith("|")}

    def figures(row):
        return [float(cell.strip(" %")) for cell in cells[row] if "%" in cell]

    rows = {
        "full, of 1 thing": "things_1",
        "full, of 2": "things_2",
        "full, of 3": "things_3",
        'short ("a red circle"), 512 tokens': "short",
    }
    for row, key in rows.items():
        shares = read_results("tiny_flux")["held_out"][key]
        names = ("colour", "shape", "place", "size", "count", "background", "all", "ceiling_all")
        expected = [100 * shares[name] for name in names if name in shares]
        assert figures(row) == pytest.approx(expected, abs=0.06)


def figures_of_attention():
    """Return the figures of each row of the table in docs/how_it_works.md that no program writes."""
    calls = {(row["method"], row["world"]): row for row in read_results("far_worlds")["calls"]}
    return [
        [f"{calls[method, world][f'{what}, functions']:,}" for what in ("plan", "call") for world in (8, 64, 512)]
        for method in dict.fromkeys(method for method, _ in calls)
    ]


def figures_of_tiny_video():
    held_out = read_results("tiny_video")["held_out"]
    names = ("colour", "shape", "direction", "steady", "one", "background", "all")
    return [
        [f"{100 * held_out[key][name]:.0f}" for name in names]
        for key in ("guidance_2.0", "guidance_1.0", "true_videos_through_vae")
    ]


@pytest.mark.parametrize(
    ("page", "rows"),
    [("docs/how_it_works.md", figures_of_attention), ("zoo/video/README.md", figures_of_tiny_video)],
)
def test_rows_written_by_hand_equal_the_results(page, rows):
    tables = [line.split("|", 2)[2] for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    figures = [re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", cells) for cells in tables]
    assert rows()
    for row in rows():
        assert row in figures
