"""Run one UNet or ControlNet on several ranks."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from torch import nn

from para_core.adapters.compatibility.phases import CheckedModel, check_parallelize, require_same_call_of_model
from para_core.adapters.planner.default_mesh import Mesh, guided_mesh_for
from para_core.adapters.rows.unet import UnetRun
from para_core.distributed.consistency import raising_on_all
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import original_class, restored_on_failure, uncompiled

Unet = TypeVar("Unet", bound=nn.Module)


def parallelize_unet(
    unet: Unet, *, mesh: Mesh | GuidedMesh | None = None, assume_equal: bool = False, batched: bool = True
) -> Unet:
    """Run one UNet or ControlNet on all ranks of a mesh: each rank passes the same inputs and gets the full output.

    Use it in a denoising loop of your own; :func:`parallelize_pipe` also keeps random numbers and arguments equal on
    all ranks. Ranks along ``ring`` and ``ulysses`` shard the rows of the image (columns, if it is wider than high), and
    ranks along ``batch`` shard the samples. No gradients are computed. Calling it again replaces the previous settings.
    If anything is invalid or fails on any rank, every rank raises, and the UNet stays as it was.

    Args:
        unet (`nn.Module`): A supported UNet or ControlNet of diffusers (docs/vae.md lists them).
        mesh, assume_equal: As in :func:`parallelize_transformer`.
        batched (`bool`, defaults to `True`): Whether samples are sharded over ``batch``. Pass `False` if the model's
            output for a sample depends on its position in the batch.

    Returns:
        ``unet`` itself.

    Raises:
        TypeError: If the class is not supported.
        ValueError: If the mesh does not fit.
    """
    module: nn.Module = uncompiled(unet)
    check_parallelize([CheckedModel(module, module, "unet")])
    guided = guided_mesh_for(mesh, module)
    with (
        restored_on_failure([module]),
        raising_on_all(guided, f"this {original_class(module).__name__} cannot run in rows"),
    ):
        resolve_unet(module, guided, assume_equal=assume_equal, batched=batched).apply()
    return unet


def resolve_unet(module: nn.Module, mesh: GuidedMesh, *, assume_equal: bool, batched: bool) -> UnetRun:
    """Return the handler that will run ``module`` with its image rows sharded over ``mesh``. Changes nothing yet."""
    check_parallelize([CheckedModel(module, module, "unet")], mesh)
    require_equal = partial(require_same_call_of_model, module, mesh, assume_equal=assume_equal)
    return UnetRun(module, mesh, batched=batched, require_equal=require_equal)
