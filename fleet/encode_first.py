"""Encode the prompts of many requests first, so that text encoders and denoisers need not be on a device
together.

They are together only if denoisers are quantized: those stay on the device (:meth:`EncodeFirst.attach`
without ``park``).

`lines.py` drives :func:`encode_batches` in the process of the command, and `rank.py` has an
:class:`EncodeFirst` on each rank, for ``para_core generate`` with more than one line. The server does not use
it. Tests: tests/fleet/test_encode_first.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from para_core.adapters.denoisers import other_denoisers_of
from para_core.adapters.inspect.components import text_encoders_of
from para_core.adapters.registry import transformers_of
from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from para_core.fleet.prompt_file import Line
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Request, split_request
from para_core.instance.modules import uncompiled
from para_core.instance.record import empty_slot, fill_slot
from para_core.instance.slots import Slot
from para_core.launcher.errors import RankDied


class Encoder(Protocol):
    """The two phases of many requests: text encoders run for a batch of requests, then denoisers.

    :func:`encode_batches` has the order of the calls, each of which every rank makes. :class:`EncodeFirst` is
    one rank's; ``Rank`` of `rank.py` and ``LineRun`` of `lines.py` have the same methods, and pass them on.
    """

    def encodes_first(self) -> bool:
        """Whether there are two phases. If not, no other method may be called."""

    def begin_encoding(self) -> None:
        """Begin the first phase of a batch, or begin it again. Not after :meth:`end_encoding` without
        ``keep_encoders``.
        """

    def encode(self, line: Line) -> bool:
        """Encode the prompts of a line. Return whether the outputs of another one may be added to this batch."""

    def end_encoding(self, keep_encoders: bool) -> None:
        """Begin the second phase. Without ``keep_encoders`` the text encoders' weights are dropped, so no
        other batch can begin.
        """


def encode_batches(
    lines: Sequence[Line], encoder: Encoder, fail: Callable[[Line, Exception], None]
) -> Iterator[Sequence[Line]]:
    """Yield batches of ``lines`` whose prompts have been encoded; all lines, as they are, without phases. A
    collective call.

    A line whose encoding raised is in no batch: ``fail`` is called with it and the exception. It is not run
    as a whole instead, because text encoders and denoisers may not fit on the device together. Raise RankDied
    if ranks end, and what moving weights between the phases raises.
    """
    if not encoder.encodes_first():
        yield lines
        return
    waiting = list(lines)
    while waiting:
        encoder.begin_encoding()
        encoded: list[Line] = []
        has_room = True
        while waiting and has_room:
            line = waiting.pop(0)
            try:
                has_room = encoder.encode(line)
                encoded.append(line)
            except RankDied:
                raise
            except Exception as error:
                fail(line, error)
                # Its first text encoders may have stored outputs, on each rank others. The next batch forgets
                # them, so they neither add up nor let ranks differ in where a batch ends.
                has_room = False
        if encoded:
            encoder.end_encoding(keep_encoders=bool(waiting))
            yield encoded


class EncodeFirst:
    """Two phases of many requests on this rank, see :class:`Encoder`.

    Only the parameters of the current phase are on the device, see :meth:`attach` for the exception; a
    denoiser is a transformer or UNet. Buffers of both stay there. Outputs of the text encoders wait in host
    memory. :func:`~para_core.fleet.build.build` attaches an instance to a pipeline whose weights are neither
    sharded nor offloaded. An instance that is not attached has no phases.

    Args:
        call: Calls a pipeline for a list of requests: :func:`~para_core.fleet.work.call_pipe`, which cannot
            be imported here, because its module imports :mod:`~para_core.fleet.build`, and that one this
            module.
        max_bytes: A batch ends when the outputs of text encoders exceed this size, 4 GiB by default. Each
            rank of a host keeps as many.
    """

    def __init__(self, call: Callable[[Any, Sequence[Request]], Any], max_bytes: int = 4 * 2**30) -> None:
        self._call, self.max_bytes = call, max_bytes
        # None before attach, and if the pipeline has nothing to attach to. The other attributes of attach
        # exist only if it is set.
        self._encoded: EncodedPrompts | None = None

    @property
    def waiting_bytes(self) -> int:
        """Total size of the text encoders' outputs that wait in host memory."""
        if self._encoded is None:
            return 0
        return self._encoded.bytes

    @staticmethod
    def fits(recipe: Recipe) -> bool:
        """Whether ``recipe`` keeps text encoders and whole transformers on the device, so that phases save
        memory.
        """
        in_stages = dict(recipe.mesh).get("pipe", 1) > 1
        return not (recipe.sharding or recipe.places_encoders or recipe.offload or in_stages)

    def attach(self, pipe: Any, device: str, *, park: bool) -> None:
        """Prepare ``pipe``, whose weights are in host memory, to run on ``device``.

        Does nothing without a text encoder or denoiser. With ``park`` the denoisers' weights stay in host
        memory while text encoders run; without, which quantized weights need, they stay on the device all the
        time.

        Call this before the components are moved to the device, as ``build`` does: parked parameters take no
        memory there, and report ``device`` already, so that moving them changes nothing.
        """
        encoders = text_encoders_of(pipe)
        denoisers = {**transformers_of(pipe), **other_denoisers_of(pipe)}
        if not encoders or not denoisers:
            return
        self._pipe = pipe
        self._device = torch.device(device)
        self._names = list(denoisers)
        self._encoders = _Weights(encoders.values())
        self._denoisers = _Weights(())
        if park:
            self._denoisers = _Weights(denoisers.values())
        self._denoisers.park(self._device, keep=True)
        # This store drops nothing: a dropped output could not be computed again after the encoders were
        # freed. encode ends a batch by max_bytes instead.
        self._encoded = EncodedPrompts(pipe, max_bytes=sys.maxsize)

    def encodes_first(self) -> bool:
        return self._encoded is not None

    def begin_encoding(self) -> None:
        """Move the text encoders to the device, and forget the outputs of the previous batch."""
        encoded = self._require_attached()
        self._denoisers.park(self._device, keep=True)
        self._encoders.restore(self._device)
        encoded.clear()
        encoded.complete = False

    def encode(self, line: Line) -> bool:
        """Run the text encoders for ``line``, and return whether at most ``max_bytes`` of outputs wait now."""
        encoded = self._require_attached()
        with ExitStack() as stack:
            for name in self._names:
                # The component of the pipeline is wrapped, and not the module inside torch.compile's wrapper,
                # so that a compiled denoiser stops before its graph is entered.
                module = getattr(self._pipe, name)
                fill_slot(module, Slot.ENCODE_FIRST, {"__call__": _stop})
                stack.callback(empty_slot, module, Slot.ENCODE_FIRST)
            with suppress(_EncodedError):  # A pipeline may also finish without calling a denoiser.
                # All parts of a request have the same prompt.
                self._call(self._pipe, [split_request(line.request)[0]])
        return encoded.bytes <= self.max_bytes

    def end_encoding(self, keep_encoders: bool) -> None:
        """Move the denoisers to the device in place of the text encoders."""
        encoded = self._require_attached()
        self._encoders.park(self._device, keep=keep_encoders)
        self._denoisers.restore(self._device)
        encoded.complete = True

    def _require_attached(self) -> EncodedPrompts:
        if self._encoded is None:
            raise RuntimeError("the pipeline has no phases: encodes_first() is False.")
        return self._encoded


