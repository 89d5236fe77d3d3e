"""Tensors of tokens that come in patches, and what pointwise functions make of them, patch by patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cfg.deferred import Deferred, Expected, LiveDeferred, materialize
from para_core.torch_internals import make_wrapper_subclass, pytree, schema_of, to_copy

_aten = torch.ops.aten
# Beside pointwise functions: each element is that of the same place.
_COPIES = (to_copy, _aten.clone.default, _aten.detach.default, _aten.alias.default)
# Tagged as pointwise, but gives one bool of all elements.
_WHOLE = (_aten.equal.default,)


class Arrival:
    """A tensor whose patches, along ``dim``, come one after the other.

    Args:
        whole: memory for it, of any content.
        rows: of each patch, where it begins and how long it is.
    """

    def __init__(self, whole: Tensor, rows: list[tuple[int, int]], dim: int = 1) -> None:
        self._whole, self._rows, self._dim = whole, rows, dim
        # Of each patch, what waits for it; None: it has come.
        self._coming: list[Callable[[], Tensor] | None] = []

    @property
    def num_patches(self) -> int:
        return len(self._rows)

    def comes(self, get: Callable[[], Tensor]) -> None:
        """The next patch is what ``get`` gives; it may wait."""
        self._coming.append(get)

    def up_to(self, patch: int) -> Tensor:
        """The whole tensor, of which patches 0 … ``patch`` are valid; the others hold anything."""
        for place in range(patch + 1):
            get = self._coming[place]
            if get is not None:
                self._whole.narrow(self._dim, *self._rows[place]).copy_(get())
                self._coming[place] = None
        return self._whole

    @property
    def is_complete(self) -> bool:
        """Whether all patches have come, and nobody waits."""
        return len(self._coming) == self.num_patches and all(get is None for get in self._coming)


class _Made:
    """A pointwise function of tensors of which some come in patches, evaluated on whole tensors, as far as they are valid."""

    def __init__(self, func: Any, args: Any, kwargs: Any, num_patches: int) -> None:
        self._call: tuple[Any, Any, Any] | None = (func, args, kwargs)
        self.num_patches = num_patches
        self._found: Tensor | None = None
        self._patch = -1

    @property
    def is_complete(self) -> bool:
        """Whether all that it is made of has come."""
        leaves = pytree.tree_leaves(self._call) if self._call is not None else []
        return all(x.source.is_complete for x in leaves if isinstance(x, Patched))

    def up_to(self, patch: int) -> Tensor:
        if self._patch < patch and self._call is not None:
            func, args, kwargs = self._call
            args, kwargs = pytree.tree_map_only(Patched, lambda x: x.source.up_to(patch), (args, kwargs))
            self._found, self._patch = func(*args, **kwargs), patch
            if patch == self.num_patches - 1:
                # What it was made of may go.
                self._call = None
        if self._found is None:
            raise RuntimeError("a patch was asked for that nobody computes.")
        return self._found


class _Always:
    """Of :class:`Patched`, what :class:`Deferred` asks of a round: it is never over, for each tensor has patches of its own."""

    later: list[Any] = []  # noqa: RUF012  nothing is ever put there
    is_over = False
    waits_for_more = True

    def __init__(self, live: LiveDeferred) -> None:
        self.live = live

    def finish(self) -> None:
        """Each tensor is waited for on its own."""


class Patched(Deferred):
    """A tensor that comes in patches; whatever needs more of it than its elements, each for itself, waits for all.

    Tensors that a function takes besides are copied: pipelines go on with latents in place.
    """

    source: Arrival | _Made

    @staticmethod
    def of_source(source: Arrival | _Made, expected: Expected, live: LiveDeferred) -> Patched:
        """Return a tensor like ``expected`` that waits for ``source``; ``live`` holds those of the same pipeline call."""
        like = expected.like
        made: Patched = make_wrapper_subclass(
            Patched, like.shape, strides=like.stride(), dtype=like.dtype, device=expected.device
        )
        made.of, made.source = _Always(live), source
        live.add(made)
        return made

    @property
    def is_ready(self) -> bool:
        return self.source.is_complete

    def value(self) -> Tensor:
        return self.source.up_to(self.source.num_patches - 1)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        made = _recorded(func, args, kwargs)
        return func(*materialize(args), **materialize(kwargs)) if made is None else made


def _recorded(func: Any, args: Any, kwargs: Any) -> Patched | None:
    """``func``, to be computed patch by patch; None if it cannot be."""
    if func in _WHOLE or schema_of(func).is_mutable or not (func in _COPIES or torch.Tag.pointwise in func.tags):
        return None
    # Numbers would be drawn for each patch anew.
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    patched = [x for x in tensors if isinstance(x, Patched)]
    first = patched[0]
    fits = all(
        (type(x) in (Tensor, nn.Parameter) and (x.device == first.device or x.ndim == 0))
        or (isinstance(x, Patched) and x.shape == first.shape and x.source.num_patches == first.source.num_patches)
        for x in tensors
    )
    if not fits or kwargs.get("device") not in (None, first.device):
        return None
    on_meta = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
    try:
        found = func(*_without_data(args), **_without_data(on_meta))
    except (NotImplementedError, RuntimeError):
        return None
    if not isinstance(found, Tensor) or found.shape != first.shape:
        return None
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x if isinstance(x, Patched) else x.clone(), (args, kwargs))
    return Patched.of_source(
        _Made(func, args, kwargs, first.source.num_patches), Expected(found, first.device), first.of.live
    )


def _without_data(tree: Any) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), tree
    )
