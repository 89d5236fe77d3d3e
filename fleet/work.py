"""Generation of a request on one group of ranks, which can be cancelled on all ranks after any step.

`rank.py` calls it for the commands and the server, and `cli/measurement.py` and `cli/comparison.py` call the
pipeline with :func:`call_pipe`. The pipeline is made in `build.py`. Tests: tests/fleet/test_work.py.
"""

from __future__ import annotations

import inspect
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import diffusers
import torch
from torch import Tensor

from para_core.adapters.cache.generation import cache_summary
from para_core.adapters.registry import mesh_of
from para_core.distributed.agree import broadcast_bytes
from para_core.fleet.build import read_mesh_sizes
from para_core.fleet.failures import EncodingFailed, describe_exception
from para_core.fleet.image_files import ImageMode
from para_core.fleet.modular import call_modular, is_modular
from para_core.fleet.outputs import Output, Result, encode
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request, batch_arguments, split_request
from para_core.instance.private_class import original_class
from para_core.launcher.errors import Cancelled
from para_core.version import __version__

logger = logging.getLogger(__name__)
_CALLBACK_ARGUMENT = "callback_on_step_end"


@dataclass(frozen=True)
class Watch:
    """Functions that are called at the end of each denoising step, on every rank unless it is said below."""

    progress: Callable[[int], None] | None = None  # gets the number of finished steps
    # Returns whether to cancel the request. The first rank's answer is broadcast once per step, so either
    # every rank has such a function or no rank.
    cancelled: Callable[[], bool] | None = None
    # Gets each partial image that the request asks for, on the first rank. Decoding them may be a collective
    # call, so here too every rank has such a function or no rank.
    preview: Callable[[Output], None] | None = None


def generate_request(
    pipe: Any, request: Request, recipe: Recipe, watch: Watch = Watch()
) -> Result | EncodingFailed | None:
    """Run the pipeline for one request. A collective call.

    Return the result on the first rank of the pipeline's mesh, or EncodingFailed there if its files cannot be
    encoded, and None on others. Raise Cancelled on every rank if ``watch`` cancels the request, and what the
    pipeline raises. Invalid arguments raise on every rank.
    """
    results = generate_batch(pipe, [request], recipe, watch)
    if results is None:
        return None
    return results[0]


def generate_batch(
    pipe: Any, requests: Sequence[Request], recipe: Recipe, watch: Watch = Watch()
) -> list[Result | EncodingFailed] | None:
    """Run one call of the pipeline for requests with the same ``batch_key``, and return a result for each. A
    collective call.

    A single request may take several calls (:func:`split_request`). What is returned for a request whose
    files cannot be encoded and on other ranks, and exceptions, are as in :func:`generate_request`.
    """
    if len(requests) == 1 and requests[0].calls > 1:
        return _generate_parts(pipe, requests[0], recipe, watch)
    mesh = mesh_of(pipe)
    first = mesh is None or mesh.rank == 0
    previews: Previews | None = None
    if watch.preview is not None and requests[0].delivery.partial_images:
        send = None
        if first:
            send = watch.preview
        # Decoding is a collective call if the VAE runs on all ranks, or on the first rank for all.
        decodes = first or recipe.vae or recipe.vae_on_first_rank
        previews = Previews(requests[0], send, decodes=decodes)
    start = time.perf_counter()
    output = call_pipe(pipe, requests, **make_step_callback(pipe, watch, previews))
    seconds = time.perf_counter() - start
    if not first:
        return None
    return _make_results(pipe, requests, recipe, output, seconds)


def _make_results(
    pipe: Any, requests: Sequence[Request], recipe: Recipe, output: Any, seconds: float
) -> list[Result | EncodingFailed]:
    """Return the result of each request from the ``output`` of a call that took ``seconds``, or
    EncodingFailed for a request whose files cannot be encoded, and for every one if the output lacks samples.

    Nothing is raised, because only the first rank calls it. If it raised alone, all ranks would be ended, and
    the other requests of the batch would have no result.
    """
    is_video = getattr(output, "frames", None) is not None
    try:
        shares = _share_samples(output, len(requests))
    except Exception as error:
        return [_encoding_failed(error) for _ in requests]
    results: list[Result | EncodingFailed] = []
    for request, share in zip(requests, shares, strict=True):
        try:
            images = [image for sample in share for image in _images_of(sample)]
            # The size is read from the result, because the pipeline may have rounded the requested one.
            size = f"{images[0].width}x{images[0].height}"
            described = {**make_metadata(pipe, request, recipe, seconds), "size": size}
            files = images
            if is_video:
                files = share
            results.append(Result(tuple(encode(files, request.delivery)), described))
        except Exception as error:
            results.append(_encoding_failed(error))
    return results


