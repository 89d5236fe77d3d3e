"""The gradient of unified sequence parallelism.

:mod:`.operator` of this folder calls :func:`usp_backward`, the twin of
:func:`~para_core.attention.usp.usp_forward`. Tests: tests/attention/test_gradients.py.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from para_core.attention.attend import Saved
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.features import load
from para_core.attention.gradients.blocks import key_heads_backward, local_backward, low_rows_backward
from para_core.attention.gradients.contract import Backward, QueryGradients
from para_core.attention.usp import autocasts


def compose_backward(plan: AttentionPlan, masked: bool) -> Backward:
    """Return the gradient of what :func:`para_core.attention.usp.compose` returns."""
    spec = plan.spec
    backward = local_backward(spec.options.backend, spec.scale)
    if spec.num_heads != spec.num_kv_heads:
        backward = key_heads_backward(backward)
    backward = load(plan.style.gradient)(backward, plan.style)
    if masked:
        backward = low_rows_backward(backward, plan.style.mask_tiling)
    return backward


# The composition of a plan is made once. A plan is compared by identity.
compose_backward_once = lru_cache(maxsize=1024)(compose_backward)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_gradient(path: str) -> bool:
    """Raise ``RuntimeError`` if the gradient of a ring style, ``RingStyle.gradient``, was removed.

    Otherwise return True: Dynamo runs this once, while tracing, and needs a result to treat as a constant.
    """
    try:
        load(path)
    except ModuleNotFoundError:
        raise RuntimeError(
            f"this call over several ranks requires a gradient, and {path.partition(':')[0]} of para_core.attention, "
            "which computes it, was removed. Call it under torch.no_grad(), or use another rotate_method."
        ) from None
    return True


def usp_backward(
    plan: AttentionPlan, grad_out: Tensor, saved: Saved, mask: Tensor | None, *, mask_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value and, with ``mask_gradient``, of ``mask`` (otherwise None).

    The loss is the sum of the losses of all ranks. ``saved`` is the second result of :func:`usp_forward`, and
    ``plan`` was its argument: both use :attr:`AttentionPlan.with_gradients` of it. Gradients are sent as they
    are, and a backend that is not PyTorch's has its gradient computed by PyTorch's. Collective.
    """
    if autocasts(grad_out):
        with torch.autocast(grad_out.device.type, enabled=False):
            return usp_backward(plan, grad_out, saved, mask, mask_gradient=mask_gradient)
    plan = plan.with_gradients
    if plan.ulysses is not None:
        grad_out = plan.ulysses.enter_gradient(grad_out)
    heads = plan.heads.key_of_each_query(plan.spec.mesh.ulysses.index, grad_out.device)
    query, mask_of_options = saved.query, mask
    for option in plan.spec.options.others:
        mask_of_options = option.mask_of_gradient(plan, query, saved.key, mask_of_options, heads)
    into = QueryGradients.of(
        grad_out=grad_out,
        query=query,
        out=saved.out,
        lse=saved.lse,
        mask=mask_of_options,
        tiling=plan.style.tiling,
        key_heads=heads,
        mask_gradient=mask_gradient,
    )
    # As in the forward, the style gets this rank's own keys, which are block 0, and brings those of others.
    backward = compose_backward_once(plan, mask_of_options is not None)
    grad_key, grad_value = backward(into, saved.key, saved.value, 0)
    grads = [into.grad_query.to(query.dtype), grad_key.to(saved.key.dtype), grad_value.to(saved.value.dtype)]
    grad_mask = into.grad_mask
    if grad_mask is not None and mask is not None:
        # The mask of the options may have more rows, heads or samples than the user's, whose gradients add
        # up.
        grad_mask = grad_mask.sum_to_size(mask.shape)
    if plan.ulysses is not None:
        grads = plan.ulysses.leave_gradients(*grads)
    return grads[0], grads[1], grads[2], grad_mask
