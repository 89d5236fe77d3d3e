"""Interception at the dispatcher affects attention only, in one thread only, and ends with its context."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from para_core import UnifiedAttnMode
from para_core.modes.interceptor import at_the_dispatcher

Q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))


def attend_by_constant(calls, value):
    def attend(call):
        calls.append(call.scale)
        # A handler runs outside the interception.
        return torch.full_like(F.scaled_dot_product_attention(call.query, call.query, call.query), value)

    return attend


@torch.no_grad()
def test_attention_alone_is_intercepted_and_only_inside():
    calls, expected = [], F.scaled_dot_product_attention(Q, Q, Q)
    with at_the_dispatcher(attend_by_constant(calls, 1.0)):
        assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q, scale=0.5), torch.ones_like(Q))
        assert torch.equal(F.softmax(Q, -1), torch.softmax(Q, -1))
        with at_the_dispatcher(attend_by_constant(calls, 2.0)):
            assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), torch.full_like(Q, 2.0))
        assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), torch.ones_like(Q))
        with UnifiedAttnMode.disable():
            assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), expected)
    assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), expected)
    assert calls == [0.5, None, None]


@torch.no_grad()
def test_attention_inside_of_torchs_own_modules_is_seen():
    calls, x = [], torch.randn(1, 4, 8)
    module = nn.MultiheadAttention(8, 2, batch_first=True).train()  # In training mode torch uses no fused kernel.
    with at_the_dispatcher(attend_by_constant(calls, 1.0)):
        module(x, x, x, need_weights=False)
    assert len(calls) == 1


@torch.no_grad()
def test_another_thread_is_not_intercepted():
    expected, outs = F.scaled_dot_product_attention(Q, Q, Q), []
    with at_the_dispatcher(attend_by_constant([], 1.0)):
        thread = threading.Thread(target=lambda: outs.append(F.scaled_dot_product_attention(Q, Q, Q)))
        thread.start()
        thread.join()
    assert torch.equal(outs[0], expected)


@torch.no_grad()
def test_an_exception_leaves_nothing_behind():
    with pytest.raises(ValueError, match="mine"), at_the_dispatcher(attend_by_constant([], 1.0)):
        raise ValueError("mine")
    assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), F.scaled_dot_product_attention(Q, Q, Q))


@torch.no_grad()
def test_no_mode_is_entered():
    functions = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            functions.append(func)
            return func(*args, **(kwargs or {}))

    with at_the_dispatcher(attend_by_constant([], 1.0)):
        assert torch._C._len_torch_function_stack() == 0
        with Watch():
            Q + 1
    assert len(functions) == 1


@pytest.mark.parametrize("before", [False, True], ids=["first called inside", "called outside before"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@torch.no_grad()
def test_separately_compiled_attention_raises(backend, before):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x * 2, x, x) + 1, backend=backend)
    if before:
        compiled(Q)
    with (
        at_the_dispatcher(attend_by_constant([], 1.0)),
        pytest.raises(RuntimeError, match=r"scaled_dot_product_attention.*compiled"),
    ):
        compiled(Q)
