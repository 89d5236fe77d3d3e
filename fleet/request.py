"""Requests: the arguments of a pipeline's call as JSON values, validated before the pipeline is loaded.

The commands call :func:`make_request`, the server (`http/bodies.py`) :func:`request_from`. Types of fields
stand in `request_schema.py`, and `work.py` calls the pipeline with a request. Tests:
tests/fleet/test_fields.py, tests/fleet/test_work.py.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from para_core.fleet.image_files import ImageMode, open_image, read_images
from para_core.fleet.pipeline_info import FRAME_PARAMETERS, OutputKind, PipelineInfo
from para_core.fleet.request_schema import (
    LARGEST_SEED,
    describe_error,
    parameter_of,
    read_size,
    request_schema,
    require_one_name,
)

# Width, height and number of frames that are assumed for estimates if neither a request nor the pipeline's
# call states them: the native sizes of FLUX and of HunyuanVideo.
_USUAL_SIZES: Mapping[OutputKind, tuple[int, int, int]] = {
    "image": (1024, 1024, 1),
    "video": (1280, 720, 129),
}
USUAL_PIXELS: Mapping[OutputKind, int] = {kind: math.prod(sizes) for kind, sizes in _USUAL_SIZES.items()}
# Deepest nesting of lists and dicts in a field. Serializing a field for the ranks recurses, so depth must be
# limited.
_MAX_NESTING = 16


@dataclass(frozen=True)
class Delivery:
    """Options for encoding and sending the result of a request. They do not change what the pipeline
    generates.
    """

    format_: str = "png"
    fps: int = 16  # of videos
    # Of JPEG and WebP, 0 to 100. None is 95 for JPEG, lossless for a WebP image, and Pillow's for a WebP video.
    quality: int | None = None
    partial_images: int = 0  # number of previews that are sent while the request runs
    url: bool = False  # whether a server's response has URLs of the files instead of the files as base64
    stream: bool = False  # whether the response is a stream of server-sent events
    progress: bool = False  # whether the stream also reports finished steps


class Lora(NamedTuple):
    """The LoRA of a request: path of its file or folder, scale, and a text that changes if the file does."""

    path: str
    scale: float = 1.0
    version: str = ""


@dataclass(frozen=True)
class Request:
    """One call of a pipeline."""

    # Arguments of the call by diffusers' names, as JSON values; those of images are in ``images``.
    fields: Mapping[str, Any]
    seed: int = 0  # of the torch.Generator of the first result, see seeds
    images: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)  # contents of files, by argument
    delivery: Delivery = Delivery()
    lora: Lora | None = None  # in addition to those of the recipe

    @property
    def digest(self) -> str:
        """16 hex digits that identify what the request generates, however that is delivered.

        They are part of the records on disk (:func:`~para_core.fleet.result_files.compute_digest`): if they
        change, finished results of earlier versions are generated again.
        """
        images = {
            name: [hashlib.sha256(data).hexdigest() for data in files] for name, files in self.images.items()
        }
        decisive = [self.fields, self.seed, images, *filter(None, [self.lora])]
        text = json.dumps(decisive, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def results(self) -> int:
        """Number of images or videos that the request generates."""
        prompt = self.fields.get("prompt")
        prompts = 1
        if isinstance(prompt, list):
            prompts = len(prompt)
        each = self.fields.get("num_images_per_prompt") or self.fields.get("num_videos_per_prompt") or 1
        return int(prompts * each)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each result: that of the request, and one more for each next result.

        So a result can be generated again alone, with its own seed.
        """
        return tuple((self.seed + index) % (LARGEST_SEED + 1) for index in range(self.results))

    @property
    def calls(self) -> int:
        """Number of calls of the pipeline that generate the results, see :func:`split_request`."""
        if not self.images or isinstance(self.fields.get("prompt"), list):
            return 1
        return self.results

    @property
    def size(self) -> str:
        """The requested size as ``"WIDTHxHEIGHT"``, or ``"auto"`` if the pipeline chooses a side."""
        width, height = self.fields.get("width"), self.fields.get("height")
        if width is None or height is None:
            return "auto"
        return f"{width}x{height}"


_COUNT_FIELDS = ("num_images_per_prompt", "num_videos_per_prompt")


