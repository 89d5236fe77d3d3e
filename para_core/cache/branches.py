"""Identify the CFG branch of a model call by its arguments, and calls of one branch within one step."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from para_core.cache.argument_values import MOST_READ, Leaf, Leaves, argument_of, clocks_in, leaves_of, value_at
from para_core.cache.blocks import CachedBlocks
from para_core.cache.decision import DecisionOutcome, Verdict
from para_core.instance.private_class import original_class
from para_core.torch_internals import pytree
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
    unknown = [name for name in blocks.conditions if argument_of(name) not in parameters]
    if unknown:
        raise ValueError(
            f"CachedBlocks(conditions={blocks.conditions!r}): {original_class(module).__name__} has no argument "
            f"{unknown[0]!r}; its arguments are {', '.join(list(parameters)[1:])}. Name those that differ between "
            "branches of guidance and stay the same from step to step."
        )
    return blocks.conditions


class BranchCall(NamedTuple):
    """The CFG branch of one model call.

    Args:
        name: The name of the branch; None if it is unknown.
        repeated: Whether calls of this branch within one step cannot be told apart, so that they must be computed.
        begins: Whether a generation begins, so that the state of the branch is not valid.
    """

    name: str | None
    repeated: bool = False
    begins: bool = False


@dataclass
class _Branch:
    """Calls that are equal in all arguments that do not change from step to step.

    Args:
        leaves, before: The arguments of the last call, and of the call before it.
        moment: The step of the last call, if the scheduler tells it.
        has_neighbour: Whether another branch with these conditions was called in the same step.
        outcome: The decision about the last call.
        start, direction: The timestep of the first call, and the sign of the change of the timestep after it.
    """

    name: str
    leaves: Leaves
    moment: int | None
    has_neighbour: bool = False
    before: Leaves | None = None
    outcome: DecisionOutcome | None = None
    start: float | None = None
    direction: float = 0.0

    @property
    def is_skipped(self) -> bool:
        """Whether the last call skipped blocks. If a graph decided, the host waits for it."""
        return self.outcome is not None and Verdict(int(self.outcome.verdict)).skips


@dataclass
class _Group:
    """The branches with one ``cache_context`` name, or with equal conditions, whose tensors and values are ``leaves``.

    Args:
        told_by: Paths of tensors that differ between calls of one step, and so tell branches apart.
        varying: Paths of values that change from step to step, and so tell no branches apart.
        unseen: The number of steps in which the value at a path was new.
        mixed: Whether calls of one step could not be told apart, so that everything is computed from then on.
    """

    leaves: list[Leaf]
    name: str
    came_back: bool = False
    branches: list[_Branch] = field(default_factory=list)
    told_by: set[str] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)
    unseen: Counter[str] = field(default_factory=Counter)
    mixed: bool = False


# A function that returns the largest value of each element of a tensor over all ranks.
Agree = Callable[[Tensor], Tensor]


class Branches:
    """The CFG branches of a model, identified by arguments of its calls, never by counting calls.

    Within one step, a branch is called once. If two calls of one step agree in the conditions, other arguments that
    differ between them tell them apart. If only arguments differ that change from step to step (two tiles), or none,
    nothing tells them apart, and all calls with these conditions must be computed.

    Args:
        conditions: Names of the arguments that differ between branches and stay equal from step to step.
        model: The name of the model, for messages.
        warn: ``warn(key, message)`` warns the user. Defaults to :func:`~para_core.user_warnings.warn_user`.
    """

    def __init__(
        self, conditions: tuple[str, ...], model: str = "model", warn: Callable[[str, str], None] | None = None
    ) -> None:
        self.conditions = conditions
        self.model = model
        self.warn = warn or (lambda key, message: warn_user(message, CacheWarning))
        self._groups: list[_Group] = []
        self._named: dict[str, _Group] = {}
        self._count = 0
        self._last: _Branch | None = None
        # If :meth:`announce` was called, the branch of the next call.
        self._announced: BranchCall | None = None

    def announce(self, arguments: Mapping[str, Any], moment: int | None) -> None:
        """Identify the branch of the next model call, and keep it for :meth:`identify`.

        With CFG parallelism all ranks call this for every model call, also if another rank runs the model, so that the
        branches get the same names on all ranks.
        """
        self._announced = self._identify(arguments, None, moment, None, raises=False)

    def identify(
        self, arguments: Mapping[str, Any], context: str | None, moment: int | None, agree: Agree | None = None
    ) -> BranchCall:
        """Return the branch of a model call.

        The host waits for the device if conditions are new tensors, to compare their values, and, if ``moment`` is
        None, to read the timestep.

        Args:
            arguments: The arguments of the call by name.
            context: The name that diffusers' ``cache_context`` gave the branch, or None.
            moment: A number that changes from step to step; None if only the arguments can tell.
            agree: If the arguments are this rank's part of the inputs, the function by which ranks agree.

        Raises:
            RuntimeError: The cache has skipped a call of this step that belongs to another branch.
        """
        announced, self._announced = self._announced, None
        if announced is not None and context is None:
            return announced
        return self._identify(arguments, context, moment, agree, raises=True)

    def decided(self, outcome: DecisionOutcome) -> None:
        """Record the decision about the call that was identified last."""
        if self._last is not None:
            self._last.outcome = outcome

    def name_of(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the name of the branch by its conditions alone: ``branch 0``, ``branch 1``, …; None if unknown.

        The host waits for the device once if conditions are new tensors, to compare their values.
        """
        group = self._group_of(arguments, None)
        return None if group is None else group.name

    def why_unknown(self) -> str:
        """Return the text of the warning to show after :meth:`identify` returned no name."""
        return (
            f"{' and '.join(self.conditions)} of this {self.model} change from step to step, so its CFG branches "
            "cannot be identified, and all steps are computed. Call it inside `with model.cache_context(name)`, or "
            "name in CachedBlocks(conditions=...) arguments that stay equal from step to step."
        )

    def _identify(
        self,
        arguments: Mapping[str, Any],
        context: str | None,
        moment: int | None,
        agree: Agree | None,
        *,
        raises: bool,
    ) -> BranchCall:
        self._last = None
        if context is None:
            group = self._group_of(arguments, agree)
        else:
            group = self._named.setdefault(context, _Group([], context))
        if group is None:
            return BranchCall(None)
        if group.mixed:
            return BranchCall(group.name, repeated=True)
        leaves = leaves_of(arguments)
        clocks = clocks_in(leaves)
        if moment is None:
            _read_clocks(leaves, clocks)
        if context is None:
            leaves = {path: leaf for path, leaf in leaves.items() if path in clocks or not self._is_condition(path)}
        return _Search(self, group, leaves, clocks, moment, agree, raises=raises).run()

    def _is_condition(self, path: str) -> bool:
        return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in self.conditions)

    def _group_of(self, arguments: Mapping[str, Any], agree: Agree | None) -> _Group | None:
        if self._count > _MOST_NEW and not any(group.came_back for group in self._groups):
            return None
        values = pytree.tree_leaves([value_at(arguments, name) for name in self.conditions])
        # Include all bools and strings, because some pipelines call the model a third time per step with some layers
        # left out, and say so by an argument of this kind.
        values += [x for name, x in sorted(arguments.items()) if isinstance(x, (bool, str))]
        leaves = [Leaf(x, keep=True) for x in values]
        group = self._find(leaves, agree)
        if group is not None:
            group.came_back = True
            # Store the new tensors: if the next call passes the same objects, their values need not be compared.
            group.leaves = leaves
            return group
        self._count += 1
        if self._count > _MOST_NEW and not any(group.came_back for group in self._groups):
            self._groups = []
            return None
        self._groups = [*self._groups, _Group(leaves, f"branch {self._count - 1}")][-MOST_BRANCHES:]
        return self._groups[-1]

    def _find(self, leaves: list[Leaf], agree: Agree | None) -> _Group | None:
        candidates: dict[int, list[_Pair]] = {}
        for index, group in enumerate(self._groups):
            if len(group.leaves) != len(leaves):
                continue
            # First compare without the values of tensors, which does not wait for the device.
            pairs = list(zip(group.leaves, leaves, strict=True))
            results = [x.compare(y) for x, y in pairs]
            if all(results):
                return group
            if False not in results:
                candidates[index] = [pair for pair, result in zip(pairs, results, strict=True) if result is None]
        equal = _all_equal(list(candidates.values()), agree)
        return next((self._groups[i] for i, is_equal in zip(candidates, equal, strict=True) if is_equal), None)


