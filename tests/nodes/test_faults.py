"""A few cells of the table of faults, on loopback addresses. `python -m benchmarks.faults` runs all, and
docs/measured/faults.md shows them.
"""

import pytest

from benchmarks.faults.__main__ import expected_image, run_cell
from benchmarks.faults.cells import Cell, all_cells, verdict
from tests.nodes.hosts import open_hosts

MESH = "ring 2 × Ulysses 2"


def test_fault_table_has_150_distinct_cells():
    cells = list(all_cells())
    assert len(cells) == len({cell.name for cell in cells}) >= 150


def result(**changed):
    """Return the result of a cell in which rank 3 raised and the other ranks received its error."""
    told = {"raised": "RuntimeError", "message": "rank 3 raised: something that only this rank found", "seconds": 0.5}
    left = {"processes": [], "sockets": 0, "files": []}
    return {"fault": "raises", "struck": True, "ranks": [dict(told) for _ in range(4)], "left": left, **changed}


def test_bad_cell_has_hang_wrong_image_or_leftovers():
    assert verdict(result()) == "good"
    assert verdict(result(struck=False)) == "the fault did not strike"
    told = result()["ranks"]
    assert verdict(result(ranks=[*told[:3], {}])) == "hang"
    assert verdict(result(ranks=[*told[:3], {"error": 0.1, "seconds": 1.0}])) == "wrong image"
    untold = {"raised": "RuntimeError", "message": "timed out", "seconds": 1.0}
    assert verdict(result(ranks=[untold] * 4)) == "cause not named"
    assert verdict(result(ranks=[{"error": 0.0, "seconds": 1.0}] * 4)) == "good"
    assert verdict(result(left={"processes": [], "sockets": 1, "files": []})) == "something left"


@pytest.mark.nodes
@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        ("killed", "inside attention"),
        ("stopped", "in the VAE"),
        ("raises", "between steps"),
        ("another LoRA", "at the end"),
    ],
)
def test_a_fault_ends_all_ranks_with_its_cause(fault, moment):
    with open_hosts(2, namespaces=False) as hosts:
        outcome = run_cell(Cell("flux", MESH, fault, moment), hosts, expected_image("flux"))
    assert verdict(outcome) == "good", outcome
