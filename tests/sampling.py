"""Choose the cases of a parametrized test that run by default. `make test-long` runs all."""

import random
from collections.abc import Mapping, Sequence


def spread(cases: Sequence[Mapping[str, int]], count: int, seed: str) -> set[int]:
    """Return the indices of ``count`` cases, or of all if there are fewer, that show as many parameter values as
    possible.

    ``cases`` has the index of the value of each parameter, by name. The same ``seed`` gives the same choice in every
    process and run.
    """
    left = list(range(len(cases)))
    random.Random(seed).shuffle(left)
    chosen: set[int] = set()
    shown: set[tuple[str, int]] = set()
    while left and len(chosen) < count:
        best = max(left, key=lambda index: len(cases[index].items() - shown))  # Take the first of equals.
        left.remove(best)
        chosen.add(best)
        shown |= cases[best].items()
    return chosen
