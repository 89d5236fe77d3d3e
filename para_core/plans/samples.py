"""Shard the samples of a batch over a mesh dim, and gather the outputs.

:mod:`.region` does this around the rules for tokens: samples are taken before tokens are split, and gathered
after the tokens. ``adapters/vae/unet.py`` shards the samples of a UNet with :func:`select_samples`. Tests:
tests/adapters/test_samples.py, and tests/plans/test_plan.py for outputs that are not one for each sample.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.dataclass_fields import fields_of, has_fields, leaves_of, like_sequence, with_fields
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import MeshDim
from para_core.plans.plan import Plan
from para_core.user_warnings import ParallelWarning, WarningLog


def count_samples(value: Any, dim: int | None) -> int | None:
    """Count the samples in ``value``: a tensor, or a dataclass of tensors, with samples along ``dim``, or if
    ``dim`` is None a list or tuple with an entry for each. Return None if their number is unknown, the tensor
    has no such dim, or the tensors of the entries have different shapes: such samples cannot be gathered.
    """
    if not isinstance(value, Tensor) and has_fields(value) and dim is not None:
        value = next((leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)), None)
    if isinstance(value, Tensor) and dim is not None:
        if value.ndim <= dim:
            return None
        return value.shape[dim]
    if isinstance(value, (tuple, list)) and dim is None:
        shapes = [[x.shape for x in leaves_of(entry) if isinstance(x, Tensor)] for entry in value]
        if all(shape == shapes[0] for shape in shapes):
            return len(value)
    return None


def select_samples(value: Any, dim: int | None, total: int, batch: MeshDim) -> Any:
    """Return this rank's part of the samples of ``value``, or ``value`` itself if it does not have ``total``
    samples: it then applies to all of them, as a time step without dims or of size 1, or a scale, does.

    Args:
        value: A tensor, or a dict, list, tuple or dataclass of tensors, with samples along ``dim``. If
            ``dim`` is None, a list or tuple with an entry for each sample.
        total: Number of samples on all ranks, a multiple of the size of the mesh dim ``batch``.
    """
    if dim is None:
        if not isinstance(value, (tuple, list)) or len(value) != total:
            return value
        size = total // batch.size
        return value[batch.index * size : (batch.index + 1) * size]
    if isinstance(value, Mapping):
        return {key: select_samples(item, dim, total, batch) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return like_sequence(value, [select_samples(item, dim, total, batch) for item in value])
    if has_fields(value):
        fields = {name: select_samples(field, dim, total, batch) for name, field in fields_of(value).items()}
        return with_fields(value, fields)
    if not isinstance(value, Tensor) or value.ndim <= dim or value.shape[dim] != total:
        return value
    size = total // batch.size
    # A view would begin at another address on each rank, and kernels are chosen by the alignment of
    # addresses.
    return value.narrow(dim, batch.index * size, size).clone()


def select_arguments(
    plan: Plan,
    parameters: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: MeshDim,
    warnings: WarningLog,
) -> tuple[tuple[Any, ...], dict[str, Any], int | None]:
    """Return ``args`` and ``kwargs`` with this rank's part of the samples, and the number of samples per
    rank.

    The first parameter in ``plan.batched`` has the number. It is None, and the arguments are unchanged, if an
    argument of ``plan.unshared`` is given. The same happens, with a warning in eager code, if the number is
    unknown or not a multiple of the size of ``batch``. All ranks decide the same, because they get equal
    arguments.

    Raises:
        ValueError: An argument holds tensors but is not listed in ``batched``, ``common`` or ``unshared`` of
            ``plan``; or a tensor in ``batched`` has neither all samples nor one entry for all of them.
    """
    arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
    name, dim = next(iter(plan.batched.items()))
    total = count_samples(arguments.get(name), dim)
    if any(arguments.get(other) is not None for other in plan.unshared):
        return args, kwargs, None
    if total is None:
        # The model itself decides about an argument that is missing.
        if arguments.get(name) is not None and not torch.compiler.is_compiling():
            warnings.warn(
                "uncounted samples",
                f"the samples of {name} cannot be counted: it holds no tensor in which they lie along dim "
                f"{dim}, or their shapes differ. So all of the {batch.size} ranks along 'batch' compute all samples.",
                ParallelWarning,
            )
        return args, kwargs, None
    _check_declared(plan, arguments)
    if total % batch.size != 0:
        if not torch.compiler.is_compiling():
            warnings.warn(
                "uneven samples",
                f"a call has {total} sample(s), which do not divide evenly over the {batch.size} ranks along 'batch', "
                "so all of these ranks compute all samples. Use guidance, or give these ranks to the sequence.",
                ParallelWarning,
            )
        return args, kwargs, None

    def select_part(name: str, value: Any) -> Any:
        if name not in plan.batched:
            return value
        dim = plan.batched[name]
        entries = None
        if isinstance(value, Tensor):
            entries = count_samples(value, dim)
        # A wrong tensor with as many entries as a rank has samples would fit them.
        if entries is not None and entries != 1 and entries != total:
            raise ValueError(
                f"{name} has {entries} entries along dim {dim}; expected {total}, one for each sample, or 1 for all "
                "of them."
            )
        return select_samples(value, dim, total, batch)

    # Keep positional arguments positional, so that the model itself raises for unknown or repeated arguments.
    positional = [select_part(name, value) for name, value in zip(parameters, args, strict=False)]
    named = {name: select_part(name, value) for name, value in kwargs.items()}
    return (*positional, *args[len(positional) :]), named, total // batch.size


def _check_declared(plan: Plan, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if one of ``arguments`` holds tensors, and ``plan`` does not say which samples they hold."""
    declared = (*plan.batched, *plan.common, *plan.unshared)
    unknown = [name for name, value in arguments.items() if name not in declared and holds_tensor(value)]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} of the model hold(s) tensors, and its plan does not say whether they hold all "
            "samples. Name them in Plan.batched if they do, or in Plan.common if they apply to all samples; or use a "
            "mesh without a 'batch' dim."
        )


