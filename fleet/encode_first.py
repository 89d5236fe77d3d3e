"""Encode the prompts of many requests first, so that text encoders and transformers are never on a device together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from para_core.adapters.registry import transformers_of, unets_of
from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.adapters.weights.text_encoders import text_encoders_of
from para_core.fleet.prompts import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request
from para_core.instance_patching import WrapperPriority, uncompiled, unwrap, wrap_method

_KEY = "encode first"


class EncodeFirst:
    """Runs text encoders for a batch of requests before the denoisers (transformers or UNets) are on the device.

    Outputs of the text encoders wait in host memory. :func:`~para_core.fleet.recipe.build` attaches it to a pipeline
    whose weights are not sharded or offloaded; without that, all requests are one batch and nothing changes.

    Args:
        max_bytes (`int`): Bytes of outputs after which a batch ends.
    """

    def __init__(self, max_bytes: int = 4 * 2**30) -> None:
        self.max_bytes = max_bytes
        self._encoded: EncodedPrompts | None = None

    @property
    def bytes(self) -> int:
        """Total size of the outputs that wait in host memory."""
        return 0 if self._encoded is None else self._encoded.bytes

    @staticmethod
    def fits(recipe: Recipe) -> bool:
        """Whether the text encoders of ``recipe`` would stay on the device, with the whole transformer."""
        in_stages = dict(recipe.mesh).get("pipe", 1) > 1
        return recipe.weights == "replicate" and not (recipe.text_encoders or recipe.offload or in_stages)

    def attach(self, pipe: Any, device: str, *, park: bool) -> None:
        """Prepare ``pipe``, whose weights are in host memory. Does nothing without a text encoder or denoiser.

        Args:
            park: Whether the denoisers' weights wait in host memory meanwhile.
        """
        encoders, denoisers = text_encoders_of(pipe), {**transformers_of(pipe), **unets_of(pipe)}
        if not encoders or not denoisers:
            return
        self._device = torch.device(device)
        self._names = list(denoisers)
        self._encoders = _Weights(encoders.values())
        self._denoisers = _Weights(denoisers.values() if park else ())
        self._denoisers.park(self._device, keep=True)
        self._encoded = EncodedPrompts(pipe, max_bytes=sys.maxsize)

    def batches(
        self,
        pipe: Any,
        lines: Sequence[Line],
        run: Callable[[Request], Any],
        fails_alike: Callable[[Line], bool] = lambda line: True,
    ) -> Iterator[Sequence[Line]]:
        """Yield batches of ``lines`` whose prompts are encoded. A collective call of the ranks of ``pipe``.

        Lines whose encoding fails come last, with all weights on the device, so that they fail for the same reason.

        Args:
            run: Calls ``pipe`` for one request.
            fails_alike: Is called on a rank where the encoding of a line failed, and returns whether it failed on all
                ranks. If not, the error is raised, because the other ranks wait for this one.
        """
        if self._encoded is None:
            yield lines
            return
        left, failed = list(lines), list[Line]()
        while left:
            done, errors = self._encode(pipe, self._encoded, left, run, fails_alike)
            left = left[len(done) + len(errors) :]
            failed += errors
            self._encoders.park(self._device, keep=bool(left or failed))
            self._denoisers.restore(self._device)
            self._encoded.complete = True
            yield done
        if failed:
            self._encoded.complete = False
            self._encoders.restore(self._device)
            yield failed

    def _encode(
        self,
        pipe: Any,
        encoded: EncodedPrompts,
        lines: Sequence[Line],
        run: Callable[[Request], Any],
        fails_alike: Callable[[Line], bool],
    ) -> tuple[list[Line], list[Line]]:
        """Encode the first of ``lines``, and return those that were encoded and those that failed."""
        self._denoisers.park(self._device, keep=True)
        self._encoders.restore(self._device)
        encoded.clear()
        encoded.complete = False
        done, failed = list[Line](), list[Line]()
        # The component itself: one that torch.compile wraps must stop before its graph begins.
        stopped = [getattr(pipe, name) for name in self._names]
        for module in stopped:
            wrap_method(module, "__call__", _KEY, _stop, order=WrapperPriority.PARALLEL)
        try:
            for line in lines:
                try:
                    run(line.request)
                except _EncodedError:
                    done.append(line)
                except Exception:
                    # It is raised again when the line runs with all weights on the device.
                    if not fails_alike(line):
                        raise
                    failed.append(line)
                else:  # The pipeline ran without a denoiser.
                    done.append(line)
                if encoded.bytes > self.max_bytes:
                    break
        finally:
            for module in stopped:
                unwrap(module, _KEY)
        return done, failed


class _EncodedError(Exception):
    """Raised at the first call of a denoiser, when all prompts of a request are encoded."""


def _stop(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    raise _EncodedError


class _Weights:
    """Weights that leave the device for a while. Their places keep device, dtype and shape, and take no memory."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parameters = (x for module in modules for x in uncompiled(module).parameters())
        self._parameters = list(dict.fromkeys(parameters))
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._is_parked = False

    def park(self, device: torch.device, *, keep: bool) -> None:
        """Free the weights, and keep them in host memory if ``keep``."""
        if self._is_parked:
            return
        for x in self._parameters:
            if keep:
                self._kept[x] = x.data.cpu()
            x.data = torch.zeros((), dtype=x.dtype, device=device).expand(x.shape)
        self._is_parked = True

    def restore(self, device: torch.device) -> None:
        """Move the kept weights to ``device``."""
        if not self._is_parked:
            return
        for x in self._parameters:
            x.data = self._kept.pop(x).to(device)
        self._is_parked = False
