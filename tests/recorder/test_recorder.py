"""Events of recorded calls of small models, in each form of attention, and under an outer mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from para_core.recorder.events import (
    AttentionEnd,
    AttentionStart,
    FunctionCall,
    ModuleEnd,
    ModuleStart,
    OperatorCall,
)
from para_core.recorder.operator_count import OperatorCount
from para_core.recorder.recorder import Recorder
from para_core.recorder.without_data import attend_without_data, attention_without_data
from para_core.torch_internals import FakeTensorMode, flex_attention_operator, function_mode_stack
from tests.modes import fake_flash_attn as flash

B, H, S, D = 2, 3, 5, 4


class Attention(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.proj = nn.Linear(D, D)

    def forward(self, x):
        return self.proj(self.attn(x, x, x))


class Fails(nn.Module):
    def forward(self, x):
        raise ValueError("no")


class Catches(nn.Module):
    """A model that goes on after a submodule has failed."""

    def __init__(self):
        super().__init__()
        self.bad, self.good = nn.Sequential(Fails()), Attention()

    def forward(self, x):
        try:
            self.bad(x)
        except ValueError:
            return self.good(x, x, x)


def recorded(model, *args, function=None):
    events = []
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), Recorder(events.append).watch(model):
        output = model(*args) if function is None else function()
    return output, events


def attention_in(events):
    return [event for event in events if isinstance(event, AttentionStart)]


def test_events_come_in_order_of_time():
    x = torch.randn(B, H, S, D)
    output, events = recorded(Model(), x)
    kinds = [(type(event), event.name) for event in events]
    assert kinds == [
        (ModuleStart, ""),
        (ModuleStart, "attn"),
        (AttentionStart, "attn"),
        (AttentionEnd, "attn"),
        (FunctionCall, "attn"),
        (ModuleEnd, "attn"),
        (ModuleStart, "proj"),
        (FunctionCall, "proj"),
        (ModuleEnd, "proj"),
        (ModuleEnd, ""),
    ]
    assert [event.time for event in events] == list(range(1, len(events) + 1))
    assert events[0].args == (x,) and events[-1].output is output
    assert events[2].call.query is x and events[3].output.shape == x.shape
    assert events[7].function is F.linear


def test_hooks_and_modes_are_gone_afterwards():
    model = Catches()
    with pytest.raises(ValueError, match="no"):
        recorded(model, None, function=lambda: model.bad(None))
    assert not function_mode_stack()
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())


def test_a_failed_module_does_not_end_and_stays_named():
    model, events = nn.Sequential(Model(), Fails()), []
    recorder = Recorder(events.append)
    with pytest.raises(ValueError, match="no"), recorder.watch(model):
        model(torch.randn(B, H, S, D))
    assert recorder.running == ["", "1"]
    assert [event.name for event in events if isinstance(event, ModuleEnd)] == ["0.attn", "0.proj", "0"]


def test_events_go_on_after_a_caught_error():
    _, events = recorded(Catches(), torch.randn(B, H, S, D))
    assert [event.name for event in attention_in(events)] == ["good"]
    assert [event.name for event in events if isinstance(event, ModuleEnd)] == ["good", ""]


def test_multi_head_attention_is_seen():
    model = nn.MultiheadAttention(D, 2, batch_first=True).eval()
    x = torch.randn(B, S, D)
    (output, _), events = recorded(model, None, function=lambda: model(x, x[:, :3], x[:, :3], need_weights=False))
    (event,) = attention_in(events)
    assert event.function is F.multi_head_attention_forward and event.is_sdpa
    assert (event.call.query.shape[-2], event.call.key.shape[-2]) == (S, 3)
    torch.testing.assert_close(output, model(x, x[:, :3], x[:, :3], need_weights=False)[0])


def test_a_flash_attention_operator_is_seen():
    q = torch.randn(B, S, H, 8)  # flash_attn pads heads to a multiple of 8
    output, events = recorded(nn.Identity(), None, function=lambda: flash.flash_attn_func(q, q, q))
    (event,) = attention_in(events)
    assert "_flash_attn_forward" in str(event.function) and event.is_sdpa
    assert event.call.query.shape == (B, H, S, 8)
    torch.testing.assert_close(output, F.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3).transpose(1, 2))


def test_flex_attention_is_seen():
    q = torch.randn(B, H, S, D)
    output, events = recorded(nn.Identity(), None, function=lambda: flex_attention(q, q, q))
    (event,) = attention_in(events)
    assert event.function is flex_attention_operator and not event.is_sdpa
    assert event.call.query.shape == q.shape
    (end,) = [event for event in events if isinstance(event, AttentionEnd)]
    assert end.output.shape == q.shape
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, q, q))


def test_the_operator_of_sdpa_is_seen():
    q = torch.randn(B, H, S, D)
    sdpa = torch.ops.aten.scaled_dot_product_attention
    _, events = recorded(nn.Identity(), None, function=lambda: sdpa(q, q, q, scale=0.5))
    assert [(event.function, event.call.scale) for event in attention_in(events)] == [(sdpa, 0.5)]


class Doubled(TorchFunctionMode):
    """An outer mode that changes attention, as a plan's does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.scaled_dot_product_attention else out


