"""Three ComfyUI nodes that send requests to ``para_core serve``: text to image, image editing, and video.

This file imports nothing of para_core, because the server may be on another machine. The routes stand in
fleet/http/server.py, and their answers in fleet/http/answers.py. Tests: tests/fleet/test_comfyui.py.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

logger = logging.getLogger(__name__)
Spec = tuple[Any, ...]
_RANDOM_SEED = -1  # the server draws one
_COMMON: dict[str, Spec] = {
    "server": ("STRING", {"default": "http://127.0.0.1:8000"}),
    "prompt": ("STRING", {"multiline": True, "default": ""}),
    "width": ("INT", {"default": 1024, "min": 16, "max": 16384, "step": 16}),
    "height": ("INT", {"default": 1024, "min": 16, "max": 16384, "step": 16}),
    "steps": ("INT", {"default": 28, "min": 1, "max": 1000}),
    "seed": (
        "INT",
        {
            "default": _RANDOM_SEED,
            "min": _RANDOM_SEED,
            "max": 2**63 - 1,
            "tooltip": "-1: another one for each run.",
        },
    ),
}
_OPTIONAL: dict[str, Spec] = {
    "negative_prompt": ("STRING", {"multiline": True, "default": ""}),
    "guidance_scale": (
        "FLOAT",
        {"default": 0.0, "min": 0.0, "max": 100.0, "tooltip": "0: the pipeline's default."},
    ),
    "lora": ("STRING", {"default": "", "tooltip": "A name that the server knows, or name:scale."}),
    "more": ("STRING", {"default": "", "tooltip": 'Other fields as JSON: {"max_sequence_length": 256}.'}),
}
_STRENGTH: Spec = (
    "FLOAT",
    {"default": 0.0, "min": 0.0, "max": 1.0, "tooltip": "0: the pipeline's default."},
)


class _Node:
    """Base of the nodes, with the attributes that ComfyUI requires."""

    RETURN_TYPES: tuple[str, ...] = ("IMAGE", "INT")
    RETURN_NAMES: tuple[str, ...] = ("image", "seed")
    FUNCTION = "run"
    CATEGORY = "para_core"
    path: str  # route of the server
    format_ = "png"  # of the files that the server sends

    @classmethod
    def IS_CHANGED(cls, seed: int = 0, **inputs: Any) -> float:
        """Return a value whose change lets ComfyUI run the node again: NaN, which equals nothing, for a random seed.

        ComfyUI does not pass what another node gives, so with a -1 from there the node is not run again.
        """
        return float("nan") if seed == _RANDOM_SEED else 0.0

    def run(
        self, server: str, image: Tensor | None = None, mask: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor, int]:
        """Return the image, or the frames of the video, ``[N, H, W, 3]`` from 0 to 1; and the seed that was used."""
        fields = {**_fields(**inputs), "output_format": self.format_}
        if image is not None:
            fields["image"] = _encode(image)
        if mask is not None:
            fields["mask_image"] = _encode(mask.reshape(-1, *mask.shape[-2:], 1).expand(-1, -1, -1, 3))
        files, seed = request_result(server, self.path, fields, _progress())
        return (_decode(files), seed)


class TextToImage(_Node):
    """Node that generates an image from text."""

    path = "/v1/images/generations"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Spec]]:
        return {"required": _COMMON, "optional": _OPTIONAL}


class EditImage(_Node):
    """Node that edits an image. With a mask, only the white part of the mask is generated again."""

    path = "/v1/images/edits"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Spec]]:
        optional = {"mask": ("MASK",), "strength": _STRENGTH, **_OPTIONAL}
        return {"required": {"image": ("IMAGE",), **_COMMON}, "optional": optional}


class Video(_Node):
    """Node that generates a video from text, and from an image if the server's pipeline takes one."""

    RETURN_NAMES = ("frames", "seed")
    path = "/v1/videos/sync"
    format_ = "webp"  # which loses a little: files without loss would be large, and slow to encode

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, dict[str, Spec]]:
        frames = {"frames": ("INT", {"default": 81, "min": 1, "max": 10000})}
        return {"required": {**_COMMON, **frames}, "optional": {"image": ("IMAGE",), **_OPTIONAL}}


def _fields(*, width: int, height: int, more: str = "", **inputs: Any) -> dict[str, Any]:
    """Return the fields of a request for the inputs of a node, without empty optional inputs.

    Raise RuntimeError if ``more`` is no JSON object, or sets a field that another input sets. The server
    refuses a field that has another name there, such as ``num_inference_steps``. Fields that are set later,
    because the node relies on them, replace those of ``more``: ``output_format``, ``stream`` and
    ``progress``.
    """
    fields = {name: value for name, value in inputs.items() if value or name not in (*_OPTIONAL, "strength")}
    fields["size"] = f"{width}x{height}"
    try:
        others = json.loads(more) if more.strip() else {}
    except ValueError as error:
        raise RuntimeError(f"more is no JSON: {error}") from None
    if not isinstance(others, dict):
        raise RuntimeError(
            f'more is {more[:80]!r}; expected a JSON object, such as {{"max_sequence_length": 256}}.'
        )
    for name in others.keys() & {*fields, "width", "height"}:
        inputs_for = "width and height" if name in ("size", "width", "height") else name
        raise RuntimeError(
            f"more has {name!r}, which the input {inputs_for} of this node sets: expected one of them."
        )
    return {**fields, **others}


