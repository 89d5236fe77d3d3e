"""The mesh on which a pipeline runs if the user gives none.

The rule: with several ranks of CUDA devices on one host, the mesh is the one that the planner predicts to be the fastest at the pipeline's
default sizes, as rank 0 predicts it. In every other case it is that of :func:`choose_mesh`, which depends on the number of ranks, the number of
heads, the hosts, ``weights=`` and whether the pipeline guides by default, and on nothing that is measured. These cases are: one rank; another
device; several hosts; a transformer or UNet alone; and a device or a model that the planner does not know. Rank 0 logs the mesh and the reason for it at level INFO. If the planner fails otherwise, which is a
defect, rank 0 also logs a warning with the error: this mesh may then differ from the one that a later version predicts.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.registry import transformers_of, unets_of
from para_core.attention.options import RotateMethod
from para_core.distributed.create_mesh import init_context_parallel_mesh, ranks_per_host, require_own_gpus
from para_core.distributed.mesh import GuidedMesh, find_or_make_group, guided_mesh, one_guided_rank
from para_core.instance_patching import original_class

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
    tensor: int = 1


class Predict(Protocol):
    """The planner, as the choice of a mesh calls it."""

    def __call__(
        self, pipe: Any, device: str, ranks: int, ranks_per_host: int, weights: str | None = None, /
    ) -> MeshChoice | Unpredicted:
        """Return the fastest mesh of ``ranks`` ranks on which ``weights`` can be sharded, or why there is no prediction."""


@dataclass(frozen=True)
class Unpredicted:
    """Why there is no prediction; ``failed``: the planner raised what it does not announce."""

    reason: str
    failed: bool = False


def choose_mesh(
    num_ranks: int,
    num_heads: int | None,
    guidance: str | None,
    ranks_per_host: int | None = None,
    weights: str | None = None,
) -> MeshChoice:
    """Half of the ranks for each branch of guidance, if there are any; then Ulysses up to the number of (key) heads, inside of a host; then
    the ring. Weights that are sharded come first: by ``"tensor"``, the fewest ranks that can share heads; by ``"fsdp"``, at least two
    for each branch.

    Args:
        num_heads: None: not known, so as many as there are ranks.
        guidance: why branches are expected; None: they are not.
        ranks_per_host: None: all ranks are on one host, or it is not known.
        weights: ``"fsdp"``, ``"tensor"``; anything else: every rank holds them.

    >>> choose_mesh(8, 24, None)
    MeshChoice(batch=1, ring=1, ulysses=8, reason='no guidance by default, 24 heads', rotate_method='alltoall', tensor=1)
    >>> choose_mesh(8, 2, "guidance_scale is 6.0 by default")
    MeshChoice(batch=2, ring=2, ulysses=2, reason='guidance_scale is 6.0 by default, 2 heads', rotate_method='alltoall', tensor=1)
    >>> choose_mesh(16, 24, None, ranks_per_host=8)
    MeshChoice(batch=1, ring=2, ulysses=8, reason='no guidance by default, 24 heads, 8 ranks on a host', rotate_method='alltoall', tensor=1)
    >>> choose_mesh(2, 24, "guidance_scale is 5.0 by default", weights="fsdp")
    MeshChoice(batch=1, ring=1, ulysses=2, reason="weights='fsdp', guidance_scale is 5.0 by default, 24 heads", rotate_method='alltoall', tensor=1)
    """
    on_host = gcd(num_ranks, ranks_per_host or num_ranks)
    sizes = [size for size in range(2, on_host + 1) if on_host % size == 0 and (num_heads or size) % size == 0]
    tensor = sizes[0] if weights == "tensor" and sizes else 1
    left = num_ranks // tensor
    # FSDP2 shards among the ranks of one branch.
    batch = 2 if guidance is not None and left % 2 == 0 and (weights != "fsdp" or left > 2) else 1
    left //= batch
    # Groups of neighbours stay on a host if their size divides its ranks.
    neighbours = gcd(left, max((ranks_per_host or num_ranks) // tensor, 1))
    heads_left = left if num_heads is None else num_heads // tensor
    ulysses = next(size for size in range(min(neighbours, heads_left), 0, -1) if neighbours % size == 0)
    heads = "heads not known" if num_heads is None else f"{num_heads} heads"
    hosts = "" if ranks_per_host in (None, num_ranks) else f", {ranks_per_host} ranks on a host"
    sharded = f"weights={weights!r}, " if weights in ("fsdp", "tensor") else ""
    reason = f"{sharded}{guidance or 'no guidance by default'}, {heads}{hosts}"
    return MeshChoice(batch, left // ulysses, ulysses, reason, tensor=tensor)


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


def guided_mesh_for(
    mesh: Mesh | GuidedMesh | None, owner: Any, weights: str | None = None, predict: Predict | None = None
) -> GuidedMesh:
    """Return ``mesh`` as this rank sees it; if it is None, the default mesh over all ranks.

    Args:
        owner: The pipeline, or a model.
        weights: How weights are to be sharded on it.
        predict: The planner; without one, or for a model alone, the mesh is that of :func:`choose_mesh`.

    Raises:
        TypeError, ValueError: ``mesh`` is no mesh of ours.
        RuntimeError: There is no process group on several ranks, or two ranks of NCCL have the same GPU.
    """
    return mesh_and_method(mesh, owner, weights, predict)[0]


def mesh_and_method(
    mesh: Mesh | GuidedMesh | None, owner: Any, weights: str | None = None, predict: Predict | None = None
) -> tuple[GuidedMesh, RotateMethod]:
    """Return the mesh as :func:`guided_mesh_for`, and how keys travel around its ring unless the user says so."""
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
        chosen, method = _chosen_mesh(device_type, owner, weights, predict)
        return guided_mesh(chosen), method
    guided = guided_mesh(mesh)
    require_own_gpus(mesh, guided)
    return guided, "alltoall"


def _planned(
    device_type: str, owner: Any, weights: str | None = None, predict: Predict | None = None
) -> MeshChoice | Unpredicted:
    """Return the prediction of rank 0 for all ranks, or why there is none. Every rank calls it."""
    if predict is None or isinstance(owner, nn.Module):
        return Unpredicted("a model alone")
    if device_type != "cuda" or dist.get_backend() == "fake":
        return Unpredicted(f"the planner predicts for cuda devices, and this one is {device_type}")
    ranks = dist.get_world_size()
    predicted: list[Any] = [predict(owner, _device_name(), ranks, ranks, weights) if dist.get_rank() == 0 else None]
    # Devices of other ranks may differ from that of rank 0, and would be planned for differently.
    dist.broadcast_object_list(predicted, src=0, group=_cpu_group())
    choice: MeshChoice | Unpredicted = predicted[0]
    return choice


def _device_name() -> str:
    return torch.cuda.get_device_name()


def _cpu_group() -> ProcessGroup:
    """Return a group of all ranks over which CPU tensors travel. Every rank calls it."""
    return find_or_make_group("para_core: choice of a mesh", list(range(dist.get_world_size())), backend="gloo")


def _ranks_per_host() -> int | None:
    """Return how many neighbouring ranks are on the same host, at least. Every rank calls it.

    The launcher says so, or the ranks compare the names of their hosts, because replicas that Ray or the user started have no launcher.
    """
    on_host = ranks_per_host()
    ranks = dist.get_world_size()
    if on_host is not None or ranks == 1 or dist.get_backend() == "fake":
        return on_host
    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, socket.gethostname(), group=_cpu_group())
    # Hosts of unequal numbers of ranks: groups of this size cross no border between two hosts.
    return gcd(*[len(list(run)) for _, run in groupby(names)])


def _chosen_mesh(
    device_type: str, owner: Any, weights: str | None = None, predict: Predict | None = None
) -> tuple[DeviceMesh, RotateMethod]:
    """Make the default mesh over all ranks, and return it with how keys travel around its ring."""
    transformer, guidance = owner, None
    if not isinstance(owner, nn.Module):
        transformer = next(iter((transformers_of(owner) or unets_of(owner)).values()))
        guidance = default_guidance(owner, transformer)
    on_host = _ranks_per_host()
    # The planner is not told what connects the hosts; the rule of choose_mesh keeps Ulysses inside them.
    one_host = on_host == dist.get_world_size()
    predicted = (
        _planned(device_type, owner, weights, predict) if one_host else Unpredicted("the ranks are on several hosts")
    )
    if isinstance(predicted, MeshChoice):
        choice = predicted
    else:
        choice = choose_mesh(dist.get_world_size(), number_of_heads(transformer), guidance, on_host, weights)
        choice = replace(choice, reason=f"{choice.reason}; not predicted: {predicted.reason}")
    if dist.get_rank() == 0:
        _log_choice(choice, device_type)
        if isinstance(predicted, Unpredicted) and predicted.failed:
            logger.warning(
                "parallelize_pipe: the mesh could not be predicted (%s), so it follows from the number of heads and of ranks. "
                "Pass mesh= to choose one.",
                predicted.reason,
            )
    tensor = {"max_tensor_dim_size": choice.tensor} if choice.tensor > 1 else {}
    mesh = init_context_parallel_mesh(
        device_type,
        max_batch_dim_size=choice.batch,
        max_ring_dim_size=choice.ring,
        max_ulysses_dim_size=choice.ulysses,
        **tensor,
    )
    return mesh, choice.rotate_method


def _log_choice(choice: MeshChoice, device_type: str) -> None:
    tensor = choice.tensor > 1
    logger.info(
        "parallelize_pipe: no mesh given, using batch × ring × ulysses%s = %d × %d × %d%s%s (%s); "
        "mesh=init_context_parallel_mesh(%r, max_batch_dim_size=%d, max_ring_dim_size=%d%s) overrides it.",
        " × tensor" if tensor else "",
        choice.batch,
        choice.ring,
        choice.ulysses,
        f" × {choice.tensor}" if tensor else "",
        "" if choice.rotate_method == "alltoall" else f", rotate_method={choice.rotate_method!r}",
        choice.reason,
        device_type,
        choice.batch,
        choice.ring,
        f", max_tensor_dim_size={choice.tensor}" if tensor else "",
    )
