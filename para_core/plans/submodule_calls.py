"""Run the calls of the submodules that a plan names: shard their inputs, intercept their attention or
exchange its heads, add up sums of linear attention, exchange halo rows, gather their outputs.

:mod:`.region` puts these functions around the submodules, and does the same for the model itself. The
exchanges are in :mod:`.exchange`. Outside of a call of the region each function runs its module unchanged.
Tests: tests/plans/test_exactness.py, tests/plans/test_attention_check.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from para_core.distributed.mesh import SequenceMesh
from para_core.instance.record import Wrapper
from para_core.plans.apply_rules import RuleExecutor
from para_core.plans.attention_check import AttentionCheck
from para_core.plans.exchange import HeadExchange, SumsOverRanks, add_halo, drop_halo
from para_core.plans.interception import Interception
from para_core.plans.module_matching import ModuleRules
from para_core.plans.plan import (
    Attention,
    AttentionByHeads,
    AttentionRule,
    LinearAttention,
    OneForEach,
    ShardRule,
)
from para_core.plans.plan_queries import attention_calls
from para_core.torch_internals import top_saved_tensors_hooks


@dataclass(eq=False)
class SubmoduleCalls:
    """The calls of the submodules of one region.

    Two cells of :class:`~para_core.plans.planned_attention.PlannedAttention` are shared with the region:
    ``active[0]``, whether attention is intercepted, which :attr:`intercept_if_sharded` sets and a gather
    clears here, and ``intercepted[0]``, the evidence in the table of :class:`AttentionCheck`.

    Each function that this makes tests for hooks of saved tensors before ``bind_checkpoint``, which says why.
    The lines are repeated, because a function for them would be one Python call more for each module and
    step.

    Args:
        mesh: The ranks.
        executor: Applies the rules of the plan, and knows the segments of the current call.
        check: Finds attention that is not intercepted.
        interceptions: The interception of the region's current call; empty outside of one. It is the region's
            own list, which :class:`~para_core.plans.region.Region` fills and empties, and recomputation by
            activation checkpointing, too.
        intercept_if_sharded: Starts to intercept attention if one of some applied rules has split tokens.
    """

    mesh: SequenceMesh
    executor: RuleExecutor
    check: AttentionCheck
    interceptions: list[Interception]
    intercept_if_sharded: Callable[[Collection[ShardRule]], None]
    # The HeadExchange of the attention module that is running, if its plan entry is an AttentionByHeads.
    # _run_with_heads adds and removes it, and the hooks of the projections read the last one.
    _head_exchanges: list[HeadExchange] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.is_parallel = self.mesh.ranks > 1

    def hook(self, rules: ModuleRules, parameters: tuple[str, ...], heads: int) -> Wrapper:
        """Return the function that runs around the call of a submodule with ``rules``.

        What the functions read of the rules are local variables of the methods that make them, and not
        attributes: Dynamo would guard each attribute.

        Args:
            rules: The rules of the plan for the submodule.
            parameters: The names of the positional parameters of its ``forward``.
            heads: The number of heads on all ranks, for an :class:`AttentionByHeads`; otherwise ignored.
        """
        # match_modules refuses other rules for a module that exchanges heads.
        if rules.exchange is not None:
            if rules.exchange == "enter":
                return partial(self._enter_heads, rules.parts)
            return partial(self._leave_heads, parameters[0])
        attend = self._hook_of_attention(rules.attention, parameters, heads)
        if rules.shard_rules or rules.gathers or rules.halo is not None:
            return self._hook_of_rules(rules, parameters, attend)
        # Return attend itself if nothing else is needed: one Python frame less per call.
        return attend

    def _hook_of_attention(
        self, attention: AttentionRule, parameters: tuple[str, ...], heads: int
    ) -> Wrapper:
        """Return the function that runs around a submodule with this rule for its attention, which may be
        none.
        """
        if isinstance(attention, AttentionByHeads):
            return self._hook_of_heads(attention, parameters, heads)
        if isinstance(attention, LinearAttention):
            return self._hook_of_sums(attention)
        if not attention:
            return _run_without_rules
        return self._hook_of_calls(attention, parameters)

    def _hook_of_calls(
        self, attention: tuple[Attention, ...] | OneForEach, parameters: tuple[str, ...]
    ) -> Wrapper:
        """Return the function that runs around a submodule whose attention calls are intercepted."""

        def attend(call: Wrapper, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not self.interceptions:
                return call(module, *args, **kwargs)
            interception = self.interceptions[-1]
            if not torch.compiler.is_compiling() and top_saved_tensors_hooks(True) is not None:
                interception.planned.bind_checkpoint()
            calls = attention
            if isinstance(calls, OneForEach):
                calls = attention_calls(calls, parameters, args, kwargs)
            if interception.mode is None and not torch.compiler.is_compiling() and not self.check.due:
                # This is what attend_to does at the dispatcher, with fewer Python calls.
                planned = interception.planned.copy_for_calls(calls)
                interception.running.append(planned)
                try:
                    output = call(module, *args, **kwargs)
                finally:
                    interception.running.pop()
                if len(calls) > 1 and planned.on_one_device:
                    planned.check_num_calls()
                return output
            with interception.attend_to(calls) as planned:
                if not (torch.compiler.is_compiling() or self.check.due):
                    output = call(module, *args, **kwargs)
                else:
                    output = self.check.run(planned, call, module, args, kwargs)
                if not torch.compiler.is_compiling() and len(calls) > 1 and planned.on_one_device:
                    planned.check_num_calls()
                return output

        return attend

    def _hook_of_sums(self, attention: LinearAttention) -> Wrapper:
        """Return the function that runs around a module of linear attention, whose sums over tokens are added
        up over all ranks if the tokens are sharded.
        """

        def attend(call: Wrapper, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not self.interceptions:
                return call(module, *args, **kwargs)
            interception = self.interceptions[-1]
            if not torch.compiler.is_compiling() and top_saved_tensors_hooks(True) is not None:
                interception.planned.bind_checkpoint()
            if not self._is_sharded(attention.segment):
                return call(module, *args, **kwargs)
            sums = SumsOverRanks(attention, self.mesh)
            with sums:
                output = call(module, *args, **kwargs)
            sums.check_summed()
            interception.planned.intercepted[0] = True
            return output

        return attend

    def _hook_of_heads(self, attention: AttentionByHeads, parameters: tuple[str, ...], heads: int) -> Wrapper:
        """Return the function that runs around a submodule whose ``heads`` heads the ranks share."""

        def attend(call: Wrapper, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # A graph with flex_attention may have left this rank's number (Region.heads).
            setattr(module, attention.heads, heads)
            if not self.interceptions:
                return call(module, *args, **kwargs)
            interception = self.interceptions[-1]
            if not torch.compiler.is_compiling() and top_saved_tensors_hooks(True) is not None:
                interception.planned.bind_checkpoint()
            # Share the heads of a short, replicated segment too, because cached keys are those of a rank's
            # heads. With fewer heads than ranks no call shares them, since a sharded one raises.
            shares_heads = self.is_parallel and heads >= self.mesh.ranks
            if shares_heads or self._is_sharded(attention.segment):
                segment = self.executor.segment(attention.segment)
                exchange = HeadExchange(attention, segment, self.mesh, module, heads)
                return self._run_with_heads(exchange, interception, call, parameters, args, kwargs)
            return call(module, *args, **kwargs)

        return attend

    def _hook_of_rules(self, rules: ModuleRules, parameters: tuple[str, ...], attend: Wrapper) -> Wrapper:
        """Return the function that shards the inputs of a submodule, exchanges its halo rows, and shards or
        gathers its outputs. ``attend`` runs in between, around the submodule.
        """
        name = rules.name
        halo = rules.halo
        gathers = rules.gathers
        of_inputs = rules.of_inputs
        of_outputs = rules.of_outputs

        def run_by_rules(call: Wrapper, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not self.interceptions:
                return call(module, *args, **kwargs)
            interception = self.interceptions[-1]
            rows = None
            if not torch.compiler.is_compiling() and top_saved_tensors_hooks(True) is not None:
                interception.planned.bind_checkpoint()
            if of_inputs:
                args, kwargs = self.executor.apply_to_arguments(of_inputs, parameters, args, kwargs, name)
                self.intercept_if_sharded(of_inputs.values())
            if halo is not None and self._is_sharded(halo.segment):
                if not args:
                    # The rows are the first parameter, which the model has passed by name.
                    args = (kwargs[parameters[0]],)
                    kwargs = {key: value for key, value in kwargs.items() if key != parameters[0]}
                rows = args[0].shape[halo.dim]
                args = (add_halo(args[0], halo, self.executor.segment(halo.segment), self.mesh), *args[1:])
            output = attend(call, module, *args, **kwargs)
            if halo is not None and rows is not None:
                output = drop_halo(output, halo, rows, self.mesh)
            if of_outputs:
                output = self.executor.apply_to_outputs(output, of_outputs, name)
                self.intercept_if_sharded(of_outputs.values())
            if gathers:
                output = self.executor.gather_outputs(output, gathers)
                # All tokens are gathered, so what follows in the model is not sharded, and its attention is
                # plain.
                interception.planned.active[0] = False
            return output

        return run_by_rules

    def _run_with_heads(
        self,
        exchange: HeadExchange,
        interception: Interception,
        call: Wrapper,
        parameters: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a module on all tokens and this rank's heads. Its projections and output exchange them
        meanwhile (:meth:`_enter_heads`, :meth:`_leave_heads`), and its attention is on one device.
        Collective.
        """
        self._head_exchanges.append(exchange)
        try:
            with interception.switch_off():
                output = exchange.run(call, parameters, args, kwargs)
        finally:
            self._head_exchanges.pop()
        interception.planned.intercepted[0] = True
        return output

    def _is_sharded(self, segment: str) -> bool:
        return self.is_parallel and not self.executor.segment(segment).replicated

    def _enter_heads(
        self, parts: int | None, call: Wrapper, projection: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a projection, and exchange its output for that of all tokens and this rank's heads. Collective."""
        output = call(projection, *args, **kwargs)
        if not self._head_exchanges:
            return output
        return self._head_exchanges[-1].enter(output, parts)

    def _leave_heads(
        self, first: str, call: Wrapper, projection: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Exchange the attention output back, and run the output projection with it. It is the first
        argument, also if the model passes it by its name ``first``. Collective.
        """
        if self._head_exchanges:
            exchange = self._head_exchanges[-1]
            if args:
                args = (exchange.leave(args[0]), *args[1:])
            else:
                kwargs = {**kwargs, first: exchange.leave(kwargs[first])}
        return call(projection, *args, **kwargs)


def _run_without_rules(call: Wrapper, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return call(module, *args, **kwargs)
