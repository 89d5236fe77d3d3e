"""Break one line of the library at a time, and say which tests notice.

    python -m tests.mutants                    # 60 mutants of seed 0, resumed from build/mutants.json
    python -m tests.mutants --show             # the mutants as a diff, without running anything
    python -m tests.mutants --count 10 --seed 7 --whole

Each mutant is one changed line in a copy of the repository. Its tests are those of the files that the head of the
changed module names, or that name it, then those of its folder, then the quick tests, then, with ``--whole``, the
whole suite; they end at the first failure. If no test kills a mutant, nobody checks its line, or it changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.lift_out import QUICK, ROOMS, ROOT, Feature, without

_SECONDS = 3600
DEFAULT = "not long and not nodes and not comfyui"
_SWAPPED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "//",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed line of a file: ``before`` becomes ``after`` in line ``line``, counted from 1."""

    file: str
    line: int
    before: str
    after: str


@dataclass(frozen=True)
class Outcome:
    """The tests that failed on a mutant; empty if it survived. ``stage`` names the last tests that ran."""

    mutant: Mutant
    killed_by: tuple[str, ...]
    stage: str
    seconds: float


def mutants_of(path: Path, root: Path = ROOT) -> Iterator[Mutant]:
    """Yield every mutant of the functions in ``path``, each of which changes one line and is valid Python."""
    source = path.read_text()
    lines = source.splitlines()
    file = str(path.relative_to(root))
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                for start, end, text in _edits(node, lines):
                    line = lines[start[0] - 1]
                    # The columns of a syntax tree count bytes.
                    encoded = line.encode()
                    changed = (encoded[: start[1]] + text.encode() + encoded[end[1] :]).decode()
                    if changed != line:
                        yield Mutant(file, start[0], line.strip(), changed.strip())


Position = tuple[int, int]
Edit = tuple[Position, Position, str]


