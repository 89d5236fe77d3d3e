"""Find functions whose bits depend on the number of rows, at the first call with each shape.

A rank's tensor is put at its place in zeros of the sizes of one process, the same function computes both, and
the bytes of the rank's part are compared. That needs no second run of the model and no exchange. On CUDA, the
number of parts into which FlashAttention splits keys is compared, too. The mode of :mod:`.mode` calls this,
and :mod:`.call` compares the findings of all ranks. Products of few rows whose place is unknown are tried
with each number of rows that one process may have; which of these it has follows from all ranks' numbers
(:mod:`.unplaced`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from para_core.same_bits.flash_splits import AttentionSizes, flash_splits
from para_core.same_bits.one_process import OneProcess, put_at_place, resize, take_from_place
from para_core.same_bits.rows import CONVOLUTIONS, few_rows
from para_core.same_bits.unplaced import (
    UnplacedProduct,
    digest_of,
    enough_rows,
    have_equal_bytes,
    try_numbers_of_rows,
)
from para_core.torch_internals import DisableTorchFunctionSubclass

# Functions whose first argument is a tensor with tokens, whose rows do not depend on each other, without
# randomness. Those that reduce a dim do so for a norm that is composed of them; a reduction over tokens is
# left out by compare().
CHECKED: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear,
        *CONVOLUTIONS,
        F.layer_norm,
        F.rms_norm,
        F.silu,
        F.gelu,
        F.relu,
        torch.sigmoid,
        torch.tanh,
        torch.rsqrt,
        torch.exp,
        torch.sin,
        torch.cos,
        Tensor.sigmoid,
        Tensor.tanh,
        Tensor.rsqrt,
        Tensor.exp,
        torch.mean,
        torch.sum,
        torch.softmax,
        F.softmax,
        F.normalize,
        Tensor.mean,
        Tensor.sum,
        Tensor.softmax,
    }
)


@dataclass(eq=False)
class RowCheck:
    """Compares each new function, shape and type with what one process would compute.

    Args:
        module: The model, whose submodules findings name.
        findings: What differed so far, as text: the module, the function, the shape and type of the rank's
            tensor, and what is different.
        unplaced: Products of few rows that are of no known sequence, in the order of the calls.
    """

    module: nn.Module
    # Whether the ranks along "batch" share the samples of the call.
    shares_samples: bool = False
    findings: list[str] = field(default_factory=list)
    unplaced: list[UnplacedProduct] = field(default_factory=list)
    _seen: set[tuple[Any, ...]] = field(default_factory=set)
    # The numbers of rows with the same bits, by the function, shapes and types of an unplaced product.
    _tried: dict[tuple[Any, ...], frozenset[int]] = field(default_factory=dict)

    def compare(
        self,
        func: Callable[..., Any],
        one_process: OneProcess,
        x: Tensor,
        output: Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Note a finding if ``func`` gives other bits for ``x``, whose ``output`` is given, inside one process."""
        # For a known shape, too: the ranks that compare findings are chosen by it.
        self.shares_samples = self.shares_samples or one_process.batch_size > 1
        others = [*args, *[value for _, value in sorted(kwargs.items())]]
        # Another dim or stride of a convolution is another function.
        key = (func, x.shape, x.stride(), x.dtype, tuple(kwargs), *map(_as_key, others))
        tokens = None if func in CONVOLUTIONS else one_process.place_of_tokens(x)
        if func is F.linear and tokens is None and prod(x.shape[:-1]) < few_rows(x):
            self._note_unplaced(key, one_process, x, output, args, kwargs)
        if key in self._seen:
            return
        self._seen.add(key)
        samples = one_process.batch_size > 1 and (tokens is None or tokens[0] > 0)
        if tokens is None and not samples:
            return
        sizes = list(x.shape)
        if tokens is not None:
            sizes[tokens[0]] = tokens[1].total
        if samples:
            sizes[0] *= one_process.batch_size
        whole = resize(x, sizes)
        put_at_place(x, whole, one_process, tokens, samples)
        if (
            tokens is not None
            and output.shape[tokens[0] : tokens[0] + 1] != x.shape[tokens[0] : tokens[0] + 1]
        ):
            # A reduction over tokens is no function of one row.
            return
        with torch.no_grad(), DisableTorchFunctionSubclass():
            expected = take_from_place(func(whole, *args, **kwargs), one_process, tokens, samples)
        if expected.shape != output.shape or not have_equal_bytes(expected, output):
            self.findings.append(f"{self._describe(func, x)}: differs from {_as_text(sizes)} in one process")

    def _note_unplaced(
        self,
        key: tuple[Any, ...],
        one_process: OneProcess,
        x: Tensor,
        output: Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Note a product of few rows of no known sequence, of every layer: ranks compare these lists.

        Equal sizes are tried once, because kernels are chosen by sizes.
        """
        if key not in self._tried:
            with torch.no_grad(), DisableTorchFunctionSubclass():
                self._tried[key] = try_numbers_of_rows(one_process, x, output, *args, **kwargs)
        size = 1
        if x.ndim > 1:
            size = x.shape[-2]
        text, samples = self._describe(F.linear, x), one_process.batch_index
        self.unplaced.append(
            UnplacedProduct(text, samples, size, digest_of(x), self._tried[key], enough_rows(x))
        )

    def compare_splits(
        self,
        one_process: OneProcess,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Note a finding if FlashAttention adds up the keys of a call in another number of parts than in one
        process.

        The arguments are those of SDPA, with this rank's tokens and all heads. A ring has gathered all keys.
        """
        if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or attn_mask is not None:
            return
        key_place, query_place = one_process.place_of_tokens(key), one_process.place_of_tokens(query)
        keys, queries = key.shape[-2], query.shape[-2]
        if key_place is not None:
            keys = key_place[1].total
        if query_place is not None:
            queries = query_place[1].total
        batch, heads, width = prod(query.shape[:-3]), query.shape[-3], query.shape[-1]
        whole = AttentionSizes(batch * one_process.batch_size, heads, queries, keys, width)
        ring = one_process.ranks // one_process.ulysses
        part = AttentionSizes(batch, -(-heads // one_process.ulysses), -(-queries // ring), keys, width)
        if key_place is None:
            # Every rank has all keys, such as those of the text, and attends with all heads of its own
            # queries.
            part = AttentionSizes(batch, heads, query.shape[-2], keys, width)
        multiprocessors = torch.cuda.get_device_properties(query.device).multi_processor_count
        splits, splits_of_rank = (flash_splits(sizes, multiprocessors) for sizes in (whole, part))
        if splits != splits_of_rank:
            self.findings.append(
                f"{self._describe(F.scaled_dot_product_attention, query)}: FlashAttention adds up the keys in "
                f"{splits_of_rank} parts for {part.heads} heads of {part.queries} queries, and in {splits} for "
                f"{heads} heads of {queries} in one process"
            )

    def _describe(self, func: Callable[..., Any], x: Tensor) -> str:
        """Return the module that calls ``func``, its name, and the shape and type of ``x``, as text."""
        module = _calling_module(self.module)
        name = getattr(func, "__name__", str(func))
        place = f"{module}, " if module else ""
        return f"{place}{name} of {_as_text(x.shape)} in {str(x.dtype).removeprefix('torch.')}"


def _as_key(argument: Any) -> Any:
    """Return the shape of a tensor, or the text of another argument."""
    if isinstance(argument, Tensor):
        return argument.shape
    return repr(argument)


def _as_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


def _calling_module(model: nn.Module) -> str:
    """Return the name of the innermost submodule of ``model`` whose method is running; empty if there is none."""
    names = {id(module): name for name, module in model.named_modules()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name: str | None = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return name
        frame = frame.f_back
    return ""
