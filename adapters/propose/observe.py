"""Observe one model call on one device: what its blocks receive and return, and its attention calls.

``propose.py``, ``gathered_modules.py`` and ``stack.py`` call :func:`observe`. The events are those of
``para_core/recorder``; the record is described in ``records.py``. Tests:
tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from para_core.adapters.propose.records import (
    BlockMaskRecord,
    ModuleCall,
    ObservedAttention,
    ObservedCall,
    ObservedSoftmax,
    TensorRecord,
)
from para_core.adapters.propose.sources import Sources
from para_core.comparison.virtual_ranks import copy_containers
from para_core.dataclass_fields import by_path, fields_of, has_fields, leaves_of, map_leaves
from para_core.instance.private_class import original_class
from para_core.plans.module_matching import parameters_of
from para_core.recorder.events import AttentionStart, Event, FunctionCall, ModuleEnd, ModuleStart
from para_core.recorder.recorder import Recorder
from para_core.torch_internals import owner_of, tree_leaves, tree_map

_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


def observe(
    module: nn.Module,
    inputs: Mapping[str, Any],
    start: str | None = None,
    streams: Sequence[str] = (),
    inside: str | None = None,
) -> ObservedCall:
    """Call ``module(**inputs)`` without gradients and return the record of the call.

    Args:
        module: The model. The caller forces compiled code, such as flex_attention, to run in eager mode.
        inputs: The arguments, by name.
        start: Name of a block whose arguments ``streams`` are marked: tensors computed from them are
            ``derived``.
        streams: Names of these arguments.
        inside: Name of a submodule whose calls are recorded inside a block, too.

    Raises:
        Exception: The error of the model.
    """
    observer = _CallObserver(module, inputs, streams, inside)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(Recorder(observer.note).watch(module))
        if start is not None:
            # The recorder's own hook on this module runs before, so it records the arguments that are not
            # marked yet.
            hook = module.get_submodule(start).register_forward_pre_hook(
                observer.mark_streams, with_kwargs=True
            )
            stack.callback(hook.remove)
        output = module(**copy_containers(inputs))
    observer.note_output(output)
    return _without_lists_of_no_blocks(module, observer.observed)


def _without_lists_of_no_blocks(module: nn.Module, observed: ObservedCall) -> ObservedCall:
    """Return ``observed`` without the calls in an ``nn.Sequential`` that calls no attention: it has no
    blocks.
    """
    dropped = set()
    for name, container in block_lists(module).items():
        attends = any(observed.attends([call]) for call in observed.calls_in_list(name))
        if isinstance(container, nn.Sequential) and not attends:
            dropped.add(name)
    return replace(observed, calls=[call for call in observed.calls if call.block_list not in dropped])


def block_lists(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost containers of blocks in ``module``, by name.

    These are module lists, except lists of lists, which are never called, and ``nn.Sequential`` of modules of
    one class. ``module`` itself is none of them, because the names in a plan begin with that of the container.
    """
    containers: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules():
        if name and _has_blocks(submodule) and not any(name.startswith(f"{outer}.") for outer in containers):
            containers[name] = submodule
    return containers


def _has_blocks(container: nn.Module) -> bool:
    """Whether ``container`` is a module list, not one of lists, or an ``nn.Sequential`` of equal modules."""
    blocks = [*container.children()]
    if isinstance(container, nn.Sequential):
        # Modules without children, such as activations and convolutions, are no blocks.
        return len({original_class(block) for block in blocks}) == 1 and bool([*blocks[0].children()])
    is_list_of_lists = any(isinstance(block, nn.ModuleList) for block in blocks)
    return isinstance(container, nn.ModuleList) and not is_list_of_lists


def _block_list_by_module(module: nn.Module) -> dict[int, str]:
    """Return the name of the container of each block of ``module``, by the block's id."""
    names: dict[int, str] = {}
    for name, container in block_lists(module).items():
        for block in container.children():
            names.setdefault(id(block), name)
    return names


@dataclass(frozen=True)
class _RunningCall:
    """A module that is running. ``arguments`` are None if its call is not recorded."""

    name: str
    block_list: str | None
    began: int
    arguments: dict[str, Any] | None


