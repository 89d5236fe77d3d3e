"""Shard weights with PyTorch's FSDP2: the weights of each block are gathered just before it runs, and freed
afterwards.

The output has the same bits as with replicated weights. For inference only: the parameters do not require
gradients. Nothing gathers the weights for good again: load the model once more.

``adapters/weights/fsdp_weights.py`` calls this for a pipeline. Tests: tests/weights/test_fsdp.py,
tests/weights/test_lora.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from para_core.instance.private_class import unwrapped_class
from para_core.instance.record import empty_during
from para_core.torch_internals import parameter_slots
from para_core.weights.parameters import FEWEST_SHARDED_ELEMENTS, consists_of_tensors, is_float8, write_shard


def shard_blocks(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    offload_policy: OffloadPolicy | None = None,
    replicated: Collection[nn.Parameter] = (),
) -> None:
    """Shard the weights of ``module`` in place over ``mesh``, with each of ``blocks`` as an FSDP2 unit.

    While one block computes, the next block is gathered. Large parameters outside of the blocks, such as text
    embeddings, are sharded too, and stay gathered during each call of ``module``.

    Args:
        module: The model. All ranks of ``mesh`` must hold the same weights and call the model equally often.
        blocks: Blocks of ``module``, in the order in which they run.
        mesh: A mesh of one dim, or of the two dims ``replicate × shard`` (HSDP).
        offload_policy: ``CPUOffloadPolicy()`` keeps this rank's shards in host memory.
        replicated: Parameters of ``module`` that stay on every rank.

    Raises:
        ValueError: If FSDP2 cannot shard the type of one of the weights. The module is then unchanged.
    """
    check_shardable(module, replicated)
    policy = offload_policy or OffloadPolicy()
    kept = set(replicated)
    # Turn gradients off, because FSDP2 requires one dtype for all parameters that take gradients, and
    # diffusers keeps some parameters in float32.
    module.requires_grad_(False)
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    # The parameters that FSDP2 leaves alone: small ones, and those that stay on every rank.
    ignored = {
        x for x in module.parameters() if id(x) not in in_blocks and x.numel() < FEWEST_SHARDED_ELEMENTS
    } | kept
    with empty_during([module, *blocks]):
        for block in blocks:
            fully_shard(
                block, mesh=mesh, reshard_after_forward=True, offload_policy=policy, ignored_params=kept
            )
        # Make the whole model the FSDP2 root of its blocks, so that the blocks share streams and can be
        # prefetched.
        fully_shard(
            module, mesh=mesh, reshard_after_forward=True, offload_policy=policy, ignored_params=ignored
        )
        for part in (module, *blocks):
            # Change the class before the slots are filled again, because they derive a private class from
            # the current class, and take its name.
            part.__class__ = _private_class(type(part), unwrapped_class(part))
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    if mesh.device_type != "cpu":
        # FSDP2 moves only the parameters that it shards to the device, so move the others here.
        for parameter in ignored:
            parameter.data = parameter.data.to(mesh.device_type)


def _private_class(fsdp_class: type, written: type) -> type:
    """Return a subclass of ``fsdp_class`` with the name and docstring of ``written``, the class in the source
    code.

    FSDP2's class of a block has another name, but diffusers' ``compile_repeated_blocks`` and transformers'
    output recorders look blocks up by class name. Renaming it in place would also affect the user's own FSDP2
    models. Blocks of one class share the returned class, and therefore their compiled graphs.
    """
    private = _PRIVATE_CLASSES.get(fsdp_class)
    if private is None:

        def construct(cls: type, /, *args: Any, **kwargs: Any) -> Any:
            # FSDP2's __new__ takes the original class from a fixed index of ``cls.__mro__``, and this
            # subclass shifts the entries by one. Therefore pass FSDP2's own class instead of ``cls``.
            return fsdp_class.__new__(fsdp_class, *args, **kwargs)

        namespace = {
            "__module__": written.__module__,
            "__qualname__": written.__qualname__,
            "__doc__": written.__doc__,
            "__new__": construct,
            "__deepcopy__": _raise_on_copy,
            "__reduce_ex__": _raise_on_copy,
        }
        private = _PRIVATE_CLASSES[fsdp_class] = type(fsdp_class)(written.__name__, (fsdp_class,), namespace)
    return private


# A map from each class of FSDP2 to its private subclass. An entry disappears when no module uses the subclass
# any more.
_PRIVATE_CLASSES: WeakValueDictionary[type, type] = WeakValueDictionary()


def _raise_on_copy(self: Any, memo_or_protocol: Any) -> Any:
    raise TypeError(
        f"this {unwrapped_class(self).__name__} cannot be copied or pickled while its weights are sharded by "
        "FSDP2: this rank holds a part of each, which refers to process groups. Save its state_dict() by "
        "torch.distributed.checkpoint; or copy the model before its weights are sharded."
    )


def check_shardable(module: nn.Module, replicated: Collection[nn.Parameter] = ()) -> None:
    """Raise ``ValueError`` if ``module`` has a weight, not among ``replicated``, that FSDP2 cannot shard.

    FSDP2 can shard a plain parameter, a DTensor, or a tensor with the method ``fsdp_pre_all_gather``, unless
    its dtype is float8.
    """
    kept = {id(x) for x in replicated}
    for name, parameter in module.named_parameters():
        if id(parameter) in kept:
            continue
        gathers_itself = hasattr(parameter, "fsdp_pre_all_gather")
        if type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor) and not gathers_itself:
            raise ValueError(
                f"{name} of this {unwrapped_class(module).__name__} is a {type(parameter).__name__}, which "
                "has no fsdp_pre_all_gather, so FSDP2 cannot shard it. Shard the weights unquantized, or "
                "quantized by torchao's int8_weight_only_quantized_training(); or leave this component "
                "replicated: components=[...] of the others."
            )
        if is_float8(parameter):
            raise ValueError(
                f"{name} of this {unwrapped_class(module).__name__} is {parameter.dtype}: its layer casts it "
                "while it computes (layerwise casting), and FSDP2 would not see that. Shard the weights in "
                "16 bits, or leave this component replicated."
            )


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards ``module`` itself, by :func:`shard_blocks` or by the user's own ``fully_shard``.

    False if only blocks inside it are sharded; :func:`shard_mesh` finds these, too, but looks at all modules.
    """
    return isinstance(module, FSDPModule)


