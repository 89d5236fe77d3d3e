"""Requests: the arguments of a pipeline's call as JSON values, validated before the pipeline is loaded."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from para_core.fleet.image_classes import explain_refused_image, is_image_field
from para_core.fleet.image_files import open_image, read_images
from para_core.fleet.pipeline_info import Kind, Model, describe_unknown_field

# Short names that a request may use, and the parameters of diffusers that each stands for: the first that the pipeline
# has.
_ALIASES = {
    "steps": ("num_inference_steps",),
    "frames": ("num_frames", "video_length"),
    "n": ("num_images_per_prompt", "num_videos_per_prompt"),
}
_POSITIVE_FIELDS = (
    *("height", "width", "num_inference_steps", "num_frames", "video_length", "max_sequence_length"),
    *("num_images_per_prompt", "num_videos_per_prompt"),
)
_SIZE_PATTERN = re.compile(r"^([1-9][0-9]{0,8})\s*[x×]\s*([1-9][0-9]{0,8})$")
LARGEST_SEED = 2**63 - 1
_LARGEST_INT = 2**31 - 1
# Width, height and number of frames that are assumed for estimates if a request leaves them to the pipeline.
_USUAL_SIZES: Mapping[Kind, tuple[int, int, int]] = {"image": (1024, 1024, 1), "video": (1280, 720, 129)}
USUAL_PIXELS: Mapping[Kind, int] = {kind: math.prod(sizes) for kind, sizes in _USUAL_SIZES.items()}


@dataclass(frozen=True)
class Delivery:
    """Options for encoding and sending the result of a request. They do not change what the pipeline generates."""

    format_: str = "png"
    fps: int = 16  # of videos
    quality: int | None = (
        None  # of JPEG and WebP images, 0 to 100; by default JPEG has 95, and WebP is lossless
    )
    partial_images: int = 0  # number of previews that are sent while the request runs
    url: bool = False  # whether a server's response has URLs of the files instead of the files as base64
    stream: bool = False  # whether the response is a stream of server-sent events
    progress: bool = False  # whether the stream also reports finished steps


class Lora(NamedTuple):
    """The LoRA of a request: path of its file or folder, and scale."""

    path: str
    scale: float = 1.0


@dataclass(frozen=True)
class Request:
    """One call of a pipeline."""

    fields: Mapping[str, Any]  # arguments of the call by diffusers' names, as JSON values
    seed: int = 0  # of the torch.Generator of the first result, see seeds
    images: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)  # contents of files, by argument
    delivery: Delivery = Delivery()
    lora: Lora | None = None  # in addition to those of the recipe

    @property
    def digest(self) -> str:
        """16 hex digits that identify in all processes what the request generates, however that is delivered."""
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
        return len(split_request(self))

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

    Several images that begin from an image are generated one by one: diffusers encodes that image only once for all,
    with the generator of the first, so the others would differ from what their own seeds give alone.
    """
    if not request.images or request.results == 1 or isinstance(request.fields.get("prompt"), list):
        return [request]
    fields = {name: value for name, value in request.fields.items() if name not in _COUNT_FIELDS}
    parts = [replace(request, fields=fields, seed=seed) for seed in request.seeds]
    without_previews = replace(request.delivery, partial_images=0)
    return [parts[0], *(replace(part, delivery=without_previews) for part in parts[1:])]


def estimated_pixels(request: Request, kind: Kind) -> int:
    """Return the number of pixels, summed over all images or frames. Sizes left to the pipeline are estimated.

    If the request has only one side, a square is assumed. If it has a side but no number of frames, 1 is assumed.
    """
    width, height, frames = _USUAL_SIZES[kind]
    sides = [request.fields[name] for name in ("height", "width") if request.fields.get(name) is not None]
    if sides:
        width, height, frames = sides[0], sides[-1], 1
    frames = request.fields.get("num_frames") or request.fields.get("video_length") or frames
    return int(width * height * frames * request.results)


def request_schema(model: Model, *, at_most: Mapping[str, int] | None = None) -> type[BaseModel]:
    """Return the pydantic model of a request: the fields of ``model``, their short names, ``seed`` and ``size``.

    ``at_most`` has the largest value of integer fields, and the largest number of images of image fields.
    """
    limits = at_most or {}
    fields: dict[str, Any] = {}
    for name, default in model.fields.items():
        if name in model.images:
            kind: Any = str | Annotated[list[str], Field(min_length=1, max_length=limits.get(name))]
        elif name == "prompt":
            kind = str | Annotated[list[str], Field(min_length=1)]
        elif name in _POSITIVE_FIELDS:
            kind = Annotated[int, Field(ge=1, le=limits.get(name, _LARGEST_INT))]
        else:
            kind = _json_type(model.annotations.get(name, Any))
        # The default only documents the field: a field that a request does not set is not passed to the pipeline.
        documented = None
        if isinstance(default, (bool, int, float, str)):
            documented = default
        fields[name] = (kind | None, documented)
    for alias in _ALIASES:
        name = parameter_of(alias, model)
        if name in fields:
            fields.setdefault(alias, (fields[name][0], None))
    fields["seed"] = (Annotated[int, Field(ge=0, le=LARGEST_SEED)] | None, None)
    # "auto" is valid too, because OpenAI's clients send it to let the server choose the size.
    size = Annotated[
        str,
        Field(pattern=f"{_SIZE_PATTERN.pattern}|^auto$", description="width x height in pixels: 1024x768"),
    ]
    fields.setdefault("size", (size | None, None))
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    schema: type[BaseModel] = create_model(f"{model.pipeline}Request", __config__=config, **fields)
    return schema


