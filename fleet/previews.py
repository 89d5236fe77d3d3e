"""Previews of an image while it is generated: the latents of a step, extrapolated to the last step and decoded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from para_core.fleet.outputs import Output, encode_image
from para_core.fleet.request import Request

logger = logging.getLogger(__name__)


class Previews:
    """Sender of the previews of one request, evenly spaced over its steps.

    Nothing is sent if the latents are not those of a plain image VAE, as in video pipelines.

    Args:
        request (`Request`): The request. ``delivery.partial_images`` is the number of previews.
        send (`Callable[[Output], None]`): Called with each preview.
        format_ (`str`): Format of previews if the request states none.
        decodes (`bool`): Whether this rank decodes previews. All ranks must if the VAE runs on several ranks.
    """

    def __init__(self, request: Request, send: Callable[[Output], None], *, format_: str, decodes: bool) -> None:
        self._send, self._decodes = send, decodes
        self._count, self._format = request.delivery.partial_images, request.delivery.format_ or format_
        self._sides = request.fields.get("height"), request.fields.get("width")
        self._last: Tensor | None = None

    def at_step(self, pipe: Any, step: int, latents: Tensor | None) -> None:
        """Send a preview after step ``step`` (counted from 0) if one is due. Called after every step."""
        steps = len(pipe.scheduler.timesteps)
        last, self._last = self._last, None if latents is None else latents.clone()
        due = {round((index + 1) * steps / (self._count + 1)) for index in range(self._count)}
        if latents is None or step + 1 not in due or step + 1 == steps or not self._decodes:
            return
        try:
            image = _decode(pipe, _predicted(pipe, step, last, latents), *self._sides)
        except Exception as error:
            # The latents of an unknown pipeline may have any form. A missing preview is no error of the request.
            logger.debug("no preview of %s: %s", type(pipe).__name__, error)
            return
        self._send(Output(f".{self._format}", encode_image(image, self._format)))


def _predicted(pipe: Any, step: int, last: Tensor | None, latents: Tensor) -> Tensor:
    """Return the clean latents predicted by a flow-matching step: extrapolated linearly from two steps to sigma 0.

    Other schedulers, and the first step, give ``latents`` unchanged.
    """
    sigmas = getattr(pipe.scheduler, "sigmas", None)
    if last is None or sigmas is None or "FlowMatchEuler" not in type(pipe.scheduler).__name__:
        return latents
    before, now = float(sigmas[step]), float(sigmas[step + 1])
    return latents - now * (latents - last) / (now - before)


def _decode(pipe: Any, latents: Tensor, height: int | None, width: int | None) -> Any:
    """Decode latents, and return the first image of the batch as a PIL image."""
    config = pipe.vae.config
    if hasattr(pipe, "_unpack_latents"):
        usual = pipe.default_sample_size * pipe.vae_scale_factor
        latents = pipe._unpack_latents(latents, height or usual, width or usual, pipe.vae_scale_factor)
    if latents.ndim != 4:
        raise ValueError(f"latents have {latents.ndim} dims; expected 4, those of images.")
    latents = latents[:1] / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)
    image = pipe.vae.decode(latents.to(pipe.vae.dtype), return_dict=False)[0]
    return pipe.image_processor.postprocess(image, output_type="pil")[0]
