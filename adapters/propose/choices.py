"""Properties of a plan that cannot be seen from tensor sizes, in the order in which they are tried.

``candidates.py`` makes a plan for each choice. Tests: tests/adapters/propose/test_structures.py, on models
that need the later ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from para_core.plans.plan import FirstTokens, LastTokens


@dataclass(frozen=True)
class Choice:
    """Properties of a plan that cannot be seen from tensor sizes.

    Args:
        text_first: Whether replicated text tokens precede the sharded ones in a joint sequence.
        split_masks: Whether arguments that are not floating-point are split with the tokens, or else
            replicated.
        mask: That of :class:`Attention`.
        numbers: The rule of an integer that grows with the tokens: it counts the first or the last ones.
    """

    text_first: bool
    split_masks: bool
    mask: Literal["keys", "pairs"] | None
    numbers: type[FirstTokens] | type[LastTokens] = FirstTokens


def all_choices() -> Iterator[Choice]:
    """Yield the choices, the likeliest first. The first one whose plan is exact is taken, so the order
    decides.

    A mask of pairs of tokens is tried last, once: it has all tokens, so it is not split, and its text is
    where the mask says.
    """
    for numbers in (FirstTokens, LastTokens):
        for text_first in (True, False):
            yield Choice(text_first, split_masks=False, mask=None, numbers=numbers)
            yield Choice(text_first, split_masks=False, mask="keys", numbers=numbers)
            # "keys" comes before None: a split mask over a single local token has size 1, which None would
            # read as a mask that is broadcast to all keys.
            yield Choice(text_first, split_masks=True, mask="keys", numbers=numbers)
            yield Choice(text_first, split_masks=True, mask=None, numbers=numbers)
        yield Choice(text_first=False, split_masks=False, mask="pairs", numbers=numbers)
