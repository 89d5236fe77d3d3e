"""Keep the weights of whole components in host memory. Optionally only the first rank runs them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from para_core.cfg.deferred import materialize
from para_core.distributed.agree import raising_on_all
from para_core.distributed.collectives import broadcast_bytes, tensor_bytes
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.record import empty_slot, fill_slot, is_filled
from para_core.instance.slots import Slot

# Names of the hooks of diffusers' group offload, in the order of removal: outermost first
# (diffusers/hooks/group_offloading.py).
_HOOKS = ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading")
# Attributes that a removed hook of diffusers leaves on a module; :func:`_remove_offload` deletes them.
_LEFT_BY_HOOKS = ("forward", "_diffusers_hook")


class Offloader(NamedTuple):
    """An offload of a component: its name and how a user undoes it, both as parts of messages."""

    name: str
    undo: str


def require_not_offloaded(modules: Mapping[str, nn.Module], instead: str) -> None:
    """Raise ``ValueError`` if one of ``modules`` is offloaded.

    ``instead`` is a sentence of the message: what to do if the offload stays, such as to leave out an option.
    """
    for name, module in modules.items():
        offloader = offloader_of(module)
        if offloader is not None:
            raise ValueError(
                f"pipe.{name} is offloaded by {offloader.name} already. {instead} Or undo that offload first: "
                f"{offloader.undo}."
            )


@dataclass(eq=False)
class OffloadedModules:
    """Components whose weights are in host memory, by diffusers' group offload of single layers.

    Each layer is copied to the device of ``mesh`` while it computes: on CUDA from pinned memory, and the next layer
    while the current one computes.

    Args:
        modules: Components by name.
        mesh: Ranks that call the pipeline.
        option: The option of parallelize_pipe by which they are offloaded, for messages.
        methods: Names of the methods by which a pipeline calls the components.
        first_rank_only: Whether only the first rank of ``mesh`` runs the components and sends the outputs to the
            others. Each call of a component is then a collective call.
    """

    modules: Mapping[str, nn.Module]
    mesh: GuidedMesh
    option: str
    methods: Sequence[str] = ("__call__",)
    first_rank_only: bool = False
    _undo: ExitStack = field(default_factory=ExitStack, init=False)

    def apply(self) -> None:
        """Offload the weights. Raise ``ValueError`` if other code has offloaded them. A failure changes nothing."""
        require_not_offloaded(self.modules, f"Leave {self.option} out.")
        for name, module in self.modules.items():
            if self.first_rank_only and is_filled(module, Slot.PARALLEL_VAE):
                raise ValueError(
                    f"{self.option}='first' runs pipe.{name} on one rank, and it runs on all ranks already, by "
                    f"parallelize_vae or another pipeline with vae=True. Use {self.option}='offload', or undo that: "
                    f"unparallelize_vae(pipe.{name}), or unparallelize_pipe(...) of the other pipeline."
                )
        device = execution_device(self.mesh)
        with ExitStack() as rollback:
            for name, module in self.modules.items():
                before = {part: {name for name in _LEFT_BY_HOOKS if name in vars(part)} for part in module.modules()}
                rollback.callback(_remove_offload, module, next(module.parameters()).device, before)
                self._place(module, device, rollback)
                if self.first_rank_only and self.mesh.ranks > 1:
                    rollback.callback(empty_slot, module, Slot.FIRST_RANK)
                    around = partial(_run_on_first, self.mesh, device, name)
                    fill_slot(module, Slot.FIRST_RANK, dict.fromkeys(self.methods, around))
            self._undo = rollback.pop_all()

    def _place(self, module: nn.Module, device: torch.device, rollback: ExitStack) -> None:
        """Offload one component. ``rollback`` gets callbacks that undo what :func:`_remove_offload` does not."""
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(
            module,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=device.type == "cuda",
            # Otherwise the host waits for the device whenever a layer is freed.
            record_stream=device.type == "cuda",
        )

    def remove(self) -> None:
        """Remove the offload, and move the weights back to the devices on which they were."""
        self._undo.close()


def offloader_of(module: nn.Module) -> Offloader | None:
    """Return what offloads ``module`` or a part of it; None if nothing does."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        return Offloader(f"accelerate's {type(hook).__name__}", "pipe.remove_all_hooks()")
    if is_filled(module, Slot.OFFLOADED_BLOCK):
        return Offloader(
            "offload='blocks' of parallelize_pipe", "unparallelize_pipe(pipe), with the pipeline of that call"
        )
    registries = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    grouped = any(registry is not None and registry.get_hook("group_offloading") is not None for registry in registries)
    undo = (
        "unparallelize_pipe(pipe) if parallelize_pipe placed it there; if it is "
        "diffusers' own, HookRegistry.check_if_exists_or_initialize(module).remove_hook(name) of diffusers.hooks, for "
        f"each name of {', '.join(_HOOKS)}"
    )
    return Offloader("diffusers' group offload", undo) if grouped else None


def execution_device(mesh: GuidedMesh) -> torch.device:
    """Return the device on which this rank of ``mesh`` computes."""
    kind = mesh.sequence.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _remove_offload(module: nn.Module, device: torch.device, before: Mapping[nn.Module, set[str]]) -> None:
    """Remove diffusers' group offload from ``module``, and move it back to ``device``.

    ``before`` has, for each submodule, the names in ``_LEFT_BY_HOOKS`` that it had before the offload. They are kept.
    """
    for part in module.modules():
        registry: Any = getattr(part, "_diffusers_hook", None)
        for name in () if registry is None else _HOOKS:
            registry.remove_hook(name, recurse=False)
        for name in set(_LEFT_BY_HOOKS) & set(vars(part)) - before.get(part, set()):
            delattr(part, name)
    module.to(device)


def _run_on_first(
    mesh: GuidedMesh,
    device: torch.device,
    name: str,
    call: Callable[..., Any],
    module: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    output: Any = None
    header, tensors = b"", list[Tensor]()
    # Complete the transfer of inputs that other CFG ranks have computed. This is a collective, so every rank takes
    # part, although only the first rank needs the inputs.
    args, kwargs = materialize((args, kwargs))
    with raising_on_all(mesh, f"pipe.{name} failed", call=f"pipe.{name}"):
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
        # Broadcast once per mesh dim, from index 0. The ranks that have the tensor after one dim are the sources along
        # the next dim, so after the last dim every rank has it.
        for dim in mesh.dims:
            if dim.group is not None:
                dist.broadcast(x, group_src=0, group=dim.group)
    return output if mesh.rank == 0 else join_tensors(pickled, tensors)


def split_tensors(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return ``value`` pickled without its tensors, and these tensors, each once, in the order in which they appear."""
    # Hold the tensors here: Python may give the id of a freed tensor to another one.
    tensors: dict[int, tuple[int, Tensor]] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> int | None:
            return tensors.setdefault(id(obj), (len(tensors), obj))[0] if isinstance(obj, Tensor) else None

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue(), [x for _, x in tensors.values()]


def join_tensors(pickled: bytes, tensors: Sequence[Tensor]) -> Any:
    """Return the value that :func:`split_tensors` took apart, with ``tensors`` in place of its tensors."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: int) -> Tensor:
            return tensors[pid]

    return Unpickler(io.BytesIO(pickled)).load()
