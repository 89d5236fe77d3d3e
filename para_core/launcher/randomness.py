"""Random numbers that continue in the caller as if it had run the pipeline itself.

The state of the CPU's generator, and of generators among the arguments, travels with each call and back. A
caller should never initialize CUDA, so the state of CUDA's generator stays on the ranks. If the caller has
seeded it since its last call, the ranks seed it too.

The caller's side is :class:`CallerSeeds`, used by ``handle.py``; the two functions run on ranks (``rank.py``,
``callbacks.py``). Tests: tests/launcher/test_calls.py, tests/launcher/test_failures.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from para_core.launcher.messages import RandomState


class CallerSeeds:
    """The random state of the caller, before and after calls.

    Each message that takes the state to the ranks needs three calls here, in this order:
    :meth:`state_for_call` before the message is pickled, :meth:`note_sent` once that has succeeded, and
    :meth:`continue_from` with the state that comes back. ``handle.py`` does this in two places, for loading
    and for each call. A callback in between begins with the rank's state, so there :meth:`continue_from`
    comes first (``callbacks.py``, ``running_call.py``).
    """

    def __init__(self) -> None:
        # The seeding of CUDA that the ranks know, and that of the last state: objects that torch makes anew
        # at each seeding.
        self._known: Any = None
        self._offered: Any = None

    def state_for_call(self, generators: Sequence[Any] = ()) -> RandomState:
        """Return the random state of this process for the ranks, with the states of ``generators``.

        It is empty if torch is not imported here. A seed of CUDA is part of it until :meth:`note_sent` is
        called.
        """
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "get_rng_state"):
            return RandomState()
        from para_core.torch_internals import queued_cuda_seed

        states = [generator.get_state() for generator in generators]
        if torch.cuda.is_initialized():
            return RandomState(torch.get_rng_state(), torch.cuda.get_rng_state(), generators=states)
        queued = queued_cuda_seed()
        if queued is None or queued[0] is self._known:
            return RandomState(torch.get_rng_state(), generators=states)
        self._offered, seed = queued
        return RandomState(torch.get_rng_state(), cuda_seed=seed, generators=states)

    def note_sent(self) -> None:
        """Record that the ranks get the last state, which a value that cannot be pickled may prevent."""
        self._known = self._offered

    def forget(self) -> None:
        """Forget what the ranks know, because others start in their place."""
        self._known = self._offered = None

    def continue_from(self, state: RandomState, generators: Sequence[Any] = ()) -> None:
        """Set the random state of this process to ``state``, that of the first rank after a call.

        ``generators`` are those among the call's arguments.
        """
        import torch

        if state.cpu is not None:
            torch.set_rng_state(state.cpu)
        if state.cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state.cuda)
        for generator, after in zip(generators, state.generators, strict=False):
            generator.set_state(after)


def set_random_state(state: RandomState) -> None:
    """Set the random state of this rank to that of the caller."""
    import torch

    if state.cuda_seed is not None:
        torch.cuda.manual_seed_all(state.cuda_seed)
    if state.cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state.cuda)
    if state.cpu is not None:
        torch.set_rng_state(state.cpu)


def random_state_of_rank(generators: Sequence[Any] = ()) -> RandomState:
    """Return the random state of this rank, with the states of ``generators``."""
    import torch

    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return RandomState(
        torch.get_rng_state(), cuda, generators=[generator.get_state() for generator in generators]
    )
