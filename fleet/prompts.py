"""A file of prompts: one JSON object per line, each a request. A bad line is a problem of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from para_core.fleet.models import Model
from para_core.fleet.request import Request, make_request
from para_core.fleet.work import sentence


@dataclass(frozen=True)
class Line:
    """A request, and the number of its line, from 1."""

    number: int
    request: Request

    @property
    def name(self) -> str:
        """Of its result."""
        return f"{self.number:05d}"


@dataclass(frozen=True)
class Problem:
    """Why the line of this number has no result."""

    number: int
    reason: str


def read_prompts(
    path: Path, model: Model, common: Mapping[str, Any], *, seed: int = 0
) -> tuple[list[Line], list[Problem]]:
    """The requests of a file, and what is wrong with the other lines; empty lines are neither.

    Args:
        common: fields of every line that does not have them itself.
        seed: of the first line, where it names none; the second has the next.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8.
    """
    try:
        # Not splitlines: JSON may hold other ends of lines, as U+2028, inside of a text.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}.") from error

    def read_image(name: str) -> bytes:
        return (path.parent / name).read_bytes()

    found: list[Line] = []
    problems: list[Problem] = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            given = json.loads(text)
            if not isinstance(given, dict):
                raise ValueError(
                    f'it is {text.strip()[:40]!r}; expected an object, as in {{"prompt": "a red circle"}}.'
                )
            request = make_request({**common, **given}, model, seed=seed + number - 1, read_image=read_image)
        except json.JSONDecodeError as error:
            problems.append(Problem(number, f"it is no JSON: {error.msg} at column {error.colno}."))
        except RecursionError:
            problems.append(Problem(number, "it is nested too deeply."))
        except (OSError, ValueError) as error:
            problems.append(Problem(number, sentence(error)))
        else:
            found.append(Line(number, request))
    return found, problems
