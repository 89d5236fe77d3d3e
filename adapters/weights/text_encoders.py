"""Placement of text encoders. They run once per generation, and may need more memory than the transformer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from para_core.adapters.components import TextEncoders, components_of
from para_core.adapters.weights.tensor_pickle import join_tensors, split_tensors
from para_core.distributed.collectives import broadcast_bytes, tensor_bytes
from para_core.distributed.consistency import raising_on_all
from para_core.distributed.mesh import GuidedMesh
from para_core.instance_patching import WrapperPriority, original_class, uncompiled, unwrap, wrap_method

TEXT_ENCODERS: tuple[TextEncoders, ...] = get_args(TextEncoders)
_KEY = "text_encoders"
# The hooks of diffusers' group offload, innermost last (diffusers/hooks/group_offloading.py).
_HOOKS = ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading")
# Attributes that a hook of diffusers leaves on a module after it was removed.
_LEFT_BY_HOOKS = ("forward", "_diffusers_hook")


def text_encoders_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the text encoders of ``pipe`` by name, without the wrappers of ``torch.compile``."""
    parts = {name: uncompiled(part) for name, part in pipe.components.items() if name.startswith("text_encoder")}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def encoders_with_blocks(pipe: Any) -> list[str]:
    """Return the names of the text encoders of ``pipe`` that FSDP2 can shard."""
    return [name for name in components_of(pipe) if name in text_encoders_of(pipe)]


def require_text_encoders(pipe: Any, placement: TextEncoders) -> None:
    """Raise ``ValueError`` if ``pipe`` has no text encoder."""
    if not text_encoders_of(pipe):
        raise ValueError(
            f"text_encoders={placement!r}: this {original_class(pipe).__name__} has no text encoder. Leave it out."
        )


def require_not_offloaded(pipe: Any) -> None:
    """Raise ``ValueError`` if a text encoder of ``pipe`` is offloaded by accelerate or by diffusers' group offload."""
    for name, module in text_encoders_of(pipe).items():
        offloader = offloader_of(module)
        if offloader is not None:
            raise ValueError(
                f"pipe.{name} is offloaded by {offloader} already. Leave text_encoders out, or undo that offload "
                "first (pipe.remove_all_hooks())."
            )


class OffloadedEncoders:
    """Text encoders whose weights are in host memory, by diffusers' group offload of single layers.

    Each layer is copied to the device of ``mesh`` while it computes. On CUDA the next layer is copied meanwhile, from
    pinned memory.

    Args:
        pipe: The pipeline.
        mesh: Ranks that call the pipeline.
        first_rank_only: Whether only the first rank of ``mesh`` runs the text encoders and sends the outputs to the
            others. Each call of a text encoder is then a collective call.
    """

    def __init__(self, pipe: Any, mesh: GuidedMesh, *, first_rank_only: bool) -> None:
        self.encoders = list(text_encoders_of(pipe).values())
        self.mesh, self.first_rank_only = mesh, first_rank_only
        self._undo = ExitStack()

    def apply(self) -> None:
        """Offload the weights. If this fails, the text encoders are as before."""
        from diffusers.hooks import apply_group_offloading

        device = execution_device(self.mesh)
        with ExitStack() as rollback:
            for module in self.encoders:
                rollback.callback(_remove_offload, module, next(module.parameters()).device, _attributes(module))
                apply_group_offloading(
                    module,
                    onload_device=device,
                    offload_device=torch.device("cpu"),
                    offload_type="leaf_level",
                    use_stream=device.type == "cuda",
                )
                if self.first_rank_only and self.mesh.ranks > 1:
                    rollback.callback(unwrap, module, _KEY)
                    around = partial(_run_on_first, self.mesh, device)
                    wrap_method(module, "__call__", _KEY, around, order=WrapperPriority.PARALLEL)
            self._undo = rollback.pop_all()

    def remove(self) -> None:
        """Remove the offload, and move the weights back to the devices on which they were."""
        self._undo.close()


def offloader_of(module: nn.Module) -> str | None:
    """Return what offloads ``module`` now: accelerate or, as a whole or in part, diffusers' group offload."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        return f"accelerate's {type(hook).__name__}"
    registries = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    grouped = any(registry is not None and registry.get_hook("group_offloading") is not None for registry in registries)
    return "diffusers' group offload" if grouped else None


def execution_device(mesh: GuidedMesh) -> torch.device:
    """Return the device on which this rank of ``mesh`` computes."""
    kind = mesh.sequence.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _attributes(module: nn.Module) -> dict[nn.Module, set[str]]:
    """Return the attributes of each submodule that hooks of diffusers set and that are there before an offload."""
    return {part: {name for name in _LEFT_BY_HOOKS if name in vars(part)} for part in module.modules()}


def _remove_offload(module: nn.Module, device: torch.device, before: Mapping[nn.Module, set[str]]) -> None:
    """Remove diffusers' group offload from ``module``, and move it to ``device``.

    Args:
        before: :func:`_attributes` the module before the offload.
    """
    for part in module.modules():
        registry: Any = getattr(part, "_diffusers_hook", None)
        for name in () if registry is None else _HOOKS:
            registry.remove_hook(name, recurse=False)
        for name in set(_LEFT_BY_HOOKS) & set(vars(part)) - before.get(part, set()):
            delattr(part, name)
    module.to(device)


def _run_on_first(
    mesh: GuidedMesh, device: torch.device, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    output: Any = None
    header, tensors = b"", list[Tensor]()
    with raising_on_all(mesh, "the text encoder failed"):
        if mesh.rank == 0:
            output = call(module, *args, **kwargs)
            pickled, tensors = split_tensors(output)
            tensors = [x.detach().to(device).contiguous() for x in tensors]
            header = pickle.dumps((pickled, [(x.shape, x.dtype) for x in tensors]))
    size = broadcast_bytes(tensor_bytes(torch.tensor([len(header)])), mesh).view(torch.int64)
    shared = broadcast_bytes(torch.frombuffer(bytearray(header.ljust(int(size))), dtype=torch.uint8), mesh)
    if mesh.rank != 0:
        pickled, kinds = pickle.loads(shared.numpy().tobytes())
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in kinds]
    for x in tensors:
        # After the broadcast along one mesh dim, ranks with index 0 along the next one have the tensor as well.
        for dim in mesh.dims:
            if dim.group is not None:
                dist.broadcast(x, group_src=0, group=dim.group)
    return output if mesh.rank == 0 else join_tensors(pickled, tensors)
