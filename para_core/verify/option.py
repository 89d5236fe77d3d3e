"""The option ``verify=True``: what does not go with it, and its check.

Imports no torch before a check is made. Tests: tests/verify/test_verification.py, and
tests/fleet/test_recipe.py for what it refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from para_core.instance.record import Wrapper

# Approximations with which transformer calls still equal those of the unmodified model: a step that a cache
# skips is not compared, and the unmodified model has the same quantized weights.
_COMPARABLE = frozenset({"cache", "quantize"})


def check_fits(approximations: Sequence[str], stages: int) -> None:
    """Check that outputs can be compared. :mod:`para_core.call_checks` finds this function by its name.

    Args:
        approximations: Names of the options with which results differ by more than rounding.
        stages: Number of ranks along ``pipe``.

    Raises:
        ValueError: An option approximates, or no rank has all blocks of the unmodified model.
    """
    obstacles = [name for name in approximations if name not in _COMPARABLE]
    if stages > 1:
        obstacles.append("a mesh with pipe")
    if obstacles:
        raise ValueError(
            f"verify compares transformer calls with those of one rank, and {', '.join(obstacles)} leaves nothing "
            "equal to compare with. Verify without it, then leave verify out."
        )


def make_wrapper() -> Wrapper:
    """Return a check of the calls of one parallel model. :mod:`para_core.call_checks` finds this by its name."""
    from para_core.verify.verification import Verification

    return Verification().run
