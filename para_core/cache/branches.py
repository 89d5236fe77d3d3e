"""Which branch of guidance a call of a model is, where the pipeline does not say."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cache.blocks import CachedBlocks
from para_core.instance_patching import original_class
from para_core.torch_internals import pytree, version_of
from para_core.user_warnings import CacheWarning, warn_user

# If none are named, and the model takes them.
DEFAULT_CONDITIONS = ("encoder_hidden_states",)
# A pipeline has two or three.
MOST_BRANCHES = 8
# So many of which none came back are no branches: what tells them apart changes from step to step.
_MOST_NEW = 4


def conditions_of(module: nn.Module, blocks: CachedBlocks) -> tuple[str, ...]:
    """Return the arguments of ``module`` that tell its branches of guidance apart.

    Raises:
        ValueError: ``blocks.conditions`` names an argument that the model does not take.
    """
    parameters = inspect.signature(original_class(module).forward).parameters  # type: ignore[attr-defined]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return DEFAULT_CONDITIONS if blocks.conditions is None else blocks.conditions
    if blocks.conditions is None:
        return tuple([name for name in DEFAULT_CONDITIONS if name in parameters])
    unknown = [name for name in blocks.conditions if name not in parameters]
    if unknown:
        raise ValueError(
            f"CachedBlocks(conditions={blocks.conditions!r}): {original_class(module).__name__} has no argument {unknown[0]!r}; its "
            f"arguments are {', '.join(list(parameters)[1:])}. Name those that differ between branches of guidance and stay the same "
            "from step to step."
        )
    return blocks.conditions


def names_in_batch(branch: str, samples: int, branches: int, batch: int) -> list[str]:
    """Return the names of the branches that one call holds.

    Args:
        branch: name of the call.
        samples: number of samples that were compared.
        branches: number of branches in a batch.
        batch: number of samples of the whole batch; 0 if unknown.
    """
    held = branches if batch == 0 else branches * samples // batch
    if held <= 1 or samples % held != 0:
        return [branch]
    return [f"{branch}/{i}" for i in range(held)]


# Calls of a branch after which nothing is expected to alternate any more.
_MOST_COMPARED = 6


@dataclass
class _Known:
    leaves: list[Any]
    name: str
    came_back: bool = False


class _FirstCalls:
    """The tensors that a model was called with, at its first calls.

    Tensors are compared by identity of their memory, so an accelerator is not waited for.
    """

    def __init__(self) -> None:
        self._branches: list[str] = []
        self._calls: list[dict[str, Any]] = []
        # Memory that is held is not used for another tensor.
        self._held: list[Tensor] = []
        self._over = False

    def alternating(self, branch: str, tensors: Mapping[str, Tensor]) -> list[str]:
        """Add a call. Return the arguments that differed between the last two calls, if these were of one step and of one branch.

        Two branches of guidance that are called in turn look like this: the latents of two calls are the same, those of the next
        call are new, and the text of the first call comes back.
        """
        if self._over:
            return []
        self._branches.append(branch)
        self._calls.append({name: _memory_of(x) for name, x in tensors.items()})
        self._held.extend(tensors.values())
        last = {name: [call.get(name) for call in self._calls] for name in tensors}
        returned = [name for name, x in last.items() if x[-1] in x[:-2] and x[-1] != x[-2] != x[-3]]
        moved = any(len(x) > 2 and x[-3] == x[-2] != x[-1] for x in last.values())
        found = returned if moved and self._branches[-2] == self._branches[-3] else []
        if found or len(self._calls) == _MOST_COMPARED:
            self._over = True
            self._calls, self._held = [], []
        return found


def _memory_of(x: Tensor) -> Any:
    if type(x) not in (Tensor, nn.Parameter):
        return id(x)
    version = None if x.is_inference() else version_of(x)
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype, version


class Branches:
    """Tells branches apart by what the model is conditioned on, never by counting calls.

    Args:
        conditions: names of the arguments that differ between branches, and stay from step to step.
    """

    def __init__(self, conditions: tuple[str, ...]) -> None:
        self.conditions = conditions
        self._known: list[_Known] = []
        self._count = 0
        self._first_calls = _FirstCalls()
        # The name of the branch that is called next, if it was announced.
        self._announced: tuple[str | None] | None = None

    def announce(self, given: Mapping[str, Any]) -> None:
        """Name the branch of the next call, which another rank may compute."""
        self._announced = (self._name_of(given),)

    def name_of(self, given: Mapping[str, Any]) -> str | None:
        """The name of the branch: ``branch 0`` for the first that was seen, and so on; None if they cannot be told apart.

        The host waits for the device only where the conditions are tensors that were made anew, and then once.
        """
        announced, self._announced = self._announced, None
        name = self._name_of(given) if announced is None else announced[0]
        if name is not None:
            self._warn_of_unnamed(name, given)
        return name

    def _warn_of_unnamed(self, branch: str, given: Mapping[str, Any]) -> None:
        others = {name: x for name, x in given.items() if isinstance(x, Tensor) and name not in self.conditions}
        unnamed = self._first_calls.alternating(branch, others)
        if unnamed:
            named = (*self.conditions, *unnamed)
            warn_user(
                f"{' and '.join(unnamed)} differ(s) between the calls of one step, and CachedBlocks(conditions={self.conditions!r}) "
                "does not name it: the cache takes these calls for one branch of guidance, and mixes what it stores of them. Write "
                f"CachedBlocks(conditions={named!r}), or call the model inside `with model.cache_context(name)`.",
                CacheWarning,
            )

    def why_unknown(self, model: str) -> str:
        """Say why :meth:`name_of` returned None."""
        return (
            f"{' and '.join(self.conditions)} of this {model} change from step to step, so its branches of guidance cannot be "
            "told apart, and all steps are computed. Call it inside `with model.cache_context(name)`, or name in "
            "CachedBlocks(conditions=...) what stays from step to step."
        )

    def _name_of(self, given: Mapping[str, Any]) -> str | None:
        if self._count > _MOST_NEW and not any(known.came_back for known in self._known):
            return None
        leaves = pytree.tree_leaves([given.get(name) for name in self.conditions])
        # Switches, too: some pipelines call the model a third time with some of its layers left out.
        leaves += [x for name, x in sorted(given.items()) if isinstance(x, (bool, str))]
        found = self._find(leaves)
        if found is not None:
            found.came_back = True
            # What comes next may be this very tensor.
            found.leaves = leaves
            return found.name
        self._count += 1
        if self._count > _MOST_NEW and not any(known.came_back for known in self._known):
            self._known = []
            return None
        name = f"branch {self._count - 1}"
        self._known = [*self._known, _Known(leaves, name)][-MOST_BRANCHES:]
        return name

    def _find(self, leaves: list[Any]) -> _Known | None:
        alike = [known for known in self._known if _may_be_same(known.leaves, leaves)]
        for known in alike:
            if all(x is y for x, y in zip(known.leaves, leaves, strict=True) if isinstance(x, Tensor)):
                return known
        if not alike:
            return None
        same = [
            torch.stack(
                [(x == y).all() for x, y in zip(known.leaves, leaves, strict=True) if isinstance(x, Tensor)]
            ).all()
            for known in alike
        ]
        return next((known for known, equal in zip(alike, torch.stack(same).tolist(), strict=True) if equal), None)


def _may_be_same(before: list[Any], now: list[Any]) -> bool:
    """Whether only the values of tensors could tell them apart."""
    return len(before) == len(now) and all(map(_form_is_same, before, now))


def _form_is_same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
    return type(x) is type(y) and bool(x == y)
