"""A recorder of what ranks would exchange for a model call, while the unmodified model runs on one device.

With fake tensors the model needs neither weights nor a device. The model's plan says which tokens the queries and keys
of attention calls consist of, and which tensors are sharded and gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipelines.traffic import (
    CallWork,
    CountedAttention,
    CountedGather,
    CountedHalo,
    CountedSum,
    ModelCall,
    Operation,
    Tokens,
)
from para_core.attention.sdpa_call import SdpaCall
from para_core.dataclass_fields import by_path
from para_core.distributed.mesh import MeshDim
from para_core.plans.module_matching import ModuleRules, gathers_as_tuple, match_modules, parameters_of
from para_core.plans.plan import (
    Attention,
    AttentionByHeads,
    Count,
    Gather,
    LinearAttention,
    OneForEach,
    Plan,
    Replicate,
    ShardRule,
    Split,
)
from para_core.plans.plan_queries import attention_calls, coarse_segments
from para_core.plans.samples import count_samples, select_samples
from para_core.recorder.events import (
    AttentionStart,
    Event,
    FunctionCall,
    ModuleEnd,
    ModuleStart,
)
from para_core.recorder.operator_count import leaf_tensors
from para_core.recorder.recorder import Recorder
from para_core.recorder.without_data import attend_without_data
from para_core.torch_internals import pytree


class _ModelObserver:
    """Collects in :attr:`work` the operations of a recorded call, and which of their tokens the plan shards."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.work = CallWork()
        self._plan, self._coarse = plan, coarse_segments(plan)
        rules: list[Mapping[Any, ShardRule]] = [plan.inputs, *plan.inner.values()]
        splits = [rule for of_module in rules for rule in of_module.values() if isinstance(rule, Split)]
        # Segments whose entries are image rows or frames. An entry consists of many tokens.
        self._of_many_tokens = {
            split.segment or split.like or "" for split in splits if split.per != 1 or split.together
        }
        self._shards_masks = any(str(key).endswith(_KEY_MASKS) for of_module in rules for key in of_module)
        self._model = model
        # The rules of each submodule that the plan names, by the module's id: a module may have several names.
        self._rules: dict[int, list[ModuleRules]] = {}
        for module, of_module in match_modules(model, plan).values():
            self._rules.setdefault(id(module), []).append(of_module)
        self._segments: dict[str, Tokens] = {}
        self._is_sharded = False
        # For each running module for which the plan describes attention calls, the innermost last: descriptions of the
        # calls that are still to come. The last one is never removed, so that it applies to all further calls.
        self._attending: list[list[Attention]] = [[Attention(plan.joint_order)]]
        # For each running module with linear attention, the innermost last: its description in the plan, and the names
        # of the functions that it has called.
        self._summing: list[tuple[LinearAttention, list[str]]] = []

    def run(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Return ``forward(**arguments)``, and record the operations of this call in :attr:`work`."""
        self._note_rules(self._plan.inputs, arguments)
        recorder = Recorder(self._note_event, compute_attention=attend_without_data)
        with recorder.watch(self._model):
            output = forward(**arguments)
        self._note_gathered(output, gathers_as_tuple(self._plan.outputs.get("", ())))
        self.work.returned = sum(x.numel() * x.element_size() for x in leaf_tensors(output))
        return output

    def _note_event(self, event: Event) -> None:
        match event:
            case ModuleStart():
                for rules in self._rules.get(id(event.module), ()):
                    self._note_start(rules, event)
            case ModuleEnd():
                for rules in self._rules.get(id(event.module), ()):
                    self._note_end(rules, event.output)
            case AttentionStart():
                self._note_attention(event.call)
            case FunctionCall():
                self._note_function(event)

    def _note_start(self, rules: ModuleRules, event: ModuleStart) -> None:
        """Note what the plan does before a call of a module with ``rules``."""
        parameters, attention = parameters_of(event.module), rules.attention
        self._note_rules(rules.of_inputs, {**dict(zip(parameters, event.args, strict=False)), **event.kwargs})
        if isinstance(attention, LinearAttention):
            self._summing.append((attention, []))
        elif attention:
            calls = attention
            if isinstance(attention, AttentionByHeads):
                calls = (Attention((attention.segment,)),)
            elif isinstance(attention, OneForEach):
                calls = attention_calls(attention, parameters, event.args, event.kwargs)
            self._attending.append([*calls])
        if rules.halo is not None and self._is_sharded:
            rows = event.args[0].narrow(rules.halo.dim, 0, rules.halo.size)
            self._note(CountedHalo(self._segments[rules.halo.segment], rows.numel() * rows.element_size()))

    def _note_end(self, rules: ModuleRules, output: Any) -> None:
        """Note what the plan does after a call of a module with ``rules``."""
        if isinstance(rules.attention, LinearAttention):
            self._summing.pop()
        elif rules.attention:
            self._attending.pop()
        if rules.of_outputs:
            outputs = [output] if isinstance(output, Tensor) else output
            self._note_rules(rules.of_outputs, dict(enumerate(outputs)))
        if rules.gathers:
            self._note_gathered(output, rules.gathers)
            self._is_sharded = False

    def _note(self, operation: Operation) -> None:
        self.work.operations[operation] += 1

    def _note_rules(self, rules: Mapping[Any, ShardRule], values: Mapping[Any, Any]) -> None:
        values = {**values, **by_path({str(key): value for key, value in values.items()})}
        for key, rule in rules.items():
            value = values.get(key)
            if isinstance(rule, Count) and value is not None:
                for index in rule.at:
                    value = value[index]
                self._note_sharded(rule.segment, prod(value))
            for x in leaf_tensors(values.get(key)):
                if isinstance(rule, Gather):
                    self._note_gathered([x], (rule,))
                elif isinstance(rule, Replicate):
                    self._segments.setdefault(rule.segment, Tokens(x.shape[rule.dim], sharded=False))
                elif isinstance(rule, Split) and not rule.then_replicated and rule.ndim in (None, x.ndim):
                    first = 0 if rule.after is None else self._segments[rule.after].total
                    name = rule.segment or rule.like or str(key)
                    self._note_sharded(name, (x.shape[rule.dim] - first) // (rule.per or 1))
        if any(isinstance(rule, Split) and rule.segment in self._segments for rule in rules.values()):
            self._is_sharded = True

    def _note_sharded(self, segment: str, total: int) -> None:
        min_per_rank = 1 if segment in self._coarse else 2
        self._segments.setdefault(segment, Tokens(total, sharded=True, min_per_rank=min_per_rank))

    def _note_gathered(self, output: Any, gathers: Sequence[Gather | None]) -> None:
        values = [output] if isinstance(output, Tensor) else getattr(output, "values", lambda: output)()
        for value, gather in zip([x for x in values if isinstance(x, Tensor)], gathers, strict=False):
            if gather is not None:
                segment = self._segments[gather.segment]
                tokens = segment.total if gather.per != 1 else value.shape[gather.dim]
                self._note(CountedGather(segment, value.numel() // tokens * value.element_size()))

    def _note_function(self, call: FunctionCall) -> None:
        """Note a sum of linear attention."""
        if self._summing and self._is_sharded:
            name, (attention, names) = getattr(call.function, "__name__", ""), self._summing[-1]
            if (name, names.count(name)) in attention.sums:
                size = call.output.numel() * call.output.element_size()
                self._note(CountedSum(self._segments[attention.segment], size))
            names.append(name)

    def _note_attention(self, call: SdpaCall) -> None:
        query, key, value = call.query, call.key, call.value
        queries, keys = self._tokens((), query.shape[-2]), self._tokens((), key.shape[-2])
        mask_bytes = 0
        if self._is_sharded:
            calls = self._attending[-1]
            attention = calls.pop(0) if len(calls) > 1 else calls[0]
            names = attention.queries if attention.keys is None else attention.keys
            queries, keys = self._tokens(attention.queries, query.shape[-2]), self._tokens(names, key.shape[-2])
            # If the plan shards the mask, each rank has the columns of its own keys, and must gather the others. Other
            # masks have the columns of all keys already.
            mask = call.attn_mask if attention.mask or self._shards_masks else None
            if mask is not None and mask.shape[-1] > 1:
                rows = mask[..., :1, :] if attention.mask == "pairs" else mask
                mask_bytes = rows.numel() // mask.shape[-1] * mask.element_size()
        self._note(
            CountedAttention(
                samples=query.shape[:-3].numel(),
                heads=query.shape[-3],
                kv_heads=key.shape[-3],
                head_dim=query.shape[-1],
                value_dim=value.shape[-1],
                element_size=query.element_size(),
                queries=queries,
                keys=keys,
                mask_bytes=mask_bytes,
            )
        )

    def _tokens(self, names: Sequence[str], total: int) -> tuple[Tokens, ...]:
        if self._of_many_tokens & self._segments.keys() & set(names):
            return (Tokens(total, sharded=True, min_per_rank=1),)
        segments = tuple(self._segments[name] for name in names if name in self._segments)
        # The remaining tokens belong to none of the plan's segments, so they are replicated.
        return (*segments, Tokens(total - sum(x.total for x in segments), sharded=False))


# A mask argument whose name ends like this hides keys. Other masks have other uses, such as selecting modulations.
_KEY_MASKS = ("attention_mask", "attn_mask", "hidden_states_mask", "hidden_states_masks")


@contextmanager
def observed(
    model: nn.Module,
    plan: Plan,
    batch: int = 1,
    *,
    is_foreseen: Callable[..., bool] = lambda *_: False,
) -> Iterator[list[ModelCall]]:
    """Yield a list, to which each call of ``model`` inside the ``with`` block is added.

    Args:
        batch (`int`, defaults to `1`): Number of parts into which the samples of a call are split, if the plan permits
            it. Each part is run and recorded by itself.
        is_foreseen (`Callable`, *optional*): Returns, for ``(model, args, kwargs)``, whether the size of the output is
            known before the call. Defaults to False.
    """
    parameters, forward = parameters_of(model), model.forward
    # The instance may have a forward of its own already, for example from a hook of accelerate.
    is_own = "forward" in vars(model)
    calls: list[ModelCall] = []

    def restore_forward() -> None:
        if is_own:
            model.forward = forward
        else:
            del model.forward

    @functools.wraps(forward)
    def observing(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        restore_forward()
        try:
            foreseen = is_foreseen(model, args, kwargs)
        finally:
            model.forward = observing
        parts = _parts(arguments, plan, batch)
        observers = [_ModelObserver(model, plan) for _ in parts]
        outputs = [observer.run(forward, part) for observer, part in zip(observers, parts, strict=True)]
        calls.append(ModelCall((id(model), *_sizes(arguments)), [observer.work for observer in observers], foreseen))
        return outputs[0] if len(outputs) == 1 else _joined(outputs)

    model.forward = observing
    try:
        yield calls
    finally:
        restore_forward()


def _parts(arguments: dict[str, Any], plan: Plan, batch: int) -> list[dict[str, Any]]:
    """Return the arguments of a call in ``batch`` parts, split by samples; in one part if the plan permits no split."""
    if batch == 1 or not plan.batched or any(arguments.get(name) is not None for name in plan.unshared):
        return [arguments]
    name, dim = next(iter(plan.batched.items()))
    total = count_samples(arguments[name], dim)
    if total is None or total % batch:
        return [arguments]
    batched = {name: dim for name, dim in plan.batched.items() if name in arguments}
    return [
        {**arguments, **{name: select_samples(arguments[name], dim, total, rank) for name, dim in batched.items()}}
        for rank in (MeshDim("batch", batch, index, "", None) for index in range(batch))
    ]


def _joined(outputs: Sequence[Any]) -> Any:
    """Return the output of the whole call. Tensors of the parts are concatenated along dim 0, and lists are joined."""

    def join(*parts: Any) -> Any:
        if isinstance(parts[0], list):
            return [entry for part in parts for entry in part]
        return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]

    return pytree.tree_map(join, *outputs, is_leaf=lambda x: isinstance(x, list))


def _sizes(arguments: dict[str, Any]) -> Any:
    leaves = pytree.tree_leaves(arguments)
    # Include bools and strings, because the model's output may depend on them.
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in leaves if isinstance(x, (Tensor, bool, str)))
