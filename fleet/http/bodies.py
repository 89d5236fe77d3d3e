"""Reading and validation of HTTP bodies into requests, within the limits of the server.

`server.py` calls :func:`read_content` and then :func:`read_request` in a thread, for images and videos.
Fields that the commands have too are checked in `request.py` and `request_schema.py`. Tests:
tests/fleet/test_server.py, tests/fleet/test_hostile.py, tests/fleet/test_fields.py.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from para_core.fleet.http.errors import RequestError
from para_core.fleet.http.forms import read_form
from para_core.fleet.http.image_fields import read_data, with_pipeline_names
from para_core.fleet.http.lora_folder import LoraFolder
from para_core.fleet.image_files import MAX_IMAGE_PIXELS, open_image
from para_core.fleet.memory import Memory
from para_core.fleet.outputs import find_side_problem, formats_here
from para_core.fleet.pipeline_info import PipelineInfo
from para_core.fleet.request import Delivery, Lora, Request, estimate_pixels, request_from
from para_core.fleet.request_schema import (
    LARGEST_INT,
    LARGEST_SEED,
    describe_error,
    parameter_of,
    request_schema,
)

# Longest string of a request, in characters per token that the model reads: eight times as many as English
# has, so that no real prompt is refused. The limit exists because a tokenizer needs minutes for megabytes of
# text, although the model reads only the beginning.
_CHARACTERS_PER_TOKEN = 32
_MAX_IMAGES = 16  # in one field
# Limit on max_sequence_length. No text encoder reads more tokens, but a tokenizer would pad to any length.
_MAX_TOKENS = 4096
# Number of tokens that a model is assumed to read if its pipeline has no max_sequence_length. CLIP reads this
# number.
_CLIP_TOKENS = 77
# Fields of OpenAI's API that are accepted and ignored, because pipelines have nothing like them.
_IGNORED_FIELDS = (
    "user",
    "model",
    "quality",
    "style",
    "background",
    "moderation",
    "input_fidelity",
    "safety_identifier",
)
_FORMAT_NAMES = {"jpeg": "jpg"}
# Value of a seed that asks for a random one, like null.
_RANDOM_SEED = -1
# A drawn seed is below this number, so that every client can send it back: JavaScript's numbers are exact up
# to 2**53.
_DRAWN_SEEDS = 2**32


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server itself, and limits on what it accepts. For those of a replica see
    ``rank.py``.
    """

    # That requests must send; without one, only requests to a loopback name are accepted.
    api_key: str | None = None
    # Its format is that of results whose requests state none, its fps that of all; the rest is not used.
    delivery: Delivery = field(default_factory=Delivery)
    videos: Path | None = None  # folder for results of asynchronous videos; None disables their routes
    keep_hours: float = 24.0  # for which an asynchronous video is kept after it has ended
    max_batch: int = 1  # largest number of requests that are generated as one batch
    loras: Path | None = None  # folder of LoRAs that requests may name; None refuses requests with a LoRA
    cors: tuple[str, ...] = ()  # sites whose pages may use the server, or "*" for all
    request_log: Path | None = None  # file to which each request is logged
    seed: int | None = None  # of every request that states none; None draws one for each
    waiting: int = 8  # requests that may wait while all replicas are busy
    pixels: int = 2048 * 2048  # of a result, summed over all images or frames
    steps: int = 200  # largest number of denoising steps
    body_bytes: int = 32 * 2**20
    # Of a request, the time in the queue included; asynchronous videos have no such limit.
    seconds: float = 600.0
    retries: int = 0  # how often a request is run again after its replica died
    # Predicted memory of a rank, which also limits the pixels. Server.set_memory sets it after the replicas
    # have loaded; None before, and if it cannot be predicted.
    memory: Memory | None = None

    @property
    def most_pixels(self) -> int:
        """Largest number of pixels of a batch, which is one call of the pipeline, by both limits: that of the
        server and that of a rank's memory. :func:`_require_size` checks a request, which may take several
        calls.
        """
        if self.memory is None:
            return self.pixels
        return min(self.pixels, self.memory.pixels)