def _edits(node: ast.AST, lines: Sequence[str]) -> Iterator[Edit]:
    """Yield ``(start, end, text)`` for each replacement of ``node`` that lies on one line."""
    if isinstance(node, (ast.BinOp, ast.Compare)):
        left = node.left
        operators = [node.op] if isinstance(node, ast.BinOp) else node.ops
        right = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
        if len(operators) == 1:
            yield from _between(left, right, operators[0], lines)
    elif isinstance(node, ast.BoolOp):
        yield from _between(node.values[0], node.values[1], node.op, lines)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and _is_on_one_line(node):
        start = node.lineno, node.col_offset
        yield start, (node.operand.lineno, node.operand.col_offset), ""
    elif isinstance(node, ast.Constant) and _is_on_one_line(node):
        span = (node.lineno, node.col_offset), (node.lineno, node.end_col_offset or 0)
        if isinstance(node.value, bool):
            yield *span, str(not node.value)
        elif isinstance(node.value, int):
            yield *span, str(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_on_one_line(node):
        yield (node.lineno, node.col_offset), (node.lineno, node.end_col_offset or 0), "pass"


def _is_on_one_line(node: ast.expr | ast.stmt) -> bool:
    return node.lineno == node.end_lineno


def _between(left: ast.expr, right: ast.expr, operator: ast.AST, lines: Sequence[str]) -> Iterator[Edit]:
    """Yield the replacement of ``operator``, which stands between two operands on one line."""
    text = _SWAPPED.get(type(operator))
    if text is None or left.end_lineno != right.lineno:
        return
    start, end = left.end_col_offset or 0, right.col_offset
    between = lines[right.lineno - 1].encode()[start:end].decode()
    match = re.search(r"[^\s()]+(?: (?:not|in))?", between)
    if match is not None:
        yield (right.lineno, start + match.start()), (right.lineno, start + match.end()), text


def choose(seed: int, count: int) -> list[Mutant]:
    """Return ``count`` mutants, drawn from all lines of the library; the same for the same seed and files."""
    # A line is drawn before a change of it, so that a line with many operators is not broken more often.
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            for mutant in mutants_of(path):
                by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    generator = random.Random(seed)
    places = generator.sample(sorted(by_line), count)
    return [generator.choice(by_line[place]) for place in places]


def module_of(file: str) -> str:
    """Return the name under which a file of the library is imported."""
    parts = Path(file).with_suffix("").parts
    return ".".join(("para_core", *parts) if parts[0] in ROOMS[1:] else parts).removesuffix(".__init__")


def names_module(source: str, module: str) -> bool:
    """Whether ``source`` imports ``module``, or names it in a string, as tables of features do."""
    package, _, name = module.rpartition(".")
    imported = rf"from {re.escape(package)} import (\([^)]*|[^\n]*)\b{name}\b"
    in_table = rf'"{re.escape(package.rpartition(".")[2])}\.{name}:'
    kernel = rf'load_kernel\("{name}"' if package == "para_core.kernels" else "(?!)"
    return re.search(rf"\b{re.escape(module)}\b|{imported}|{in_table}|{kernel}", source) is not None


def stages_of(file: str, *, whole: bool) -> list[tuple[str, list[str], str]]:
    """Return the stages in which tests look for a mutant of ``file``: name, test files and folders, and marks."""
    parts = Path(file).with_suffix("").parts
    rooms = {"para_core": (), "comfyui_para_core": ("comfyui",)}.get(parts[0], parts[:1]) + parts[1:]
    own = Path("tests", *rooms[:-1], f"test_{rooms[-1]}.py")
    naming = [
        path.relative_to(ROOT)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if names_module(path.read_text(), module_of(file))
    ]
    named = map(Path, re.findall(r"tests/[\w/]+\.py", ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""))
    near = [str(path) for path in dict.fromkeys((own, *named, *naming)) if (ROOT / path).exists()]
    folders = [Path("tests", *rooms[:depth]) for depth in range(len(rooms) - 1, 0, -1)]
    mirror = [str(path) for path in folders if (ROOT / path).exists()][:1]
    stages = [("files that its head names, or that name it", near, DEFAULT), ("its folder", mirror, DEFAULT)]
    stages.append(("quick tests", ["tests"], QUICK))
    if whole:
        stages.append(("all tests", ["tests"], DEFAULT))
    return [stage for stage in stages if stage[1]]


def try_mutant(mutant: Mutant, *, whole: bool) -> Outcome:
    """Run the tests on a copy of the repository with ``mutant``, until one stage of them fails."""
    start = time.monotonic()
    with without(Feature("")) as copy:
        apply(mutant, copy)
        killed: tuple[str, ...] = ()
        last = ""
        for stage, paths, marks in stages_of(mutant.file, whole=whole):
            last = stage
            killed = _failures(copy, paths, marks)
            if killed:
                break
    return Outcome(mutant, killed, last, round(time.monotonic() - start, 1))


def apply(mutant: Mutant, folder: Path) -> None:
    """Change the line of ``mutant`` in ``folder``.

    Raises:
        ValueError: The line is another one, because the file changed after the mutant was made.
    """
    path = folder / mutant.file
    lines = path.read_text().splitlines()
    line = lines[mutant.line - 1]
    if line.strip() != mutant.before:
        raise ValueError(f"{mutant.file}:{mutant.line} is {line.strip()!r}; expected {mutant.before!r}.")
    lines[mutant.line - 1] = line[: len(line) - len(line.lstrip())] + mutant.after
    path.write_text("\n".join(lines) + "\n")


def _failures(folder: Path, paths: Sequence[str], marks: str) -> tuple[str, ...]:
    command = [sys.executable, *["-m", "pytest", "-q", "-x", "-n", "2", "-p", "no:cacheprovider", "-m"], marks, *paths]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return (f"no end within {_SECONDS} s",)
    # pytest ends with 5 if no test was selected.
    if run.returncode in (0, 5):
        return ()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.M)
    return tuple(failed) or (run.stdout[-500:] + run.stderr[-500:],)


def main() -> None:
    """Try the mutants that the command line asks for, and write each outcome as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--whole", action="store_true", help="run the whole suite on what the other tests leave alive")
    parser.add_argument("--show", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--file", type=Path, default=ROOT / "build/mutants.json", help="outcomes, resumed from here")
    options = parser.parse_args()
    mutants = choose(options.seed, options.count)
    outcomes = json.loads(options.file.read_text()) if options.file.exists() else []
    known = [outcome["mutant"] for outcome in outcomes]
    for mutant in mutants:
        if options.show:
            print(f"{mutant.file}:{mutant.line}\n- {mutant.before}\n+ {mutant.after}")
        elif asdict(mutant) not in known:
            outcome = try_mutant(mutant, whole=options.whole)
            outcomes.append(asdict(outcome))
            options.file.parent.mkdir(exist_ok=True)
            options.file.write_text(json.dumps(outcomes, indent=1))
            print(f"{mutant.file}:{mutant.line} {', '.join(outcome.killed_by) or 'SURVIVES'}", flush=True)
    if not options.show:
        wanted = [outcome for outcome in outcomes if Mutant(**outcome["mutant"]) in mutants]
        killed = sum(bool(outcome["killed_by"]) for outcome in wanted)
        print(f"{killed} of {len(wanted)} mutants are killed.")


if __name__ == "__main__":
    main()
