"""Choose the mesh of a pipeline or model if the user gives none.

If all ranks are CUDA devices of one host, the mesh is the one that the planner predicts to be best at the
pipeline's default sizes. Otherwise, and for a device or model that the planner does not know,
:func:`choose_mesh` chooses by a fixed rule.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from math import gcd
from typing import Any

from torch import nn

from para_core.adapters.default_mesh import MeshChoice
from para_core.adapters.denoisers import other_denoisers_of
from para_core.adapters.inspect.guidance import default_guidance, number_of_heads
from para_core.adapters.planner.inputs import UnknownModelError
from para_core.adapters.planner.plan_mesh import plan_mesh
from para_core.adapters.registry import transformers_of
from para_core.devices import gpu_at_hand
from para_core.distributed.mesh_shape import largest_divisor

logger = logging.getLogger(__name__)


class NotPredictedError(Exception):
    """Error that says why the planner predicts no mesh, so that the fixed rule chooses."""


def choose_default_mesh(
    owner: Any, ranks: int, device_type: str, on_host: int | None = None, weights: str | None = None
) -> MeshChoice:
    """Return the default mesh of ``ranks`` ranks for ``owner``, a pipeline or model that may lack weights.

    The plan of the library counts, also if the user passes another adapter. It says only which work is shared.

    Args:
        device_type (`str`): Type of the devices, such as ``"cuda"``.
        on_host (`int`, *optional*): Number of ranks on each host; None if it is unknown.
        weights (`str`, *optional*): How the weights will be sharded: ``"fsdp"``, ``"tensor"``, or not.
    """
    try:
        return _predict_choice(owner, ranks, device_type, on_host, weights)
    except NotPredictedError as error:
        transformer, guidance = owner, None
        if not isinstance(owner, nn.Module):
            transformer = next(iter((transformers_of(owner) or other_denoisers_of(owner)).values()), None)
            guidance = default_guidance(owner, transformer)
        choice = choose_mesh(ranks, number_of_heads(transformer), guidance, on_host, weights)
        return replace(choice, reason=f"{choice.reason}; not predicted: {error}")


def _predict_choice(
    owner: Any, ranks: int, device_type: str, on_host: int | None, weights: str | None
) -> MeshChoice:
    """Return the mesh that :func:`plan_mesh` predicts to be best.

    Raise NotPredictedError if the planner does not know the devices or the pipeline, or counting failed.
    """
    if on_host != ranks:
        # The network between the hosts is not known. (None stands for an unknown number of ranks on each.)
        raise NotPredictedError("the ranks are on several hosts")
    if isinstance(owner, nn.Module):
        raise NotPredictedError("there is no pipeline")
    if device_type != "cuda":
        raise NotPredictedError(f"the planner predicts for cuda devices, and this one is {device_type}")
    try:
        device = gpu_at_hand()
    except ValueError as error:
        raise NotPredictedError(str(error)) from None
    way: Any = "replicate"
    if weights in ("fsdp", "tensor"):
        way = weights
    try:
        # Predict for eager code, because it is unknown whether the pipeline will be compiled later.
        predictions = plan_mesh(
            owner,
            ranks=ranks,
            device=device,
            ranks_per_host=ranks,
            compiled=False,
            weights=way,
            offload=False,
        )
    except UnknownModelError as error:
        raise NotPredictedError(str(error)) from None
    except Exception as error:
        # Catch everything: the pipeline's class or config may be the user's own, so counting may raise
        # anything. Warn, because a later version may choose another mesh.
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            "the mesh could not be predicted (%s), so it follows from the number of heads and of ranks. Pass mesh= to "
            "choose one.",
            reason,
        )
        raise NotPredictedError(reason) from error
    best = predictions.best
    if best.problem:
        raise NotPredictedError(best.problem)
    shape, method = best.shape, best.options.get("rotate_method", "alltoall")
    reason = f"the best of {len(predictions.rows)} by para_core.adapters.plan_mesh, at default sizes"
    return MeshChoice(shape.batch, shape.ring, shape.ulysses, reason, method, shape.tensor)


def choose_mesh(
    num_ranks: int,
    num_heads: int | None,
    guidance: str | None,
    ranks_per_host: int | None = None,
    weights: str | None = None,
) -> MeshChoice:
    """Return the sizes of a mesh of ``num_ranks`` ranks by a fixed rule.

    With guidance, each of the two CFG branches gets half of the ranks. Those of a branch go to Ulysses, as many
    as the key heads and one host allow, the rest to the ring. Sharded weights come first: ``"tensor"``
    takes the fewest ranks (at least two) that divide the heads; ``"fsdp"`` keeps at least two per branch.

    Args:
        num_heads: Number of key heads; None if unknown, which sets no limit.
        guidance: Reason to expect two CFG branches, such as ``"guidance_scale is 6.0 by default"``, or None.
        ranks_per_host: Number of ranks on each host; None if all are on one host, or if it is unknown.
        weights: ``"fsdp"`` or ``"tensor"``; with any other value every rank holds all weights.
    """
    per_host = ranks_per_host or num_ranks
    tensor = 1
    if weights == "tensor":
        on_host = gcd(num_ranks, per_host, num_heads or 0)
        tensor = next((size for size in range(2, on_host + 1) if on_host % size == 0), 1)
    remaining = num_ranks // tensor
    # FSDP2 shards weights over the ranks of one branch, so a branch needs at least two.
    batch = 1
    if guidance is not None and remaining % 2 == 0 and (weights != "fsdp" or remaining > 2):
        batch = 2
    remaining //= batch
    # A group of consecutive ranks is on one host if its size divides the number of ranks on the host.
    neighbours = gcd(remaining, max(per_host // tensor, 1))
    ulysses = largest_divisor(neighbours, (num_heads or num_ranks) // tensor)
    reasons = [guidance or "no guidance by default", "heads not known"]
    if num_heads is not None:
        reasons[1] = f"{num_heads} heads"
    if weights in ("fsdp", "tensor"):
        reasons.insert(0, f"weights={weights!r}")
    if per_host != num_ranks:
        reasons.append(f"{ranks_per_host} ranks on a host")
    return MeshChoice(batch, remaining // ulysses, ulysses, ", ".join(reasons), tensor=tensor)
