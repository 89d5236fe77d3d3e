"""Count the work of one generation, its operations and the bytes of weights, on models without weights."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from para_core.adapters.inspect.block_stack import stack_of, why_no_stages
from para_core.adapters.inspect.components import (
    blocks_of,
    components_with_blocks,
    config_and_depths,
    vaes_of,
)
from para_core.adapters.inspect.guidance import default_guidance, number_of_heads
from para_core.adapters.planner.inputs import HIDDEN_SHAPES, UnknownModelError, default_sizes, make_inputs
from para_core.adapters.planner.weights import ModuleBytes, Weights
from para_core.adapters.planner.work import AttentionWork, CallWork, GenerationSizes, Workload, check_size
from para_core.adapters.registry import plan_for, tensor_plan_for, transformers_of
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class, unwrapped_class
from para_core.plans.module_matching import ModuleRules, match_modules, matching_modules, parameters_of
from para_core.plans.plan import Plan, ShardRule, Split
from para_core.recorder.events import (
    AttentionEnd,
    AttentionStart,
    Event,
    FunctionCall,
    ModuleEnd,
    ModuleStart,
    OperatorCall,
)
from para_core.recorder.operator_count import OperatorCount, leaf_tensors
from para_core.recorder.recorder import Recorder
from para_core.recorder.without_data import attend_without_data
from para_core.torch_internals import FakeTensorMode
from para_core.weights.parameters import FEWEST_SHARDED_ELEMENTS


@contextmanager
def without_data(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Create fake tensors without data inside the ``with`` block. Every entry of a mask counts as valid."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings(), FakeTensorMode(), torch.no_grad(), _AllValid():
            # Mochi requests autocast to float32, which CPUs do not support and warn about.
            warnings.filterwarnings("ignore", "In CPU autocast")
            yield
    finally:
        torch.set_default_dtype(before)


class _AllValid(TorchFunctionMode):
    """Mode in which ``torch.nonzero``, which Mochi calls on its mask of text, returns all indices."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nonzero:
            return torch.arange(args[0].numel())[:, None]
        return func(*args, **(kwargs or {}))


def pipe_workload(pipe: Any, changed: dict[str, int], steps: int | None) -> Workload:
    """Return the work of one generation with ``pipe``, of its default sizes but for those of ``changed``.

    Raises:
        UnknownModelError: ``pipe`` has no transformer, its inputs or plan are unknown, or it perturbs attention.
        ValueError: The pipeline cannot generate a result of this size.
    """
    transformer = next(iter(transformers_of(pipe).values()), None)
    if transformer is None:
        raise UnknownModelError(
            f"{type(pipe).__name__} has no transformer; expected a pipeline with one, or the name of a published model."
        )
    if hasattr(pipe, "pag_applied_layers"):
        raise UnknownModelError("the calls of perturbed attention guidance are not counted.")
    sizes, default_steps = default_sizes(pipe, transformer, changed)
    # The inputs of a modular pipeline are those of its blocks.
    of_blocks = (getattr(x, "name", None) for x in getattr(getattr(pipe, "blocks", None), "inputs", ()))
    accepted = {*inspect.signature(original_class(pipe).__call__).parameters, *of_blocks}
    is_video = "num_frames" in accepted or "frames" not in changed
    check_size(original_class(pipe).__name__, sizes, is_video=is_video)
    dtype = next((x.dtype for x in transformer.parameters() if x.is_floating_point()), torch.bfloat16)
    with without_data(dtype):
        call = count_call(transformer, sizes)
    plan = plan_for(transformer)
    branches = 2
    if default_guidance(pipe, transformer) is None:
        branches = 1
    return Workload(
        name=f"{_model_name(pipe)}, {sizes}",
        sizes=sizes,
        steps=steps or default_steps,
        weights=pipe_weights(pipe),
        call=call,
        branches=branches,
        batched=plan is not None and bool(plan.batched) and branches > 1,
        heads=number_of_heads(transformer) or 0,
    )


def uncounted_workload(pipe: Any, reason: str) -> Workload:
    """Return a workload with only the weights of ``pipe``, whose operations cannot be counted for ``reason``."""
    return Workload(_model_name(pipe), GenerationSizes(0, 0, 1, 0), 0, pipe_weights(pipe), uncounted=reason)


