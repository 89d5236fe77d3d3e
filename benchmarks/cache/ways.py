"""Ways to cache: para_core's, diffusers', cache-dit's, and EasyCache. Each has its own pipeline."""

from __future__ import annotations

import ast
import importlib.util
import io
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import transformers
from diffusers import (
    FirstBlockCacheConfig,
    FluxPipeline,
    FluxTransformer2DModel,
    MagCacheConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    WanPipeline,
)
from diffusers.utils import logging
from torch import Tensor

from para_core.adapters import apply_cache_on_pipe
from para_core.cache.forecasts import FOCA
from zoo import video
from zoo.flux import PIPELINE
from zoo.flux import scenes as grammar

# -- A method that neither para_core nor diffusers has.


class EasyCache:
    """EasyCache (arXiv:2507.02860) in place of ``transformer.forward``, for one prompt at a time, without CFG branches.

    The model's change of its input, v − x, is added to later inputs as long as the output is expected to change little.
    The expected change is the change of the input times the rate at which outputs changed with inputs when last
    computed, summed over steps. No block runs on a skipped step.

    Args:
        threshold: bound for the expected relative change of the output, summed since the last computed step.
        warmup_steps: number of first steps that are computed, at least two.
    """

    def __init__(self, transformer: FluxTransformer2DModel, *, threshold: float, warmup_steps: int) -> None:
        self._compute = transformer.forward
        self._threshold, self._warmup_steps = threshold, max(warmup_steps, 2)
        self.reset()
        transformer.forward = self.forward

    def reset(self) -> None:
        """Forget the previous generation."""
        self._calls, self._error = 0, 0.0
        # These are the last input, and then values of computed steps. ``_rate`` needs two of them.
        self._input = self._computed_input = self._output = self._rate = None

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor]:
        """Return the velocity, computed or skipped."""
        if self._rate is not None:
            change = (hidden_states - self._input).abs().mean()
            self._error += self._rate * float(change / self._output.abs().mean())
            if self._calls >= self._warmup_steps and self._error < self._threshold:
                self._calls, self._input = self._calls + 1, hidden_states
                return (hidden_states + (self._output - self._computed_input),)
        (output,) = self._compute(hidden_states, **kwargs)
        if self._output is not None:
            moved = (hidden_states - self._computed_input).abs().mean()
            self._rate = float((output - self._output).abs().mean() / moved)
        self._input = self._computed_input = hidden_states
        self._output, self._error, self._calls = output, 0.0, self._calls + 1
        return (output,)


# -- The ways.


SIDE, TEXT_TOKENS = 128, 64


def load() -> FluxPipeline:
    """Return the tiny FLUX, unmodified."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    pipe = FluxPipeline.from_pretrained(PIPELINE, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_wan() -> WanPipeline:
    """Return the tiny Wan, unmodified."""
    logging.disable_progress_bar()
    pipe = WanPipeline.from_pretrained(video.PIPELINE, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: FluxPipeline, caption: str, *, steps: int, seed: int) -> torch.Tensor:
    """Return packed latents ``[1, 256, 16]``. Their noise depends on ``seed`` only, not on the dtype."""
    channels, noise_of = pipe.transformer.config.in_channels // 4, torch.Generator().manual_seed(seed)
    noise, _ = pipe.prepare_latents(1, channels, SIDE, SIDE, torch.float32, torch.device("cpu"), noise_of)
    return pipe(
        caption,
        height=SIDE,
        width=SIDE,
        num_inference_steps=steps,
        max_sequence_length=TEXT_TOKENS,
        latents=noise,
        output_type="latent",
    ).images.float()


@dataclass(frozen=True)
class Way:
    """A cache with its settings.

    Args:
        cache: the library and its cache, by which the rows of the page are grouped.
        setting: the other settings, as the page shows them.
        put: a function that applies the cache to a pipeline for a number of steps. It returns a function to call before
            a new generation, if there is one.
        package: the package that it needs in addition to diffusers.
    """

    cache: str
    setting: str
    put: Callable[[FluxPipeline, int], Callable[[], None] | None]
    package: str | None = None

    @property
    def installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None

    @property
    def name(self) -> str:
        return f"{self.cache}, {self.setting}" if self.setting else self.cache


def ours(threshold: float, cache: str = "para_core first_block", **options: Any) -> Way:
    """Return para_core's cache, without a forecast unless ``options`` (as in ``apply_cache_on_pipe``) have one."""
    plain = {} if options.keys() & {"forecast", "forecast_order"} else {"forecast_order": 0}

    def put(pipe: FluxPipeline, steps: int) -> None:
        apply_cache_on_pipe(pipe, residual_diff_threshold=threshold, **plain, **options)

    return Way(cache, f"threshold {threshold:g}", put)