def body_schema(model: PipelineInfo, options: ServerOptions) -> type[BaseModel]:
    """Return the pydantic model of an HTTP body: the fields of a request, and the options of OpenAI's images
    API.
    """
    limited = {"num_inference_steps": options.steps, "max_sequence_length": _MAX_TOKENS}
    formats = formats_here(model.kind)
    if model.kind == "image":
        formats = (*formats, "jpeg")
    seed = Annotated[int, Field(ge=_RANDOM_SEED, le=LARGEST_SEED, description="null or -1: a random one")]
    extra: dict[str, Any] = {
        "seed": (seed | None, None),
        "response_format": (Literal["b64_json", "url"] | None, "b64_json"),
        "stream": (bool | None, False),
        "progress": (Annotated[bool, Field(description="Whether a stream reports each step.")] | None, False),
        "partial_images": (Annotated[int, Field(ge=0, le=3)] | None, 0),
        "output_format": (Literal[formats] | None, None),
        "output_compression": (Annotated[int, Field(ge=0, le=100)] | None, None),
        **dict.fromkeys(_IGNORED_FIELDS, (Any, None)),
    }
    if options.loras is not None:
        extra["lora"] = (Annotated[str, Field(description="name or name:scale", max_length=200)] | None, None)
    if parameter_of("frames", model) in model.fields:
        extra["seconds"] = (Annotated[str | int | float, Field(description="Duration.")] | None, None)
    schema = request_schema(model, at_most={**limited, **dict.fromkeys(model.images, _MAX_IMAGES)})
    extended: type[BaseModel] = create_model(schema.__name__, __base__=schema, **extra)
    return extended


async def read_content(http: HttpRequest, options: ServerOptions) -> tuple[Any, dict[str, bytes]]:
    """Receive the body of the HTTP request ``http``, but not more bytes than its limit.

    Return the unvalidated JSON value and no files, or the fields of a form and its files. A field that is a
    file has a placeholder string as its value, which is the key of the file's contents.

    Raises:
        RequestError: The body is too large, too slow, or neither JSON nor a form.
    """
    kind = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in ("application/json", "multipart/form-data"):
        raise RequestError(
            415, "invalid_content_type", "expected Content-Type: application/json or multipart/form-data."
        )

    async def chunks() -> AsyncGenerator[bytes]:
        size = 0
        async for chunk in http.stream():
            size += len(chunk)
            if size > options.body_bytes:
                raise RequestError(413, "too_large", f"the body is larger than {options.body_bytes} bytes.")
            yield chunk

    try:
        async with asyncio.timeout(options.seconds):
            if kind == "multipart/form-data":
                return await read_form(http.headers, chunks(), options.body_bytes)
            return from_json(b"".join([chunk async for chunk in chunks()])), {}
    except ClientDisconnect:
        raise RequestError(499, "client_left", "the client disconnected while it sent the body.") from None
    except TimeoutError:
        raise RequestError(408, "timed_out", f"the body was not sent within {options.seconds:g} s.") from None
    except ValueError as error:
        raise RequestError(400, "invalid_json", f"the body is not JSON: {error}.") from None


def read_request(
    values: Any,
    files: Mapping[str, bytes],
    schema: type[BaseModel],
    model: PipelineInfo,
    options: ServerOptions,
    loras: LoraFolder | None,
) -> Request:
    """Validate a body, the result of :func:`read_content`, and return its request.

    ``schema`` is the result of :func:`body_schema`. Images are decoded to validate them. ``loras`` is None if
    the server takes no LoRAs; then ``schema`` has no such field either.

    Raises:
        RequestError: The body is not valid, or the request exceeds a limit.
    """
    files = dict(files)
    if isinstance(values, dict):
        try:
            values = with_pipeline_names(values, files, model)
        except ValueError as error:
            raise RequestError(400, "invalid_value", str(error)) from None
    fields = _validate(values, schema, model)
    # What is left in fields goes to the pipeline, so everything else is taken out.
    delivery = _take_delivery(fields, options)

    def read_image(text: str) -> bytes:
        data = read_data(text, files)
        open_image(data, min(options.pixels, MAX_IMAGE_PIXELS))
        return data

    try:
        adapter: Lora | None = None
        if loras is not None:
            lora = fields.pop("lora", loras.default)
            if lora not in (None, "none"):
                adapter = loras.find(lora)
        _require_short_texts(fields, model)
        _refuse_files(fields, files, model)
        _replace_seconds(fields, model, delivery.fps)
        if fields.get("seed", _RANDOM_SEED) == _RANDOM_SEED:
            fields["seed"] = options.seed
            if options.seed is None:
                fields["seed"] = secrets.randbelow(_DRAWN_SEEDS)
        request = request_from(fields, model, read_image=read_image)
    except ValueError as error:
        raise RequestError(400, "invalid_value", str(error)) from None
    request = replace(request, delivery=delivery, lora=adapter)
    _require_size(request, model, options)
    problem = find_side_problem(request)
    if problem is not None:
        raise RequestError(400, "too_large", problem)
    _require_few_steps(request, options)
    return request


def _validate(values: Any, schema: type[BaseModel], model: PipelineInfo) -> dict[str, Any]:
    """Return the fields of a body that are set and not ignored. Raise RequestError if one is not valid."""
    try:
        # OpenAI's clients send null for a field that their user omits, so exclude_none drops such fields.
        fields = schema.model_validate(values).model_dump(exclude_unset=True, exclude_none=True)
    except ValidationError as error:
        code = "invalid_json"
        if error.errors()[0]["loc"]:
            code = "invalid_value"
        raise RequestError(400, code, describe_error(error, model, "body")) from None
    return {name: value for name, value in fields.items() if name not in _IGNORED_FIELDS}