def holds_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor, or a dict, list, tuple or dataclass that contains a tensor at any depth."""
    return any(isinstance(leaf, Tensor) for leaf in leaves_of(value))


def gather_samples(output: Any, samples: int, batch: MeshDim) -> Any:
    """Gather the ``samples`` samples of each rank along ``batch``, and return ``output`` with all of them.
    Collective, unless ``output`` holds no tensor.

    ``output`` is a tensor with samples along dim 0, a list with one tensor per sample, all of equal shapes,
    or a tuple, dict, dataclass or ``ModelOutput`` of these. Dicts, ``ModelOutput`` among them, are changed in
    place. Other values, such as None, are returned as they are.

    Raises:
        ValueError: A tensor or list has another number of samples.
    """
    part = output
    if isinstance(output, list) and output:
        part = torch.stack(output)
    if isinstance(part, Tensor):
        if part.ndim == 0 or part.shape[0] != samples:
            raise ValueError(
                f"the model returned a {type(output).__name__} {list(part.shape)} for the {samples} sample(s) of "
                "this rank; expected one entry for each along dim 0. Use a mesh without a 'batch' dim."
            )
        gathered = all_gather(part, [samples] * batch.size, 0, batch)
        if isinstance(output, list):
            return list(gathered.unbind())
        return gathered
    if has_fields(output):
        fields = {name: gather_samples(value, samples, batch) for name, value in fields_of(output).items()}
        return with_fields(output, fields)
    if isinstance(output, tuple):
        return tuple(gather_samples(value, samples, batch) for value in output)
    if isinstance(output, MutableMapping):
        for key, value in list(output.items()):
            output[key] = gather_samples(value, samples, batch)
    return output