def _progress() -> Callable[[int, int | None], None]:
    """Return a function of (finished steps, all steps) that moves ComfyUI's bar, and raises if the user interrupts."""
    try:
        from comfy.model_management import throw_exception_if_processing_interrupted
        from comfy.utils import ProgressBar
    except ImportError:  # This process is not ComfyUI, for example a test.
        return lambda step, steps: None
    bar = ProgressBar(1)

    def progress(step: int, steps: int | None) -> None:
        throw_exception_if_processing_interrupted()
        bar.update_absolute(step, steps or step + 1)

    return progress


def _encode(images: Tensor) -> str:
    """Return the first of ``images``, ``[N, H, W, 3]`` from 0 to 1, as a PNG in a ``data:`` URL. Warn of
    others, which are not sent.
    """
    if len(images) > 1:
        logger.warning("para_core: only the first of %d images or masks is sent.", len(images))
    buffer = io.BytesIO()
    Image.fromarray((images[0].clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _decode(files: list[bytes]) -> Tensor:
    """Return all images, or frames of animations, in ``files``: ``[N, H, W, 3]`` from 0 to 1."""
    frames, milliseconds = [], []
    for data in files:
        for frame in ImageSequence.Iterator(Image.open(io.BytesIO(data))):
            frames.append(np.asarray(frame.convert("RGB")))
            milliseconds.append(frame.info.get("duration") or 1)
    # An animation stores equal consecutive frames as one frame that is shown longer, so that frame is
    # repeated here. If no frame is shown once, as in a still video, the number of frames is lost.
    repeats = [round(each / min(milliseconds)) for each in milliseconds]
    return torch.from_numpy(np.repeat(np.stack(frames), repeats, axis=0)).float() / 255


_SECONDS = 3600.0  # without any byte from the server, after which a request fails
# A host by name or number, or an IPv6 number in brackets; then perhaps a port, and a path of a proxy.
_ADDRESS = re.compile(r"https?://(\[[^\s\]]+\]|[^\s/:\[\]]+)(:[0-9]+)?(/\S*)?")


def request_result(
    server: str, path: str, fields: dict[str, Any], progress: Callable[[int, int | None], None]
) -> tuple[list[bytes], int]:
    """Send a request to the server, wait for the result, and return the contents of its files and its seed.

    The API key is read from the environment variable ``PARA_CORE_API_KEY``, because a workflow file that is
    shared should not contain it. ``progress`` is called with the number of finished steps, and the number of
    all steps or None; if it raises, the server cancels the request. Raise RuntimeError if ``server`` is no
    address, or the server cannot be reached, refuses the request, or ends before its result is complete.
    """
    body = json.dumps({**fields, "stream": True, "progress": True}).encode()
    key = os.environ.get("PARA_CORE_API_KEY")
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    server = server.strip()  # of blanks that were pasted with the address
    if _ADDRESS.fullmatch(server) is None:
        raise RuntimeError(f"server is {server!r}; expected an address such as http://127.0.0.1:8000.")
    request = urllib.request.Request(server.rstrip("/") + path, body, headers)
    files: list[bytes] = []
    seeds: list[int] = []
    try:
        # If progress raises, leaving this block closes the connection, and the server cancels the request.
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            for event in _events(answer):
                if event["type"] == "progress":
                    progress(event["step"], event["steps"])
                elif event["type"] == "error":
                    raise RuntimeError(event["error"]["message"])
                elif event["type"].endswith(".completed"):
                    files.append(base64.b64decode(event["b64_json"]))
                    seeds.append(event["seed"])
                    for warning in event["warnings"] if len(files) == 1 else ():
                        logger.warning("para_core: %s", warning)
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(_message(error)) from None
    except urllib.error.URLError as error:
        raise RuntimeError(
            f"{server} cannot be reached: {error.reason}. Is para_core serve running?"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        # It came in the middle of the answer, so what has come before is not all.
        raise RuntimeError(
            f"{server} ended the connection before the result: {type(error).__name__} {error}"
        ) from None
    if not files:
        raise RuntimeError(f"{server} ended the connection before the result.")
    return files, seeds[0]


def _events(answer: Any) -> Iterator[dict[str, Any]]:
    """Yield the data of the server-sent events in a response. The server writes each in one line."""
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def _message(error: urllib.error.HTTPError) -> str:
    """Return the server's message in an error response, or its status if it has none, as one of a proxy."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {error.code} {error.reason}."


NODE_CLASS_MAPPINGS = {
    "ParaCoreTextToImage": TextToImage,
    "ParaCoreEditImage": EditImage,
    "ParaCoreVideo": Video,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "ParaCoreTextToImage": "Text to image (para_core server)",
    "ParaCoreEditImage": "Edit image (para_core server)",
    "ParaCoreVideo": "Video (para_core server)",
}
