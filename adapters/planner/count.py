"""Count operations, bytes and transfers of one generation with a diffusers pipeline, on models without weights."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from para_core.adapters.inspect.components import blocks_of, config_and_depths, stack_of, why_no_patches, why_no_stages
from para_core.adapters.planner.inputs import INPUTS
from para_core.adapters.planner.sizes import DECODED_SIDE, DecoderCounts, GenerationSizes
from para_core.adapters.registry import plan_for, tensor_plan_for
from para_core.instance.private_class import unwrapped_class
from para_core.planner.observe import observed
from para_core.planner.traffic import CallWork, ModelCall
from para_core.planner.weights import ModuleBytes, Weights
from para_core.plans.module_matching import matching_modules
from para_core.torch_internals import FakeTensorMode
from para_core.weights.parameters import FEWEST_SHARDED_ELEMENTS


class UnknownModelError(TypeError):
    """Error for a model whose plan, or whose inputs for a given image size, the planner does not know."""


@contextmanager
def on_meta(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Create modules on the meta device, in ``dtype``, inside the ``with`` block."""
    with torch.device("meta"), torch.no_grad(), _default_dtype(dtype):
        yield


@contextmanager
def without_data(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Create fake tensors without data inside the ``with`` block. Every entry of a mask counts as valid."""
    with warnings.catch_warnings(), FakeTensorMode(), torch.no_grad(), _default_dtype(dtype), _AllValid():
        # Mochi requests autocast to float32, which CPUs do not support and warn about.
        warnings.filterwarnings("ignore", "In CPU autocast")
        yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _AllValid(TorchFunctionMode):
    """Mode in which ``torch.nonzero`` returns all indices: fake tensors have no values. Mochi then counts all text."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nonzero:
            return torch.arange(args[0].numel())[:, None]
        return func(*args, **(kwargs or {}))


def count_calls(transformer: nn.Module, sizes: GenerationSizes) -> dict[int, ModelCall]:
    """Count the work of one transformer call, with the whole batch and with a batch that is split over 2 ranks.

    Call it inside :func:`without_data`. ``transformer`` itself does not run: models with one block and with two blocks
    of each kind run, and the difference is multiplied by the number of blocks. The keys of the result are 1 and 2, the
    number of parts of the batch. Raises ``UnknownModelError`` if the inputs or the plan of the transformer are unknown.
    """
    cls = unwrapped_class(transformer)
    if cls.__name__ not in INPUTS:
        raise UnknownModelError(f"the inputs of {cls.__name__} are unknown; expected one of {', '.join(INPUTS)}.")
    config, depths = config_and_depths(transformer)
    # Count all blocks of Stable Diffusion 3.5 (dual_attention_layers), which differ, and of Chroma, whose approximator
    # computes a number of modulations that depends on the number of blocks.
    counts_all = config.get("dual_attention_layers") or "approximator_layers" in config
    depths = {} if counts_all else {name: x for name, x in depths.items() if x > 1}
    shallow, calls = {**config, **dict.fromkeys(depths, 1)}, dict[int, ModelCall]()
    for batch in (1, 2):
        base = _count_call(cls(**shallow), sizes, batch)
        if len(base.parts) < batch:
            return {1: calls[1], 2: calls[1]}  # The samples of a call cannot be split.
        more = {name: _count_call(cls(**{**shallow, name: 2}), sizes, batch) for name in depths}
        parts = [
            _extrapolated(part, [(depths[name] - 1, call.parts[i]) for name, call in more.items()])
            for i, part in enumerate(base.parts)
        ]
        calls[batch] = ModelCall(base.inputs, parts, base.foreseen)
    return calls


def _count_call(transformer: nn.Module, sizes: GenerationSizes, batch: int) -> ModelCall:
    plan = plan_for(transformer.eval())
    if plan is None:
        raise UnknownModelError(f"there is no plan for {type(transformer).__name__}.")
    with observed(transformer, plan, batch, tensor=tensor_plan_for(transformer)) as calls:
        transformer(**INPUTS[type(transformer).__name__](transformer.config, sizes), return_dict=False)
    return calls[0]


def _extrapolated(base: CallWork, more: Sequence[tuple[int, CallWork]]) -> CallWork:
    """Return the work of a model with blocks added to ``base``: for each kind, their number, and the work with one."""
    operations = Counter(base.operations)
    for blocks, part in more:
        # In the order in which they were counted, unlike a set: sums of seconds are the same in every process.
        for operation in part.operations | base.operations:
            operations[operation] += blocks * (part.operations[operation] - base.operations[operation])
    sharded, otherwise = (base.moved[i] + sum(n * (x.moved[i] - base.moved[i]) for n, x in more) for i in (0, 1))
    launches = base.launches + sum(blocks * (part.launches - base.launches) for blocks, part in more)
    # Blocks run one after the other, so more blocks do not raise the peak memory.
    peak = max([base.peak, *[part.peak for _, part in more]], key=sum)
    return CallWork(+operations, base.returned, launches, (sharded, otherwise), peak)


def bytes_of(module: nn.Module, *, in_8_bits: bool = False) -> int:
    """Return the bytes of the module's parameters. Shared parameters count once.

    With ``in_8_bits`` weights of linear layers count 1 byte per element and a float32 scale per row.
    """
    whole = {id(x): x.numel() * x.element_size() for x in module.parameters()}
    if in_8_bits:
        linears = [part.weight for part in module.modules() if isinstance(part, nn.Linear)]
        whole |= {id(x): x.numel() + 4 * x.shape[0] for x in linears}
    return sum(whole.values())


def weights_of(
    transformer: nn.Module, encoders: Sequence[nn.Module], *, vae: float, other: float, transformers: int = 1
) -> Weights:
    """Return the bytes of the weights of a pipeline with ``transformers`` transformers of this size.

    ``vae`` and ``other`` are the bytes of all autoencoders, and of all modules that are not named.
    """
    no_stages = why_no_stages(transformer)
    plan = tensor_plan_for(transformer)
    split = [
        layer.weight
        for name in (() if plan is None else plan.linears)
        for layer in matching_modules(transformer, name).values()
        if isinstance(layer, nn.Linear)
    ]
    of_encoders = [module_bytes(encoder) for encoder in encoders]
    all_encoders = ModuleBytes(
        sum(x.total for x in of_encoders),
        sum(x.sharded for x in of_encoders),
        max((x.at_once for x in of_encoders), default=0),
        sum(x.parts for x in of_encoders),
        max((x.largest_layer for x in of_encoders), default=0),
    )
    whole, in_8_bits = (
        Weights(
            module_bytes(transformer, in_8_bits=quantized),
            transformers,
            sum(x.numel() * (1 if quantized else x.element_size()) for x in split),
            all_encoders,
            vae,
            other,
            () if no_stages else tuple((x.cost, bytes_of(x.block, in_8_bits=quantized)) for x in stack_of(transformer)),
            no_stages=no_stages,
            no_patches=why_no_patches(transformer),
        )
        for quantized in (False, True)
    )
    return replace(whole, in_8_bits=in_8_bits)


def module_bytes(module: nn.Module, *, in_8_bits: bool = False) -> ModuleBytes:
    """Return the bytes of a module: all, those that FSDP2 shards, and the most that it holds gathered at one time."""
    blocks = blocks_of(module)
    of_blocks = [bytes_of(block, in_8_bits=in_8_bits) for block in blocks]
    inside = {id(x) for block in blocks for x in block.parameters()}
    outside = [x for x in module.parameters() if id(x) not in inside and x.numel() >= FEWEST_SHARDED_ELEMENTS]
    root = sum(x.numel() * x.element_size() for x in outside)
    # While a block runs, FSDP2 holds the buffer in which it gathered the block and the weights made from that buffer,
    # and already gathers the next block.
    gathered = max((2 * first + second for first, second in pairwise(of_blocks)), default=2 * sum(of_blocks))
    largest = max((x.numel() * x.element_size() for x in module.parameters()), default=0)
    total = bytes_of(module, in_8_bits=in_8_bits)
    return ModuleBytes(total, sum(of_blocks) + root, root + gathered, len(blocks) + 1, largest)


class _Operations(TorchFunctionMode):
    """Mode that counts the floating-point operations of convolutions and of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = self.attention = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (F.conv2d, F.conv3d):
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.convolutions += 2.0 * out.numel() * weight[0].numel()
        elif func is F.scaled_dot_product_attention:
            query, key = (args[i] if len(args) > i else kwargs[name] for i, name in enumerate(("query", "key")))
            self.attention += 4.0 * query.numel() * key.shape[-2]
        return out


def decoder_counts(vae: Any, channels: int) -> DecoderCounts:
    """Return the floating-point operations of decoding small latents with ``channels``. Call inside :func:`on_meta`."""

    def decode(*frames: int) -> tuple[float, float]:
        operations = _Operations()
        with operations:
            vae.decode(torch.empty(1, channels, *frames, DECODED_SIDE, DECODED_SIDE))
        return operations.convolutions, operations.attention

    decodes_videos = any(isinstance(module, nn.Conv3d) for module in vae.modules())
    return DecoderCounts(tuple(decode(frames) for frames in (1, 2, 3)) if decodes_videos else (decode(),))


def encoder_operations(encoders: Sequence[nn.Module], tokens: int) -> float:
    """Return the floating-point operations of encoding one prompt of ``tokens`` tokens.

    Encoding takes 2 operations per token and weight of a linear layer, except the head.
    """
    linears = [
        module.weight
        for encoder in encoders
        for name, module in encoder.named_modules()
        if isinstance(module, nn.Linear) and "lm_head" not in name
    ]
    return 2.0 * tokens * sum(weight.numel() for weight in linears)
