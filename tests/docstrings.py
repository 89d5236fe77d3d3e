"""Check how docstrings begin, and draw random samples of text for a reader.

python -m tests.docstrings             # fails if a docstring begins with one of these words; part of `make lint`
python -m tests.docstrings --sample 1  # prints 100 docstrings and comments, drawn by this seed, for someone to judge
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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


class Text(NamedTuple):
    """A docstring or a comment, with the line of code that it describes."""

    path: Path
    line: int
    kind: str  # "docstring" or "comment"
    subject: str
    text: str
    bad: bool = False  # whether the docstring begins with a word that cannot begin it


def docstrings_of(path: Path) -> Iterator[Text]:
    """Yield the docstrings of the module at ``path``, its classes and its functions."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                header = (
                    "" if isinstance(node, ast.Module) else "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
                )
                yield Text(path, node.body[0].lineno, "docstring", header, text, has_bad_opening(node, text))


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


def comments_of(path: Path) -> Iterator[Text]:
    """Yield the comments of the module at ``path``. Consecutive comment lines are one comment."""
    source = path.read_text()
    lines = source.splitlines()
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#(!|:| type:| noqa| fmt:)", token.string):
            continue
        own_line = lines[token.start[0] - 1].lstrip().startswith("#")
        if block and own_line and token.start[0] == block[-1][0] + 1:
            block.append((token.start[0], token.string))
            continue
        if block:
            yield _comment(path, lines, block)
        block = [(token.start[0], token.string)]
        if not own_line:
            yield _comment(path, lines, block)
            block = []
    if block:
        yield _comment(path, lines, block)


def _comment(path: Path, lines: list[str], block: list[tuple[int, str]]) -> Text:
    first, last = block[0][0], block[-1][0]
    own_line = lines[first - 1].lstrip().startswith("#")
    subject = "\n".join(lines[last : last + 3]) if own_line else lines[first - 1].split("#")[0]
    return Text(path, first, "comment", subject, " ".join(text.lstrip("# ") for _, text in block))


def files(paths: list[Path]) -> list[Path]:
    """Return the Python files at and below ``paths``, sorted."""
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders; default: library, examples, tests")
    parser.add_argument("--sample", type=int, metavar="SEED", help="print 100 random items")
    arguments = parser.parse_args()
    paths = files(arguments.paths or [ROOT / folder for folder in FOLDERS])
    if arguments.sample is not None:
        items = [item for path in paths for item in (*docstrings_of(path), *comments_of(path))]
        for number, item in enumerate(random.Random(arguments.sample).sample(items, min(100, len(items))), 1):
            print(f"## {number}. {item.kind}, {item.path}:{item.line}\n{item.subject}\n--\n{item.text}\n")
        return 0
    bad = [text for path in paths for text in docstrings_of(path) if text.bad]
    for text in bad:
        print(f"{text.path}:{text.line}: a docstring begins with {text.text.split()[0]!r}: {text.text.splitlines()[0]}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
