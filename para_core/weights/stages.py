"""Exact pipeline stages: each rank along the mesh dim ``pipe`` holds consecutive blocks of a model.

Each rank runs the model's own code, but blocks of other stages only return their inputs. The first block of a stage
replaces its inputs by the inputs that the previous stage sends. A rank that reaches the first block of the next stage
sends that block's inputs to the next stage. Every rank computes the layers before and after the blocks, and the last
stage sends its output to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.distributed.agree import RequireEqual
from para_core.distributed.mesh import MeshDim
from para_core.distributed.point_to_point import Links
from para_core.instance.modules import is_compiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, empty_slots, fill_slot, slot_owner
from para_core.instance.slots import Slot
from para_core.plans.current_call import attention_is_skipped
from para_core.plans.module_matching import parameters_of
from para_core.torch_internals import is_registered, pytree
from para_core.weights.balance import balanced
from para_core.weights.parameters import (
    Gradients,
    is_plain_weight,
    map_plain_tensors,
    plain_tensors,
    put_weight,
    weights_of,
)


@dataclass(frozen=True)
class StagedBlock:
    """A transformer block of the model, with its token streams (such as image and text) and its cost in any unit.

    ``streams`` are the names of the parameters of ``forward`` that hold tokens, in the order in which the block returns
    their new values. A block with one stream returns a tensor, not a tuple.
    """

    block: nn.Module
    streams: tuple[str, ...]
    cost: float


class Stages:
    """The pipeline stages of a model. For inference in one thread; only the blocks may be compiled.

    All ranks of ``dim`` must create the stages and call :meth:`install`, with the same weights. This frees no weights:
    see :func:`free_others`. The blocks of other stages may be on the meta device. The parameters do not require
    gradients until :func:`gather_stages` undoes the change.

    Args:
        blocks: The blocks of the model, in the order in which they run.
        dim: The mesh dim ``pipe``.
        require_equal: Called with the arguments of each call by name, except inside
            :func:`~para_core.distributed.agree.inputs_verified`; raises if they differ between ranks. None skips
            the comparison.

    Raises:
        ValueError: If there are fewer blocks than stages.
    """

    def __init__(
        self, module: nn.Module, blocks: Sequence[StagedBlock], dim: MeshDim, require_equal: RequireEqual | None
    ) -> None:
        self.module, self.blocks, self.dim, self.require_equal = module, list(blocks), dim, require_equal
        self.ranges = balanced([staged.cost for staged in blocks], dim.size)
        self.own = self.ranges[dim.index]
        # True while the caller has already verified that all ranks pass equal arguments.
        self.inputs_verified = False
        # Whether the output of a call is sent to every rank. PipeFusion sets this to False for calls on patches.
        self.whole = True
        # Whether free_others() was called.
        self.freed = False
        self.gradients = Gradients()
        self._parameters = parameters_of(module)
        last = dim.size - 1
        self.links = Links(dim, [*[(i, i + 1) for i in range(last)], *[(last, i) for i in range(last)]])

    def owner(self, index: int) -> int:
        """Return the index of the stage that computes block ``index``."""
        return next(stage for stage, own in enumerate(self.ranges) if index in own)

    def install(self) -> None:
        """Wrap the model, the blocks of other stages, and, except on the first stage, the first block of this stage."""
        fill_slot(self.module, Slot.STAGES, {"__call__": self.run}, owner=self)
        # Blocks with equal functions share one, and so a graph.
        around_of = cache(_Around)
        for index, staged in enumerate(self.blocks):
            instead: _Instead | None = self._sent if index == self.own.stop else None
            if index == self.own.start and self.dim.index > 0:
                instead = self._received
            if instead is not None or index not in self.own:
                around = around_of(instead, staged.streams, parameters_of(staged.block))
                fill_slot(staged.block, Slot.STAGED_BLOCK, {"__call__": around})
        self.gradients.stop(self.module)

    def run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model, and return the last stage's output on every rank. If :attr:`whole` is False, return
        this rank's own output instead. Raise ``RuntimeError`` if the model was compiled as a whole.
        """
        if torch.compiler.is_compiling() or is_compiled(module):
            raise RuntimeError(
                f"a {original_class(module).__name__} in stages was compiled as a whole, and a graph cannot wait for "
                "another stage. Compile its blocks: transformer.compile_repeated_blocks(fullgraph=True)."
            )
        if self.require_equal is not None and not self.inputs_verified:
            self.require_equal({**dict(zip(self._parameters, args, strict=False)), **kwargs})
        if not self.inputs_verified:
            self.links.begin()
        if not self.whole:
            return call(module, *args, **kwargs)
        try:
            output = self.on_all_from(self.dim.size - 1, call(module, *args, **kwargs))
        except BaseException:
            self.links.mark_broken()
            raise
        self.links.drain()
        return output

    def on_all(self, block: nn.Module, output: Any) -> Any:
        """Return the ``output`` of ``block`` on every stage."""
        # A cache may skip all blocks of this stage, so allow the call to end without an intercepted attention call.
        attention_is_skipped(self.module)
        index = next(index for index, staged in enumerate(self.blocks) if staged.block is block)
        return self.on_all_from(self.owner(index), output)

    def on_all_from(self, stage: int, tree: Any) -> Any:
        """Return ``tree`` with the tensors that it has on ``stage``, which sends them to all other stages."""
        return pytree.tree_map_only(Tensor, lambda x: self.links.from_rank(x, stage), tree)

    def _received(self, inputs: list[Any], compute: Callable[[list[Any]], Any]) -> Any:
        """Run the first block of this stage with tokens from the previous stage, of the shapes of ``inputs``."""
        arriving = [None if x is None else self.links.receive(x, self.dim.index - 1) for x in inputs]
        return compute([None if transfer is None else transfer.wait() for transfer in arriving])

    def _sent(self, inputs: list[Any], compute: Callable[[list[Any]], Any]) -> Any:
        """Send ``inputs`` to the next stage, whose first block takes them. Return None: the block does not run here."""
        for x in inputs:
            if x is not None:
                self.links.send(x, self.dim.index + 1)
        return None


