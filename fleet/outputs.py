"""Results of requests: choice of formats, the sides that a format can hold, and encoding.

`work.py` encodes on the first rank. `result_files.py` writes the encoded files to disk for ``para_core
generate``; the server sends them instead. Tests: tests/cli/test_generate.py, tests/cli/test_refusals.py,
tests/fleet/test_work.py, tests/fleet/test_hostile.py.
"""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from para_core.fleet.pipeline_info import OutputKind, PipelineInfo
from para_core.fleet.request import Delivery, Request

FORMATS: Mapping[OutputKind, tuple[str, ...]] = {
    "image": ("png", "jpg", "webp"),
    "video": ("mp4", "gif", "webp"),
}
# Largest side in pixels of a file that the encoder of its format accepts: x264, libwebp, libjpeg, and 16 bits
# in a GIF. A PNG has no such limit.
_LARGEST_SIDES = {"mp4": 16384, "webp": 16383, "jpg": 65500, "gif": 65535}


@dataclass(frozen=True)
class Output:
    """One file of a result, or a preview, which is sent while the request runs and belongs to no result.

    Args:
        suffix: ``".png"``, or ``"-1.png"`` for the second of several images.
        data: The encoded file.
        pixels_sha256: SHA-256 of the 8-bit pixels, row by row and frame by frame, before they were encoded.
            A PNG holds these pixels: ``hashlib.sha256(PIL.Image.open(path).tobytes()).hexdigest()``.
    """

    suffix: str
    data: bytes
    pixels_sha256: str = ""

    @property
    def format_(self) -> str:
        return self.suffix.rpartition(".")[2]


@dataclass(frozen=True)
class Result:
    """The result of one request: its encoded files, and metadata such as the request, mesh and seconds."""

    outputs: tuple[Output, ...]
    metadata: Mapping[str, Any]  # of work.make_metadata, and the size; JSON values


def formats_here(kind: OutputKind) -> tuple[str, ...]:
    """Return the formats of :data:`FORMATS` for which this machine has an encoder: for mp4 that is a program."""
    formats = FORMATS[kind]
    if "mp4" in formats and not _has_video_encoder():
        formats = tuple(name for name in formats if name != "mp4")
    return formats


def _has_video_encoder() -> bool:
    # diffusers' export_to_video needs both packages.
    if find_spec("imageio") is None:
        return False
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return False
    return True


def choose_format(model: PipelineInfo, format_: str | None) -> str:
    """Return ``format_``. None gives the default for what ``model`` generates: png for images, mp4 for
    videos.

    Raises:
        ValueError: The model's results cannot have this format, or its encoder is not installed.
    """
    allowed = FORMATS[model.kind]
    chosen = format_ or allowed[0]
    if chosen not in allowed:
        raise ValueError(
            f"format is {chosen!r}; {model.pipeline} generates {model.kind}s: expected {' or '.join(allowed)}."
        )
    if chosen not in formats_here(model.kind):
        raise ValueError(
            "mp4 needs a video encoder, and none is installed: pip install imageio imageio-ffmpeg, or use --format "
            "gif."
        )
    return chosen


def find_side_problem(request: Request) -> str | None:
    """Return an error message if a side of the result is longer than its format can hold, else None.

    Called before the request is generated, so that no result is computed which cannot be encoded.
    """
    format_ = request.delivery.format_
    most = _LARGEST_SIDES.get(format_)
    for name in ("width", "height"):
        side = request.fields.get(name)
        if most is not None and isinstance(side, int) and side > most:
            return f"field {name!r} is {side}, and a side of a {format_} file at most {most}: use another format."
    return None


def encode(samples: Sequence[Any], delivery: Delivery) -> list[Output]:
    """Encode each sample, a PIL image or a sequence of PIL frames, as one file. Equal pixels give equal
    bytes.
    """
    suffix = f".{delivery.format_}"
    outputs: list[Output] = []
    for index, sample in enumerate(samples):
        frames = sample
        if not isinstance(sample, Sequence):
            frames = [sample]
        number = ""
        if len(samples) > 1:
            number = f"-{index}"
        outputs.append(Output(f"{number}{suffix}", _encode(frames, delivery), _digest_pixels(frames)))
    return outputs


def _digest_pixels(frames: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for frame in frames:
        digest.update(frame.tobytes())
    return digest.hexdigest()


def _encode(frames: Sequence[Any], delivery: Delivery) -> bytes:
    if delivery.format_ == "mp4":
        from diffusers.utils import export_to_video

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            # By default frames are stretched to multiples of 16, and the file had another size than the
            # result. The encoder itself needs even sides, because its pixels share colors in squares of 2 ×
            # 2. The quality of the request is ignored, as by PNG and GIF.
            export_to_video(list(frames), str(path), fps=delivery.fps, macro_block_size=2)
            return path.read_bytes()
    encoder = delivery.format_.upper()
    if delivery.format_ == "jpg":
        encoder = "JPEG"
        frames = [_lay_on_white(frame) for frame in frames]
    options: dict[str, Any] = {}
    if delivery.quality is not None:
        options = {"quality": delivery.quality}  # PNG and GIF have none, and ignore it.
    elif delivery.format_ == "jpg":
        options = {"quality": 95}
    elif delivery.format_ == "webp" and len(frames) == 1:
        # Without "exact" the encoder changes the colors of transparent pixels.
        options = {"lossless": True, "exact": True}
    if len(frames) > 1:
        duration = 1000 // delivery.fps  # in milliseconds
        if delivery.format_ == "gif":
            # A GIF counts hundredths of a second, and browsers show a frame of less than 0.02 s for 0.1 s.
            duration = 10 * max(2, round(100 / delivery.fps))
        options |= {"save_all": True, "append_images": frames[1:], "duration": duration, "loop": 0}
    buffer = io.BytesIO()
    frames[0].save(buffer, encoder, **options)
    return buffer.getvalue()


def _lay_on_white(image: Any) -> Any:
    """Return ``image`` without transparency, which a JPEG cannot have."""
    from PIL import Image

    if image.mode != "RGBA":
        return image
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")
