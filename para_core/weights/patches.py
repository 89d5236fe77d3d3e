"""Tensors whose patches arrive one after the other, and pointwise functions of them, evaluated patch by patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cfg.deferred import Deferred, Expected, LiveDeferred, materialize, run_without_data
from para_core.torch_internals import make_wrapper_subclass, pytree, schema_of, to_copy

_aten = torch.ops.aten
# Like pointwise functions: each element of the result depends only on the same element of the input.
_COPIES = (to_copy, _aten.clone.default, _aten.detach.default, _aten.alias.default)
# Tagged as pointwise, but returns one bool for all elements.
_WHOLE = (_aten.equal.default,)


class Arrival:
    """A tensor whose patches along ``dim`` arrive one after the other.

    Args:
        whole: The memory of the tensor, uninitialised.
        rows: Begin and length of each patch.
    """

    def __init__(self, whole: Tensor, rows: list[tuple[int, int]], dim: int = 1) -> None:
        self._whole, self._rows, self._dim = whole, rows, dim
        # For each patch, the function that waits for it; None if it was read.
        self._coming: list[Callable[[], Tensor] | None] = []

    @property
    def num_patches(self) -> int:
        return len(self._rows)

    def comes(self, get: Callable[[], Tensor]) -> None:
        """Add the next patch: ``get`` returns it, and may wait."""
        self._coming.append(get)

    def up_to(self, patch: int) -> Tensor:
        """Wait for patches 0 … ``patch``, and return the whole tensor. Its other patches are uninitialised."""
        for index in range(patch + 1):
            get = self._coming[index]
            if get is not None:
                self._whole.narrow(self._dim, *self._rows[index]).copy_(get())
                self._coming[index] = None
        return self._whole

    @property
    def is_complete(self) -> bool:
        """Whether all patches have arrived and were read."""
        return len(self._coming) == self.num_patches and all(get is None for get in self._coming)


class _Pointwise:
    """A recorded pointwise call on tensors of which some arrive in patches. It is evaluated on whole tensors, up to a
    valid patch.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, num_patches: int) -> None:
        self._call: tuple[Any, Any, Any] | None = (func, args, kwargs)
        self.num_patches = num_patches
        self._output: Tensor | None = None
        self._patch = -1

    @property
    def is_complete(self) -> bool:
        """Whether all its inputs have arrived."""
        leaves = pytree.tree_leaves(self._call) if self._call is not None else []
        return all(x.source.is_complete for x in leaves if isinstance(x, Patched))

    def up_to(self, patch: int) -> Tensor:
        if self._patch < patch and self._call is not None:
            func, args, kwargs = self._call
            args, kwargs = pytree.tree_map_only(Patched, lambda x: x.source.up_to(patch), (args, kwargs))
            self._output, self._patch = func(*args, **kwargs), patch
            if patch == self.num_patches - 1:
                # The inputs are not needed any more.
                self._call = None
        if self._output is None:
            raise RuntimeError(f"patch {patch} was requested, but no patch has been computed.")
        return self._output


class _Always:
    """The round of a :class:`Patched` tensor. It never ends, because each tensor has patches of its own."""

    later: list[Any] = []  # noqa: RUF012  It stays empty.
    is_over = False
    waits_for_more = True

    def __init__(self, live: LiveDeferred) -> None:
        self.live = live

    def finish(self) -> None:
        """Do nothing, because each tensor is waited for separately."""


class Patched(Deferred):
    """A tensor that arrives in patches. Pointwise functions of it are recorded; everything else waits for all patches.

    Other tensor arguments of a recorded function are copied, because pipelines may change them in place (latents).
    """

    source: Arrival | _Pointwise

    @staticmethod
    def of_source(source: Arrival | _Pointwise, expected: Expected, live: LiveDeferred) -> Patched:
        """Return a tensor like ``expected`` that waits for ``source``. ``live`` holds the deferred tensors of the
        pipeline call.
        """
        like = expected.like
        patched: Patched = make_wrapper_subclass(
            Patched, like.shape, strides=like.stride(), dtype=like.dtype, device=expected.device
        )
        patched.of, patched.source = _Always(live), source
        live.add(patched)
        return patched

    @property
    def is_ready(self) -> bool:
        return self.source.is_complete

    def value(self) -> Tensor:
        return self.source.up_to(self.source.num_patches - 1)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        recorded = _recorded(func, args, kwargs)
        return func(*materialize(args), **materialize(kwargs)) if recorded is None else recorded


def _recorded(func: Any, args: Any, kwargs: Any) -> Patched | None:
    """Return the result of ``func`` as a :class:`Patched` tensor; None if it cannot be evaluated patch by patch."""
    if func in _WHOLE or schema_of(func).is_mutable or not (func in _COPIES or torch.Tag.pointwise in func.tags):
        return None
    # Random numbers would be drawn again for each patch.
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
    output = run_without_data(func, args, kwargs)
    if not isinstance(output, Tensor) or output.shape != first.shape:
        return None
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x if isinstance(x, Patched) else x.clone(), (args, kwargs))
    return Patched.of_source(
        _Pointwise(func, args, kwargs, first.source.num_patches), Expected(output, first.device), first.of.live
    )