def pipe_weights(pipe: Any) -> Weights:
    """Return the bytes of the weights of ``pipe``."""
    transformers, vaes = transformers_of(pipe), vaes_of(pipe).values()
    encoders = [module for name, module in components_with_blocks(pipe).items() if name not in transformers]
    counted = {id(x) for x in (*transformers.values(), *encoders, *vaes)}
    modules = {id(x): x for x in map(uncompiled, pipe.components.values()) if isinstance(x, nn.Module)}
    other = sum(bytes_of(x) for key, x in modules.items() if key not in counted)
    first, vae = next(iter(transformers.values()), nn.Module()), sum(map(bytes_of, vaes))
    return count_weights(first, encoders, vae=vae, other=other, transformers=len(transformers))


def _model_name(pipe: Any) -> str:
    """Return the last part of the folder or repository from which ``pipe`` was made; its class if that is unknown."""
    path = str(getattr(pipe, "name_or_path", None) or "").rstrip("/")
    return path.rpartition("/")[2] or original_class(pipe).__name__


def count_call(transformer: nn.Module, sizes: GenerationSizes) -> CallWork:
    """Return the work of one call of ``transformer``, counted on a copy without weights.

    Call it inside :func:`without_data`.

    Raises:
        UnknownModelError: The inputs or the plan of the transformer are unknown.
    """
    cls, plan = unwrapped_class(transformer), plan_for(transformer)
    if plan is None or cls.__name__ not in HIDDEN_SHAPES:
        raise UnknownModelError(
            f"the inputs of {cls.__name__} are unknown; expected one of {', '.join(HIDDEN_SHAPES)}."
        )
    config, _ = config_and_depths(transformer)
    copy = cls(**config).eval()
    return _CallCount(copy, plan).run(make_inputs(copy, sizes))