def forecast(threshold: float, order: int = 1, warmup: int = 0) -> Way:
    name = f"para_core first_block, forecast_order={order}" + (f", warmup_steps={warmup}" if warmup else "")
    return ours(threshold, name, forecast_order=order, warmup_steps=warmup)


def by_input(threshold: float) -> Way:
    """Return para_core's cache with the rule that decides before block 0."""
    return ours(threshold, "para_core modulated_input", rule="modulated_input", forecast_order=1)


def easy_cache(threshold: float, warmup: int = 3) -> Way:
    """Return the rule of EasyCache, outside para_core."""

    def put(pipe: FluxPipeline, steps: int) -> Callable[[], None]:
        return EasyCache(pipe.transformer, threshold=threshold, warmup_steps=warmup).reset

    return Way(f"EasyCache (written here), {warmup} steps of warm-up", f"threshold {threshold:g}", put)


def _diffusers(cache: str, setting: str, config: Callable[[FluxPipeline, int], Any]) -> Way:
    return Way(f"diffusers {cache}", setting, lambda pipe, steps: pipe.transformer.enable_cache(config(pipe, steps)))


def first_block(threshold: float) -> Way:
    return _diffusers("First Block Cache", f"threshold {threshold:g}", lambda *_: FirstBlockCacheConfig(threshold))


def mag_cache(threshold: float, skips: int = 3) -> Way:
    """Return MagCache with ratios measured on a caption of the training set, as its documentation says."""

    def config(pipe: FluxPipeline, steps: int) -> MagCacheConfig:
        ratios = list(_mag_ratios(steps))
        return MagCacheConfig(threshold=threshold, max_skip_steps=skips, num_inference_steps=steps, mag_ratios=ratios)

    return _diffusers("MagCache", f"threshold {threshold:g}, at most {skips} in a row", config)


@lru_cache
def _mag_ratios(steps: int) -> tuple[float, ...]:
    pipe, output = load(), io.StringIO()
    pipe.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=steps))
    scene = grammar.training_scene(np.random.default_rng(0))
    with redirect_stdout(output):
        generate(pipe, grammar.caption(scene), steps=steps, seed=0)
    return tuple(ast.literal_eval(output.getvalue().strip().splitlines()[-1]))


def taylor_seer(interval: int) -> Way:
    """Return TaylorSeer in lite mode, which skips all blocks. The full mode skips attention only."""

    def config(pipe: FluxPipeline, steps: int) -> TaylorSeerCacheConfig:
        return TaylorSeerCacheConfig(
            cache_interval=interval, max_order=1, taylor_factors_dtype=torch.float32, use_lite_mode=True
        )

    return _diffusers("TaylorSeer, lite, order 1", f"every {interval} steps", config)


