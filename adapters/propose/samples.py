"""Find along which dims the arguments of a model hold samples, for a model that computes all CFG branches in
a call.

Rules of this kind are ``batched`` and ``common`` of a :class:`~para_core.plans.plan.Plan`. Only
``completion.py`` calls it. Tests: tests/adapters/propose/test_completion.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from para_core.comparison.tensor_parts import largest_error, tensors_in
from para_core.comparison.virtual_ranks import copy_containers
from para_core.dataclass_fields import map_leaves
from para_core.plans.plan import Plan


class InseparableSamplesError(ValueError):
    """Error for samples that no plan can split: their results depend on their batch, the model fails with one
    of them alone, no argument holds them, or there are fewer than two.
    """


# Samples whose results one by one differ by less than this, relatively, do not depend on each other, in any
# dtype.
_LEAST_TOLERANCE = 1e-4


def with_samples(
    module: nn.Module, plan: Plan, inputs: Mapping[str, Any], samples: int, tolerance: float
) -> Plan:
    """Return ``plan`` with ``batched`` and ``common``, for a model that computes all CFG branches in one
    call.

    The first dim of length ``samples`` of an argument counts as its sample dim, unless ``common`` or
    ``unshared`` of ``plan`` name it: these are answers of the user, and stay. The order of ``batched`` is
    that of ``inputs``: a plan reads the number of samples from its first entry. The samples are computed one
    by one only with ``inputs``, so a wrong dim that gives the same result with these is not noticed.
    ``tolerance`` is the relative error below which results count as equal: kernels round a batch and a single
    sample differently.

    Raises:
        InseparableSamplesError: The samples one by one fail, or do not give the same result as in the batch;
            no argument has ``samples`` samples; or ``samples`` is less than 2.
    """
    if samples < 2:
        raise InseparableSamplesError(
            f"the number of samples is {samples}; expected at least 2, so that they can be split."
        )
    declared = (*plan.common, *plan.unshared)
    undeclared = {name: value for name, value in inputs.items() if name not in declared}
    batched = _sample_dims(undeclared, samples)
    if not batched:
        raise InseparableSamplesError(
            f"no argument has a dim of {samples}, the same one in all its tensors; expected the number of samples in "
            "a call."
        )
    with torch.no_grad():
        expected = tensors_in(module(**copy_containers(inputs)))
        try:
            parts = _in_one_batch([module(**_one_sample(inputs, batched, index)) for index in range(samples)])
        # The model may raise anything if an argument does not hold samples, or if it needs more than one
        # sample. Outputs without a dim of samples, such as a loss, or of another number for each sample,
        # cannot be put into one batch.
        except Exception as failure:
            raise InseparableSamplesError(
                f"one sample of {samples} at a time fails: {type(failure).__name__}: {failure}"
            ) from failure
    error = largest_error(parts, expected)
    if not error < max(tolerance, _LEAST_TOLERANCE):
        raise InseparableSamplesError(
            f"one sample of {samples} at a time gives another result than all at once (error {error:.1e})."
        )
    others = [name for name, value in undeclared.items() if name not in batched and tensors_in(value)]
    return replace(plan, batched=batched, common=(*plan.common, *others))


def _sample_dims(inputs: Mapping[str, Any], samples: int) -> dict[str, int]:
    """Return the sample dim of each argument all of whose tensors have samples in one dim.

    These are guesses by lengths. Of ``[2, 2, C]`` the first dim is taken for two samples, even if they lie in
    the second one. No dim is found for an argument whose tensors have samples in different dims, nor for a
    list with an entry for each sample, so it counts as common to all samples.
    """
    dims: dict[str, int] = {}
    for name, value in inputs.items():
        shapes = [tuple(x.shape) for x in tensors_in(value)]
        if shapes and all(samples in shape for shape in shapes):
            dims_of_tensors = {shape.index(samples) for shape in shapes}
            if len(dims_of_tensors) == 1:
                dims[name] = dims_of_tensors.pop()
    return dims


def _one_sample(inputs: Mapping[str, Any], dims: Mapping[str, int], index: int) -> dict[str, Any]:
    """Return the arguments of a call with the sample ``index`` alone."""

    def narrow(x: Any, dim: int) -> Any:
        return x.narrow(dim, index, 1) if isinstance(x, Tensor) else x

    narrowed = {name: map_leaves(partial(narrow, dim=dim), inputs[name]) for name, dim in dims.items()}
    return copy_containers({**inputs, **narrowed})


def _in_one_batch(outs: list[Any]) -> list[Tensor]:
    """Return each tensor of ``outs``, the outputs of the samples one by one, with all samples in dim 0.

    That is the dim along which a plan gathers the samples of an output.
    """
    return [torch.cat(parts) for parts in zip(*[tensors_in(out) for out in outs], strict=True)]
