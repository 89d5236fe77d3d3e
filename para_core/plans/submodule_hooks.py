"""The function that runs around a submodule's call under a plan: cuts inputs, exchanges, names attention, gathers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from para_core.instance.record import Around
from para_core.plans.exchange import HeadExchange, SumsOverRanks, add_halo, drop_halo
from para_core.plans.module_matching import ModuleRules
from para_core.plans.plan import AttentionByHeads, LinearAttention, OneForEach
from para_core.plans.plan_queries import attention_calls

if TYPE_CHECKING:
    from para_core.plans.region import Region


def make_hook(region: Region, rules: ModuleRules, parameters: tuple[str, ...], heads: int) -> Around:
    """Return the function that runs around the call of a submodule with ``rules``.

    ``heads`` is the number of heads on all ranks, for an :class:`AttentionByHeads`.
    """
    if rules.exchange is not None:
        if rules.exchange == "enter":
            return partial(_enter_heads, region.head_exchanges, rules.parts)
        return partial(_leave_heads, region.head_exchanges)
    name = rules.name
    attention = rules.attention
    halo = rules.halo
    gathers = rules.gathers
    of_inputs = rules.of_inputs
    of_outputs = rules.of_outputs

    def attend(call: Around, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(attention, AttentionByHeads):
            setattr(module, attention.heads, heads)
        if not attention or not region.interceptions:
            return call(module, *args, **kwargs)
        interception = region.interceptions[-1]
        interception.planned.bind_checkpoint()
        if isinstance(attention, (tuple, OneForEach)):
            with interception.attend_to(attention_calls(attention, parameters, args, kwargs)) as planned:
                if not (torch.compiler.is_compiling() or region.check.due):
                    return call(module, *args, **kwargs)
                return region.check.run(planned, call, module, args, kwargs)
        by_heads = (
            isinstance(attention, AttentionByHeads) and region.is_parallel and heads >= region.mesh.ranks
        )
        # Share the heads of a short, replicated segment too, because cached keys are those of a rank's
        # heads. With fewer heads than ranks no call shares them, since a sharded one raises.
        if not by_heads and not region.is_sharded(attention.segment):
            return call(module, *args, **kwargs)
        if isinstance(attention, LinearAttention):
            sums = SumsOverRanks(attention, region.mesh)
            with sums:
                output = call(module, *args, **kwargs)
            sums.check_summed()
        else:
            segment = region.executor.segment(attention.segment)
            exchange = HeadExchange(attention, segment, region.mesh, module, heads)
            region.head_exchanges.append(exchange)
            try:
                with interception.switch_off():
                    output = exchange.run(call, parameters, args, kwargs)
            finally:
                region.head_exchanges.clear()
        interception.planned.intercepted[0] = True
        return output

    def hook(call: Around, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not region.interceptions:
            return call(module, *args, **kwargs)
        interception = region.interceptions[-1]
        rows = None
        interception.planned.bind_checkpoint()
        if of_inputs:
            args, kwargs = region.executor.arguments(of_inputs, parameters, args, kwargs, name)
            region.intercept_if_sharded(of_inputs.values())
        if halo is not None and region.is_sharded(halo.segment):
            rows = args[0].shape[halo.dim]
            args = (add_halo(args[0], halo, region.executor.segment(halo.segment), region.mesh), *args[1:])
        output = attend(call, module, *args, **kwargs)
        if halo is not None and rows is not None:
            output = drop_halo(output, halo, rows, region.mesh)
        if of_outputs:
            output = region.executor.outputs_at(output, of_outputs, name)
            region.intercept_if_sharded(of_outputs.values())
        if gathers:
            output = region.executor.outputs(output, gathers)
            interception.planned.active[0] = False
        return output

    if of_inputs or of_outputs or gathers or halo is not None:
        return hook
    # Return `attend` itself if nothing else is needed: one Python frame less per call.
    return attend


def _enter_heads(
    exchanges: Sequence[HeadExchange],
    parts: int | None,
    call: Around,
    projection: nn.Module,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    output = call(projection, *args, **kwargs)
    if not exchanges:
        return output
    return exchanges[-1].enter(output, parts)


def _leave_heads(
    exchanges: Sequence[HeadExchange],
    call: Around,
    projection: nn.Module,
    /,
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if exchanges:
        x = exchanges[-1].leave(x)
    return call(projection, x, *args, **kwargs)
