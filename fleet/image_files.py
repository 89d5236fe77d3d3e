"""Decoding of the image files of a request, without trust in their contents.

`request.py` calls it for requests with images, `http/bodies.py` for the images and masks of a body, and the
commands read the files of their images by :func:`read_image_file`. Files of results are encoded in
`outputs.py`. Tests: tests/fleet/test_fields.py, tests/fleet/test_openai.py, tests/fleet/test_hostile.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

# Formats that Pillow may decode. Other formats are refused, so that no client's file reaches a rarely tested
# decoder.
_FORMATS = ("PNG", "JPEG", "WEBP")
# Decoded, an image of this size takes 192 MiB, in RGBA 256 MiB.
MAX_IMAGE_PIXELS = 64 * 2**20
ImageMode = Literal["RGB", "RGBA"]


def open_image(data: bytes, max_pixels: int = MAX_IMAGE_PIXELS, *, mode: ImageMode = "RGB") -> Any:
    """Decode an image file into a PIL image in ``mode``, upright by its EXIF data as from diffusers'
    ``load_image``, and with the upper 8 of 16 bits. The size is checked before decoding.

    Raises:
        ValueError: ``data`` is not a valid PNG, JPEG or WebP file, or has more than ``max_pixels``.
    """
    from PIL import Image

    message = f"{len(data)} bytes are not a readable image; expected a PNG, JPEG or WebP file."
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(message) from error
    if image.width * image.height > max_pixels:
        raise ValueError(
            f"the image has {image.width} × {image.height} pixels; expected at most {max_pixels} in total."
        )
    try:
        return _decode(image, mode)
    except Exception as error:
        # Pillow reads most of a file only here, and damaged chunks may raise anything, such as an AssertionError.
        raise ValueError(message) from error


def _decode(image: Any, mode: ImageMode) -> Any:
    """Return the opened ``image`` in ``mode``, upright. Raise anything for damaged pixels."""
    if image.mode.startswith("I"):  # "I;16"; of an older Pillow "I". No PNG has more than 16 bits.
        image = _take_upper_bits(image)
    return _turn_upright(image.convert(mode))


def _take_upper_bits(image: Any) -> Any:
    """Return a gray image of 16 bits, such as a depth map, with the upper 8, and alpha if a color is transparent.

    Pillow would cut the values off at 255: all white.
    """
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    gray = Image.fromarray((values >> 8).astype(np.uint8))
    gray.info = dict(image.info)  # has the EXIF data
    transparent = gray.info.pop("transparency", None)
    if transparent is not None:
        gray.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    return gray


def _turn_upright(image: Any) -> Any:
    """Return the decoded ``image``, turned or mirrored as its EXIF data say."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        # Damaged EXIF data may raise anything. They say nothing, and the image is good without them.
        return image


def read_images(name: str, value: str | list[str], read: Callable[[str], bytes] | None) -> tuple[bytes, ...]:
    """Return the contents of the image files that ``value`` names, in the field ``name`` of a request.

    ``read`` returns the contents for one item of ``value``, which it has checked by :func:`open_image`: a
    path for a command (:func:`read_image_file`), a form's file or base64 for the server. It is None if the
    caller takes no images.

    Raises what ``read`` raises, too.

    Raises:
        ValueError: Images cannot be passed here, or ``read`` refuses one.
    """
    if read is None:
        raise ValueError(f"field {name!r} takes an image, and images cannot be passed here.")
    paths = value
    if isinstance(paths, str):
        paths = [paths]
    try:
        return tuple(read(path) for path in paths)
    except ValueError as error:
        raise ValueError(f"field {name!r}: {error}") from error


def read_image_file(path: str | Path) -> bytes:
    """Return the contents of the image file ``path``, which is decoded only to check it.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no readable image.
    """
    data = Path(path).read_bytes()
    try:
        open_image(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return data


def convert_mask(data: bytes) -> bytes:
    """Convert OpenAI's mask, which is transparent where to generate, to diffusers' mask, which is white
    there.

    An image without transparency, such as one with an alpha channel that is opaque everywhere, is returned as
    it is, as diffusers' mask. Of an image with a palette, or in gray or RGB without an alpha channel, a color
    may be transparent.
    """
    from PIL import Image, ImageChops

    try:
        image = Image.open(io.BytesIO(data), formats=("PNG", "WEBP"))
        if image.width * image.height > MAX_IMAGE_PIXELS or not image.has_transparency_data:
            return data
        alpha = _decode(image, "RGBA").getchannel("A")
    except Exception:
        # An unreadable mask is refused later, like any unreadable image, and Pillow may raise anything for it.
        return data
    if alpha.getextrema()[0] == 255:
        # As OpenAI's mask it would let nothing be generated. Programs that paint save masks in RGBA.
        return data
    buffer = io.BytesIO()
    ImageChops.invert(alpha).save(buffer, "PNG")
    return buffer.getvalue()