def split_request(request: Request) -> list[Request]:
    """Return the requests whose results, one after the other, are those of ``request``. Often this is itself.

    Several images that begin from an image are generated one by one. diffusers encodes that image only once
    for all, with the generator of the first, so the others would differ from what their own seeds give alone.
    Only the first part sends previews. A list of prompts is not split, so if it begins from an image, its
    later results may differ from those of their seeds alone.
    """
    if request.calls == 1:
        return [request]
    fields = {name: value for name, value in request.fields.items() if name not in _COUNT_FIELDS}
    parts = [replace(request, fields=fields, seed=seed) for seed in request.seeds]
    without_previews = replace(request.delivery, partial_images=0)
    return [parts[0], *(replace(part, delivery=without_previews) for part in parts[1:])]


def estimate_pixels(request: Request, model: PipelineInfo) -> int:
    """Return the number of pixels, summed over all images or frames. An estimate: the pipeline may choose a
    side.

    A side or number of frames that the request leaves out is the default of the pipeline's call. If that
    states none, it is a usual one, or if the other side is known, that of a square.
    """
    width, height, frames = _USUAL_SIZES[model.kind]
    sides = [size for name in ("height", "width") if (size := _find_size(name, request, model)) is not None]
    if sides:
        width, height = sides[0], sides[-1]
    for name in FRAME_PARAMETERS:
        frames = _find_size(name, request, model) or frames
    return int(width * height * frames * request.results)


def _find_size(name: str, request: Request, model: PipelineInfo) -> int | None:
    """Return the value of the field ``name``: of the request, else the default of the pipeline's call; None
    if that is no number.
    """
    value = request.fields.get(name)
    if value is None:
        value = model.fields.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None


def make_request(
    values: Mapping[str, Any],
    model: PipelineInfo,
    *,
    seed: int = 0,
    read_image: Callable[[str], bytes] | None = None,
    schema: type[BaseModel] | None = None,
) -> Request:
    """Validate ``values``, and return the request.

    Args:
        values: Fields of the pipeline's call, or ``seed``, ``size``, ``steps``, ``frames``, ``n``. They
            override ``model.defaults``. A field that is None counts as left out.
        seed: Seed if ``values`` has none.
        read_image: Returns the contents of an image file, given the string in an image field, see
            :func:`~para_core.fleet.image_files.read_images`. None refuses images.
        schema: The result of :func:`request_schema`, to make it once for many requests.

    Raises:
        ValueError: A field is unknown, or its value is invalid.
        OSError: A file cannot be read.
    """
    try:
        fields = (schema or request_schema(model)).model_validate(values).model_dump(exclude_unset=True)
    except ValidationError as error:
        raise ValueError(describe_error(error, model, "request")) from None
    return request_from(fields, model, seed=seed, read_image=read_image)


def request_from(
    values: Mapping[str, Any],
    model: PipelineInfo,
    *,
    seed: int = 0,
    read_image: Callable[[str], bytes] | None = None,
) -> Request:
    """Return the request for ``values``, which pydantic has validated by :func:`request_schema`.

    For the arguments and what is raised see :func:`make_request`. The server calls this function itself,
    because its schema has more fields.
    """
    require_one_name(values, model)
    fields = dict(model.defaults)
    images: dict[str, tuple[bytes, ...]] = {}
    for name, value in values.items():
        if value is None:
            # diffusers seldom takes None for a parameter that has another default.
            continue
        full_name = parameter_of(name, model)
        if name == "seed":
            seed = value
        elif name == "size" and "size" not in model.fields:
            if value == "auto":
                continue
            if "width" not in model.fields:
                raise ValueError(
                    f"field 'size' is {value!r}; {model.pipeline} takes no width and height, and chooses them by "
                    "the image: expected 'auto', or no size."
                )
            fields["width"], fields["height"] = read_size(value)
        elif full_name in model.images:
            images[full_name] = read_images(full_name, value, read_image)
        else:
            fields[full_name] = value
    for name, value in fields.items():
        _require_json(name, value)
    _require_multiples(values, fields, model)
    if "prompt" in model.fields and fields.get("prompt") is None and not images:
        raise ValueError("field 'prompt' is None; expected a text, or a list of texts.")
    for name in model.required:
        if name not in images:
            raise ValueError(f"field {name!r} is missing; {model.pipeline} needs an image there.")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed is {seed}; expected 0 to {LARGEST_SEED}.")
    return Request(fields, seed, images)


