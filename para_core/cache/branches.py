"""Identify the CFG branch of a model call by its arguments, if the pipeline does not name the branch."""

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

# The arguments that identify branches if the user names none. Those that the model does not have are ignored.
DEFAULT_CONDITIONS = ("encoder_hidden_states",)
# Maximum number of branches whose residuals are stored. A pipeline has two or three.
MOST_BRANCHES = 8
# After more than this number of calls with different conditions, none of which was repeated, the conditions are
# considered to change from step to step. They then cannot identify branches.
_MOST_NEW = 4


def conditions_of(module: nn.Module, blocks: CachedBlocks) -> tuple[str, ...]:
    """Return the names of the arguments of ``module`` that identify its CFG branches.

    Raises:
        ValueError: ``blocks.conditions`` names an argument that the model does not have.
    """
    parameters = inspect.signature(original_class(module).forward).parameters  # type: ignore[attr-defined]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return DEFAULT_CONDITIONS if blocks.conditions is None else blocks.conditions
    if blocks.conditions is None:
        return tuple([name for name in DEFAULT_CONDITIONS if name in parameters])
    unknown = [name for name in blocks.conditions if name not in parameters]
    if unknown:
        raise ValueError(
            f"CachedBlocks(conditions={blocks.conditions!r}): {original_class(module).__name__} has no argument "
            f"{unknown[0]!r}; its arguments are {', '.join(list(parameters)[1:])}. Name those that differ between "
            "branches of guidance and stay the same from step to step."
        )
    return blocks.conditions


# In this number of first calls, the cache looks for arguments that alternate between branches.
_MOST_COMPARED = 6


@dataclass
class _Branch:
    leaves: list[Any]
    name: str
    came_back: bool = False


class _FirstCalls:
    """The arguments of the first calls of a model, to detect CFG branches that the conditions do not tell apart.

    A pipeline may create new tensors with the same text or latents for each call. Tensors in different memory are
    therefore compared by value, for which the host waits for the device.
    """

    def __init__(self) -> None:
        self._branches: list[str] = []
        self._calls: list[dict[str, list[_Leaf]]] = []
        self._over = False

    def alternating(self, branch: str, arguments: Mapping[str, Any]) -> list[str]:
        """Add a call of ``branch``, and return the names of the ``arguments`` (without the conditions) that seem to
        alternate between two branches of one step.

        Branches that are called in turn are recognized by this pattern: two calls have the same latents, the next call
        has new latents, and the text of an earlier call comes back.
        """
        if self._over:
            return []
        self._branches.append(branch)
        self._calls.append({name: [_Leaf(x) for x in pytree.tree_leaves(value)] for name, value in arguments.items()})
        alternating: list[str] = []
        if len(self._calls) > 2 and self._branches[-2] == self._branches[-3]:
            now, before, first = self._calls[-1], self._calls[-2], self._calls[-3]
            changed = [name for name in now if not _are_same(now[name], before.get(name))]
            returned = [
                name
                for name in changed
                if not _are_same(before.get(name), first.get(name))
                and any(_are_same(now[name], call.get(name)) for call in self._calls[:-2])
            ]
            if returned and any(_are_same(before.get(name), first.get(name)) for name in changed):
                alternating = returned
        if alternating or len(self._calls) == _MOST_COMPARED:
            self._over = True
            self._calls = []
        return alternating


