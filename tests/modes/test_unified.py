"""The calls that a mode intercepts, and the sequences that it remembers and forgets."""

import gc
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from para_core import RingAttnMode, Segment, SequenceLayout, UlyssesAttnMode, UnifiedAttnMode
from para_core.distributed.create_mesh import init_context_parallel_mesh
from tests.attention.one_device import make_qkv, relative_error
from tests.modes.outcomes import outcome
from tests.tiny import cpu_mesh


def attend_whole(mode, S=13, H=3, **options):
    """Shard, attend and gather through ``mode``, which was entered before; without one, attend on one device."""
    if mode is None:
        return F.scaled_dot_product_attention(*make_qkv(S, H, **options))
    q, k, v = (mode.shard(x, dim=2) for x in make_qkv(S, H, **options))
    return mode.gather(F.scaled_dot_product_attention(q, k, v), dim=2)


on_one_device = partial(attend_whole, None)


class Attention(nn.Module):
    def __init__(self, width, heads, **options):
        super().__init__()
        self.heads, self.options = heads, options
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2))


def tokens(S, seed=0):
    return torch.randn(2, S, 12, generator=torch.Generator().manual_seed(seed))


MODULES = [(kind, first) for kind in ("attention", "relu", "gelu", "encoder", "decoder") for first in (True, False)]


def make_module(kind, batch_first):
    torch.manual_seed(2)
    if kind == "attention":
        return nn.MultiheadAttention(12, 3, batch_first=batch_first).eval()
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=batch_first, norm_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    if kind == "decoder":
        return nn.TransformerDecoderLayer(12, 3, 16, batch_first=batch_first).eval()
    return nn.TransformerEncoderLayer(12, 3, 16, batch_first=batch_first, activation=kind).eval()


def call_module(module, kind, x):
    if kind == "attention":
        return module(x, x, x, need_weights=False)[0]
    return module(x, x) if kind == "decoder" else module(x)


MESH_OPTIONS = [{}, {"max_ring_dim_size": 4}, {"max_ring_dim_size": 2}, {"max_ulysses_dim_size": 1}, {}]


def run_modules():
    outs, meshes = [], [init_context_parallel_mesh("cpu", **options) for options in MESH_OPTIONS]
    for grad in (False, True):
        for S, ((kind, batch_first), mesh) in enumerate(zip(MODULES, 2 * meshes, strict=True), start=7):
            x, dim = tokens(S), 1 if batch_first else 0
            with torch.set_grad_enabled(grad), UnifiedAttnMode(mesh) as cp:
                part = cp.shard(x if batch_first else x.transpose(0, 1), dim=dim)
                y = call_module(make_module(kind, batch_first), kind, part)
                outs.append(cp.gather(y, dim=dim).detach())
    return outs


def test_torchs_own_modules_equal_one_device(rank_pool):
    expected = []
    with torch.no_grad():
        for S, (kind, batch_first) in enumerate(MODULES, start=7):
            x = tokens(S) if batch_first else tokens(S).transpose(0, 1)
            expected.append(call_module(make_module(kind, batch_first), kind, x))
    for outs in rank_pool.run(run_modules, 4):
        for case, out, whole in zip(2 * MODULES, outs, 2 * expected, strict=True):
            assert relative_error(out, whole) < 1e-5, case


def masked_calls(shard):
    """Yield the tokens and masks of calls of ``nn.MultiheadAttention``. ``shard(x, dim)`` splits the tokens of x."""
    generator = torch.Generator().manual_seed(0)
    padding, square, per_head, of_samples = (
        torch.rand(*shape, 7, generator=generator) > 0.7 for shape in ((2,), (7,), (6, 7), (3, 7))
    )
    for mask in (padding, square, per_head, of_samples):
        mask[..., 0] = False  # Each query needs a key that it may see.
    scores = torch.randn(2, 7, generator=generator)
    x = shard(tokens(7), 1)
    for keys in ({}, {"key_padding_mask": padding}):
        for rows in ({}, {"attn_mask": square}, {"attn_mask": per_head}):
            yield x, {**keys, **rows}
    for S in (7, 2):  # Each of two ranks has one of two tokens.
        for mask in (padding, scores):
            yield shard(tokens(S), 1), {"key_padding_mask": shard(mask[:, :S], 1)}
    yield x, {"key_padding_mask": scores, "attn_mask": torch.randn(6, 7, 7, generator=generator)}
    yield x, {"key_padding_mask": padding, "attn_mask": torch.ones(7, 7).bool().triu(1), "is_causal": True}
    x = shard(tokens(7)[0], 0)
    for rows in ({}, {"attn_mask": shard(square, 0)}, {"attn_mask": shard(of_samples, 1)}):
        for keys in ({}, {"key_padding_mask": padding[0]}):
            yield x, {**rows, **keys}


