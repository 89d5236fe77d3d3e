"""Choice of file names for results, so that finished results are recognized and others are never overwritten."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from para_core.fleet.models import Kind
from para_core.fleet.prompts import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request

_NAME = re.compile(r"[^\W.][^\\/:*?\"<>|\0]*")


def require_name(name: str | None) -> None:
    """Raise ValueError if ``name`` is not a valid beginning of a file name. None is valid."""
    if name is not None and not _NAME.fullmatch(name):
        raise ValueError(f"name is {name!r}; expected the beginning of a file name, such as 'cat', without a folder.")


def digest(request: Request, recipe: Recipe, kind: Kind, format_: str, fps: int) -> str:
    """Return a string that is equal for results with equal files: digests of request and recipe, format, frame rate."""
    return " ".join([request.digest, recipe.digest, format_, *([f"{fps} fps"] if kind == "video" else [])])


def choose_names(folder: Path, lines: Sequence[Line], name: str | None) -> tuple[list[Line], list[Line]]:
    """Return the lines to generate and the finished lines, each with the name of its files.

    A line is finished if the folder has a complete result with its digest. A line to generate is named by its number,
    such as ``cat-00001`` if ``name`` is ``cat``. If the folder already has files of that name, the line gets an unused
    number.
    """
    prefix = "" if name is None else f"{name}-"
    pattern = re.compile(re.escape(prefix) + r"(\d{5,})(-\d+)?\.\w+")
    files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    taken = {int(match[1]) for match in map(pattern.fullmatch, files) if match}
    results: dict[str, list[int]] = {}
    for number in sorted(taken, reverse=True):
        results.setdefault(digest_of(folder, f"{prefix}{number:05d}"), []).append(number)
    left: list[Line] = []
    finished: list[Line] = []
    for line in lines:
        numbers = results.get(line.digest)
        if numbers:
            finished.append(replace(line, file=f"{prefix}{numbers.pop():05d}"))
        else:
            left.append(line)
    # Unused numbers are larger than those of all files and of all lines, so that no two lines get the same number.
    free = count(1 + max([*taken, *(line.number for line in left)], default=0))
    numbers = [line.number if line.number not in taken else next(free) for line in left]
    return [replace(line, file=f"{prefix}{number:05d}") for line, number in zip(left, numbers, strict=True)], finished


def digest_of(folder: Path, name: str) -> str:
    """Return the digest of the result ``name`` in ``folder``, or an empty string if the result is not complete."""
    try:
        record = json.loads((folder / f"{name}.json").read_bytes())
        return str(record["digest"]) if all((folder / file).is_file() for file in record["files"]) else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
