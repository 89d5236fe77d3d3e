"""Say who imports a file of the library, and which tests check it.

    python -m tests.touching adapters/vae/unet.py                  # at once, from the imports
    python -m tests.touching adapters/vae/unet.py --run            # by running the quick tests, in three minutes
    python -m tests.touching adapters/vae/unet.py --run --ranks tests/spatial   # these, those on several ranks too

``--run`` says which tests call each function. It runs them in a copy of the repository, in which each function of the
file notes that it was called. What Dynamo traces may fail for that, so whether the tests pass is not said.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lift_out import QUICK, ROOMS, ROOT, Feature, without
from tests.mutants import DEFAULT, module_of, names_module, stages_of

# The environment variable with a folder: the file "calls" has a line for each call, "tests" one for each test.
_FOLDER = "PARA_CORE_TOUCHING"
_noted: set[str] = set()
_noted_at = [0]


def note(function: str) -> None:
    """Note a call of ``function``, once for each test and process, also on ranks that outlive a test."""
    folder = Path(os.environ[_FOLDER])
    changed_at = (folder / "tests").stat().st_mtime_ns
    if changed_at != _noted_at[0]:
        _noted_at[0] = changed_at
        _noted.clear()
    if function not in _noted:
        _noted.add(function)
        with (folder / "calls").open("a") as file:
            file.write(f"{function}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write the functions that ``item`` calls to the file "tests"."""
    folder = Path(os.environ[_FOLDER])
    (folder / "calls").write_text("")
    with (folder / "tests").open("a") as file:
        file.write(item.nodeid)
    result = yield
    functions = sorted(set((folder / "calls").read_text().split()))
    with (folder / "tests").open("a") as file:
        file.write(f"\t{' '.join(functions)}\n")
    return result


def add_notes(source: str) -> str:
    """Return ``source`` with a call of :func:`note` at the start of each function that has more than one line."""
    lines = source.splitlines()
    starts = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
            if first.lineno > function.lineno:
                starts.append((first.lineno, first.col_offset, function.name))
    for line, column, name in sorted(starts, reverse=True):
        lines.insert(line - 1, f"{' ' * column}__import__('tests.touching').touching.note({name!r})")
    return "\n".join(lines) + "\n"


def run_tests(file: str, paths: list[str], marks: str) -> dict[str, list[str]]:
    """Return the tests that call each function of ``file``."""
    touched: dict[str, list[str]] = {}
    with without(Feature("")) as copy:
        (copy / file).write_text(add_notes((copy / file).read_text()))
        (copy / "tests.touched").mkdir()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.touching", "-p", "no:cacheprovider", "-m", marks]
        environment = {**os.environ, "PYTHONPATH": str(copy), _FOLDER: str(copy / "tests.touched")}
        subprocess.run([*command, *paths], cwd=copy, env=environment, stdout=sys.stderr, check=False)
        for line in (copy / "tests.touched/tests").read_text().splitlines():
            test, _, functions = line.partition("\t")
            for function in functions.split():
                touched.setdefault(function, []).append(test)
    return touched


def importers_of(file: str) -> list[str]:
    """Return the files of the library that import ``file``, or name its module in a table of features."""
    paths = (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")))
    return [str(path.relative_to(ROOT)) for path in paths if names_module(path.read_text(), module_of(file))]


def main() -> None:
    """Print the importers and the tests of the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a file of the library, relative to the root")
    parser.add_argument("paths", nargs="*", default=["tests"], help="tests to run")
    parser.add_argument("--run", action="store_true", help="run tests, and say which of them call each function")
    parser.add_argument("--ranks", action="store_true", help="run tests on several ranks, too")
    options = parser.parse_intermixed_args()
    if not options.run:
        print("imported by:", *importers_of(options.file), sep="\n  ")
        for stage, paths, _ in stages_of(options.file, whole=False)[:-1]:
            print(f"tests, {stage}:", *paths, sep="\n  ")
        return
    touched = run_tests(options.file, options.paths, DEFAULT if options.ranks else QUICK)
    for function, tests in sorted(touched.items()):
        print(f"{function}: {len(tests)} tests", *tests[:8], sep="\n  ")


if __name__ == "__main__":
    main()