def attend_masked(ring, ulysses):
    module, outs = make_module("attention", batch_first=True), []
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(ring, ulysses)) as cp:
        for x, masks in masked_calls(lambda x, dim: cp.shard(x, dim=dim)):
            sequence = cp.sequence(2 if x.shape[-2] == 1 else 7)
            outs.append(cp.gather(module(x, x, x, need_weights=False, **masks)[0], x.ndim - 2, sequence=sequence))
    return outs


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_masks_of_multihead_attention(rank_pool, ring, ulysses):
    module = make_module("attention", batch_first=True)
    with torch.no_grad():
        calls = list(masked_calls(lambda x, dim: x))
        expected = [module(x, x, x, need_weights=False, **masks)[0] for x, masks in calls]
    for outs in rank_pool.run(attend_masked, ring * ulysses, ring, ulysses):
        for (x, masks), out, whole in zip(calls, outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5, (x.shape, masks)


def call_what_no_mode_sees():
    attention, x = make_module("attention", True), tokens(4, seed=dist.get_rank())
    w, b, *of_out = attention.parameters()
    fused = partial(torch._native_multi_head_attention, x, x, x, 12, 3, w, b, *of_out)
    forward = partial(F.multi_head_attention_forward, x, x, x, 12, 3, w, b, None, None, False, 0.0, *of_out, False)
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(1, 2)) as mode:
        mode.intercepted = True  # This test is about errors, not about the warning that nothing was intercepted.
        q, rank, square = torch.zeros(1, 2, 4, 8), dist.get_rank(), torch.zeros(4, 4).bool()
        mask = torch.ones(4, 8, dtype=torch.bool) if rank == 0 else None
        attend = partial(F.scaled_dot_product_attention, q, q, q)
        for message, call in {
            r"_native_multi_head_attention.*UnifiedAttnMode\.disable\(\)": fused,
            "need_weights=True": lambda: attention(x, x, x),
            r"attn_mask is \[\.\.\., 4, 4\]": lambda: attention(x, x, x, need_weights=False, attn_mask=square),
            r"attn_mask is \[3, 2, 2\].* 12 ": lambda: forward(None, False, square[None, :2, :2].repeat(3, 1, 1)),
            r"key_padding_mask .*torch\.uint8": lambda: forward(square[:, :2].byte(), False, square[:2, :2]),
            "They also disagree about": lambda: attend(mask, is_causal=rank == 1),
            "^the ranks .* about scale.*1 none": lambda: attend(mask, scale=rank + 1.0),
            r"0: \[1, 1, 4, 8\] .*1: \[1, 2, 4, 8\] ": lambda: attend(torch.ones(1, rank + 1, 4, 8).bool()),
        }.items():
            with pytest.raises((RuntimeError, ValueError), match=message):
                call()
        with UnifiedAttnMode.disable():
            assert relative_error(fused()[0], attention(x, x, x)[0]) < 1e-6


def test_unseen_attention_raises(rank_pool):
    rank_pool.run(call_what_no_mode_sees, 2)


def nest_modes():
    """Nest a mode whose mesh is one half of the ranks in another mode, which applies again afterwards."""
    mesh = cpu_mesh(2, 2)
    outer, inner = UnifiedAttnMode(mesh), UnifiedAttnMode(mesh["ulysses"])
    with outer:
        outs = [attend_whole(outer)]
        with inner:
            outs.append(attend_whole(inner, S=9))
        outs.append(attend_whole(outer))
        with outer:  # The same mode is entered a second time.
            outs.append(attend_whole(outer))
        with UnifiedAttnMode.disable():
            alone = F.scaled_dot_product_attention(*make_qkv(13, 3))
            with inner:
                outs.append(attend_whole(inner, S=9))
        outs.append(attend_whole(outer))
    return outs, alone


