"""Check how docstrings begin, and that files they name exist: `python -m tests.docstrings`, a part of `make lint`."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    *("para_core", "adapters", "kernels", "fleet", "cli", "comfyui_para_core", "parallel_examples", "cache_examples"),
    *("tests", "benchmarks", "zoo"),
)
# A docstring that begins so is a fragment: it names a thing or a condition instead of saying what a function does.
FORBIDDEN_OPENINGS = ("What", "Of", "By", "How", "Before", "Who", "Where", "Which")
# The docstring of a function begins with a verb, so not with these either. A property may name its value.
NO_VERBS = (
    *("A", "An", "The", "This", "These", "It", "All", "Each", "Every", "One", "Two", "Three"),
    *("For", "From", "In", "On", "At", "To", "With", "Without", "As", "Like"),
)


def fragments_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of the module at ``path`` that cannot begin as it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and has_bad_opening(node, text):
                yield node.body[0].lineno, text


def has_bad_opening(node: ast.AST, text: str) -> bool:
    """Return whether ``text``, the docstring of ``node``, begins with a word that cannot begin it."""
    word = text.split(maxsplit=1)[0].strip(",:")
    if word in FORBIDDEN_OPENINGS:
        return True
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_property(node):
        return False
    return word in NO_VERBS or not word[0].isalpha()


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether ``node`` is decorated as a property, also as that of a class or one that is cached."""
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


_NAMED_FILE = re.compile(rf"(?<![\w/.])(?:docs|{'|'.join(FOLDERS)})/[\w/]+\.(?:py|md)\b")


def missing_files_in(path: Path) -> Iterator[str]:
    """Yield each file of the repository that docstrings or comments of ``path`` name, and that does not exist."""
    for name in sorted(set(_NAMED_FILE.findall(path.read_text()))):
        if not (ROOT / name).exists():
            yield name


def main() -> int:
    count = 0
    for path in sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        for name in missing_files_in(path):
            print(f"{path}: names {name}, which does not exist")
            count += 1
        for line, text in fragments_in(path):
            print(f"{path}:{line}: a docstring begins with {text.split()[0]!r}: {text.splitlines()[0]}")
            count += 1
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
