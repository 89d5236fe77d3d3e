"""Interception at the dispatcher affects attention only, in one thread only, and ends with its context."""

import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from para_core import PipeFusion, UnifiedAttnMode
from para_core.adapters import parallelize_pipe
from para_core.modes import interceptor
from para_core.modes.interceptor import at_the_dispatcher
from para_core.torch_internals import SpareDispatchKey
from tests.tiny import flux_pipe, relative_error
from tests.weights.test_pipefusion import by_hand, run

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
    x, others = torch.randn(1, 4, 8), []
    module = nn.MultiheadAttention(8, 2, batch_first=True).train()  # In training mode torch uses no fused kernel.
    with pytest.raises(ValueError, match="mine"), at_the_dispatcher(attend_by_constant(calls, 1.0)):
        assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q, scale=0.5), torch.ones_like(Q))
        assert torch.equal(F.softmax(Q, -1), torch.softmax(Q, -1))
        with at_the_dispatcher(attend_by_constant(calls, 2.0)):
            assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), torch.full_like(Q, 2.0))
        module(x, x, x, need_weights=False)
        with UnifiedAttnMode.disable() as disabled:
            with disabled:  # The same context may be entered twice.
                assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), expected)
            assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), expected)
        assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), torch.ones_like(Q))
        thread = threading.Thread(target=lambda: others.append(F.scaled_dot_product_attention(Q, Q, Q)))
        thread.start()
        thread.join()
        assert torch._C._len_torch_function_stack() == 0, "a mode was entered"
        raise ValueError("mine")
    assert torch.equal(F.scaled_dot_product_attention(Q, Q, Q), expected)
    assert torch.equal(others[0], expected)
    assert calls == [0.5, None, None, None]


@torch.no_grad()
def test_separately_compiled_attention_raises():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x * 2, x, x) + 1, backend="aot_eager")
    compiled(Q)
    constant, message = attend_by_constant([], 1.0), r"scaled_dot_product_attention.*compiled"
    with at_the_dispatcher(constant), pytest.raises(RuntimeError, match=message):
        compiled(Q)


def test_without_the_key_patches_are_the_same_and_the_dispatcher_refuses():
    with mock.patch.object(interceptor, "_DISPATCH_KEY", SpareDispatchKey("NoSuchKey", {})):
        assert relative_error(run(parallelize_pipe(flux_pipe(), pipefusion=PipeFusion(3))), by_hand(3)) < 1e-5
        with pytest.raises(RuntimeError), at_the_dispatcher(F.scaled_dot_product_attention):
            pass