def _share_samples(output: Any, requests: int) -> list[Any]:
    """Return the samples of each of ``requests`` requests: the videos of ``output``, else its images.

    Raise AttributeError if it has neither, and ValueError if a batch does not have a sample for each request.
    """
    samples = getattr(output, "frames", None)
    if samples is None:
        samples = output.images
    if requests == 1:
        return [samples]
    shares = [[sample] for sample in samples]
    if len(shares) != requests:
        raise ValueError(f"the pipeline returned {len(shares)} samples for {requests} requests.")
    return shares


def _encoding_failed(error: Exception) -> EncodingFailed:
    """Return the outcome of a request whose result cannot be encoded because of ``error``, which is logged."""
    logger.debug("a result cannot be encoded", exc_info=error)
    return EncodingFailed(f"its result cannot be encoded: {describe_exception(error)}")


def _images_of(sample: Any) -> Sequence[Any]:
    """Return the images of one sample: the frames of a video, the layers of an image, or the image itself."""
    if isinstance(sample, Sequence):
        return sample
    return [sample]


def _generate_parts(
    pipe: Any, request: Request, recipe: Recipe, watch: Watch
) -> list[Result | EncodingFailed] | None:
    """Run a call of the pipeline for each part of ``request``, and join the results. See
    :func:`split_request`. If a part has no result, the request has none.
    """
    # Numbers of finished steps: of the parts that have ended, and of the current part.
    done, last = 0, 0

    def progress(step: int) -> None:
        nonlocal last
        last = step
        if watch.progress is not None:
            watch.progress(done + step)

    results = []
    # Only the first rank knows that a part has no result, so every part runs: the other ranks run it, too.
    for part in split_request(request):
        results.append(generate_request(pipe, part, recipe, replace(watch, progress=progress)))
        done += last
    for result in results:
        if isinstance(result, EncodingFailed):
            return [result]
    firsts = [result for result in results if isinstance(result, Result)]
    if not firsts:
        return None
    files = [output for result in firsts for output in result.outputs]
    outputs = tuple(
        replace(output, suffix=f"-{index}.{output.format_}") for index, output in enumerate(files)
    )
    seconds = sum(result.metadata["seconds"] for result in firsts)
    described = {**make_metadata(pipe, request, recipe, seconds), "size": firsts[0].metadata["size"]}
    return [Result(outputs, described)]


def call_pipe(pipe: Any, requests: Sequence[Request], **options: Any) -> Any:
    """Call ``pipe`` once for requests with the same ``batch_key``, and return its output. A collective call.

    ``options`` are further arguments of the call, and override those of the requests.
    """
    # CPU generators give the same noise on every device. Each result has its own generator, so that it is the
    # same in a batch, or among the images of one request, as alone.
    generators = [torch.Generator().manual_seed(seed) for request in requests for seed in request.seeds]
    texts_and_images = batch_arguments(requests, _image_mode(pipe))
    arguments = {**texts_and_images, "generator": generators, "output_type": "pil"}
    if len(generators) == 1:
        arguments["generator"] = generators[0]
    arguments |= options
    with warnings.catch_warnings():
        # Warnings about a client's request, such as that its size is rounded, do not belong in a server's
        # log.
        warnings.simplefilter("ignore")
        if is_modular(pipe):
            return call_modular(pipe, arguments)
        return pipe(**arguments)


def _image_mode(pipe: Any) -> ImageMode:
    """Return the mode in which ``pipe`` takes images: RGBA if its VAE encodes transparency, the fourth
    channel, as that of QwenImageLayeredPipeline does.
    """
    config = getattr(getattr(pipe, "vae", None), "config", None)
    # Two names of diffusers for the channels of an image.
    if 4 in (getattr(config, "input_channels", None), getattr(config, "in_channels", None)):
        return "RGBA"
    return "RGB"


def make_metadata(pipe: Any, request: Request, recipe: Recipe, seconds: float) -> dict[str, Any]:
    """Return the metadata that are stored in the JSON file of a result: request, recipe, mesh, seconds,
    versions.
    """
    cache: list[str] | None = None
    if recipe.cache is not None:
        cache = cache_summary(pipe)
    device = "cpu"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "request": {**request.fields, "seed": request.seed},
        "seeds": list(request.seeds),
        "recipe": {**asdict(recipe), "mesh": dict(recipe.mesh)},
        "pipeline": type(pipe).__name__,
        "mesh": read_mesh_sizes(pipe),
        "cache": cache,
        "seconds": round(seconds, 3),
        "device": device,
        "versions": {
            "para_core": __version__,
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
        },
    }


