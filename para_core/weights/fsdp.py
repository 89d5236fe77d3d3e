"""Weights sharded over ranks by PyTorch's FSDP2: each block is gathered just before it runs, and freed behind it.

Bit-equal to replicated weights: what a block computes with is what was sharded. For inference: the parameters take no
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from para_core.instance_patching import unwrapped, unwrapped_class
from para_core.torch_internals import parameter_slots, remove_fsdp
from para_core.weights.gradients import Gradients
from para_core.weights.subclasses import consists_of_tensors
from para_core.weights.tensor import write_part

# Parameters outside of the blocks that have fewer elements stay on every rank: pipelines read some of them themselves
# (the last norm of CLIP), and gathering them is not worth a collective.
LARGE = 2**20
# Where a module keeps which of its parameters took gradients; it goes with :func:`gather_blocks`.
_GRADIENTS = "_para_core_fsdp_gradients"


def shard_blocks(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    offload_policy: OffloadPolicy | None = None,
    replicated: Collection[nn.Parameter] = (),
) -> None:
    """Shard each of ``blocks`` over ``mesh``; while one computes, the next is gathered.

    What is large outside of them (embeddings of text) is gathered for the whole of a call of ``module``.

    Args:
        module: called as a whole, with the same weights and equally often on all ranks of ``mesh``.
        blocks: of ``module``, in the order in which they run.
        mesh: of one dim, or ``replicate × shard`` (HSDP).
        offload_policy: ``CPUOffloadPolicy()`` keeps this rank's part in host memory.
        replicated: parameters of ``module`` that stay on every rank.

    Raises:
        ValueError: a weight is of a kind that FSDP2 does not take. Nothing has changed then.
    """
    require_shardable(module, replicated)
    policy, kept = offload_policy or OffloadPolicy(), set(replicated)
    # FSDP2 wants one dtype of what takes gradients, and diffusers keeps some parameters in float32.
    gradients = Gradients()
    gradients.stop(module)
    module.__dict__[_GRADIENTS] = gradients
    of_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    small = {x for x in module.parameters() if id(x) not in of_blocks and x.numel() < LARGE} | kept
    with unwrapped([module, *blocks]):
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True, offload_policy=policy, ignored_params=kept)
        # Of one root, so that blocks share streams and can be gathered ahead.
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy, ignored_params=small)
        for part in (module, *blocks):
            # Before the wrappers return, because each later private subclass takes its name from this class.
            part.__class__ = _private_class(type(part), unwrapped_class(part))
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    if mesh.device_type != "cpu":
        # FSDP2 moves what it shards, and no more.
        for parameter in small:
            parameter.data = parameter.data.to(mesh.device_type)


def _private_class(fsdp_class: type, written: type) -> type:
    """Return the subclass of ``fsdp_class`` that has the name of the class that the model's author wrote.

    diffusers' ``compile_repeated_blocks`` and transformers' output recorders look blocks up by the name of their class,
    and FSDP2 names its classes anew. FSDP2 keeps one class per original class for the whole process, so renaming that
    one would rename it for the user's own models, too. Blocks of one class share their private class, and so their
    graphs.
    """
    private = _PRIVATE_CLASSES.get(fsdp_class)
    if private is None:

        def construct(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            # FSDP2 constructs the original class, which it looks up by its position among the bases of its own class.
            return fsdp_class.__new__(fsdp_class, *args, **kwargs)

        namespace = {
            "__module__": written.__module__,
            "__qualname__": written.__qualname__,
            "__doc__": written.__doc__,
            "__new__": construct,
            "__deepcopy__": _refuse_copies,
            "__reduce_ex__": _refuse_copies,
        }
        private = _PRIVATE_CLASSES[fsdp_class] = type(fsdp_class)(written.__name__, (fsdp_class,), namespace)
    return private


# By the class of FSDP2, as long as a module has the private class.
_PRIVATE_CLASSES: WeakValueDictionary[type, type] = WeakValueDictionary()


def _refuse_copies(self: Any, memo_or_protocol: Any) -> Any:
    raise TypeError(
        f"this {unwrapped_class(self).__name__} cannot be copied or pickled while its weights are sharded by FSDP2: "
        "this rank holds a part "
        "of each, which refers to process groups. Save its state_dict() by torch.distributed.checkpoint; or gather "
        "the weights first, "
        "on every rank: unshard_weights(pipe)."
    )


def require_shardable(module: nn.Module, replicated: Collection[nn.Parameter] = ()) -> None:
    """Raise unless each weight is a plain tensor (or a part of one), or of a kind that tells FSDP2 what to gather of
    it.

    ``replicated`` are not sharded, and may be of any kind.
    """
    kept = {id(x) for x in replicated}
    for name, parameter in module.named_parameters():
        if id(parameter) in kept:
            continue
        if type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor | _Gathered):
            raise ValueError(
                f"{name} of this {unwrapped_class(module).__name__} is a {type(parameter).__name__}, which has no "
                "fsdp_pre_all_gather, so FSDP2 cannot shard it. Shard the weights unquantized, or quantized by "
                "torchao's "
                "int8_weight_only_quantized_training(); or leave this component replicated: components=[...] of the "
                "others."
            )


@runtime_checkable
class _Gathered(Protocol):
    """A tensor that says what FSDP2 gathers of it."""

    fsdp_pre_all_gather: Callable[..., Any]


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` runs under FSDP2, by us or another."""
    return isinstance(module, FSDPModule)


