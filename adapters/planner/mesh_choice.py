"""Choice of the mesh of a pipeline if the user gives none.

On several ranks with CUDA devices on one host, the mesh is the one that the planner predicts to be fastest at the
pipeline's default sizes; rank 0 predicts for all ranks. In every other case it follows from :func:`choose_mesh`, which
uses the number of ranks, heads and hosts, ``weights=``, and whether the pipeline uses guidance by default, and nothing
that is measured. These cases are one rank, another device, several hosts, a transformer or UNet without a pipeline, and
a device or model that the planner does not know.

Rank 0 logs the mesh and its reason at level INFO. If the planner fails in another way, which is a defect, rank 0 also
logs a warning with the error, because a later version may choose another mesh.
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
from para_core.attention.attention_options import RotateMethod
from para_core.distributed.create_mesh import init_context_parallel_mesh, ranks_per_host, require_own_gpus
from para_core.distributed.mesh import GuidedMesh, find_or_make_group, guided_mesh, one_guided_rank
from para_core.instance_patching import original_class

logger = logging.getLogger(__name__)

Mesh = DeviceMesh | ProcessGroup


@dataclass(frozen=True)
class MeshChoice:
    """Sizes of the mesh dims, the reason for them, and how keys travel around the ring."""

    batch: int
    ring: int
    ulysses: int
    reason: str
    rotate_method: RotateMethod = "alltoall"
    tensor: int = 1


class Predict(Protocol):
    """Type of :func:`~para_core.adapters.planner.fastest_mesh.fastest_mesh`."""

    def __call__(
        self, pipe: Any, device: str, ranks: int, ranks_per_host: int, weights: str | None = None, /
    ) -> MeshChoice | Unpredicted:
        """Return the fastest mesh of ``ranks`` ranks that can shard ``weights``, or the reason for no prediction."""


@dataclass(frozen=True)
class Unpredicted:
    """Reason why there is no prediction."""

    reason: str
    failed: bool = False  # The planner raised an error that it does not document.


def choose_mesh(
    num_ranks: int,
    num_heads: int | None,
    guidance: str | None,
    ranks_per_host: int | None = None,
    weights: str | None = None,
) -> MeshChoice:
    """Return the sizes of a mesh of ``num_ranks`` ranks by a fixed rule.

    With guidance each of two branches gets half of the ranks. The ranks of a branch go to Ulysses, up to the number of
    key heads and within a host, then to the ring. Sharded weights come first: ``"tensor"`` takes the fewest ranks that
    divide the heads; ``"fsdp"`` keeps at least two ranks per branch.

    Args:
        num_heads: Number of key heads; None if unknown, which limits nothing.
        guidance: Reason to expect two branches of guidance; None without guidance.
        ranks_per_host: None if all ranks are on one host, or if it is unknown.
        weights: ``"fsdp"`` or ``"tensor"``; with any other value every rank holds all weights.

    >>> def sizes(*args, **options):
    ...     choice = choose_mesh(*args, **options)
    ...     return choice.batch, choice.ring, choice.ulysses
    >>> sizes(8, 24, None), sizes(8, 2, "guidance_scale is 6.0 by default"), sizes(16, 24, None, ranks_per_host=8)
    ((1, 1, 8), (2, 2, 2), (1, 2, 8))
    >>> choose_mesh(2, 24, "guidance_scale is 5.0 by default", weights="fsdp").reason
    "weights='fsdp', guidance_scale is 5.0 by default, 24 heads"
    """
    on_host = gcd(num_ranks, ranks_per_host or num_ranks)
    sizes = [size for size in range(2, on_host + 1) if on_host % size == 0 and (num_heads or size) % size == 0]
    tensor = sizes[0] if weights == "tensor" and sizes else 1
    left = num_ranks // tensor
    # FSDP2 shards weights over the ranks of one branch.
    batch = 2 if guidance is not None and left % 2 == 0 and (weights != "fsdp" or left > 2) else 1
    left //= batch
    # A group of neighbouring ranks lies within a host if its size divides the number of ranks on the host.
    neighbours = gcd(left, max((ranks_per_host or num_ranks) // tensor, 1))
    heads_left = left if num_heads is None else num_heads // tensor
    ulysses = next(size for size in range(min(neighbours, heads_left), 0, -1) if neighbours % size == 0)
    heads = "heads not known" if num_heads is None else f"{num_heads} heads"
    hosts = "" if ranks_per_host in (None, num_ranks) else f", {ranks_per_host} ranks on a host"
    sharded = f"weights={weights!r}, " if weights in ("fsdp", "tensor") else ""
    reason = f"{sharded}{guidance or 'no guidance by default'}, {heads}{hosts}"
    return MeshChoice(batch, left // ulysses, ulysses, reason, tensor=tensor)


def default_guidance(pipe: Any, transformer: Any) -> str | None:
    """Return the reason why calls of ``pipe`` with default arguments use guidance; None if they do not.

    The pipeline's property ``do_classifier_free_guidance`` decides if there is one, because it knows distilled models.
    Without it, a ``true_cfg_scale`` counts if a negative prompt is a default, and a ``guidance_scale`` counts if the
    pipeline takes a negative prompt and the model does not embed the scale.
    """
    guider = getattr(pipe, "guider", None)
    if guider is not None:
        scale = getattr(guider, "guidance_scale", None)
        return f"its guider has guidance_scale {scale}" if getattr(guider, "num_conditions", 1) > 1 else None
    parameters = inspect.signature(original_class(pipe).__call__).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    if "max_guidance_scale" in defaults:  # In Stable Video Diffusion the scale grows from frame to frame.
        defaults["guidance_scale"] = defaults["max_guidance_scale"]
    guides = _does_guidance(pipe, defaults)
    name = "guidance_scale" if guides or "true_cfg_scale" not in defaults else "true_cfg_scale"
    scale = defaults.get(name)
    if guides is None:
        if name == "true_cfg_scale":
            two_branches = defaults.get("negative_prompt") is not None
        else:
            embedded = getattr(getattr(transformer, "config", None), "guidance_embeds", False)
            two_branches = "negative_prompt" in defaults and not embedded
        guides = two_branches and isinstance(scale, (int, float)) and scale > 1
    return f"{name} is {scale} by default" if guides else None


def _does_guidance(pipe: Any, defaults: Mapping[str, Any]) -> bool | None:
    """Return ``do_classifier_free_guidance`` of ``pipe`` in a call with the arguments ``defaults``.

    None if it is unknown.
    """
    cls: Any = original_class(pipe)
    if not isinstance(inspect.getattr_static(cls, "do_classifier_free_guidance", None), property):
        return None
    # A call stores its arguments in attributes with these names, and the property reads them.
    copy = cls.__new__(cls)
    copy.__dict__.update({**vars(pipe), **{f"_{name}": default for name, default in defaults.items()}})
    try:
        return bool(copy.do_classifier_free_guidance)
    except (AttributeError, TypeError):
        return None


# Config entries with the number of heads. Key heads come first, because some models have fewer of them.
# LongCat-AudioDiT also lists the heads of its text encoder, under other names.
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
    """Return the number of key heads of ``transformer``; None if its config does not say."""
    config = getattr(transformer, "config", None)
    for name in _HEADS:
        heads = getattr(config, name, None)
        if isinstance(heads, int):
            return heads
    # Kandinsky's config has the width of a token, and that of a head in parts.
    width, axes = getattr(config, "model_dim", None), getattr(config, "axes_dims", None)
    return width // sum(axes) if isinstance(width, int) and isinstance(axes, (tuple, list)) else None


def guided_mesh_for(
    mesh: Mesh | GuidedMesh | None, owner: Any, weights: str | None = None, predict: Predict | None = None
) -> GuidedMesh:
    """Return ``mesh`` as this rank sees it. If it is None, return the default mesh over all ranks.

    Args:
        owner: Pipeline or model that the mesh is for.
        weights: How weights will be sharded on the mesh.
        predict: The planner. Without one, or if ``owner`` is a model, :func:`choose_mesh` chooses.

    Raises:
        TypeError, ValueError: If ``mesh`` is not a mesh of para_core.
        RuntimeError: If there is no process group on several ranks, or two NCCL ranks use the same GPU.
    """
    return mesh_and_method(mesh, owner, weights, predict)[0]


def mesh_and_method(
    mesh: Mesh | GuidedMesh | None, owner: Any, weights: str | None = None, predict: Predict | None = None
) -> tuple[GuidedMesh, RotateMethod]:
    """Return the mesh as :func:`guided_mesh_for` does, and the default ``rotate_method`` for it."""
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
    """Return the prediction of rank 0 on all ranks. Every rank calls it."""
    if predict is None or isinstance(owner, nn.Module):
        return Unpredicted("there is no pipeline")
    if device_type != "cuda" or dist.get_backend() == "fake":
        return Unpredicted(f"the planner predicts for cuda devices, and this one is {device_type}")
    ranks = dist.get_world_size()
    predicted: list[Any] = [predict(owner, _device_name(), ranks, ranks, weights) if dist.get_rank() == 0 else None]
    # Other ranks may have other devices, for which the prediction could differ.
    dist.broadcast_object_list(predicted, src=0, group=_cpu_group())
    choice: MeshChoice | Unpredicted = predicted[0]
    return choice


def _device_name() -> str:
    return torch.cuda.get_device_name()


def _cpu_group() -> ProcessGroup:
    """Return a group of all ranks over which CPU tensors travel. Every rank calls it."""
    return find_or_make_group("para_core: choice of a mesh", list(range(dist.get_world_size())), backend="gloo")


def _ranks_per_host() -> int | None:
    """Return a number of neighbouring ranks that are certainly on the same host. Every rank calls it.

    The number comes from the launcher's environment. Without a launcher (Ray, or processes started by hand) the ranks
    compare host names.
    """
    on_host = ranks_per_host()
    ranks = dist.get_world_size()
    if on_host is not None or ranks == 1 or dist.get_backend() == "fake":
        return on_host
    names: list[Any] = [None] * ranks
    dist.all_gather_object(names, socket.gethostname(), group=_cpu_group())
    # Hosts may have different numbers of ranks. Groups of the common divisor never span two hosts.
    return gcd(*[len(list(run)) for _, run in groupby(names)])


def _chosen_mesh(
    device_type: str, owner: Any, weights: str | None = None, predict: Predict | None = None
) -> tuple[DeviceMesh, RotateMethod]:
    """Create the default mesh over all ranks. Return it with the default ``rotate_method`` for it."""
    transformer, guidance = owner, None
    if not isinstance(owner, nn.Module):
        transformer = next(iter((transformers_of(owner) or unets_of(owner)).values()))
        guidance = default_guidance(owner, transformer)
    on_host = _ranks_per_host()
    # The planner does not know the network between hosts. choose_mesh keeps Ulysses within a host.
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
                "parallelize_pipe: the mesh could not be predicted (%s), so it follows from the number of heads and "
                "of ranks. "
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
