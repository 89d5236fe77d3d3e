"""A schedule of attention over denoising steps. Imports no torch, so that a command can validate it at once.

This file says which attention a step has. ``adapters/parallel/scheduled_attention.py`` sets it before each
step of a pipeline. Tests: tests/adapters/test_attention_options.py and
tests/adapters/test_schedule_of_keys.py; what is refused, in tests/adapters/test_refused_options.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from para_core.attention.option import AttentionOption
from para_core.option_values import BACKENDS, EXACT_FORM, Backend

if TYPE_CHECKING:
    from para_core.attention.attention_options import AttnOptions


@dataclass(frozen=True)
class AttentionSchedule:
    """The attention of each denoising step. **Not exact**: all but the first and last steps may approximate.

    Pass it as ``backend=`` of :func:`~para_core.adapters.parallelize_pipe`.

    Args:
        middle (`str` or an option): The attention of the steps between the first and the last ones: a
            backend such as ``"sage"`` or ``"triton-int8"``, or an approximate option of attention, such as
            ``KeptKeys(share)``, with which each head attends to a share of the keys.
        first (`int`, *optional*, defaults to `4`): Number of steps at the beginning that use the backend
            ``exact``.
        last (`int`, *optional*, defaults to `4`): Number of steps at the end that use the backend ``exact``.
        exact (`str`, *optional*): The backend of the first and last steps. By default SDPA chooses.

    Raises:
        ValueError: If ``middle`` is neither a backend nor an option for steps, ``exact`` is no backend or one
            that approximates, or a number of steps is negative.
        TypeError: If a number of steps is not an integer.

    Example:
        >>> schedule = AttentionSchedule("math", first=1, last=2)
        >>> tuple(schedule.is_middle(step, 5) for step in range(5))
        (False, True, True, False, False)
    """

    middle: Backend | AttentionOption
    first: int = 4
    last: int = 4
    exact: Backend | None = None

    def __post_init__(self) -> None:
        exact = [name for name in BACKENDS if name not in EXACT_FORM]
        is_option = isinstance(self.middle, AttentionOption) and self.middle.by_step
        if not is_option and self.middle not in BACKENDS:
            raise ValueError(
                f"middle is {self.middle!r}; expected one of {', '.join(BACKENDS)}, or KeptKeys(share)."
            )
        if self.exact not in (None, *exact):
            raise ValueError(f"exact is {self.exact!r}; expected one of {', '.join(exact)}, or None.")
        for name, value in (("first", self.first), ("last", self.last)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; expected a number of steps.")
            if value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more steps.")

    @property
    def approximates(self) -> bool:
        """Whether the attention ``middle`` is approximate."""
        return isinstance(self.middle, AttentionOption) or self.middle in EXACT_FORM

    @property
    def backends(self) -> tuple[Backend | None, ...]:
        """The backends of all steps; None among them means that SDPA chooses."""
        if isinstance(self.middle, AttentionOption):
            return (self.exact,)
        return (self.exact, self.middle)

    def is_middle(self, step: int, num_steps: int) -> bool:
        """Whether step ``step`` (0 is the first) of ``num_steps`` steps uses the attention ``middle``. With
        fewer than ``first + last`` steps none does.
        """
        return self.first <= step < num_steps - self.last

    def options(self, base: AttnOptions, *, middle: bool) -> AttnOptions:
        """Return ``base`` with the attention of the middle steps if ``middle``, else with that of the other steps."""
        if not middle:
            return replace(base, backend=self.exact)
        if isinstance(self.middle, AttentionOption):
            return replace(base, backend=self.exact).with_option(self.middle)
        return replace(base, backend=self.middle)
