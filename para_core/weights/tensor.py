"""Tensor parallelism: shard linear layers by columns (output channels) or by rows (input channels), as a plan
says.

As in Megatron-LM (arXiv:1909.08053), each rank holds and computes some heads of each block, and an all-reduce
after each row-sharded layer sums the results: usually one for the attention and one for the feed-forward of a
token stream, and one more for each norm over the channels of all heads. The output equals the single-device
output up to the order of sums. The sequence may also be sharded, over other mesh dims. Nothing gathers the
weights for good again: load the model once more.

``adapters/weights/tensor_weights.py`` calls this for a pipeline. What a plan names in a model is in
:mod:`.tensor_plan`, and what is refused in :mod:`.tensor_checks`. Tests: tests/weights/test_tensor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from para_core.instance.private_class import unwrapped_class
from para_core.instance.record import fill_slot
from para_core.instance.slots import Slot
from para_core.plans.module_matching import matching_modules
from para_core.torch_internals import parameter_slots
from para_core.weights.parameters import consists_of_tensors, write_shard
from para_core.weights.tensor_checks import check_plain_lora, check_tensor_plan
from para_core.weights.tensor_plan import (
    Linear,
    TensorPlan,
    base_linear,
    lora_matrices,
    part_sizes,
    planned_counts,
    planned_linears,
    planned_norms,
)

# Name of the attribute of a sharded module that holds its _ShardRecord.
_RECORD = "_para_core_tensor"


@dataclass(frozen=True)
class _Shard:
    """One parameter that is a DTensor: sharded along ``dim``, or replicated (the bias of a row-sharded
    layer).

    ``parts`` are the sizes of the parts that are concatenated along ``dim``. A replicated parameter has none,
    so its order does not change, and ``dim`` is not used.
    """

    owner: nn.Module
    name: str
    dim: int
    parts: tuple[int, ...]


@dataclass
class _ShardRecord:
    """The shards that :func:`shard_tensors` made in a model, for LoRAs that are added, merged and removed
    later.
    """

    mesh: DeviceMesh
    plan: TensorPlan
    shards: list[_Shard] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Layers share these two functions, so that layers of one class share a wrapped class. The functions
        # get the mesh as an argument, because Dynamo cannot read the mesh of a DTensor inside a quantized
        # weight.
        self.arounds = {
            "colwise": partial(_linear_by_columns, self.mesh),
            "rowwise": partial(_linear_by_rows, self.mesh),
        }


def shard_tensors(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Shard the linear layers of ``module`` and the norms in ``plan`` in place over the one-dim ``mesh``.

    The rest of ``plan`` is applied, too: numbers of heads and hidden units are divided, and modules of
    positions return this rank's part. Gradients of all weights are switched off, and all of ``module`` moves
    to the device of the mesh unless that is a CPU. All ranks must call this function, with equal weights.

    Raises:
        ValueError: ``plan`` does not fit the module, which is then unchanged.
    """
    check_tensor_plan(module, plan, mesh.size())
    record = module.__dict__[_RECORD] = _ShardRecord(mesh, plan)
    # A plain weight that every rank holds but applies to its own heads would get a part of its gradient.
    module.requires_grad_(False)
    # Each layer and norm once: a model may hold it under several names.
    for layer, style in dict(planned_linears(module, plan).values()).items():
        _shard_linear(base_linear(layer), style, record)
        _shard_loras_of(layer, style, record)
    _divide_counts(module, plan, mesh.size())
    _shard_norms(module, plan, record)
    for pattern, dim in plan.positions.items():
        for rope in matching_modules(module, pattern).values():
            fill_slot(rope, Slot.TENSOR_WEIGHTS, {"__call__": partial(_shard_outputs, mesh, dim)})
    fill_slot(module, Slot.TENSOR_WEIGHTS, {"__call__": _refuse_weight_gradients})
    if mesh.device_type != "cpu":
        module.to(mesh.device_type)