def _require_json(name: str, value: Any) -> None:
    """Raise ValueError if the field ``name`` cannot be JSON. pydantic does not check a value of type Any."""
    if _is_nested_deeper(value, _MAX_NESTING):
        raise ValueError(f"field {name!r} is nested more than {_MAX_NESTING} levels deep.")
    # No tokenizer accepts a lone surrogate, and NaN would make the image black.
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        raise ValueError(f"field {name!r} has {surrogate!a}, which is half of a character.") from None
    except ValueError:
        raise ValueError(f"field {name!r} is {value!r:.80}; expected finite numbers.") from None


def _is_nested_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has more than ``levels`` levels. A scalar or an empty list has one."""
    if isinstance(value, dict):
        value = list(value.values())
    if levels < 1 or not isinstance(value, list):
        return levels < 1
    return any(_is_nested_deeper(item, levels - 1) for item in value)


def _require_multiples(values: Mapping[str, Any], fields: Mapping[str, Any], model: PipelineInfo) -> None:
    """Raise ValueError if height or width in ``fields`` is no multiple of ``model.multiple``.

    Most pipelines would round such a side down, and only log it. ``values`` are the fields that the user
    stated, by which the message names ``size`` or a side.
    """
    step = model.multiple
    for name in ("width", "height"):
        side = fields.get(name)
        if not isinstance(side, int) or side % step == 0:
            continue
        if values.get("size") not in (None, "auto"):
            width, height = fields["width"], fields["height"]
            smaller = f"{_round_down(width, step)}x{_round_down(height, step)}"
            larger = f"{_round_up(width, step)}x{_round_up(height, step)}"
            raise ValueError(
                f"size is {width}x{height}; {model.pipeline} generates multiples of {step} pixels: expected "
                f"{' or '.join(dict.fromkeys([smaller, larger]))}."
            )
        nearest = dict.fromkeys([str(_round_down(side, step)), str(_round_up(side, step))])
        raise ValueError(
            f"field {name!r} is {side}; {model.pipeline} generates multiples of {step} pixels: expected "
            f"{' or '.join(nearest)}."
        )


def _round_down(side: int, step: int) -> int:
    return max(step, side // step * step)


def _round_up(side: int, step: int) -> int:
    return -(-side // step) * step


def call_arguments(request: Request, mode: ImageMode = "RGB") -> dict[str, Any]:
    """Return the arguments for the pipeline's call, except the generator. Images are decoded with Pillow, in
    ``mode``.
    """
    arguments = dict(request.fields)
    for name, files in request.images.items():
        images = [open_image(data, mode=mode) for data in files]
        arguments[name] = images
        if len(images) == 1:
            arguments[name] = images[0]
    return arguments


# Fields with one string in each request of a batch. In the batch's call they are lists of strings.
_TEXT_FIELDS = tuple(
    f"{name}{number}" for name in ("prompt", "negative_prompt") for number in ("", "_2", "_3", "_4")
)


def batch_key(request: Request) -> str | None:
    """Return a string that is equal for requests that :func:`batch_arguments` can join into one call.

    None if the request must run alone: it has images, previews, several results, no prompt or a list of
    prompts. Requests with equal keys differ in texts, seed and delivery only.
    """
    texts = {
        name: value for name, value in request.fields.items() if name in _TEXT_FIELDS and value is not None
    }
    one_each = all(isinstance(value, str) for value in texts.values()) and request.results == 1
    if not one_each or request.images or request.delivery.partial_images or "prompt" not in texts:
        return None
    rest = {name: value for name, value in request.fields.items() if name not in texts}
    return json.dumps([rest, sorted(texts), request.lora], sort_keys=True)


def batch_arguments(requests: Sequence[Request], mode: ImageMode = "RGB") -> dict[str, Any]:
    """Return the arguments, without generators, of the one call for requests with the same :func:`batch_key`.

    All but the texts are those of the first request. ``mode`` is that of images.
    """
    first = requests[0]
    if len(requests) == 1:
        return call_arguments(first, mode)
    texts = {
        name: [request.fields[name] for request in requests]
        for name in _TEXT_FIELDS
        if first.fields.get(name) is not None
    }
    return {**first.fields, **texts}
