"""Tensors whose patches arrive one after the other, and elementwise functions of them, evaluated patch by
patch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cfg.deferred import Deferred, Expected, LiveDeferred, materialize, run_without_data
from para_core.layout.sequence import Run
from para_core.torch_internals import make_wrapper_subclass, pytree, schema_of, to_copy

_aten = torch.ops.aten
# Operators that can run patch by patch although they do not have the pointwise tag.
_COPIES = (to_copy, _aten.clone.default, _aten.detach.default, _aten.alias.default)
# Operators with the pointwise tag that return one bool for the whole tensor, so they cannot run patch by
# patch.
_WHOLE = (_aten.equal.default,)


class Arrival:
    """A tensor whose patches along ``dim`` arrive one after the other.

    ``whole`` is an uninitialised tensor of full size, into which arriving patches are copied. ``runs`` are
    the first index and the length of each patch along ``dim``.
    """

    def __init__(self, whole: Tensor, runs: list[Run], dim: int = 1) -> None:
        self._whole, self._runs, self._dim = whole, runs, dim
        # For each patch, the function that waits for it and returns it; None after it was copied into the
        # tensor.
        self._pending: list[Callable[[], Tensor] | None] = []

    @property
    def num_patches(self) -> int:
        return len(self._runs)

    def add(self, get: Callable[[], Tensor]) -> None:
        """Add the next patch. ``get`` is called later; it must wait for the patch and return it."""
        self._pending.append(get)

    def up_to(self, patch: int) -> Tensor:
        """Wait for patches 0 to ``patch``, and return the whole tensor.

        Its later patches may be uninitialised.
        """
        for index in range(patch + 1):
            get = self._pending[index]
            if get is not None:
                self._whole.narrow(self._dim, *self._runs[index]).copy_(get())
                self._pending[index] = None
        return self._whole

    @property
    def is_complete(self) -> bool:
        """Whether all patches have arrived and been copied into the tensor of full size."""
        return len(self._pending) == self.num_patches and all(get is None for get in self._pending)


class _Pointwise:
    """A recorded call of an elementwise function on tensors that arrive in patches.

    It runs on tensors of full size, again for each patch that is requested.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, num_patches: int) -> None:
        self._call: tuple[Any, Any, Any] | None = (func, args, kwargs)
        self.num_patches = num_patches
        self._output: Tensor | None = None
        self._patch = -1

    @property
    def is_complete(self) -> bool:
        """Whether all patches of all inputs have arrived."""
        leaves = pytree.tree_leaves(self._call) if self._call is not None else []
        return all(x.source.is_complete for x in leaves if isinstance(x, Patched))

    def up_to(self, patch: int) -> Tensor:
        """Wait for patches 0 to ``patch`` of the inputs, and return the whole result, valid for these
        patches.
        """
        if self._patch < patch and self._call is not None:
            func, args, kwargs = self._call
            args, kwargs = pytree.tree_map_only(Patched, lambda x: x.source.up_to(patch), (args, kwargs))
            self._output, self._patch = func(*args, **kwargs), patch
            if patch == self.num_patches - 1:
                self._call = None  # The last patch is computed, so release the inputs.
        if self._output is None:
            raise RuntimeError(f"patch {patch} was requested, but no patch has been computed.")
        return self._output


class _NeverOver:
    """A :class:`PendingRound` that is never over, because each :class:`Patched` tensor waits for its own
    patches.
    """

    later: list[Any] = []  # noqa: RUF012  Nothing is ever added.
    is_over = False
    waits_for_more = True

    def __init__(self, live: LiveDeferred) -> None:
        self.live = live

    def finish(self) -> None:
        """Do nothing, because reading a tensor waits for its patches."""


class Patched(Deferred):
    """A tensor that arrives in patches.

    Elementwise functions of it are recorded; others wait for all patches.

    Other tensor arguments of a recorded function, such as latents, are copied: pipelines may change them in
    place.
    """

    source: Arrival | _Pointwise

    @staticmethod
    def of_source(source: Arrival | _Pointwise, expected: Expected, live: LiveDeferred) -> Patched:
        """Return a tensor like ``expected`` with the data of ``source``, and add it to ``live``, those of the
        call.
        """
        like = expected.like
        patched: Patched = make_wrapper_subclass(
            Patched, like.shape, strides=like.stride(), dtype=like.dtype, device=expected.device
        )
        patched.of, patched.source = _NeverOver(live), source
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
        recorded = _record(func, args, kwargs)
        if recorded is not None:
            return recorded
        return func(*materialize(args), **materialize(kwargs))


def _record(func: Any, args: Any, kwargs: Any) -> Patched | None:
    """Record the call ``func(*args, **kwargs)``, and return its result; None if it cannot run patch by patch."""
    if func in _WHOLE or schema_of(func).is_mutable or not (func in _COPIES or torch.Tag.pointwise in func.tags):
        return None
    # Do not record random functions: they would run once per patch, and draw new numbers each time.
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
