"""Keep the weights of whole components in host memory. Optionally only the first rank runs them.

``text_encoder_offload.py`` and ``vae_offload.py`` are the features that use it; transformers are offloaded
block by block (``block_offload.py``). ``split_tensors`` and ``join_tensors`` also serve
``encoded_prompts.py``. Tests: tests/weights/test_placement.py.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from para_core.adapters.weights.feature import FeatureChange
from para_core.distributed.agree import broadcast_bytes, together
from para_core.distributed.fingerprints import tensor_bytes
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.record import empty_slot, fill_slot, is_filled, slot_owner
from para_core.instance.slots import Slot
from para_core.lazy_tensors import materialize

# Names of the hooks of diffusers' group offload, in the order of removal: outermost first
# (diffusers/hooks/group_offloading.py).
_HOOKS = ("lazy_prefetch_group_offloading", "layer_execution_tracker", "group_offloading")
# Attributes that a removed hook of diffusers leaves on a module; :func:`_remove_offload` deletes them.
_HOOK_ATTRIBUTES = ("forward", "_diffusers_hook")


class Offloader(NamedTuple):
    """An offload of a component: its name and how a user undoes it, both as parts of messages."""

    name: str
    undo: str


def check_not_offloaded(modules: Mapping[str, nn.Module], instead: str) -> None:
    """Raise ``ValueError`` if one of ``modules``, components by name, is offloaded.

    ``instead`` is a sentence of the message: what to do if the offload stays, such as to leave out an option.
    """
    for name, module in modules.items():
        offloader = offloader_of(module)
        if offloader is not None:
            raise ValueError(
                f"pipe.{name} is offloaded by {offloader.name} already. {instead} Or undo that offload "
                f"first: {offloader.undo}."
            )


class _StateBefore(NamedTuple):
    """The device of a component before it was offloaded, and for each submodule the hook attributes that it
    had.
    """

    device: torch.device
    attributes: Mapping[nn.Module, set[str]]


@dataclass(eq=False)
class OffloadedModules(FeatureChange):
    """The change that keeps weights of components in host memory, by diffusers' group offload of single
    layers.

    Each layer is copied to the device of ``mesh`` while it computes: on CUDA from pinned memory, and the next
    layer while the current one computes.

    Args:
        modules: Components by name.
        mesh: Ranks that call the pipeline.
        option: The option of parallelize_pipe by which they are offloaded, for messages.
        methods: Names of the methods by which a pipeline calls the components.
        first_rank_only: Whether only the first rank of ``mesh`` runs the components and sends the outputs to
            the others. Each call of a component is then a collective call.
    """

    modules: Mapping[str, nn.Module]
    mesh: GuidedMesh
    option: str
    methods: Sequence[str] = ("__call__",)
    first_rank_only: bool = False
    # By component name; empty while nothing is offloaded.
    _before: dict[str, _StateBefore] = field(default_factory=dict, init=False)

    def apply(self) -> None:
        """Offload the weights. Raise ``ValueError`` if other code has offloaded them.

        A failure changes nothing.
        """
        check_not_offloaded(self.modules, f"Leave {self.option} out.")
        if self.first_rank_only:
            self._check_not_on_all_ranks()
        device = execution_device(self.mesh)
        try:
            for name, module in self.modules.items():
                self._offload(name, module, device)
        except BaseException:
            self.undo()
            raise

    def _check_not_on_all_ranks(self) -> None:
        """Raise ``ValueError`` if the rows of a component are sharded, so that each call of it needs all ranks."""
        for name, module in self.modules.items():
            if is_filled(module, Slot.PARALLEL_VAE):
                raise ValueError(
                    f"{self.option}='first' runs pipe.{name} on one rank, and it runs on all ranks already, "
                    f"by parallelize_vae or another pipeline with vae=True. Use {self.option}='offload', or "
                    f"undo that: unparallelize_vae(pipe.{name}), or unparallelize_pipe(...) of the other "
                    "pipeline."
                )

    def _offload(self, name: str, module: nn.Module, device: torch.device) -> None:
        """Move ``module``, the component ``name``, to host memory, and note what :meth:`undo` restores."""
        attributes = {
            part: {name for name in _HOOK_ATTRIBUTES if name in vars(part)} for part in module.modules()
        }
        self._before[name] = _StateBefore(next(module.parameters()).device, attributes)
        self._place(module, device)
        if self.first_rank_only and self.mesh.ranks > 1:
            around = partial(_run_on_first, self.mesh, device, name)
            fill_slot(module, Slot.FIRST_RANK, dict.fromkeys(self.methods, around))

    def _place(self, module: nn.Module, device: torch.device) -> None:
        """Move the weights of one component to host memory, to compute on ``device``.
        A subclass may override this.
        """
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(
            module,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="leaf_level",
            use_stream=device.type == "cuda",
            # Without it diffusers makes the host wait for the stream whenever a layer is freed.
            record_stream=device.type == "cuda",
        )

    def undo(self) -> None:
        """Remove the offload, and move the weights back to the devices on which they were."""
        for name, before in self._before.items():
            module = self.modules[name]
            empty_slot(module, Slot.FIRST_RANK)
            _remove_offload(module, before)
        self._before.clear()

    def resume(self) -> None:
        self.apply()


def offloader_of(module: nn.Module) -> Offloader | None:
    """Return what offloads ``module`` or a part of it; None if nothing does.

    Of accelerate's hooks and of ``offload="blocks"`` only those on ``module`` itself are found.
    """
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        return Offloader(f"accelerate's {type(hook).__name__}", "pipe.remove_all_hooks()")
    # An OffloadedBlocks, whose file imports this one.
    owner: Any = slot_owner(module, Slot.OFFLOADED_BLOCK, object)
    if owner is not None:
        offloader: Offloader = owner.offloader
        return offloader
    registries = (getattr(part, "_diffusers_hook", None) for part in module.modules())
    grouped = any(
        registry is not None and registry.get_hook("group_offloading") is not None for registry in registries
    )
    if not grouped:
        return None
    undo = (
        "unparallelize_pipe(pipe) if parallelize_pipe placed it there; if it "
        "is diffusers' own, HookRegistry.check_if_exists_or_initialize(module).remove_hook(name) of "
        f"diffusers.hooks, for each name of {', '.join(_HOOKS)}"
    )
    return Offloader("diffusers' group offload", undo)


def execution_device(mesh: GuidedMesh) -> torch.device:
    """Return the device on which this rank of ``mesh`` computes."""
    kind = mesh.sequence.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _remove_offload(module: nn.Module, before: _StateBefore) -> None:
    """Remove diffusers' group offload from ``module``, and move it back to its device ``before`` the offload."""
    for part in module.modules():
        registry: Any = getattr(part, "_diffusers_hook", None)
        if registry is not None:
            for name in _HOOKS:
                registry.remove_hook(name, recurse=False)
        for name in set(_HOOK_ATTRIBUTES) & set(vars(part)) - before.attributes.get(part, set()):
            delattr(part, name)
    module.to(before.device)


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
    """Run a method of the component ``name`` on the first rank of ``mesh``, and return its output on all
    ranks.

    Collective. The output may be any object that pickles; its tensors are sent by themselves, and arrive on
    ``device``. If the call fails on the first rank, every rank raises.
    """
    output: Any = None
    header, pickled, tensors = b"", b"", list[Tensor]()
    # Complete the transfer of inputs that other CFG ranks have computed. This is a collective, so every rank
    # takes part, although only the first rank needs the inputs.
    args, kwargs = materialize((args, kwargs))
    with together(mesh, f"pipe.{name} failed", call=f"pipe.{name}"):
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
        # Broadcast once per mesh dim, from index 0. The ranks that have the tensor after one dim are the
        # sources along the next dim, so after the last dim every rank has it.
        for dim in mesh.dims:
            if dim.group is not None:
                dist.broadcast(x, group_src=0, group=dim.group)
    if mesh.rank == 0:
        return output
    return join_tensors(pickled, tensors)


def split_tensors(value: Any) -> tuple[bytes, list[Tensor]]:
    """Return ``value`` pickled without its tensors, and these tensors, each once, in the order in which they
    appear.
    """
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
