"""The fields of a request: their names and types for a pipeline, and what is wrong with invalid ones.

`request.py` makes requests of validated fields, `prompt_file.py` merges those of a line, and `http/bodies.py`
adds the fields of OpenAI's API. Which fields there are is decided in `pipeline_info.py`. Tests:
tests/fleet/test_fields.py, tests/fleet/test_hostile.py.
"""

from __future__ import annotations

import functools
import operator
import re
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from para_core.fleet.image_classes import explain_refused_image, is_image_field
from para_core.fleet.pipeline_info import FRAME_PARAMETERS, PipelineInfo, describe_unknown_field

# Short names that a request may use, and the parameters of diffusers that each stands for: the first that the
# pipeline has.
_ALIASES = {
    "steps": ("num_inference_steps",),
    "frames": FRAME_PARAMETERS,
    "n": ("num_images_per_prompt", "num_videos_per_prompt"),
}
_POSITIVE_FIELDS = (
    *("height", "width", "num_inference_steps", *FRAME_PARAMETERS, "max_sequence_length"),
    *("num_images_per_prompt", "num_videos_per_prompt"),
)
_SIZE_PATTERN = re.compile(r"^([1-9][0-9]{0,8})\s*[x×]\s*([1-9][0-9]{0,8})$")
LARGEST_SEED = 2**63 - 1
LARGEST_INT = 2**31 - 1  # of a positive field without a limit of its own


def request_schema(model: PipelineInfo, *, at_most: Mapping[str, int] | None = None) -> type[BaseModel]:
    """Return the pydantic model of a request: the fields of ``model``, their short names, ``seed`` and
    ``size``. Each may be null, and all may be left out: `request.py` refuses what is missing.

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
            kind = Annotated[int, Field(ge=1, le=limits.get(name, LARGEST_INT))]
        else:
            kind = _json_type(model.annotations.get(name, Any))
        # The default only documents the field: a field that a request does not set is not passed to the
        # pipeline.
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


def parameter_of(name: str, model: PipelineInfo) -> str:
    """Return the parameter of the pipeline that a field named ``name`` sets: ``name`` itself unless it is an
    alias.
    """
    if name in model.fields:
        return name
    return next((parameter for parameter in _ALIASES.get(name, ()) if parameter in model.fields), name)


def _parameters_set_by(name: str, model: PipelineInfo) -> tuple[str, ...]:
    """Return all parameters that a field named ``name`` sets. Only ``size`` sets two."""
    if name == "size" and "size" not in model.fields:
        return ("width", "height")
    return (parameter_of(name, model),)


def require_one_name(values: Mapping[str, Any], model: PipelineInfo) -> None:
    """Check that no two fields set the same parameter, such as ``steps`` and ``num_inference_steps``.

    A field whose value is None, or the size ``"auto"``, sets nothing.

    Raises:
        ValueError: Two fields set the same parameter.
    """
    names: dict[str, str] = {}
    for name, value in values.items():
        if value is None or (name == "size" and value == "auto"):
            continue
        for parameter in _parameters_set_by(name, model):
            if parameter in names:
                raise ValueError(
                    f"field {names[parameter]!r} and field {name!r} both set {parameter!r}: expected one of them."
                )
            names[parameter] = name


def merge_fields(common: Mapping[str, Any], values: Mapping[str, Any], model: PipelineInfo) -> dict[str, Any]:
    """Return the fields ``values``, and those of ``common`` whose parameters ``values`` does not set by any
    name. A value that is None sets nothing; it stays, so that its name is checked, unless ``common`` has one.

    >>> from para_core.fleet.pipeline_info import PipelineInfo
    >>> model = PipelineInfo("", "FluxPipeline", dict.fromkeys(("width", "height", "num_inference_steps")), "image")
    >>> merge_fields({"size": "64x32", "steps": 4}, {"width": 16, "num_inference_steps": 8}, model)
    {'height': 32, 'width': 16, 'num_inference_steps': 8}
    >>> merge_fields({"size": "64x32", "steps": 4}, {"width": None, "steps": None}, model)
    {'width': None, 'steps': 4, 'size': '64x32'}
    """
    left_out = {name: None for name, value in values.items() if value is None}
    values = {name: value for name, value in values.items() if value is not None}
    rest = dict(common)
    # A common size is split into its sides, so that a line may override one of them.
    size = rest.get("size")
    sides = {"width", "height"} & values.keys()
    if sides and "size" not in model.fields and isinstance(size, str) and _SIZE_PATTERN.match(size):
        del rest["size"]
        rest["width"], rest["height"] = read_size(size)
    overridden = {parameter for name in values for parameter in _parameters_set_by(name, model)}
    kept = {
        name: value
        for name, value in rest.items()
        if not overridden.intersection(_parameters_set_by(name, model))
    }
    return {**left_out, **kept, **values}


def _json_type(annotation: Any, *, is_item: bool = False) -> Any:
    """Return the type by which pydantic validates a parameter with this annotation; Any if JSON has no such
    type.

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


def describe_error(error: ValidationError, model: PipelineInfo, subject: str) -> str:
    """Return a sentence about the first invalid field: its name, its value and what was expected.

    ``error`` is that of :func:`request_schema`, and ``subject`` names the validated object, such as
    ``"body"``.
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
        value = _shorten_value(first["input"])
        return f"field {name!r} is {value}: expected width x height in pixels, such as '1024x768'."
    # pydantic reports one error for each member of a union, so the sentence joins all errors of the field.
    same = [other for other in errors if other["loc"][:1] == first["loc"][:1]]
    expected = "; or ".join(dict.fromkeys(other["msg"].lower() for other in same))
    # The deepest location is the invalid value itself, such as an item of a list.
    value = max(same, key=lambda other: len(other["loc"]))["input"]
    return f"field {name!r} is {_shorten_value(value)}: {expected}."


def _shorten_value(value: Any) -> str:
    """Return the first 80 characters of a value's repr. A text or list is cut before: it may have megabytes."""
    if isinstance(value, (str, list)):
        value = value[:80]
    return repr(value)[:80]


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
