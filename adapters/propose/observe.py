"""Watching one call of a model on one device: what its blocks are given and return, and what it attends to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from para_core.attention.multi_head import multi_head_attention
from para_core.attention.sdpa_call import SdpaCall
from para_core.instance_patching import original_class
from para_core.modes.flash_attention import OPERATOR_TYPES, attention_kind, flash_attention
from para_core.modes.interceptor import raise_here
from para_core.plans.module_matching import parameters_of
from para_core.torch_internals import tree_leaves, tree_map
from para_core.verify.virtual_ranks import fresh


@dataclass(frozen=True)
class Seen:
    """A tensor that was seen. ``derived``: made from the tokens that the first block of the region was given."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    identity: int
    derived: bool


@dataclass(frozen=True)
class ModuleCall:
    """A call of a block, of a module that the model itself calls, or of one outside of all blocks that attends.

    Tensors in ``given`` and ``returned`` are :class:`Seen`.
    """

    name: str
    block_list: str | None
    began: int
    ended: int
    given: Mapping[str, Any]
    returned: Any


@dataclass(frozen=True)
class ObservedAttention:
    """A call of scaled_dot_product_attention in the module ``name``; lengths of queries, keys, and the mask's shape."""

    name: str
    time: int
    queries: int
    keys: int
    mask: tuple[int, ...] | None


