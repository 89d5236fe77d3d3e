"""The program that breaks one line at a time: its mutants are valid, and it says which tests notice."""

import ast

import pytest

from tests import mutants
from tests.mutants import Mutant, apply, choose, mutants_of

SOURCE = """
LIMIT = 3

def clamp(x, low, high):
    print("×", x + 1)
    if x < low and not high:
        return low
    return x if x is not None else high
"""
CHANGES = {
    'print("×", x + 1)': {'print("×", x - 1)', 'print("×", x + 2)', "pass"},
    "if x < low and not high:": {
        "if x <= low and not high:",
        "if x < low or not high:",
        "if x < low and high:",
    },
    "return x if x is not None else high": {"return x if x is None else high"},
}


def test_operators_constants_and_calls_of_functions_change(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    found = {}
    for mutant in mutants_of(path, tmp_path):
        found.setdefault(mutant.before, set()).add(mutant.after)
    assert found == CHANGES


def test_mutant_changes_its_line_only(tmp_path):
    (tmp_path / "module.py").write_text(SOURCE)
    mutant = Mutant("module.py", 6, "if x < low and not high:", "if x < low or not high:")
    apply(mutant, tmp_path)
    changed = (tmp_path / "module.py").read_text()
    assert changed == SOURCE.replace("low and not", "low or not")
    with pytest.raises(ValueError, match=r"module.py:6 is 'if x < low or not high:'"):
        apply(mutant, tmp_path)


def test_seed_draws_the_same_valid_mutants():
    first = choose(3, 30)
    assert first == choose(3, 30)
    assert first != choose(4, 30)
    for mutant in first:
        lines = (mutants.ROOT / mutant.file).read_text().splitlines()
        line = lines[mutant.line - 1]
        lines[mutant.line - 1] = line[: len(line) - len(line.lstrip())] + mutant.after
        ast.parse("\n".join(lines))


@pytest.mark.parametrize(("after", "killed"), [("return a - b", True), ("return b + a", False)])
def test_killed_mutant_names_its_tests(tmp_path, monkeypatch, after, killed):
    tests = tmp_path / "tests" / "room"
    tests.mkdir(parents=True)
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tests / "test_sums.py").write_text("from room.sums import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    monkeypatch.chdir(tmp_path)
    apply(Mutant("room/sums.py", 2, "return a + b", after), tmp_path)
    failures = mutants._failures(tmp_path, ["tests/room"], "not long")
    assert failures == (("tests/room/test_sums.py::test_add",) if killed else ())
