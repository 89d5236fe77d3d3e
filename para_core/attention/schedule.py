"""A schedule of attention over denoising steps.
Imports no torch, so that a command can validate it at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from para_core.option_values import BACKENDS, EXACT_FORM, Backend

if TYPE_CHECKING:
    from para_core.attention.attention_options import AttnOptions


@dataclass(frozen=True)
class KeptKeys:
    """Attention in which each head attends only to a share of the keys. **Not exact.** See
    :class:`SparseKVAttnMode`.

    Args:
        share (`float`): Share of the keys that each head keeps, 0 < share <= 1. The number of keys is rounded
            up.
        window (`int`, *optional*, defaults to `64`): Number of queries whose attention weights decide which
            keys are kept.

    Raises:
        ValueError: If ``share`` or ``window`` is out of range.
    """

    share: float
    window: int = 64

    def __post_init__(self) -> None:
        if (
            isinstance(self.share, bool)
            or not isinstance(self.share, (int, float))
            or not 0 < self.share <= 1
        ):
            raise ValueError(
                f"share is {self.share!r}; expected the share of the keys to keep, 0 < share <= 1."
            )
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window is {self.window!r}; expected a positive number of observed queries.")

    @property
    def fields(self) -> tuple[float, int]:
        """The arguments of the constructor, for the JSON form of the options."""
        return self.share, self.window

    def observed(self, num_queries: int) -> list[int]:
        """Return the positions of the queries whose attention weights decide which keys are kept.

        They are the middles of ``window`` equal parts of the sequence; all positions if ``num_queries <=
        window``.

        >>> KeptKeys(0.5, 3).observed(12)
        [2, 6, 10]
        """
        if num_queries <= self.window:
            return list(range(num_queries))
        return [(2 * i + 1) * num_queries // (2 * self.window) for i in range(self.window)]


@dataclass(frozen=True)
class AttentionSchedule:
    """The attention of each denoising step. **Not exact**: all but the first and last steps may approximate.

    Pass it as ``backend=`` of :func:`~para_core.adapters.parallelize_pipe`.

    Args:
        middle (`str` or `KeptKeys`): The attention of the steps between the first and the last ones: a
            backend such as ``"sage"`` or ``"triton-int8"``, or ``KeptKeys(share)``, with which each head
            attends to a share of the keys.
        first (`int`, *optional*, defaults to `4`): Number of steps at the beginning that use the backend
            ``exact``.
        last (`int`, *optional*, defaults to `4`): Number of steps at the end that use the backend ``exact``.
        exact (`str`, *optional*): The backend of the first and last steps. By default SDPA chooses.

    Raises:
        ValueError: If a backend is unknown, ``exact`` names one that approximates, or a number of steps is
            negative.
        TypeError: If a number of steps is not an integer.

    Example:
        >>> schedule = AttentionSchedule(KeptKeys(0.5), first=1, last=2)
        >>> tuple(schedule.is_middle(step, 5) for step in range(5))
        (False, True, True, False, False)
    """

    middle: Backend | KeptKeys
    first: int = 4
    last: int = 4
    exact: Backend | None = None

    def __post_init__(self) -> None:
        exact = [name for name in BACKENDS if name not in EXACT_FORM]
        if not isinstance(self.middle, KeptKeys) and self.middle not in BACKENDS:
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
        return isinstance(self.middle, KeptKeys) or self.middle in EXACT_FORM

    @property
    def backends(self) -> tuple[Backend | None, ...]:
        """The backends of all steps; None among them means that SDPA chooses."""
        if isinstance(self.middle, KeptKeys):
            return (self.exact,)
        return (self.exact, self.middle)

    def is_middle(self, step: int, num_steps: int) -> bool:
        """Whether step ``step`` (0 is the first) of ``num_steps`` steps uses the attention ``middle``."""
        return self.first <= step < num_steps - self.last

    def options(self, base: AttnOptions, *, middle: bool) -> AttnOptions:
        """Return ``base`` with the attention of the middle steps if ``middle``, else with that of the other steps."""
        if not middle:
            return replace(base, backend=self.exact)
        if isinstance(self.middle, KeptKeys):
            return replace(base, backend=self.exact, kept_keys=self.middle)
        return replace(base, backend=self.middle)
