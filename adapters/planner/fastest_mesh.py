"""Predict the fastest mesh of a pipeline on the GPUs of this host."""

from __future__ import annotations

from typing import Any

from para_core.adapters.planner.count import UnknownModelError
from para_core.adapters.planner.mesh_choice import MeshChoice, Unpredicted
from para_core.adapters.planner.plan_mesh import plan_mesh
from para_core.planner.cost import MeshShape
from para_core.planner.hardware import gpu_at_hand


def fastest_mesh(pipe: Any, ranks: int, weights: str | None = None) -> MeshChoice | Unpredicted:
    """Return the mesh of ``ranks`` GPUs that :func:`plan_mesh` predicts to be fastest, or why there is none.

    Args:
        pipe: The pipeline.
        ranks: Number of GPUs, all on this host and of the kind of the current device.
        weights (`str`, *optional*): With ``"fsdp"`` or ``"tensor"``, only meshes on which weights can be sharded in
            this way count. Any other value replicates weights.
    """
    if hasattr(pipe, "pag_applied_layers"):
        return Unpredicted("the planner does not count perturbed attention guidance")
    try:
        device = gpu_at_hand()
    except ValueError as error:
        return Unpredicted(f"{error}")
    try:
        sharing: Any = (weights,) if weights in ("fsdp", "tensor") else ()
        # By default parallelize_pipe places the weights of text encoders in the same way.
        placed: Any = "fsdp" if sharing else "replicate"
        plan = plan_mesh(
            pipe,
            ranks=ranks,
            device=device,
            ranks_per_host=ranks,
            # Predict for eager code, because it is unknown whether the pipeline will be compiled later.
            compiled=False,
            weights=sharing,
            text_encoders=placed,
            vae_placement="replicate",
            offload=False,
        )
    except UnknownModelError as error:
        return Unpredicted(f"{error}")
    except Exception as error:
        # Catch everything: the pipeline's class or config may be the user's own, so counting may raise anything.
        return Unpredicted(f"{type(error).__name__}: {error}", failed=True)
    best = next((row for row in plan.rows if _shards(row.shape, weights)), plan.best)
    if best.problem is not None or not _shards(best.shape, weights):
        return Unpredicted(best.problem or f"no mesh has ranks to shard weights by {weights!r}")
    shape, method = best.shape, best.options.get("rotate_method", "alltoall")
    reason = f"the fastest of {len(plan.rows)} by para_core.adapters.plan_mesh, at default sizes: {plan.advice}"
    return MeshChoice(shape.batch, shape.ring, shape.ulysses, reason, method, shape.tensor)


def _shards(shape: MeshShape, weights: str | None) -> bool:
    """Whether a mesh of ``shape`` can shard weights by the method ``weights``; True for None and other values."""
    if weights == "tensor":
        return shape.tensor > 1
    return weights != "fsdp" or (shape.tensor == 1 and shape.sequence > 1)
