"""The result of :func:`propose_plan`."""

from __future__ import annotations

from dataclasses import dataclass

from para_core.adapters.adapter import Adapter
from para_core.adapters.propose.source import source_of
from para_core.cache.blocks import CachedBlocks
from para_core.plans.plan import Plan


@dataclass(frozen=True)
class Proposal:
    """The result of :func:`propose_plan`: a checked plan, or questions. ``print`` shows it.

    Args:
        transformer (`str`): Name of the model's class.
        plan (`Plan`, *optional*): A plan that was exact in the check. None if no guess was.
        blocks (`CachedBlocks`, *optional*): A block stack for First Block Cache that was exact in the check. None if no
            guess was.
        error (`float`, *optional*): The largest ``‖out − expected‖ / ‖expected‖`` of the plan on virtual ranks, where
            ``expected`` is the output of the unmodified model.
        blocks_error (`float`, *optional*): The same error for a call that skips blocks.
        reasons (`tuple[str, ...]`): A sentence for each guess.
        questions (`tuple[str, ...]`): What the user must state in ``answers``.
        guess (`Plan`, *optional*): The likeliest plan if none was exact, to be corrected by hand.
    """

    transformer: str
    plan: Plan | None = None
    blocks: CachedBlocks | None = None
    error: float | None = None
    blocks_error: float | None = None
    reasons: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    guess: Plan | None = None

    def adapter(self) -> Adapter:
        """Return the proposal as an adapter, for example for ``parallelize_pipe(pipe, adapter=...)``.

        Raises:
            ValueError: If no plan was exact.
        """
        if self.plan is None:
            raise ValueError(f"no plan was found for {self.transformer}: {' '.join(self.questions)}")
        return Adapter(self.transformer, self.transformer, self.plan, blocks=self.blocks)

    def source(self) -> str:
        """Return the source code of a module for adapters/models/ that defines the adapter.

        Raises:
            ValueError: If no plan was exact.
        """
        return source_of(self.adapter())

    def __str__(self) -> str:
        lines = [f"{self.transformer}: " + ("no plan found" if self.plan is None else f"exact to {self.error:.1e}")]
        lines += [f"- {reason}" for reason in self.reasons]
        lines += [f"? {question}" for question in self.questions]
        if self.plan is not None:
            return "\n".join([*lines, "", self.source()])
        if self.guess is not None:
            lines += ["", "The likeliest guess:", source_of(Adapter(self.transformer, self.transformer, self.guess))]
        return "\n".join(lines)