def test_innermost_mode_counts_and_disable_holds_inside_alone(rank_pool):
    for outs, alone in rank_pool.run(nest_modes, 4):
        for S, out in zip((13, 9, 13, 13, 9, 13), outs, strict=True):
            assert relative_error(out, on_one_device(S)) < 1e-5
        assert relative_error(alone, on_one_device()) < 1e-6


def leave_by_an_exception():
    mode = UnifiedAttnMode(cpu_mesh(1, 2))
    for kind in (ValueError, KeyboardInterrupt):
        with pytest.raises(kind, match="mine"), mode as cp:
            cp.shard(make_qkv(5, 3)[0], dim=2)
            raise kind("mine")
        assert not _get_current_function_mode_stack()
        # The default of torch: a mode that never restores it would also have changed it in earlier tests.
        assert torch.backends.mha.get_fastpath_enabled()
        assert mode._known == ()

    def stop(mode, x):  # Dynamo stops this trace before a gather, so that nothing restores the switch.
        mode.shard(x, 1, sequence=mode.sequence(5))
        torch._dynamo.graph_break()

    aborted = partial(torch.compile(stop, fullgraph=True, backend="eager"), mode, torch.zeros(1, 5))
    for in_a_thread in (False, True):
        with pytest.raises(torch._dynamo.exc.Unsupported), ThreadPoolExecutor(1) as thread:
            thread.submit(aborted).result() if in_a_thread else aborted()
        with mode as cp:
            out = attend_whole(cp)
        assert torch.backends.mha.get_fastpath_enabled()
    gone = weakref.ref(mode)
    del mode, cp, aborted
    gc.collect()
    return out, gone() is None


def test_an_exception_inside_leaves_no_state_and_nothing_keeps_a_mode_alive(rank_pool):
    for out, is_gone in rank_pool.run(leave_by_an_exception, 2):
        assert relative_error(out, on_one_device()) < 1e-5
        assert is_gone


def attend_in_two_threads():
    """Attend in two threads. Each has its own mode, group and data, and the thread that enters first leaves first."""
    # Use groups, because torch gives all mesh dims that span all ranks one and the same group.
    modes = [RingAttnMode(dist.new_group([0, 1])), UlyssesAttnMode(dist.new_group([0, 1]))]
    first_inside, both_inside, first_outside = threading.Event(), threading.Barrier(2), threading.Event()

    def work(index):
        if index == 1:
            first_inside.wait(30)
        with torch.no_grad(), modes[index] as cp:
            first_inside.set()
            both_inside.wait(30)
            outs = [attend_whole(cp, S=13 + index, seed=index) for _ in range(3)]
            if index == 1:
                first_outside.wait(30)
        first_outside.set()
        return outs

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, range(2))), torch.backends.mha.get_fastpath_enabled()


def test_two_threads_have_modes_and_meshes_of_their_own(rank_pool):
    for both, restored in rank_pool.run(attend_in_two_threads, 2):
        for index, outs in enumerate(both):
            assert all(relative_error(out, on_one_device(13 + index, seed=index)) < 1e-5 for out in outs)
        assert restored, "a switch of torch was left as the other thread had it"


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16]
# gloo cannot send these dtypes.
DTYPES += [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def shard_and_gather():
    results, x = [], torch.arange(3 * 7 * 2).view(3, 7, 2)
    layout = SequenceLayout((Segment("text", 2, replicated=True), Segment("image", 5)), 4)
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(2, 2)) as cp:
        cp.intercepted = True  # This test is about splitting only.
        balanced = cp.sequence(7, balance="causal")
        cases = (x, -2, None), (x, 1, layout), (x[:, :2], 1, cp.sequence(2)), (x, 1, balanced)
        for whole, dim, sequence in (*[(x.to(dtype), 1, None) for dtype in DTYPES], *cases):
            part = cp.shard(whole, dim=dim, sequence=sequence)
            is_whole = torch.equal(cp.gather(part, dim=dim, sequence=sequence).double(), whole.double())
            results.append((part.double(), is_whole and part.is_contiguous()))
    with pytest.raises(ValueError, match="balance='causal'"):
        cp.gather(part, dim=1)
    assert torch.equal(UnifiedAttnMode(cpu_mesh(2, 2), layout=balanced).gather(part, dim=1), x)
    return results


