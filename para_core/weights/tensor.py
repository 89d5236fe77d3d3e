"""Tensor parallelism: shard linear layers by columns (output channels) or by rows (input channels), as a plan says.

As in Megatron-LM (arXiv:1909.08053), each rank holds and computes some heads of each block, and two all-reduces per
block and token stream sum the results. The output equals the single-device output up to the order of sums. The sequence
may also be sharded, over other mesh dims.
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from para_core.instance.private_class import unwrapped_class
from para_core.instance.record import Around, empty_slots, fill_slot, fill_slots
from para_core.instance.slots import Slot
from para_core.plans.module_matching import matching_modules
from para_core.torch_internals import parameter_slots
from para_core.weights.parameters import GRADIENTS, Gradients, consists_of_tensors, map_plain_tensors, plain_tensors
from para_core.weights.tensor_plan import (
    Linear,
    TensorPlan,
    base_linear,
    lora_matrices,
    parts_of,
    planned_linears,
    require_plain_lora,
    require_tensor_plan_fits,
)

# Name of the attribute of a sharded module that holds its _Record.
_RECORD = "_para_core_tensor"


class _ForwardOfInstance:
    """A wrapper of the ``forward`` that a hook, such as one of accelerate, has set on an instance.

    Other code may keep a reference to it and wrap it again. After :meth:`remove` it only calls the original
    ``forward``.
    """

    def __init__(self, instance: Any, around: Around) -> None:
        self._instance, self._around, self._removed = instance, around, False
        self._before: Callable[..., Any] = vars(instance)["forward"]
        instance.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._removed:
            return self._before(*args, **kwargs)
        return self._around(lambda _, *rest, **named: self._before(*rest, **named), self._instance, *args, **kwargs)

    def remove(self) -> None:
        """Restore the ``forward`` attribute of the instance, unless other code has replaced it."""
        self._removed = True
        if vars(self._instance).get("forward") is self:
            self._instance.forward = self._before


@dataclass
class _Record:
    """The state of a model sharded by :func:`shard_tensors`, needed to undo the sharding."""

    mesh: DeviceMesh
    plan: TensorPlan
    # One entry per sharded parameter: (module, name, sharded dim, sizes of the parts concatenated along this dim).
    shards: list[tuple[nn.Module, str, int, tuple[int, ...]]] = field(default_factory=list)
    # For each module attribute (such as the number of heads) that was divided: (module, attribute, value before).
    counts: list[tuple[nn.Module, str, int]] = field(default_factory=list)
    # Linear layers that are sharded but not wrapped yet, by columns (key True) and by rows (key False).
    sharded: dict[bool, list[nn.Module]] = field(default_factory=lambda: {False: [], True: []})
    wrapped: list[nn.Module] = field(default_factory=list)
    forwards: list[_ForwardOfInstance] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Layers share these two functions, so that layers of one class share a wrapped class. The functions get the
        # mesh as an argument, because Dynamo cannot read the mesh of a DTensor inside a quantized weight.
        self.arounds = {True: partial(_linear_by_columns, self.mesh), False: partial(_linear_by_rows, self.mesh)}


def shard_tensors(module: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Shard the linear layers of ``module`` in place over the one-dim ``mesh``. All ranks must call this function, with
    equal weights. Raise ``ValueError`` if ``plan`` does not fit the module, which is then unchanged.
    """
    require_tensor_plan_fits(module, plan, mesh.size())
    layers = planned_linears(module, plan).values()
    # Store the record before the first change, so that discard_tensors can undo a failure.
    record = module.__dict__[_RECORD] = _Record(mesh, plan)
    gradients = module.__dict__[GRADIENTS] = Gradients()
    gradients.stop(module)
    for layer, style in layers:
        _shard_linear(base_linear(layer), style, record)
        _shard_lora(layer, style, record)
    for pattern, name in (*((pattern, "heads") for pattern in plan.heads), *plan.counts.items()):
        for owner in matching_modules(module, pattern).values():
            number: Any = getattr(owner, name)
            record.counts.append((owner, name, number))
            setattr(owner, name, number // mesh.size())
    norms = [norm for pattern in plan.norms for norm in matching_modules(module, pattern).values()]
    for norm in norms:
        _replace(norm, "weight", _distributed(_parameter(norm, "weight"), mesh, 0))
        record.shards.append((norm, "weight", 0, ()))
    _wrap_forward(norms, _norm_over_ranks, record)
    _wrap_linears(record)
    for pattern, dim in plan.positions.items():
        for rope in matching_modules(module, pattern).values():
            fill_slot(rope, Slot.TENSOR_WEIGHTS, {"__call__": partial(_own_part, mesh, dim)})
            record.wrapped.append(rope)
    fill_slot(module, Slot.TENSOR_WEIGHTS, {"__call__": _without_gradients})
    record.wrapped.append(module)
    if mesh.device_type != "cpu":
        module.to(mesh.device_type)


def _without_gradients(call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a call of a sharded model. Raise ``RuntimeError`` if a backward would compute gradients of its weights.

    Those of weights that every rank holds but applies to its own heads, such as norms of queries, would be partial
    sums. Gradients of the inputs are exact.
    """
    if torch.is_grad_enabled():
        wanted = [name for name, weight in module.named_parameters() if weight.requires_grad]
        if wanted:
            raise RuntimeError(
                f"this {unwrapped_class(module).__name__} has its weights sharded over heads (weights='tensor'), for "
                f"inference, and {len(wanted)} of its weights require gradients ({wanted[0]}, …). To train, use "
                "weights='fsdp' or 'replicate'. For inference use torch.no_grad(), or "
                "transformer.requires_grad_(False), on all ranks."
            )
    return call(module, *args, **kwargs)


def tensor_mesh(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh over which :func:`shard_tensors` sharded ``module``; None if it is not sharded."""
    record: _Record | None = module.__dict__.get(_RECORD)
    return None if record is None else record.mesh


def gather_tensors(module: nn.Module) -> None:
    """Undo :func:`shard_tensors`: gather all weights on every rank. Every rank of the mesh must call this function.

    Raises:
        RuntimeError: A weight was replaced by one that PyTorch cannot gather. The module is then unchanged.
    """
    record: _Record = module.__dict__[_RECORD]
    _forget_removed(module, record)
    for owner, name, *_ in record.shards:
        weight = _parameter(owner, name)
        if not all(isinstance(inner, DTensor) for inner in plain_tensors(weight)):
            at, kind = next(at for at, part in module.named_modules() if part is owner), type(weight).__name__
            raise RuntimeError(
                f"{at}.{name} of this {unwrapped_class(module).__name__} is a {kind}, which PyTorch cannot gather "
                "again. Load the pipeline again."
            )
    whole_weights = []
    for owner, name, dim, parts in record.shards:
        weight = _parameter(owner, name)

        def gathered(inner: Any, length: int = weight.shape[dim], dim: int = dim, parts: Any = parts) -> Tensor:
            # Of the tensors inside a quantized weight, only those with one entry per channel of the sharded dim (such
            # as scales) must be reordered.
            whole = _whole(inner)
            fits = inner.ndim > dim and inner.shape[dim] == length
            return _ordered(whole, dim, parts, record.mesh.size(), back=True) if fits else whole

        whole_weights.append((owner, name, map_plain_tensors(gathered, weight.detach())))
    # Change the module only now: if a collective fails, it is still sharded, and this function can be called again.
    _compute_whole(record)
    for owner, name, whole in whole_weights:
        _replace(owner, name, whole)
    del module.__dict__[_RECORD]
    module.__dict__.pop(GRADIENTS).restore()


def _whole(part: Any) -> Tensor:
    """Return the whole tensor of a DTensor. Collective. Sends 8-bit elements as bytes: gloo cannot send float8."""
    sent, sizes = part, {"shape": part.shape, "stride": part.stride()}
    if part.dtype.itemsize == 1:
        as_bytes = part.to_local().view(torch.uint8)
        sent = DTensor.from_local(as_bytes, part.device_mesh, part.placements, run_check=False, **sizes)
    whole: Tensor = sent.full_tensor()
    return whole if sent is part else whole.view(part.dtype)


def discard_tensors(module: nn.Module) -> None:
    """Undo :func:`shard_tensors` on this rank without communication, even if it failed half-way. Parameters stay
    sharded, so the caller must put the whole ones back.
    """
    record: _Record | None = module.__dict__.pop(_RECORD, None)
    module.__dict__.pop(GRADIENTS, None)
    if record is not None:
        _compute_whole(record)


def _compute_whole(record: _Record) -> None:
    """Restore the numbers of heads and hidden units that sharding had divided, and remove the wrappers."""
    for counted, name, number in record.counts:
        setattr(counted, name, number)
    empty_slots(record.wrapped, Slot.TENSOR_WEIGHTS)
    for forward in record.forwards:
        forward.remove()


def shard_new_loras(module: nn.Module) -> None:
    """Shard the LoRAs added since :func:`shard_tensors`, and drop the state of removed ones. Every rank must call this.
    Raise ``ValueError`` if an added adapter is not a plain LoRA. The module is then unchanged.
    """
    record: _Record = module.__dict__[_RECORD]
    layers = planned_linears(module, record.plan)
    for name, (layer, _) in layers.items():
        require_plain_lora(name, layer, unwrapped_class(module).__name__)
    module.__dict__[GRADIENTS].stop(module)
    _forget_removed(module, record)
    for layer, style in layers.values():
        _shard_lora(layer, style, record)
    _wrap_linears(record)


def _forget_removed(module: nn.Module, record: _Record) -> None:
    present = {id(part) for part in module.modules()}
    record.shards = [shard for shard in record.shards if id(shard[0]) in present]
    record.wrapped = [wrapped for wrapped in record.wrapped if id(wrapped) in present]


@contextmanager
def whole_tensors(module: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Gather the sharded parameters of ``layers`` inside the ``with`` block, where they may be written to. Collective.

    On exit, they are sharded again, with the values that were written to them. ``layers`` are inside ``module``.
    """
    record: _Record = module.__dict__[_RECORD]
    own = {id(part) for layer in layers for part in layer.modules()}
    held = []
    for owner, name, dim, parts in record.shards:
        if id(owner) in own:
            sharded: Any = _parameter(owner, name)
            whole = _ordered(sharded.full_tensor().detach(), dim, parts, record.mesh.size(), back=True)
            held.append((owner, name, dim, parts, sharded))
            parameter_slots(owner)[name] = nn.Parameter(whole, requires_grad=False)
    try:
        yield
    finally:
        for owner, name, dim, parts, sharded in held:
            whole = _ordered(_parameter(owner, name).detach(), dim, parts, record.mesh.size())
            write_part(sharded, whole)
            parameter_slots(owner)[name] = sharded


def write_part(sharded: DTensor, whole: Tensor) -> None:
    """Copy this rank's part of ``whole`` into ``sharded``. No communication: ``whole`` must be equal on all ranks."""
    with torch.no_grad():
        part = distribute_tensor(
            whole.to(sharded.device), sharded.device_mesh, sharded.placements, src_data_rank=None
        ).to_local()
        sharded.to_local().copy_(part)


def _shard_lora(layer: nn.Module, style: Linear, record: _Record) -> None:
    """Shard the new LoRAs of a layer like the layer: matrix B by its outputs (colwise), or A by its inputs (rowwise),
    whose product is summed over the ranks.
    """
    for first, second in lora_matrices(layer) or ():
        matrix = second if style.along == "colwise" else first
        if not isinstance(matrix.weight, DTensor):
            _shard_linear(matrix, Linear(style.along, parts_of(base_linear(layer), style)), record)


def _shard_linear(linear: Any, style: Linear, record: _Record) -> None:
    colwise, parts = style.along == "colwise", parts_of(linear, style)
    dims = {"weight": 0 if colwise else 1, **({} if linear.bias is None else {"bias": 0 if colwise else None})}
    for name, dim in dims.items():
        whole = _parameter(linear, name).detach()
        # A rank takes a share of each part (query, key and value, for example), but a DTensor shards contiguously.
        # Therefore reorder first, which makes the shares of a rank contiguous.
        ordered = whole if dim is None else _ordered(whole, dim, parts, record.mesh.size())
        _replace(linear, name, _distributed(ordered, record.mesh, dim))
        record.shards.append((linear, name, dim or 0, () if dim is None else parts))
    record.sharded[colwise].append(linear)


def _ordered(x: Tensor, dim: int, parts: tuple[int, ...], ranks: int, *, back: bool = False) -> Tensor:
    """Reorder ``x`` along ``dim`` so that chunk r of ``ranks`` equal chunks holds rank r's share of each part, or undo
    this (``back``). ``parts`` are the sizes of the parts along ``dim``; without any, ``x`` is returned unchanged.
    """
    if not parts:
        return x
    shares = [size // ranks for size in parts]
    if not back:
        of_parts = [part.split(share, dim) for part, share in zip(x.split(parts, dim), shares, strict=True)]
        return torch.cat([of_part[rank] for rank in range(ranks) for of_part in of_parts], dim)
    runs = [run.split(shares, dim) for run in x.chunk(ranks, dim)]
    return torch.cat([runs[rank][part] for part in range(len(parts)) for rank in range(ranks)], dim)


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    parameter: nn.Parameter = getattr(module, name)
    return parameter


def _replace(module: nn.Module, name: str, value: Tensor) -> None:
    gradient = _parameter(module, name).requires_grad
    module.register_parameter(name, nn.Parameter(value, requires_grad=gradient))


def _distributed(x: Tensor, mesh: DeviceMesh, dim: int | None) -> Tensor:
    """Return ``x``, equal on all ranks, as a DTensor sharded along ``dim``, or replicated if ``dim`` is None."""
    # Copy the part, because a view would keep all of ``x`` in memory. Move only the part to the device of the mesh,
    # which may not have enough memory for all of ``x``.
    own = x if dim is None else x.chunk(mesh.size(), dim)[mesh.get_local_rank()]
    placement = Replicate() if dim is None else Shard(dim)
    local = own.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    sharded: Tensor = DTensor.from_local(local, mesh, [placement], run_check=False)
    return sharded


def _own_part(
    mesh: DeviceMesh, dim: int, call: Callable[..., Any], rope: nn.Module, /, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    return tuple(x.chunk(mesh.size(), dim)[mesh.get_local_rank()] for x in call(rope, *args, **kwargs))


def _wrap_linears(record: _Record) -> None:
    """Wrap the layers in ``record.sharded``, so that each computes with its part of the weight, and clear it."""
    for colwise, linears in record.sharded.items():
        _wrap_forward(linears, record.arounds[colwise], record)
        linears.clear()


def _wrap_forward(modules: list[nn.Module], around: Callable[..., Any], record: _Record) -> None:
    fill_slots(modules, Slot.TENSOR_WEIGHTS, {"forward": around})
    # A hook (offload, casting) may have set a forward on the instance, which hides the forward of the class, so wrap
    # both.
    record.forwards += [_ForwardOfInstance(module, around) for module in modules if "forward" in vars(module)]
    record.wrapped += modules


def _linear_by_columns(mesh: DeviceMesh, call: Callable[..., Any], linear: Any, /, x: Tensor) -> Tensor:
    """Return this rank's output channels ``[..., C_out / n]`` of a column-sharded layer.

    ``x`` ``[..., C_in]`` is equal on all ranks; ``n`` is the number of ranks.
    """
    weight, bias = linear.weight, linear.bias
    if torch.is_grad_enabled():
        # Each rank computes its part of the gradient of x, and the backward sums the parts over the ranks.
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    if consists_of_tensors(weight):
        # A quantized weight contains DTensors, which can be multiplied only with DTensors.
        out: Tensor = call(linear, DTensor.from_local(x, mesh, [Replicate()], run_check=False)).to_local()
        return out
    return F.linear(x, weight.to_local(), None if bias is None else bias.to_local())


def _linear_by_rows(mesh: DeviceMesh, call: Callable[..., Any], linear: Any, /, x: Tensor) -> Tensor:
    """Return all output channels ``[..., C_out]`` of a row-sharded layer: the sum of the products of all ranks.

    ``x`` ``[..., C_in / n]`` holds this rank's input channels; ``n`` is the number of ranks.
    """
    weight, bias = linear.weight, linear.bias
    if consists_of_tensors(weight):
        part, bias = call(linear, DTensor.from_local(x, mesh, [Shard(-1)], run_check=False)), None
    else:
        # Multiply plain tensors: under torch.compile, DTensor cannot trace a product whose length is a product of three
        # symbols (torch/fx/experimental/proxy_tensor.py, _build_proxy_for_sym_expr).
        part = DTensor.from_local(F.linear(x, weight.to_local()), mesh, [Partial()], run_check=False)
    out: Tensor = part.redistribute(mesh, [Replicate()]).to_local()
    return out if bias is None else out + bias.to_local()


def _norm_over_ranks(call: Callable[..., Any], norm: Any, /, x: Tensor) -> Tensor:
    """Return the RMS norm of ``x``, ``[B, S, C / n]``, over the channels of all ranks, computed in float32."""
    weight: DTensor = norm.weight
    mesh, channels = weight.device_mesh, weight.shape[0]
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    wide = x.float()
    squares = DTensor.from_local(wide.square().sum(-1, keepdim=True), mesh, [Partial()], run_check=False)
    # Each rank scales its own channels by the mean, so the gradient of the mean is a sum over the ranks as well.
    total: Tensor = squares.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    mean = total / channels
    return (wide * torch.rsqrt(mean + eps) * weight.to_local().float()).to(x.dtype)
