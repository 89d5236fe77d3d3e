"""Exact pipeline stages: each rank along the mesh dim ``pipe`` holds consecutive blocks of a model.

Each rank runs the model's own code, but blocks of other stages only return their inputs. The first block of a
stage replaces its inputs by the inputs that the previous stage sends. A rank that reaches the first block of
the next stage sends that block's inputs to the next stage. Every rank computes the layers before and after
the blocks, and the last stage sends its output to all ranks.

``adapters/weights/staged_transformer.py`` makes the stages of a pipeline's model; PipeFusion
(:mod:`.pipefusion`) runs patches over them. Tests: tests/weights/test_stages.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from para_core.dataclass_fields import leaves_of, map_leaves
from para_core.distributed.agreed_inputs import AgreeOnInputs
from para_core.distributed.mesh import MeshDim
from para_core.distributed.point_to_point import Links
from para_core.instance.modules import is_compiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, empty_slots, fill_slot
from para_core.instance.slots import Slot
from para_core.plans.current_call import allow_skipped_attention
from para_core.plans.module_matching import parameters_of
from para_core.plans.region import region_of
from para_core.weights.balance import split_by_cost
from para_core.weights.parameters import is_plain_weight, plain_tensors, put_weight, weights_of
from para_core.weights.stack import StackedBlock


class Stages:
    """The pipeline stages of a model. For inference in one thread; only the blocks may be compiled.

    Every block must return its streams with the shapes and dtypes of its inputs: a stage receives into
    buffers like the model's inputs of the first block, and no transfer tells what it carries, so nothing
    checks this.

    All ranks of ``dim`` must create the stages and call :meth:`install`, with the same weights. This frees no
    weights, and :meth:`remove` undoes it. :func:`free_other_blocks` frees the weights of the other stages for
    good.

    Args:
        module: The model, not compiled.
        blocks: The blocks of the model, in the order in which they run. Blocks of other stages may be freed
            already.
        dim: The mesh dim ``pipe``.
        agree_on_inputs: Called with the arguments of each call outside of a :meth:`generation`, by name;
            raises if they differ between ranks. Not called if ``module`` has a plan, which compares them
            itself. None skips the comparison.
        ranges: The indices of the blocks of each stage: :attr:`ranges` of earlier stages of ``module``, which
            keep their order and leave no block out. Defaults to a split into stages of equal cost.

    Raises:
        ValueError: If there are fewer blocks than stages.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[StackedBlock],
        dim: MeshDim,
        agree_on_inputs: AgreeOnInputs | None,
        ranges: Sequence[range] | None = None,
    ) -> None:
        self.module, self.blocks, self.dim, self.agree_on_inputs = module, list(blocks), dim, agree_on_inputs
        if ranges is None:
            ranges = split_by_cost([entry.cost for entry in blocks], dim.size)
        self.ranges = ranges
        self.block_range = self.ranges[dim.index]
        # Whether a generation() or own_output() is under way.
        self._in_generation, self._keeps_output = False, False
        self._parameters = parameters_of(module)
        last = dim.size - 1
        to_next_stage = [(index, index + 1) for index in range(last)]
        from_last_stage = [(last, index) for index in range(last)]
        self.links = Links(dim, [*to_next_stage, *from_last_stage])

    @property
    def other_blocks(self) -> list[nn.Module]:
        """The blocks that other stages compute."""
        return [entry.block for index, entry in enumerate(self.blocks) if index not in self.block_range]

    def stage_of_block(self, index: int) -> int:
        """Return the index of the stage that computes block ``index``."""
        return next(stage for stage, indices in enumerate(self.ranges) if index in indices)

    def install(self) -> None:
        """Wrap the model, the blocks of other stages, and, except on the first stage, the first block of this
        stage.
        """
        fill_slot(self.module, Slot.STAGES, {"__call__": self.run}, owner=self)
        # Blocks with equal wrappers share one, and so a class and a graph.
        wrapper_of = cache(_BlockWrapper)
        for index, entry in enumerate(self.blocks):
            replacement: _Replacement | None = None
            if index == self.block_range.stop:
                replacement = self._send
            elif index == self.block_range.start and self.dim.index > 0:
                replacement = self._receive
            if replacement is not None or index not in self.block_range:
                wrapper = wrapper_of(replacement, entry.streams, parameters_of(entry.block))
                fill_slot(entry.block, Slot.STAGED_BLOCK, {"__call__": wrapper})

    def remove(self) -> None:
        """Undo :meth:`install`."""
        empty_slots([entry.block for entry in self.blocks], Slot.STAGED_BLOCK)
        empty_slot(self.module, Slot.STAGES)

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Begin to send once for all calls of the model inside this context, and do not compare their inputs.

        The caller has verified that all ranks pass equal arguments. Collective over the stages.
        """
        self.links.begin()
        outer, self._in_generation = self._in_generation, True
        try:
            yield
        finally:
            self._in_generation = outer

    @contextmanager
    def own_output(self) -> Iterator[None]:
        """Inside this context, let a call of the model return this rank's own output, which is not sent.

        The caller marks the links as broken after an error, as :meth:`.pipefusion.Fusion.generation` does.
        """
        outer, self._keeps_output = self._keeps_output, True
        try:
            yield
        finally:
            self._keeps_output = outer

    def run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model, and return the last stage's output on every rank. Collective over the stages.

        Inside :meth:`own_output`, return this rank's own output instead. Raise ``RuntimeError`` if the model
        was compiled as a whole, or a gradient of an argument is needed.
        """
        if torch.compiler.is_compiling() or is_compiled(module):
            raise RuntimeError(
                f"a {original_class(module).__name__} in stages was compiled as a whole, and a graph cannot "
                "wait for another stage. Compile its blocks: "
                "transformer.compile_repeated_blocks(fullgraph=True)."
            )
        if torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in leaves_of((args, kwargs))
        ):
            raise RuntimeError(
                f"an argument of a {original_class(module).__name__} in stages requires a gradient, and none goes "
                "back to an earlier stage. Call it under torch.no_grad(), or use a mesh without 'pipe'."
            )
        if not self._in_generation:
            if self.agree_on_inputs is not None and region_of(module) is None:
                self.agree_on_inputs({**dict(zip(self._parameters, args, strict=False)), **kwargs})
            self.links.begin()
        if self._keeps_output:
            return call(module, *args, **kwargs)
        try:
            output = self.send_from_stage(self.dim.size - 1, call(module, *args, **kwargs))
        except BaseException:
            self.links.mark_broken()
            raise
        self.links.drain()
        return output

    def send_from_owner(self, block: nn.Module, output: Any) -> Any:
        """Return on every stage the ``output`` of ``block`` on the stage that computes it. Collective over the stages.

        Only a cache calls it (``cache/block_run.py``).
        """
        # A cache may skip all blocks of this stage, so allow the call to end without an intercepted attention
        # call.
        allow_skipped_attention(self.module)
        index = next(index for index, entry in enumerate(self.blocks) if entry.block is block)
        return self.send_from_stage(self.stage_of_block(index), output)

    def send_from_stage(self, stage: int, tree: Any) -> Any:
        """Return ``tree`` with the tensors that it has on ``stage``, which sends them to all other stages.

        Collective: all stages must call this, with tensors of equal shapes. Tensors in dataclasses, tuples,
        lists and dicts are found, those in other objects are not.
        """

        def send(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.links.broadcast_from(leaf, stage)
            return leaf

        # Not pytree.tree_map_only: to it a dataclass is one leaf, so each stage would keep its own tensors.
        return map_leaves(send, tree)

    def _receive(self, inputs: list[Any], compute: Callable[[list[Any]], Any]) -> Any:
        """Run the first block of this stage with tokens from the previous stage, of the shapes of ``inputs``."""
        # Start all transfers before waiting for one. A stream that is None is not sent.
        values: list[Any] = [None] * len(inputs)
        transfers = {
            i: self.links.receive(x, self.dim.index - 1) for i, x in enumerate(inputs) if x is not None
        }
        for i, transfer in transfers.items():
            values[i] = transfer.wait()
        return compute(values)

    def _send(self, inputs: list[Any], compute: Callable[[list[Any]], Any]) -> Any:
        """Send ``inputs`` to the next stage, whose first block takes them.

        Return None: the block does not run here.
        """
        for x in inputs:
            if x is not None:
                self.links.send(x, self.dim.index + 1)
        return None


# A function replacement(values, compute) that may replace a block. ``values`` are the block's token streams,
# and compute(other_values) runs the block on other ones. If the result is None, the block's inputs are its
# output.
_Replacement = Callable[[list[Any], Callable[[list[Any]], Any]], Any]


class _BlockWrapper:
    """A wrapper of blocks that returns ``replacement(inputs, compute)``, or the block's inputs if that is
    None or missing.

    ``streams`` are the names of the block's token streams, ``parameters`` those of all parameters of its
    ``forward``.
    """

    def __init__(
        self, replacement: _Replacement | None, streams: tuple[str, ...], parameters: tuple[str, ...]
    ) -> None:
        self._replacement, self._streams, self._parameters = replacement, streams, parameters

    def __call__(self, call: Callable[..., Any], block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        indices = [self._parameters.index(name) for name in self._streams]
        inputs = [
            args[index] if index < len(args) else kwargs.get(name)
            for index, name in zip(indices, self._streams, strict=True)
        ]

        def compute(values: list[Any]) -> Any:
            positional, named = list(args), dict(kwargs)
            # A stream that the call leaves out has no place here: its input is None, so its value is None
            # too.
            for index, name, value in zip(indices, self._streams, values, strict=True):
                if index < len(positional):
                    positional[index] = value
                elif name in named:
                    named[name] = value
            return call(block, *positional, **named)

        output = None
        if self._replacement is not None:
            output = self._replacement(inputs, compute)
        if output is not None:
            return output
        if len(inputs) == 1:
            return inputs[0]
        return tuple(inputs)


def free_other_blocks(stages: Stages) -> None:
    """Move the weights of other stages' blocks to the meta device, also those that were added since the last
    call.

    Nothing undoes this: only the stage that computes a block still has its weights. From then on the
    parameters of the model do not require gradients.
    """
    stages.module.requires_grad_(False)
    for block in stages.other_blocks:
        for weight, owners in weights_of(block):
            if weight.is_meta:
                continue
            freed = weight.detach().to("meta")
            if isinstance(weight, nn.Parameter):
                freed = nn.Parameter(freed, requires_grad=False)
            put_weight(owners, freed)


def check_freeable(module: nn.Module, blocks: Sequence[StackedBlock]) -> None:
    """Raise ``ValueError`` if a weight of ``blocks`` is neither a plain tensor nor a class that lists its
    tensors.
    """
    names = {id(x): name for name, x in module.named_parameters()}
    for entry in blocks:
        for weight, _ in weights_of(entry.block):
            part = weight
            if isinstance(weight, DTensor):
                part = weight.to_local()
            if not all(map(is_plain_weight, plain_tensors(part))):
                raise ValueError(
                    f"{names.get(id(weight), 'a buffer')} of this {original_class(module).__name__} is a "
                    f"{type(part).__name__}, a class without __tensor_flatten__. A stage frees the blocks of "
                    "others, and knows only plain tensors and classes that list theirs by that method. Use "
                    "unquantized weights, or those of torchao; or a mesh without 'pipe'."
                )
