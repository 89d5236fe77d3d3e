"""Encode the prompts of many requests first, so that text encoders and transformers are never on a device together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from para_core.adapters.components import text_encoders_of
from para_core.adapters.registry import transformers_of, unets_of
from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.fleet.prompts import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request, split_request
from para_core.instance_patching import WrapperPriority, uncompiled, unwrap, wrap_method

_KEY = "encode first"


class EncodeFirst:
    """Schedule of two phases for many requests: text encoders run for a batch of requests, then denoisers.

    Only the weights of the current phase are on the device; a denoiser is a transformer or UNet. Outputs of the text
    encoders wait in host memory. :func:`~para_core.fleet.loading.build` attaches an instance to a pipeline whose
    weights are neither sharded nor offloaded. An instance that is not attached changes nothing: all requests are one
    batch. A batch ends when the outputs of text encoders exceed ``max_bytes``.
    """

    def __init__(self, max_bytes: int = 4 * 2**30) -> None:
        self.max_bytes = max_bytes
        self._encoded: EncodedPrompts | None = None

    @property
    def bytes(self) -> int:
        """Total size of the text encoders' outputs that wait in host memory."""
        return 0 if self._encoded is None else self._encoded.bytes

    @staticmethod
    def fits(recipe: Recipe) -> bool:
        """Whether ``recipe`` keeps text encoders and whole transformers on the device, so that phases save memory."""
        in_stages = dict(recipe.mesh).get("pipe", 1) > 1
        return recipe.weights == "replicate" and not (recipe.text_encoders or recipe.offload or in_stages)

    def attach(self, pipe: Any, device: str, *, park: bool) -> None:
        """Prepare ``pipe``, whose weights are in host memory, to run on ``device``.

        Does nothing without a text encoder or denoiser. With ``park`` the denoisers' weights stay in host memory while
        text encoders run.
        """
        encoders, denoisers = text_encoders_of(pipe), {**transformers_of(pipe), **unets_of(pipe)}
        if not encoders or not denoisers:
            return
        self._pipe, self._device, self._names = pipe, torch.device(device), list(denoisers)
        self._encoders = _Weights(encoders.values())
        self._denoisers = _Weights(denoisers.values() if park else ())
        self._denoisers.park(self._device, keep=True)
        self._encoded = EncodedPrompts(pipe, max_bytes=sys.maxsize)

    def batches(
        self,
        lines: Sequence[Line],
        run: Callable[[Request], Any],
        fails_alike: Callable[[Line], bool] = lambda line: True,
    ) -> Iterator[Sequence[Line]]:
        """Yield batches of ``lines`` whose prompts are encoded by ``run``, which calls the pipeline for one request.

        A collective call. The last batch has the lines whose encoding failed. All weights are then on the device, so
        that the caller runs the whole pipeline and gets the same exception again.
        ``fails_alike`` is called on a rank where encoding a line raised, and returns whether all ranks raised. If not,
        the exception is raised at once, because the other ranks wait for this one.
        """
        encoded = self._encoded
        if encoded is None:
            yield lines
            return
        left, failed = list(lines), list[Line]()
        while left:
            self._denoisers.park(self._device, keep=True)
            self._encoders.restore(self._device)
            encoded.clear()
            encoded.complete = False
            done = list[Line]()
            with ExitStack() as stack:
                for name in self._names:
                    # The component of the pipeline is wrapped, and not the module inside torch.compile's wrapper, so
                    # that a compiled denoiser stops before its graph is entered.
                    module = getattr(self._pipe, name)
                    wrap_method(module, "__call__", _KEY, _stop, order=WrapperPriority.PARALLEL)
                    stack.callback(unwrap, module, _KEY)
                while left and encoded.bytes <= self.max_bytes:
                    line = left.pop(0)
                    try:
                        with suppress(_EncodedError):  # A pipeline may also finish without calling a denoiser.
                            # All parts of a request have the same prompt.
                            run(split_request(line.request)[0])
                        done.append(line)
                    except Exception:
                        # If all ranks raised, ignore the error for now: the line runs again at the end and raises then.
                        if not fails_alike(line):
                            raise
                        failed.append(line)
            self._encoders.park(self._device, keep=bool(left or failed))
            self._denoisers.restore(self._device)
            encoded.complete = True
            yield done
        if failed:
            encoded.complete = False
            self._encoders.restore(self._device)
            yield failed


class _EncodedError(Exception):
    """Raised at the first call of a denoiser to stop the pipeline: all prompts of the request are encoded by then."""


def _stop(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    raise _EncodedError


class _Weights:
    """Parameters of modules whose data can leave the device for a while.

    Parked parameters keep device, dtype and shape, as an expanded scalar that takes no memory.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parameters = (x for module in modules for x in uncompiled(module).parameters())
        self._parameters = list(dict.fromkeys(parameters))
        self._kept: dict[nn.Parameter, Tensor] = {}

    def park(self, device: torch.device, *, keep: bool) -> None:
        """Free the device memory of the parameters. Without ``keep`` their data is lost, else it moves to the host."""
        for x in () if self._kept else self._parameters:
            parked = torch.zeros((), dtype=x.dtype, device=device).expand(x.shape)
            self._kept[x] = x.data.cpu() if keep else parked
            x.data = parked

    def restore(self, device: torch.device) -> None:
        """Move the kept data of parked parameters to ``device``."""
        for x, data in self._kept.items():
            x.data = data.to(device)
        self._kept.clear()