def test_shard_and_gather_are_inverse(rank_pool):
    x = torch.arange(3 * 7 * 2).view(3, 7, 2)
    for rank, results in enumerate(rank_pool.run(shard_and_gather, 4)):
        own, text, image = (whole.tensor_split(4, dim=1)[rank] for whole in (x, x[:, :2], x[:, 2:]))
        both_ends = torch.cat([x.tensor_split(8, dim=1)[part] for part in (rank, 7 - rank)], dim=1)
        expected = [*map(own.to, DTYPES), own, torch.cat([x[:, :2], image], dim=1), text, both_ends]
        for (part, is_whole), right in zip(results, expected, strict=True):
            assert torch.equal(part, right.double()) and is_whole, right.dtype


def join(first, second):
    return [torch.cat(pair, dim=2) for pair in zip(first, second, strict=True)]


def attend_to_what_was_cut():
    mesh, outs = cpu_mesh(1, 2), {}
    with UnifiedAttnMode(mesh) as cp:
        image, text = ([cp.shard(x, dim=2) for x in make_qkv(S, 3, seed=S)] for S in (10, 4))
        gather = lambda x, total: cp.gather(x, dim=2, sequence=cp.sequence(total))  # noqa: E731
        outs["image"] = gather(F.scaled_dot_product_attention(*image), 10)
        outs["operator"] = gather(torch.ops.aten.scaled_dot_product_attention(*image), 10)
        with UnifiedAttnMode.disable():
            outs["disabled"] = torch.ops.aten.scaled_dot_product_attention(*image)
        outs["cross"] = gather(F.scaled_dot_product_attention(image[0], *text[1:]), 10)
        out = F.scaled_dot_product_attention(*join(image, text))
        outs["joint"] = torch.cat([gather(out[:, :, :5], 10), gather(out[:, :, 5:], 4)], dim=2)
        out = F.scaled_dot_product_attention(*join(text, image))
        outs["reversed"] = torch.cat([gather(out[:, :, 2:], 10), gather(out[:, :, :2], 4)], dim=2)
        outs["causal"] = outcome(lambda: F.scaled_dot_product_attention(*join(image, text), is_causal=True))
        outs["reversed, causal"] = outcome(lambda: F.scaled_dot_product_attention(*join(text, image), is_causal=True))
        outs["unknown"] = outcome(lambda: F.scaled_dot_product_attention(*[x[:, :, :3] for x in image]))
        outs["ambiguous"] = outcome(lambda: cp.gather(image[0], dim=2))
    with cp:
        q, k, v = (x.chunk(2, dim=2)[dist.get_rank()] for x in make_qkv(6, 3, seed=2))
        outs["forgotten"] = F.scaled_dot_product_attention(q, k, v)
    frames = SequenceLayout((Segment("video", 10, together=10),), 2)
    with cp:
        cp.shard(torch.zeros(10), dim=0)  # As many tokens, in other parts.
        q, k, v = (cp.shard(x, dim=2, sequence=frames) for x in make_qkv(10, 3, seed=10))
        outs["frames"] = cp.gather(F.scaled_dot_product_attention(q, k, v), dim=2, sequence=frames)
    # The parts of both ranks have equal lengths, so only the sharded layout tells that they are no equal parts.
    for name, replicated in (("with replicated tokens", True), ("in one tensor", False)):
        layout = SequenceLayout((Segment("text", 4, replicated=replicated), Segment("image", 6)), 2)
        with cp:
            q, k, v = (cp.shard(x, dim=2, sequence=layout) for x in make_qkv(10, 3, seed=10))
            outs[name] = outcome(lambda: F.scaled_dot_product_attention(q, k, v))  # noqa: B023
            outs[f"{name}, causal"] = outcome(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))  # noqa: B023
    return outs


