"""``para_core bench --check``: compare the pixels generated on all ranks with those generated on one rank.

`measurement.py` calls :func:`make_reference` first, and :func:`compare` on all ranks; `bench.py` prints the
result. Comparing calls of the transformer one by one is ``verify`` (para_core/verify). Tests:
tests/cli/test_bench.py, tests/same_bits/test_command.py.
"""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from para_core.adapters.registry import transformers_of
from para_core.cli.ranks import from_first_rank, gather_values
from para_core.fleet.build import build, build_unmodified
from para_core.fleet.recipe import Recipe, approximations, on_one_rank
from para_core.fleet.request import Request
from para_core.fleet.work import call_pipe
from para_core.recorder.operator_count import leaf_tensors

# The comparison passes if the relative error is at most this multiple of the change that one different
# rounding per call of the transformer causes. The factor is needed because another order of sums changes the
# rounding of every operator inside the transformer, and not only of its output. It is chosen, not derived.
ROUNDINGS = 32


@dataclass(frozen=True)
class Reference:
    """Pixels generated on one rank, and their sensitivity to rounding."""

    pixels: np.ndarray[Any, Any]  # float32, from 0 to 1
    # Relative change of the pixels if every output element of the transformer changes by one unit in the last
    # place. None if the recipe has options that approximate, such as a cache.
    rounding: float | None

    @property
    def digest(self) -> str:
        """SHA-256 of the pixels."""
        return digest_pixels(self.pixels)

    @property
    def bound(self) -> float | None:
        """Largest relative error that another order of operations explains. None if ``rounding`` is None."""
        if self.rounding is None:
            return None
        return ROUNDINGS * self.rounding


def make_reference(recipe: Recipe, request: Request) -> Reference:
    """Generate on this rank alone, without a process group, and return the reference for :func:`compare`.

    The pipeline is unmodified, unless the recipe has options that approximate, or ``products``. Then it gets
    all options of the recipe that work on one rank, uncompiled, so that the comparison shows only what the
    other ranks change.
    """
    if approximations(recipe):
        single_rank = replace(on_one_rank(recipe), compile="no")
        reference = Reference(_generate(build(single_rank), request), None)
    else:
        pipe = _build_exact(recipe)
        pixels = _generate(pipe, request)
        with _changing_rounding(pipe):
            rounding = pixel_error(_generate(pipe, request), pixels)
        # The pixels are float32, which cannot represent a smaller relative change. Pixels that are not finite
        # give infinity, which JSON cannot express. They fail by their error, so any number will do.
        reference = Reference(pixels, min(max(rounding, torch.finfo(torch.float32).eps), 1.0))
        del pipe
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return reference


def _build_exact(recipe: Recipe) -> Any:
    """Return the unmodified pipeline on this rank; with the kernel of products of the recipe, if it names one."""
    if recipe.products is None:
        return build_unmodified(recipe)
    # Only the same kernel has the same bits.
    return build(replace(on_one_rank(recipe), compile="no"))


def compare(
    pipe: Any, request: Request, recipe: Recipe, reference: Reference | None, progress: Callable[[], None]
) -> dict[str, Any]:
    """Generate twice on all ranks, and return whether the runs, the ranks and the reference agree. A
    collective call, whose result on the first rank counts: the others know no bound.

    The comparison passes if the error is within the bound. With options that approximate there is no bound,
    and any finite error passes. With ``same_bits`` in the recipe, it passes only if the bits of all ranks are
    those of the reference as well.

    ``reference`` is the result of :func:`make_reference` on the first rank, None on others. ``progress`` is
    called after each generation.
    """
    results = []
    for _ in range(2):
        results.append(_generate(pipe, request))
        progress()
    digests = [digest_pixels(pixels) for pixels in results]
    digests_by_rank = gather_values(digests)
    ranks_equal = all(rank[0] == digests_by_rank[0][0] for rank in digests_by_rank)
    reference_digest: str | None = None
    if reference is not None:
        reference_digest = reference.digest
    one_rank = gather_values(reference_digest)[0]
    bits_equal = all(rank[0] == one_rank for rank in digests_by_rank)
    if not ranks_equal:
        # The ranks differ, so each computes the error of its own pixels, for which it needs the reference.
        # All ranks take this branch or none, because they have gathered the same digests.
        reference = from_first_rank(reference)
    error: float | None = None
    bound: float | None = None
    if reference is not None:
        error = pixel_error(results[0], reference.pixels)
        bound = reference.bound
    largest = max(float(error) for error in gather_values(error) if error is not None)
    passed = math.isfinite(largest) and (bound is None or largest <= bound)
    if recipe.same_bits:
        passed = passed and bits_equal
    return {
        "approximations": list(approximations(recipe)),
        "products": recipe.products,
        "relative error": _replace_infinity(largest),
        "bound": bound,
        "runs equal": all(rank[0] == rank[1] for rank in digests_by_rank),
        "ranks equal": ranks_equal,
        "same bits": bits_equal,
        "same bits required": recipe.same_bits,
        "sha256 of one rank": one_rank,
        "sha256 of each rank": [rank[0] for rank in digests_by_rank],
        "passed": passed,
    }


def digest_pixels(pixels: np.ndarray[Any, Any]) -> str:
    """Return the SHA-256 of ``pixels``, row by row."""
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def pixel_error(pixels: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Return ``‖pixels - expected‖ / ‖expected‖``; infinity if the shapes differ or a value is not finite."""
    if pixels.shape != expected.shape:
        return float("inf")
    expected = expected.astype(np.float64)
    error = float(np.linalg.norm(pixels - expected)) / max(float(np.linalg.norm(expected)), 1e-30)
    if math.isnan(error):
        return float("inf")
    return error


def _replace_infinity(error: float) -> float | None:
    """Return ``error`` for JSON, which cannot express infinity: None then."""
    if math.isfinite(error):
        return error
    return None


def _generate(pipe: Any, request: Request) -> np.ndarray[Any, Any]:
    """Return the unrounded pixels of a generation: float32 from 0 to 1. A collective call on several ranks."""
    output = call_pipe(pipe, [request], output_type="np")
    pixels = getattr(output, "frames", None)
    if pixels is None:
        pixels = output.images
    return np.asarray(pixels, dtype=np.float32)


@contextmanager
def _changing_rounding(pipe: Any) -> Iterator[None]:
    """Inside this context, change each output element of the transformers and the UNet by one unit in the
    last place, in place.

    Whether an element grows or shrinks is random, with a fixed seed.
    """
    generator = torch.Generator().manual_seed(0)

    def change(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in leaf_tensors(output):
            if tensor.is_floating_point():
                bits = torch.randint(0, 2, tensor.shape, generator=generator)
                signs = bits.to(tensor.device, tensor.dtype) * 2 - 1
                tensor.mul_(1 + torch.finfo(tensor.dtype).eps * signs)

    parts: list[Any] = [*transformers_of(pipe).values(), getattr(pipe, "unet", None)]
    with ExitStack() as stack:
        for part in parts:
            if isinstance(part, nn.Module):
                stack.enter_context(part.register_forward_hook(change))
        yield
