"""``check_parallel``: run a model on virtual ranks in one process, and compare its output with the unmodified model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import is_filled
from para_core.instance.slots import Slot
from para_core.plans.plan import Plan, published_plan
from para_core.verify.first_difference import Difference, Recording, first_difference
from para_core.verify.parts import largest_error, relative_error, tensors_in
from para_core.verify.runs import (
    Method,
    ModelInputs,
    ParallelRun,
    dims_of_plan,
    dims_of_tokens,
    run_alone,
    run_parallel,
)
from para_core.verify.virtual_ranks import device_of, first_error

_METHODS: tuple[Method, ...] = ("ring", "ulysses")
# The default of ``tolerance``: the largest ‖out − ref‖ / ‖ref‖ that counts as exact, by the dtype of the model's
# computation.
# The largest relative error that rounding explains, by dtype.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# Maximum number of characters of an error in a line of the report. The first difference contains the whole error.
_WIDTH = 100


@dataclass(frozen=True)
class CheckedCase:
    """The result of one run on virtual ranks, compared with the unmodified model.

    Args:
        method (`"ring"` or `"ulysses"`): The way in which the ranks shared attention.
        ranks (`int`): Number of ranks.
        tokens (`int`, *optional*): Length of the sharded sequence; None if nothing was sharded.
        error (`float`, *optional*): The largest ``‖out − ref‖ / ‖ref‖`` of all output tensors; None if there is a
            ``failure``.
        failure (`str`, *optional*): The error that ended the run, or the reason why its output cannot be compared.
    """

    method: Method
    ranks: int
    tokens: int | None
    error: float | None = None
    failure: str | None = None

    def __str__(self) -> str:
        tokens = "nothing sharded" if self.tokens is None else f"{self.tokens} tokens"
        failure = (self.failure or "").partition("\n")[0]
        short = failure if len(failure) <= _WIDTH else f"{failure[:_WIDTH]} …"
        result = f"{self.error:.1e}" if self.failure is None else short
        return f"{self.method:<7} {self.ranks} ranks  {tokens:>8}  {result}"


@dataclass(frozen=True)
class ParallelCheck:
    """The result of :func:`check_parallel`. ``str()`` gives a report, and ``bool()`` gives :attr:`exact`.

    Args:
        model (`str`): Name of the model's class.
        cases (`tuple` of :class:`CheckedCase`): One case for each method, number of ranks and length.
        tolerance (`float`): The largest error that counts as exact.
        first_difference (:class:`Difference`, *optional*): The first module whose output differs in the first case that
            is not exact; None if all cases are exact.
        notes (`tuple` of `str`, *optional*): Checks that were skipped, with the reason.
    """

    model: str
    cases: tuple[CheckedCase, ...]
    tolerance: float
    first_difference: Difference | None = None
    notes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every case ran and has an error within the tolerance."""
        return all(self.is_exact(case) for case in self.cases)

    @property
    def error(self) -> float:
        """The largest error of all cases; infinite if a case failed."""
        return max((float("inf") if case.error is None else case.error for case in self.cases), default=float("inf"))

    def is_exact(self, case: CheckedCase) -> bool:
        return case.failure is None and case.error is not None and case.error <= self.tolerance

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        verdict = "exact" if self.exact else "NOT exact"
        lines = [f"{self.model} on virtual ranks: {verdict} (tolerance {self.tolerance:.0e})"]
        lines += [f"  {case}{'' if self.is_exact(case) else '  <-'}" for case in self.cases]
        lines += [f"  note: {note}" for note in self.notes]
        if self.first_difference is not None:
            case = next(case for case in self.cases if not self.is_exact(case))
            lines += [f"First difference ({case.method}, {case.ranks} ranks, {case.tokens} tokens):"]
            lines += [f"  {line}" for line in str(self.first_difference).splitlines()]
        return "\n".join(lines)


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

    Each number of ranks is checked with ring and with Ulysses attention, at a length that is a multiple of the number
    of ranks, and at a length that is not. The ranks are threads of this process, so neither a process group nor several
    devices are needed. Each rank runs a copy of the model that shares its weights, in eval mode and without gradients.
    The model itself, its buffers and the random state do not change. A wrong result is traced to the first module whose
    output differs. An error on a rank is not raised but reported.

    Use the numbers of ranks and the lengths of your real runs, because some models compute differently depending on the
    length that a rank holds. In float16 and bfloat16 only large differences can be detected; check a float32 copy if
    you can.

    Args:
        model (`nn.Module`): The model. Its weights must not be zeros, because zeros hide errors.
        inputs, kwargs (`Any`): The arguments of the call. ``model(*inputs, **kwargs)`` is the reference.
        dim (`int` or `dict` of parameter names to `int`, *optional*, defaults to `1`): The dim along which inputs are
            sharded, with ``cp.shard`` of a ``UnifiedAttnMode`` ``cp``. An int shards every input tensor that is as long
            along this dim as the first tensor. A dict shards the named arguments only; every rank gets all of the
            others.
        plan (:class:`Plan` or `_cp_plan`, *optional*): A plan to check instead of ``UnifiedAttnMode``.
        forward (`Callable`, *optional*): A function that replaces the call of the model, for a model that creates its
            tokens itself. It is called as ``forward(cp, model, *inputs, **kwargs)`` under the ``UnifiedAttnMode``
            ``cp``, shards and gathers with ``cp.shard`` and ``cp.gather``, takes all tensors from its arguments, and
            returns the output of the model, or one tensor of it.
        ranks (`int` or sequence of `int`, defaults to `(2, 3)`): Numbers of ranks.
        tolerance (`float`, *optional*): The largest ``‖out − ref‖ / ‖ref‖`` that counts as exact. Defaults to 1e-4 for
            float32, 1e-9 for float64, 1e-2 for float16 and 5e-2 for bfloat16.

    Returns:
        A :class:`ParallelCheck`, which is true if every case is exact.

    Raises:
        TypeError: If ``model`` is not a module, or an argument has the wrong type.
        ValueError: If the model is already parallel, more than one of ``dim``, ``plan`` and ``forward`` is given, or
            nothing can be sharded along ``dim``.

    Example:
        >>> print(check_parallel(model, torch.randn(1, 101, 64), dim=1))  # doctest: +SKIP
        >>> print(check_parallel(llama, input_ids=ids, position_ids=positions, dim=1))  # doctest: +SKIP
        >>> print(check_parallel(dit, latents, plan=proposal.plan))  # doctest: +SKIP
    """
    module = _checked_module(model)
    numbers = [ranks] if isinstance(ranks, int) else [*ranks]
    if not numbers or any(not isinstance(number, int) or number < 2 for number in numbers):
        raise ValueError(f"ranks is {ranks!r}; expected a number of ranks, at least 2, or several such numbers.")
    if sum(option is not None for option in (dim, plan, forward)) > 1:
        raise ValueError("check_parallel takes one of dim=, plan= and forward=: what is sharded is said once.")
    if tolerance is None:
        weight = next((x for x in module.parameters() if x.is_floating_point()), torch.empty(0))
        autocast = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        tolerance = TOLERANCES.get(dtype, 1e-4)
    model_inputs = ModelInputs(inputs, kwargs)
    if plan is not None:
        plan = plan if isinstance(plan, Plan) else published_plan(plan)
        dims = dims_of_plan(module, model_inputs, plan)
    else:
        dims = dims_of_tokens(module, model_inputs, dim) if forward is None else {}
    run = ParallelRun(plan=plan, forward=forward, dims=dims)
    device = device_of(module, model_inputs.leaves())
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return _Checker(module, model_inputs, run, tolerance).check(numbers)


def _checked_module(model: Any) -> nn.Module:
    module = uncompiled(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module (of a pipeline, its transformer).")
    if any(is_filled(submodule, Slot.PLAN) for submodule in module.modules()):
        raise ValueError(
            f"{original_class(module).__name__} is already parallel. Check the unmodified model, or undo it first: "
            "unparallelize_pipe(pipe), unparallelize_transformer(transformer), remove_context_parallel(model)."
        )
    return module


class _Checker:
    """The state of one :func:`check_parallel` call: the unmodified model's outputs by length, and notes."""

    def __init__(self, module: nn.Module, inputs: ModelInputs, run: ParallelRun, tolerance: float) -> None:
        self._module, self._inputs, self._run, self._tolerance = module, inputs, run, tolerance
        self._name = original_class(module).__name__
        self._references: dict[int | None, tuple[ModelInputs, list[Tensor]] | None] = {}
        self._notes: list[str] = []
        # The token dim of each sharded tensor, by its index in inputs.leaves(), and the number of tokens. If forward=
        # or a plan shards tensors inside the model, these are known only after the first run.
        self._dims: dict[int, int] = dict(run.dims)
        leaves = inputs.leaves()
        self._total: int | None = next((leaves[index].shape[dim] for index, dim in run.dims.items()), None)

    def check(self, numbers: Sequence[int]) -> ParallelCheck:
        # Check the full length first, because that run shows which inputs are sharded and so can be shortened.
        runs = [(method, ranks, shorten) for ranks in numbers for shorten in (False, True) for method in _METHODS]
        cases = [case for run in runs if (case := self._case(*run)) is not None]
        notes = tuple(dict.fromkeys(self._notes))
        check = ParallelCheck(self._name, tuple([case for case, *_ in cases]), self._tolerance, notes=notes)
        wrong = next((case for case in cases if not check.is_exact(case[0])), None)
        return check if wrong is None else replace(check, first_difference=self._first_difference(*wrong))

    def _case(self, method: Method, ranks: int, shorten: bool) -> tuple[CheckedCase, ModelInputs, list[Tensor]] | None:
        """Return the result of one run, its inputs and the expected outputs; None if there are no shorter inputs."""
        length = self._shorter_length(ranks) if shorten else self._total
        reference = None if shorten and length is None else self._reference(length if shorten else None)
        if reference is None:
            return None
        inputs, expected = reference
        results = run_parallel(self._module, inputs, self._run, method, ranks)
        if not shorten and self._total is None and results[0].sharded:
            # Remember which inputs the first run has sharded, so that later runs can shorten these inputs.
            self._total = length = results[0].sharded[0][2]
            self._dims = {i: d for i, d, total in results[0].sharded if i is not None and total == length}
        failed = first_error([result.outcome for result in results])
        if failed is not None:
            rank, error = failed
            hint = ""
            if shorten and self._run.forward is not None:
                hint = f" (inputs were shortened to {length} tokens; forward= must take everything from its arguments)"
            largest: float | str = f"rank {rank}: {type(error).__name__}: {error}{hint}"
        else:
            outputs = [tensors_in(result.outcome.output) for result in results]
            largest = _error_of(outputs, expected, results[0].segments, some=self._run.forward is not None)
        of_run = (None, largest) if isinstance(largest, str) else (largest, None)
        return CheckedCase(method, ranks, length, *of_run), inputs, expected

    def _shorter_length(self, ranks: int) -> int | None:
        """Return a length shorter than all tokens, such that ``ranks`` divides one of both but not the other.

        Return None if it is less than ``ranks``, because many models fail on an empty part; or if no input is sharded.
        """
        if self._total is None or not self._dims:
            self._notes.append(
                "the length was not varied: none of the inputs is sharded itself. Check again with inputs of another "
                "size."
            )
            return None
        shorter = self._total - (self._total % ranks or 1)
        return shorter if shorter >= ranks else None

    def _reference(self, length: int | None) -> tuple[ModelInputs, list[Tensor]] | None:
        """Return the inputs cut to their first ``length`` tokens (None for all), and the output tensors of the
        unmodified model for these inputs. Return None if the model fails on the shorter inputs.
        """
        if length in self._references:
            return self._references[length]
        choices = [self._inputs]
        if length is not None and self._total is not None:
            cut = partial(self._inputs.shortened, self._dims, self._total, length)
            choices = [cut(only_tokens=True), cut(only_tokens=False)]
        error = None
        for inputs in choices:
            outcome = run_alone(self._module, inputs)
            if outcome.error is None:
                self._references[length] = inputs, tensors_in(outcome.output)
                return self._references[length]
            error = error or outcome.error
        if length is None and error is not None:
            raise error
        self._notes.append(f"{length} tokens were not checked: the model alone fails: {error}")
        self._references[length] = None
        return None

    def _first_difference(self, case: CheckedCase, inputs: ModelInputs, expected: list[Tensor]) -> Difference:
        run, tolerance = self._run, self._tolerance
        return find_first_difference(
            self._module, inputs, run, case.method, case.ranks, expected, tolerance=tolerance, failure=case.failure
        )


