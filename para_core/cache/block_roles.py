"""The roles of a model's transformer blocks for a cache: which it skips, and where it decides and forecasts.

:mod:`.block_cache` asks for the roles once, :mod:`.block_run` and :mod:`.graph` act on them at each call.
Tests: tests/cache/test_options.py, tests/cache/test_dataclass_streams.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cache.blocks import BlockGroup, CachedBlocks
from para_core.cache.streams import (
    StreamValues,
    as_output_tuple,
    fields_of_stream,
    shape_error,
    shapes_of,
    with_field,
)
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.plans.module_matching import parameters_of
from para_core.torch_internals import SUBMODULES


@dataclass(frozen=True)
class BlockRole:
    """The part that a block plays for the cache. Blocks with equal roles share a hook, and therefore a
    compiled graph, so the hook may depend on nothing else of the block.

    ``streams``, ``measured``, ``chained`` and ``samples`` are the settings of the :class:`BlockGroup` with
    index ``group``.

    Args:
        parameters: Names of the parameters of the block's ``forward``.
        opens: Whether this is block 0 of the model, whose input is recorded to compute the first-block
            residual.
        decides: Whether the cache decides after this block to skip or compute the rest.
        enters, exits: Whether this is the first (last) block of its group that may be skipped. After the last
            one the residual of the group is stored or added.
        skipped: Whether the cache may skip this block.
        is_inner: Whether the cache does nothing at this block but skip it.
        stream_parameters: The names of the parameters that hold streams, in the order in which the block
            returns them, and their indices among ``parameters``.
        streams_are_parameters: Whether each stream is a parameter, not a field of a dataclass.
        measured_index: The index of ``measured`` among ``streams``.
    """

    group: int
    streams: tuple[str, ...]
    parameters: tuple[str, ...]
    measured: str
    opens: bool
    decides: bool
    enters: bool
    skipped: bool
    exits: bool
    chained: bool
    samples: int
    is_inner: bool = field(init=False, compare=False)
    stream_parameters: tuple[tuple[str, int], ...] = field(init=False, compare=False)
    streams_are_parameters: bool = field(init=False, compare=False)
    measured_index: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        names = tuple(dict.fromkeys([name.partition(".")[0] for name in self.streams]))
        indices = tuple([(name, self.parameters.index(name)) for name in names])
        object.__setattr__(self, "is_inner", self.skipped and not (self.enters or self.exits))
        object.__setattr__(self, "stream_parameters", indices)
        object.__setattr__(self, "streams_are_parameters", names == self.streams)
        object.__setattr__(self, "measured_index", self.streams.index(self.measured))

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> StreamValues:
        """Return the streams that are passed to a call of the block.

        Raises:
            TypeError: A stream is not a tensor, or a dataclass that holds tensors.
        """
        arguments: dict[str, Any] = {}
        are_plain = self.streams_are_parameters
        for name, index in self.stream_parameters:
            value = kwargs.get(name)
            if value is None and index < len(args):
                value = args[index]
            if value is not None and not isinstance(value, Tensor):
                are_plain = False
            arguments[name] = value
        if are_plain:
            return StreamValues(arguments, tuple(arguments.values()), True)
        return StreamValues(arguments, self._tensors(arguments), False)

    def pass_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the streams that are passed to a call of the block, as a block returns them that changes
        none.

        This is ``as_output(inputs, inputs.tensors)`` for the inputs that :meth:`read` returns, in one Python
        call, because most blocks of a skipped step only pass their inputs on.
        """
        values: list[Any] = []
        for name, index in self.stream_parameters:
            value = kwargs.get(name)
            if value is None and index < len(args):
                value = args[index]
            values.append(value)
        if len(values) == 1:
            return values[0]
        return tuple(values)

    def as_output(self, inputs: StreamValues, tensors: tuple[Any, ...]) -> Any:
        """Return ``tensors``, the new values of the streams ``inputs``, as a block returns them: one as a
        tensor, several as a tuple.

        A dataclass keeps its other fields, and those whose new value is None.
        """
        if inputs.are_plain:
            if len(tensors) == 1:
                return tensors[0]
            return tensors
        outputs = dict(inputs.arguments)
        remaining = list(tensors)
        for name in self.streams:
            parameter = name.partition(".")[0]
            for path, _ in fields_of_stream(name, self.streams, inputs.arguments):
                value = remaining.pop(0)
                if not path:
                    outputs[parameter] = value
                elif value is not None:
                    outputs[parameter] = with_field(outputs[parameter], path, value)
        if len(outputs) == 1:
            return next(iter(outputs.values()))
        return tuple(outputs.values())

    def find_changed(
        self, arguments: Mapping[str, Any], before: tuple[Any, ...], after: tuple[Any, ...]
    ) -> int:
        """Return the index of the measured tensor among the tensors of all streams, if streams are
        dataclasses.

        It is the first float tensor of the measured stream that the block changed: one that is another object
        in ``after`` than in ``before``.

        Raises:
            ValueError: The stream is a dataclass, and the block changed none of its float fields.
        """
        begin = 0
        for name in self.streams[: self.measured_index]:
            begin += len(fields_of_stream(name, self.streams, arguments))
        leaves = fields_of_stream(self.measured, self.streams, arguments)
        if len(leaves) == 1:
            return begin
        for index in range(begin, begin + len(leaves)):
            if after[index] is not before[index] and after[index].is_floating_point():
                return index
        parameter = self.measured.partition(".")[0]
        names = ", ".join([".".join((parameter, *path)) for path, _ in leaves])
        raise ValueError(
            f"BlockGroup(measured={self.measured!r}): the block returned it with no other float tensor in a field; "
            f"expected a change in one of {names}. Name a stream that the block changes."
        )

    def require_outputs(self, block: nn.Module, inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
        """Return the tensors of all streams in the block's ``output``.

        A block may broadcast one sample to a batch: the text of FLUX, if one negative prompt is given for
        several images. A graph needs the same shape whether a block is skipped or not, so there a block that
        may be skipped may not.

        Raises:
            ValueError: The block does not return one value for each parameter that holds streams, or the number
                or the shapes of the tensors in them differ from those of ``inputs``, the streams passed to it.
        """
        outputs: tuple[Any, ...] = output
        if isinstance(output, Tensor):
            outputs = (output,)
        elif not isinstance(output, tuple):
            outputs = as_output_tuple(output)
        # The usual case, in fewer Python calls. A graph is traced once, so there they do not count.
        if self.streams_are_parameters and len(outputs) == len(inputs) and not torch.compiler.is_compiling():
            for x, y in zip(inputs, outputs, strict=True):
                if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape):
                    break
            else:
                return outputs
        before = shapes_of(inputs)
        # As many tensors as streams are not enough: a skipped block would return the dataclass that holds them.
        if len(self.stream_parameters) != len(outputs):
            raise shape_error(original_class(block).__name__, self.streams, before, shapes_of(outputs))
        names = [name for name, _ in self.stream_parameters]
        outputs = self._tensors(dict(zip(names, outputs, strict=True)))
        after = shapes_of(outputs)
        broadcasts = not (self.skipped and torch.compiler.is_compiling())
        if len(before) != len(after) or not all(
            x is None or y is None or x == y or (broadcasts and self._is_broadcast(x, y))
            for x, y in zip(before, after, strict=True)
        ):
            raise shape_error(original_class(block).__name__, self.streams, before, after)
        return outputs

    def _tensors(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the tensors of all streams in ``arguments``, the values of :attr:`stream_parameters` by name."""
        tensors: list[Any] = []
        for name in self.streams:
            tensors += [x for _, x in fields_of_stream(name, self.streams, arguments)]
        return tuple(tensors)

    def _is_broadcast(self, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
        """Whether the shapes differ only in the number of samples, which was 1."""
        dim = self.samples
        others = [x[:dim] + x[dim + 1 :] for x in (before, after)]
        return len(before) == len(after) and others[0] == others[1] and before[dim : dim + 1] == (1,)


# A block of the model, the index of its group, and the group.
_StackItem = tuple[nn.Module, int, BlockGroup]


def roles_of(
    module: nn.Module, blocks: CachedBlocks, first_blocks: int = 1, last_blocks: int = 0
) -> list[tuple[nn.Module, BlockRole]]:
    """Return ``(block, role)`` for all blocks that need a hook, in the order in which they run.

    The ``first_blocks`` first and the ``last_blocks`` last blocks always run. Of these, only block 0 and the
    last one of the first blocks get a hook: the residual is measured between them. With ``first_blocks=0``
    the step is decided before block 0 runs.

    Raises:
        ValueError: The model does not have the blocks that ``blocks`` names, runs one of them several times, or
            no block would be skipped; or the first blocks are not all in the first group.
    """
    stack: list[_StackItem] = []
    for group_index, group in enumerate(blocks.groups):
        for name in group.lists:
            # Not children(), which lists a block once that runs several times.
            listed = submodules_on_path(module, name)[-1].values()
            stack += [(block, group_index, group) for block in listed if block is not None]
    if len({id(block) for block, _, _ in stack}) < len(stack):
        raise ValueError(
            f"{type(module).__name__} runs one block several times (some of the {len(stack)} in its lists are the same "
            "module), so a call of it does not tell which one of the step it is. Leave out the cache, or use copies of "
            "the block: copy.deepcopy(block)."
        )
    stop = len(stack) - last_blocks
    in_first_group = sum(group_index == 0 for _, group_index, _ in stack)
    if first_blocks >= stop:
        raise ValueError(
            f"{type(module).__name__} has {len(stack)} blocks; with first_blocks={first_blocks} and "
            f"last_blocks={last_blocks} none is left to skip. Choose fewer."
        )
    if first_blocks > in_first_group:
        raise ValueError(
            f"{type(module).__name__} has {in_first_group} blocks in its first group; expected at most as many "
            f"first_blocks, not {first_blocks}: their residual is the change of one stream, and other groups have "
            "other streams."
        )
    skipped_by_group: dict[int, list[int]] = {}
    for index in range(first_blocks, stop):
        skipped_by_group.setdefault(stack[index][1], []).append(index)
    roles = []
    for index, (block, group_index, group) in enumerate(stack):
        parameters = _require_parameters(block, group.streams)
        skipped = skipped_by_group.get(group_index, [])
        role = BlockRole(
            group=group_index,
            streams=group.streams,
            parameters=parameters,
            measured=group.measured,
            opens=index == 0,
            decides=index == first_blocks - 1,
            enters=index in skipped[:1],
            skipped=index in skipped,
            exits=index in skipped[-1:],
            chained=group.chained,
            samples=group.samples,
        )
        if role.opens or role.decides or role.skipped:
            roles.append((block, role))
    return roles


def _require_parameters(block: nn.Module, streams: Iterable[str]) -> tuple[str, ...]:
    """Return the parameters of ``block``. Raise ``ValueError`` if one of ``streams`` is not among them."""
    parameters = parameters_of(block)
    missing = [name for name in streams if name.partition(".")[0] not in parameters]
    if missing:
        raise ValueError(
            f"{type(block).__name__} has no parameter {missing[0]!r}; its forward takes {parameters}."
        )
    return parameters


def submodules_on_path(module: nn.Module, name: str) -> list[dict[str, nn.Module | None]]:
    """Return the submodules, by name, of ``module`` and of each module on the way to the module list ``name``;
    the last entry has those of the list. Each is the dict of the module itself, which changes if a submodule is
    replaced.

    A module that ``torch.compile`` has wrapped is represented by what is inside the wrapper.

    Raises:
        ValueError: There is no submodule of this name.
    """
    parts = name.split(".")
    paths = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
    try:
        return [uncompiled(module.get_submodule(path)).__dict__[SUBMODULES] for path in paths]
    except AttributeError:
        raise ValueError(
            f"{type(module).__name__} has no {name!r}, which the description of its blocks names. Name its module "
            "lists in BlockGroup(lists=...)."
        ) from None