class _EncodedError(Exception):
    """Raised at the first call of a denoiser to stop the pipeline: all prompts of the request are encoded by
    then.
    """


def _stop(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    raise _EncodedError


class _Weights:
    """Parameters of modules whose data can leave the device for a while. Buffers are not moved.

    Parked parameters keep dtype and shape, and are on the device for which they are parked wherever they were
    before, as an expanded scalar that takes no memory.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parameters = (parameter for module in modules for parameter in uncompiled(module).parameters())
        # Parameters that modules share are parked once.
        self._parameters = list(dict.fromkeys(parameters))
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._dropped = False

    def park(self, device: torch.device, *, keep: bool) -> None:
        """Free the device memory of the parameters that are not parked. Without ``keep`` the data of all is
        dropped, else it moves to the host.
        """
        if self._dropped:
            return
        if not keep:
            self._dropped = True
            self._kept.clear()
        for parameter in self._parameters:
            if parameter in self._kept:
                continue
            if keep:
                self._kept[parameter] = parameter.data.cpu()
            parameter.data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)

    def restore(self, device: torch.device) -> None:
        """Move the kept data of parked parameters to ``device``. Does nothing if they are not parked.

        Raise RuntimeError if the data was dropped.
        """
        if self._dropped:
            raise RuntimeError("the weights were dropped after the last batch; load the pipeline again.")
        # One by one, so that after an error, such as too little memory, park knows which ones it restored.
        for parameter in list(self._kept):
            parameter.data = self._kept[parameter].to(device)
            del self._kept[parameter]
