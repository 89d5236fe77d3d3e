"""Tensors whose patches arrive one after the other, and elementwise functions of them, evaluated patch by
patch.

:mod:`.pipefusion` returns such tensors to the pipeline, whose scheduler computes with them; lazy tensors in
general are in :mod:`para_core.lazy_tensors`. Tests: tests/weights/test_pipefusion.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from para_core.layout.sequence import Run
from para_core.lazy_tensors import Expected, LazyTensor, LiveTensors, copy_ordinary_tensors, run_without_data
from para_core.torch_internals import pytree, schema_of, to_copy

_aten = torch.ops.aten
# Operators that can run patch by patch although they do not have the pointwise tag.
_COPIES = (to_copy, _aten.detach.default, _aten.alias.default)


class PatchSource(ABC):
    """The source of a lazy tensor that arrives in patches. Elementwise operators on it are recorded; others
    wait for all patches.

    ``live`` are the lazy tensors of the pipeline call.
    """

    def __init__(self, num_patches: int, live: LiveTensors) -> None:
        self.num_patches, self.live = num_patches, live

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether all patches have arrived."""

    @abstractmethod
    def up_to(self, patch: int) -> Tensor:
        """Wait for patches 0 to ``patch``, and return the whole tensor.
        Its later patches may be uninitialised.
        """

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`value` would not wait."""
        return self.is_complete

    def value(self) -> Tensor:
        """Wait for all patches, and return the whole tensor."""
        return self.up_to(self.num_patches - 1)

    def postpone(self, func: Any, args: Any, kwargs: Any) -> LazyTensor | None:
        """Record the call ``func(*args, **kwargs)``, and return its result; None if it cannot run patch by
        patch.

        Other tensor arguments of a recorded function, such as latents, are copied: pipelines may change them
        in place.
        """
        if schema_of(func).is_mutable or not (func in _COPIES or torch.Tag.pointwise in func.tags):
            return None
        # Do not record random functions: they would run once per patch, and draw new numbers each time.
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        first = next(x for x in tensors if isinstance(x, LazyTensor))
        if kwargs.get("device") not in (None, first.device) or not all(self._fits(x, first) for x in tensors):
            return None
        output = run_without_data(func, args, kwargs)
        # Pointwise operators with another result, such as one bool (equal) or two tensors, are not recorded.
        if not isinstance(output, Tensor) or output.shape != first.shape:
            return None
        args, kwargs = copy_ordinary_tensors((args, kwargs))
        source = _Pointwise(func, args, kwargs, self.num_patches, self.live)
        return LazyTensor.make(source, Expected(output, first.device))

    def _fits(self, x: Tensor, first: LazyTensor) -> bool:
        """Whether an argument ``x`` of an elementwise function is an ordinary tensor, or arrives in equal patches."""
        if isinstance(x, LazyTensor):
            # Nothing compares the patches. Only a Fusion makes arrivals: each has a LiveTensors of its own, one
            # number of patches, and cuts tensors of one shape alike.
            return x.source.live is self.live and x.shape == first.shape
        return type(x) in (Tensor, nn.Parameter) and (x.device == first.device or x.ndim == 0)


def source_of_patches(x: object) -> PatchSource | None:
    """Return the source of ``x`` if it is a tensor that arrives in patches; None otherwise."""
    if isinstance(x, LazyTensor) and isinstance(x.source, PatchSource):
        return x.source
    return None


class Arrival(PatchSource):
    """A tensor whose patches along ``dim`` arrive one after the other.

    ``whole`` is an uninitialised tensor of full size, into which arriving patches are copied. ``runs`` are
    the first index and the length of each patch along ``dim``. Whoever makes it adds all patches before
    anyone asks for one: ``Fusion`` does so before it returns the tensor.
    """

    def __init__(self, whole: Tensor, runs: list[Run], live: LiveTensors, dim: int = 1) -> None:
        super().__init__(len(runs), live)
        self._whole, self._runs, self._dim = whole, runs, dim
        # For each patch, the function that waits for it and returns it; None after it was copied into the
        # tensor.
        self._pending: list[Callable[[], Tensor] | None] = []

    def add(self, get: Callable[[], Tensor]) -> None:
        """Add the next patch, in the order of the patches. ``get`` is called later; it must wait for the
        patch and return it.
        """
        self._pending.append(get)

    def up_to(self, patch: int) -> Tensor:
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


class _Pointwise(PatchSource):
    """A recorded call of an elementwise function on tensors that arrive in patches. It runs on tensors of
    full size, again for each patch that is requested.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, num_patches: int, live: LiveTensors) -> None:
        super().__init__(num_patches, live)
        self._call: tuple[Any, Any, Any] | None = (func, args, kwargs)
        live.add_reader(self)
        self._output: Tensor | None = None
        self._patch = -1
        # Patches that have arrived stay. Without this note, each y = y * y would double the calls that are asked.
        self._was_complete = False

    @property
    def is_complete(self) -> bool:
        """Whether all patches of all inputs have arrived."""
        if self._call is None or self._was_complete:
            return True
        leaves = pytree.tree_leaves(self._call)
        self._was_complete = all(x.source.is_ready for x in leaves if isinstance(x, LazyTensor))
        return self._was_complete

    def up_to(self, patch: int) -> Tensor:
        """Wait for patches 0 to ``patch`` of the inputs, and return the whole result, valid for these
        patches.

        Until the last patch, each later patch gives a new tensor. That of the last patch stays, and is the
        one that :meth:`value` returns.
        """
        if self._patch < patch and self._call is not None:
            func, args, kwargs = self._call
            args, kwargs = pytree.tree_map_only(LazyTensor, lambda x: x.source.up_to(patch), (args, kwargs))
            self._output, self._patch = func(*args, **kwargs), patch
            if patch == self.num_patches - 1:
                self._call = None  # The last patch is computed, so release the inputs.
        if self._output is None:
            raise RuntimeError(f"patch {patch} was requested, but no patch has been computed.")
        return self._output
