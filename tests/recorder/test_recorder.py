"""Events of recorded calls of small models, in each form of attention, and under an outer mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from para_core.attention.sdpa_call import SdpaCall
from para_core.recorder.events import AttentionEnd, AttentionStart, FunctionCall, ModuleEnd, ModuleStart, OperatorCall
from para_core.recorder.operator_count import OperatorCount
from para_core.recorder.recorder import Recorder
from para_core.recorder.without_data import attend_without_data
from para_core.torch_internals import function_mode_stack
from tests.modes import fake_flash_attn as flash

B, H, S, D = 2, 3, 5, 8  # flash_attn pads heads to a multiple of 8.


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


def recorded(model, call):
    events = []
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), Recorder(events.append).watch(model):
        output = call()
    return output, events


def names(events, kind):
    return [event.name for event in events if isinstance(event, kind)]


def test_events_come_in_order_of_time():
    model, x = Model(), torch.randn(B, H, S, D)
    output, events = recorded(model, lambda: model(x))
    assert [(type(event), event.name) for event in events] == [
        (ModuleStart, ""),
        *[(kind, "attn") for kind in (ModuleStart, AttentionStart, AttentionEnd, FunctionCall, ModuleEnd)],
        *[(kind, "proj") for kind in (ModuleStart, FunctionCall, ModuleEnd)],
        (ModuleEnd, ""),
    ]
    assert [event.time for event in events] == list(range(1, len(events) + 1))
    assert events[0].args == (x,) and events[-1].output is output
    assert events[2].call.query is x and events[3].output.shape == x.shape
    assert events[7].function is F.linear


def test_a_failed_module_does_not_end_and_leaves_nothing():
    model, events, x = nn.ModuleList([nn.Sequential(Model(), nn.Fold(1, 1)), Attention()]), [], torch.randn(B, H, S, D)
    with Recorder(events.append).watch(model):
        with pytest.raises(RuntimeError, match="2D"):
            model[0](x)
        # Events go on after an error that the model catches.
        model[1](x, x, x)
    assert names(events, ModuleEnd) == ["0.0.attn", "0.0.proj", "0.0", "1"]
    assert names(events, AttentionStart) == ["0.0.attn", "1"]
    assert not function_mode_stack()
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())


MULTI_HEAD = nn.MultiheadAttention(D, 2, batch_first=True).eval()
SDPA = torch.ops.aten.scaled_dot_product_attention
# Without a dim of samples, torch's SDPA on the CPU refuses a mask with is_causal.
MASKS = {"attn_mask": torch.ones(S, 3).bool().triu(1), "key_padding_mask": torch.arange(3) == 1, "need_weights": False}


@pytest.mark.parametrize(
    ("call", "function"),
    [
        (lambda q, k: MULTI_HEAD(q[0, 0], *k[0, :2], is_causal=True, **MASKS)[0], "multi_head_attention"),
        (lambda q, k: flash.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, k))).transpose(1, 2), "_flash_attn_"),
        (lambda q, k: flex_attention(q, k, k), "flex_attention"),
        (lambda q, k: SDPA(q, k, k), "aten.scaled_dot_product_attention"),
    ],
)
def test_each_form_of_attention_is_seen_and_computed(call, function):
    q, k = torch.randn(B, H, S, D), torch.randn(B, H, 3, D)
    output, events = recorded(MULTI_HEAD, lambda: call(q, k))
    (start,), (end,) = ([event for event in events if isinstance(event, x)] for x in (AttentionStart, AttentionEnd))
    assert (function in str(start.function), start.is_sdpa) == (True, function != "flex_attention")
    assert (start.call.query.shape[-2], start.call.key.shape[-2], end.output.shape[-2]) == (S, 3, S)
    with torch.no_grad():
        torch.testing.assert_close(output, call(q, k))


def test_only_tensors_without_data_get_attention_without_data():
    q, k = torch.randn(B, H, S, D), torch.randn(1, H, 3, D)
    assert torch.equal(attend_without_data(SdpaCall(q, k, k)), F.scaled_dot_product_attention(q, k, k))
    assert attend_without_data(SdpaCall(*(x.to("meta") for x in (q, k, k[..., :2])))).shape == (B, H, S, 2)


class Doubled(TorchFunctionMode):
    """An outer mode that changes attention, as a plan's does."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.scaled_dot_product_attention else out


def test_an_outer_mode_still_computes_attention_and_calls_are_reported_once():
    x, events, model = torch.randn(B, H, S, D), [], Attention()
    recorder = Recorder(events.append)
    with recorder.watch(model), Doubled(), recorder:
        inside, outside = model(x, x, x), F.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(inside, 2 * F.scaled_dot_product_attention(x, x, x))
    torch.testing.assert_close(outside, inside)
    assert names(events, AttentionStart) == names(events, FunctionCall) == ["", ""]


def counted(call):
    count = OperatorCount()

    def handle(event):
        if isinstance(event, OperatorCall):
            count.note(event)

    with torch.no_grad(), Recorder(handle).watch(nn.Identity(), operators=True):
        call()
    return count


def test_operators_are_counted():
    weight = torch.ones(8, 4)
    # Three tensors of 2 × 4, 2 × 8 and 2 × 8 elements of 4 bytes.
    count = counted(lambda: (F.linear(torch.ones(2, 4), weight) + 1).view(-1))
    assert count.launches == 3  # ones, mm and add; a view is none
    assert count.moved == 32 + 64 + 64  # ones writes, add reads and writes; a product does not count
    assert count.peak == [0, 64 + 64]  # the first tensor is freed before the third is made
    assert count.products == 2 * 2 * 8 * 4


def test_products_of_any_form_are_counted_and_views_in_place_launch_nothing():
    a, b, image, kernel = torch.ones(3, 2, 4), torch.ones(3, 4, 5), torch.ones(1, 4, 6), torch.ones(4, 2, 3)
    for call in (lambda: a @ b, lambda: torch.einsum("bij,bjk->bik", a, b), lambda: torch.baddbmm(a @ b, a, b)):
        products = counted(call).products
        assert products % (2 * 3 * 2 * 4 * 5) == 0 < products
    # Each of 4 × 6 entries is multiplied by a kernel of 2 × 3.
    assert counted(lambda: F.conv_transpose1d(image, kernel)).products == 2 * 4 * 6 * 2 * 3
    in_place = counted(lambda: torch.empty(2, 1).t_().squeeze_().unsqueeze_(0))
    assert (in_place.launches, in_place.moved) == (0, 0)
