"""Reading of multipart forms, with which OpenAI's clients send images.

`bodies.py` calls it, and validates the fields. Tests: tests/fleet/test_openai.py, tests/fleet/test_fields.py.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from para_core.fleet.http.errors import RequestError

_MAX_FILES = 32  # as many as two fields of images may have, see bodies._MAX_IMAGES
_MAX_FIELDS = 200
# Values of these form fields, and of those whose names _PROMPT_NAME matches, are strings: the prompt "1" is a
# text. Values of other fields are parsed as JSON, also of those that bodies.py ignores.
_TEXT_FIELDS = (
    "size",
    "response_format",
    "output_format",
    "lora",
)
# Names of prompts, such as negative_prompt_2. Numbers and switches are none: num_images_per_prompt,
# use_system_prompt, prompt_enhancement_seed.
_PROMPT_NAME = re.compile(r"(?!num_|use_|enhance_)(\w+_)?prompt(_\d)?")


async def read_form(
    headers: Headers, chunks: AsyncGenerator[bytes], max_bytes: int
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the fields and files of a multipart form, with which OpenAI's clients send images.

    The value of a field that is a file is the key of its contents in the second dict. A field that is sent
    several times is a list. ``max_bytes`` limits each field that is no file; the caller limits ``chunks``.

    Raises:
        RequestError: The form is malformed, or has too many files or fields.
    """
    parser = MultiPartParser(
        headers, chunks, max_files=_MAX_FILES, max_fields=_MAX_FIELDS, max_part_size=max_bytes
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise RequestError(400, "invalid_form", f"the form is malformed: {error}") from None
    fields: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    try:
        for full_name, value in form.multi_items():
            name = full_name.removesuffix("[]")
            if isinstance(value, UploadFile):
                data = await value.read()
                item: Any = f"file {len(files)} of the form"
                files[item] = data
            else:
                item = value
                if name not in _TEXT_FIELDS and not _PROMPT_NAME.fullmatch(name):
                    item = _parse_json_or_text(value)
            if name not in fields:
                fields[name] = item
            elif isinstance(fields[name], list):
                fields[name] = [*fields[name], item]
            else:
                fields[name] = [fields[name], item]
    finally:
        await form.close()
    return fields, files


def _parse_json_or_text(text: str) -> Any:
    """Return the JSON value that ``text`` is, or else the text. An empty text, as of an empty box, is None."""
    if not text:
        return None
    try:
        return from_json(text)
    except ValueError:
        return text
