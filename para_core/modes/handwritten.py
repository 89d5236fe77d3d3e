"""Detect attention that a model computes by hand, over the tokens of this rank only.

Attention by hand normalizes scores over keys: a softmax along a dim of tokens. On several ranks such a dim
has the tokens of this rank, or these and a few more entries, such as an attention sink. A kernel that calls
no function of torch cannot be seen.

This only records. :mod:`.unified` and :mod:`para_core.plans.interception` report calls to it, and the mode or
:mod:`para_core.plans.attention_check` raises or warns. Tests: tests/modes/test_handwritten.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from para_core.torch_internals import NORMALIZING_FUNCTIONS, OpOverload, OpOverloadPacket

# Functions that normalize along a dim, by which a model spells a softmax.
_SOFTMAX = frozenset(
    {
        *(torch.softmax, torch.special.softmax, F.softmax, Tensor.softmax, F.softmin),
        *(torch.log_softmax, torch.special.log_softmax, F.log_softmax, Tensor.log_softmax),
        *(torch.logsumexp, torch.special.logsumexp, Tensor.logsumexp),
        *NORMALIZING_FUNCTIONS,
    }
)
# Functions of each score, from which a model builds a softmax of its own, exp(scores) / sum(exp(scores)), or
# weights that are no softmax, sigmoid(scores).
_EXP = frozenset(
    {
        *(torch.exp, torch.special.expit, torch.sigmoid, torch.exp2, torch.special.exp2),
        *(Tensor.exp, Tensor.exp_, Tensor.exp2, Tensor.exp2_, Tensor.sigmoid, Tensor.sigmoid_, F.sigmoid),
        *(torch.exp_, torch.exp2_, torch.sigmoid_),
    }
)
# Functions that add entries to a dim of tokens: the column of a sink, or keys that every query sees.
_EXTEND = frozenset({torch.cat, torch.concat, torch.concatenate, F.pad})
_WATCHED = _SOFTMAX | _EXP | _EXTEND
_EXP_OPERATORS = frozenset({"exp", "exp_", "exp2", "exp2_", "sigmoid", "sigmoid_"})
# Scores have at least these dims: samples or heads, queries, keys. A router of experts has two.
_DIMS_OF_SCORES = 3


def may_be_scores(func: Callable[..., Any]) -> bool:
    """Whether :class:`HandwrittenAttention` looks at calls of ``func``."""
    if type(func) is OpOverload or type(func) is OpOverloadPacket:
        name = _operator_name(func)
        return "softmax" in name or name == "logsumexp" or name in _EXP_OPERATORS
    try:
        return func in _WATCHED
    except TypeError:  # Some callables are not hashable.
        return False


def _operator_name(func: Any) -> str:
    """Return the name of an operator of ``torch.ops`` without namespace and overload: ``aten._softmax.default``."""
    return str(func).split(".")[1]


def _is_exp(func: Callable[..., Any]) -> bool:
    """Whether ``func`` is a function of each score, by which a model spells a softmax."""
    if type(func) is OpOverload or type(func) is OpOverloadPacket:
        return _operator_name(func) in _EXP_OPERATORS
    return func in _EXP


class HandwrittenAttention:
    """A record of attention by hand that was seen during one call of a model.

    Args:
        known_packages: Packages whose own code is left out, because somebody has read what it does with
            tokens.
        ignores_graphs: Whether to leave out compiled graphs. They contain the functions of the user's own
            local attention, which normalizes scores over blocks of keys, and nothing tells them from those of
            the model.

    Attributes:
        places: For each module that computed scores over this rank's tokens, by its id, the module (None for
            code outside of modules) and the shape of the scores.
    """

    def __init__(self, known_packages: frozenset[str] = frozenset(), *, ignores_graphs: bool = False) -> None:
        self._known_packages, self._ignores_graphs = known_packages, ignores_graphs
        self.places: dict[int, tuple[nn.Module | None, tuple[int, ...]]] = {}
        # Sizes of dims that were made from the tokens of this rank and other entries.
        self._extended: set[int] = set()
        self._is_paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore calls inside the ``with`` block."""
        before = self._is_paused
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    def clear(self) -> None:
        """Forget everything that was seen. A mode does so when it is entered and after it has reported."""
        self.places.clear()
        self._extended.clear()

    def note(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Any, output: Any, sizes: Collection[int]
    ) -> None:
        """Note a call of ``func`` that normalizes scores over tokens of this rank.

        Args:
            func: A function for which :func:`may_be_scores` is true, with ``args``, ``kwargs`` and
                ``output``.
            sizes: Numbers of tokens that this rank holds of a sharded sequence. A size of 1 is left out,
                because dims of size 1 have many meanings.
        """
        tokens = {size for size in sizes if size > 1}
        # A nested tensor has no numbers of tokens to compare, and raises if it is asked for its shape.
        if isinstance(output, Tensor) and output.is_nested:
            return
        if not tokens or self._is_paused or (self._ignores_graphs and _is_in_graph()):
            return
        if func in _EXTEND:
            self._note_extended(args, kwargs, output, tokens)
            return
        scores = kwargs.get("input")
        if args:
            scores = args[0]
        if not isinstance(scores, Tensor) or scores.ndim < _DIMS_OF_SCORES:
            return
        sizes_of_tokens = tokens | self._extended
        dims_of_tokens = [dim for dim, size in enumerate(scores.shape) if size in sizes_of_tokens]
        if not self._is_normalized(func, args, kwargs, scores, dims_of_tokens):
            return
        module, package = _find_caller()
        if package not in self._known_packages:
            self.places.setdefault(id(module), (module, tuple(scores.shape)))

    @staticmethod
    def _is_normalized(
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Any,
        scores: Tensor,
        dims_of_tokens: Sequence[int],
    ) -> bool:
        """Whether ``func`` normalizes ``scores`` along a dim of tokens, or is a step of that."""
        if _is_exp(func):
            # A function of each entry says nothing about dims, so queries and keys must both be recognized.
            return {scores.ndim - 2, scores.ndim - 1} <= set(dims_of_tokens)
        dims = None
        if len(args) > 1:
            dims = args[1]
        # Functions of torch also accept NumPy's name of the argument.
        dims = kwargs.get("dim", kwargs.get("axis", dims))
        if not isinstance(dims, (tuple, list)):
            dims = (dims,)
        return any(isinstance(dim, int) and dim % scores.ndim in dims_of_tokens for dim in dims)

    def _note_extended(self, args: Sequence[Any], kwargs: Any, output: Any, tokens: set[int]) -> None:
        """Note the sizes of dims of ``output`` to which a function added entries to a dim of ``tokens``."""
        parts = kwargs.get("tensors", kwargs.get("input"))
        if args:
            parts = args[0]
        if not isinstance(parts, (tuple, list)):
            parts = [parts]
        for part in parts:
            if isinstance(part, Tensor) and isinstance(output, Tensor) and part.ndim == output.ndim:
                grown = zip(part.shape, output.shape, strict=True)
                self._extended |= {after for before, after in grown if before in tokens and after > before}

    def describe(self, root: nn.Module | None) -> str:
        """Return the modules that computed scores by hand, named as in ``root``, with the shapes of the scores."""
        names: dict[int, str] = {}
        if root is not None:
            names = {id(module): name for name, module in root.named_modules()}
        texts = []
        for module, shape in self.places.values():
            place = "code outside of modules"
            if module is not None:
                place = type(module).__name__
            name = names.get(id(module), "")
            if name:
                place = f"{name} ({place})"
            texts.append(f"{place}, scores {list(shape)}")
        return "; ".join(texts)


# Code of these packages runs between a model's line and the function that is watched.
_BETWEEN = frozenset({"torch", "para_core", "contextlib"})


def _is_in_graph() -> bool:
    """Whether the code of a compiled graph calls the function that is watched."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # torch.fx names the code of its graphs so.
        if frame.f_code.co_filename.startswith("<eval_with_key>"):
            return True
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _BETWEEN:
            return False
        frame = frame.f_back
    return False


def _find_caller() -> tuple[nn.Module | None, str]:
    """Return the module whose code is running, None outside of modules, and the package of that code.

    The module is ``self``, ``attn`` or ``module`` of the innermost frame that has one.
    """
    frame = sys._getframe(1)
    package = ""
    while frame is not None:
        package_of_frame = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if not package and package_of_frame not in _BETWEEN:
            package = package_of_frame
        for name in ("self", "attn", "module"):
            value = frame.f_locals.get(name)
            if package and isinstance(value, nn.Module):
                return value, package
        frame = frame.f_back  # type: ignore[assignment]
    return None, package