def test_an_outer_mode_still_computes_attention_and_calls_are_reported_once():
    x, events = torch.randn(B, H, S, D), []
    recorder = Recorder(events.append)
    model = Attention()
    with recorder.watch(model), Doubled(), recorder:
        inside, outside = model(x, x, x), F.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(inside, 2 * F.scaled_dot_product_attention(x, x, x))
    torch.testing.assert_close(outside, inside)
    assert [event.name for event in attention_in(events)] == ["", ""]
    assert sum(isinstance(event, FunctionCall) for event in events) == 2


def test_attention_of_a_module_inside_a_mode_is_reported():
    x, events = torch.randn(B, H, S, D), []
    model = Model()
    with Recorder(events.append).watch(model), Doubled():
        model(x)
    assert [event.name for event in attention_in(events)] == ["attn"]


def test_computations_of_the_handler_are_no_events():
    seen = []

    def handle(event):
        seen.append(event)
        if isinstance(event, FunctionCall):
            F.softmax(event.output, dim=-1)

    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    with Recorder(handle):
        F.linear(x, weight)
    assert [event.function for event in seen] == [F.linear]


def test_operators_are_counted():
    model, count = nn.Linear(4, 8, bias=False), OperatorCount()

    def handle(event):
        if isinstance(event, OperatorCall):
            count.note(event)

    with torch.no_grad(), Recorder(handle).watch(model, operators=True):
        y = model(torch.ones(2, 4)) + 1  # three tensors of 2 × 4, 2 × 8 and 2 × 8 elements of 4 bytes
        y.view(-1)
    assert count.launches == 3  # ones, mm and add; a view is none
    assert count.moved == [0, 32 + 64 + 64]  # ones writes, add reads and writes; a product does not count
    assert count.peak == [0, 64 + 64]  # the first tensor is freed before the third is made


@pytest.mark.parametrize("shape", [(B, H, S, D), (H, S, D), (S, D), (1, B, H, S, D)])
def test_attention_without_data_has_the_shape_of_attention(shape):
    query, key = torch.randn(shape), torch.randn(shape).narrow(-2, 0, 3)
    value = torch.randn(shape).narrow(-2, 0, 3)[..., :2]
    expected = F.scaled_dot_product_attention(query, key, value)
    with attention_without_data():
        out = F.scaled_dot_product_attention(query.to("meta"), key.to("meta"), value.to("meta"))
        real = F.scaled_dot_product_attention(query, key, value)
    assert out.is_meta and out.shape == expected.shape and out.dtype == expected.dtype
    torch.testing.assert_close(real, expected)


def test_attention_without_data_allocates_no_scores():
    count = OperatorCount()

    def handle(event):
        if isinstance(event, OperatorCall):
            count.note(event)

    with FakeTensorMode(), Recorder(handle, attend=attend_without_data).watch(nn.Identity(), operators=True):
        q = torch.empty(1, 1, 1000, 1)
        F.scaled_dot_product_attention(q, q, q)
    assert sum(count.peak) == 2 * 4000
