"""What a generation of diffusers' pipelines does, counted on models without weights: calls, bytes, operations."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.adapters.components import blocks_of, patch_plan_for, stack_of, why_no_stages
from para_core.adapters.planner.inputs import INPUTS, Sizes
from para_core.adapters.registry import plan_for, tensor_plan_for
from para_core.instance_patching import unwrapped_class
from para_core.planner.observe import observed
from para_core.planner.traffic import CallWork, ModelCall
from para_core.planner.weights import ModuleBytes, Weights
from para_core.plans.module_matching import matching_modules
from para_core.torch_internals import FakeTensorMode
from para_core.weights.fsdp import LARGE

# Names in a config, of how many blocks of a kind there are.
_DEPTH = re.compile(r"(num|n)_(\w+_)?(layers|blocks)|depth")


class UnknownModelError(TypeError):
    """The planner does not know what a model is given for a size, or what it shards."""


@contextmanager
def on_meta(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Inside, modules are made in ``dtype``, and have no weights."""
    with torch.device("meta"), torch.no_grad(), _default_dtype(dtype):
        yield


@contextmanager
def without_data(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Inside, tensors have sizes and a device, and no data. What reads a mask finds all of it valid."""
    with warnings.catch_warnings(), FakeTensorMode(), torch.no_grad(), _default_dtype(dtype), _AllValid():
        # Mochi asks for float32, which is no autocast on a CPU.
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
    """Finds every element of a mask valid. Mochi attends to valid text only: all of it is the most that it sends."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nonzero:
            mask: Tensor = args[0]
            return torch.arange(mask.numel())[:, None]
        return func(*args, **(kwargs or {}))


def count_calls(transformer: nn.Module, sizes: Sizes) -> dict[int, ModelCall]:
    """One call for ``sizes``, by the number of shares of its samples. Inside :func:`without_data`; ``transformer`` is not run.

    Blocks of one kind do the same: of models with one and with two blocks of each kind follows what all of them do.

    Raises:
        TypeError: it is not known what such a transformer is given.
    """
    cls, plan = unwrapped_class(transformer), plan_for(transformer)
    if cls.__name__ not in INPUTS or plan is None:
        raise UnknownModelError(
            f"it is not known what a {cls.__name__} is given for a size; known are {', '.join(INPUTS)}."
        )
    parameters = inspect.signature(cls).parameters
    given: Any = transformer.config
    config = {name: value for name, value in given.items() if name in parameters}
    depths = {
        name: value
        for name, value in config.items()
        # Stable Diffusion 3.5 says of single blocks, by number, that they attend twice.
        if _DEPTH.fullmatch(name) and isinstance(value, int) and value > 1 and not config.get("dual_attention_layers")
    }
    found: dict[int, ModelCall] = {}
    for batch in (1, 2):
        if batch > 1 and not plan.batched:
            found[batch] = found[1]
            continue
        shallow = {**config, **dict.fromkeys(depths, 1)}
        base = _count_call(cls(**shallow), sizes, batch)
        more = {name: _count_call(cls(**{**shallow, name: 2}), sizes, batch) for name in depths}
        parts = [
            _deeper(part, [(depths[name] - 1, x.parts[place]) for name, x in more.items()])
            for place, part in enumerate(base.parts)
        ]
        found[batch] = ModelCall(base.inputs, parts, base.foreseen)
    return found


def _count_call(transformer: nn.Module, sizes: Sizes, batch: int) -> ModelCall:
    plan = plan_for(transformer.eval())
    if plan is None:
        raise UnknownModelError(f"there is no plan for {type(transformer).__name__}.")
    with observed(transformer, plan, batch, tensor=tensor_plan_for(transformer)) as calls:
        transformer(**INPUTS[type(transformer).__name__](transformer.config, sizes), return_dict=False)
    return calls[0]


def _deeper(base: CallWork, more: Sequence[tuple[int, CallWork]]) -> CallWork:
    """What a model does with as many blocks more of a kind as each pair says; of it: what the model with one more does."""
    events, launches, moved = Counter(base.events), base.launches, list(base.moved)
    for blocks, part in more:
        difference = Counter(part.events)
        difference.subtract(Counter(base.events))
        for event, number in difference.items():
            events[event] += blocks * number
        launches += blocks * (part.launches - base.launches)
        moved = [
            sum_ + blocks * (own - of_base) for sum_, own, of_base in zip(moved, part.moved, base.moved, strict=True)
        ]
    # What a block held is free when the next one runs.
    peak = max([base.peak, *[part.peak for _, part in more]], key=sum)
    return CallWork(list(events.elements()), base.returned, launches, (moved[0], moved[1]), peak)


def bytes_of(module: nn.Module) -> int:
    """Of its parameters, each once."""
    return sum(x.numel() * x.element_size() for x in {id(x): x for x in module.parameters()}.values())


def weights_of(
    transformer: nn.Module, encoders: Sequence[nn.Module], *, other: float, transformers: int = 1
) -> Weights:
    """Of a pipeline whose ``transformers`` are all like this one.

    Args:
        encoders: of text. ``other``: bytes of all else.
    """
    no_stages = why_no_stages(transformer)
    patches = no_stages or patch_plan_for(transformer)
    of_encoders = [module_bytes(encoder) for encoder in encoders]
    return Weights(
        module_bytes(transformer),
        transformers,
        _tensor_bytes(transformer),
        ModuleBytes(
            sum(x.total for x in of_encoders),
            sum(x.sharded for x in of_encoders),
            max((x.at_once for x in of_encoders), default=0),
        ),
        other,
        () if no_stages else tuple((one.cost, bytes_of(one.block)) for one in stack_of(transformer)),
        no_stages,
        patches if isinstance(patches, str) else None,
    )


def module_bytes(module: nn.Module) -> ModuleBytes:
    """What FSDP2 shards of it, and what is gathered while it runs."""
    blocks = blocks_of(module)
    of_blocks = [bytes_of(block) for block in blocks]
    inside = {id(x) for block in blocks for x in block.parameters()}
    outside = [x for x in module.parameters() if id(x) not in inside and x.numel() >= LARGE]
    root = sum(x.numel() * x.element_size() for x in outside)
    neighbours = max((one + two for one, two in pairwise(of_blocks)), default=sum(of_blocks))
    return ModuleBytes(bytes_of(module), sum(of_blocks) + root, root + neighbours, len(blocks) + 1)


def _tensor_bytes(transformer: nn.Module) -> int:
    """Of the weights that tensor ranks share."""
    plan = tensor_plan_for(transformer)
    linears = {} if plan is None else plan.linears
    return sum(
        layer.weight.numel() * layer.weight.element_size()
        for name in linears
        for layer in matching_modules(transformer, name).values()
        if isinstance(layer, nn.Linear)
    )


def encoder_operations(encoder: nn.Module, tokens: int) -> float:
    """Of one prompt: its linear layers, but for the one over the vocabulary."""
    layers = [x.weight for name, x in encoder.named_modules() if isinstance(x, nn.Linear) and "lm_head" not in name]
    return 2.0 * tokens * sum(weight.numel() for weight in layers)


class _Operations(TorchFunctionMode):
    """Inside, operations of convolutions, and of attention."""

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
            query, key = (
                args[place] if len(args) > place else kwargs[name] for place, name in enumerate(("query", "key"))
            )
            self.attention += 4.0 * query.numel() * key.shape[-2]
        return out


# Of a decode that is counted; larger ones follow, for convolutions take as long for each pixel.
_SIDE = 8


def decoder_operations(vae: Any, channels: int, sizes: Sizes, tiled: float = 0.0) -> float:
    """Of decoding latents of ``sizes``. Inside :func:`on_meta`; ``tiled``: share of a tile that the next one overlaps."""
    frames, height, width = sizes.latents
    scale = height * width / _SIDE**2
    if sizes.frames == 1 and not hasattr(vae, "temperal_downsample"):
        few, many = _decode(vae, (1, channels, _SIDE, _SIDE)), None
    else:
        # The first latent frame gives fewer frames than others.
        few = _decode(vae, (1, channels, min(frames, 2), _SIDE, _SIDE))
        many = _decode(vae, (1, channels, 3, _SIDE, _SIDE)) if frames > 2 else None
    steps = frames - 2 if many is not None else 0
    convolutions = few.convolutions + steps * ((many or few).convolutions - few.convolutions)
    attention = few.attention + steps * ((many or few).attention - few.attention)
    return (convolutions * scale + attention * scale**2) / (1.0 - tiled) ** 2


def _decode(vae: Any, shape: tuple[int, ...]) -> _Operations:
    operations = _Operations()
    with operations:
        vae.decode(torch.empty(shape))
    return operations
