"""``torch.cond`` over transformer blocks: branches that return None or symbolic shapes, and quantized weights
in them.

The branches of ``torch.cond`` only support plain tensors (torch 2.13 and 2.15). A weight that is a tensor
wrapper subclass, as torchao's are, fails with "There was no rule registered for HOP cond". Inside a branch,
``F.linear`` with such a weight is therefore replaced by a function that takes the plain tensors inside it,
and rebuilds the weight from them. Other operators on such weights still fail, with the same error.

Only :mod:`.graph` uses this, while Dynamo traces. Tests: tests/cache/test_graph.py, where
the tests with *quantized* in their names have such weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from para_core.cache.streams import Streams
from para_core.instance.private_class import original_class
from para_core.modes.interceptor import call_original, run_in_branch
from para_core.torch_internals import no_frame_of_its_own

# A path is the names of the attributes that lead from a weight to one of the plain tensors inside it.
Path = tuple[str, ...]


def cond(
    condition: Any,
    if_true: Callable[[], Streams],
    if_false: Callable[[], Streams],
    present: list[int],
    inputs: Streams,
) -> Streams:
    """Return the outputs of ``if_true`` or of ``if_false``, chosen by ``torch.cond``.

    Args:
        condition: A bool tensor with one element. If it is on an accelerator, the host waits for it at each
            call.
        if_true, if_false: Functions that return the outputs, a tuple of tensors and None.
        present: Indices of the outputs that are tensors; the others are None.
        inputs: Tensors with the shapes that the outputs have, which is not checked again here: the first call of
            a branch of CFG runs without ``cond``, and raises in ``BlockRole.require_outputs``.

    Raises:
        RuntimeError: A function returned None for an output of ``present``.
    """

    def compute_in_one_dim(make: Callable[[], Streams]) -> tuple[Tensor, ...]:
        # torch.cond requires that its outputs are not views, and that both branches return equal strides. If
        # a size is symbolic, it derives the strides of the result from the sizes, and fails if a dim has size
        # 1 or if the branches have different expressions for a size. A tensor with one dim always has stride
        # 1.
        values = make()
        tensors = [x for x in [values[i] for i in present] if x is not None]
        if len(tensors) < len(present):
            raise RuntimeError(
                "a block returned None where it returned a tensor before; call it without the cache."
            )
        return tuple([x.clone(memory_format=torch.contiguous_format).view(-1) for x in tensors])

    flat = torch.cond(
        condition, lambda: compute_in_one_dim(if_true), lambda: compute_in_one_dim(if_false), ()
    )
    outputs: list[Tensor | None] = [None] * len(inputs)
    for i, x in zip(present, flat, strict=True):
        like: Any = inputs[i]
        outputs[i] = x.view(like.shape)
    return tuple(outputs)


class WrappedLinear(NamedTuple):
    """A layer ``module`` whose weight is a tensor wrapper subclass, and how to compute ``F.linear`` with it.

    Args:
        paths: The attribute paths from its weight to the plain tensors inside.
        structure: The :class:`_WeightStructure` of the weight, to detect that it was replaced.
        linear: The function ``linear(input, bias, *tensors)`` that computes the layer from the plain tensors.
            Dynamo puts it into a graph without tracing it.
    """

    module: nn.Module
    paths: list[Path]
    structure: object
    linear: Callable[..., Tensor]


def find_wrapped_linears(block: nn.Module, before: Iterable[WrappedLinear] = ()) -> list[WrappedLinear]:
    """Return the layers of ``block`` whose weights are tensor wrapper subclasses, such as torchao's.

    Embeddings and norms with such a weight are among them, whose entries are never used, because they do not
    call ``F.linear``.

    Entries of the previous result ``before`` that are still valid are returned again: graphs guard on these
    objects.
    """
    earlier = {id(layer.module): layer for layer in before}
    layers = []
    for module in block.modules():
        weight: Any = getattr(module, "weight", None)
        if not hasattr(weight, "__tensor_flatten__") or isinstance(weight, DTensor):
            continue
        paths, structure = _take_apart(weight)
        layer = earlier.get(id(module))
        if layer is None or layer.structure != structure:
            layer = WrappedLinear(module, paths, structure, _linear_of(structure))
        layers.append(layer)
    return layers


class GroupBlocks:
    """The skippable blocks of one group, in a form that can be called in a branch of ``torch.cond``.

    Iterating yields one function per block, which calls the block without the cache's hooks.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._blocks = [(block, original_class(block).__call__) for block in blocks]
        self._layers: list[list[WrappedLinear]] = [[] for _ in self._blocks]
        self.refresh()

    def refresh(self) -> None:
        """Search the blocks again for quantized weights, because the user may have quantized some in the meantime."""
        self._layers = [
            find_wrapped_linears(block, before)
            for (block, _), before in zip(self._blocks, self._layers, strict=True)
        ]

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        for (block, call), layers in zip(self._blocks, self._layers, strict=True):
            yield partial(_call_in_branch, layers, call, block)

    def call(self, block: nn.Module, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return ``call(block, *args, **kwargs)``, where ``block`` is one of the group.
        Linear layers with quantized weights compute with plain tensors.

        Raises:
            ValueError: ``block`` is none of the group.
        """
        for (other, _), layers in zip(self._blocks, self._layers, strict=True):
            if other is block:
                return _call_in_branch(layers, call, block, *args, **kwargs)
        raise ValueError(
            f"this {type(block).__name__} is none of the {len(self._blocks)} blocks of the group."
        )


def _call_in_branch(
    layers: Sequence[WrappedLinear], call: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Return ``call(*args, **kwargs)``, in which the weights of ``layers`` are replaced by plain tensors."""
    if not layers:
        return call(*args, **kwargs)

    def run() -> Any:
        with _PlainWeights(layers):
            return call(*args, **kwargs)

    return run_in_branch(run)


class _PlainWeights(TorchFunctionMode):
    """A mode in which ``F.linear`` with the weight of one of ``layers`` takes the plain tensors inside the weight."""

    def __init__(self, layers: Sequence[WrappedLinear]) -> None:
        super().__init__()
        self._layers = layers

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            x, weight, bias = _arguments_of_linear(*args, **(kwargs or {}))
            for layer in self._layers:
                if weight is layer.module.weight:
                    return layer.linear(x, bias, *[_at(weight, path) for path in layer.paths])
        return call_original(func, args, kwargs or {})


def _arguments_of_linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """Return the arguments of a call of ``F.linear``, which has these parameters, in order."""
    return input, weight, bias


def _at(weight: Any, path: Path) -> Any:
    for name in path:
        weight = getattr(weight, name)
    return weight


class _WeightStructure(NamedTuple):
    """The structure of a weight that is a tensor wrapper subclass, from which :func:`_build` rebuilds it."""

    cls: type
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    # Each tensor inside has a name and a structure; the structure of a plain tensor is None.
    inner: tuple[tuple[str, _WeightStructure | None], ...]


def _take_apart(weight: Any) -> tuple[list[Path], _WeightStructure]:
    """Return the paths to the plain tensors inside ``weight``, in the order in which :func:`_build` takes
    them, and its structure.
    """
    names, context = weight.__tensor_flatten__()
    paths: list[Path] = []
    inner: list[tuple[str, _WeightStructure | None]] = []
    for name in names:
        x = getattr(weight, name)
        if hasattr(x, "__tensor_flatten__"):
            paths_inside, structure = _take_apart(x)
            paths += [(name, *path) for path in paths_inside]
            inner.append((name, structure))
        else:
            paths.append((name,))
            inner.append((name, None))
    return paths, _WeightStructure(type(weight), context, weight.size(), weight.stride(), tuple(inner))


def _build(structure: _WeightStructure, tensors: list[Tensor]) -> Any:
    """Rebuild a weight of this ``structure`` from the first plain ``tensors``, which are removed from the list."""
    inner = {}
    for name, inside in structure.inner:
        if inside is None:
            inner[name] = tensors.pop(0)
        else:
            inner[name] = _build(inside, tensors)
    cls: Any = structure.cls
    return cls.__tensor_unflatten__(inner, structure.context, structure.size, structure.stride)


def _linear_of(structure: _WeightStructure) -> Callable[..., Tensor]:
    """Return the function of :class:`WrappedLinear` for weights of this ``structure``."""

    def linear(x: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        return F.linear(x, _build(structure, list(tensors)), bias)

    allowed: Callable[..., Tensor] = torch.compiler.allow_in_graph(linear)
    return allowed
