"""Previews of an image while it is generated: the clean image that the latents of a step predict."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from para_core.fleet.outputs import Output, encode_image
from para_core.fleet.request import Request

logger = logging.getLogger(__name__)


class Previews:
    """Previews of one request, evenly spaced over its steps.

    Pipelines whose latents cannot be decoded without knowledge of the pipeline, such as those of videos, have none.

    Args:
        request (`Request`): Its delivery has the number of previews.
        send (`Callable[[Output], None]`): Receives each of them.
        decodes (`bool`): Whether this rank decodes. All ranks do if the VAE runs on several.
    """

    def __init__(self, request: Request, send: Callable[[Output], None], *, format_: str, decodes: bool) -> None:
        self._send, self._decodes = send, decodes
        self._count, self._format = request.delivery.partial_images, request.delivery.format_ or format_
        self._sides = request.fields.get("height"), request.fields.get("width")
        self._last: Tensor | None = None

    def at_step(self, pipe: Any, step: int, latents: Tensor | None) -> None:
        """Send a preview after this step, counted from 0, if one is due."""
        steps = len(pipe.scheduler.timesteps)
        last, self._last = self._last, None if latents is None else latents.clone()
        due = {round((index + 1) * steps / (self._count + 1)) for index in range(self._count)}
        if latents is None or step + 1 not in due or step + 1 == steps or not self._decodes:
            return
        try:
            image = _decode(pipe, _predicted(pipe, step, last, latents), *self._sides)
        except Exception as error:
            # Other pipelines keep latents in forms that this module does not know.
            logger.debug("no preview of %s: %s", type(pipe).__name__, error)
            return
        self._send(Output(f".{self._format}", encode_image(image, self._format)))


def _predicted(pipe: Any, step: int, last: Tensor | None, latents: Tensor) -> Tensor:
    """Return the clean latents that the step's velocity points to. Without a velocity, the latents as they are."""
    sigmas = getattr(pipe.scheduler, "sigmas", None)
    if last is None or sigmas is None or "FlowMatchEuler" not in type(pipe.scheduler).__name__:
        return latents
    before, now = float(sigmas[step]), float(sigmas[step + 1])
    return latents - now * (latents - last) / (now - before)


def _decode(pipe: Any, latents: Tensor, height: int | None, width: int | None) -> Any:
    """Return the first image."""
    config = pipe.vae.config
    if hasattr(pipe, "_unpack_latents"):
        usual = pipe.default_sample_size * pipe.vae_scale_factor
        latents = pipe._unpack_latents(latents, height or usual, width or usual, pipe.vae_scale_factor)
    if latents.ndim != 4:
        raise ValueError(f"latents have {latents.ndim} dims; expected 4, those of images.")
    latents = latents[:1] / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)
    image = pipe.vae.decode(latents.to(pipe.vae.dtype), return_dict=False)[0]
    return pipe.image_processor.postprocess(image, output_type="pil")[0]
