"""The calls that a mode intercepts, and the sequences that it remembers and forgets."""

import gc
import re
import threading
import warnings
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import _get_current_function_mode_stack

from para_core import (
    BatchParallelAttnMode,
    RingAttnMode,
    Segment,
    SequenceLayout,
    UlyssesAttnMode,
    UnifiedAttnMode,
    init_context_parallel_mesh,
)
from tests.attention.one_device import make_qkv, relative_error


def make_mesh(ring, ulysses):
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def on_one_device(S=13, H=3, **options):
    return F.scaled_dot_product_attention(*make_qkv(S, H, **options))


def attend_whole(mode, S=13, H=3, **options):
    """Shard, attend and gather through ``mode``, which was entered before."""
    q, k, v = (mode.shard(x, dim=2) for x in make_qkv(S, H, **options))
    return mode.gather(F.scaled_dot_product_attention(q, k, v), dim=2)


def check(outs, expected, bound=1e-5):
    for rank, out in enumerate(outs):
        assert relative_error(out, expected) < bound, f"rank {rank}"


# -- A user's own transformer.


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, width=24, heads=3, depth=2):
        super().__init__()
        self.attentions = nn.ModuleList([Attention(width, heads) for _ in range(depth)])

    def forward(self, x):
        for attention in self.attentions:
            x = x + attention(F.layer_norm(x, x.shape[-1:]))
        return x


def make_transformer():
    torch.manual_seed(1)
    return Transformer().eval()


def tokens(S, seed=0, width=24):
    return torch.randn(2, S, width, generator=torch.Generator().manual_seed(seed))


def wrap_a_model_in_many_meshes():
    model, world_size = make_transformer(), dist.get_world_size()
    outs = []
    with torch.no_grad():
        for round, options in enumerate(
            [{}, {"max_ring_dim_size": world_size}, {"max_ring_dim_size": 2}, {"max_ulysses_dim_size": 1}, {}] * 2
        ):
            mesh = init_context_parallel_mesh("cpu", **options)
            x = tokens(11 + round)
            with UnifiedAttnMode(mesh) as cp:
                outs.append(cp.gather(model(cp.shard(x, dim=1)), dim=1))
    return outs


@pytest.mark.parametrize("world_size", [2, 4])
def test_own_transformer_takes_new_mesh_each_round(rank_pool, world_size):
    model = make_transformer()
    with torch.no_grad():
        expected = [model(tokens(11 + round)) for round in range(10)]
    for rank, outs in enumerate(rank_pool.run(wrap_a_model_in_many_meshes, world_size)):
        for round, (out, whole) in enumerate(zip(outs, expected, strict=True)):
            assert relative_error(out, whole) < 1e-5, f"round {round}, rank {rank}"


# -- Attention modules of torch.


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


def run_modules(ring, ulysses, grad):
    mesh = make_mesh(ring, ulysses)
    outs = []
    with torch.set_grad_enabled(grad):
        for kind, batch_first in MODULES:
            module, x = make_module(kind, batch_first), tokens(7, width=12)
            dim = 1 if batch_first else 0
            x = x if batch_first else x.transpose(0, 1)
            with UnifiedAttnMode(mesh) as cp:
                outs.append(cp.gather(call_module(module, kind, cp.shard(x, dim=dim)), dim=dim).detach())
    return outs


