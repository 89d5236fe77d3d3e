"""Running a UNet of diffusers on several ranks: each holds rows of the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from para_core.adapters.compatibility import Case, When, reason_against, refuse
from para_core.adapters.consistency.call import require_same_inputs
from para_core.adapters.models.unets import unet_adapter
from para_core.adapters.parallel.mesh_choice import Mesh, guided_mesh_for
from para_core.adapters.rows.unet_rows import shard_unet, unshard_unet
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import original_class, uncompiled

Unet = TypeVar("Unet", bound=nn.Module)


def parallelize_unet(
    unet: Unet, *, mesh: Mesh | GuidedMesh | None = None, assume_equal: bool = False, batched: bool = True
) -> Unet:
    """Run this one UNet, or ControlNet, over ``mesh``: every rank gives it the same input and gets the whole output.

    For a denoising loop of your own; :func:`parallelize_pipe` also keeps random numbers and arguments alike on all ranks. Ranks
    along ``ring`` and ``ulysses`` share the rows of the image (columns where it is wider than high), those along ``batch`` the
    samples. Nothing is computed for a gradient. Calling this again with another mesh takes effect.

    Args:
        unet: a supported UNet of diffusers (docs/vae.md lists them).
        mesh, assume_equal: as for :func:`parallelize_transformer`.
        batched: False: all ranks compute all samples, for what the model makes of one depends on its place in the batch.

    Returns:
        ``unet``.

    Raises:
        TypeError: an unknown class.
    """
    module: Any = uncompiled(unet)
    refuse(When.PARALLELIZE, Case(module, module, "unet"))
    adapter: Any = unet_adapter(module)
    guided = guided_mesh_for(mesh, module)
    refuse(When.PARALLELIZE, Case(module, module, "unet", mesh=guided))

    def require_equal(given: Mapping[str, Any]) -> None:
        guided.check_alive()
        problem = reason_against(When.PARALLEL_CALL, Case(module, module, mesh=guided))
        if not assume_equal:
            require_same_inputs(given, guided, f"this {original_class(module).__name__}", problem)
        elif problem is not None:
            raise RuntimeError(problem)

    shard_unet(module, adapter, guided, batched=batched, require_equal=require_equal)
    return unet


def unparallelize_unet(unet: Unet) -> Unet:
    """Undo :func:`parallelize_unet`; returns ``unet``, which is then what it was before."""
    unshard_unet(uncompiled(unet))
    return unet
