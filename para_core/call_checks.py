"""Checks of the calls of a parallel model.
A check is a module that nobody imports, and a line of ``CHECKS``.
"""

from __future__ import annotations

from importlib import import_module

from para_core.instance.record import Around

# The module of each check, by the option that turns it on. Each module has a function ``make_check``.
CHECKS = {
    "verify": "para_core.verify.verification",
}  # fmt: skip


def make_check(option: str) -> Around:
    """Return a new check of the calls of one model, called as ``check(call, module, *args, **kwargs)``.

    Raises:
        ValueError: There is no check for ``option``.
    """
    if option not in CHECKS:
        raise ValueError(
            f"{option}=True turns on a check that is not installed; there are {sorted(CHECKS)}. Leave {option}= out."
        )
    check: Around = import_module(CHECKS[option]).make_check()
    return check
