"""``check_parallel``: run a model on virtual ranks in one process, and compare its output with the unmodified
model.

Users call it; ``verify=True`` on real ranks is :mod:`.verification`. The runs are in
:mod:`para_core.comparison.runs`, and the result in :mod:`.check_result`. Tests:
tests/verify/test_check_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from para_core.comparison.difference import Difference, find_first_difference
from para_core.comparison.model_inputs import ModelInputs, dims_of_plan, dims_of_tokens
from para_core.comparison.runs import AttentionDim, ParallelRun, RankRun, run_on_one_rank, run_parallel
from para_core.comparison.tensor_parts import relative_error, results_in
from para_core.comparison.tolerances import compute_dtype, tolerance_of
from para_core.comparison.virtual_ranks import device_of, first_error
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import is_filled
from para_core.instance.slots import Slot
from para_core.layout.sequence import Segment
from para_core.plans.plan import Plan
from para_core.plans.published_plan import convert_published_plan
from para_core.verify.check_result import CheckedCase, ParallelCheck

_METHODS: tuple[AttentionDim, ...] = ("ring", "ulysses")


def check_parallel(
    model: nn.Module,
    *inputs: Any,
    dim: int | Mapping[str, int] | None = None,
    plan: Plan | Mapping[str, Any] | None = None,
    forward: Callable[..., Any] | None = None,
    ranks: int | Sequence[int] = (2, 3),
    tolerance: float | None = None,
    **kwargs: Any,
) -> ParallelCheck:
    """Run ``model`` on virtual ranks, and compare the output with that of the unmodified model.

    Each number of ranks is checked with ring and with Ulysses attention, at a length that is a multiple of
    the number of ranks, and at a length that is not. The ranks are threads of this process, so neither a
    process group nor several devices are needed. Each rank runs a copy of the model that shares its weights,
    in eval mode and without gradients. The model itself, its buffers and the random state do not change. A
    wrong result is traced to the first module whose output differs. An error on a rank is not raised but
    reported.

    Use the numbers of ranks and the lengths of your real runs, because some models compute differently
    depending on the length that a rank holds. In float16 and bfloat16 only large differences can be detected;
    check a float32 copy if you can.

    Args:
        model (`nn.Module`): The model. Its weights must not be zeros, because zeros hide errors.
        inputs, kwargs (`Any`): The arguments of the call. ``model(*inputs, **kwargs)`` is the reference.
        dim (`int` or `dict` of parameter names to `int`, *optional*, defaults to `1`): The dim along which
            inputs are sharded, with ``cp.shard`` of a ``UnifiedAttnMode`` ``cp``. An int shards every input
            tensor that is as long along this dim as the first tensor. A dict shards the named arguments only;
            every rank gets all of the others.
        plan (:class:`Plan` or `_cp_plan`, *optional*): A plan to check instead of ``UnifiedAttnMode``.
        forward (`Callable`, *optional*): A function that replaces the call of the model, for a model that
            creates its tokens itself. It is called as ``forward(cp, model, *inputs, **kwargs)`` under the
            ``UnifiedAttnMode`` ``cp``, shards and gathers with ``cp.shard`` and ``cp.gather``, takes all
            tensors from its arguments, and returns the output of the model, or one tensor of it.
        ranks (`int` or sequence of `int`, defaults to `(2, 3)`): Numbers of ranks.
        tolerance (`float`, *optional*): The largest ``‖out − ref‖ / ‖ref‖`` that counts as exact. Defaults to
            1e-4 for float32, 1e-9 for float64, 1e-2 for float16 and 5e-2 for bfloat16: the dtype of autocast,
            or of most of the weights.

    Returns:
        A :class:`ParallelCheck`, which is true if every case is exact.

    Raises:
        TypeError: If ``model`` is not a module, or an argument has the wrong type.
        ValueError: If the model is already parallel or on the meta device, more than one of ``dim``, ``plan``
            and ``forward`` is given, or nothing can be sharded along ``dim``.

    Example:
        >>> print(check_parallel(model, torch.randn(1, 101, 64), dim=1))  # doctest: +SKIP
        >>> print(check_parallel(llama, input_ids=ids, position_ids=positions, dim=1))  # doctest: +SKIP
        >>> print(check_parallel(dit, latents, plan=proposal.plan))  # doctest: +SKIP
    """
    module = _require_unmodified(model)
    numbers = _require_ranks(ranks)
    if sum(option is not None for option in (dim, plan, forward)) > 1:
        raise ValueError(
            "check_parallel takes one of dim=, plan= and forward=: what is sharded is said once."
        )
    if forward is not None and not callable(forward):
        raise TypeError(
            f"forward is {forward!r}; expected a function, called as forward(cp, model, *inputs, **kwargs)."
        )
    if tolerance is None:
        tolerance = tolerance_of(compute_dtype(module))
    if plan is not None and not isinstance(plan, Plan):
        plan = convert_published_plan(plan)
    model_inputs = ModelInputs(inputs, kwargs)
    dims: dict[int, int] = {}
    if plan is not None:
        dims = dims_of_plan(module, model_inputs, plan)
    elif forward is None:
        dims = dims_of_tokens(module, model_inputs, dim)
    run = ParallelRun(plan=plan, forward=forward, dims=dims)
    device = device_of(module, model_inputs.leaves())
    devices = []
    if device.type == "cuda":
        devices = [device]
    with torch.random.fork_rng(devices):
        return _Checker(module, model_inputs, run, tolerance).check(numbers)


def _require_unmodified(model: Any) -> nn.Module:
    """Return the module that ``model`` is, or that was compiled to it.

    Raises:
        TypeError: It is no module.
        ValueError: It is already parallel, or on the meta device.
    """
    module = uncompiled(model)
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; expected an nn.Module (of a pipeline, its transformer)."
        )
    if any(is_filled(submodule, Slot.PLAN) for submodule in module.modules()):
        raise ValueError(
            f"{original_class(module).__name__} is already parallel. Check the unmodified model, or undo it first: "
            "unparallelize_pipe(pipe), unparallelize_transformer(transformer), remove_context_parallel(model)."
        )
    if device_of(module).type == "meta":
        raise ValueError(
            f"{original_class(module).__name__} is on the meta device, and outputs without data cannot be compared. "
            "Load its weights first."
        )
    return module


def _require_ranks(ranks: Any) -> list[int]:
    """Return the numbers of ranks.

    Raises:
        TypeError: ``ranks`` is neither an int nor several values.
        ValueError: There is no number, or one of them is not at least 2.
    """
    if not isinstance(ranks, (int, Iterable)):
        raise TypeError(f"ranks is {ranks!r}; expected an int of at least 2, or several of them.")
    numbers = [ranks] if isinstance(ranks, int) else [*ranks]
    if not numbers or any(not isinstance(number, int) or number < 2 for number in numbers):
        raise ValueError(
            f"ranks is {ranks!r}; expected a number of ranks, at least 2, or several such numbers."
        )
    return numbers


class _NotComparableError(Exception):
    """Error for outputs of ranks that cannot be compared with the output of the unmodified model."""


class _Reference(NamedTuple):
    """A call of the unmodified model: its inputs and its output tensors."""

    inputs: ModelInputs
    outputs: list[Tensor]


class _Checker:
    """The state of one :func:`check_parallel` call: the calls of the unmodified model by length, and notes.
    Raise the error of the unmodified model, if it fails.
    """

    def __init__(self, module: nn.Module, inputs: ModelInputs, run: ParallelRun, tolerance: float) -> None:
        self._module, self._inputs, self._run, self._tolerance = module, inputs, run, tolerance
        outcome = run_on_one_rank(module, inputs)
        if outcome.error is not None:
            raise outcome.error
        self._whole = _Reference(inputs, results_in(outcome.output))
        # The shorter calls of the unmodified model, by their number of tokens; None if it fails.
        self._shorter: dict[int, _Reference | None] = {}
        self._notes: list[str] = []
        # The token dim of each sharded tensor, by its index in inputs.leaves(), and the number of tokens. If
        # forward= or a plan shards tensors inside the model, these are known only after the first run.
        self._dims: dict[int, int] = dict(run.dims)
        leaves = inputs.leaves()
        self._total: int | None = next((leaves[index].shape[dim] for index, dim in run.dims.items()), None)

    def check(self, numbers: Sequence[int]) -> ParallelCheck:
        """Return the check of all cases, for each number of ranks."""
        cases: list[CheckedCase] = []
        for ranks in numbers:
            # Check the full length first: that run shows which inputs are sharded and so can be shortened.
            cases += [self._check_all_tokens(method, ranks) for method in _METHODS]
            for method in _METHODS:
                cases += self._check_fewer_tokens(method, ranks)
        notes = tuple(dict.fromkeys(self._notes))
        check = ParallelCheck(
            original_class(self._module).__name__, tuple(cases), self._tolerance, notes=notes
        )
        wrong = next((case for case in cases if not check.is_exact(case)), None)
        if wrong is None:
            return check
        return replace(check, first_difference=self._find_first_difference(wrong))

    def _check_all_tokens(self, method: AttentionDim, ranks: int) -> CheckedCase:
        results = run_parallel(self._module, self._inputs, self._run, method, ranks)
        self._learn_what_is_sharded(results[0])
        return self._make_case(method, ranks, self._total, results, self._whole.outputs)

    def _check_fewer_tokens(self, method: AttentionDim, ranks: int) -> list[CheckedCase]:
        """Return the case with fewer tokens, in a list; an empty list if there is none."""
        length = self._shorter_length(ranks)
        if self._total is None or length is None:
            return []
        if length not in self._shorter:
            self._shorter[length] = self._call_with_fewer_tokens(self._total, length)
        reference = self._shorter[length]
        if reference is None:
            return []
        results = run_parallel(self._module, reference.inputs, self._run, method, ranks)
        hint = ""
        if self._run.forward is not None:
            hint = f" (inputs were shortened to {length} tokens; forward= must take everything from its arguments)"
        return [self._make_case(method, ranks, length, results, reference.outputs, hint=hint)]

    def _learn_what_is_sharded(self, result: RankRun) -> None:
        """Remember the number of tokens that the first run has sharded, and their inputs, so that later runs
        can shorten these. A plan that shards inside the model shows the number only.
        """
        if self._total is not None:
            return
        if not result.sharded:
            sharded = [segment for segment in result.segments if not segment.replicated]
            self._total = next((segment.total for segment in sharded), None)
            return
        self._total = result.sharded[0].tokens
        for tensor in result.sharded:
            if tensor.index is not None and tensor.tokens == self._total:
                self._dims[tensor.index] = tensor.dim

    def _make_case(
        self,
        method: AttentionDim,
        ranks: int,
        tokens: int | None,
        results: Sequence[RankRun],
        expected: Sequence[Tensor],
        *,
        hint: str = "",
    ) -> CheckedCase:
        """Return the case of a run with these ``results``. ``hint`` follows the error of a rank."""
        failed = first_error([result.outcome for result in results])
        if failed is not None:
            rank, error = failed
            failure = f"rank {rank}: {type(error).__name__}: {error}{hint}"
            return CheckedCase(method, ranks, tokens, failure=failure)
        outputs = [results_in(result.outcome.output) for result in results]
        may_be_some = self._run.forward is not None
        try:
            largest = _error_of_ranks(outputs, expected, results[0].segments, may_be_some=may_be_some)
        except _NotComparableError as reason:
            return CheckedCase(method, ranks, tokens, failure=str(reason))
        return CheckedCase(method, ranks, tokens, error=largest)

    def _shorter_length(self, ranks: int) -> int | None:
        """Return a length shorter than all tokens, such that ``ranks`` divides one of both but not the other.

        Return None, and note why, if it is less than ``ranks``, because many models fail on an empty part; or
        if no input is sharded.
        """
        if self._total is None or not self._dims:
            self._notes.append(
                "the length was not varied: none of the inputs is sharded itself. Check again with inputs of another "
                "size."
            )
            return None
        shorter = self._total - (self._total % ranks or 1)
        if shorter < ranks:
            self._notes.append(
                f"no length below {self._total} tokens was checked on {ranks} ranks, because a rank would hold none. "
                "Check again with longer inputs."
            )
            return None
        return shorter

    def _call_with_fewer_tokens(self, total: int, length: int) -> _Reference | None:
        """Call the unmodified model with the first ``length`` of ``total`` tokens. None, with a note, if it fails."""
        errors = []
        for only_tokens in (True, False):
            inputs = self._inputs.shorten(self._dims, total, length, only_tokens=only_tokens)
            outcome = run_on_one_rank(self._module, inputs)
            if outcome.error is None:
                return _Reference(inputs, results_in(outcome.output))
            errors.append(outcome.error)
        self._notes.append(f"{length} tokens were not checked: the model alone fails: {errors[0]}")
        return None

    def _find_first_difference(self, case: CheckedCase) -> Difference:
        """Return the first module that differs in ``case``, which has been run and was not exact."""
        # A case with all tokens is not among the shorter ones; its number is None if nothing was sharded.
        reference = self._shorter.get(case.tokens or 0) or self._whole
        return find_first_difference(
            self._module,
            reference.inputs,
            self._run,
            case.method,
            case.ranks,
            reference.outputs,
            tolerance=self._tolerance,
            failure=case.failure,
        )


def _error_of_ranks(
    outputs: Sequence[Sequence[Tensor]],
    expected: Sequence[Tensor],
    segments: Sequence[Segment],
    *,
    may_be_some: bool,
) -> float:
    """Return the largest error of the output tensors of each rank.

    ``may_be_some`` says whether ranks may return only some of the ``expected`` tensors, as a user's
    ``forward`` may.

    Raises:
        _NotComparableError: They cannot be compared.
    """
    if not outputs[0]:
        raise _NotComparableError(
            "the output holds no tensor in a tuple, list or dict, so nothing can be compared."
        )
    numbers = [len(of_rank) for of_rank in outputs]
    if len({*numbers}) > 1 or (numbers[0] != len(expected) and not may_be_some):
        raise _NotComparableError(f"the ranks return {numbers} tensors, and the model alone {len(expected)}.")
    largest = 0.0
    for i, parts in enumerate(zip(*outputs, strict=True)):
        wholes = expected
        if numbers[0] == len(expected):
            wholes = [expected[i]]
        # If ranks return only some of the output tensors, compare with the one that fits best: several may
        # have the same shape.
        errors = [relative_error(parts, whole, segments) for whole in wholes]
        error = min((error for error in errors if error is not None), default=None)
        if error is None:
            shapes = [list(part.shape) for part in parts]
            alone = [list(x.shape) for x in expected]
            raise _NotComparableError(
                f"the ranks return {shapes}, which are no parts of what the model alone returns: {alone}."
            )
        largest = max(largest, error)
    return largest