# A function instead(values, compute) that may replace a block. ``values`` are the block's token streams, and
# compute(other_values) runs the block on other ones. If the result is None, the block's inputs are its output.
_Instead = Callable[[list[Any], Callable[[list[Any]], Any]], Any]


class _Around:
    """A wrapper of blocks that returns ``instead(inputs, compute)``, or the block's inputs if that is None or missing.

    ``streams`` are the names of the block's token streams, ``parameters`` those of all parameters of its ``forward``.
    """

    def __init__(self, instead: _Instead | None, streams: tuple[str, ...], parameters: tuple[str, ...]) -> None:
        self._instead, self._streams, self._parameters = instead, streams, parameters

    def __call__(self, call: Callable[..., Any], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        indices = [self._parameters.index(name) for name in self._streams]
        inputs = [
            args[index] if index < len(args) else kwargs.get(name)
            for index, name in zip(indices, self._streams, strict=True)
        ]

        def compute(values: list[Any]) -> Any:
            positional, named = list(args), dict(kwargs)
            for index, name, value in zip(indices, self._streams, values, strict=True):
                if index < len(positional):
                    positional[index] = value
                elif name in named:
                    named[name] = value
            return call(block, *positional, **named)

        output = None if self._instead is None else self._instead(inputs, compute)
        if output is not None:
            return output
        return inputs[0] if len(inputs) == 1 else tuple(inputs)


def free_others(stages: Stages) -> None:
    """Move the weights of other stages' blocks to the meta device, also those that were added since the last call."""
    stages.freed = True
    stages.gradients.stop(stages.module)
    for block in others(stages):
        for weight, owners in weights_of(block):
            if weight.is_meta:
                continue
            stand_in = weight.detach().to("meta")
            if isinstance(weight, nn.Parameter):
                stand_in = nn.Parameter(stand_in, requires_grad=False)
            put_weight(owners, stand_in)


def others(stages: Stages) -> list[nn.Module]:
    """Return the blocks that other stages compute."""
    return [staged.block for index, staged in enumerate(stages.blocks) if index not in stages.own]


def require_sendable(module: nn.Module, blocks: Sequence[StagedBlock]) -> None:
    """Raise ``ValueError`` if a weight of ``blocks`` neither is a plain tensor nor consists of plain tensors.

    If a weight is still sharded (it is gathered before the stages start), only this rank's part of it is examined.
    """
    names = {id(x): name for name, x in module.named_parameters()}
    for staged in blocks:
        for weight, _ in weights_of(staged.block):
            part = weight.to_local() if isinstance(weight, DTensor) else weight
            if not all(map(is_plain_weight, plain_tensors(part))):
                raise ValueError(
                    f"{names.get(id(weight), 'a buffer')} of this {original_class(module).__name__} is a "
                    f"{type(part).__name__}, a class without __tensor_flatten__. A stage can give back only plain "
                    "tensors and classes that list theirs by that method. Use unquantized weights, or those of "
                    "torchao; or a mesh without 'pipe'."
                )


def stages_of(module: nn.Module) -> Stages | None:
    """Return the :class:`Stages` that are installed on ``module``; None without stages."""
    return slot_owner(module, Slot.STAGES, Stages)


def gather_stages(module: nn.Module) -> None:
    """Remove the stages of ``module``, if any: the rank that owns a block sends its weights to those that freed them.

    Collective over the mesh dim ``pipe``. Raise ``RuntimeError`` if blocks were freed, and cannot be received because
    the process group was destroyed.
    """
    stages = stages_of(module)
    if stages is None:
        return
    if stages.freed:
        _gather_weights(stages)
    empty_slots([staged.block for staged in stages.blocks], Slot.STAGED_BLOCK)
    empty_slot(module, Slot.STAGES)
    stages.gradients.restore()


def _gather_weights(stages: Stages) -> None:
    if not torch.distributed.is_initialized() or not is_registered(stages.dim.group):
        raise RuntimeError(
            f"this {original_class(stages.module).__name__} holds blocks {stages.own.start} to {stages.own.stop - 1} "
            f"of {len(stages.blocks)}; the other stages have the rest, and their process group was destroyed. Load the "
            "pipeline again: from_pretrained(...)."
        )
    # Synchronise the links, because a failed generation may have left messages in flight.
    stages.links.begin()
    # The blocks of this stage may have no weights; the layers around them, which every rank has, then tell the device.
    own = [stages.blocks[index].block for index in stages.own]
    weights = (x for module in (*own, stages.module) for x, _ in weights_of(module))
    device = next((x.device for x in weights if not x.is_meta), torch.device("cpu"))
    for index, staged in enumerate(stages.blocks):
        owner = stages.owner(index)

        def sent(x: Tensor, owner: int = owner) -> Tensor:
            # Use empty_like, which keeps the strides of the owner's weight: with other strides a kernel may sum in
            # another order.
            whole = torch.empty_like(x, device=device) if owner != stages.dim.index else x
            arrived = stages.links.from_rank(whole, owner)
            return whole if owner == stages.dim.index else whole.copy_(arrived)

        for weight, owners in weights_of(staged.block):
            whole = map_plain_tensors(sent, weight.detach())
            if owner != stages.dim.index:
                # Keep requires_grad, because peft enables it for the active adapter, even for weights on the meta
                # device.
                if isinstance(weight, nn.Parameter):
                    whole = nn.Parameter(whole, requires_grad=weight.requires_grad)
                put_weight(owners, whole)
    stages.freed = False