_Pair = tuple[Leaf, Leaf]


def _all_equal(cases: Sequence[Sequence[_Pair]], agree: Agree | None) -> list[bool]:
    """Return, for each of the ``cases``, whether the tensors of all its pairs have equal values.

    The host waits once, unless the tensors are on several devices. With ``agree`` this is a collective call.
    """
    if not cases:
        return []
    devices = {pair[0].value.device for pairs in cases for pair in pairs}
    if any(device.type == "cuda" for device in devices) and torch.cuda.is_current_stream_capturing():
        return [False] * len(cases)
    first = next(iter(devices))
    differ = torch.stack(
        [torch.stack([(x.value != y.value).any().to(first) for x, y in pairs]).any() for pairs in cases]
    )
    return [not value for value in (differ if agree is None else agree(differ.to(torch.uint8))).tolist()]


def _read_clocks(leaves: Leaves, clocks: set[str]) -> None:
    """Replace small tensors that hold the timestep by tuples of their values, for which the host waits."""
    for path in clocks:
        leaf = leaves[path]
        if leaf.is_plain and not leaf.value.is_meta and leaf.value.numel() <= MOST_READ:
            x = leaf.value.detach()
            if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                leaves[path] = Leaf(tuple(x.flatten().tolist()))


class _Search:
    """The search for the branch of one call among the branches of its group."""

    def __init__(
        self,
        owner: Branches,
        group: _Group,
        leaves: Leaves,
        clocks: set[str],
        moment: int | None,
        agree: Agree | None,
        *,
        raises: bool,
    ) -> None:
        # With CFG parallelism, only the rank that computed a call knows whether it was skipped, so no rank may raise.
        self._raises = raises
        self._clocks = clocks
        self._owner = owner
        self._group = group
        self._leaves = leaves
        self._moment = moment
        self._agree = agree
        # The first tensor of a model's arguments is the latents.
        self._latents = next((path for path, leaf in leaves.items() if leaf.is_tensor and path not in clocks), None)

    def run(self) -> BranchCall:
        group = self._group
        if not group.branches:
            return self._add()
        equal = [branch for branch in group.branches if not self._keyed(branch)]
        if not equal:
            return self._unseen()
        branch = equal[-1]
        if self._is_same_step(branch):
            return self._again(branch)
        return self._continue(branch)

    def _add(self) -> BranchCall:
        """Return a branch that begins with this call."""
        group = self._group
        if len(group.branches) == MOST_BRANCHES:
            return self._give_up([])
        name = f"{group.name}.{len(group.branches)}" if group.branches else group.name
        branch = _Branch(name, self._leaves, self._moment)
        group.branches.append(branch)
        self._owner._last = branch
        return BranchCall(name)

    def _continue(self, branch: _Branch) -> BranchCall:
        """Return the call of ``branch`` that continues it by one step."""
        begins = self._is_begin(branch)
        branch.before, branch.leaves, branch.moment = branch.leaves, self._leaves, self._moment
        # A new list order, the branch that was called last at the end, decides between branches that become equal.
        self._group.branches.remove(branch)
        self._group.branches.append(branch)
        self._owner._last = branch
        return BranchCall(branch.name, begins=begins)

    def _unseen(self) -> BranchCall:
        """Return the branch of a call whose values at some paths no branch of the group had in its last call."""
        group = self._group
        neighbours = [branch for branch in group.branches if self._is_same_step(branch)]
        if neighbours:
            paths = self._keyed(neighbours[-1])
            self._warn_of(paths)
            for branch in neighbours:
                branch.has_neighbour = True
            call = self._add()
            if not call.repeated:
                group.branches[-1].has_neighbour = True
            return call
        # The values changed from one step to the next.
        nearest = min(reversed(group.branches), key=lambda branch: len(self._keyed(branch)))
        for path in self._keyed(nearest):
            group.unseen[path] += 1
            if path in group.told_by:
                group.told_by.discard(path)
            elif group.unseen[path] >= 2:
                group.varying.add(path)
        equal = [branch for branch in group.branches if not self._keyed(branch)]
        if not equal:
            return self._add()
        if len(equal) > 1:
            if any(branch.has_neighbour for branch in equal):
                return self._give_up([])
            group.branches = [branch for branch in group.branches if branch not in equal[:-1]]
        return self._continue(equal[-1])

    def _again(self, branch: _Branch) -> BranchCall:
        """Return the branch of a call in the same step as the last call of ``branch``."""
        group = self._group
        paths = self._differing(branch)
        # If the last call differed from the call before it where this call does not, it was no call of this branch.
        was_other = branch.before is not None and any(
            not self._is_same(branch.before.get(path), branch.leaves.get(path))
            and self._is_same(branch.before.get(path), self._leaves.get(path))
            for path in paths
        )
        if was_other and not self._raises:
            return self._give_up(paths)
        if (was_other or not paths) and self._raises and branch.is_skipped:
            raise RuntimeError(
                f"this {self._owner.model} was called twice in one step for the CFG branch {branch.name!r}, with a "
                f"difference in {_names(paths) or 'no argument'}, and the cache has skipped blocks of the first call "
                "by residuals that may belong to the second. Name each call of a step: `with cache_context(model, "
                "name)`, of para_core, or `with model.cache_context(name)` of diffusers."
            )
        told_by = [path for path in paths if path not in group.varying and path != self._latents]
        if not told_by:
            return self._give_up(paths)
        self._warn_of(told_by)
        group.told_by.update(told_by)
        branch.has_neighbour = True
        call = self._add()
        if not call.repeated:
            group.branches[-1].has_neighbour = True
        return call

    def _give_up(self, paths: Sequence[str]) -> BranchCall:
        """Let all later calls of the group be computed, and warn. ``paths`` are the differences of two calls."""
        self._group.mixed = True
        self._owner.warn(
            f"repeated {self._group.name}",
            f"this {self._owner.model} was called more than once in one step for the CFG branch "
            f"{self._group.name!r}. The calls differ in {_names(paths) or 'no argument'}, by which the cache cannot "
            "tell them apart in the next step (tiles, images in turn, settings changed on the model, a solver that "
            "calls it twice at one timestep), so all these calls are computed. Name each call of a step: "
            "`with cache_context(model, name)`, of para_core, or `with model.cache_context(name)` of diffusers.",
        )
        return BranchCall(self._group.name, repeated=True)

    def _warn_of(self, paths: Sequence[str]) -> None:
        """Warn that the values at ``paths`` tell branches apart, unless they are settings, which cost no wait."""
        both = [leaves.get(path) for path in paths for leaves in (self._leaves, self._group.branches[-1].leaves)]
        if not any(leaf is not None and (leaf.is_tensor or isinstance(leaf.value, float)) for leaf in both):
            return
        arguments = dict.fromkeys(argument_of(path) for path in paths)
        named = (*self._owner.conditions, *(name for name in arguments if name not in self._owner.conditions))
        self._owner.warn(
            f"unnamed {self._group.name}",
            f"{_names(paths)} of this {self._owner.model} differ(s) between the calls of one step, and "
            f"CachedBlocks(conditions={self._owner.conditions!r}) does not name it. The cache compares it at each call "
            f"to tell the CFG branches apart. Write CachedBlocks(conditions={named!r}), or name each call of a step: "
            "`with cache_context(model, name)`, of para_core.",
        )

    def _keyed(self, branch: _Branch) -> list[str]:
        """Return the paths at which this call differs from ``branch`` in what tells branches apart."""
        group = self._group
        return [
            path
            for path in self._paths(branch)
            if path not in group.varying
            and (path in group.told_by or not self._are_tensors(branch, path))
            and not self._is_same(branch.leaves.get(path), self._leaves.get(path))
        ]

    def _differing(self, branch: _Branch) -> list[str]:
        """Return all paths, except the timestep, at which this call differs from the last call of ``branch``."""
        return [
            path for path in self._paths(branch) if not self._is_same(branch.leaves.get(path), self._leaves.get(path))
        ]

    def _paths(self, branch: _Branch) -> list[str]:
        return [path for path in {**branch.leaves, **self._leaves} if path not in self._clocks]

    def _are_tensors(self, branch: _Branch, path: str) -> bool:
        leaves = branch.leaves.get(path), self._leaves.get(path)
        return all(leaf is not None and leaf.is_tensor for leaf in leaves)

    def _is_same_step(self, branch: _Branch) -> bool:
        """Whether the last call of ``branch`` was in the step of this call."""
        if self._moment is not None and branch.moment != self._moment:
            return False
        clocks = [path for path in self._leaves if path in self._clocks and path in branch.leaves]
        if self._moment is not None or clocks:
            return self._agreed(all(self._is_same(branch.leaves[path], self._leaves[path]) for path in clocks))
        # Without a timestep, only equal latents say that a call belongs to the same step.
        if self._latents is None or self._latents not in branch.leaves:
            return False
        before, now = branch.leaves[self._latents], self._leaves[self._latents]
        return before.has_version and now.has_version and before.compare(now) is True

    def _is_begin(self, branch: _Branch) -> bool:
        """Whether the timestep returned to that of the first call of ``branch``, so that a generation begins."""
        path = next((path for path in self._leaves if path in self._clocks and path in branch.leaves), "")
        clock = self._leaves[path].value if path else None
        values = clock if isinstance(clock, tuple) else (clock,)
        if self._moment is not None or not values or not all(isinstance(value, (int, float)) for value in values):
            return False
        now = float(max(values))
        if branch.start is None:
            before = branch.leaves[path].value
            branch.start = float(max(before if isinstance(before, tuple) else (before,)))
        change = now - branch.start
        begins = self._agreed(branch.direction != 0.0 and change * branch.direction <= 0.0)
        branch.start = now if begins else branch.start
        branch.direction = 0.0 if begins else branch.direction or float(change > 0) - float(change < 0)
        return begins

    def _is_same(self, x: Leaf | None, y: Leaf | None) -> bool:
        if x is None or y is None:
            return x is y
        same = x.compare(y)
        if same is None and not (x.is_plain and y.is_plain):
            # Do not compare the values of a deferred tensor (see para_core.cfg), which would compute it.
            return False
        return _all_equal([[(x, y)]], self._agree)[0] if same is None else same

    def _agreed(self, value: bool) -> bool:
        """Return whether ``value`` is True on all ranks."""
        return value if self._agree is None else not self._agree(torch.tensor([int(not value)])).item()


def _names(paths: Sequence[str]) -> str:
    return " and ".join(paths)