def sea_cache(threshold: float, skips: int = 2) -> Way:
    """Return SeaCache with the inputs that FLUX's pipeline does not pass: latents as ``[C, T, H, W]``, and the step."""

    def put(pipe: FluxPipeline, steps: int) -> None:
        config = SeaCacheConfig(
            threshold=threshold, residual_order=1, max_consecutive_cached=skips, raw_vision_callback=_latents
        )
        pipe.transformer.enable_cache(config)
        _tell_where(pipe)

    limit = f", at most {skips} in a row" if skips else ""
    return Way(f"diffusers SeaCache, order 1{limit}", f"threshold {threshold:g}", put)


def _latents(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    tokens = kwargs["hidden_states"]  # They are [1, 256, 16]: 2 × 2 latent pixels of 4 channels.
    side = int(tokens.shape[1] ** 0.5)
    pixels = tokens.reshape(side, side, -1, 2, 2).permute(2, 0, 3, 1, 4).reshape(-1, 1, 2 * side, 2 * side)
    return [pixels]


def _tell_where(pipe: FluxPipeline) -> None:
    transformer = pipe.transformer
    context = transformer.cache_context

    @contextmanager
    def told(name: str) -> Any:
        scheduler = pipe.scheduler
        index = scheduler.step_index or 0
        where = {"step_index": index, "sigma": scheduler.sigmas[index], "num_inference_steps": len(scheduler.timesteps)}
        with context(name, **where):
            yield

    transformer.cache_context = told


def cache_dit(threshold: float, warmup: int = 0, taylor: int = 0) -> Way:
    """Return DBCache of cache-dit with one block that always runs. ``taylor`` is the order of TaylorSeer."""

    def put(pipe: FluxPipeline, steps: int) -> None:
        # This peer is optional.
        import cache_dit as peer

        config = peer.DBCacheConfig(
            Fn_compute_blocks=1,
            Bn_compute_blocks=0,
            residual_diff_threshold=threshold,
            max_warmup_steps=warmup,
            num_inference_steps=steps,
        )
        calibrator = peer.TaylorSeerCalibratorConfig(taylorseer_order=taylor) if taylor else None
        peer.enable_cache(pipe, cache_config=config, calibrator_config=calibrator)

    name = "cache-dit DBCache F1B0" + (f" + TaylorSeer, order {taylor}" if taylor else "")
    return Way(f"{name}, max_warmup_steps={warmup}", f"threshold {threshold:g}", put, package="cache_dit")


NO_CACHE = Way("no cache", "", lambda pipe, steps: None)


def _to_bfloat16(pipe: FluxPipeline, steps: int) -> None:
    pipe.to(torch.bfloat16)
    pipe.vae.to(torch.float32)


# This shows the effect of rounding alone on an image, for comparison.
IN_BFLOAT16 = Way("no cache, text encoders and transformer in bfloat16", "", _to_bfloat16)

# They are measured in this order. para_core's come first, because the others are compared with them.
QUALITY: tuple[Way, ...] = (
    IN_BFLOAT16,
    *(ours(x) for x in (0.08, 0.12, 0.2, 0.3)),
    *(forecast(x) for x in (0.08, 0.12, 0.2, 0.3)),
    *(by_input(x) for x in (0.09, 0.135)),
    forecast(0.12, warmup=4),
    first_block(0.12),
    cache_dit(0.12, 4, 1),
    cache_dit(0.12),
    forecast(0.12, order=2),
    ours(0.12, "para_core first_block, foca", forecast=FOCA),
    sea_cache(0.5),
    taylor_seer(3),
    easy_cache(0.05),
    mag_cache(0.24, 5),
    sea_cache(0.5, skips=0),
)

# They compute about half of 28 steps. Ways that are also compiled come first.
SPEED: tuple[Way, ...] = (
    NO_CACHE,
    ours(0.12),
    first_block(0.12),
    cache_dit(0.12),
    forecast(0.12),
    by_input(0.09),
    cache_dit(0.12, 4, 1),
    sea_cache(0.25),
    taylor_seer(2),
    mag_cache(0.06),
    easy_cache(0.025, 5),
)
NUM_COMPILED = 6