def _divide_counts(module: nn.Module, plan: TensorPlan, num_ranks: int) -> None:
    """Divide the numbers of heads and of hidden units that modules hold by the number of ranks."""
    for _, owner, attribute in planned_counts(module, plan):
        # check_tensor_plan has refused numbers that the ranks do not divide.
        setattr(owner, attribute, getattr(owner, attribute) // num_ranks)


def _shard_norms(module: nn.Module, plan: TensorPlan, record: _ShardRecord) -> None:
    """Shard the weights of the norms that ``plan`` names, and sum their squares over the ranks."""
    for norm in dict.fromkeys(planned_norms(module, plan).values()):
        _replace_parameter(norm, "weight", _distribute(_parameter_of(norm, "weight"), record.mesh, 0))
        record.shards.append(_Shard(norm, "weight", 0, ()))
        fill_slot(norm, Slot.TENSOR_WEIGHTS, {"forward": _norm_over_ranks})


def _refuse_weight_gradients(
    call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a call of a sharded model.

    Raise ``RuntimeError`` if a backward would compute gradients of its weights.

    Those of weights that every rank holds but applies to its own heads, such as norms of queries, would be
    partial sums. Gradients of the inputs are exact.
    """
    if torch.is_grad_enabled():
        wanted = [name for name, weight in module.named_parameters() if weight.requires_grad]
        if wanted:
            raise RuntimeError(
                f"this {unwrapped_class(module).__name__} has its weights sharded over heads "
                f"(weights='tensor'), for inference, and {len(wanted)} of its weights require gradients "
                f"({wanted[0]}, …). To train, use weights='fsdp' or 'replicate'. For inference use "
                "torch.no_grad(), or transformer.requires_grad_(False), on all ranks."
            )
    return call(module, *args, **kwargs)


def tensor_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which :func:`shard_tensors` sharded ``module``; None if it is not sharded."""
    record: _ShardRecord | None = module.__dict__.get(_RECORD)
    if record is None:
        return None
    return record.mesh


def shard_new_loras(module: nn.Module) -> None:
    """Shard the LoRAs added since :func:`shard_tensors`, and drop the state of removed ones.

    Every rank must call this. Raise ``ValueError`` if an added adapter is not a plain LoRA. The module is
    then unchanged.
    """
    record: _ShardRecord = module.__dict__[_RECORD]
    layers = planned_linears(module, record.plan)
    for name, (layer, _) in layers.items():
        check_plain_lora(name, layer, unwrapped_class(module).__name__)
    module.requires_grad_(False)
    present = {id(part) for part in module.modules()}
    record.shards = [shard for shard in record.shards if id(shard.owner) in present]
    for layer, style in layers.values():
        _shard_loras_of(layer, style, record)


@contextmanager
def gathered_tensors(module: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Gather the sharded parameters of ``layers`` inside the ``with`` block, where they may be written to.
    Collective.

    On exit, they are sharded again, with the values that were written to them. ``layers`` are inside
    ``module``.
    """
    record: _ShardRecord = module.__dict__[_RECORD]
    num_ranks = record.mesh.size()
    inside = {id(part) for layer in layers for part in layer.modules()}
    before = []
    # Shard again what was gathered also if memory for a later parameter is lacking.
    try:
        for shard in record.shards:
            if id(shard.owner) in inside:
                sharded: Any = _parameter_of(shard.owner, shard.name)
                full = _restore_order(sharded.full_tensor().detach(), shard.dim, shard.parts, num_ranks)
                gathered = nn.Parameter(full, requires_grad=False)
                before.append((shard, sharded))
                parameter_slots(shard.owner)[shard.name] = gathered
        yield
    finally:
        for shard, sharded in before:
            written = _parameter_of(shard.owner, shard.name).detach()
            write_shard(sharded, _order_by_rank(written, shard.dim, shard.parts, num_ranks))
            parameter_slots(shard.owner)[shard.name] = sharded


def _shard_loras_of(layer: nn.Module, style: Linear, record: _ShardRecord) -> None:
    """Shard the new LoRAs of a layer like the layer: matrix B by its outputs (colwise), or A by its inputs
    (rowwise), whose product is summed over the ranks.
    """
    for first, second in lora_matrices(layer) or ():
        matrix = first
        if style.along == "colwise":
            matrix = second
        if not isinstance(matrix.weight, DTensor):
            _shard_linear(matrix, Linear(style.along, part_sizes(base_linear(layer), style)), record)


def _shard_linear(linear: Any, style: Linear, record: _ShardRecord) -> None:
    """Shard the weight and the bias of one layer in place, and replace its forward.

    The layer has no forward on the instance, which would hide that of its class and of the slot:
    check_tensor_plan refuses one.
    """
    parts = part_sizes(linear, style)
    _shard_parameter(linear, "weight", style.dim, parts, record)
    if linear.bias is not None and style.along == "colwise":
        _shard_parameter(linear, "bias", 0, parts, record)
    elif linear.bias is not None:
        # Every rank holds the bias, and adds it after the sum over the ranks.
        _replace_parameter(
            linear, "bias", _distribute(_parameter_of(linear, "bias").detach(), record.mesh, None)
        )
        record.shards.append(_Shard(linear, "bias", 0, ()))
    fill_slot(linear, Slot.TENSOR_WEIGHTS, {"forward": record.arounds[style.along]})


def _shard_parameter(
    linear: nn.Module, name: str, dim: int, parts: tuple[int, ...], record: _ShardRecord
) -> None:
    # A rank takes a share of each part (query, key and value, for example), but a DTensor shards
    # contiguously. Therefore reorder first, which makes the shares of a rank contiguous.
    ordered = _order_by_rank(_parameter_of(linear, name).detach(), dim, parts, record.mesh.size())
    _replace_parameter(linear, name, _distribute(ordered, record.mesh, dim))
    record.shards.append(_Shard(linear, name, dim, parts))


def _order_by_rank(x: Tensor, dim: int, parts: tuple[int, ...], num_ranks: int) -> Tensor:
    """Return ``x`` reordered along ``dim``, so that chunk r of ``num_ranks`` equal chunks holds rank r's
    share of each part.

    ``parts`` are the sizes of the parts along ``dim``; without any, ``x`` is returned unchanged. With the
    parts q and k and two ranks::

        before: q0 q1 k0 k1
        after:  q0 k0 q1 k1
    """
    if not parts:
        return x
    shares = [part.chunk(num_ranks, dim) for part in x.split(parts, dim)]
    return torch.cat([chunks[rank] for rank in range(num_ranks) for chunks in shares], dim)


def _restore_order(x: Tensor, dim: int, parts: tuple[int, ...], num_ranks: int) -> Tensor:
    """Undo :func:`_order_by_rank`."""
    if not parts:
        return x
    shares = [chunk.split([size // num_ranks for size in parts], dim) for chunk in x.chunk(num_ranks, dim)]
    return torch.cat([of_rank[part] for part in range(len(parts)) for of_rank in shares], dim)


def _parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter ``name`` of ``module`` itself."""
    parameter: nn.Parameter = getattr(module, name)
    return parameter


def _replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Make ``value`` the parameter ``name`` of ``module``, which requires gradients as before."""
    gradient = _parameter_of(module, name).requires_grad
    module.register_parameter(name, nn.Parameter(value, requires_grad=gradient))


def _distribute(x: Tensor, mesh: DeviceMesh, dim: int | None) -> Tensor:
    """Return ``x``, equal on all ranks, as a DTensor sharded along ``dim``, or replicated if ``dim`` is None."""
    # Copy the part, because a view would keep all of ``x`` in memory. Move only the part to the device of the
    # mesh, which may not have enough memory for all of ``x``.
    shard = x
    placement: Placement = Replicate()
    if dim is not None:
        shard = x.chunk(mesh.size(), dim)[mesh.get_local_rank()]
        placement = Shard(dim)
    local = shard.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    sharded: Tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
    return sharded


def _shard_outputs(
    mesh: DeviceMesh, dim: int, call: Callable[..., Any], rope: nn.Module, /, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Return this rank's chunk along ``dim`` of each tensor that ``rope`` returns."""
    return tuple(x.chunk(mesh.size(), dim)[mesh.get_local_rank()] for x in call(rope, *args, **kwargs))


def _linear_by_columns(mesh: DeviceMesh, call: Callable[..., Any], linear: Any, /, x: Tensor) -> Tensor:
    """Return this rank's output channels ``[..., C_out / n]`` of a column-sharded layer.

    ``x`` ``[..., C_in]`` is equal on all ranks; ``n`` is the number of ranks. Only the backward is collective.
    """
    weight, bias = linear.weight, linear.bias
    if torch.is_grad_enabled():
        # Each rank computes its part of the gradient of x, and the backward sums the parts over the ranks.
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    if consists_of_tensors(weight):
        # A quantized weight contains DTensors, which can be multiplied only with DTensors.
        out: Tensor = call(linear, _rows_as_dtensor(x, mesh, Replicate())).to_local()
        return out.reshape(*x.shape[:-1], -1)
    if bias is not None:
        bias = bias.to_local()
    return F.linear(x, weight.to_local(), bias)


def _linear_by_rows(mesh: DeviceMesh, call: Callable[..., Any], linear: Any, /, x: Tensor) -> Tensor:
    """Return all output channels ``[..., C_out]`` of a row-sharded layer: the sum of the products of all
    ranks. Collective.

    ``x`` ``[..., C_in / n]`` holds this rank's input channels; ``n`` is the number of ranks.
    """
    weight, bias = linear.weight, linear.bias
    if consists_of_tensors(weight):
        rows: DTensor = call(linear, _rows_as_dtensor(x, mesh, Shard(-1)))
        return rows.redistribute(mesh, [Replicate()]).to_local().reshape(*x.shape[:-1], -1)
    # Multiply plain tensors: under torch.compile, DTensor cannot trace a product whose length is a product of
    # three symbols (torch/fx/experimental/proxy_tensor.py, _build_proxy_for_sym_expr).
    part = DTensor.from_local(F.linear(x, weight.to_local()), mesh, [Partial()], run_check=False)
    out: Tensor = part.redistribute(mesh, [Replicate()]).to_local()
    if bias is None:
        return out
    out = out + bias.to_local()
    return out


def _rows_as_dtensor(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return ``x``, ``[..., C]``, as a DTensor ``[rows, C]``, to be multiplied with a quantized weight.

    DTensor caches how it shards a product by the sizes and strides of ``x``, unless a size is symbolic. In a
    graph for all image sizes, the text that was split from text and image tokens has plain sizes, and in its
    batch dim a symbolic stride, which cannot be hashed. Two dims have no such stride.
    """
    return DTensor.from_local(x.reshape(-1, x.shape[-1]), mesh, [placement], run_check=False)


def _norm_over_ranks(call: Callable[..., Any], norm: Any, /, x: Tensor) -> Tensor:
    """Return the RMS norm of ``x``, ``[B, S, C / n]``, over the channels of all ranks, computed in float32 or
    float64. Collective.
    """
    weight: DTensor = norm.weight
    mesh, channels = weight.device_mesh, weight.shape[0]
    eps = norm.eps
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = DTensor.from_local(wide.square().sum(-1, keepdim=True), mesh, [Partial()], run_check=False)
    # Each rank scales its own channels by the mean, so the gradient of the mean is a sum over the ranks as
    # well.
    total: Tensor = squares.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    mean = total / channels
    return (wide * torch.rsqrt(mean + eps) * weight.to_local().to(wide.dtype)).to(x.dtype)