def find_first_difference(
    module: nn.Module,
    inputs: ModelInputs,
    run: ParallelRun,
    method: Method,
    ranks: int,
    expected: Sequence[Tensor] = (),
    *,
    tolerance: float,
    failure: str | None = None,
) -> Difference:
    """Run ``module`` once more on one rank and on ``ranks`` virtual ranks, and return the first difference of both.

    Args:
        expected: The output tensors of an earlier call on one rank, to which those of this one are compared.
        failure: The reason why the outputs cannot be compared. Defaults to the error of the rank that failed, if any.
    """
    alone = Recording()
    outcome = run_alone(module, inputs, alone)
    if expected and largest_error(outcome.output, expected) > tolerance:
        reason = "two calls of the unmodified model differ: it draws random numbers, or keeps state between calls"
        return Difference("", original_class(module).__name__, reason)
    results = run_parallel(module, inputs, run, method, ranks, record=True)
    failed = first_error([result.outcome for result in results])
    recordings = [result.recording for result in results]
    if failed is not None:
        failure = failure or f"rank {failed[0]}: {type(failed[1]).__name__}: {failed[1]}"
    return first_difference(
        module,
        alone,
        recordings,
        results[0].segments,
        tolerance=tolerance,
        failure=failure,
        failed=None if failed is None else recordings[failed[0]],
    )