def parameter_of(name: str, model: Model) -> str:
    """Return the parameter of the pipeline that a field named ``name`` sets: ``name`` itself unless it is an alias."""
    if name in model.fields:
        return name
    return next((parameter for parameter in _ALIASES.get(name, ()) if parameter in model.fields), name)


def _parameters_of(name: str, model: Model) -> tuple[str, ...]:
    """Return all parameters that a field named ``name`` sets. Only ``size`` sets two."""
    if name == "size" and "size" not in model.fields:
        return ("width", "height")
    return (parameter_of(name, model),)


def require_one_name(values: Mapping[str, Any], model: Model) -> None:
    """Check that no two fields set the same parameter, such as ``steps`` and ``num_inference_steps``.

    A field whose value is None, or the size ``"auto"``, sets nothing.

    Raises:
        ValueError: Two fields set the same parameter.
    """
    names: dict[str, str] = {}
    for name, value in values.items():
        if value is None or (name == "size" and value == "auto"):
            continue
        for parameter in _parameters_of(name, model):
            if parameter in names:
                raise ValueError(
                    f"field {names[parameter]!r} and field {name!r} both set {parameter!r}: expected one of them."
                )
            names[parameter] = name


def merge_fields(common: Mapping[str, Any], values: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """Return the fields ``values``, and those of ``common`` whose parameters ``values`` does not set by any name.

    >>> from para_core.fleet.pipeline_info import Model
    >>> model = Model("", "FluxPipeline", dict.fromkeys(("width", "height", "num_inference_steps")), "image")
    >>> merge_fields({"size": "64x32", "steps": 4}, {"width": 16, "num_inference_steps": 8}, model)
    {'height': 32, 'width': 16, 'num_inference_steps': 8}
    """
    rest = dict(common)
    size = rest.get("size")
    sides = {"width", "height"} & values.keys()
    if sides and "size" not in model.fields and isinstance(size, str) and _SIZE_PATTERN.match(size):
        del rest["size"]
        rest["width"], rest["height"] = read_size(size)
    sets = {parameter for name in values for parameter in _parameters_of(name, model)}
    kept = {name: value for name, value in rest.items() if not sets.intersection(_parameters_of(name, model))}
    return {**kept, **values}


def _json_type(annotation: Any, *, is_item: bool = False) -> Any:
    """Return the type by which pydantic validates a parameter with this annotation; Any if JSON has no such type.

    ``str`` becomes ``str | list[str]``, because many pipelines accept a batch of strings. With ``is_item``,
    ``annotation`` is the annotation of a list's items, and ``str`` remains ``str``.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, [_json_type(part, is_item=is_item) for part in parts])
    if origin in (list, tuple) or annotation in (list, tuple):
        items = [_json_type(part, is_item=True) for part in parts if part is not ...]
        if not items:
            return list[Any]
        return list[functools.reduce(operator.or_, items)]  # type: ignore[misc]
    if annotation is str and not is_item:
        return str | list[str]
    if origin is Literal or annotation in (bool, int, float, str, type(None)):
        return annotation
    return Any


def describe_error(error: ValidationError, model: Model, subject: str) -> str:
    """Return a sentence about the first invalid field: its name, its value and what was expected.

    ``subject`` names the validated object, such as ``"body"``.
    """
    errors = error.errors(include_url=False)
    first = errors[0]
    if not first["loc"]:
        return f'the {subject} is invalid: {first["msg"]}. Expected a JSON object such as {{"prompt": "a red circle"}}.'
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        if is_image_field(name) and not model.edits:
            return explain_refused_image(model)
        return describe_unknown_field(model, name)
    if first["type"] == "string_pattern_mismatch":
        return f"field {name!r} is {_shorten(first['input'])}: expected width x height in pixels, such as '1024x768'."
    # pydantic reports one error for each member of a union, so the sentence joins all errors of the field.
    same = [other for other in errors if other["loc"][:1] == first["loc"][:1]]
    expected = "; or ".join(dict.fromkeys(other["msg"].lower() for other in same))
    value = min(same, key=lambda other: -len(other["loc"]))["input"]
    return f"field {name!r} is {_shorten(value)}: {expected}."


def _shorten(value: Any) -> str:
    """Return the first 80 characters of a value's repr. The value may have megabytes."""
    if isinstance(value, (str, list)):
        value = value[:80]
    return repr(value)[:80]


def make_request(
    values: Mapping[str, Any],
    model: Model,
    *,
    seed: int = 0,
    read_image: Callable[[str], bytes] | None = None,
    schema: type[BaseModel] | None = None,
) -> Request:
    """Validate ``values``, and return the request.

    Args:
        values: Fields of the pipeline's call, or ``seed``, ``size``, ``steps``, ``frames``. Override the defaults.
        seed: Seed if ``values`` has none.
        read_image: Returns the contents of an image file, given the string in an image field. None refuses images.
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
    model: Model,
    *,
    seed: int = 0,
    read_image: Callable[[str], bytes] | None = None,
) -> Request:
    """Return the request for fields that pydantic has validated.

    For the arguments and what is raised see :func:`make_request`.
    """
    require_one_name(values, model)
    fields = dict(model.defaults)
    images: dict[str, tuple[bytes, ...]] = {}
    for name, value in values.items():
        full_name = parameter_of(name, model)
        if name == "seed":
            if value is not None:
                seed = value
        elif name == "size" and "size" not in model.fields:
            if value not in (None, "auto"):
                fields["width"], fields["height"] = read_size(value)
        elif full_name in model.images and value is not None:
            images[full_name] = read_images(full_name, value, read_image)
        else:
            fields[full_name] = value
    for name, value in fields.items():
        # pydantic does not check a value of type Any. Such a value may contain a lone surrogate, which no tokenizer
        # accepts, or NaN, which would make the image black.
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            surrogate = error.object[error.start]
            raise ValueError(f"field {name!r} has {surrogate!a}, which is half of a character.") from None
        except ValueError:
            raise ValueError(f"field {name!r} is {value!r:.80}; expected finite numbers.") from None
    _require_multiples(values, fields, model)
    if "prompt" in model.fields and fields.get("prompt") is None and not images:
        raise ValueError("field 'prompt' is None; expected a text, or a list of texts.")
    for name in model.required:
        if name not in images:
            raise ValueError(f"field {name!r} is missing; {model.pipeline} needs an image there.")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"seed is {seed}; expected 0 to {LARGEST_SEED}.")
    return Request(fields, seed, images)


def _require_multiples(values: Mapping[str, Any], fields: Mapping[str, Any], model: Model) -> None:
    """Raise ValueError if height or width in ``fields`` is no multiple of what the pipeline generates.

    Most pipelines would round such a side down, and only log it. ``values`` are the fields that the user stated.
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


def read_size(value: str) -> tuple[int, int]:
    """Parse ``"WIDTHxHEIGHT"`` in pixels.

    >>> read_size("1024x768")
    (1024, 768)

    Raises:
        ValueError: ``value`` has another form.
    """
    match = _SIZE_PATTERN.match(value)
    if match is None:
        raise ValueError(f"size is {value!r}; expected width x height in pixels, such as '1024x768'.")
    return int(match[1]), int(match[2])


def call_arguments(request: Request) -> dict[str, Any]:
    """Return the arguments for the pipeline's call, except the generator. Images are decoded with Pillow."""
    arguments = dict(request.fields)
    for name, files in request.images.items():
        images = [open_image(data) for data in files]
        arguments[name] = images
        if len(images) == 1:
            arguments[name] = images[0]
    return arguments


# Fields with one string in each request of a batch. In the batch's call they are lists of strings.
_TEXT_FIELDS = tuple(
    f"{name}{number}" for name in ("prompt", "negative_prompt") for number in ("", "_2", "_3", "_4")
)


def batch_key(request: Request) -> str | None:
    """Return a string that is equal for requests that can be generated as one batch.

    None if the request must run alone: it has images, previews, several results or no prompt.
    """
    texts = {
        name: value for name, value in request.fields.items() if name in _TEXT_FIELDS and value is not None
    }
    one_each = all(isinstance(value, str) for value in texts.values()) and request.results == 1
    if not one_each or request.images or request.delivery.partial_images or "prompt" not in texts:
        return None
    rest = {name: value for name, value in request.fields.items() if name not in texts}
    return json.dumps([rest, sorted(texts), request.lora], sort_keys=True)


def batch_arguments(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the arguments, without generators, of the one call for requests with the same :func:`batch_key`."""
    first = requests[0]
    if len(requests) == 1:
        return call_arguments(first)
    texts = {
        name: [request.fields[name] for request in requests]
        for name in _TEXT_FIELDS
        if first.fields.get(name) is not None
    }
    return {**first.fields, **texts}