def test_attention_covers_sharded_sequences_and_never_guesses(rank_pool):
    image, text = make_qkv(10, 3, seed=10), make_qkv(4, 3, seed=4)
    joint = F.scaled_dot_product_attention(*join(image, text))
    for rank, outs in enumerate(rank_pool.run(attend_to_what_was_cut, 2)):
        own = F.scaled_dot_product_attention(*[x.chunk(2, dim=2)[rank] for x in image])
        exact = dict.fromkeys(("image", "operator", "frames"), F.scaled_dot_product_attention(*image))
        exact |= {"cross": F.scaled_dot_product_attention(image[0], *text[1:]), "joint": joint, "reversed": joint}
        exact["forgotten"] = on_one_device(6, 3, seed=2).chunk(2, dim=2)[rank]
        for name, out in exact.items():
            assert relative_error(outs[name], out) < 1e-5, name
        assert relative_error(outs["disabled"], own) < 1e-6
        assert re.search(r"query has 3 .*cp\.using", outs["unknown"])
        assert re.search(r"10, 4 tokens.*sequence=", outs["ambiguous"])
        assert re.search(r"replicated.*cp\.using", str(outs["with replicated tokens"]))
        assert "ValueError" not in str(outs["in one tensor"])
        # Two sequences can be joined in two orders of equal length.
        for name in ("causal", "reversed, causal", "with replicated tokens, causal", "in one tensor, causal"):
            assert re.match("ValueError: .*is_causal", str(outs[name]))


def use_layouts():
    mesh, outs = cpu_mesh(1, 2), {}
    layout = SequenceLayout((Segment("text", 3, replicated=True), Segment("image", 9)), 2)

    def attend(cp):
        return cp.gather(F.scaled_dot_product_attention(q, k, v), dim=2, sequence=layout)

    with UnifiedAttnMode(mesh) as cp:
        q, k, v = (cp.shard(x, dim=2, sequence=layout) for x in make_qkv(12, 3))
        with cp.using(layout):
            outs["using"] = attend(cp)
            outs["wrong"] = outcome(lambda: F.scaled_dot_product_attention(q[:, :, 1:], k, v))
        with pytest.raises(ZeroDivisionError), cp.using(cp.sequence(3)):
            1 / 0  # noqa: B018
        assert cp._explicit is None
        outs["ranks"] = outcome(lambda: cp.using(SequenceLayout((Segment("image", 9),), 4)).__enter__())
    with UnifiedAttnMode(mesh, layout=layout) as cp:
        outs["layout="] = attend(cp)
    with UnifiedAttnMode(mesh) as cp:
        cp.set_layout(layout)
        outs["set_layout"] = attend(cp)
        balanced = cp.sequence(12, balance="causal")
        parts = [cp.shard(x, dim=2, sequence=balanced) for x in make_qkv(12, 3)]
        cp.set_layout(cp.sequence(12))
        F.scaled_dot_product_attention(*parts, is_causal=True)
        torch.compile(cp.set_layout, backend="eager", fullgraph=True)(balanced)
        out = F.scaled_dot_product_attention(*parts, is_causal=True)
        outs["in a graph"] = cp.gather(out, dim=2, sequence=balanced)
    outs["key_layout alone"] = outcome(lambda: UnifiedAttnMode(mesh, key_layout=layout))
    return outs


def test_explicit_layout_overrides_sharded_tensors(rank_pool):
    for outs in rank_pool.run(use_layouts, 2):
        for name in ("using", "layout=", "set_layout"):
            assert relative_error(outs[name], on_one_device(12)) < 1e-5, name
        expected = F.scaled_dot_product_attention(*make_qkv(12, 3), is_causal=True)
        assert relative_error(outs["in a graph"], expected) < 1e-5
        assert re.search(r"query has \d+ .*layout.*key_layout=", outs["wrong"])
        assert re.search(r"layout .*4 ranks.* 2", outs["ranks"])
        assert re.search(r"key_layout .*layout", outs["key_layout alone"])
