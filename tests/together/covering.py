"""A covering array of strength two: cases that hold every pair of values of two options, by a greedy algorithm."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.together.options import AXES, EXCLUSIONS, Case, Exclusion, case_of, exclusion_of, parse

SEED = 20
# At most this number of cases of each refused combination is run.
NUM_TRIED = 3
# Each line holds one case id. `make test` runs those marked "# short".
CASES = Path(__file__).parent / "cases.txt"

Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(values: Mapping[str, str]) -> Iterator[Pair]:
    """Return all pairs of ``(axis, value)`` in ``values``, in the order of the axes."""
    ordered = [(axis, values[axis]) for axis in AXES if axis in values]
    return itertools.combinations(ordered, 2)


def admissible_pairs() -> list[Pair]:
    """Return all pairs that a case may hold."""
    pairs = []
    for first, second in itertools.combinations(AXES, 2):
        for a, b in itertools.product(AXES[first], AXES[second]):
            if complete({first: a, second: b}, random.Random(0)) is not None:
                pairs.append(((first, a), (second, b)))
    return pairs


def complete(start: Mapping[str, str], rng: random.Random, wanted: set[Pair] | None = None) -> dict[str, str] | None:
    """Return ``start`` with a value for each other axis such that nothing is excluded, or None if that is impossible.

    Args:
        wanted: pairs to cover. For each axis the value that adds most of them is taken.
    """
    if exclusion_of(start) is not None:
        return None
    axes = [axis for axis in AXES if axis not in start]
    # Choose the values of the axes with most exclusions first, so that the search rarely has to backtrack.
    rng.shuffle(axes)
    axes.sort(key=lambda axis: -sum(axis in exclusion.values for exclusion in EXCLUSIONS) // 4)
    return _search(dict(start), axes, rng, wanted or set())


def _search(values: dict[str, str], axes: list[str], rng: random.Random, wanted: set[Pair]) -> dict[str, str] | None:
    if not axes:
        return values
    axis, *rest = axes

    def gain(value: str) -> float:
        return -sum(_pair(axis, value, name, taken) in wanted for name, taken in values.items())

    candidates = list(AXES[axis])
    rng.shuffle(candidates)
    for value in sorted(candidates, key=gain) if wanted else candidates:
        extended = {**values, axis: value}
        if exclusion_of(extended) is None:
            whole = _search(extended, rest, rng, wanted)
            if whole is not None:
                return whole
    return None


_ORDER = {axis: index for index, axis in enumerate(AXES)}


def _pair(axis: str, value: str, other: str, taken: str) -> Pair:
    first, second = (axis, value), (other, taken)
    return (first, second) if _ORDER[axis] < _ORDER[other] else (second, first)


def covering_array(start: Iterable[Case] = ()) -> list[Case]:
    """Return cases that hold every admissible pair, none of them excluded. Deterministic.

    Args:
        start: cases to begin with, from an array that was made before an option was added. Excluded ones are dropped.
    """
    rng = random.Random(SEED)
    left = set(admissible_pairs())
    cases = {case.id: case for case in start if exclusion_of(case.by_axis) is None}
    for case in cases.values():
        left.difference_update(pairs_of(case.by_axis))
    while left:
        tries = [complete(dict(rng.choice(sorted(left))), rng, left) for _ in range(8)]
        best = max(filter(None, tries), key=lambda values: len(left & {*pairs_of(values)}))
        left.difference_update(pairs_of(best))
        case = case_of(best)
        cases[case.id] = case
    return list(cases.values())


def read_cases() -> dict[Case, bool]:
    """Return the cases of ``cases.txt``, and for each whether ``make test`` runs it."""
    lines = [line.partition("#") for line in CASES.read_text().splitlines()]
    return {parse(case.strip()): "short" in mark for case, _, mark in lines if case.strip()}


def write_cases() -> list[Case]:
    """Add cases to ``cases.txt`` for missing pairs, and drop cases that are excluded now."""
    before = read_cases() if CASES.exists() else {}
    cases = covering_array(before)
    lines = [f"{case.id}  # short" if before.get(case) else case.id for case in cases]
    CASES.write_text("\n".join([f"# python -m tests.together --write-cases; seed {SEED}", *lines]) + "\n")
    return cases


def refused_cases() -> list[tuple[Case, Exclusion]]:
    """Return a few cases of each refused combination. Each holds no other excluded one, and defaults otherwise."""
    cases = []
    for exclusion in EXCLUSIONS:
        if not exclusion.refused:
            continue
        # Each exclusion has its own generator, so a new exclusion changes no other case.
        rng = random.Random(f"{SEED} {exclusion}")
        longest = max(exclusion.values, key=lambda axis: len(exclusion.values[axis]))
        listed = exclusion.values[longest]
        tried: dict[Case, None] = {}
        for value in [*rng.sample(listed, min(len(listed), NUM_TRIED)), *rng.choices(listed, k=50)]:
            case = case_of({axis: rng.choice(choices) for axis, choices in exclusion.values.items()} | {longest: value})
            # A case with a second excluded combination could be refused for that one.
            if len(tried) < NUM_TRIED and sum(other.excludes(case.by_axis) for other in EXCLUSIONS) == 1:
                tried[case] = None
        cases += [(case, exclusion) for case in tried]
    return cases
