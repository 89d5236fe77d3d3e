"""``verify=True``: compare calls of a parallel model with the unmodified model, on the inputs of the user's
own run.

:mod:`.option` makes one for each transformer of a pipeline. ``check_parallel``, in one process, is
:mod:`.check`. Tests: tests/verify/test_verification.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from para_core.cache.attachment import last_outcomes
from para_core.cache.decision import Verdict
from para_core.comparison.call_record import CallRecord, record_call
from para_core.comparison.difference import Difference, compare_records
from para_core.comparison.model_inputs import ModelInputs
from para_core.comparison.tensor_parts import largest_error, results_in
from para_core.comparison.tolerances import compute_dtype, tolerance_of
from para_core.comparison.virtual_ranks import device_of
from para_core.dataclass_fields import leaf_kinds
from para_core.distributed.agree import exchange
from para_core.distributed.mesh import SequenceMesh
from para_core.foreign_errors import is_out_of_memory
from para_core.instance.modules import instances_in, uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_during
from para_core.instance.slots import Slot
from para_core.layout.sequence import Segment
from para_core.plans.current_call import segments_under_way
from para_core.plans.region import Region, region_of
from para_core.user_warnings import ParallelWarning, warn_user

logger = logging.getLogger(__name__)

# The slots that stay filled for the unmodified model. So its call is collective if weights are sharded.
_SLOTS_OF_WEIGHTS = frozenset(slot for slot in Slot if slot.supplies_weights)
# The error of outputs that cannot be compared, because their number or shapes differ. JSON has no infinity.
_NOT_COMPARABLE = 1e30


@dataclass(frozen=True)
class Comparison:
    """The difference between the outputs of one rank and those of the unmodified model.

    Args:
        error: The largest ``‖out − ref‖ / ‖ref‖`` of all output tensors.
        same_bits: Whether all output tensors are equal bit for bit.
        tolerance: The largest error that rounding explains.
        lacked_memory: Whether the unmodified call ran out of memory, so that nothing was compared.
    """

    error: float = 0.0
    same_bits: bool = False
    tolerance: float = 0.0
    lacked_memory: bool = False


class Verification:
    """Compares calls of one parallel model with the unmodified model: once for each size of inputs, and again
    if code inside the model has changed.

    If the unmodified call or the comparison runs out of memory on a rank, all ranks warn and go on, and this
    size is not tried again. This does not hold for weights that need all ranks during a call (FSDP2,
    ``weights="tensor"``): if one rank runs out of memory in the middle of the unmodified call, the others
    wait in the next collective until its timeout.

    A compared call costs one more call of the model, on every rank, and three if it finds a difference. Other
    calls cost a lookup. The ranks that share tokens decide from equal arguments whether to compare, because
    they exchange what they find. Without such ranks, on a mesh along ``batch`` only, nothing is compared.
    """

    def __init__(self) -> None:
        # Sizes of inputs that need no comparison any more, with the version of the model's code: they were
        # compared, or memory did not suffice.
        self._handled: set[tuple[Any, ...]] = set()

    def run(self, call: Callable[..., Any], called: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of a parallel model, or of the module that ``torch.compile`` made of it, and compare its
        output. Collective.

        Raises:
            RuntimeError: On every rank: the output differs from that of the unmodified model by more than
                rounding. Or the model was compiled after it was parallelized, so that this wrapper would be
                in its graph.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "verify=True compares calls outside of a graph, and this model was compiled around that. Pass the "
                "compiled model: parallelize_transformer(torch.compile(transformer), mesh=mesh, verify=True)."
            )
        module = uncompiled(called)
        region = region_of(module)
        # Only tokens are compared: ranks along batch may make calls of their own, of another branch of
        # guidance.
        if region is None or region.mesh.ranks == 1:
            return call(called, *args, **kwargs)
        # The call itself would notice new code too late.
        region.attach(module)
        key = (region.check.note_changes(), *leaf_kinds((args, sorted(kwargs.items()))))
        if key in self._handled:
            return call(called, *args, **kwargs)
        # The call may change its inputs in place, such as a cache of keys.
        inputs = ModelInputs(args, kwargs).copy()
        earlier = last_outcomes(module)
        output = call(called, *args, **kwargs)
        # The decisions of this call; a call without a cache makes none. The cache of another pipeline with
        # this model still has the last outcome of its own.
        outcomes = [
            outcome for outcome in last_outcomes(module) if not any(outcome is before for before in earlier)
        ]
        if any(Verdict(int(outcome.verdict)).skips for outcome in outcomes):
            # A cache skipped blocks, so the output is an approximation. A later call is compared.
            return output
        comparison = _compare_with_unmodified(module, inputs, output)
        self._conclude(module, region, inputs, comparison)
        self._handled.add(key)
        return output

    def _conclude(
        self, module: nn.Module, region: Region, inputs: ModelInputs, comparison: Comparison
    ) -> None:
        """Exchange the comparisons of all ranks: a collective. Raise ``RuntimeError`` on every rank if one
        found a difference, else log the result, or warn that nothing was compared.
        """
        mesh, name = region.mesh, original_class(module).__name__
        comparisons = [Comparison(**record) for record in exchange(vars(comparison), mesh)]
        lacking = sum(of_rank.lacked_memory for of_rank in comparisons)
        if lacking:
            warn_user(
                f"verify=True: {name} was not compared, because the unmodified model, which runs on the whole inputs, "
                f"ran out of memory on {lacking} of {mesh.ranks} ranks. "
                "Compare at a smaller size, or with offload='blocks', and leave verify= out at this one.",
                ParallelWarning,
            )
            return
        error = max(of_rank.error for of_rank in comparisons)
        # All ranks must take the same branch, because the search for the difference is collective. Their own
        # tolerances may differ: autocast may be on in one process only.
        tolerance = max(of_rank.tolerance for of_rank in comparisons)
        if error > tolerance:
            difference = _first_difference_on_mesh(module, mesh, inputs, tolerance)
            size = f"differs by {error:.1e}"
            if error >= _NOT_COMPARABLE:
                size = "has other tensors, or none to compare,"
            raise RuntimeError(
                f"verify=True: the output of {name} on {mesh.ranks} ranks {size} from that of the unmodified model; "
                f"rounding explains {tolerance:.0e}. The first difference is in {difference}"
            )
        if mesh.rank == 0:
            bits = "other bits"
            if all(of_rank.same_bits for of_rank in comparisons):
                bits = "the same bits"
            logger.info(
                "verify=True: %s on %d ranks equals the unmodified model: error %.1e, %s.",
                name,
                mesh.ranks,
                error,
                bits,
            )


def _compare_with_unmodified(module: nn.Module, inputs: ModelInputs, output: Any) -> Comparison:
    """Return how far ``output`` is from that of the unmodified model, which is called here on copies of
    ``inputs``, or that memory did not suffice. Collective if the weights are sharded.
    """
    outputs = results_in(output)
    tolerance = _tolerance_for(module, outputs)
    try:
        expected = results_in(_call_unmodified(module, inputs))
        if [x.shape for x in outputs] != [x.shape for x in expected]:
            return Comparison(_NOT_COMPARABLE, tolerance=tolerance)
        # This allocates, too, such as float32 copies of the outputs.
        error = min(largest_error(outputs, expected), _NOT_COMPARABLE)
        same_bits = all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True))
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):
            raise
        return Comparison(lacked_memory=True)
    return Comparison(error, same_bits, tolerance)


def _tolerance_for(module: nn.Module, outputs: Sequence[Tensor]) -> float:
    """Return the largest of the tolerances for the dtypes of ``outputs``, of most weights, and of autocast.

    Outputs alone do not tell: a model in bfloat16 may return float32. Nor do the weights: those that are
    offloaded are on another device than the one for which autocast is enabled.
    """
    dtypes = [compute_dtype(module)]
    for x in outputs:
        if x.is_floating_point():
            dtypes.append(x.dtype)
        if torch.is_autocast_enabled(x.device.type):
            dtypes.append(torch.get_autocast_dtype(x.device.type))
    return max(map(tolerance_of, dtypes))


def _call_unmodified(module: nn.Module, inputs: ModelInputs) -> Any:
    """Return the output of ``module`` for a copy of ``inputs``, without plan, cache and compilation."""
    return _call_with_slots(module, inputs, _SLOTS_OF_WEIGHTS)


def _record_parallel(module: nn.Module, inputs: ModelInputs) -> tuple[CallRecord, list[Segment]]:
    """Call ``module`` under its plan, without cache and compilation.

    Return the record of the call and its segments.
    """
    record, segments = CallRecord(), dict[Segment, None]()

    def note_segments() -> None:
        under_way = segments_under_way(module)
        if under_way is not None:
            segments.update(dict.fromkeys(under_way[1]))

    with record_call(module, record, before_entry=note_segments):
        _call_with_slots(module, inputs, _SLOTS_OF_WEIGHTS | {Slot.PLAN, Slot.ATTENTION_CHECK})
    return record, list(segments)


def _call_with_slots(module: nn.Module, inputs: ModelInputs, keep: Collection[Slot]) -> Any:
    """Return the output of ``module`` for a copy of ``inputs``, with only the slots to ``keep``, in eager
    code.
    """
    region, device = region_of(module), device_of(module, inputs.leaves())
    arguments = inputs.copy()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        devices = []
        if device.type == "cuda":
            devices = [device]
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if region is not None:
            stack.enter_context(region.all_heads())
            # A record is compared by the parts of one dim, which is that of tokens.
            stack.enter_context(region.all_samples())
        stack.enter_context(empty_during(instances_in(module), keep))
        return module(*arguments.args, **arguments.kwargs)


def _first_difference_on_mesh(
    module: nn.Module, mesh: SequenceMesh, inputs: ModelInputs, tolerance: float
) -> Difference:
    """Call the unmodified and the parallel model once more, and return where they differ first.

    A collective call.
    """
    alone = CallRecord()
    with record_call(module, alone):
        _call_unmodified(module, inputs)
    parallel, segments = _record_parallel(module, inputs)
    records = exchange(parallel.to_cpu(), mesh)
    return compare_records(module, alone.to_cpu(), records, segments, tolerance=tolerance)
