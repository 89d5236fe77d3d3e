"""Checks of the calls of a parallel model. A check is a module that nobody imports, and a line of ``CHECKS``.

Imports no torch, so that a command can validate options at once. ``adapters/parallel/`` and
``fleet/recipe.py`` call it, and ``fleet/build.py`` shows what the packages in ``CHECKS`` log. Tests:
tests/verify/test_verification.py, tests/fleet/test_recipe.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from para_core.instance.record import Wrapper

# The module of each check, by the option that turns it on. Each module has the functions ``check_fits``,
# which raises if the option does not go with others, and ``make_wrapper``; they are looked up by these names.
CHECKS = {
    "verify": "para_core.verify.option",
}  # fmt: skip


def check_comparable(options: Mapping[str, Any], approximations: Sequence[str], stages: int = 1) -> None:
    """Raise unless each check that ``options`` turn on has something to compare with.

    Args:
        options: The options by name.
        approximations: Names of the options with which results differ by more than rounding.
        stages: Number of ranks along ``pipe``, as far as it is known.

    Raises:
        ValueError: A check does not go with one of the other options.
    """
    for option, module in CHECKS.items():
        if options.get(option):
            import_module(module).check_fits(approximations, stages)


def can_check(option: str, approximations: Sequence[str], stages: int) -> bool:
    """Whether there is a check for ``option``, and it goes with the other options; see :func:`check_comparable`."""
    if option not in CHECKS:
        return False
    try:
        check_comparable({option: True}, approximations, stages)
    except ValueError:
        return False
    return True


def make_check(option: str) -> Wrapper:
    """Return a new check of the calls of one model, called as ``check(call, module, *args, **kwargs)``.

    Raises:
        ValueError: There is no check for ``option``.
    """
    if option not in CHECKS:
        raise ValueError(
            f"{option}=True turns on a check that is not installed; there are {sorted(CHECKS)}. Leave {option}= out."
        )
    check: Wrapper = import_module(CHECKS[option]).make_wrapper()
    return check