def shard_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which FSDP2 shards ``module`` or its blocks; None if no parameter is sharded."""
    parameter = _sharded_parameter(module)
    if parameter is None:
        return None
    return parameter.device_mesh


def _sharded_parameter(module: nn.Module) -> DTensor | None:
    """Return the first parameter of ``module`` that FSDP2 shards; None if there is none."""
    parameters = (x for part in module.modules() if isinstance(part, FSDPModule) for x in part.parameters())
    return next((x for x in parameters if isinstance(x, DTensor)), None)


def ranks_per_copy(module: nn.Module) -> int:
    """Return the number of ranks among which FSDP2 divides one copy of the weights; 1 if no parameter is sharded.

    Each rank waits for these ranks whenever it gathers a block. With HSDP the ranks along ``replicate``, the
    first mesh dim, hold other copies, and a forward does not wait for them.
    """
    parameter = _sharded_parameter(module)
    if parameter is None:
        return 1
    mesh = parameter.device_mesh
    if parameter.placements[0].is_replicate():
        return mesh.size() // mesh.size(0)
    return mesh.size()


# The sharded parameters, by (id of the module, name of the parameter). A separate record is needed, because
# FSDP2 replaces a block's parameters by gathered parameters while the block runs.
ShardedParameters = Mapping[tuple[int, str], DTensor]


def sharded_parameters(layer: nn.Module) -> ShardedParameters:
    """Return the sharded parameters of ``layer`` for :func:`gathered_parameters`.

    Call this while ``layer`` does not run: FSDP2 then holds the shards, and not gathered parameters.
    """
    owned = [(owner, *item) for owner in layer.modules() for item in owner.named_parameters(recurse=False)]
    return {(id(owner), name): x for owner, name, x in owned if isinstance(x, DTensor)}


@contextmanager
def gathered_parameters(layer: nn.Module, sharded: ShardedParameters) -> Iterator[None]:
    """Gather the parameters of ``layer`` inside the ``with`` block, where they may be written to. Collective.

    On exit, the parameters are sharded again, with the values that were written to them. ``sharded``, the
    earlier result of :func:`sharded_parameters`, has the shards of blocks that are running, which FSDP2 has
    gathered.
    """
    before = []
    # Shard again what was gathered also if memory for a later parameter is lacking.
    try:
        for owner in layer.modules():
            for name, current in list(owner.named_parameters(recurse=False)):
                shard = sharded.get((id(owner), name))
                if isinstance(current, DTensor):
                    shard = current
                    gathered: Any = nn.Parameter(_gather_parameter(shard), requires_grad=False)
                    parameter_slots(owner)[name] = gathered
                if shard is not None:
                    before.append((owner, name, current, shard))
        yield
    finally:
        for owner, name, current, shard in before:
            gathered = parameter_slots(owner)[name]
            write_shard(shard, gathered.detach())
            parameter_slots(owner)[name] = current


def _gather_parameter(parameter: DTensor) -> torch.Tensor:
    """Return all values of a sharded parameter on its own device. Collective."""
    local: Any = parameter.to_local()
    if consists_of_tensors(local):
        names, context = local.__tensor_flatten__()
        inner = {name: _gather_rows(getattr(local, name), local.shape[0], parameter) for name in names}
        gathered: torch.Tensor = type(local).__tensor_unflatten__(
            inner, context, parameter.shape, parameter.stride()
        )
        return gathered.detach()
    # Gather offloaded parts on the device of the mesh, because its group may not support tensors in host
    # memory.
    on_mesh: Any = parameter.to(parameter.device_mesh.device_type)
    full: torch.Tensor = on_mesh.full_tensor()
    return full.to(parameter.device).detach()


def _gather_rows(inner: Tensor, rows: int, parameter: DTensor) -> Tensor:
    """Return ``inner``, a tensor in a quantized weight ``parameter``, with the rows of all ranks. Collective.

    ``rows`` is the number of rows of this rank's part of the weight. If ``inner`` has another number of rows,
    it is not sharded but equal on all ranks, and is returned itself.
    """
    if inner.ndim == 0 or inner.shape[0] != rows:
        return inner
    size = torch.Size((parameter.shape[0], *inner.shape[1:]))
    stride = torch.empty(size, device="meta").stride()
    sharded: Any = DTensor.from_local(
        inner, parameter.device_mesh, parameter.placements, run_check=False, shape=size, stride=stride
    )
    full: Tensor = sharded.full_tensor()
    return full
