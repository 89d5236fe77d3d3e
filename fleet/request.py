"""One request: the fields of a pipeline's call as JSON gives them, checked before anything is loaded."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from para_core.fleet.field_types import expected, fits
from para_core.fleet.models import Kind, Model, require_field

# Short names, and those of diffusers.
_ALIASES = {"steps": "num_inference_steps", "frames": "num_frames", "n": "num_images_per_prompt"}
_POSITIVE = (
    *("height", "width", "num_inference_steps", "num_frames", "video_length", "max_sequence_length"),
    *("num_images_per_prompt", "num_videos_per_prompt"),
)
_SIZE = re.compile(r"(\d+)\s*[x×]\s*(\d+)")
_LARGEST_SEED = 2**63 - 1
# What Pillow may decode: the formats that cameras and browsers write.
_FORMATS = ("PNG", "JPEG", "WEBP")
MAX_IMAGE_PIXELS = 64 * 2**20
# Width, height and frames of a result whose size the pipeline chooses.
_USUAL: Mapping[Kind, tuple[int, int, int]] = {"image": (1024, 1024, 1), "video": (1280, 720, 129)}


@dataclass(frozen=True)
class Request:
    """One call of a pipeline.

    Args:
        fields: of the call, under diffusers' names: JSON values.
        seed: of its generator.
        images: contents of the files of fields that take an image, or several.
    """

    fields: Mapping[str, Any]
    seed: int = 0
    images: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """16 hex digits that are the same for the same request, also in another process."""
        images = {name: [hashlib.sha256(data).hexdigest() for data in files] for name, files in self.images.items()}
        text = json.dumps([self.fields, self.seed, images], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def results(self) -> int:
        """How many images or videos it asks for."""
        prompt = self.fields.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) else 1
        return int(
            prompts * (self.fields.get("num_images_per_prompt") or self.fields.get("num_videos_per_prompt") or 1)
        )

    def pixels(self) -> int | None:
        """Of all images or frames; None where the size is left to the pipeline. Of one side alone: those of a square."""
        sides = [self.fields[name] for name in ("height", "width") if self.fields.get(name) is not None]
        if not sides:
            return None
        frames = self.fields.get("num_frames") or self.fields.get("video_length") or 1
        return int(sides[0] * sides[-1] * frames * self.results)


def estimated_pixels(request: Request, kind: Kind) -> int:
    """Of all images or frames; as usual for what ``request`` leaves to the pipeline."""
    given = request.pixels()
    if given is not None:
        return given
    width, height, frames = _USUAL[kind]
    frames = request.fields.get("num_frames") or request.fields.get("video_length") or frames
    return int(width * height * frames * request.results)


def make_request(
    given: Mapping[str, Any], model: Model, *, seed: int = 0, read_image: Callable[[str], bytes] | None = None
) -> Request:
    """A request from JSON: ``given`` over the model's defaults.

    Args:
        given: fields of the pipeline's call, or ``seed``, ``size`` (``"1024x768"``: width × height), ``steps``, ``frames``.
        seed: where none is given.
        read_image: what gives the contents of the file that a field names; None: no file is opened.

    Raises:
        ValueError: a field is unknown or its value does not fit; the message names both.
        OSError: a file cannot be read.
    """
    fields = dict(model.defaults)
    images: dict[str, tuple[bytes, ...]] = {}
    for name, value in given.items():
        if name == "seed":
            seed = _integer("seed", value, at_least=0)
        elif name == "size" and "size" not in model.fields:
            fields["width"], fields["height"] = read_size(value)
        else:
            full = _ALIASES.get(name, name)
            require_field(model, full, name)
            if full in model.images and value is not None:
                images[full] = _read_images(full, value, read_image)
            else:
                fields[full] = _checked(full, value, model)
    if not 0 <= seed <= _LARGEST_SEED:
        raise ValueError(f"seed is {seed}; expected 0 to {_LARGEST_SEED}.")
    for name, value in fields.items():
        _require_json(name, value)
    _require_prompt(fields, model, images)
    return Request(fields, seed, images)


def read_size(value: Any) -> tuple[int, int]:
    """``(width, height)`` in pixels.

    >>> read_size("1024x768")
    (1024, 768)
    """
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) < 1 or int(match[2]) < 1:
        raise ValueError(f"size is {value!r}; expected width x height in pixels, as in '1024x768'.")
    return int(match[1]), int(match[2])


def call_arguments(request: Request) -> dict[str, Any]:
    """What the pipeline is called with beside its generator; images are decoded here."""
    decoded = {name: [open_image(data) for data in files] for name, files in request.images.items()}
    return {**request.fields, **{name: files[0] if len(files) == 1 else files for name, files in decoded.items()}}


def open_image(data: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """The RGB image in ``data``; its size is looked at before it is decoded.

    Raises:
        ValueError: it is no PNG, JPEG or WebP, it is damaged, or it has more than ``max_pixels``.
    """
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > max_pixels:
            raise ValueError(
                f"the image has {image.width} × {image.height} pixels; expected at most {max_pixels} in all."
            )
        return image.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{len(data)} bytes are no image that can be read; expected a PNG, JPEG or WebP.") from error


def _read_images(name: str, value: Any, read: Callable[[str], bytes] | None) -> tuple[bytes, ...]:
    paths = value if isinstance(value, list) else [value]
    if read is None:
        raise ValueError(f"field {name!r} takes an image, and none can be given here.")
    if not paths or not all(isinstance(path, str) for path in paths):
        raise ValueError(f"field {name!r} is {value!r}; expected the path of an image, or a list of such paths.")
    files = tuple(read(path) for path in paths)
    for path, data in zip(paths, files, strict=True):
        try:
            open_image(data)
        except ValueError as error:
            raise ValueError(f"field {name!r}, {path}: {error}") from error
    return files


def _require_json(name: str, value: Any) -> None:
    # Python's reader takes half of a surrogate pair, which no tokenizer and no file takes, and NaN, which makes a black image.
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"field {name!r}: a text has {error.object[error.start]!a}, which is half of a character."
        ) from None
    except ValueError:
        raise ValueError(f"field {name!r} is {value!r:.80}; expected numbers that are finite.") from None


def _require_prompt(fields: Mapping[str, Any], model: Model, images: Mapping[str, Any]) -> None:
    prompt = fields.get("prompt")
    if "prompt" not in model.fields or (prompt is None and images):
        return
    if not isinstance(prompt, str) and not (
        isinstance(prompt, list) and prompt and all(isinstance(p, str) for p in prompt)
    ):
        raise ValueError(f"field 'prompt' is {prompt!r}; expected a text, or a list of texts.")


def _checked(name: str, value: Any, model: Model) -> Any:
    if name in _POSITIVE and value is not None:
        return _integer(name, value, at_least=1)
    annotation = model.annotations.get(name, Any)
    # Of a prompt more is known: it says more.
    if name != "prompt" and not fits(value, annotation):
        raise ValueError(f"field {name!r} is {value!r:.80}; expected {expected(annotation)}.")
    return value


def _integer(name: str, value: Any, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"field {name!r} is {value!r}; expected a whole number of at least {at_least}.")
    return value
