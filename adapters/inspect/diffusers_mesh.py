"""Read how diffusers itself has sharded a model."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh


def mesh_of_diffusers(module: Any) -> DeviceMesh | None:
    """Return the mesh over which diffusers sharded ``module`` by a ``TensorParallelConfig``; None if it did not."""
    config = getattr(getattr(module, "_parallel_config", None), "tensor_parallel_config", None)
    mesh: DeviceMesh | None = None
    if config is not None:
        mesh = config._mesh
    return mesh
