"""Attention over the mesh as one operation, which is an operator in a graph.

In a graph, each call is one opaque operator, and so is its gradient. The compiler can then neither drop nor
reorder the collectives inside; a ring of any size is one node; lengths are plain integers at run time; and a
rank without tokens or heads takes part in the collectives. The operator gets the tensors, the spec of the
call as constant JSON (``AttentionSpec.text``), and the lengths.

:class:`~para_core.attention.mesh_attention.MeshAttention` calls :func:`differentiable_usp` if gradients are
enabled or a graph is traced. Tests: tests/attention/test_exactness.py, and tests/attention/test_gradients.py
for a missing feature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.features import GRADIENTS, load
from para_core.attention.graph_calls import OPERATOR_INPUTS, attention_shape, plan_of
from para_core.attention.usp import usp_forward
from para_core.distributed.collectives import define_collective, done

# The functions that compute a call that requires a gradient: one, or none if the feature was removed.
_DIFFERENTIATE: list[Callable[..., Tensor]] = [load(path) for path in GRADIENTS]


def differentiable_usp(
    plan: AttentionPlan, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Return the output of :func:`~para_core.attention.usp.usp_forward`, differentiable; one operator in a
    graph. Collective.

    Raises:
        RuntimeError: The call requires a gradient, and the feature that computes it was removed.
    """
    save = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (mask is not None and mask.requires_grad)
    )
    if save:
        if not _DIFFERENTIATE:
            raise RuntimeError(
                "this call over several ranks requires a gradient, and para_core was installed without its feature "
                "for gradients. Call it under torch.no_grad(), or attend on one rank under UnifiedAttnMode.disable()."
            )
        return _DIFFERENTIATE[0](plan, query, key, value, mask)
    if torch.compiler.is_compiling():
        operator = torch.ops.para_core.attention
        out: Tensor = operator(query, key, value, mask, plan.spec.text, plan.spec.numbers, plan.spec.scale)[0]
        return out
    with torch.no_grad():
        return usp_forward(plan, query, key, value, mask)[0]


def _run_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *call: Any
) -> tuple[Tensor, Tensor]:
    out, _ = usp_forward(plan_of(*call), query, key, value, mask)
    return out, done(out)


define_collective(f"attention({OPERATOR_INPUTS}) -> (Tensor, Tensor)", _run_attention, attention_shape)
