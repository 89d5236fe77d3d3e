"""Requests read from HTTP bodies, within the limits of the server."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError, create_model

from para_core.fleet.limits import Limits, RequestError
from para_core.fleet.models import Model
from para_core.fleet.request import Request, describe_error, estimated_pixels, open_image, request_from, request_schema

_MAX_IMAGES = 16
# Text encoders read fewer tokens, but a tokenizer would pad to any number.
_MAX_TOKENS = 4096
# Fields of OpenAI's API that have no meaning for a pipeline.
_IGNORED = ("user", "model", "quality", "style", "background", "moderation")


class Body(NamedTuple):
    """A request with the options of its answer."""

    request: Request
    response_format: Literal["b64_json", "url"]
    stream: bool


def body_schema(model: Model, limits: Limits) -> type[BaseModel]:
    """Return the pydantic model of a request body: the fields of a request, and those of OpenAI's images API."""
    limited = {"num_inference_steps": limits.steps, "max_sequence_length": _MAX_TOKENS}
    options: dict[str, Any] = {
        "response_format": (Literal["b64_json", "url"] | None, "b64_json"),
        "stream": (bool | None, False),
        **dict.fromkeys(_IGNORED, (Any, None)),
    }
    schema = request_schema(model, at_most={**limited, **dict.fromkeys(model.images, _MAX_IMAGES)})
    extended: type[BaseModel] = create_model(schema.__name__, __base__=schema, **options)
    return extended


async def read_body(http: Any, limits: Limits) -> bytes:
    """Return the body of the HTTP request ``http``, which is read no further than its limit.

    Raises:
        RequestError: If the body is too large, too slow, or not ``application/json``.
    """
    if http.headers.get("content-type", "").split(";")[0].strip() != "application/json":
        raise RequestError(415, "invalid_content_type", "expected Content-Type: application/json.")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.seconds):
            async for chunk in http.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise RequestError(413, "too_large", f"the body is larger than {limits.body_bytes} bytes.")
    except TimeoutError:
        raise RequestError(408, "timed_out", f"the body was not sent within {limits.seconds:g} s.") from None
    return bytes(body)


def read_request(body: bytes, schema: type[BaseModel], model: Model, limits: Limits) -> Body:
    """Return the request in ``body``. Images are decoded.

    Raises:
        RequestError: If the body is not valid, or the request exceeds a limit.
    """
    try:
        # OpenAI's clients send null for what they omit.
        fields = schema.model_validate_json(body).model_dump(exclude_unset=True, exclude_none=True)
    except ValidationError as error:
        code = "invalid_value" if error.errors()[0]["loc"] else "invalid_json"
        raise RequestError(400, code, describe_error(error, model, "body")) from None
    for name in _IGNORED:
        fields.pop(name, None)
    response_format, stream = fields.pop("response_format", "b64_json"), fields.pop("stream", False)
    try:
        request = request_from(fields, model, read_image=lambda text: _decode_image(text, limits.pixels))
    except ValueError as error:
        raise RequestError(400, "invalid_value", str(error)) from None
    _require_size(request, model, limits)
    longest = max([len(value) for value in request.fields.values() if isinstance(value, list)], default=0)
    if longest > limits.steps:
        raise RequestError(400, "too_many_steps", f"{longest} steps; this server takes at most {limits.steps}.")
    return Body(request, response_format, stream)


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
    hint = "request fewer at once, or state a size"
    sides = [request.fields[name] for name in ("height", "width") if request.fields.get(name) is not None]
    if sides:
        side = int((most * sides[0] * sides[-1] / pixels) ** 0.5) // 16 * 16
        hint = f"the same number of images or frames fits at {side}x{side}" if side else hint
    raise RequestError(400, "too_large", f"{pixels} pixels in total are {why}: {hint}.")


def _decode_image(text: str, max_pixels: int) -> bytes:
    """Return the contents of a ``data:`` URL or of base64. Paths and addresses are never opened."""
    encoded = text.partition(",")[2] if text.startswith("data:") else text
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(
            "an image must be base64, or data:image/png;base64,…; paths and addresses are not opened."
        ) from None
    open_image(data, max_pixels)
    return data
