"""The mesh of a pipeline: what was given; or what is predicted to be fastest; or guidance first where it guides, then heads, then the ring."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.supported import transformers_of, unets_of
from para_core.attention.options import RotateMethod
from para_core.instance import original_class
from para_core.make_mesh import init_context_parallel_mesh, ranks_per_host, require_own_gpus
from para_core.mesh import GuidedMesh, find_or_make_group, guided_mesh, one_guided_rank

logger = logging.getLogger(__name__)

Mesh = DeviceMesh | ProcessGroup


@dataclass(frozen=True)
class MeshChoice:
    """Sizes of the mesh dims, and why; how keys travel around the ring."""

    batch: int
    ring: int
    ulysses: int
    reason: str
    rotate_method: RotateMethod = "alltoall"


def choose_mesh(
    num_ranks: int, num_heads: int | None, guidance: str | None, ranks_per_host: int | None = None
) -> MeshChoice:
    """Half of the ranks for each branch of guidance, if there are any; then Ulysses up to the number of (key) heads, inside of a host; then
    the ring.

    Args:
        num_heads: None: not known, so as many as there are ranks.
        guidance: why branches are expected; None: they are not.
        ranks_per_host: None: all ranks are on one host, or it is not known.

    >>> choose_mesh(8, 24, None)
    MeshChoice(batch=1, ring=1, ulysses=8, reason='no guidance by default, 24 heads', rotate_method='alltoall')
    >>> choose_mesh(8, 2, "guidance_scale is 6.0 by default")
    MeshChoice(batch=2, ring=2, ulysses=2, reason='guidance_scale is 6.0 by default, 2 heads', rotate_method='alltoall')
    >>> choose_mesh(16, 24, None, ranks_per_host=8)
    MeshChoice(batch=1, ring=2, ulysses=8, reason='no guidance by default, 24 heads, 8 ranks on a host', rotate_method='alltoall')
    """
    batch = 2 if guidance is not None and num_ranks % 2 == 0 else 1
    left = num_ranks // batch
    # Groups of neighbours stay on a host if their size divides its ranks.
    neighbours = gcd(left, ranks_per_host or left)
    ulysses = next(size for size in range(min(neighbours, num_heads or left), 0, -1) if neighbours % size == 0)
    heads = "heads not known" if num_heads is None else f"{num_heads} heads"
    hosts = "" if ranks_per_host in (None, num_ranks) else f", {ranks_per_host} ranks on a host"
    return MeshChoice(batch, left // ulysses, ulysses, f"{guidance or 'no guidance by default'}, {heads}{hosts}")


def default_guidance(pipe: Any, transformer: Any) -> str | None:
    """Why calls of ``pipe`` guide, by its default arguments; None if they do not.

    The pipeline's own ``do_classifier_free_guidance`` is asked, as it would answer in such a call: it knows of distilled models. Without
    one, a ``true_cfg_scale`` needs a negative prompt, and a ``guidance_scale`` is a branch only where there may be a negative
    prompt, and the model does not embed it.
    """
    guider = getattr(pipe, "guider", None)
    if guider is not None:
        scale = getattr(guider, "guidance_scale", None)
        return f"its guider has guidance_scale {scale}" if getattr(guider, "num_conditions", 1) > 1 else None
    parameters = inspect.signature(original_class(pipe).__call__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    if "max_guidance_scale" in defaults:  # Stable Video Diffusion's grows from frame to frame
        defaults["guidance_scale"] = defaults["max_guidance_scale"]
    answer = _own_answer(pipe, defaults)
    name = "guidance_scale" if answer or "true_cfg_scale" not in defaults else "true_cfg_scale"
    scale = defaults.get(name)
    if answer is None:
        if name == "true_cfg_scale":
            may = defaults.get("negative_prompt") is not None
        else:
            embedded = getattr(getattr(transformer, "config", None), "guidance_embeds", False)
            may = "negative_prompt" in defaults and not embedded
        answer = may and isinstance(scale, (int, float)) and scale > 1
    return f"{name} is {scale} by default" if answer else None


def _own_answer(pipe: Any, defaults: Mapping[str, Any]) -> bool | None:
    """Whether ``pipe`` says of itself that it guides, called with ``defaults``; None if it says nothing."""
    cls: Any = original_class(pipe)
    asked = inspect.getattr_static(cls, "do_classifier_free_guidance", None)
    if not isinstance(asked, property):
        return None
    # Calls keep their arguments under these names, and the property reads them. A pipe that was never called has none.
    called = cls.__new__(cls)
    called.__dict__.update({**vars(pipe), **{f"_{name}": default for name, default in defaults.items()}})
    try:
        return bool(called.do_classifier_free_guidance)
    except (AttributeError, TypeError):
        return None


# Of keys first, where a model has fewer of these. LongCat-AudioDiT has those of its text encoder, too, by other names.
_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "num_attention_heads",
    "num_heads",
    "n_heads",
    "dit_heads",
)


def number_of_heads(transformer: Any) -> int | None:
    """Of keys, where these are fewer; None where the config does not say."""
    config = getattr(transformer, "config", None)
    for name in _HEADS:
        found = getattr(config, name, None)
        if isinstance(found, int):
            return found
    width, axes = getattr(config, "model_dim", None), getattr(config, "axes_dims", None)
    # Kandinsky says how wide its tokens are, and a head.
    return width // sum(axes) if isinstance(width, int) and isinstance(axes, (tuple, list)) else None


def guided_mesh_for(mesh: Mesh | GuidedMesh | None, owner: Any) -> GuidedMesh:
    """What was given for a pipeline or a transformer; else one over all ranks.

    Raises:
        TypeError, ValueError: it is no such mesh.
        RuntimeError: no process group on several ranks, or two ranks of NCCL have the same GPU.
    """
    return mesh_and_method(mesh, owner)[0]


def mesh_and_method(mesh: Mesh | GuidedMesh | None, owner: Any) -> tuple[GuidedMesh, RotateMethod]:
    """:func:`guided_mesh_for`, and how keys travel around its ring unless the user says so."""
    if isinstance(mesh, GuidedMesh):
        return mesh, "alltoall"
    if mesh is None:
        device_type = torch.device(getattr(owner, "_execution_device", None) or owner.device).type
        if not (dist.is_available() and dist.is_initialized()):
            world_size = os.environ.get("WORLD_SIZE", "1")
            if world_size != "1":
                raise RuntimeError(
                    f"WORLD_SIZE is {world_size}, but no process group is initialised. Call "
                    "torch.distributed.init_process_group() before parallelize_pipe(pipe)."
                )
            return one_guided_rank(device_type), "alltoall"
        chosen, method = _chosen_mesh(device_type, owner)
        return guided_mesh(chosen), method
    guided = guided_mesh(mesh)
    require_own_gpus(mesh, guided)
    return guided, "alltoall"


def _planned(device_type: str, owner: Any) -> MeshChoice | None:
    """The planner's first row for all ranks, as rank 0 found it; None where it knows too little, and for a transformer alone."""
    if device_type != "cuda" or isinstance(owner, nn.Module) or dist.get_backend() == "fake":
        return None
    ranks = dist.get_world_size()
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    found = [fastest_mesh(owner, _device_name(), ranks, on_host) if dist.get_rank() == 0 else None]
    # All take that of rank 0: other devices on other hosts might be planned for differently.
    everyone = find_or_make_group("para_core: choice of a mesh", list(range(dist.get_world_size())), backend="gloo")
    dist.broadcast_object_list(found, src=0, group=everyone)
    return found[0]


