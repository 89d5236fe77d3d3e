"""The search for the CFG branch of one model call among the branches of its group.

:mod:`.branches` finds the group and starts the search. Tests: tests/cache/test_steps.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from para_core.cache.argument_values import Leaf, Leaves, ReadValues, argument_of
from para_core.cache.decision import DecisionOutcome, Verdict

if TYPE_CHECKING:
    from para_core.cache.branches import Branches

# Maximum number of groups, of branches in a group, and of branches whose residuals are stored. A pipeline has
# two or three branches.
MOST_BRANCHES = 8


class BranchCall(NamedTuple):
    """The CFG branch of one model call.

    Args:
        name: The name of the branch; None if it is unknown.
        repeated: Whether calls of this branch within one step cannot be told apart, so that they must be
            computed.
        begins: Whether a generation begins, so that the state of the branch is not valid.
        branch: The branch, if the call is told apart from other calls. The caller stores the outcome of the
            call in it.
    """

    name: str | None
    repeated: bool = False
    begins: bool = False
    branch: Branch | None = None


@dataclass
class Branch:
    """Calls that are equal in all arguments that do not change from step to step.

    Args:
        leaves, before: The arguments of the last call, and of the call before it.
        moment: The step of the last call, if the scheduler tells it.
        has_neighbour: Whether another branch with these conditions was called in the same step.
        outcome: The decision about the last call.
        clock: The path of the timestep that tells where a generation begins; None if none is known.
        start, direction: The timestep of the first call, and the sign of the change of the timestep after it.
    """

    name: str
    leaves: Leaves
    moment: int | None
    has_neighbour: bool = False
    before: Leaves | None = None
    outcome: DecisionOutcome | None = None
    clock: str | None = None
    start: float = 0.0
    direction: float = 0.0

    @property
    def is_skipped(self) -> bool:
        """Whether the last call skipped blocks. If a graph decided, the host waits for it."""
        return self.outcome is not None and Verdict(int(self.outcome.verdict)).skips


@dataclass
class BranchGroup:
    """The branches with one ``cache_context`` name, or with equal conditions, whose tensors and values are
    ``leaves``.

    Args:
        came_back: Whether a later call had the same conditions, so that they do not change from step to step.
        told_by: Paths of tensors that differ between calls of one step, and so tell branches apart.
        varying: Paths of values that change from step to step, and so tell no branches apart.
        unseen: The number of steps in which the value at a path was new.
        mixed: Whether calls of one step could not be told apart, so that everything is computed from then on.

    ``told_by`` grows by two calls in one step (``_place_repeated``), and ``unseen`` and ``varying`` by a call
    in a new step that equals no branch (``_place_unseen``), which also takes a path out of ``told_by``.
    """

    leaves: list[Leaf]
    name: str
    came_back: bool = False
    branches: list[Branch] = field(default_factory=list)
    told_by: set[str] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)
    unseen: Counter[str] = field(default_factory=Counter)
    mixed: bool = False


# A function that returns the largest value of each element of a tensor over all ranks.
Agree = Callable[[Tensor], Tensor]

Pair = tuple[Leaf, Leaf]


def pairs_to_compare(pairs: Iterable[Pair], agree: Agree | None) -> list[Pair] | None:
    """Return the pairs of tensors whose values must be compared to know whether all ``pairs`` are equal; None
    if it is known that they are not.

    The result is the same on all ranks. With ``agree`` it also has pairs of different shapes: of two texts,
    the parts may have the same shape on this rank, and not on another one, which must compare with it.
    """
    unknown = []
    for x, y in pairs:
        same = x.compare(y)
        if same is None or (agree is not None and not same and x.is_kept_tensor and y.is_kept_tensor):
            unknown.append((x, y))
        elif not same:
            return None
    return unknown


def all_equal(cases: Sequence[Sequence[Pair]], agree: Agree | None) -> list[bool]:
    """Return, for each of the ``cases``, whether the tensors of all its pairs have equal values.

    The host waits once, unless the tensors are on several devices. With ``agree`` this is a collective call.
    """
    if not cases:
        return []
    devices = {pair[0].value.device for pairs in cases for pair in pairs}
    if any(device.type == "cuda" for device in devices) and torch.cuda.is_current_stream_capturing():
        return [False] * len(cases)
    first = next(iter(devices))
    differ = torch.stack([torch.stack([_differ(x, y).to(first) for x, y in pairs]).any() for pairs in cases])
    if agree is not None:
        differ = agree(differ.to(torch.uint8))
    return [not value for value in differ.tolist()]


def _differ(x: Leaf, y: Leaf) -> Tensor:
    """Return whether the values of two tensors differ, as a tensor."""
    if x.compare(y) is False:
        return torch.ones((), dtype=torch.bool)
    differ: Tensor = (x.value != y.value).any()
    return differ


@dataclass
class BranchSearch:
    """The search for the branch of one call among the branches of its group.

    With ``agree``, each comparison of the values of two tensors is a collective call. Which values are
    compared follows from the identities and versions of tensors, so these must be equal on all ranks, as they
    are if all ranks run the same program.

    Args:
        leaves, clocks: The values in the arguments of the call, and the paths of those that hold the
            timestep.
        moment: A number that changes from step to step; None if only the arguments can tell.
        raises: Whether a call that was skipped by mistake raises. With CFG parallelism, only the rank that
            computed a call knows whether it was skipped, so no rank may raise.
    """

    _owner: Branches
    _group: BranchGroup
    _leaves: Leaves
    _clocks: set[str]
    _moment: int | None
    _agree: Agree | None
    _raises: bool

    def run(self) -> BranchCall:
        """Return the branch of the call, and store the call in it.

        Raises:
            RuntimeError: A call of this step was skipped by residuals that may belong to this call.
        """
        group = self._group
        if not group.branches:
            return self._add()
        for branch in reversed(group.branches):
            if self._paths_of_difference(branch):
                continue
            # A scheduler that counts its steps says whether this is another step.
            is_later = self._moment is not None and branch.moment != self._moment
            if not is_later and self._is_same_step(branch):
                return self._place_repeated(branch)
            return self._continue(branch)
        return self._place_unseen()

    def _add(self) -> BranchCall:
        """Return a branch that begins with this call."""
        group = self._group
        if len(group.branches) == MOST_BRANCHES:
            self._owner.warn(
                f"branches of {group.name}",
                f"the calls of this {self._owner.model} for the CFG branch {group.name!r} differ in more ways within "
                f"one step than the {MOST_BRANCHES} that the cache tells apart, so all these calls are computed.",
            )
            return self._compute_all()
        name = group.name
        if group.branches:
            name = f"{group.name}.{len(group.branches)}"
        branch = Branch(name, self._leaves, self._moment)
        group.branches.append(branch)
        return BranchCall(name, branch=branch)

    def _add_neighbour(self, others: Sequence[Branch]) -> BranchCall:
        """Return a branch that begins with this call, in a step in which ``others`` were called, too."""
        call = self._add()
        if call.branch is not None:
            for branch in (*others, call.branch):
                branch.has_neighbour = True
        return call

    def _continue(self, branch: Branch) -> BranchCall:
        """Return the call of ``branch`` that continues it by one step."""
        # A scheduler that counts its steps says itself where a generation begins.
        begins = self._moment is None and self._is_begin(branch)
        branch.before = branch.leaves
        branch.leaves = self._leaves
        branch.moment = self._moment
        # A new list order, the branch that was called last at the end, decides between branches that become
        # equal.
        self._group.branches.remove(branch)
        self._group.branches.append(branch)
        return BranchCall(branch.name, begins=begins, branch=branch)

    def _place_unseen(self) -> BranchCall:
        """Return the branch of a call that differs from the last call of every branch of the group."""
        group = self._group
        neighbours = [branch for branch in group.branches if self._is_same_step(branch)]
        if neighbours:
            self._warn_of(self._paths_of_difference(neighbours[-1]), neighbours[-1])
            return self._add_neighbour(neighbours)
        # No branch was called in this step yet, so the values changed from one step to the next. A value that
        # was new in two steps tells no branches apart.
        nearest = min(reversed(group.branches), key=lambda branch: len(self._paths_of_difference(branch)))
        for path in self._paths_of_difference(nearest):
            group.unseen[path] += 1
            if path in group.told_by:
                group.told_by.discard(path)
            elif group.unseen[path] >= 2:
                group.varying.add(path)
        equal = [branch for branch in group.branches if not self._paths_of_difference(branch)]
        if not equal:
            return self._add()
        if len(equal) > 1:
            if any(branch.has_neighbour for branch in equal):
                return self._give_up(sorted(group.varying))
            group.branches = [branch for branch in group.branches if branch not in equal[:-1]]
        return self._continue(equal[-1])

    def _place_repeated(self, branch: Branch) -> BranchCall:
        """Return the branch of a call in the same step as the last call of ``branch``."""
        group = self._group
        paths = self._all_paths_of_difference(branch)
        # If the last call differed from the call before it where this call does not, it was no call of this
        # branch.
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
        latents = self._latents()
        told_by = [path for path in paths if path not in group.varying and path != latents]
        if not told_by:
            return self._give_up(paths)
        self._warn_of(told_by, branch)
        group.told_by.update(told_by)
        return self._add_neighbour([branch])

    def _give_up(self, paths: Sequence[str]) -> BranchCall:
        """Let this call and all later ones of the group be computed, and warn. At ``paths`` two calls differ."""
        self._owner.warn(
            f"repeated {self._group.name}",
            f"this {self._owner.model} was called more than once in one step for the CFG branch "
            f"{self._group.name!r}. The calls differ in {_names(paths) or 'no argument'}, by which the cache cannot "
            "tell them apart in the next step (tiles, images in turn, settings changed on the model, a solver that "
            "calls it twice at one timestep), so all these calls are computed. Name each call of a step: "
            "`with cache_context(model, name)`, of para_core, or `with model.cache_context(name)` of diffusers.",
        )
        return self._compute_all()

    def _compute_all(self) -> BranchCall:
        """Let this call and all later ones of the group be computed."""
        self._group.mixed = True
        return BranchCall(self._group.name, repeated=True)

    def _warn_of(self, paths: Sequence[str], other: Branch) -> None:
        """Warn that the values at ``paths`` tell this call from ``other``, unless they are settings, which
        cost no wait.
        """
        both = [leaves.get(path) for path in paths for leaves in (self._leaves, other.leaves)]
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

    def _paths_of_difference(self, branch: Branch) -> list[str]:
        """Return the paths at which this call differs from ``branch`` in what tells branches apart."""
        group = self._group
        paths = [*branch.leaves]
        if branch.leaves.keys() != self._leaves.keys():
            paths = [*{**branch.leaves, **self._leaves}]
        keyed = []
        for path in paths:
            if path in self._clocks or path in group.varying:
                continue
            before = branch.leaves.get(path)
            now = self._leaves.get(path)
            if before is not None and now is not None:
                if before.is_tensor and now.is_tensor and path not in group.told_by:
                    continue
                # Most values are the same objects. Only a tensor may have been changed in place.
                if not before.is_tensor and not now.is_tensor and before.reference[0] is now.reference[0]:
                    continue
            if not self._is_same(before, now):
                keyed.append(path)
        return keyed

    def _all_paths_of_difference(self, branch: Branch) -> list[str]:
        """Return all paths, except the timestep, at which this call differs from the last call of ``branch``."""
        return [
            path
            for path in {**branch.leaves, **self._leaves}
            if path not in self._clocks and not self._is_same(branch.leaves.get(path), self._leaves.get(path))
        ]

    def _is_same_step(self, branch: Branch) -> bool:
        """Whether the last call of ``branch`` was in the step of this call."""
        if self._moment is not None and branch.moment != self._moment:
            return False
        clocks = [path for path in self._leaves if path in self._clocks and path in branch.leaves]
        if self._moment is not None or clocks:
            return self._agree_on_all(
                all(self._is_same(branch.leaves[path], self._leaves[path]) for path in clocks)
            )
        # Without a timestep, only equal latents say that a call belongs to the same step.
        latents = self._latents()
        if latents is None or latents not in branch.leaves:
            return False
        before = branch.leaves[latents]
        now = self._leaves[latents]
        return before.has_version and now.has_version and before.compare(now) is True

    def _latents(self) -> str | None:
        """Return the path of the latents, the first tensor of a model's arguments; None if there is no tensor."""
        for path, leaf in self._leaves.items():
            if leaf.is_tensor and path not in self._clocks:
                return path
        return None

    def _is_begin(self, branch: Branch) -> bool:
        """Whether the timestep returned to that of the first call of ``branch``, or passed it against its
        direction, so that a generation begins.
        """
        now = None
        # Until the timestep has a direction, another one may be what changes.
        if branch.direction != 0.0 and branch.clock in self._leaves:
            now = _time_in(self._leaves[branch.clock])
        if now is None:
            now = self._choose_clock(branch)
        if now is None:
            return False
        change = now - branch.start
        begins = self._agree_on_all(branch.direction != 0.0 and change * branch.direction <= 0.0)
        if begins:
            branch.start = now
            branch.direction = 0.0
        elif branch.direction == 0.0:
            branch.direction = float(change > 0) - float(change < 0)
        return begins

    def _choose_clock(self, branch: Branch) -> float | None:
        """Choose the first timestep that is a number in this call and the last call of ``branch``, and return
        it in this call: one that changed since, if there is one. Return None if there is none.

        One of several clocks may be None in all calls, such as sigmas beside a timestep, or constant, such as
        ``num_timesteps``.
        """
        chosen = None
        for path in self._leaves:
            if path not in self._clocks or path not in branch.leaves:
                continue
            before = _time_in(branch.leaves[path])
            now = _time_in(self._leaves[path])
            if before is None or now is None or (chosen is not None and now == before):
                continue
            branch.clock = path
            branch.start = before
            branch.direction = 0.0
            chosen = now
            if now != before:
                break
        return chosen

    def _is_same(self, x: Leaf | None, y: Leaf | None) -> bool:
        """Whether two values are equal. Waits for the device, and is collective with ``agree``, if two
        tensors must be compared by value.
        """
        if x is None or y is None:
            return x is y
        pairs = pairs_to_compare([(x, y)], self._agree)
        if pairs is None:
            return False
        if not pairs:
            return True
        if not (x.is_plain and y.is_plain):
            # Do not compare the values of a lazy tensor (see para_core.lazy_tensors): that would wait for its
            # data.
            return False
        return all_equal([pairs], self._agree)[0]

    def _agree_on_all(self, value: bool) -> bool:
        """Return whether ``value`` is True on all ranks. Collective with ``agree``."""
        if self._agree is None:
            return value
        return not self._agree(torch.tensor([int(not value)])).item()


def _time_in(clock: Leaf) -> float | None:
    """Return the largest timestep in ``clock``: of the values that were read of a tensor or array, or the one
    value. None if it holds something else than numbers.
    """
    value = clock.value
    if isinstance(value, ReadValues):
        return value.largest
    if not isinstance(value, (int, float)):
        return None
    return float(value)


def _names(paths: Sequence[str]) -> str:
    """Return the ``paths`` as words of a message."""
    return " and ".join(paths)
