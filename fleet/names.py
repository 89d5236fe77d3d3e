"""File names of results: finished results are recognized, and results of other requests are never overwritten."""

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
    """Raise ValueError if file names cannot begin with ``name``."""
    if name is not None and not _NAME.fullmatch(name):
        raise ValueError(f"name is {name!r}; expected the beginning of a file name, such as 'cat', without a folder.")


def digest(request: Request, recipe: Recipe, kind: Kind, format_: str, fps: int) -> str:
    """Return the digest of everything that decides the files of a result."""
    return " ".join([request.digest, recipe.digest, format_, *([f"{fps} fps"] if kind == "video" else [])])


def choose_names(folder: Path, lines: Sequence[Line], name: str | None) -> tuple[list[Line], list[Line]]:
    """Return the lines without a result and the lines with one, each with the name of its files.

    A line has a result if the folder holds a complete one with the line's digest. Other lines are named by their
    number, such as ``cat-00001`` with the name ``cat``. If that is taken, they get the next number that is free.
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
    # Numbers after all that are taken, and after those that other lines take.
    free = count(1 + max([*taken, *(line.number for line in left)], default=0))
    numbers = [line.number if line.number not in taken else next(free) for line in left]
    return [replace(line, file=f"{prefix}{number:05d}") for line, number in zip(left, numbers, strict=True)], finished


def digest_of(folder: Path, name: str) -> str:
    """Return the digest of the result ``name``; an empty text if it is not complete."""
    try:
        record = json.loads((folder / f"{name}.json").read_bytes())
        return str(record["digest"]) if all((folder / file).is_file() for file in record["files"]) else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
