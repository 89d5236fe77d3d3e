"""Checks of a model before tensor parallelism shards it by a plan, and of LoRAs that are added later.

Nothing is changed here. Not checked are the outputs of modules of positions (``TensorPlan.positions``), which
only a call shows: their dim has the heads or channels of the attention, whose numbers are checked.
:mod:`.tensor` calls this. Tests: tests/weights/test_tensor.py, tests/weights/test_quantized_files.py.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from para_core.instance.private_class import unwrapped_class
from para_core.weights.parameters import is_float8
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


def check_tensor_plan(module: nn.Module, plan: TensorPlan, ranks: int) -> None:
    """Raise ``ValueError`` if ``plan`` cannot shard ``module`` over ``ranks`` ranks. Changes nothing."""
    cls, linears = unwrapped_class(module).__name__, planned_linears(module, plan)
    if not linears:
        raise ValueError(f"the tensor plan of {cls} names no module that it has.")
    _check_heads(module, cls, ranks)
    _check_counts(module, plan, cls, ranks)
    _check_norms(module, plan, cls, ranks)
    for name, (layer, style) in linears.items():
        check_plain_lora(name, layer, cls)
        linear = base_linear(layer)
        _check_linear(name, linear, cls)
        if style.parts_from and not (style.parts or getattr(linear, style.parts_from, None)):
            raise ValueError(
                f"{name} of this {cls} has no {style.parts_from!r} with the sizes of its parts. Correct "
                "Linear(parts_from=...) of its tensor plan, or use weights='fsdp'."
            )
        channels = linear.weight.shape[style.dim]
        sizes = part_sizes(linear, style) or (channels,)
        if sum(sizes) != channels or min(sizes) < 0:
            raise ValueError(
                f"{name} of this {cls} has {channels} channels, which the sizes of its {len(sizes)} parts do "
                "not divide. Correct Linear(parts=...) of its tensor plan, or use weights='fsdp'."
            )
        for size in sizes:
            if size % ranks:
                raise ValueError(
                    f"{name} of this {cls} has {size} channels, which {ranks} tensor ranks do not divide."
                )
    _check_all_planned(module, linears)


def _check_heads(module: nn.Module, cls: str, ranks: int) -> None:
    """Raise ``ValueError`` if the ranks do not divide the heads that the config of ``module`` names."""
    number = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if isinstance(number, int) and number % ranks:
        _raise_undivided_heads(number, cls, ranks)


def _check_counts(module: nn.Module, plan: TensorPlan, cls: str, ranks: int) -> None:
    """Raise ``ValueError`` unless each number of heads and of hidden units is there, and the ranks divide it."""
    for name, owner, attribute in planned_counts(module, plan):
        number: Any = getattr(owner, attribute, None)
        if not isinstance(number, int):
            raise ValueError(
                f"{name} of this {cls} has no number {attribute!r}, which its tensor plan divides. Correct the heads "
                "and counts of the plan, or use weights='fsdp'."
            )
        if number % ranks and attribute == "heads":
            _raise_undivided_heads(number, cls, ranks)
        if number % ranks:
            raise ValueError(
                f"{name} of this {cls} has {attribute}={number}, which {ranks} tensor ranks do not divide. Use "
                "other max_tensor_dim_size, or weights='fsdp', which takes any number of ranks."
            )


def _raise_undivided_heads(number: int, cls: str, ranks: int) -> NoReturn:
    if number == 1:
        raise ValueError(
            f"{cls} has 1 head, which {ranks} tensor ranks cannot share. weights='fsdp' takes any number of ranks."
        )
    fitting = [size for size in range(2, number + 1) if number % size == 0]
    raise ValueError(
        f"{cls} has {number} heads, which {ranks} tensor ranks do not divide; max_tensor_dim_size "
        f"may be one of {fitting}. weights='fsdp' takes any number of ranks."
    )


def _check_norms(module: nn.Module, plan: TensorPlan, cls: str, ranks: int) -> None:
    """Raise ``ValueError`` if a norm over all heads is no RMS norm, or the ranks do not divide its channels.

    A norm is taken for an RMS norm if it is no ``nn.LayerNorm`` and has no bias, because libraries have RMS
    norms of their own.
    """
    for name, norm in planned_norms(module, plan).items():
        _check_forward(name, norm, cls)
        if isinstance(norm, nn.LayerNorm) or getattr(norm, "bias", None) is not None:
            raise ValueError(
                f"{name} of this {cls} is a {type(norm).__name__} that subtracts a mean or has a bias; tensor "
                "parallelism computes RMS norms over all heads. weights='fsdp' takes any layer."
            )
        weight: Any = getattr(norm, "weight", None)
        if weight is None or weight.shape[0] % ranks:
            size = None if weight is None else list(weight.shape)
            raise ValueError(
                f"{name} of this {cls} has a weight of the shape {size}; expected channels that {ranks} tensor ranks "
                "divide. weights='fsdp' takes any layer."
            )


def _check_forward(name: str, layer: nn.Module, cls: str) -> None:
    """Raise ``ValueError`` if a hook has set a forward on the instance, which would not run any more."""
    if "forward" in vars(layer):
        raise ValueError(
            f"{name} of this {cls} has a forward of its own, as the hooks of offload and of layerwise casting set it, "
            "and tensor parallelism replaces it. Shard the weights before such hooks are added, remove them "
            "(pipe.remove_all_hooks()), or use weights='fsdp'."
        )


def _check_linear(name: str, linear: Any, cls: str) -> None:
    """Raise ``ValueError`` unless ``linear``, ``name`` in a model of class ``cls``, computes as nn.Linear
    does.
    """
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"{name} of this {cls} is a {type(linear).__name__}, and tensor parallelism shards nn.Linear. "
            "weights='fsdp' takes any layer."
        )
    if type(linear.weight) is not nn.Parameter:
        raise ValueError(
            f"{name} of this {cls} has a {type(linear.weight).__name__} as its weight, which PyTorch cannot "
            "shard; expected a plain nn.Parameter. Shard the weights unquantized and once, then quantize each "
            "rank's part; or leave this component replicated."
        )
    if is_float8(linear.weight):
        raise ValueError(
            f"{name} of this {cls} has a weight in {linear.weight.dtype}, which it casts while it computes "
            "(layerwise casting); tensor parallelism computes with the weight as it is. Shard the weights "
            "in 16 bits, or leave this component replicated."
        )
    _check_forward(name, linear, cls)
    kind: Any = unwrapped_class(linear)
    packed = not linear.weight.is_floating_point() or linear.weight.shape != (
        linear.out_features,
        linear.in_features,
    )
    if packed or kind.forward is not nn.Linear.forward:
        raise ValueError(
            f"{name} of this {cls} is a {kind.__name__} with a weight {list(linear.weight.shape)} in "
            f"{linear.weight.dtype}, which computes otherwise than nn.Linear, perhaps because its file is "
            "quantized; tensor parallelism multiplies with the weight itself. Use weights='fsdp', or "
            "replicated weights."
        )


def _check_all_planned(module: nn.Module, linears: dict[str, tuple[nn.Module, Linear]]) -> None:
    """Raise ``ValueError`` if an attention module has linear layers that the plan does not name.

    Such a layer would compute all heads, while the other layers compute only this rank's heads. A module is
    taken for attention if it has an int ``heads``, as in diffusers, and the plan names a linear layer that it
    holds itself. Attention with a number of heads of another name is not checked.
    """
    owners = {name.rpartition(".")[0] for name in linears}
    for at, attention in module.named_modules():
        if isinstance(getattr(attention, "heads", None), int) and at in owners:
            for name, part in attention.named_modules(prefix=at):
                # Skip the matrices of a LoRA, which are sharded together with the layer that they adapt.
                planned = any(name == linear or name.startswith(f"{linear}.") for linear in linears)
                if isinstance(part, nn.Linear) and not planned:
                    raise ValueError(
                        f"{name} of this {unwrapped_class(module).__name__} is a linear layer of attention "
                        "that is in no tensor plan, and would compute all heads where a rank has some. "
                        "Fused projections: transformer.unfuse_qkv_projections(); an IP-Adapter: "
                        "pipe.unload_ip_adapter(). weights='fsdp' takes any layer."
                    )


def check_plain_lora(name: str, layer: Any, cls: str) -> None:
    """Raise ``ValueError`` if ``layer``, ``name`` in a model of class ``cls``, has an adapter that is no
    plain LoRA.
    """
    if not hasattr(layer, "base_layer"):
        return
    pairs = lora_matrices(layer)
    # After its last LoRA was deleted, a layer has no pairs, and computes as without a LoRA.
    if pairs is None or not all(isinstance(matrix, nn.Linear) for pair in pairs for matrix in pair):
        # The package of an adapter of peft, such as ``loha`` of ``peft.tuners.loha.layer``.
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