class _Leaf:
    """A tensor or another value in an argument of a call, with the version counter of the tensor during that call."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.is_plain = type(value) in (Tensor, nn.Parameter)
        self.version = version_of(value) if self.is_plain and not value.is_inference() else 0

    def is_same(self, other: _Leaf) -> bool:
        x, y = self.value, other.value
        if type(x) is type(y) and isinstance(x, (bool, int, float, str)):
            return bool(x == y)
        if not (self.is_plain and other.is_plain) or not _form_is_same(x, y):
            # Only compare the objects: comparing the values of a deferred tensor (see para_core.cfg) would compute it.
            return x is y
        if x.is_meta or _place_of(x) == _place_of(y):
            return self.version == other.version
        if self._is_changed() or other._is_changed() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        return torch.equal(x, y)

    def _is_changed(self) -> bool:
        return not self.value.is_inference() and version_of(self.value) != self.version


def _place_of(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.stride()


def _are_same(leaves: list[_Leaf] | None, others: list[_Leaf] | None) -> bool:
    if leaves is None or others is None:
        return leaves is others
    return len(leaves) == len(others) and all(x.is_same(y) for x, y in zip(leaves, others, strict=True))


class Branches:
    """The CFG branches of a model, identified by arguments of its calls (the conditions), never by counting calls.

    Args:
        conditions: Names of the arguments that differ between branches and stay equal from step to step.
    """

    def __init__(self, conditions: tuple[str, ...]) -> None:
        self.conditions = conditions
        self._branches: list[_Branch] = []
        self._count = 0
        self._first_calls = _FirstCalls()
        # If :meth:`announce` was called, a tuple with the branch name of the next call; the name may be None.
        self._announced: tuple[str | None] | None = None

    def announce(self, arguments: Mapping[str, Any]) -> None:
        """Identify the branch of the next model call from its arguments, and keep its name for :meth:`name_of`.

        With CFG parallelism all ranks call this for every model call, also if another rank runs the model, so that the
        branches get the same names on all ranks.
        """
        self._announced = (self._name_of(arguments),)

    def name_of(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the name of the branch of a model call: ``branch 0``, ``branch 1``, …; None if it is unknown.

        The host waits for the device once if conditions are new tensors, to compare their values. In the first calls,
        the values of other arguments are compared as well, to detect branches that the conditions do not tell apart.
        """
        announced, self._announced = self._announced, None
        name = self._name_of(arguments) if announced is None else announced[0]
        if name is None:
            return None
        others = {other: x for other, x in arguments.items() if other not in self.conditions}
        unnamed = self._first_calls.alternating(name, others)
        if unnamed:
            named = (*self.conditions, *unnamed)
            warn_user(
                f"{' and '.join(unnamed)} differ(s) between the calls of one step, and "
                f"CachedBlocks(conditions={self.conditions!r}) does not name it: the cache treats these calls as one "
                f"CFG branch, and mixes their residuals. Write CachedBlocks(conditions={named!r}), or call the model "
                "inside `with model.cache_context(name)`.",
                CacheWarning,
            )
        return name

    def why_unknown(self, model: str) -> str:
        """Return the text of the warning to show after :meth:`name_of` returned None."""
        return (
            f"{' and '.join(self.conditions)} of this {model} change from step to step, so its CFG branches cannot be "
            "identified, and all steps are computed. Call it inside `with model.cache_context(name)`, or name in "
            "CachedBlocks(conditions=...) arguments that stay equal from step to step."
        )

    def _name_of(self, arguments: Mapping[str, Any]) -> str | None:
        if self._count > _MOST_NEW and not any(branch.came_back for branch in self._branches):
            return None
        leaves = pytree.tree_leaves([arguments.get(name) for name in self.conditions])
        # Include all bools and strings, because some pipelines call the model a third time per step with some layers
        # left out, and say so by an argument of this kind.
        leaves += [x for name, x in sorted(arguments.items()) if isinstance(x, (bool, str))]
        branch = self._find(leaves)
        if branch is not None:
            branch.came_back = True
            # Store the new tensors: if the next call passes the same objects, their values need not be compared.
            branch.leaves = leaves
            return branch.name
        self._count += 1
        if self._count > _MOST_NEW and not any(branch.came_back for branch in self._branches):
            self._branches = []
            return None
        name = f"branch {self._count - 1}"
        self._branches = [*self._branches, _Branch(leaves, name)][-MOST_BRANCHES:]
        return name

    def _find(self, leaves: list[Any]) -> _Branch | None:
        # First compare tensors by shape, dtype and device only, which does not wait for the device.
        candidates = [
            branch
            for branch in self._branches
            if len(branch.leaves) == len(leaves) and all(map(_form_is_same, branch.leaves, leaves))
        ]
        for branch in candidates:
            if all(x is y for x, y in zip(branch.leaves, leaves, strict=True) if isinstance(x, Tensor)):
                return branch
        if not candidates:
            return None
        equal = [
            torch.stack(
                [(x == y).all() for x, y in zip(branch.leaves, leaves, strict=True) if isinstance(x, Tensor)]
            ).all()
            for branch in candidates
        ]
        return next(
            (branch for branch, is_equal in zip(candidates, torch.stack(equal).tolist(), strict=True) if is_equal), None
        )


def _form_is_same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device
    return type(x) is type(y) and bool(x == y)