def _device_name() -> str:
    return torch.cuda.get_device_name()


def fastest_mesh(pipe: Any, device: str, ranks: int, ranks_per_host: int) -> MeshChoice | None:
    """Of the meshes of so many ranks; None where the planner does not know the device, the transformer, or its guidance."""
    # The planner asks this module what a pipeline guides by.
    from para_core.adapters.planner.plan import plan_mesh

    if hasattr(pipe, "pag_applied_layers"):
        return None
    try:
        plan = plan_mesh(pipe, ranks=ranks, device=device, ranks_per_host=ranks_per_host, weights=())
    except Exception as error:
        # Whatever a class or a config of the user's own makes of it: a prediction that fails is none.
        logger.debug("no mesh is predicted for %s: %s", type(pipe).__name__, error)
        return None
    shape, method = plan.best.shape, plan.best.options.get("rotate_method", "alltoall")
    if plan.best.problem is not None:
        return None
    reason = f"the fastest of {len(plan.rows)} by para_core.adapters.plan_mesh, at default sizes: {plan.advice}"
    return MeshChoice(shape.batch, shape.ring, shape.ulysses, reason, method)


def _chosen_mesh(device_type: str, owner: Any) -> tuple[DeviceMesh, RotateMethod]:
    """For a pipeline or a transformer, over all ranks; how keys travel around its ring."""
    transformer, guidance = owner, None
    if not isinstance(owner, nn.Module):
        transformer = next(iter((transformers_of(owner) or unets_of(owner)).values()))
        guidance = default_guidance(owner, transformer)
    on_host = ranks_per_host()
    # Of links between hosts the planner knows nothing that was not told; the rule keeps Ulysses inside them.
    planned = _planned(device_type, owner) if on_host in (None, dist.get_world_size()) else None
    choice = planned or choose_mesh(dist.get_world_size(), number_of_heads(transformer), guidance, on_host)
    if dist.get_rank() == 0:
        logger.warning(
            "parallelize_pipe: no mesh given, using batch × ring × ulysses = %d × %d × %d%s (%s); "
            "mesh=init_context_parallel_mesh(%r, max_batch_dim_size=%d, max_ring_dim_size=%d) overrides it.",
            choice.batch,
            choice.ring,
            choice.ulysses,
            "" if choice.rotate_method == "alltoall" else f", rotate_method={choice.rotate_method!r}",
            choice.reason,
            device_type,
            choice.batch,
            choice.ring,
        )
    mesh = init_context_parallel_mesh(
        device_type,
        max_batch_dim_size=choice.batch,
        max_ring_dim_size=choice.ring,
        max_ulysses_dim_size=choice.ulysses,
    )
    return mesh, choice.rotate_method
