"""Prompt files: each line is a request, as a JSON object or as the prompt alone. Invalid lines do not affect
others.

`cli/generation.py` reads them. A request itself is validated in `request.py`; lines are generated in
`lines.py` or `replicas.py`. Tests: tests/fleet/test_fields.py, tests/cli/test_generate.py, and of a file that
cannot be read tests/cli/test_refusals.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from para_core.fleet.failures import describe_exception
from para_core.fleet.image_files import read_image_file
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.request import Request, make_request
from para_core.fleet.request_schema import merge_fields, request_schema
from para_core.option_values import require_unique_keys


@dataclass(frozen=True)
class Line:
    """A request of a prompt file, or of the command line as line 1."""

    number: int  # from 1
    request: Request
    # Both are empty until cli/generation.py has set them: see result_files.compute_digest and
    # result_files.choose_names.
    digest: str = ""
    name: str = ""  # of the result's files, without suffix


@dataclass(frozen=True)
class Problem:
    """The number of a line that has no result, and the reason as a sentence."""

    number: int
    reason: str


def read_prompts(
    path: Path, model: PipelineInfo, common: Mapping[str, Any], *, seed: int = 0
) -> tuple[list[Line], list[Problem]]:
    """Read a prompt file. Return its valid lines, and a problem for each invalid line. Empty lines are
    skipped.

    Each line of a ``.txt`` file is a prompt. Each line of any other file is a JSON object with fields of a
    request, whose image files are named relative to the folder of the prompt file. ``common`` has fields for
    every line that does not set them itself. Line n has the seed ``seed + n - 1``, unless it sets its own.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not UTF-8, is one JSON array, or has only empty lines.
    """
    contents = read_contents(path)
    is_plain = _is_plain(path)
    schema = request_schema(model)
    lines: list[Line] = []
    problems: list[Problem] = []
    # Not by splitlines(), which would also split at U+2028, a character that JSON strings may contain.
    for number, text in enumerate(contents.split("\n"), start=1):
        if not text.strip():
            continue
        try:
            values: Any = {"prompt": text.strip()}
            if not is_plain:
                values = json.loads(text, object_pairs_hook=require_unique_keys)
            if not isinstance(values, dict):
                raise ValueError(
                    f'it is {text.strip()[:40]!r}; expected an object such as {{"prompt": "a red circle"}}.'
                )
            values = merge_fields(common, values, model)
            request = make_request(
                values,
                model,
                seed=seed + number - 1,
                read_image=lambda name: read_image_file(path.parent / name),
                schema=schema,
            )
        except json.JSONDecodeError as error:
            problems.append(Problem(number, f"it is not JSON: {error.msg} at column {error.colno}."))
        except RecursionError:
            problems.append(Problem(number, "it is nested too deeply."))
        except (OSError, ValueError) as error:
            problems.append(Problem(number, describe_exception(error)))
        else:
            lines.append(Line(number, request))
    return lines, problems


def read_contents(path: Path) -> str:
    """Return the text of a prompt file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not UTF-8, is one JSON array, or has only empty lines.
    """
    try:
        contents = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}.") from error

    if not contents.strip():
        raise ValueError(f"{path} is empty; expected one request per line.")
    if not _is_plain(path) and _is_array(contents):
        raise ValueError(
            f'{path} is one JSON array; expected one object per line, such as {{"prompt": "a red circle"}}, without '
            "brackets and commas around them."
        )
    return contents


def require_contents(path: Path) -> None:
    """Raise what :func:`read_contents` raises. A pipe, which can be read only once, is not read."""
    if path.is_file() or path.is_dir() or not path.exists():
        read_contents(path)


def _is_plain(path: Path) -> bool:
    return path.suffix.lower() == ".txt"


def _is_array(text: str) -> bool:
    try:
        return text.lstrip().startswith("[") and isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False
