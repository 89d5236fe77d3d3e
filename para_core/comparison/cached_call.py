"""Compare a call that skips blocks with the unmodified model, to show that a block stack describes the model.

``adapters/propose/`` tries its guesses of a block stack by this. Tests:
tests/adapters/propose/test_completion.py, tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from para_core.cache.apply import apply_cache, require_cache
from para_core.cache.blocks import CachedBlocks
from para_core.comparison.tensor_parts import largest_error
from para_core.comparison.virtual_ranks import copy_containers, with_same_weights
from para_core.instance.private_class import original_class


class CachedCallError(RuntimeError):
    """Error for a block stack with which a call that skips blocks fails, or is not exact."""


def error_of_cached_call(
    module: nn.Module, blocks: CachedBlocks, inputs: Mapping[str, Any], tolerance: float
) -> float:
    """Return the relative error of a call that skips ``blocks``.

    The model is called twice with the same inputs. The first-block residual has then not changed, so the
    second output equals that of the uncached model if ``blocks`` describes the model correctly.

    Args:
        module: The model. It is not changed.
        blocks: Its block stack.
        inputs: The arguments of the call, by name.
        tolerance: The error from which on the call is not exact.

    Raises:
        CachedCallError: The call fails, is not exact, or skips no block.
    """
    copied = with_same_weights(module)
    with torch.no_grad():
        try:
            expected = module(**copy_containers(inputs))
            output, skipped = _call_twice(copied, blocks, inputs)
            error = largest_error(output, expected)
        # With a wrong block stack the cached model may raise anything; and the model itself, if an argument that
        # it needs is missing because the stack calls it uncached. Both mean that the stack is wrong.
        except Exception as failure:
            raise CachedCallError(
                f"a call that skips blocks fails ({type(failure).__name__}: {failure})"
            ) from failure
    if not skipped:
        raise CachedCallError("the second of two equal calls skips no block")
    if not error < tolerance:
        raise CachedCallError("a call that skips blocks is not exact")
    return error


def _call_twice(module: nn.Module, blocks: CachedBlocks, inputs: Mapping[str, Any]) -> tuple[Any, bool]:
    """Return the output of the second call of ``module``, with a cache, and whether a call has skipped
    blocks.
    """
    # Any positive threshold would do: calls with equal inputs have equal residuals.
    apply_cache(module, blocks, residual_diff_threshold=0.5)
    cache = require_cache(module)
    output = None
    for step in range(2):
        arguments = copy_containers(inputs)
        call = partial(original_class(module).__call__, module, **arguments)
        # The step is given, because calls with equal inputs look like two calls of one step.
        output = cache.run(call, arguments, moment=step)
    return output, any(outcome.verdict.skips for outcome in cache.outcomes)
