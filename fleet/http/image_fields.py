"""Images of an HTTP body: OpenAI's names and objects for them, and their contents.

`bodies.py` calls :func:`with_pipeline_names` before it validates a body, and :func:`read_data` for each image
of the request. Tests: tests/fleet/test_fields.py, tests/fleet/test_openai.py.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from para_core.fleet.image_classes import explain_refused_image, is_image_field
from para_core.fleet.image_files import convert_mask
from para_core.fleet.pipeline_info import PipelineInfo

# Field names of OpenAI's API, and the names that pipelines have for these fields.
_PIPELINE_NAMES = {"mask": "mask_image", "input_reference": "image", "images": "image"}


def with_pipeline_names(
    values: Mapping[str, Any], files: dict[str, bytes], model: PipelineInfo
) -> dict[str, Any]:
    """Return the fields of a body with the pipeline's names, and with images as texts instead of OpenAI's
    objects.

    The contents of a mask in OpenAI's form are converted, and added to ``files``.

    Raises:
        ValueError: Two fields set the same image, an image has another form, or the pipeline takes no image.
    """
    named: dict[str, Any] = {}
    sources: dict[str, str] = {}
    edited = model.edited_images
    for source, value in values.items():
        name = source
        if source not in model.fields:
            name = _PIPELINE_NAMES.get(source, source)
        if name == "image" and "image" not in model.fields and edited:
            name = edited[0]
        if value is None:
            # Clients send null for an image that they leave out, also to a pipeline that takes none.
            if name in model.fields or not is_image_field(source):
                named.setdefault(name, None)
            continue
        if name in sources:
            raise ValueError(
                f"field {sources[name]!r} and field {source!r} both set {name!r}: expected one of them."
            )
        if source in _PIPELINE_NAMES and source not in model.fields and not edited:
            raise ValueError(explain_refused_image(model))
        sources[name] = source
        named[name] = value
        if name in model.images or source in _PIPELINE_NAMES:
            named[name] = _replace_addresses(source, value)
        if source == "mask":
            named[name] = _convert_masks(named[name], files)
    return named


def _replace_addresses(name: str, value: Any) -> Any:
    """Return ``value`` with each of OpenAI's objects ``{"image_url": …}`` replaced by its address, a text.

    Raise ValueError if an object has no address. Other values are returned as they are.
    """
    if isinstance(value, list):
        return [_replace_addresses(name, item) for item in value]
    if not isinstance(value, dict):
        return value
    url = value.get("image_url")
    # The chat API has one more object around the address.
    if isinstance(url, dict):
        url = url.get("url")
    if isinstance(url, str):
        return url
    if "file_id" in value:
        raise ValueError(
            f"field {name!r} has a file_id, and this server keeps no uploaded files: send the image itself, as "
            '{"image_url": "data:image/png;base64,…"} or as a file of a form.'
        )
    raise ValueError(
        f"field {name!r} has an object with {', '.join(map(repr, value)) or 'nothing'}: expected "
        '{"image_url": "data:image/png;base64,…"}.'
    )


def _convert_masks(value: Any, files: dict[str, bytes]) -> Any:
    """Return masks of OpenAI's form as keys of ``files``, to which their conversions to diffusers' form are
    added.
    """
    if isinstance(value, list):
        return [_convert_masks(item, files) for item in value]
    if not isinstance(value, str):
        return value
    key = f"mask {len(files)} of the body"
    files[key] = convert_mask(read_data(value, files))
    return key


def read_data(text: str, files: Mapping[str, bytes]) -> bytes:
    """Return the contents of an image: the file of the form whose placeholder is ``text``, or what is encoded
    in ``text``.

    Raises:
        ValueError: ``text`` is no placeholder, ``data:`` URL or base64. Paths and other URLs are not opened,
            because a client chooses them.
    """
    if text in files:
        return files[text]
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(
            "an image must be base64, or data:image/png;base64,…; paths and addresses are not opened."
        ) from None
