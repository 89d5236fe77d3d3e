"""A schedule of attention backends over the steps of a generation."""

from __future__ import annotations

from dataclasses import dataclass

from para_core.attention.backend_selection import BACKENDS, EXACT_FORM, Backend


@dataclass(frozen=True)
class AttentionSchedule:
    """Backends of local attention by denoising step. **Not exact**: all but the first and last steps may approximate.

    Pass it as ``backend=`` of :func:`~para_core.adapters.parallelize_pipe`.

    Args:
        middle (`str`): The backend of the steps between the first and the last ones, such as ``"sage"`` or
            ``"triton-int8"``.
        first (`int`, *optional*, defaults to `4`): Number of steps at the beginning that use the backend ``exact``.
        last (`int`, *optional*, defaults to `4`): Number of steps at the end that use the backend ``exact``.
        exact (`str`, *optional*): The backend of the first and last steps. Defaults to the choice of SDPA.

    Raises:
        ValueError: If a backend is unknown, ``exact`` names one that approximates, or a number of steps is negative.
        TypeError: If a number of steps is no integer.

    Example:
        >>> schedule = AttentionSchedule("triton-int8", first=1, last=2)
        >>> [schedule.backend_at(step, 5) for step in range(5)]
        [None, 'triton-int8', 'triton-int8', None, None]
    """

    middle: Backend
    first: int = 4
    last: int = 4
    exact: Backend | None = None

    def __post_init__(self) -> None:
        exact = [name for name in BACKENDS if name not in EXACT_FORM]
        if self.middle not in BACKENDS:
            raise ValueError(f"middle is {self.middle!r}; expected one of {', '.join(BACKENDS)}.")
        if self.exact not in (None, *exact):
            raise ValueError(f"exact is {self.exact!r}; expected one of {', '.join(exact)}, or None.")
        for name, value in (("first", self.first), ("last", self.last)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; expected a number of steps.")
            if value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more steps.")

    def backend_at(self, step: int, num_steps: int) -> Backend | None:
        """Return the backend of step ``step`` (0 is the first) of ``num_steps`` steps; None for the choice of SDPA."""
        return self.middle if self.first <= step < num_steps - self.last else self.exact

    @property
    def backends(self) -> tuple[Backend | None, ...]:
        return self.exact, self.middle