MODULES = [(kind, first) for kind in ("attention", "relu", "gelu", "encoder", "decoder") for first in (True, False)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_torchs_own_attention_modules_equal_one_device(rank_pool, ring, ulysses, grad):
    expected = []
    for kind, batch_first in MODULES:
        x = tokens(7, width=12)
        module = make_module(kind, batch_first)
        expected.append(call_module(module, kind, x if batch_first else x.transpose(0, 1)).detach())
    for rank, outs in enumerate(rank_pool.run(run_modules, ring * ulysses, ring, ulysses, grad)):
        for case, out, whole in zip(MODULES, outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5, f"{case}, rank {rank}"


def masked_calls_without_batch(shard):
    """Yield a sequence and masks for each call of ``nn.MultiheadAttention``. ``shard(x, dim)`` splits the tokens of
    x.
    """
    generator = torch.Generator().manual_seed(0)
    padding, square, of_heads = (torch.rand(*shape, 7, generator=generator) > 0.7 for shape in ((), (7,), (3, 7)))
    for mask in (padding, square, of_heads):
        mask[..., 0] = False  # Each query needs a key that it may see.
    x = shard(tokens(7, width=12)[0], 0)
    for of_rows in ({}, {"attn_mask": shard(square, 0)}, {"attn_mask": shard(of_heads, 1)}):
        for of_keys in ({}, {"key_padding_mask": padding}):
            yield x, {**of_rows, **of_keys}


def attend_without_batch(ring, ulysses):
    module, outs = make_module("attention", batch_first=True), []
    with torch.no_grad(), UnifiedAttnMode(make_mesh(ring, ulysses)) as cp:
        for x, masks in masked_calls_without_batch(lambda x, dim: cp.shard(x, dim=dim)):
            outs.append(cp.gather(module(x, x, x, need_weights=False, **masks)[0], dim=0))
    return outs


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_masks_of_multihead_attention_without_batch(rank_pool, ring, ulysses):
    module = make_module("attention", batch_first=True)
    with torch.no_grad():
        calls = masked_calls_without_batch(lambda x, dim: x)
        expected = [module(x, x, x, need_weights=False, **masks)[0] for x, masks in calls]
    for outs in rank_pool.run(attend_without_batch, ring * ulysses, ring, ulysses):
        assert [relative_error(out, whole) < 1e-5 for out, whole in zip(outs, expected, strict=True)] == [True] * 6


def message_of(call):
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def call_what_no_mode_sees():
    mesh = make_mesh(1, 2)
    attention = make_module("attention", True)
    x = tokens(4, seed=dist.get_rank(), width=12)
    native = [attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias]
    messages = {}
    with torch.no_grad(), UnifiedAttnMode(mesh) as mode:
        # This test is about errors, so the warning about calls that were not intercepted is switched off.
        mode.intercepted = True
        messages["native"] = message_of(lambda: torch._native_multi_head_attention(x, x, x, 12, 3, *native))
        messages["weights"] = message_of(lambda: attention(x, x, x))
        messages["mask"] = message_of(
            lambda: attention(x, x, x, need_weights=False, attn_mask=torch.zeros(4, 4, dtype=torch.bool))
        )
        with UnifiedAttnMode.disable():
            disabled = torch._native_multi_head_attention(x, x, x, 12, 3, *native)[0]
            alone = attention(x, x, x)[0]
    return messages, relative_error(disabled, alone)


def test_unseen_attention_raises(rank_pool):
    for messages, error in rank_pool.run(call_what_no_mode_sees, 2):
        assert "_native_multi_head_attention" in messages["native"]
        assert "UnifiedAttnMode.disable()" in messages["native"]
        assert "need_weights=True" in messages["weights"]
        assert "attn_mask is [..., 4, 4]" in messages["mask"]
        assert error < 1e-6


def attend_in_a_module_with_masks(ring, ulysses, cases):
    mesh = make_mesh(ring, ulysses)
    attention = make_module("attention", True)
    outs = []
    with torch.no_grad():
        for local, padding, mask in cases:
            with UnifiedAttnMode(mesh) as cp:
                x = cp.shard(tokens(7, width=12), dim=1)
                own = cp.shard(padding, dim=1) if local else padding
                y = attention(x, x, x, need_weights=False, key_padding_mask=own, attn_mask=mask)[0]
                outs.append(cp.gather(y, dim=1))
    return outs


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_masks_of_multihead_attention(rank_pool, ring, ulysses):
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    upper = torch.ones(7, 7, dtype=torch.bool).triu(1)
    per_head = torch.randn(2 * 3, 7, 7)
    cases = [
        (False, padding, None),
        (True, padding, None),
        (False, None, upper),
        (False, padding, upper),
        (False, None, per_head),
        (False, torch.zeros(2, 7).masked_fill(padding, float("-inf")), per_head),
        (True, torch.randn(2, 7), None),
    ]
    attention, x = make_module("attention", True), tokens(7, width=12)
    for rank, outs in enumerate(rank_pool.run(attend_in_a_module_with_masks, ring * ulysses, ring, ulysses, cases)):
        for (local, padding, mask), out in zip(cases, outs, strict=True):
            with torch.no_grad():
                expected = attention(x, x, x, need_weights=False, key_padding_mask=padding, attn_mask=mask)[0]
            assert relative_error(out, expected) < 1e-5, f"local {local}, {padding}, {mask}, rank {rank}"


# -- On and off.


def disable_inside():
    mesh = make_mesh(1, 2)
    with UnifiedAttnMode(mesh) as cp:
        q, k, v = (cp.shard(x, dim=2) for x in make_qkv(12, 2))
        with UnifiedAttnMode.disable():
            alone = F.scaled_dot_product_attention(q, k, v)
            with UnifiedAttnMode(mesh):  # The innermost mode applies.
                inner = F.scaled_dot_product_attention(q, k, v)
        after = F.scaled_dot_product_attention(q, k, v)
    return alone, inner, after


def test_disable_switches_interception_off_inside_and_only_there(rank_pool):
    whole = on_one_device(12, 2)
    for rank, (alone, inner, after) in enumerate(rank_pool.run(disable_inside, 2)):
        q, k, v = (x.chunk(2, dim=2)[rank] for x in make_qkv(12, 2))
        assert relative_error(alone, F.scaled_dot_product_attention(q, k, v)) < 1e-6
        assert relative_error(inner, whole.chunk(2, dim=2)[rank]) < 1e-5
        assert relative_error(after, whole.chunk(2, dim=2)[rank]) < 1e-5


def nest_modes():
    """Nest a mode whose mesh is one half of the ranks in another mode, which applies again afterwards."""
    mesh = make_mesh(2, 2)
    outer, inner = UnifiedAttnMode(mesh), UnifiedAttnMode(mesh["ulysses"])
    with outer:
        first = attend_whole(outer)
        with inner:
            second = attend_whole(inner, S=9)
        third = attend_whole(outer)
        with outer:  # The same mode is entered a second time.
            fourth = attend_whole(outer)
        fifth = attend_whole(outer)
    return first, second, third, fourth, fifth


def test_modes_can_be_nested_and_the_innermost_counts(rank_pool):
    for outs in rank_pool.run(nest_modes, 4):
        for index, out in enumerate(outs):
            assert relative_error(out, on_one_device(9 if index == 1 else 13)) < 1e-5, index


def leave_by_an_exception(kind):
    mesh = make_mesh(1, 2)
    mode = UnifiedAttnMode(mesh)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    for _ in range(2):
        with pytest.raises(kind, match="mine"), mode as cp:
            cp.shard(make_qkv(5, 3)[0], dim=2)
            raise kind("mine")
    assert not _get_current_function_mode_stack()
    assert torch.backends.mha.get_fastpath_enabled() == fast_path
    assert mode._known == ()
    q, k, v = make_qkv(6, 2)
    assert relative_error(F.scaled_dot_product_attention(q, k, v), on_one_device(6, 2)) < 1e-6
    with mode as cp:
        return attend_whole(cp)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_inside_leaves_no_state(rank_pool, kind):
    check(rank_pool.run(leave_by_an_exception, 2, kind), on_one_device())


def attend_in_two_threads():
    """Attend in two threads. Each has its own mode, group and data, and the thread that enters first leaves first."""
    # Use groups, because torch gives all mesh dims that span all ranks one and the same group.
    modes = [RingAttnMode(dist.new_group([0, 1])), UlyssesAttnMode(dist.new_group([0, 1]))]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    first_inside, both_inside = threading.Event(), threading.Barrier(2)
    outs, stacks, errors = [None, None], [None, None], []

    def work(index):
        try:
            if index == 1:
                first_inside.wait(30)
            with torch.no_grad(), modes[index] as cp:
                first_inside.set()
                both_inside.wait(30)
                outs[index] = [attend_whole(cp, S=13 + index, seed=index) for _ in range(3)]
                stacks[index] = len(_get_current_function_mode_stack())
                if index == 1:
                    both_inside.wait(30)
            if index == 0:
                both_inside.wait(30)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return outs, stacks, torch.backends.mha.get_fastpath_enabled() == fast_path


def test_two_threads_have_modes_and_meshes_of_their_own(rank_pool):
    for outs, stacks, restored in rank_pool.run(attend_in_two_threads, 2):
        for index in range(2):
            for out in outs[index]:
                assert relative_error(out, on_one_device(13 + index, seed=index)) < 1e-5
        assert stacks == [1, 1]
        assert restored, "a switch of torch was left as the other thread had it"


def attributes_behind_a_graph_break():
    def attributes(x):
        torch._dynamo.graph_break()
        shape, is_leaf, device, dtype, learns = x.shape, x.is_leaf, x.device, x.dtype, x.requires_grad
        torch._dynamo.graph_break()
        return [shape, is_leaf, device, dtype, learns, x.grad]

    tensors, mesh = (torch.zeros(3, 4), torch.zeros(5, dtype=torch.float64)), make_mesh(2, 1)
    samples = init_device_mesh("cpu", (2,), mesh_dim_names=("batch",))
    results = []
    for modes in (
        [UnifiedAttnMode(mesh)],
        [BatchParallelAttnMode(samples)],
        [UnifiedAttnMode(mesh), UnifiedAttnMode.disable()],
    ):
        torch._dynamo.reset()
        compiled = torch.compile(attributes, backend="eager")
        with warnings.catch_warnings(action="ignore"), ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            results.append([compiled(x) for x in tensors] == [attributes(x) for x in tensors])
    return results


def test_attributes_behind_graph_break_are_right(rank_pool):
    for results in rank_pool.run(attributes_behind_a_graph_break, 2):
        assert results == [True] * 3


# -- Attention on one rank only is never silent.


def intercept_nothing():
    mesh = make_mesh(1, 2)
    messages = []
    mode = UnifiedAttnMode(mesh)
    alone = UnifiedAttnMode(init_device_mesh("cpu", (2, 1), mesh_dim_names=("batch", "ring"))["ring"])
    for block in (mode, mode, UnifiedAttnMode(mesh), alone):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with block:
                torch.ones(2) + 1
        messages.append([f"{w.category.__name__} {w.filename}: {w.message}" for w in caught])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="mine"), UnifiedAttnMode(mesh):
            raise ValueError("mine")
    return [*messages, [str(w.message) for w in caught]]


def test_intercepting_nothing_on_several_ranks_warns_once_per_mode(rank_pool):
    for first, again, other, one_rank, raised in rank_pool.run(intercept_nothing, 2):
        assert len(first) == len(other) == 1
        assert re.search(r"UnifiedAttnMode on 2 ranks .*scaled_dot_product_attention", first[0])
        assert __file__ in first[0], "the warning does not point at the with statement"
        assert again == one_rank == raised == []


def attend_by_hand(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def intercept_attention_by_hand():
    mesh, results = make_mesh(1, 2), {}

    def leave(name, body):
        try:
            with warnings.catch_warnings(record=True) as caught, UnifiedAttnMode(mesh) as cp:
                warnings.simplefilter("always")
                body(cp, [cp.shard(x, dim=2) for x in make_qkv(7, 2)])
            results[name] = [str(warning.message) for warning in caught]
        except (RuntimeError, ValueError) as error:
            results[name] = f"{type(error).__name__}: {error}"

    def mixed(cp, tensors):
        F.scaled_dot_product_attention(*tensors)
        attend_by_hand(*tensors)

    def disabled(cp, tensors):
        with UnifiedAttnMode.disable():
            attend_by_hand(*tensors)

    def fail(cp, tensors):
        attend_by_hand(*tensors)
        raise ValueError("mine")

    leave("by hand", lambda cp, tensors: attend_by_hand(*tensors))
    leave("F.softmax", lambda cp, tensors: F.softmax(tensors[0] @ tensors[1].mT, dim=3))
    leave("torch.special", lambda cp, tensors: torch.special.softmax(tensors[0] @ tensors[1].mT, 3))
    leave("mixed", mixed)
    leave("disabled", disabled)
    leave("another exception", fail)
    leave("shard and gather", lambda cp, tensors: cp.gather(tensors[0], dim=2))
    leave("a softmax over channels", lambda cp, tensors: tensors[0].softmax(-1))
    return results


def test_attention_by_hand_raises_when_the_mode_is_left(rank_pool):
    for results in rank_pool.run(intercept_attention_by_hand, 2):
        for name in ("by hand", "F.softmax", "torch.special"):
            assert results[name].startswith("RuntimeError") and "attn_implementation='sdpa'" in results[name]
        assert len(results["mixed"]) == 1 and "attn_implementation='sdpa'" in results["mixed"][0]
        assert results["another exception"] == "ValueError: mine"
        for name in ("disabled", "shard and gather", "a softmax over channels"):
            assert len(results[name]) == 1 and "intercepted no scaled_dot_product_attention" in results[name][0], name


def use_a_mode_again():
    mode, q = UnifiedAttnMode(make_mesh(2, 1)), torch.randn(1, 2, 8, 4)

    def use(attend):
        with warnings.catch_warnings(record=True) as caught, mode as cp:
            warnings.simplefilter("always")
            cp.gather(attend(cp.shard(q, dim=2)), dim=2)
        return [str(warning.message) for warning in caught]

    def by_hand(x):
        return (x @ x.transpose(-1, -2)).softmax(-1) @ x

    def fail(x):
        by_hand(x)
        raise KeyError("mine")

    with torch.no_grad():
        results = [use(lambda x: F.scaled_dot_product_attention(x, x, x)), message_of(lambda: use(by_hand))]
        with pytest.raises(KeyError):
            use(fail)
        return *results, use(lambda x: F.scaled_dot_product_attention(x, x, x))


def test_each_use_of_a_mode_is_judged_by_itself(rank_pool):
    for first, by_hand, after_an_exception in rank_pool.run(use_a_mode_again, 2):
        assert (first, after_an_exception) == ([], [])
        assert by_hand.startswith("RuntimeError")


# -- Which sequence a tensor belongs to.


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16]
# gloo cannot send these dtypes.
DTYPES += [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]


def shard_and_gather():
    mesh = make_mesh(2, 2)
    results = {}
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        # This test is about splitting only, so the warning about calls that were not intercepted is switched off.
        cp.intercepted = True
        x = torch.arange(3 * 7 * 2).view(3, 7, 2)
        part = cp.shard(x, dim=1)
        results["part"] = part
        results["whole"] = cp.gather(part, dim=1)
        results["negative dim"] = cp.gather(cp.shard(x, dim=-2), dim=-2)
        results["dtypes"] = [
            torch.equal(cp.gather(cp.shard(x.to(dtype), dim=1), dim=1).double(), x.to(dtype).double())
            for dtype in DTYPES
        ]
        layout = SequenceLayout((Segment("text", 2, replicated=True), Segment("image", 5)), 4)
        part = cp.shard(x, dim=1, sequence=layout)
        results["segments"] = part
        results["whole segments"] = cp.gather(part, dim=1, sequence=layout)
        short = cp.shard(x[:, :2], dim=1, sequence=cp.sequence(2))
        results["short"] = short
        results["whole short"] = cp.gather(short, dim=1, sequence=cp.sequence(2))
    return results


def test_shard_and_gather_are_inverse(rank_pool):
    x = torch.arange(3 * 7 * 2).view(3, 7, 2)
    for rank, results in enumerate(rank_pool.run(shard_and_gather, 4)):
        assert torch.equal(results["part"], x.tensor_split(4, dim=1)[rank])
        assert results["part"].is_contiguous()
        assert torch.equal(results["whole"], x)
        assert torch.equal(results["negative dim"], x)
        assert all(results["dtypes"])
        assert torch.equal(results["segments"], torch.cat([x[:, :2], x[:, 2:].tensor_split(4, dim=1)[rank]], dim=1))
        assert torch.equal(results["whole segments"], x)
        assert torch.equal(results["short"], x[:, :2].tensor_split(4, dim=1)[rank])
        assert torch.equal(results["whole short"], x[:, :2])


def attend_to_what_was_cut():
    mesh = make_mesh(1, 2)
    image, text = make_qkv(10, 3), make_qkv(4, 3, seed=1)
    outs = {}
    with UnifiedAttnMode(mesh) as cp:
        image, text = ([cp.shard(x, dim=2) for x in xs] for xs in (image, text))
        outs["image"] = cp.gather(F.scaled_dot_product_attention(*image), dim=2, sequence=cp.sequence(10))
        outs["cross"] = cp.gather(F.scaled_dot_product_attention(image[0], *text[1:]), dim=2, sequence=cp.sequence(10))
        for name, first, second in (("image, text", image, text), ("text, image", text, image)):
            out = F.scaled_dot_product_attention(*[torch.cat(pair, dim=2) for pair in zip(first, second, strict=True)])
            sizes = [x[0].shape[2] for x in (first, second)]
            outs[name] = [
                cp.gather(part, dim=2, sequence=cp.sequence(total))
                for part, total in zip(out.split(sizes, dim=2), (10, 4) if first is image else (4, 10), strict=True)
            ]
        joint = [torch.cat(pair, dim=2) for pair in zip(image, text, strict=True)]
        outs["causal"] = message_of(lambda: F.scaled_dot_product_attention(*joint, is_causal=True))
        outs["unknown"] = message_of(lambda: F.scaled_dot_product_attention(*[x[:, :, :3] for x in image]))
        outs["ambiguous"] = message_of(lambda: cp.gather(image[0], dim=2))
    with cp:
        q, k, v = (x.chunk(2, dim=2)[dist.get_rank()] for x in make_qkv(6, 3, seed=2))
        outs["forgotten"] = F.scaled_dot_product_attention(q, k, v)
    return outs


def test_attention_covers_sharded_sequences_and_concatenations(rank_pool):
    image, text = make_qkv(10, 3), make_qkv(4, 3, seed=1)
    joint = F.scaled_dot_product_attention(*[torch.cat(pair, dim=2) for pair in zip(image, text, strict=True)])
    for rank, outs in enumerate(rank_pool.run(attend_to_what_was_cut, 2)):
        assert relative_error(outs["image"], F.scaled_dot_product_attention(*image)) < 1e-5
        assert relative_error(outs["cross"], F.scaled_dot_product_attention(image[0], *text[1:])) < 1e-5
        for name in ("image, text", "text, image"):
            parts = outs[name] if name == "image, text" else outs[name][::-1]
            assert relative_error(parts[0], joint[:, :, :10]) < 1e-5
            assert relative_error(parts[1], joint[:, :, 10:]) < 1e-5
        assert re.search(r"query has 3 .*cp\.using", outs["unknown"])
        assert re.search(r"10, 4 tokens.*sequence=", outs["ambiguous"])
        expected = on_one_device(6, 3, seed=2).chunk(2, dim=2)[rank]
        assert relative_error(outs["forgotten"], expected) < 1e-5


def attend_causally_to_two_joint_orders():
    mesh = make_mesh(1, 2)
    results = {}
    for name, order in (("in order", (0, 1)), ("reversed", (1, 0))):
        with UnifiedAttnMode(mesh) as cp:
            parts = [[cp.shard(x, dim=2) for x in make_qkv(S, 3, seed=S)] for S in (10, 4)]
            joint = [torch.cat([parts[order[0]][i], parts[order[1]][i]], dim=2) for i in range(3)]
            try:
                results[name] = F.scaled_dot_product_attention(*joint, is_causal=True)
            except ValueError as error:
                results[name] = str(error)
    return results


def test_is_causal_over_a_concatenation_never_guesses_the_order(rank_pool):
    """Check that an ambiguous order gives the right result or an error: two sequences can be joined in two orders of
    equal length.
    """
    for rank, results in enumerate(rank_pool.run(attend_causally_to_two_joint_orders, 2)):
        for name, order in (("in order", (10, 4)), ("reversed", (4, 10))):
            if isinstance(results[name], str):
                assert "is_causal" in results[name]
                continue
            whole = [torch.cat(pair, dim=2) for pair in zip(*[make_qkv(S, 3, seed=S) for S in order], strict=True)]
            expected = F.scaled_dot_product_attention(*whole, is_causal=True)
            starts = [0, order[0]]
            part = torch.cat(
                [expected[:, :, b : b + S].chunk(2, dim=2)[rank] for b, S in zip(starts, order, strict=True)], dim=2
            )
            assert relative_error(results[name], part) < 1e-5, f"{name}, rank {rank}"


def use_layouts():
    mesh = make_mesh(1, 2)
    layout = SequenceLayout((Segment("text", 3, replicated=True), Segment("image", 9)), 2)
    outs = {}
    with UnifiedAttnMode(mesh) as cp:
        q, k, v = (cp.shard(x, dim=2, sequence=layout) for x in make_qkv(12, 3))
        with cp.using(layout):
            outs["using"] = cp.gather(F.scaled_dot_product_attention(q, k, v), dim=2, sequence=layout)
            outs["wrong"] = message_of(lambda: F.scaled_dot_product_attention(q[:, :, 1:], k, v))
        text = SequenceLayout((Segment("text", 3, replicated=True),), 2)
        with pytest.raises(ZeroDivisionError), cp.using(text):
            1 / 0  # noqa: B018
        assert cp._explicit is None
        other = SequenceLayout((Segment("image", 9),), 4)
        outs["ranks"] = message_of(lambda: cp.using(other).__enter__())
    with UnifiedAttnMode(mesh, layout=layout) as cp:
        outs["layout="] = cp.gather(F.scaled_dot_product_attention(q, k, v), dim=2, sequence=layout)
    with UnifiedAttnMode(mesh) as cp:
        cp.set_layout(layout)
        outs["set_layout"] = cp.gather(F.scaled_dot_product_attention(q, k, v), dim=2, sequence=layout)
    outs["key_layout alone"] = message_of(lambda: UnifiedAttnMode(mesh, key_layout=layout))
    return outs


def test_explicit_layout_overrides_sharded_tensors(rank_pool):
    for outs in rank_pool.run(use_layouts, 2):
        assert relative_error(outs["using"], on_one_device(12)) < 1e-5
        assert relative_error(outs["layout="], on_one_device(12)) < 1e-5
        assert relative_error(outs["set_layout"], on_one_device(12)) < 1e-5
        assert re.search(r"query has \d+ .*layout.*key_layout=", outs["wrong"])
        assert re.search(r"layout .*4 ranks.* 2", outs["ranks"])
        assert re.search(r"key_layout .*layout", outs["key_layout alone"])


def run_alone():
    mesh = init_context_parallel_mesh("cpu")
    q, k, v = make_qkv(7, 2)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    with UnifiedAttnMode(mesh) as cp:
        q = cp.shard(q, dim=2)
        masked = cp.gather(F.scaled_dot_product_attention(q, k, v, attn_mask=mask), dim=2)
        with UnifiedAttnMode.disable():
            disabled = F.scaled_dot_product_attention(q, k, v, mask)
        weights = make_module("attention", True)(*[tokens(4, width=12)] * 3)[1]
    return masked, disabled, weights


def test_one_rank_equals_no_mode(rank_pool):
    (masked, disabled, weights) = rank_pool.run(run_alone, 1)[0]
    q, k, v = make_qkv(7, 2)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert relative_error(masked, expected) < 1e-6
    assert relative_error(disabled, expected) < 1e-6
    assert weights.shape == (2, 4, 4)


def forget_modes():
    mesh = make_mesh(1, 2)
    import weakref

    mode = UnifiedAttnMode(mesh)
    with mode:
        attend_whole(mode)
    gone = weakref.ref(mode)
    del mode
    gc.collect()
    return gone() is None


def test_nothing_keeps_a_mode_alive(rank_pool):
    assert rank_pool.run(forget_modes, 2) == [True, True]


FRAMES = (Segment("text", 3, replicated=True), Segment("video", 25, together=5))  # There are 5 frames of 5 tokens.


def attend_by_frames(ring, ulysses, is_causal, compiled):
    mode = UnifiedAttnMode(make_mesh(ring, ulysses), layout=SequenceLayout(FRAMES, ring * ulysses))
    text, video = make_text_and_video()

    def run(text, video):
        with mode:
            part = torch.cat(
                [text, mode.shard(video, dim=2, sequence=SequenceLayout(FRAMES[1:], ring * ulysses))], dim=2
            )
            out = F.scaled_dot_product_attention(part * 2, part + 1, part - 1, is_causal=is_causal)
            return part.shape[2], mode.gather(out, dim=2, sequence=SequenceLayout(FRAMES, ring * ulysses))

    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    return run(text, video)


def make_text_and_video():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 4, segment.total, 8, generator=generator) for segment in FRAMES]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("is_causal", "compiled"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_frames_that_stay_together_equal_one_device(rank_pool, ring, ulysses, is_causal, compiled):
    whole = torch.cat(make_text_and_video(), dim=2)
    expected = F.scaled_dot_product_attention(whole * 2, whole + 1, whole - 1, is_causal=is_causal)
    results = rank_pool.run(attend_by_frames, ring * ulysses, ring, ulysses, is_causal, compiled)
    num_frames = (2, 1, 1, 1) if ring * ulysses == 4 else (3, 2)
    assert [size for size, _ in results] == [3 + 5 * frames for frames in num_frames]
    for _, out in results:
        assert relative_error(out, expected) < 1e-5


def attend_by_disabled_operator():
    with UnifiedAttnMode(make_mesh(1, 2)) as mode:
        parts = [mode.shard(x, dim=2) for x in make_qkv(13, 3)]
        mode.gather(F.scaled_dot_product_attention(*parts), dim=2)
        with UnifiedAttnMode.disable():
            out = torch.ops.aten.scaled_dot_product_attention(*parts)
    return parts, out


def test_operator_called_by_its_name_is_hidden_by_disable(rank_pool):
    for parts, out in rank_pool.run(attend_by_disabled_operator, 2):
        assert relative_error(out, F.scaled_dot_product_attention(*parts)) < 1e-6


def attend_by_operator(ring, ulysses, compiled):
    mode = UnifiedAttnMode(make_mesh(ring, ulysses))

    def run(q, k, v):
        with mode:
            parts = [mode.shard(x, dim=2, sequence=mode.sequence(13)) for x in (q, k, v)]
            with mode.using(mode.sequence(13)):
                out = torch.ops.aten.scaled_dot_product_attention(*parts, is_causal=True)
            return mode.gather(out, dim=2, sequence=mode.sequence(13))

    return (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(*make_qkv(13, 3))


@pytest.mark.sample(1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_operator_called_by_its_name_equals_one_device(rank_pool, ring, ulysses, compiled):
    expected = F.scaled_dot_product_attention(*make_qkv(13, 3), is_causal=True)
    for out in rank_pool.run(attend_by_operator, 2, ring, ulysses, compiled):
        assert relative_error(out, expected) < 1e-5
