"""The description of a backend of local attention that is not PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from para_core.attention.local_call import LocalAttentionCall


class CheckCall(Protocol):
    """Raise ``RuntimeError`` if the backend ``name`` does not support a call with tensors of this kind.

    Only dtype, head dims, device and lengths of ``query`` and ``value`` matter.
    """

    def __call__(self, name: str, query: Tensor, value: Tensor, *, masked: bool, is_causal: bool) -> None: ...


# Called as continue_from(so_far, call, out_dtype). Returns ``out`` in ``out_dtype`` and ``lse`` of the keys
# of ``call`` and those of ``so_far``, an earlier ``(out, lse)`` of the same queries; None if there is none.
ContinueFrom = Callable[
    [tuple[Tensor, Tensor] | None, LocalAttentionCall, torch.dtype], tuple[Tensor, Tensor]
]


@dataclass(frozen=True)
class LocalBackend:
    """The functions of one backend.

    Args:
        attend: Computes a call without autograd, on tensors that are not empty. Returns ``out`` and ``lse``,
            float32. Only called if ``check`` passed, so a mask is None if ``check`` refuses masks.
        check: Checks a call in advance.
        check_installed: Raises ``ImportError`` if a package is missing that the backend needs.
        continue_from: Computes a call and merges it into an earlier result in one launch; None if the backend
            cannot.
        clears_rows: Whether a row without a key in one block gets 0 and -inf, whatever the mask. Masks then
            need no change (:mod:`para_core.attention.low_rows`).
        aliases: Names of the same attention in other packages' options.
        launches: How many kernels each custom operator of the backend launches, by the operator's name, for
            code that counts launches.
    """

    attend: Callable[[LocalAttentionCall], tuple[Tensor, Tensor]]
    check: CheckCall
    check_installed: Callable[[], None] = lambda: None  # Most backends need no package that may be missing.
    continue_from: ContinueFrom | None = None
    clears_rows: bool = False
    aliases: tuple[str, ...] = ()
    launches: Mapping[str, int] = field(default_factory=dict)
