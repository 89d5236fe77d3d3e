"""Count what makes the library hard to change: lines and conditional expressions per room, and where options are named.

python -m benchmarks.house            # print the tables
python -m benchmarks.house --write    # and write benchmarks/results/house.json
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, read_results, write_results

ROOT = Path(__file__).parents[1]
_ROOMS = ("para_core", "adapters", "kernels", "fleet", "cli", "comfyui_para_core")
HOUSE = RESULTS / "house.json"
_LONG = 110
# Options whose homes are counted, two of a pipeline, one of the cache and one of attention.
OPTIONS = ("vae_placement", "text_encoders", "residual_diff_threshold", "comm_dtype")


def room_of(path: Path) -> str:
    """Return the room of a file: its folder, or ``para_core`` or ``adapters`` for a file at the top of these."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] in ("para_core", "adapters") and len(parts) > 2 else parts[0]


def files() -> Iterator[Path]:
    """Yield the Python files of the library."""
    for room in _ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))


def density() -> dict[str, dict[str, int]]:
    """Return, for each room, the number of lines, of conditional expressions, of nested ones, and of long lines."""
    rooms: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(("lines", "conditional", "nested", "long"), 0))
    for path in files():
        source = path.read_text()
        conditional = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.IfExp)]
        nested = sum(
            any(isinstance(below, ast.IfExp) and below is not node for below in ast.walk(node)) for node in conditional
        )
        lines = source.splitlines()
        for room in (room_of(path), "all"):
            rooms[room]["lines"] += len(lines)
            rooms[room]["conditional"] += len(conditional)
            rooms[room]["nested"] += nested
            rooms[room]["long"] += sum(len(line) > _LONG for line in lines)
    return dict(sorted(rooms.items()))


def homes() -> dict[str, list[str]]:
    """Return, for each of ``OPTIONS``, the files of the library that name it, as a word of its own."""
    return {
        option: [str(path.relative_to(ROOT)) for path in files() if re.search(rf"\b{option}\b", path.read_text())]
        for option in OPTIONS
    }


def main() -> None:
    """Print the tables, and write them with ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="NAME", help="name under which the tables are written")
    name = parser.parse_args().write
    results: dict[str, Any] = {"density": density(), "homes": homes()}
    print(f"{'room':28} {'lines':>7} {'conditional / 1000':>19} {'nested':>7} {'long / 100':>11}")
    for room, row in results["density"].items():
        rate, long = 1000 * row["conditional"] / row["lines"], 100 * row["long"] / row["lines"]
        print(f"{room:28} {row['lines']:7} {rate:19.1f} {row['nested']:7} {long:11.1f}")
    for option, named_in in results["homes"].items():
        print(f"{option}: {len(named_in)} files")
    if name is not None:
        write_results("house", {**(read_results("house") if HOUSE.exists() else {}), name: results})


if __name__ == "__main__":
    main()