class _CallCount:
    """The work of a call, counted from the events of a :class:`Recorder`.

    The model's plan says which operators compute on sharded tokens: from the first rule that shards to a
    module that gathers. The work before and after is the same on each rank.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model, self._plan, self._operators = model, plan, OperatorCount()
        # By the module's id: a module may have several names.
        self._rules: dict[int, list[ModuleRules]] = {}
        for module, rules in match_modules(model, plan).values():
            self._rules.setdefault(id(module), []).append(rules)
        # By the weight's id: the layers whose results tensor ranks add up.
        self._rowwise = {id(layer.weight) for layer, along in _tensor_layers(model) if along == "rowwise"}
        # The number of attention calls, by their sizes.
        self._attention: dict[AttentionWork, int] = {}
        self._summed = 0.0

    def run(self, inputs: dict[str, Any]) -> CallWork:
        """Call the model, and return the work of the call."""
        self._operators.is_sharded = _shards_any(self._plan.inputs, inputs)
        with Recorder(self._note, compute_attention=attend_without_data).watch(self._model, operators=True):
            self._model(**inputs, return_dict=False)
        return CallWork(
            attention=tuple(replace(call, calls=number) for call, number in self._attention.items()),
            products=self._operators.products,
            moved=self._operators.moved,
            peak=(self._operators.peak[0], self._operators.peak[1]),
            summed=self._summed,
            launches=self._operators.launches,
        )

    def _note(self, event: Event) -> None:
        match event:
            case ModuleStart():
                for rules in self._rules.get(id(event.module), ()):
                    by_position = zip(parameters_of(event.module), event.args, strict=False)
                    values = {**dict(by_position), **event.kwargs}
                    self._operators.is_sharded |= _shards_any(rules.of_inputs, values)
            case ModuleEnd():
                for rules in self._rules.get(id(event.module), ()):
                    outputs = dict(enumerate(leaf_tensors(event.output)))
                    self._operators.is_sharded |= _shards_any(rules.of_outputs, outputs)
                    self._operators.is_sharded &= not rules.gathers
            case AttentionStart():
                self._note_attention(event)
                self._operators.in_attention = True
            case AttentionEnd():
                self._operators.in_attention = False
            case FunctionCall() if event.function is F.linear:
                if any(id(x) in self._rowwise for x in (*event.args, *event.kwargs.values())):
                    self._summed += event.output.nbytes
            case OperatorCall():
                self._operators.note(event)

    def _note_attention(self, event: AttentionStart) -> None:
        query, key, value = event.call.query, event.call.key, event.call.value
        call = AttentionWork(
            calls=1,
            samples=query.shape[:-3].numel(),
            heads=query.shape[-3],
            key_heads=key.shape[-3],
            width=query.shape[-1] + value.shape[-1],
            element_size=query.element_size(),
            queries=query.shape[-2],
            keys=key.shape[-2],
            # Keys of another length are those of a text, which every rank has.
            exchanges=self._operators.is_sharded and key.shape[-2] == query.shape[-2],
        )
        self._attention[call] = self._attention.get(call, 0) + 1
        self._operators.launches += 1


def _tensor_layers(model: nn.Module) -> list[tuple[nn.Linear, str]]:
    """Return the linear layers that tensor ranks split, each with ``"colwise"`` or ``"rowwise"``."""
    plan = tensor_plan_for(model)
    if plan is None:
        return []
    named = [(matching_modules(model, name).values(), style.along) for name, style in plan.linears.items()]
    return [(layer, along) for layers, along in named for layer in layers if isinstance(layer, nn.Linear)]


def _shards_any(rules: Mapping[Any, ShardRule], values: Mapping[Any, Any]) -> bool:
    """Whether any of ``rules`` of a plan shards one of the tensors in ``values``, as tokens of a segment."""
    return any(
        isinstance(rule, Split)
        and rule.segment is not None
        and not rule.then_replicated
        and isinstance(values.get(key), torch.Tensor)
        and rule.ndim in (None, values[key].ndim)
        for key, rule in rules.items()
    )


def count_weights(
    transformer: nn.Module, encoders: Sequence[nn.Module], *, vae: float, other: float, transformers: int = 1
) -> Weights:
    """Return the bytes of the weights of a pipeline with ``transformers`` transformers like ``transformer``.

    ``encoders`` are its text encoders, ``vae`` and ``other`` the bytes of all autoencoders and other modules.
    """
    no_stages, blocks = why_no_stages(transformer) or "", []
    if not no_stages:
        blocks = [(staged.cost, float(bytes_of(staged.block))) for staged in stack_of(transformer)]
    return Weights(
        module_bytes(transformer),
        transformers,
        tensor=sum(layer.weight.nbytes for layer, _ in _tensor_layers(transformer)),
        encoders=_add_up([module_bytes(encoder) for encoder in encoders]),
        vae=vae,
        other=other,
        blocks=tuple(blocks),
        in_8_bits=_share_in_8_bits(transformer),
        no_stages=no_stages,
    )


def module_bytes(module: nn.Module) -> ModuleBytes:
    """Return the bytes of a module: all, those that FSDP2 shards, and the most that it holds gathered at one time."""
    blocks = blocks_of(module)
    block_bytes = [bytes_of(block) for block in blocks]
    inside = {id(x) for block in blocks for x in block.parameters()}
    outside = [x for x in module.parameters() if id(x) not in inside and x.numel() >= FEWEST_SHARDED_ELEMENTS]
    root = sum(x.nbytes for x in outside)
    # While a block runs, FSDP2 holds the buffer in which it gathered the block and the weights made from that
    # buffer, and already gathers the next block.
    pairs = [2 * first + second for first, second in pairwise(block_bytes)]
    gathered = max(pairs, default=2 * sum(block_bytes))
    largest = max((x.nbytes for x in module.parameters()), default=0)
    return ModuleBytes(bytes_of(module), sum(block_bytes) + root, root + gathered, largest)


def _add_up(modules: Sequence[ModuleBytes]) -> ModuleBytes:
    """Return the bytes of modules that run one after the other."""
    total, sharded, at_once, largest = zip(*map(astuple, [ModuleBytes(), *modules]), strict=True)
    return ModuleBytes(sum(total), sum(sharded), max(at_once), max(largest))


def bytes_of(module: nn.Module) -> int:
    """Return the bytes of the module's parameters. Shared parameters count once."""
    return sum(x.nbytes for x in module.parameters())


def _share_in_8_bits(module: nn.Module) -> float:
    """Return the share of the module's bytes that is left with linear weights of 8 bits, a scale per row."""
    linears = {id(part.weight): part.weight for part in module.modules() if isinstance(part, nn.Linear)}
    saved = sum(x.numel() * (x.element_size() - 1) - 4 * x.shape[0] for x in linears.values())
    return 1.0 - saved / max(1, bytes_of(module))
