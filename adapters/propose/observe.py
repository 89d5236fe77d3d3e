"""Observe one model call on one device: what its blocks receive and return, and its attention calls.

For a model that accepts one size only, :func:`imagined_larger` makes up a call with one more token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.attention.sdpa_call import SdpaCall, raise_here
from para_core.dataclass_fields import by_path, fields_of, has_fields, leaves_of, map_leaves
from para_core.instance.private_class import original_class
from para_core.modes.flash_attention import flash_attention, is_flash_attention
from para_core.modes.foreign_operators import OPERATOR_TYPES
from para_core.modes.multi_head import multi_head_attention
from para_core.plans.module_matching import parameters_of
from para_core.torch_internals import flex_attention_operator, tree_leaves, tree_map
from para_core.verify.virtual_ranks import fresh


@dataclass(frozen=True)
class TensorRecord:
    """Record of a tensor. ``identity`` is unique within the call; ``derived`` says if a marked one gave rise to it.

    ``values`` are those of two integers, which may be the cumulative lengths of a sequence.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: int
    derived: bool
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class MaskRecord:
    """Record of a flex-attention ``BlockMask``: its numbers of queries and keys. The rest is as in a TensorRecord."""

    lengths: tuple[int, int]
    identity: int
    derived: bool


def tensors_of(value: Any) -> list[TensorRecord]:
    """Return the tensor records in nested lists, tuples and mappings, in order."""
    if isinstance(value, TensorRecord):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [record for item in value for record in tensors_of(item)] if isinstance(value, (list, tuple)) else []


def output_tensors(output: Any) -> list[tuple[int, str, TensorRecord]]:
    """Return the tensor records of a module's output, each with its index and, in a dataclass, the path of its field.

    Tensors in a list inside the output are left out, because a plan cannot name them.
    """
    if isinstance(output, Mapping):
        output = list(output.values())
    entries = enumerate(output) if isinstance(output, (list, tuple)) else [(0, output)]
    return [(index, path, record) for index, entry in entries for path, record in _fields_with_tensors(entry, ())]


def _fields_with_tensors(value: Any, path: tuple[str, ...]) -> list[tuple[str, TensorRecord]]:
    if isinstance(value, TensorRecord):
        return [(".".join(path), value)]
    if not isinstance(value, Mapping):
        return []
    return [found for name, field in value.items() for found in _fields_with_tensors(field, (*path, str(name)))]


@dataclass(frozen=True)
class ModuleCall:
    """A call of a block, of a direct submodule of the model, or of a module outside the blocks that calls attention.

    ``block_list`` is the name of the container that holds the block, or None. ``began`` and ``ended`` are times,
    counted in observed events. ``arguments``, by name, and ``output`` have a :class:`TensorRecord` for each tensor, and
    a :class:`MaskRecord` for each ``BlockMask``. A field of a dataclass is an argument of its own, named by its path.
    In ``output`` a dataclass is a dict of its fields.
    """

    name: str
    block_list: str | None
    began: int
    ended: int
    arguments: Mapping[str, Any]
    output: Any


@dataclass(frozen=True)
class ObservedAttention:
    """A call of scaled_dot_product_attention in module ``name``: number of queries and keys, and the mask's shape.

    A call of flex_attention is recorded without a mask, because a plan shards a ``BlockMask`` as an argument.
    """

    name: str
    time: int
    queries: int
    keys: int
    mask: tuple[int, ...] | None


@dataclass(frozen=True)
class ObservedSoftmax:
    """A softmax of a tensor of ``shape``, with 3 or more dims, in module ``name``, as handwritten attention has it.

    ``derived`` is that of its input. ``is_used`` says whether the output of the model was computed from it.
    """

    name: str
    time: int
    shape: tuple[int, ...]
    derived: bool
    is_used: bool = False


