"""The options and the report of PipeFusion. Imports no torch, so that the planner starts at once.

:mod:`.pipefusion` reads the options and fills the report. Tests: tests/weights/test_pipefusion.py.
"""

from __future__ import annotations

from dataclasses import dataclass

# A generation with fewer steps is computed without patches, because its consecutive steps differ too much. No
# limit was measured: the number is a choice, which docs/stages.md names, too.
FEWEST_STEPS = 8


# The smallest value of each option, and the reason.
_SMALLEST = {
    "num_patches": (2, ", because a single patch is a step without patches: leave pipefusion= out"),
    "warmup_steps": (1, ", because patches need the keys of an earlier step"),
    "cooldown_steps": (0, ""),
}


@dataclass(frozen=True)
class PipeFusion:
    """Options of PipeFusion, for ``parallelize_pipe(pipe, pipefusion=PipeFusion(...))``.

    The output is not exact.

    Args:
        num_patches (`int`, defaults to `4`): Number of patches into which the tokens of an image or video are
            split, at least 2. More patches mean less idle time of the stages, but more work for the host.
        warmup_steps (`int`, defaults to `1`): Number of steps at the start, at least one, that are computed
            exactly, without patches.
        cooldown_steps (`int`, defaults to `0`): Number of steps at the end that are computed exactly, without
            patches.

    Raises:
        TypeError, ValueError: A value is not an integer, or too small.
    """

    num_patches: int = 4
    warmup_steps: int = 1
    cooldown_steps: int = 0

    def __post_init__(self) -> None:
        for name, (smallest, why) in _SMALLEST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"PipeFusion({name}={value!r}): expected an integer.")
            if value < smallest:
                raise ValueError(f"PipeFusion({name}={value}): expected at least {smallest}{why}.")

    def is_whole(self, index: int, total: int) -> bool:
        """Whether step ``index`` of ``total`` steps is computed exactly, without patches."""
        return total < FEWEST_STEPS or index < self.warmup_steps or index >= total - self.cooldown_steps


@dataclass(frozen=True)
class PipeFusionReport:
    """Statistics of the last generation with PipeFusion on this rank.

    Args:
        whole_calls, patched_calls: Numbers of model calls that were computed exactly, and in patches.
        overlapping_calls: Number of patched calls that started before the previous step had ended: with
            schedulers that compute elementwise (Euler, DPM++ 2M) all but the first, with others (UniPC) none,
            because stages wait for each other once per step.
        key_bytes: Bytes of the stored keys and values of all CFG branches.
        bytes_sent: Bytes sent to other stages.
        seconds: Duration of the patched calls.
        seconds_waited: Part of ``seconds`` in which the host waited for other stages. About 0 on NCCL.
    """

    whole_calls: int = 0
    patched_calls: int = 0
    overlapping_calls: int = 0
    key_bytes: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    seconds_waited: float = 0.0