def _take_delivery(fields: dict[str, Any], options: ServerOptions) -> Delivery:
    """Remove from ``fields`` those that say how the result is encoded and sent, and return them."""
    format_ = fields.pop("output_format", options.delivery.format_)
    stream = fields.pop("stream", False)
    partial_images = fields.pop("partial_images", 0)
    if not stream:
        # Nobody would get them, and a request with previews is in no batch.
        partial_images = 0
    return replace(
        options.delivery,
        format_=_FORMAT_NAMES.get(format_, format_),
        quality=fields.pop("output_compression", None),
        partial_images=partial_images,
        url=fields.pop("response_format", None) == "url",
        stream=stream,
        progress=fields.pop("progress", False),
    )


def _refuse_files(fields: Mapping[str, Any], files: Mapping[str, bytes], model: PipelineInfo) -> None:
    """Raise ValueError if a field is a file of the form where none is expected."""
    for name, value in fields.items():
        # A field that is sent several times is a list, and one of its items may be a file.
        items = value
        if not isinstance(items, list):
            items = [items]
        if name not in model.images and any(isinstance(item, str) and item in files for item in items):
            raise ValueError(f"field {name!r} is a file; expected a text or a number.")


def _replace_seconds(fields: dict[str, Any], model: PipelineInfo, fps: int) -> None:
    """Replace the field ``seconds`` of a video by ``frames``.
    Raise ValueError if both are set, or it is no number of at least 0.
    """
    if "seconds" not in fields:
        return
    seconds = fields.pop("seconds")
    for name in {"frames", parameter_of("frames", model)} & fields.keys():
        raise ValueError(f"field 'seconds' and field {name!r} both set the frames: expected one of them.")
    try:
        # One frame more than fit, because video models generate 4·n + 1 or 8·n + 1 frames.
        number = float(seconds)
        frames = round(number * fps) + 1
    except (ValueError, OverflowError):
        number, frames = -1.0, 0
    if number < 0 or frames > LARGEST_INT:
        raise ValueError(
            f"field 'seconds' is {seconds!r:.80}; expected a number of at least 0, with at most {LARGEST_INT} frames."
        )
    fields["frames"] = frames


def _require_few_steps(request: Request, options: ServerOptions) -> None:
    """Raise RequestError if a list, such as sigmas, sets more steps than allowed, whatever num_inference_steps is."""
    for name, value in request.fields.items():
        if isinstance(value, list) and len(value) > options.steps:
            raise RequestError(
                400,
                "too_many_steps",
                f"field {name!r} has {len(value)} values; this server takes at most {options.steps}, as many as steps.",
            )


def _require_short_texts(fields: Mapping[str, Any], model: PipelineInfo) -> None:
    """Raise RequestError if a string is much longer than the model can read: a tokenizer would take minutes."""
    name = "max_sequence_length"
    tokens = fields.get(name) or model.defaults.get(name) or model.fields.get(name)
    if not isinstance(tokens, int):
        tokens = _CLIP_TOKENS
    most = _CHARACTERS_PER_TOKEN * tokens
    prompt = fields.get("prompt")
    prompts = 1
    if isinstance(prompt, list):
        prompts = max(1, len(prompt))
    for name in set(fields) - set(model.images):
        texts = fields[name]
        if not isinstance(texts, list):
            texts = [texts]
        lengths = [len(text) for text in texts if isinstance(text, str)]
        if sum(lengths) > most * prompts or max(lengths, default=0) > most:
            raise RequestError(
                400,
                "text_too_long",
                f"field {name!r} has {sum(lengths)} characters; expected at most {most} for each of {prompts} prompts "
                f"({_CHARACTERS_PER_TOKEN} for each of the {tokens} tokens that the model reads).",
            )


def _require_size(request: Request, model: PipelineInfo, options: ServerOptions) -> None:
    """Raise RequestError if the result has more pixels than the server takes, naming a size that would fit."""
    pixels = estimate_pixels(request, model)
    most = options.pixels
    why = f"more than the {options.pixels} that this server generates at once"
    # A rank holds the pixels of one call.
    if options.memory is not None and options.memory.pixels * request.calls < most:
        most = options.memory.pixels * request.calls
        why = options.memory.prediction(pixels // request.calls)
    if pixels <= most:
        return
    hint = "request fewer at once, or state a size"
    sides = [request.fields[name] for name in ("height", "width") if request.fields.get(name) is not None]
    if sides:
        # Of 16, because model.multiple is 1 if it is unknown, and most pipelines generate multiples of 16.
        step = math.lcm(16, model.multiple)
        side = int((most * sides[0] * sides[-1] / pixels) ** 0.5) // step * step
        if side:
            hint = f"the same number of images or frames fits at {side}x{side}"
    raise RequestError(400, "too_large", f"{pixels} pixels in total are {why}: {hint}.")