@dataclass
class ObservedCall:
    """Record of one call of a model, in the order of time.

    ``joined_inputs`` are the arguments that the model itself, outside of submodules, combines with derived tensors, and
    ``sources`` those from which the marked ones (``streams`` of :func:`observe`) were computed.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    attention: list[ObservedAttention] = field(default_factory=list)
    joined_inputs: set[str] = field(default_factory=set)
    softmaxes: list[ObservedSoftmax] = field(default_factory=list)
    sources: frozenset[str] = frozenset()

    def of_list(self, name: str) -> list[ModuleCall]:
        return [call for call in self.calls if call.block_list == name]

    def attends(self, began: int, ended: int) -> bool:
        """Whether attention was called between the times ``began`` and ``ended``."""
        return any(began < attention.time < ended for attention in self.attention)


def block_lists(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost containers of blocks in ``module``, by name.

    These are module lists, except lists of lists, which are never called, and ``nn.Sequential`` of modules of one
    class.
    """
    containers: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules():
        blocks = [*submodule.children()]
        if isinstance(submodule, nn.Sequential):
            # Modules without children, such as activations and convolutions, are no blocks.
            has_blocks = len({original_class(block) for block in blocks}) == 1 and bool([*blocks[0].children()])
        else:
            is_list_of_lists = any(isinstance(block, nn.ModuleList) for block in blocks)
            has_blocks = isinstance(submodule, nn.ModuleList) and not is_list_of_lists
        if has_blocks and not any(name.startswith(f"{outer}.") for outer in containers):
            containers[name] = submodule
    return containers


_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
# Marks a tensor as derived, among the names of the model arguments from which it was computed.
_DERIVED = ""