def _error_of(
    outputs: Sequence[Sequence[Tensor]], expected: Sequence[Tensor], segments: Any, *, some: bool
) -> float | str:
    """Return the largest error of the output tensors of each rank, or the reason (`str`) why they cannot be compared.

    ``some`` says whether ranks may return only some of the expected tensors, as a user's ``forward`` function may.
    """
    if not outputs[0]:
        return "the output holds no tensor in a tuple, list or dict, so nothing can be compared."
    numbers = [len(of_rank) for of_rank in outputs]
    if len({*numbers}) > 1 or (numbers[0] != len(expected) and not some):
        return f"the ranks return {numbers} tensors, and the model alone {len(expected)}."
    largest = 0.0
    of_ranks = [*zip(*outputs, strict=True)]
    for i, parts in enumerate(of_ranks):
        # A user's forward= may return only some of the output tensors, so look for the first whose shape fits.
        wholes = [expected[i]] if len(of_ranks) == len(expected) else expected
        errors = (relative_error(parts, whole, segments) for whole in wholes)
        error = next((error for error in errors if error is not None), None)
        if error is None:
            shapes = [list(part.shape) for part in parts]
            alone = [list(x.shape) for x in expected]
            return f"the ranks return {shapes}, which are no parts of what the model alone returns: {alone}."
        largest = max(largest, error)
    return largest
