"""Find functions whose bits depend on the number of rows, at the first call with each shape.

A rank's tensor is put at its place in zeros of the sizes of one process, the same function computes both, and
the bytes of the rank's part are compared. That needs no second run of the model and no exchange. A function
that differs by rounding is computed at its place from then on (:mod:`.found`); what differs by more is no
function of one row, and a finding. On CUDA, the number of parts into which FlashAttention splits keys is
compared, too. The mode of :mod:`.mode` calls this, and :mod:`.call` compares the findings of all ranks, and
their products (:mod:`.products`), because the place of a tensor is a guess by its sizes. Tests:
tests/same_bits/test_rows.py, tests/same_bits/test_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from para_core.same_bits.at_place import (
    CallKind,
    TorchCall,
    compute_at_place,
    has_samples,
    sizes_in_one_process,
)
from para_core.same_bits.flash_splits import AttentionSizes, flash_splits
from para_core.same_bits.found import Found
from para_core.same_bits.one_process import OneProcess, Tokens
from para_core.same_bits.products import (
    LinearProduct,
    describe_product,
    have_equal_bytes,
    try_numbers_of_rows,
)
from para_core.same_bits.rows import CONVOLUTIONS, enough_rows
from para_core.same_bits.token_tags import TokenTags

# Those of CHECKED that are methods of a tensor, too.
_ALSO_METHODS = ("sigmoid", "tanh", "rsqrt", "exp", "sin", "cos", "mean", "sum", "softmax")

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
        F.softmax,
        F.normalize,
        *[getattr(owner, name) for owner in (torch, Tensor) for name in _ALSO_METHODS],
    }
)


# Sums in another order differ by this part of the largest element at most.
_ROUNDING = 2.0**-14


@dataclass(eq=False)
class RowCheck:
    """Compares each new function, shape and type with what one process would compute.

    Args:
        found: What later calls need, which the check fills in.
        findings: What differed so far, as text: the module, the function, the shape and type of the rank's
            tensor, and what is different.
        products: The linear products so far, in the order of the calls.
    """

    found: Found
    # The sequences whose tokens tensors hold.
    tags: TokenTags
    # Returns the name of the innermost module that runs; "" if none does. call.py sets it before a call.
    running: Callable[[], str] = lambda: ""
    # Whether the ranks along "batch" share the samples of the call.
    shares_samples: bool = False
    findings: list[str] = field(default_factory=list)
    products: list[LinearProduct] = field(default_factory=list)
    _seen: set[CallKind] = field(default_factory=set)
    # The numbers of rows with the same bits, by the kind of a product of few rows.
    _tried: dict[CallKind, frozenset[int]] = field(default_factory=dict)

    def compare(self, call: TorchCall, one_process: OneProcess, tokens: Tokens, output: Tensor) -> Tensor:
        """Return ``output``, the result of ``call``, with the bits of one process; or note a finding.

        ``tokens`` is the dim of the tensor that has this rank's tokens, and their place; None if none has.
        """
        # For a known kind, too: the ranks that compare findings are chosen by it.
        self.shares_samples = self.shares_samples or one_process.batch_size > 1
        kind = (*call.kind, tokens)
        if kind not in self._seen:
            self._seen.add(kind)
            output = self._compare_at_place(call, one_process, tokens, output)
        has_few_rows = call.func is F.linear and prod(call.x.shape[:-1]) < enough_rows(call.x)
        if (has_few_rows or call.kind in self.found.at_place) and self.found.gets_several(call):
            self.findings.append(f"{self._name(call.func)} of {_describe(call.x)}: rows of several sequences")
        if call.func is F.linear and call.x.ndim > 1:
            self._note_product(call, one_process, tokens, output)
        return output

    def _compare_at_place(
        self, call: TorchCall, one_process: OneProcess, tokens: Tokens, output: Tensor
    ) -> Tensor:
        """Return ``output`` as computed at its place in one process, if that is the same but for rounding."""
        if tokens is None and not has_samples(call.x, one_process, tokens):
            return output
        if tokens is not None and output.shape[tokens[0] :][:1] != call.x.shape[tokens[0] :][:1]:
            # A reduction over tokens is no function of one row.
            return output
        if output.ndim == 0:
            self.findings.append(f"{self._name(call.func)} of {_describe(call.x)}: one number of all samples")
            return output
        with torch.no_grad():
            expected = compute_at_place(call, one_process, tokens)
        if expected.shape == output.shape and have_equal_bytes(expected, output):
            return output
        if _differ_by_rounding(expected, output):
            self.found.at_place.add(call.kind)
            return compute_at_place(call, one_process, tokens)
        sizes = _as_text(sizes_in_one_process(call.x, one_process, tokens))
        self.findings.append(
            f"{self._name(call.func)} of {_describe(call.x)}: differs from {sizes} in one process"
        )
        return output

    def _note_product(self, call: TorchCall, one_process: OneProcess, tokens: Tokens, output: Tensor) -> None:
        """Note a linear product: ranks compare these lists."""
        x, equal_for = call.x, None
        if prod(x.shape[:-1]) < enough_rows(x):
            # Equal sizes are tried once, because kernels are chosen by sizes.
            kind = (*call.kind, tokens)
            if kind not in self._tried:
                with torch.no_grad():
                    self._tried[kind] = try_numbers_of_rows(call, one_process, tokens, output)
            equal_for = self._tried[kind]
        name, sizes = self._name(call.func), _describe(x)
        self.products.append(describe_product(name, sizes, one_process.batch_index, tokens, x, equal_for))

    def compare_splits(
        self,
        one_process: OneProcess,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
    ) -> None:
        """Note a finding if FlashAttention adds up the keys of a call in another number of parts than in one
        process.

        The tensors are those of SDPA, with this rank's tokens and all heads. A ring has gathered all keys.
        """
        if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or attn_mask is not None:
            return
        key_place, query_place = (
            one_process.place_in_one_process(x, self.tags.sequences_of(x)) for x in (key, query)
        )
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
            name = self._name(F.scaled_dot_product_attention)
            self.findings.append(
                f"{name} of {_describe(query)}: FlashAttention adds up the keys in {splits_of_rank} parts for "
                f"{part.heads} heads of {part.queries} queries, and in {splits} for {heads} heads of {queries} in one "
                "process"
            )

    def _name(self, func: Callable[..., Any]) -> str:
        """Return the module that calls ``func``, and the name of ``func``, as text."""
        module = self.running()
        name = getattr(func, "__name__", str(func))
        return f"{module}, {name}" if module else name


def _differ_by_rounding(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one shape and type differ by no more than sums in another order do."""
    if x.shape != y.shape or x.dtype != y.dtype or not x.is_floating_point():
        return False
    largest = y.detach().abs().max()
    return bool((x - y).detach().abs().max() <= max(_ROUNDING, 4 * torch.finfo(x.dtype).eps) * largest)


def _describe(x: Tensor) -> str:
    return f"{_as_text(x.shape)} in {str(x.dtype).removeprefix('torch.')}"


def _as_text(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))