def shard_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the ranks over which the blocks of ``module`` are sharded; None if they are not."""
    parameters = (x for part in module.modules() if isinstance(part, FSDPModule) for x in part.parameters())
    return next((x.device_mesh for x in parameters if isinstance(x, DTensor)), None)


def gather_blocks(module: nn.Module) -> None:
    """Undo :func:`shard_blocks`: every rank holds all weights again. All ranks of the mesh call it."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.reshard()
    whole = _whole_parameters(module)
    with unwrapped(parts):
        for part in parts:
            remove_fsdp(part)
            part.__class__ = unwrapped_class(part)
    for owner, name, parameter in whole:
        owner.register_parameter(name, parameter)
    gradients: Gradients | None = module.__dict__.pop(_GRADIENTS, None)
    if gradients is not None:
        gradients.restore()


def discard_shards(module: nn.Module) -> None:
    """Undo what :func:`shard_blocks` did before it failed, on this rank alone; the caller puts the parameters back."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    with unwrapped(parts):
        for part in parts:
            remove_fsdp(part)
            part.__class__ = unwrapped_class(part)
    module.__dict__.pop(_GRADIENTS, None)


def forget_gradients(module: nn.Module) -> None:
    """Let :func:`gather_blocks` leave what ``module`` has now without gradients."""
    if _GRADIENTS in module.__dict__:
        module.__dict__[_GRADIENTS].forget()


# A sharded parameter by the id of its module and its name; while its block runs, FSDP2 has another one there.
Sharded = Mapping[tuple[int, str], DTensor]


def sharded_parameters(layer: nn.Module) -> Sharded:
    """Return the parameters of ``layer`` that FSDP2 has sharded, for :func:`whole_blocks`. Not while its block runs."""
    return {
        (id(owner), name): x
        for owner in layer.modules()
        for name, x in owner.named_parameters(recurse=False)
        if isinstance(x, DTensor)
    }


@contextmanager
def whole_blocks(layer: nn.Module, sharded: Sharded) -> Iterator[None]:
    """Inside, the parameters of ``layer`` are whole, and may be written to; what they hold at the end is what is
    sharded from then on. Every rank comes here.
    """
    held = []
    for owner in layer.modules():
        for name, current in list(owner.named_parameters(recurse=False)):
            part = current if isinstance(current, DTensor) else sharded.get((id(owner), name))
            if part is not None:
                held.append((owner, name, current, part))
                if isinstance(current, DTensor):
                    parameter_slots(owner)[name] = nn.Parameter(_whole(part), requires_grad=False)
    try:
        yield
    finally:
        for owner, name, current, part in held:
            whole: Any = parameter_slots(owner)[name]
            write_part(part, whole.detach())
            parameter_slots(owner)[name] = current


def _whole_parameters(module: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return for each sharded parameter its names and the gathered tensor."""
    found: dict[int, nn.Parameter] = {}
    places = []
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                if id(parameter) not in found:
                    found[id(parameter)] = nn.Parameter(_whole(parameter), requires_grad=False)
                places.append((owner, name, found[id(parameter)]))
    return places


def _whole(parameter: DTensor) -> torch.Tensor:
    local: Any = parameter.to_local()
    if consists_of_tensors(local):
        names, context = local.__tensor_flatten__()
        inner = {name: _whole_rows(getattr(local, name), local.shape[0], parameter) for name in names}
        made: torch.Tensor = type(local).__tensor_unflatten__(inner, context, parameter.shape, parameter.stride())
        return made.detach()
    # Offloaded parts are gathered on the device, where the group is.
    on_mesh: Any = parameter.to(parameter.device_mesh.device_type)
    found: torch.Tensor = on_mesh.full_tensor()
    return found.to(parameter.device).detach()


def _whole_rows(inner: Tensor, rows: int, parameter: DTensor) -> Tensor:
    """Gather the tensors of a quantized weight: the rows of all ranks, or, of what has no row for each of the weight's,
    what every rank has.
    """
    if inner.ndim == 0 or inner.shape[0] != rows:
        return inner
    size = torch.Size((parameter.shape[0], *inner.shape[1:]))
    stride = torch.empty(size, device="meta").stride()
    sharded: Any = DTensor.from_local(
        inner, parameter.device_mesh, parameter.placements, run_check=False, shape=size, stride=stride
    )
    whole: Tensor = sharded.full_tensor()
    return whole