class _CallObserver:
    """Makes the record of a model call from its events."""

    def __init__(
        self, module: nn.Module, inputs: Mapping[str, Any], streams: Sequence[str], inside: str | None
    ) -> None:
        self.observed = ObservedCall()
        self._streams, self._inside = streams, inside
        self._block_lists = _block_list_by_module(module)
        inputs = by_path(inputs)
        self._input_names = {id(x): name for name, value in inputs.items() for x in tree_leaves(value)}
        self._sources = Sources(inputs)
        # Keep every recorded value alive: the id of a freed tensor could be given to another one.
        self._alive: list[Any] = []
        self._running: list[_RunningCall] = []
        self.observed.inputs = {name: self._record(value) for name, value in inputs.items()}

    def note(self, event: Event) -> None:
        """Add ``event`` to the record."""
        match event:
            case ModuleStart():
                self._note_start(event)
            case ModuleEnd():
                self._note_end(event)
            case AttentionStart():
                self._note_attention(event)
            case FunctionCall():
                self._note_function(event)

    def note_output(self, output: Any) -> None:
        """Note from which softmaxes the ``output`` of the model was computed."""
        used = self._sources.sources_of(x for x in leaves_of(output) if isinstance(x, Tensor))
        softmaxes = enumerate(self.observed.softmaxes)
        self.observed.softmaxes = [replace(softmax, is_used=index in used) for index, softmax in softmaxes]

    def mark_streams(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Mark the streams among the arguments of the start as derived, and return the arguments to be used.

        A block may pass on the other fields of a dataclass, which a plan shards only here. Tensors in
        dataclasses are therefore replaced by views, and all of these are marked, but not the tensors that the
        model itself holds.
        """
        parameters = parameters_of(module)
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        flat = by_path(arguments)
        # A later call of this block may leave out a stream.
        streams = {name: flat[name] for name in self._streams if isinstance(flat.get(name), Tensor)}
        self.observed.sources |= self._sources.arguments_of(streams.values())
        for name, stream in streams.items():
            if name in arguments:
                self._sources.mark(stream, self._sources.sources_of([stream]))
        marked = {name: self._mark_fields(value) for name, value in arguments.items()}
        positional = [marked[name] for name, _ in zip(parameters, args, strict=False)]
        return (*positional, *args[len(positional) :]), {name: marked[name] for name in kwargs}

    def _mark_fields(self, value: Any) -> Any:
        """Return ``value``, if it is a dataclass with marked views of its tensors."""
        if not has_fields(value):
            return value

        def mark(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            view = leaf.view_as(leaf)
            self._sources.mark(view, self._sources.sources_of([leaf]))
            return view

        return map_leaves(mark, value)

    def _note_start(self, event: ModuleStart) -> None:
        """Note that a module runs, with its arguments if its call may be recorded: not inside a block, but for one."""
        block_list = self._block_lists.get(id(event.module))
        in_block = any(call.block_list is not None for call in self._running)
        arguments = None
        if event.name and (block_list is not None or not in_block or event.name == self._inside):
            named = zip(parameters_of(event.module), event.args, strict=False)
            flat = by_path({**dict(named), **event.kwargs})
            arguments = {name: self._record(value) for name, value in flat.items()}
        self._running.append(_RunningCall(event.name, block_list, event.time, arguments))

    def _note_end(self, event: ModuleEnd) -> None:
        """Add the call of a block, of a child of the model, or of a module that attends, to the record."""
        call = self._running.pop()
        while call.name != event.name:  # A module that raised an error, which this one has caught.
            call = self._running.pop()
        if call.arguments is None:
            return
        attention = self.observed.attention
        attends = bool(attention) and attention[-1].time > call.began
        is_child_of_model = not self._running[-1].name
        if call.block_list is None and not (is_child_of_model or attends or call.name == self._inside):
            return
        output = event.output
        if has_fields(output):
            output = [output]  # A dataclass or named tuple counts as the only entry.
        self.observed.calls.append(
            ModuleCall(
                name=call.name,
                block_list=call.block_list,
                began=call.began,
                ended=event.time,
                arguments=call.arguments,
                output=self._record(output),
            )
        )

    def _note_attention(self, event: AttentionStart) -> None:
        mask = event.call.attn_mask
        self.observed.attention.append(
            ObservedAttention(
                name=event.name,
                time=event.time,
                queries=event.call.query.shape[-2],
                keys=event.call.key.shape[-2],
                mask=None if mask is None else tuple(mask.shape),
            )
        )

    def _note_function(self, event: FunctionCall) -> None:
        """Set the sources of the output from those of the operands, and note softmaxes and joined inputs."""
        operands = [x for x in tree_leaves((event.args, event.kwargs)) if isinstance(x, Tensor)]
        sources = self._sources.sources_of(operands)
        is_derived = self._sources.is_derived(*operands)
        if event.function in _SOFTMAX and operands and operands[0].ndim >= 3:
            sources |= {self._note_softmax(event, operands[0])}
        output = event.output
        if event.function is Tensor.__setitem__:
            output = event.args[0]  # An assignment to a part of a tensor returns None.
        self._sources.set(output, sources)
        if any(output is x for x in operands) and _writes(event):
            # A write to a view is one to its base, and the model may make other views of the base.
            base = owner_of(output)
            self._sources.set(base, sources | self._sources.sources_of([base]))
        if is_derived and not event.name:
            names = [self._input_names[id(x)] for x in operands if id(x) in self._input_names]
            self.observed.joined_inputs.update(names)

    def _note_softmax(self, event: FunctionCall, x: Tensor) -> int:
        """Record a softmax of ``x``, and return its index."""
        derived = self._sources.is_derived(x)
        softmaxes = self.observed.softmaxes
        softmaxes.append(ObservedSoftmax(event.name, event.time, tuple(x.shape), derived))
        return len(softmaxes) - 1

    def _record(self, value: Any) -> Any:
        """Return ``value`` with records in place of its tensors, masks and dataclasses, as in ``records.py``."""
        self._alive.append(value)
        return tree_map(self._record_leaf, value)

    def _record_leaf(self, x: Any) -> Any:
        if has_fields(x):
            return {name: tree_map(self._record_leaf, field) for name, field in fields_of(x).items()}
        if isinstance(x, BlockMask):
            tensors = [part for part in x.as_tuple() if isinstance(part, Tensor)]
            queries, keys = x.seq_lengths
            return BlockMaskRecord((queries, keys), id(x), self._sources.is_derived(*tensors))
        if not isinstance(x, Tensor):
            return x
        # Two integers may be the cumulative lengths (0, tokens) of a sequence.
        values: tuple[int, ...] = ()
        if x.shape == (2,) and x.dtype in (torch.int32, torch.int64):
            values = tuple(x.tolist())
        return TensorRecord(tuple(x.shape), x.dtype, id(x), self._sources.is_derived(x), values)


def _writes(event: FunctionCall) -> bool:
    """Whether a function that returns one of its operands writes to it, unlike ``contiguous``."""
    return getattr(event.function, "__name__", "").endswith("_") or "out" in event.kwargs
