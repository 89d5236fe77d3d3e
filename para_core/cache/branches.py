"""Identify the CFG branch of a model call by its arguments, and calls of one branch within one step.

The comparison with earlier calls is in :mod:`.branch_search`. :mod:`.block_cache` calls this before each call
of a model. Tests: tests/cache/test_steps.py, tests/cache/test_state.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from para_core.cache.argument_values import (
    MOST_READ,
    Leaf,
    Leaves,
    ReadValues,
    argument_leaves,
    clocks_in,
    condition_of,
    leaf_of,
)
from para_core.cache.blocks import CachedBlocks
from para_core.cache.branch_search import (
    MOST_BRANCHES,
    Agree,
    BranchCall,
    BranchGroup,
    BranchSearch,
    Pair,
    all_equal,
    pairs_to_compare,
)
from para_core.instance.private_class import original_class
from para_core.torch_internals import pytree
from para_core.user_warnings import CacheWarning, warn_user

# The arguments that identify branches if the user names none. Those that the model does not have are ignored.
DEFAULT_CONDITIONS = ("encoder_hidden_states",)
# After more than this number of calls with different conditions, none of which came back, the conditions are
# considered to change from step to step. They then cannot identify branches. A pipeline has two or three
# branches.
_MOST_NEW = 4


def conditions_of(module: nn.Module, blocks: CachedBlocks) -> tuple[str, ...]:
    """Return the names of the arguments of ``module`` that identify its CFG branches.

    Raises:
        ValueError: ``blocks.conditions`` names an argument that the model does not have.
    """
    parameters = inspect.signature(original_class(module).forward).parameters  # type: ignore[attr-defined]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        if blocks.conditions is None:
            return DEFAULT_CONDITIONS
        return blocks.conditions
    if blocks.conditions is None:
        return tuple([name for name in DEFAULT_CONDITIONS if name in parameters])
    unknown = [name for name in blocks.conditions if name.split(".")[0] not in parameters]
    if unknown:
        raise ValueError(
            f"CachedBlocks(conditions={blocks.conditions!r}): {original_class(module).__name__} has no argument "
            f"{unknown[0]!r}; its arguments are {', '.join(list(parameters)[1:])}. Name those that differ between "
            "branches of guidance and stay the same from step to step."
        )
    return blocks.conditions


class Branches:
    """The CFG branches of a model, identified by arguments of its calls, never by counting calls.

    Calls with equal conditions form a group (:class:`~para_core.cache.branch_search.BranchGroup`), or calls
    inside one ``cache_context``. Within one step, a branch is called once. If two calls of one step are in
    one group, other arguments that differ between them tell them apart. If only arguments differ that change
    from step to step (two tiles), or none, nothing tells them apart, and all calls of this group must be
    computed.

    Args:
        conditions: Names of the arguments that differ between branches and stay equal from step to step.
        model: The name of the model, for messages.
        warn: ``warn(key, message)`` warns the user. Defaults to :func:`~para_core.user_warnings.warn_user`.
    """

    def __init__(
        self,
        conditions: tuple[str, ...],
        model: str = "model",
        warn: Callable[[str, str], None] | None = None,
    ) -> None:
        self.conditions = conditions
        self.model = model
        self.warn = warn or (lambda key, message: warn_user(message, CacheWarning))
        # The beginnings of the paths of values inside conditions.
        self._paths_in_conditions = tuple([f"{name}{sign}" for name in conditions for sign in (".", "[")])
        self._groups: list[BranchGroup] = []
        self._named: dict[str, BranchGroup] = {}
        # Number of calls whose conditions were new, which numbers the groups.
        self._count = 0
        # If :meth:`announce` was called, the branch of the next call.
        self._announced: BranchCall | None = None

    def announce(self, arguments: Mapping[str, Any], moment: int | None) -> None:
        """Identify the branch of the next model call, and keep it for :meth:`identify`.

        With CFG parallelism all ranks call this for every model call, also if another rank runs the model, so
        that the branches get the same names on all ranks.
        """
        self._announced = self._identify(arguments, None, moment, None, raises=False)

    def identify(
        self,
        arguments: Mapping[str, Any],
        context: str | None,
        moment: int | None,
        agree: Agree | None = None,
    ) -> BranchCall:
        """Return the branch of a model call. Collective if ``agree`` is given.

        The host waits for the device if conditions are new tensors, to compare their values, and, if
        ``moment`` is None, to read the timestep.

        Args:
            arguments: The arguments of the call by name.
            context: The name that diffusers' ``cache_context`` gave the branch, or None.
            moment: A number that changes from step to step; None if only the arguments can tell.
            agree: If the arguments are this rank's part of the inputs, the function by which ranks agree.

        Raises:
            RuntimeError: The cache has skipped a call of this step that belongs to another branch.
        """
        announced = self._announced
        self._announced = None
        if announced is not None and context is None:
            return announced
        return self._identify(arguments, context, moment, agree, raises=True)

    def name_of(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the name of the group of a call by its conditions alone: ``branch 0``, ``branch 1``, …; None
        if unknown.

        The host waits for the device once if conditions are new tensors, to compare their values.
        """
        group = self._group_of(arguments, None)
        if group is None:
            return None
        return group.name

    def _identify(
        self,
        arguments: Mapping[str, Any],
        context: str | None,
        moment: int | None,
        agree: Agree | None,
        *,
        raises: bool,
    ) -> BranchCall:
        """Do what :meth:`identify` does, without an announced call. ``raises`` is as in :class:`BranchSearch`."""
        if context is None:
            group = self._group_of(arguments, agree)
        else:
            group = self._named.setdefault(context, BranchGroup([], context))
            if len(self._named) > MOST_BRANCHES:
                self.warn(
                    "names",
                    f"this {self.model} was called inside more than {MOST_BRANCHES} cache_contexts of different names, "
                    "and the cache keeps the residuals of as many branches, those called last. If each step has more, "
                    "all its calls are computed. If not, call reset_cache(model) before each generation.",
                )
        if group is None:
            self.warn(
                "branches",
                f"{' and '.join(self.conditions)} of this {self.model} change from step to step, so its CFG branches "
                "cannot be identified, and all steps are computed. Call it inside `with model.cache_context(name)`, or "
                "name in CachedBlocks(conditions=...) arguments that stay equal from step to step.",
            )
            return BranchCall(None)
        if group.mixed:
            return BranchCall(group.name, repeated=True)
        leaves = argument_leaves(arguments)
        clocks = clocks_in(leaves)
        if moment is None:
            _read_clocks(leaves, clocks)
        if context is None:
            leaves = {
                path: leaf for path, leaf in leaves.items() if path in clocks or not self._is_condition(path)
            }
        return BranchSearch(self, group, leaves, clocks, moment, agree, raises).run()

    def _is_condition(self, path: str) -> bool:
        """Whether the value at ``path`` is in one of the conditions, so that it is equal in all calls of a group."""
        return path in self.conditions or path.startswith(self._paths_in_conditions)

    def _group_of(self, arguments: Mapping[str, Any], agree: Agree | None) -> BranchGroup | None:
        """Return the group of a call by its conditions; a new one if they are new, None if they identify nothing."""
        if self._count > _MOST_NEW and not any(group.came_back for group in self._groups):
            return None
        values = pytree.tree_leaves([condition_of(arguments, name) for name in self.conditions])
        # Include all bools and strings, because some pipelines call the model a third time per step with some
        # layers left out, and say so by an argument of this kind.
        values += [x for name, x in sorted(arguments.items()) if isinstance(x, (bool, str))]
        leaves = [leaf_of(x) for x in values]
        group = self._find(leaves, agree)
        if group is not None:
            group.came_back = True
            # Store the new tensors: if the next call passes the same objects, their values need not be
            # compared.
            group.leaves = leaves
            return group
        self._count += 1
        if self._count > _MOST_NEW and not any(group.came_back for group in self._groups):
            self._groups = []
            return None
        self._groups = [*self._groups, BranchGroup(leaves, f"branch {self._count - 1}")][-MOST_BRANCHES:]
        return self._groups[-1]

    def _find(self, leaves: list[Leaf], agree: Agree | None) -> BranchGroup | None:
        """Return the group with the conditions ``leaves``; None if there is none."""
        candidates: dict[int, list[Pair]] = {}
        for index, group in enumerate(self._groups):
            if len(group.leaves) != len(leaves):
                continue
            # First compare without the values of tensors, which does not wait for the device.
            pairs = pairs_to_compare(zip(group.leaves, leaves, strict=True), agree)
            if pairs is None:
                continue
            if not pairs:
                return group
            candidates[index] = pairs
        equal = all_equal(list(candidates.values()), agree)
        return next(
            (self._groups[i] for i, is_equal in zip(candidates, equal, strict=True) if is_equal), None
        )


def _read_clocks(leaves: Leaves, clocks: set[str]) -> None:
    """Replace small tensors that hold the timestep by :class:`ReadValues`, for which the host waits."""
    for path in clocks:
        leaf = leaves[path]
        if leaf.is_plain and not leaf.value.is_meta and leaf.value.numel() <= MOST_READ:
            x = leaf.value.detach()
            if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                numbers = tuple(x.flatten().tolist())
                largest = None
                if numbers and not x.is_complex():
                    largest = float(max(numbers))
                leaves[path] = Leaf((ReadValues(numbers, largest),))
