"""The program that breaks one line at a time: its mutants are valid, and it says which tests notice."""

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


def test_seed_draws_mutants_of_the_library():
    for mutant in choose(3, 30):
        line = (mutants.ROOT / mutant.file).read_text().splitlines()[mutant.line - 1]
        assert line.strip() == mutant.before != mutant.after
