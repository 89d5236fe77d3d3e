"""Keep outputs of text encoders in host memory, so that a repeated prompt is encoded only once.

``fleet/rank.py`` and ``fleet/encode_first.py`` make such a store; the latter sets
:attr:`EncodedPrompts.complete`. ``fleet/loras.py`` clears it when LoRAs change. No other file of ``adapters``
uses it. Tests: tests/weights/test_placement.py, tests/fleet/test_encode_first.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from para_core.adapters.inspect.components import text_encoders_of
from para_core.adapters.weights.offloaded_modules import join_tensors, split_tensors
from para_core.distributed.fingerprints import tensor_bytes
from para_core.instance.record import empty_slots, fill_slot
from para_core.instance.slots import Slot


class EncodedPrompts:
    """Store of the outputs of a pipeline's text encoders, keyed by their inputs.

    Drops the least recently used first. Ranks that make the same calls must keep the same outputs, because a
    call that only some ranks compute may wait for the others: drop by nothing that differs between them, such
    as free memory.

    The key of a call has the encoder's name, the scales of its LoRA layers, which pipelines set before each
    call, and all arguments; of a tensor the device, the dtype, the shape and the bytes. Nothing else counts,
    such as autocast or weights: if the text encoders' weights change, for example by another LoRA, call
    :meth:`clear`.

    Calls with gradients enabled are always computed and not kept, unless :attr:`complete` is set. An output
    that is larger than ``max_bytes`` is not kept. Arguments and outputs are pickled without their tensors,
    and a call raises the error of ``pickle`` if that cannot be done.

    Args:
        pipe (`DiffusionPipeline`): The pipeline.
        max_bytes (`int`, *optional*, defaults to 1 GiB): Maximum total size of the kept outputs in host
            memory.

    Attributes:
        hits, misses: Numbers of calls that were answered from memory, and of calls without gradients that
            were computed.
        complete: Whether a call whose output is not kept raises ``RuntimeError``, because the weights of the
            text encoders were freed. False by default.
    """

    def __init__(self, pipe: Any, max_bytes: int = 2**30) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; expected 0 or more.")
        self.max_bytes, self.hits, self.misses = max_bytes, 0, 0
        self.complete = False
        self._encoders = text_encoders_of(pipe)
        # By digest of a call, oldest use first: size, pickled structure, tensors on the CPU and their
        # devices.
        self._outputs: OrderedDict[bytes, tuple[int, bytes, list[Tensor], list[torch.device]]] = OrderedDict()
        for name, module in self._encoders.items():
            fill_slot(module, Slot.ENCODED_PROMPTS, {"__call__": partial(self._call, name)})

    @property
    def bytes(self) -> int:
        """Total size of the kept outputs in bytes."""
        return sum(size for size, *_ in self._outputs.values())

    def clear(self) -> None:
        """Drop all kept outputs."""
        self._outputs.clear()

    def remove(self) -> None:
        """Stop keeping outputs, and drop those that are kept."""
        self.clear()
        empty_slots(self._encoders.values(), Slot.ENCODED_PROMPTS)

    def _call(
        self, name: str, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the kept output of an equal call of the encoder ``name``, or run the call and keep its output.

        Raise ``RuntimeError`` instead of running the call if :attr:`complete` is set.
        """
        if torch.is_grad_enabled() and not self.complete:
            return call(module, *args, **kwargs)
        key = _digest((name, _lora_scales(module), args, kwargs))
        kept = self._outputs.get(key)
        if kept is not None:
            self.hits += 1
            self._outputs.move_to_end(key)
            _, pickled, tensors, devices = kept
            return join_tensors(
                pickled, [x.to(device, copy=True) for x, device in zip(tensors, devices, strict=True)]
            )
        if self.complete:
            raise RuntimeError(
                f"{name} is called with a prompt that was not encoded before its weights were freed; "
                "expected equal calls. Keep the text encoders on the device: --text-encoders replicate."
            )
        self.misses += 1
        value = call(module, *args, **kwargs)
        pickled, tensors = split_tensors(value)
        size = len(pickled) + sum(x.nbytes for x in tensors)
        if size <= self.max_bytes:
            # Copy even on the CPU, because the pipeline may write to the output after this call.
            copies = [x.detach().to("cpu", copy=True) for x in tensors]
            self._outputs[key] = size, pickled, copies, [x.device for x in tensors]
            while self.bytes > self.max_bytes:
                self._outputs.popitem(last=False)
        return value


def _digest(value: Any) -> bytes:
    """Return a digest of ``value``, in which a tensor counts by its device, dtype, shape and bytes."""
    pickled, tensors = split_tensors(value)
    digest = sha256(pickled)
    for x in tensors:
        digest.update(f"{x.device} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(tensor_bytes(x.cpu()).numpy().tobytes())
    return digest.digest()


def _lora_scales(encoder: nn.Module) -> list[str]:
    """Return the scales of the LoRA layers in ``encoder``, with their adapters, in the order of the layers.

    Pipelines multiply them by the ``scale`` of a call before they encode, and divide by it afterwards, which
    may change the last bits: they are rounded to six digits, so that equal calls keep equal keys.
    """
    scales: list[str] = []
    for layer in encoder.modules():
        scaling = getattr(layer, "scaling", None)
        # In a LoRA layer of peft it is a dict by adapter. An attention layer of transformers has a float.
        if isinstance(scaling, dict):
            scales += [f"{adapter} {float(scale):.6g}" for adapter, scale in scaling.items()]
    return scales