class _CallObserver(TorchFunctionMode):
    def __init__(
        self, inputs: Mapping[str, Any], start: str | None, streams: Sequence[str], inside: str | None = None
    ) -> None:
        super().__init__()
        self.observed = ObservedCall()
        self._start, self._streams, self._inside = start, streams, inside
        inputs = by_path(inputs)
        self._input_names = {id(x): name for name, value in inputs.items() for x in tree_leaves(value)}
        # For each tensor: names of the model arguments, and indices of the softmaxes, from which it was computed, and
        # _DERIVED if it is derived.
        self._sources = WeakTensorKeyDictionary()
        for name, value in inputs.items():
            self._set_sources(value, frozenset([name]))
        # Keep every recorded value alive: the id of a freed tensor could be given to another one.
        self._alive: list[Any] = []
        # Names of the modules that are running, the innermost one last. The model itself is named "".
        self._module_names = [""]
        self._num_running_blocks = 0
        self._time = 0
        self.observed.inputs = {name: self._record(value) for name, value in inputs.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._record_attention(SdpaCall(*args, **kwargs))
        elif func is flex_attention_operator:
            self._record_attention(SdpaCall(*args[:3]))
        out: Any
        if func is F.multi_head_attention_forward:
            # Compute this function's attention through the observer: torch function modes are off inside an intercepted
            # function, so the observer would not see the attention call.
            out = multi_head_attention(self._attend, *args, **kwargs)
        elif type(func) in OPERATOR_TYPES and is_flash_attention(func):
            out = flash_attention(self._attend, raise_here, func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        sources = self._sources_of(operands)
        if func in _SOFTMAX and operands and operands[0].ndim >= 3:
            sources |= {self._record_softmax(operands[0])}
        # An assignment to a part of a tensor returns None.
        self._set_sources(args[0] if func is Tensor.__setitem__ else out, sources)
        if _DERIVED in sources and not self._module_names[-1]:
            names = [self._input_names[id(x)] for x in operands if id(x) in self._input_names]
            self.observed.joined_inputs.update(names)
        return out

    def _set_sources(self, value: Any, names: frozenset[str | int]) -> None:
        if names:
            for x in leaves_of(value):
                if isinstance(x, Tensor):
                    self._sources[x] = names

    def _sources_of(self, tensors: Iterable[Tensor]) -> frozenset[str | int]:
        return frozenset().union(*[self._sources.get(x, frozenset()) for x in tensors])

    def _record_softmax(self, x: Tensor) -> int:
        """Record a softmax of ``x``, and return its index."""
        derived = _DERIVED in self._sources_of([x])
        softmaxes = self.observed.softmaxes
        softmaxes.append(ObservedSoftmax(self._module_names[-1], self._time, tuple(x.shape), derived))
        return len(softmaxes) - 1

    def note_output(self, output: Any) -> None:
        """Note from which softmaxes the ``output`` of the model was computed."""
        used = self._sources_of(x for x in leaves_of(output) if isinstance(x, Tensor))
        softmaxes = enumerate(self.observed.softmaxes)
        self.observed.softmaxes = [replace(softmax, is_used=index in used) for index, softmax in softmaxes]

    def _record_attention(self, call: SdpaCall) -> None:
        self._time += 1
        mask = None if call.attn_mask is None else tuple(call.attn_mask.shape)
        queries, keys = call.query.shape[-2], call.key.shape[-2]
        self.observed.attention.append(ObservedAttention(self._module_names[-1], self._time, queries, keys, mask))

    def _attend(self, call: SdpaCall) -> Tensor:
        self._record_attention(call)
        return call.original()

    def _record(self, value: Any) -> Any:
        self._alive.append(value)

        def record(x: Any) -> Any:
            if has_fields(x):
                return {name: tree_map(record, field) for name, field in fields_of(x).items()}
            if isinstance(x, BlockMask):
                tensors = [part for part in x.as_tuple() if isinstance(part, Tensor)]
                derived = _DERIVED in self._sources_of(tensors)
                return MaskRecord((x.seq_lengths[0], x.seq_lengths[1]), id(x), derived)
            if not isinstance(x, Tensor):
                return x
            is_pair = x.shape == (2,) and x.dtype in (torch.int32, torch.int64)
            values = tuple(x.tolist()) if is_pair else ()
            return TensorRecord(tuple(x.shape), x.dtype, id(x), _DERIVED in self._sources_of([x]), values)

        return tree_map(record, value)

    def _mark_streams(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Mark the streams among the ``arguments`` of the start as derived, and return the arguments to be used.

        A block may pass on the other fields of a dataclass, which a plan shards only here. Tensors in dataclasses are
        therefore replaced by views, and all of these are marked, but not the tensors that the model itself holds.
        """
        streams = [arguments[stream] for stream in self._streams if stream in arguments]
        sources = self._sources_of(by_path(arguments)[stream] for stream in self._streams)
        self.observed.sources = frozenset(name for name in sources if isinstance(name, str) and name != _DERIVED)
        for stream in streams:
            self._set_sources(stream, self._sources_of([stream]) | {_DERIVED})

        def marked(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                sources = self._sources_of([leaf])
                leaf = leaf.view_as(leaf)
                self._set_sources(leaf, sources | {_DERIVED})
            return leaf

        return {name: map_leaves(marked, value) if has_fields(value) else value for name, value in arguments.items()}

    @contextmanager
    def hooks_on(self, module: nn.Module) -> Iterator[None]:
        """Record calls of the submodules of ``module`` inside the ``with`` block."""
        lists = block_lists(module)
        with ExitStack() as stack:
            for name, submodule in module.named_modules():
                if name:
                    block_list = next((outer for outer in lists if submodule in [*lists[outer].children()]), None)
                    for handle in self._add_hooks(name, submodule, block_list):
                        stack.callback(handle.remove)
            yield

    def _add_hooks(self, name: str, module: nn.Module, block_list: str | None) -> list[Any]:
        parameters = parameters_of(module)
        # The beginnings and recorded arguments of calls that run: a stack, because a module may call itself.
        running: list[tuple[int, dict[str, Any] | None]] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            self._time += 1
            is_recorded = block_list is not None or not self._num_running_blocks or name == self._inside
            self._module_names.append(name)
            self._num_running_blocks += block_list is not None
            arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
            flat = by_path(arguments) if is_recorded else {}
            running.append(
                (self._time, {key: self._record(value) for key, value in flat.items()} if is_recorded else None)
            )
            if name == self._start:
                marked = self._mark_streams(arguments)
                positional = [marked[key] for key, _ in zip(parameters, args, strict=False)]
                return (*positional, *args[len(positional) :]), {key: marked[key] for key in kwargs}
            return None

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._time += 1
            self._module_names.pop()
            self._num_running_blocks -= block_list is not None
            began, arguments = running.pop()
            attends = bool(self.observed.attention) and self.observed.attention[-1].time > began
            is_wanted = block_list is not None or not self._module_names[-1] or attends or name == self._inside
            if arguments is not None and is_wanted:
                # A dataclass or named tuple counts as the only entry.
                entries = [output] if has_fields(output) else output
                call = ModuleCall(name, block_list, began, self._time, arguments, self._record(entries))
                self.observed.calls.append(call)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]


def observe(
    module: nn.Module,
    inputs: Mapping[str, Any],
    start: str | None = None,
    streams: Sequence[str] = (),
    inside: str | None = None,
) -> ObservedCall:
    """Call ``module(**inputs)`` without gradients and return the record of the call.

    Calls of the submodule ``inside`` are recorded also inside a block.

    The arguments ``streams`` of the block ``start`` are marked: tensors computed from them are ``derived``. The caller
    forces compiled code, such as flex_attention, to run in eager mode.
    """
    observer = _CallObserver(inputs, start, streams, inside)
    with torch.no_grad(), observer.hooks_on(module), observer:
        output = module(**fresh(inputs))
    observer.note_output(output)
    observed = observer.observed
    # An nn.Sequential in which nothing calls attention holds no transformer blocks, so drop its calls.
    no_blocks = {
        name
        for name, container in block_lists(module).items()
        if isinstance(container, nn.Sequential)
        and not any(observed.attends(call.began, call.ended) for call in observed.of_list(name))
    }
    return replace(observed, calls=[call for call in observed.calls if call.block_list not in no_blocks])


def imagined_larger(observed: ObservedCall) -> Iterator[ObservedCall]:
    """Yield copies of ``observed`` with one more token, one copy for each length that may be the number of tokens.

    Sizes that equal that length, or that length plus the length of another tensor that a block receives (such as text),
    grow. The check of the resulting plan on virtual ranks confirms or refutes this.
    """
    # Token tensors are [B, S, C], so dim 1 of each 3-dim floating-point argument is a candidate.
    lengths = {
        record.shape[1]: None
        for call in observed.calls
        for record in tensors_of(dict(call.arguments))
        if len(record.shape) == 3 and record.dtype.is_floating_point
    }
    for length in lengths:

        def grow(size: int, length: int = length) -> int:
            return size + 1 if size == length or size - length in lengths else size

        def change(value: Any, length: int = length, grow: Callable[[int], int] = grow) -> Any:
            if isinstance(value, MaskRecord):
                return replace(value, lengths=(grow(value.lengths[0]), grow(value.lengths[1])))
            if not isinstance(value, TensorRecord):
                return value + 1 if type(value) is int and value == length else value
            shape = value.shape
            # Do not change the last dim of [B, S, C]: it holds channels, even if there are as many channels as tokens.
            num_dims = 2 if len(shape) == 3 and value.dtype.is_floating_point and length in shape[:2] else len(shape)
            return replace(value, shape=(*[grow(size) for size in shape[:num_dims]], *shape[num_dims:]))

        if any(length == call.queries or grow(call.keys) != call.keys for call in observed.attention):
            calls = [
                replace(call, arguments=tree_map(change, call.arguments), output=tree_map(change, call.output))
                for call in observed.calls
            ]
            attention = [replace(call, queries=grow(call.queries), keys=grow(call.keys)) for call in observed.attention]
            yield replace(observed, inputs=tree_map(change, observed.inputs), calls=calls, attention=attention)
