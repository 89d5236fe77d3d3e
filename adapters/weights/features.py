"""The table of the optional features of a parallel pipeline. To remove one, delete its files and its line
in :data:`FEATURES`. To add one with an option, add the option to :data:`_SWITCHES` or
:data:`_PLACEMENTS` as well.

The functions here look up what a caller needs among the features: ``adapters/parallel`` their changes and
methods, the checks of ``adapters/compatibility`` and ``adapters/cache`` their checks. A feature itself is
described in ``feature.py``. Tests: tests/test_lift_out.py, tests/weights/test_fsdp.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from para_core.adapters.weights.feature import (
    ChangeRequest,
    Feature,
    FeatureChange,
    ImageModes,
    Quantizer,
    ShardMethod,
)
from para_core.instance.record import slot_owner
from para_core.instance.slots import Slot

# The name of each feature, and the module of adapters that defines it as ``FEATURE``. Modules are imported
# when they are first needed. Changes are made in this order. A feature that relies on it says so in its
# ``apply``, as PipeFusion does, which runs on stages that are installed before it.
FEATURES: Mapping[str, str] = {
    "vae": "vae.pipeline",
    "fsdp": "weights.fsdp_weights",
    "tensor": "weights.tensor_weights",
    "stages": "weights.staged_transformer",
    "pipefusion": "weights.fused_pipe",
    "text_encoder_offload": "weights.text_encoder_offload",
    "vae_offload": "weights.vae_offload",
    "block_offload": "weights.block_offload",
    "quantize": "weights.quantize",
    "cfg": "cfg.guided_calls",
    "same_bits": "same_bits",
    "products": "products",
}

# Options that need a feature: switches if they are neither None nor False, placements with one of these values.
# They cannot be fields of Feature: a copy from which a feature was deleted would not know that its option needs
# one.
_SWITCHES = ("vae", "offload", "pipefusion", "same_bits", "products")
_PLACEMENTS = ("text_encoders", "vae_placement")
_PLACEMENT_VALUES = ("offload", "first")


@cache
def features() -> Mapping[str, Feature]:
    """Return all features by name."""
    return {name: import_module(f"para_core.adapters.{module}").FEATURE for name, module in FEATURES.items()}


@cache
def transformer_slots() -> tuple[Slot, ...]:
    """Return the slots of a transformer that features fill, and that must be empty once its plan is removed."""
    return tuple([slot for feature in features().values() for slot in feature.transformer_slots])


def shard_methods() -> Mapping[str, ShardMethod]:
    """Return the methods of sharding weights by name."""
    return {name: feature.method for name, feature in features().items() if feature.method is not None}


def require_method(name: str) -> ShardMethod:
    """Return a method of sharding weights. Raise ``ValueError`` if there is none with this name."""
    methods = shard_methods()
    if not methods:
        raise ValueError(
            f"method is {name!r}, and this copy of para_core shards no weights. Leave weights= out, and do not call "
            "shard_weights."
        )
    if name not in methods:
        raise ValueError(f"method is {name!r}; expected {' or '.join(map(repr, methods))}.")
    return methods[name]


def require_quantizer() -> Quantizer:
    """Return the quantizer. Raise ``ValueError`` if no feature has one."""
    for feature in features().values():
        if feature.quantizer is not None:
            return feature.quantizer
    raise ValueError("quantize: this copy of para_core quantizes no weights. Leave quantize out.")


def require_image_modes(option: str) -> ImageModes:
    """Return what makes the mode of each call of an autoencoder with ``option``.

    Raises:
        ValueError: No feature with this option has one.
    """
    for feature in features().values():
        if feature.option == option and feature.image_modes is not None:
            return feature.image_modes()
    raise ValueError(
        f"{option}=True: this copy of para_core has no such mode for rows of images. Leave it out."
    )


def make_changes(request: ChangeRequest) -> list[FeatureChange]:
    """Return the changes of all features for ``request``, in the order of :data:`FEATURES`. Changes nothing.

    Raise ``ValueError``, ``TypeError`` or ``RuntimeError`` if a feature refuses the request, and
    ``ValueError`` for an option or a mesh dim that no feature of this copy has.
    """
    _check_known(request)
    return [
        change
        for feature in features().values()
        if feature.changes is not None
        for change in feature.changes(request)
    ]


def _check_known(request: ChangeRequest) -> None:
    """Raise ``ValueError`` if no feature has an option that is given, or a mesh dim of several ranks.

    In a whole copy of para_core it never raises: it is for copies from which features were deleted.
    """
    known = {feature.option for feature in features().values()}
    needed = [option for option in _SWITCHES if request.options.get(option) not in (None, False)]
    needed += [option for option in _PLACEMENTS if request.options.get(option) in _PLACEMENT_VALUES]
    for option in needed:
        if option not in known:
            raise ValueError(
                f"{option}= is given, and no feature of this copy of para_core has it. Leave it out."
            )
    mesh_dims = {feature.mesh_dim for feature in features().values()}
    dims = [request.mesh.pipe, request.mesh.tensor]
    if request.has_calls_per_branch:
        dims.append(request.mesh.batch)
    for dim in dims:
        if dim.size > 1 and dim.name not in mesh_dims:
            raise ValueError(
                f"the mesh has {dim.size} ranks along {dim.name!r}, and no feature of this copy of para_core "
                "uses this dim. Use a mesh without it."
            )


def applied_changes(pipe: Any) -> Sequence[FeatureChange]:
    """Return the changes that features have made to a parallel pipeline; none if it is not parallel."""
    # The owner is a ParallelCall, whose room may not be imported here.
    call = slot_owner(pipe, Slot.PARALLEL_PIPE, object)
    changes: Sequence[FeatureChange] = getattr(call, "changes", ())
    return changes


def method_of(module: nn.Module) -> str | None:
    """Return the name of the method that has sharded the weights of ``module``; None if they are not sharded.

    The user may have sharded them without para_core, by FSDP2's ``fully_shard``.
    """
    for name, method in shard_methods().items():
        if method.mesh_of(module) is not None:
            return name
    return None
