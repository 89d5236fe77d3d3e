"""A request as HTTP brings it: its body, and what is in there, read no further than the limits of the server."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from para_core.fleet.limits import Limits, RequestError
from para_core.fleet.models import Model
from para_core.fleet.request import Request, estimated_pixels, make_request, open_image

# Of one request, each of which is decoded.
_MOST_IMAGES = 16
# No text encoder reads more; a tokenizer would make room for any number.
_MOST_TOKENS = 4096
# OpenAI's fields that say nothing to a pipeline.
_IGNORED = ("user", "model", "quality", "style", "background", "moderation")


async def read_body(http: Any, limits: Limits) -> dict[str, Any]:
    """The object in the body, which is read no further than its limit."""
    if http.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise RequestError(415, "invalid_content_type", "expected Content-Type: application/json.")
    try:
        body = await asyncio.wait_for(_body_of(http, limits), limits.seconds)
    except TimeoutError:
        raise RequestError(408, "timed_out", f"the body was not sent within {limits.seconds:g} s.") from None
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "invalid_json", f"the body is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise RequestError(400, "invalid_json", 'the body is no object; expected one as in {"prompt": "a red circle"}.')
    # OpenAI's clients send null for what they leave out.
    return {name: value for name, value in given.items() if name not in _IGNORED and value is not None}


async def _body_of(http: Any, limits: Limits) -> bytes:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > limits.body_bytes:
            raise RequestError(413, "too_large", f"the body is larger than {limits.body_bytes} bytes.")
    return bytes(body)


def read_request(given: Mapping[str, Any], model: Model, limits: Limits) -> Request:
    """The request that ``given`` is; images are decoded.

    Raises:
        Refusal: it is none, or larger than the server takes.
    """
    # OpenAI's clients say "auto" where the server is to choose.
    given = {name: value for name, value in given.items() if (name, value) != ("size", "auto")}
    try:
        for name in model.images:
            if isinstance(given.get(name), list) and len(given[name]) > _MOST_IMAGES:
                raise ValueError(
                    f"field {name!r} has {len(given[name])} images; this server takes at most {_MOST_IMAGES}."
                )
        request = make_request(given, model, read_image=lambda text: _decode_image(text, limits.pixels))
    except (ValueError, OverflowError) as error:
        raise RequestError(400, "invalid_value", str(error)) from None
    _require_size(request, model, limits)
    steps = request.fields.get("num_inference_steps") or 0
    tokens = request.fields.get("max_sequence_length") or 0
    if tokens > _MOST_TOKENS:
        raise RequestError(
            400, "too_large", f"max_sequence_length is {tokens}; this server takes at most {_MOST_TOKENS}."
        )
    longest = max([steps, *[len(value) for value in request.fields.values() if isinstance(value, list)]])
    if longest > limits.steps:
        raise RequestError(400, "too_many_steps", f"{longest} steps; this server takes at most {limits.steps}.")
    return request


def _require_size(request: Request, model: Model, limits: Limits) -> None:
    pixels = estimated_pixels(request, model.kind)
    most = limits.pixels if limits.memory is None else min(limits.pixels, limits.memory.pixels)
    if pixels <= most:
        return
    why = f"more than the {limits.pixels} that this server generates at once"
    if limits.memory is not None and most < limits.pixels:
        why = (
            f"predicted to take {limits.memory.bytes_of(pixels) / 1e9:.3g} GB of each rank, which may hold "
            f"{limits.memory.room / 1e9:.3g} GB"
        )
    # As many results and frames of another size.
    side = int((most * _area(request) / pixels) ** 0.5) // 16 * 16 if request.pixels() else 0
    fits = f"as many images or frames fit at {side}x{side}" if side else "ask for fewer at once, or name a size"
    raise RequestError(400, "too_large", f"{pixels} pixels in all are {why}: {fits}.")


def _area(request: Request) -> int:
    sides = [request.fields[name] for name in ("height", "width") if request.fields.get(name) is not None]
    return int(sides[0] * sides[-1])


def _decode_image(text: str, max_pixels: int) -> bytes:
    """The contents of a ``data:`` url, or of base64; never of a file or of another server."""
    encoded = text.partition(",")[2] if text.startswith("data:") else text
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(
            "an image is given as base64, or as data:image/png;base64,…; paths and addresses are not opened."
        ) from None
    open_image(data, max_pixels)
    return data