@dataclass
class ObservedCall:
    """One call of a model, in the order of time.

    Args:
        met: parameters whose tensors the model itself joins to derived ones.
        sources: parameters from which the tokens were made that the first block of the region was given.
        softmax: modules that compute a softmax over a matrix, as attention written by hand does, each with the shape of the first.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    calls: list[ModuleCall] = field(default_factory=list)
    attention: list[ObservedAttention] = field(default_factory=list)
    met: set[str] = field(default_factory=set)
    softmax: dict[str, tuple[int, ...]] = field(default_factory=dict)
    sources: frozenset[str] = frozenset()

    def of_list(self, name: str) -> list[ModuleCall]:
        return [call for call in self.calls if call.block_list == name]


def block_lists(module: nn.Module) -> dict[str, nn.Module]:
    """The containers of a model's blocks that are not within another's blocks, by name.

    Module lists, but no lists of lists, for their entries are never called; and sequences of modules of one class.
    """
    found: dict[str, nn.Module] = {}
    for name, submodule in module.named_modules():
        if _holds_blocks(submodule) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = submodule
    return found


def _holds_blocks(module: nn.Module) -> bool:
    blocks = [*module.children()]
    if isinstance(module, nn.Sequential):
        # An activation or a convolution is no block.
        return len({original_class(block) for block in blocks}) == 1 and bool([*blocks[0].children()])
    return isinstance(module, nn.ModuleList) and not any(isinstance(block, nn.ModuleList) for block in blocks)


_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


class _Watch(TorchFunctionMode):
    def __init__(self, inputs: Mapping[str, Any], start: str | None, streams: Sequence[str]) -> None:
        super().__init__()
        self.found = ObservedCall()
        self._start, self._streams = start, streams
        self._of_input = {id(x): name for name, value in inputs.items() for x in tree_leaves(value)}
        self._derived = WeakTensorKeyDictionary()
        # Of each tensor, the parameters from which it was made.
        self._made_of = WeakTensorKeyDictionary()
        for name, value in inputs.items():
            self._note_sources(value, frozenset([name]))
        # As long as all that was recorded lives, no two tensors have the same identity.
        self._alive: list[Any] = []
        self._within: list[str] = []
        self._began: list[int] = []
        # Blocks that are running, one in another.
        self._in_blocks = 0
        self._time = 0
        self.found.inputs = {name: self._record(value) for name, value in inputs.items()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._note_attention(SdpaCall(*args, **kwargs))
        elif func in _SOFTMAX and isinstance(args[0], Tensor) and args[0].ndim >= 3:
            name = self._within[-1] if self._within else ""
            self.found.softmax.setdefault(name, tuple(args[0].shape))
        out: Any
        if func is F.multi_head_attention_forward:
            # A mode is off inside of a function that it sees, and this one would hide its attention.
            out = multi_head_attention(self._attended, *args, **kwargs)
        elif type(func) in OPERATOR_TYPES and attention_kind(func) == "flash":
            out = flash_attention(self._attended, raise_here, func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._note_sources(out, self._sources_of(taken))
        if len(self._derived) and any(x in self._derived for x in taken):
            self._derive(out)
            if not self._within:
                self.found.met.update(self._of_input[id(x)] for x in taken if id(x) in self._of_input)
        return out

    def _note_sources(self, value: Any, names: frozenset[str]) -> None:
        if names:
            for x in tree_leaves(value):
                if isinstance(x, Tensor):
                    self._made_of[x] = names

    def _sources_of(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        return frozenset().union(*[self._made_of.get(x, frozenset()) for x in tensors])

    def _derive(self, value: Any) -> None:
        for x in tree_leaves(value):
            if isinstance(x, Tensor):
                self._derived[x] = True

    def _note_attention(self, call: SdpaCall) -> None:
        self._time += 1
        name = self._within[-1] if self._within else ""
        mask = None if call.attn_mask is None else tuple(call.attn_mask.shape)
        self.found.attention.append(ObservedAttention(name, self._time, call.query.shape[-2], call.key.shape[-2], mask))

    def _attended(self, call: SdpaCall) -> Tensor:
        self._note_attention(call)
        return call.original()

    def _record(self, value: Any) -> Any:
        self._alive.append(value)
        return tree_map(
            lambda x: Seen(tuple(x.shape), x.dtype, id(x), x in self._derived) if isinstance(x, Tensor) else x, value
        )

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Inside, calls of submodules are recorded."""
        lists = block_lists(module)
        with ExitStack() as stack:
            for name, submodule in module.named_modules():
                if not name:
                    continue
                block_list = next((outer for outer in lists if submodule in [*lists[outer].children()]), None)
                for handle in self._hooks(name, submodule, block_list):
                    stack.callback(handle.remove)
            yield

    def _hooks(self, name: str, module: nn.Module, block_list: str | None) -> list[Any]:
        parameters = parameters_of(module)
        given: list[dict[str, Any] | None] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._time += 1
            self._began.append(self._time)
            recorded = block_list is not None or not self._in_blocks
            self._within.append(name)
            self._in_blocks += block_list is not None
            arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
            given.append({key: self._record(value) for key, value in arguments.items()} if recorded else None)
            if name == self._start:
                self.found.sources = self._sources_of([arguments[stream] for stream in self._streams])
                for stream in self._streams:
                    self._derive(arguments[stream])

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._time += 1
            self._within.pop()
            self._in_blocks -= block_list is not None
            began, arguments = self._began.pop(), given.pop()
            attends = bool(self.found.attention) and self.found.attention[-1].time > began
            if arguments is not None and (block_list is not None or not self._within or attends):
                call = ModuleCall(name, block_list, began, self._time, arguments, self._record(output))
                self.found.calls.append(call)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]


def observe(
    module: nn.Module, inputs: Mapping[str, Any], start: str | None = None, streams: Sequence[str] = ()
) -> ObservedCall:
    """Call ``module(**inputs)`` without gradients, and record it.

    Args:
        start: the block whose parameters ``streams`` hold the tokens from which what follows is derived.
    """
    watch = _Watch(inputs, start, streams)
    with torch.no_grad(), watch.around(module), watch:
        module(**fresh(inputs))
    return _with_attending_sequences(watch.found, block_lists(module))


def _with_attending_sequences(seen: ObservedCall, lists: Mapping[str, nn.Module]) -> ObservedCall:
    """``seen`` without the calls in sequences that do not attend: those hold no transformer blocks."""
    idle = {
        name
        for name, container in lists.items()
        if isinstance(container, nn.Sequential)
        and not any(call.began < one.time < call.ended for call in seen.of_list(name) for one in seen.attention)
    }
    return replace(seen, calls=[call for call in seen.calls if call.block_list not in idle])