def make_step_callback(
    pipe: Any, watch: Watch, previews: Previews | None = None
) -> dict[str, Callable[..., Any]]:
    """Return ``{"callback_on_step_end": function}``. The function calls the functions of ``watch`` after each
    step. It is collective if ``watch`` may cancel, or ``previews`` are decoded on several ranks.

    Return an empty dict if the pipeline's call has no such parameter.
    """
    if (
        not is_modular(pipe)
        and _CALLBACK_ARGUMENT not in inspect.signature(original_class(pipe).__call__).parameters
    ):
        return {}
    mesh = mesh_of(pipe)

    def at_step_end(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if watch.progress is not None:
            watch.progress(step + 1)
        if previews is not None:
            previews.at_step(pipe, step, tensors.get("latents"))
        if watch.cancelled is not None:
            stop = watch.cancelled()
            if mesh is not None:
                stop = bool(broadcast_bytes(torch.tensor([stop], dtype=torch.uint8), mesh)[0])
            if stop:
                raise Cancelled(f"cancelled after step {step + 1}.")
        return {}

    return {_CALLBACK_ARGUMENT: at_step_end}


class Previews:
    """Sender of the previews of one request, evenly spaced over its steps.

    Nothing is sent if the latents are not those of a plain image VAE, as in video pipelines, or if ``send`` is
    None. ``decodes`` says whether this rank decodes previews; all ranks must if the VAE runs on several ranks.
    """

    def __init__(self, request: Request, send: Callable[[Output], None] | None, *, decodes: bool) -> None:
        self._send = send
        self._decodes = decodes
        self._count = request.delivery.partial_images
        self._delivery = replace(request.delivery, quality=None)
        self._sides = request.fields.get("height"), request.fields.get("width")
        # Latents before the current step: None at the first step, or if the pipeline passed none.
        self._last: Tensor | None = None

    def at_step(self, pipe: Any, step: int, latents: Tensor | None) -> None:
        """Send a preview after step ``step`` (counted from 0) if one is due. Called after every step."""
        # A call that begins from an image takes the last ones of the scheduler's timesteps only.
        steps = getattr(pipe, "num_timesteps", None) or len(pipe.scheduler.timesteps)
        last = self._last
        self._last = None
        if latents is not None:
            self._last = latents.clone()
        due = {round((index + 1) * steps / (self._count + 1)) for index in range(self._count)}
        if latents is None or step + 1 not in due or step + 1 == steps or not self._decodes:
            return
        try:
            image = _decode(pipe, _predict_clean(pipe, last, latents), *self._sides)
            previews = encode([image], self._delivery)
        except Exception as error:
            # The latents of an unknown pipeline may have any form. A missing preview is no error of the
            # request.
            logger.debug("no preview of %s: %s", type(pipe).__name__, error)
            return
        if self._send is not None:
            self._send(*previews)


def _predict_clean(pipe: Any, last: Tensor | None, latents: Tensor) -> Tensor:
    """Return the clean latents predicted by a flow-matching step: extrapolated linearly from two steps to
    sigma 0. ``last`` are the latents before the scheduler's latest step, and ``latents`` those after it.

    Other schedulers, and the first step, give ``latents`` unchanged.
    """
    sigmas = getattr(pipe.scheduler, "sigmas", None)
    if last is None or sigmas is None or "FlowMatchEuler" not in type(pipe.scheduler).__name__:
        return latents
    # Not by the number of the callback's step, which counts from the first step of the call: a call that
    # begins from an image leaves out the first sigmas.
    index = pipe.scheduler.step_index
    before, now = float(sigmas[index - 1]), float(sigmas[index])
    return latents - now * (latents - last) / (now - before)


def _decode(pipe: Any, latents: Tensor, height: int | None, width: int | None) -> Any:
    """Decode ``latents``, ``[B, C, H, W]`` or packed, and return the first image of the batch as a PIL image.

    ``height`` and ``width`` are the image's in pixels, None for the pipeline's defaults; only packed latents
    need them. Raise ValueError if the unpacked latents do not have 4 dims.
    """
    config = pipe.vae.config
    if hasattr(pipe, "_unpack_latents"):
        usual = pipe.default_sample_size * pipe.vae_scale_factor
        latents = pipe._unpack_latents(latents, height or usual, width or usual, pipe.vae_scale_factor)
    if latents.ndim != 4:
        raise ValueError(f"latents have {latents.ndim} dims; expected 4, those of images.")
    latents = latents[:1] / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)
    image = pipe.vae.decode(latents.to(pipe.vae.dtype), return_dict=False)[0]
    return pipe.image_processor.postprocess(image, output_type="pil")[0]
