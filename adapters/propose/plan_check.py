"""Check a plan against the unmodified model, on virtual ranks: threads of this process.

``search.py`` checks each candidate with it, ``completion.py`` what is added to an exact plan, and
``questions.py`` asks where a plan first differs. How virtual ranks run is in
``para_core/comparison/virtual_ranks.py``. Tests: tests/adapters/propose/test_structures.py,
tests/adapters/propose/test_completion.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import nn

from para_core.comparison.difference import Difference, find_first_difference
from para_core.comparison.model_inputs import ModelInputs
from para_core.comparison.runs import ParallelRun
from para_core.comparison.tensor_parts import largest_error
from para_core.comparison.tolerances import compute_dtype
from para_core.comparison.virtual_ranks import copy_containers, run_on_virtual_ranks
from para_core.plans.plan import Plan

# Relative errors ‖out − expected‖ / ‖expected‖ below which a plan counts as exact, by the dtype in which the
# model computes: many times the precision of the dtype, because sums in another order differ and a model adds
# up many, and far below the error of a wrong plan, which is that of other tokens. Those of check_parallel are
# in para_core/comparison/tolerances.py.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Meshes as (ring, ulysses), for a plan whose lengths are unknown: most lengths are not divisible by both 2
# and 3, so at least one mesh has uneven shards.
_SOME_MESHES: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (1, 3), (3, 1))


class InexactPlanError(Exception):
    """Error for a plan under which the model fails, or gives another result."""


@dataclass(frozen=True)
class PlanCheck:
    """A model and examples of its calls, with which plans are checked: one, or the smaller and the larger one."""

    module: nn.Module
    examples: Sequence[Mapping[str, Any]]

    @property
    def tolerance(self) -> float:
        """The relative error from which on a result is not exact."""
        return _TOLERANCE.get(compute_dtype(self.module), 1e-5)

    def measure_error(self, plan: Plan, *lengths: Sequence[int]) -> float:
        """Return the largest relative error of ``plan`` over all examples. The plan is exact if this returns.

        ``lengths`` are, for each sharded segment, its numbers of tokens in the examples; none if unknown.

        Raises:
            InexactPlanError: The plan is not exact.
        """
        largest = 0.0
        for i, inputs in enumerate(self.examples):
            with torch.no_grad():
                expected = self.module(**copy_containers(inputs))
            for ring, ulysses in self._meshes(i, lengths):
                try:
                    outs = run_on_virtual_ranks(self.module, plan, inputs, ring=ring, ulysses=ulysses)
                # With a wrong plan the model may raise anything, which means that the guess is wrong.
                except Exception as failure:
                    raise InexactPlanError(
                        f"on {ring} × {ulysses} ranks: {type(failure).__name__}: {failure}"
                    ) from failure
                largest = max(largest, *[largest_error(out, expected) for out in outs])
                if not largest < self.tolerance:
                    raise InexactPlanError(
                        f"on {ring} × {ulysses} ranks its result is {largest:.1e} from that of the unmodified model."
                    )
        return largest

    def _meshes(self, example: int, lengths: Sequence[Sequence[int]]) -> Sequence[tuple[int, int]]:
        """Return the meshes, as (ring, ulysses), on which to check a call with ``example``."""
        if not lengths:
            return _SOME_MESHES
        # Uneven shards reveal errors that equal shards hide: take the fewest ranks that divide no length.
        # Every number of ranks divides 0, the length of a text without tokens.
        tokens = [tokens_of_examples[example] for tokens_of_examples in lengths]
        ranks = next(ranks for ranks in count(2) if all(number % ranks for number in tokens if number > 0))
        return ((1, ranks), (ranks, 1))

    def find_difference(self, plan: Plan, *lengths: Sequence[int]) -> Difference:
        """Return the first difference between the unmodified model and ``plan``, in a call with the smaller
        example.

        ``lengths`` are as in :meth:`measure_error`.
        """
        ((_, ranks), *_) = self._meshes(0, lengths)
        inputs, run = ModelInputs((), self.examples[0]), ParallelRun(plan, forward=None, dims={})
        return find_first_difference(self.module, inputs, run, "ulysses", ranks, tolerance=self.tolerance)
