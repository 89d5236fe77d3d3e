"""Parsing of multipart forms: OpenAI's clients send images as files of a form."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from para_core.fleet.limits import RequestError

_MAX_FILES, _MAX_FIELDS = 32, 200
# Field names of OpenAI's API, and the names that pipelines have for these fields.
_NAMES = {"mask": "mask_image", "input_reference": "image"}
# Values of these form fields, and of all with "prompt" in their name, are strings. Values of other fields are parsed as
# JSON.
_TEXTS = ("size", "response_format", "output_format", "user", "model", "quality", "style", "background", "lora")


async def read_form(body: bytes, headers: Headers) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the fields of a multipart form, and its files.

    A field that is a file has a placeholder string as its value, which is the key of the file's contents.

    Raises:
        RequestError: If the form is malformed.
    """

    async def chunks() -> AsyncIterator[bytes]:
        yield body

    parser = MultiPartParser(
        headers, chunks(), max_files=_MAX_FILES, max_fields=_MAX_FIELDS, max_part_size=max(1, len(body))
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise RequestError(400, "invalid_form", f"the form is malformed: {error}") from None
    fields: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    try:
        await _sort(form, fields, files)
    finally:
        await form.close()
    return fields, files


async def _sort(form: FormData, fields: dict[str, Any], files: dict[str, bytes]) -> None:
    for full_name, value in form.multi_items():
        name = full_name.removesuffix("[]")
        if isinstance(value, UploadFile):
            data = await value.read()
            item: Any = f"file {len(files)} of the form"
            files[item] = _white_where_transparent(data) if name == "mask" else data
        else:
            item = value if "prompt" in name or name in _TEXTS else _json_or_text(value)
        name = _NAMES.get(name, name)
        if name in fields:
            fields[name] = [*(fields[name] if isinstance(fields[name], list) else [fields[name]]), item]
        else:
            fields[name] = item


def rename(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields`` with OpenAI's names replaced by those of pipelines, and image references by their URLs."""
    renamed = {_NAMES.get(name, name): value for name, value in fields.items()}
    reference = renamed.get("image")
    if isinstance(reference, dict) and isinstance(reference.get("image_url"), str):
        renamed["image"] = reference["image_url"]
    return renamed


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _white_where_transparent(data: bytes) -> bytes:
    """Convert OpenAI's mask, transparent where the image is to be generated, to diffusers' mask, white there.

    Other images, such as those without an alpha channel, are returned unchanged.
    """
    from PIL import Image, ImageChops

    try:
        image = Image.open(io.BytesIO(data), formats=("PNG", "WEBP"))
        if image.width * image.height > 2**26 or image.mode not in ("RGBA", "LA", "PA"):
            return data
        buffer = io.BytesIO()
        ImageChops.invert(image.convert("RGBA").getchannel("A")).save(buffer, "PNG")
        return buffer.getvalue()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        # An unreadable mask is refused later, like any unreadable image.
        return data
