"""Find the first module whose output differs between the records of one model call on one rank and on
several.

:mod:`para_core.verify.check`, :mod:`para_core.verify.verification` and ``adapters/propose/plan_check.py``
call this once the outputs differ. Tests: tests/verify/test_check_parallel.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from para_core.comparison.call_record import CallRecord, EntryKind, RecordEntry
from para_core.comparison.clues import clues_for
from para_core.comparison.digests import Digest
from para_core.comparison.model_inputs import ModelInputs
from para_core.comparison.runs import AttentionDim, ParallelRun, run_on_one_rank, run_parallel
from para_core.comparison.tensor_parts import differing_dims, largest_error, relative_error
from para_core.comparison.virtual_ranks import first_error
from para_core.instance.private_class import original_class
from para_core.layout.sequence import Segment

_REASONS: dict[EntryKind, str] = {
    "call": "what it gives {} differs, though all that ran before agrees: it mixes tokens, or counts them",
    "return": "what it returns differs, though what it is given agrees: it mixes tokens, or counts them",
    "attention": "the query, key or value that it attends with differs: look at positions (rotary embeddings)",
    "attended": "its attention differs, though query, key and value agree: look at the mask",
}

# A mask has a dim of queries and one of keys at its end.
_FEWEST_MASK_DIMS = 2
# A floating-point tensor counts as a mask only in the form that SDPA broadcasts, ``[B, 1, S_q, S_k]``. With
# fewer dims, or with several heads, it cannot be told from activations.
_FLOAT_MASK_DIMS, _FLOAT_MASK_HEADS = 4, 1
# The cumulative lengths of one sequence are two integers, 0 and its length.
_SHAPE_OF_CUMULATIVE_LENGTHS = (2,)


@dataclass(frozen=True)
class Difference:
    """The first point at which a run on several ranks differs from a run of the unmodified model on one rank.

    Args:
        module (`str`): Name of the module, as in ``model.named_modules()``; "" for the model itself or for
            code outside of it.
        kind (`str`): Name of the module's class.
        reason (`str`): A description of the difference.
        facts (`tuple` of `str`, *optional*): Details for debugging: the module's attention calls, its
            settings that depend on lengths, and advice.
        error (`float`, *optional*): The relative error of the tensors at this point, estimated from random
            projections (:class:`~para_core.comparison.digests.Digest`); None if no tensors were compared.
    """

    module: str
    kind: str
    reason: str
    facts: tuple[str, ...] = ()
    error: float | None = None

    def __str__(self) -> str:
        name = f"the model itself ({self.kind})"
        if self.module:
            name = f"{self.module} ({self.kind})"
        size = ""
        if self.error is not None:
            size = f" (by {self.error:.1e})"
        return "\n".join([f"{name}: {self.reason}{size}", *[f"  {fact}" for fact in self.facts]])


def find_first_difference(
    module: nn.Module,
    inputs: ModelInputs,
    run: ParallelRun,
    method: AttentionDim,
    ranks: int,
    expected: Sequence[Tensor] = (),
    *,
    tolerance: float,
    failure: str | None = None,
) -> Difference:
    """Run ``module`` once more on one rank and on ``ranks`` virtual ranks, and return the first difference of
    both. Call this only if the outputs differ or a rank failed: the result is a difference in any case.

    Args:
        module: The unmodified model.
        inputs: The arguments of the call.
        run, method, ranks: The run on several ranks, as in :func:`run_parallel`.
        expected: The output tensors of an earlier call on one rank, to which those of this one are compared.
        tolerance: The largest relative error that counts as equal.
        failure: The reason why the outputs cannot be compared. Defaults to the error of the rank that failed,
            if any.
    """
    kind, reference = original_class(module).__name__, CallRecord()
    # A recorder sees only eager code. flex_attention, for example, compiles itself.
    with torch.compiler.set_stance("force_eager"):
        outcome = run_on_one_rank(module, inputs, reference)
    if outcome.error is not None:
        # A failure of the compared runs comes first: the recorded call may fail for the same reason.
        if failure is None:
            failure = f"its recorded call on one rank fails: {type(outcome.error).__name__}: {outcome.error}"
        return Difference("", kind, failure)
    if expected and largest_error(outcome.output, expected) > tolerance:
        reason = (
            "two calls of the unmodified model differ: it draws random numbers, or keeps state between calls"
        )
        return Difference("", kind, reason)
    with torch.compiler.set_stance("force_eager"):
        results = run_parallel(module, inputs, run, method, ranks, record=True)
    records = [result.record for result in results]
    ended = None
    failed = first_error([result.outcome for result in results])
    if failed is not None:
        rank, error = failed
        ended = records[rank]
        failure = failure or f"rank {rank}: {type(error).__name__}: {error}"
    segments = results[0].segments
    return compare_records(
        module, reference, records, segments, tolerance=tolerance, failure=failure, failed=ended
    )


def compare_records(
    module: nn.Module,
    reference: CallRecord,
    ranks: Sequence[CallRecord],
    segments: Sequence[Segment],
    *,
    tolerance: float,
    failure: str | None = None,
    failed: CallRecord | None = None,
) -> Difference:
    """Return the first difference, in order of time, between the records of the ranks and of the unmodified
    model.

    If all entries agree, or cannot be compared, the result describes ``failure``, the error that ended the
    run on several ranks; without a failure it says that code outside of the modules differs.

    Args:
        module: The unmodified model.
        reference, ranks: The records of the unmodified model, and of each rank.
        segments: The segments that were sharded or replicated.
        tolerance: The largest relative error that counts as equal.
        failure: The error that ended the run, as text.
        failed: The record of the rank that failed. The others may merely have waited for it.
    """

    def describe(name: str, reason: str, error: float | None = None) -> Difference:
        submodule = module.get_submodule(name)
        facts = clues_for(name, submodule, reference, ranks)
        return Difference(name, original_class(submodule).__name__, reason, facts, error)

    running = [""]
    records = _common_entries([reference, *ranks])
    # The records of a run that failed end early, so the shortest one ends the loop.
    for entry, *parts in zip(*records, strict=False):
        if any((part.kind, part.module) != (entry.kind, entry.module) for part in parts):
            return describe(running[-1], "on several ranks other modules run, or in another order")
        error = _error_of_entry(entry, parts, segments)
        if error > tolerance:
            # A module that was called with other arguments is not to blame, but the module that has called
            # it.
            name = running[-1] if entry.kind == "call" else entry.module
            return describe(name, _REASONS[entry.kind].format(entry.module or "the model"), error)
        if entry.kind == "call":
            running.append(entry.module)
        elif entry.kind == "return" and entry.module in running[1:]:
            # A module may call itself. The innermost of its calls has returned.
            while running.pop() != entry.module:
                pass
    if failure is not None:
        return describe(_failed_module(ranks if failed is None else [failed]), failure)
    if len({len(entries) for entries in records}) > 1:
        return describe(running[-1], "on several ranks more or fewer calls follow, and all before them agree")
    return describe(
        "",
        "the outputs of all its modules agree, as far as they can be compared; what differs is computed outside of "
        "them: before the first, after the last, or in the lines of forward=",
    )


def _failed_module(records: Sequence[CallRecord]) -> str:
    """Return the innermost module that has not returned in the first of ``records`` that has one, or else
    ``""``.
    """
    for record in records:
        if record.running:
            return record.running[-1]
    return ""


def _common_entries(records: Sequence[CallRecord]) -> list[list[RecordEntry]]:
    """Return the entries of each record, without those of modules that are not called in every record.

    Such modules exist if a user's ``forward`` function calls only parts of the model. Attention calls are
    kept, also those in such modules, and those outside of modules.
    """
    called = [{entry.module for entry in record.entries if entry.kind == "call"} for record in records]
    common = set.intersection(*called)
    return [
        [
            entry
            for entry in record.entries
            if entry.module in common or entry.kind in ("attention", "attended")
        ]
        for record in records
    ]


def _error_of_entry(entry: RecordEntry, parts: Sequence[RecordEntry], segments: Sequence[Segment]) -> float:
    """Return the largest relative error of the tensors of ``entry``, given the same entry of each rank
    (``parts``).

    Three kinds of tensors are not compared, because a module may get others on a rank and be right: all, if
    their number differs; one whose shape does not fit; and one that may differ by its shape and dtype
    (:func:`_may_differ_on_ranks`). If one of them is wrong, the first later tensor that depends on it
    differs. The price is that the report then names the module of that tensor, which may come after the
    cause. The result is 0 if nothing is compared.
    """
    if any(len(part.digests) != len(entry.digests) for part in parts):
        return 0.0
    errors = []
    for i, full in enumerate(entry.digests):
        if not _may_differ_on_ranks(full):
            errors.append(_error_of_parts([part.digests[i] for part in parts], full, segments))
    return max([error for error in errors if error is not None], default=0.0)


def _may_differ_on_ranks(full: Digest) -> bool:
    """Whether a tensor of this shape and dtype may be right on a rank although it is no part of ``full``.

    Such a tensor may be a mask, which may have other rows or columns on a rank and be correct, or the
    cumulative lengths of a sequence, which are those of the rank's part. Shape and dtype are all that is
    known of it, so other tensors of these forms are left out as well: bools with two dims, an image with one
    channel, a pair of integers.
    """
    shape, dtype = full.shape, full.dtype
    if dtype == torch.bool:
        return len(shape) >= _FEWEST_MASK_DIMS
    if dtype.is_floating_point:
        return len(shape) == _FLOAT_MASK_DIMS and shape[1] == _FLOAT_MASK_HEADS
    return not dtype.is_complex and shape == _SHAPE_OF_CUMULATIVE_LENGTHS


def _error_of_parts(parts: Sequence[Digest], full: Digest, segments: Sequence[Segment]) -> float | None:
    """Return the relative error of a tensor; None if its parts do not fit: they have another number of dims,
    or other sizes along more than one dim, or lengths that no segment has.
    """
    if any(len(part.shape) != len(full.shape) for part in parts):
        return None
    dims = differing_dims([part.shape for part in parts], full.shape)
    if len(dims) > 1:
        return None
    # If all shapes are equal, any dim will do.
    dim = dims[0] if dims else 0
    return relative_error([part.rows[dim] for part in parts], full.rows[dim], segments)
