"""Tensor plans, which say how the linear layers of a model are sharded, and the layers that a plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor

from para_core.instance.private_class import unwrapped_class
from para_core.plans.module_matching import matching_modules
from para_core.weights.parameters import is_float8


@dataclass(frozen=True)
class Linear:
    """The sharding of one linear layer.

    Args:
        along (`"colwise"` or `"rowwise"`): ``"colwise"`` gives each rank some of the output channels. ``"rowwise"``
            gives each rank some of the input channels, and sums the results over the ranks.
        parts (`tuple[int, ...]`, *optional*, defaults to `()`): Relative sizes of the parts that are concatenated along
            the sharded dim, such as query, key and value, or the two halves of a gate. Each part is sharded separately.
            Empty means a single part.
        parts_from (`str`, *optional*, defaults to `""`): Name of the attribute of the layer that holds these relative
            sizes. Used if ``parts`` is empty.
    """

    along: Literal["colwise", "rowwise"]
    parts: tuple[int, ...] = ()
    parts_from: str = ""


COLUMNS, ROWS = Linear("colwise"), Linear("rowwise")


@dataclass(frozen=True)
class TensorPlan:
    """The tensor-parallel plan of one model: each rank computes some heads and some feed-forward hidden units.

    Module names are patterns: ``*`` matches one part between dots. Patterns that match no module are ignored.

    Args:
        linears (`Mapping[str, Linear]`): The sharding of each linear layer, by name.
        heads (`tuple[str, ...]`, *optional*, defaults to `()`): Names of modules whose attribute ``heads`` is divided
            by the number of ranks.
        counts (`Mapping[str, str]`, *optional*, defaults to `{}`): By module name, another attribute that is divided by
            the number of ranks, such as a number of hidden units.
        norms (`tuple[str, ...]`, *optional*, defaults to `()`): Names of RMS norms over the channels of all heads. The
            sum of squares of a token, which such a norm needs, is added up over the ranks.
        positions (`Mapping[str, int]`, *optional*, defaults to `{}`): For modules that return a tuple of tensors for
            all heads, such as rotary embeddings: the dim of heads or channels, by module name. Each rank takes its part
            of each tensor along this dim.
    """

    linears: Mapping[str, Linear]
    heads: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    norms: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)


def published_tensor_plan(published: Mapping[str, Any]) -> TensorPlan:
    """Return the :class:`TensorPlan` that is equivalent to a diffusers ``_tp_plan``.

    Args:
        published: The style of each linear layer, by name: ``"colwise"``, ``"rowwise"``, ``PackedColwiseParallel`` or
            ``PackedRowwiseParallel``.

    Raises:
        ValueError: If the plan has another style.
    """
    linears = {}
    for name, style in published.items():
        if style in ("colwise", "rowwise"):
            linears[name] = Linear(style)
        elif type(style).__name__ == "PackedColwiseParallel":
            linears[name] = Linear("colwise", tuple(style.blocks or ()), "_tp_packed_col_blocks")
        elif type(style).__name__ == "PackedRowwiseParallel":
            linears[name] = Linear("rowwise", tuple(style.blocks or ()), "_tp_packed_row_blocks")
        else:
            raise ValueError(
                f"a _tp_plan says {style!r} of {name!r}; expected 'colwise', 'rowwise', PackedColwiseParallel or "
                "PackedRowwiseParallel."
            )
    return TensorPlan(linears)


def planned_linears(module: nn.Module, plan: TensorPlan) -> dict[str, tuple[nn.Module, Linear]]:
    """Return the linear layers that ``plan`` shards, each with its :class:`Linear` entry, by name in ``module``."""
    return {
        name: (layer, style)
        for pattern, style in plan.linears.items()
        for name, layer in matching_modules(module, pattern).items()
    }


def require_tensor_plan_fits(module: nn.Module, plan: TensorPlan, ranks: int) -> None:
    """Raise ``ValueError`` if ``plan`` cannot shard ``module`` over ``ranks`` ranks. Changes nothing."""
    cls, linears = unwrapped_class(module).__name__, planned_linears(module, plan)
    if not linears:
        raise ValueError(f"the tensor plan of {cls} names no module that it has.")
    attentions = [attention for pattern in plan.heads for attention in matching_modules(module, pattern).values()]
    heads = {int(attention.heads) for attention in attentions}  # type: ignore[arg-type]
    of_config = getattr(getattr(module, "config", None), "num_attention_heads", None)
    heads |= {of_config} if isinstance(of_config, int) else set()
    for number in sorted(heads):
        if number % ranks:
            fitting = [size for size in range(2, number + 1) if number % size == 0]
            raise ValueError(
                f"{cls} has {number} heads, which {ranks} tensor ranks do not divide; max_tensor_dim_size may be one "
                f"of {fitting}. weights='fsdp' takes any number of ranks."
            )
    for name, (layer, style) in linears.items():
        require_plain_lora(name, layer, cls)
        linear = base_linear(layer)
        if not isinstance(linear, nn.Linear):
            raise ValueError(
                f"{name} of this {cls} is a {type(linear).__name__}, and tensor parallelism shards nn.Linear. "
                "weights='fsdp' takes any layer."
            )
        if type(linear.weight) is not nn.Parameter and not isinstance(linear.weight, DTensor):
            raise ValueError(
                f"{name} of this {cls} has a {type(linear.weight).__name__} as its weight, which PyTorch cannot shard; "
                "expected a plain nn.Parameter. Shard the weights unquantized, then quantize each rank's part; "
                "or leave this component replicated."
            )
        if is_float8(linear.weight):
            raise ValueError(
                f"{name} of this {cls} has a weight in {linear.weight.dtype}, which it casts while it computes "
                "(layerwise casting); tensor parallelism computes with the weight as it is. Shard the weights in 16 "
                "bits, or leave this component replicated."
            )
        kind: Any = unwrapped_class(linear)
        packed = not linear.weight.is_floating_point() or linear.weight.shape != (
            linear.out_features,
            linear.in_features,
        )
        if packed or kind.forward is not nn.Linear.forward:
            raise ValueError(
                f"{name} of this {cls} is a {kind.__name__} with a weight {list(linear.weight.shape)} in "
                f"{linear.weight.dtype}, which computes otherwise than nn.Linear, perhaps because its file is "
                "quantized; tensor parallelism multiplies with the weight itself. Use weights='fsdp', or replicated "
                "weights."
            )
        weight_dim = 0 if style.along == "colwise" else 1
        for size in parts_of(linear, style) or (linear.weight.shape[weight_dim],):
            if size % ranks:
                raise ValueError(f"{name} of this {cls} has {size} channels, which {ranks} tensor ranks do not divide.")
    _require_no_more(module, linears)


def _require_no_more(module: nn.Module, linears: dict[str, tuple[nn.Module, Linear]]) -> None:
    """Raise ``ValueError`` if an attention module has linear layers that the plan does not name.

    Such a layer would compute all heads, while the other layers compute only this rank's heads.
    """
    for at, attention in module.named_modules():
        if isinstance(getattr(attention, "heads", None), int) and any(name.startswith(f"{at}.") for name in linears):
            for name, part in attention.named_modules(prefix=at):
                # Skip the matrices of a LoRA, which are sharded together with the layer that they adapt.
                planned = any(name == linear or name.startswith(f"{linear}.") for linear in linears)
                if isinstance(part, nn.Linear) and not planned:
                    raise ValueError(
                        f"{name} of this {unwrapped_class(module).__name__} is a linear layer of attention that is in "
                        "no tensor plan, and would compute all heads where a rank has some. Fused projections: "
                        "transformer.unfuse_qkv_projections(); an IP-Adapter: pipe.unload_ip_adapter(). "
                        "weights='fsdp' takes any layer."
                    )


def parts_of(linear: Any, style: Linear) -> tuple[int, ...]:
    """Return the sizes of the parts (query, key and value, for example) along the sharded dim; empty for one part."""
    relative = style.parts or tuple(getattr(linear, style.parts_from, None) or () if style.parts_from else ())
    if len(relative) < 2:
        return ()
    total = linear.weight.shape[0 if style.along == "colwise" else 1]
    return tuple(total // sum(relative) * part for part in relative)


def base_linear(layer: nn.Module) -> Any:
    """Return the layer inside a peft adapter, or ``layer`` itself if ``layer`` is not an adapter."""
    return getattr(layer, "base_layer", layer)


def lora_matrices(layer: nn.Module) -> list[tuple[nn.Module, nn.Module]] | None:
    """Return the matrices (A, B) of each LoRA of ``layer``, possibly none; None if ``layer`` has no place for LoRAs."""
    first, second = getattr(layer, "lora_A", None), getattr(layer, "lora_B", None)
    if not isinstance(first, nn.ModuleDict) or not isinstance(second, nn.ModuleDict):
        return None
    return [(first[name], second[name]) for name in first]


def require_plain_lora(name: str, layer: Any, cls: str) -> None:
    """Raise ``ValueError`` if ``layer``, ``name`` in a model of class ``cls``, has an adapter that is no plain LoRA."""
    if not hasattr(layer, "base_layer"):
        return
    pairs = lora_matrices(layer)
    # After its last LoRA was deleted, a layer has no pairs, and computes as without a LoRA.
    if pairs is None or not all(isinstance(matrix, nn.Linear) for pair in pairs for matrix in pair):
        kind = f"{type(layer).__module__.rpartition('.')[0].rpartition('.')[2]}'s {type(layer).__name__}"
        problem = "which is no sum of the layer and a product of two matrices"
    elif getattr(layer, "lora_variant", None) or any(getattr(layer, "use_dora", {}).values()):
        kind, problem = (
            "LoRA with a norm over the whole weight (DoRA) or another variant",
            "which needs more than a rank's part",
        )
    else:
        return
    raise ValueError(
        f"{name} of this {cls} has an adapter, {kind}, {problem}. Fuse it first (pipe.fuse_lora(); "
        "pipe.unload_lora_weights()), or take weights='fsdp', which takes any layer."
    )
