"""The images of a way to cache, compared with those without a cache, and with the captions."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import FluxPipeline
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from tqdm import tqdm

from benchmarks.cache.ways import SIDE, Way, generate, load
from zoo.evaluate import held_out_images
from zoo.flux import scenes as grammar
from zoo.flux.check import check
from zoo.flux.scenes import ImageScene

# These are the values of zoo/evaluate.py, so the captions are the first of its captions with one object.
SEED, THINGS = 0, 1
DECODED_AT_ONCE = 16
MOST_DECIBELS = 100.0  # Two equal images have this PSNR.


def scenes_of(count: int) -> list[ImageScene]:
    """Return ``count`` scenes that were not in the training set."""
    return held_out_images(SEED, THINGS, count)


class Computed:
    """A counter of the steps at which the last block was computed, whichever cache decided."""

    def __init__(self, pipe: FluxPipeline) -> None:
        self.steps = 0
        # Do not hook a block or its attention, because caches replace these.
        pipe.transformer.single_transformer_blocks[-1].attn.to_q.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self.steps += 1


def images_of(way: Way, steps: int, count: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Return images ``[count, 128, 128, 3]`` in 0 … 1, and the computed steps and CPU seconds of each call."""
    pipe = load()
    counter = Computed(pipe)
    again = way.put(pipe, steps)
    latents, computed, seconds = [], [], []
    for i, scene in enumerate(tqdm(scenes_of(count), desc=f"{steps} steps, {way.name}", mininterval=5.0, leave=False)):
        if again is not None:
            again()
        counter.steps, start = 0, time.process_time()
        latents.append(generate(pipe, grammar.caption(scene), steps=steps, seed=(SEED + THINGS) * 100_000 + i))
        seconds.append(round(time.process_time() - start, 3))
        computed.append(counter.steps)
    return decode(pipe, torch.cat(latents)), {"computed": computed, "cpu_seconds": seconds}


@torch.no_grad()
def decode(pipe: FluxPipeline, tokens: torch.Tensor) -> np.ndarray:
    """Return images ``[B, 128, 128, 3]`` in 0 … 1 of packed latents."""
    latents = pipe._unpack_latents(tokens, SIDE, SIDE, pipe.vae_scale_factor)
    latents = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    parts = [pipe.vae.decode(part, return_dict=False)[0] for part in latents.split(DECODED_AT_ONCE)]
    return pipe.image_processor.postprocess(torch.cat(parts), output_type="np")


def judge(images: np.ndarray, references: np.ndarray) -> dict[str, list[Any]]:
    """Return, for each image, the likeness to its reference, whether it shows the caption, and whether it shows what
    the reference does.
    """
    scenes = scenes_of(len(images))
    verdicts = [check(_to_8_bit(x), scene) for x, scene in zip(images, scenes, strict=True)]
    expected = [check(_to_8_bit(x), scene) for x, scene in zip(references, scenes, strict=True)]
    pairs = list(zip(images, references, strict=True))
    return {
        "psnr": [round(min(psnr(x, y), MOST_DECIBELS), 3) for x, y in pairs],
        "ssim": [round(ssim(x, y), 5) for x, y in pairs],
        "right": [x.all_right for x in verdicts],
        "as without": [x == y for x, y in zip(verdicts, expected, strict=True)],
    }


def ssim(image: np.ndarray, expected: np.ndarray) -> float:
    """Return the structural similarity of two images ``[H, W, 3]`` in 0 … 1."""
    return float(structural_similarity(expected, image, channel_axis=-1, data_range=1.0))


def psnr(image: np.ndarray, expected: np.ndarray) -> float:
    """Return the PSNR in dB of values in 0 … 1, or infinity if they are equal."""
    with np.errstate(divide="ignore"):
        return float(peak_signal_noise_ratio(expected, image, data_range=1.0))


def mean_and_error(differences: Sequence[float]) -> list[float]:
    """Return the mean and its standard error."""
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return [round(statistics.mean(differences), 2), round(error, 2)]


def _to_8_bit(image: np.ndarray) -> np.ndarray:
    return (image * 255).round().astype(np.uint8)
