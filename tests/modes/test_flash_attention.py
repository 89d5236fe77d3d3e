"""FlashAttention's operators inside a mode and under a plan, compared with the same call on one device."""

import functools
import warnings

import diffusers.models.attention_dispatch
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from para_core import SequenceLayout, UnifiedAttnMode
from para_core.distributed.mesh import sequence_mesh
from para_core.layout.sequence import Segment
from para_core.modes.foreign_operators import has_other_builds
from para_core.plans.plan import Attention, Gather, Plan, Split
from para_core.plans.region import apply_plan, remove_plan
from tests.attention.one_device import relative_error
from tests.modes import fake_flash_attn as flash

MESHES = [(2, 1), (1, 2)]


def make_mesh(ring, ulysses):
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


def make_tensors(S_q=7, S_k=7, H=4, H_kv=4, D=20, batch=2):
    """Return query, key and value in FlashAttention's shape ``[B, S, H, D]``."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, S, heads, D, generator=generator) for S, heads in ((S_q, H), (S_k, H_kv), (S_k, H_kv))]


def packed(function, q, k, v, **options):
    return function(torch.stack([q, k, v], dim=2), **options)


def varlen(q, k, v, **options):
    offsets = [torch.tensor([0, x.shape[1]], dtype=torch.int32) for x in (q, k)]
    return flash.flash_attn_varlen_func(q[0], k[0], v[0], *offsets, q.shape[1], k.shape[1], **options)[None]


def varlen_packed(q, k, v, **options):
    offsets = torch.tensor([0, q.shape[1], q.shape[1]], dtype=torch.int32)  # The second sequence is empty.
    return flash.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 2)[0], offsets, q.shape[1], **options)[None]


FUNCTIONS = {
    "plain": flash.flash_attn_func,
    "packed": lambda *tensors, **options: packed(flash.flash_attn_qkvpacked_func, *tensors, **options),
    "varlen": varlen,
    "varlen packed": varlen_packed,
    "version 3": flash.flash_attn_3_func,
}
CASES = [
    ("plain", {}, {}),
    ("plain", {"H_kv": 2}, {"causal": True}),
    ("plain", {"D": 16}, {"softmax_scale": 0.3, "window_size": (-1, 0)}),
    ("plain", {"S_q": 5, "S_k": 9}, {"softcap": 0.0, "deterministic": True}),
    ("plain", {"S_q": 1, "S_k": 1}, {}),
    ("packed", {}, {"causal": True}),
    ("varlen", {"batch": 1}, {"causal": True, "softmax_scale": 0.1}),
    ("varlen", {"batch": 1, "S_q": 3, "S_k": 8, "H_kv": 1}, {}),
    ("varlen packed", {"batch": 1, "D": 8}, {}),
    ("version 3", {"D": 24}, {"causal": True}),
]


def run_cases(ring, ulysses):
    mesh, outs = make_mesh(ring, ulysses), []
    for name, shape, options in CASES:
        with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
            q, k, v = make_tensors(**shape)
            queries, keys = cp.sequence(q.shape[1]), cp.sequence(k.shape[1])
            q = cp.shard(q, dim=1, sequence=queries)
            k, v = (cp.shard(x, dim=1, sequence=keys) for x in (k, v))
            with cp.using(queries, key_layout=keys):
                outs.append(cp.gather(FUNCTIONS[name](q, k, v, **options), dim=1, sequence=queries))
    return outs


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [*MESHES, (2, 2)])
def test_flash_attention_equals_one_device(rank_pool, ring, ulysses):
    for outs in rank_pool.run(run_cases, ring * ulysses, ring=ring, ulysses=ulysses):
        for (name, shape, options), out in zip(CASES, outs, strict=True):
            expected = FUNCTIONS[name](*make_tensors(**shape), **options)
            assert relative_error(out, expected) < 1e-5, (name, shape, options)


# -- Refused calls.


def message_of(call):
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def refuse():
    """Return the errors of calls that cannot be computed over several ranks, some of which only one rank makes."""
    mesh, rank = make_mesh(1, 2), dist.get_rank()
    q, k, v = make_tensors(S_q=4, S_k=4, D=8, batch=1)
    offsets = torch.tensor([0, 3, 4], dtype=torch.int32)
    long = torch.tensor([0, 9 if rank == 0 else 4], dtype=torch.int32)
    options = {
        "window_size": {"window_size": (2, 2)},
        "window_size (2, 0)": {"window_size": (2, -1), "causal": True},
        "dropout_p": {"dropout_p": 0.1 if rank == 1 else 0.0},
        "softcap": {"softcap": 20.0 if rank == 0 else 0.0},
        "alibi_slopes": {"alibi_slopes": torch.ones(4)},
    }
    messages = {}
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        flash.flash_attn_func(q, k, v)
        for name, arguments in options.items():
            messages[name] = message_of(lambda arguments=arguments: flash.flash_attn_func(q, k, v, **arguments))
        for name, ends in (("2 sequence(s)", offsets), ("9 tokens", long)):
            messages[name] = message_of(
                lambda ends=ends: flash.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 4, 4)
            )
        with cp.using(cp.sequence(8), key_layout=cp.sequence(12)):
            messages["8 queries and 12 keys"] = message_of(
                lambda: flash.flash_attn_func(q, k.repeat(1, 2, 1, 1)[:, :6], v.repeat(1, 2, 1, 1)[:, :6], causal=True)
            )
        _out, lse, _ = flash.flash_attn_func(q, k, v, return_attn_probs=True)
        messages["return_attn_probs"] = message_of(lambda: lse + 1)
        messages["UnifiedAttnMode.disable()"] = message_of(
            lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        )
        messages["a_library.memory_efficient_attention"] = message_of(lambda: call_other_library(q, k, v))
        with UnifiedAttnMode.disable():
            alone = flash.flash_attn_func(q, k, v, softcap=0.0, window_size=(2, 2))
            message = message_of(lambda: call_other_library(q, k, v))
    expected = flash.flash_attn_func(q, k, v, window_size=(2, 2))
    return messages, relative_error(alone, expected), message, list(lse.shape)


@torch.library.custom_op("a_library::memory_efficient_attention", mutates_args=())
def call_other_library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q + 1


def test_operators_without_a_route_raise_on_every_rank(rank_pool):
    for messages, error, disabled, lse_shape in rank_pool.run(refuse, 2):
        for name, message in messages.items():
            assert name in message, (name, message)
        assert error < 1e-6 and disabled == "no error" and lse_shape == [1, 4, 4]


# -- Gradients.


GRADIENTS = [("plain", {"D": 16}), ("plain", {"D": 8, "H_kv": 2}), ("plain", {"D": 20}), ("packed", {"D": 8})]


def gradients(name, shape, shard=lambda x: x, gather=lambda y: y):
    inputs = [x.requires_grad_() for x in make_tensors(**shape)]
    out = gather(FUNCTIONS[name](*[shard(x) for x in inputs], causal=True))
    out.square().sum().backward()
    return [x.grad for x in inputs]


def gradients_of_ranks():
    mesh, results = make_mesh(2, 1), []
    for name, shape in GRADIENTS:
        with UnifiedAttnMode(mesh) as cp:
            shard, gather = (lambda x: cp.shard(x, dim=1)), (lambda y: cp.gather(y, dim=1))
            try:
                grads = gradients(name, shape, shard, gather)
            except RuntimeError as error:
                results.append(str(error))
                continue
        for grad in grads:
            dist.all_reduce(grad)
        results.append([grad / 2 for grad in grads])
    return results


def test_gradients_are_of_the_mesh_or_raise(rank_pool):
    for exact, grouped, padded, packed in rank_pool.run(gradients_of_ranks, 2):
        for grads, (name, shape) in zip((exact, grouped), GRADIENTS, strict=False):
            for grad, expected in zip(grads, gradients(name, shape), strict=True):
                assert relative_error(grad, expected) < 1e-5, shape
        assert "multiple of 8" in padded and "multiple of 8" in packed


# -- Compiled calls.


def compiled(function, x, cp):
    tokens = cp.sequence(x.shape[1])
    q, k, v = cp.shard(x, dim=1, sequence=tokens).unflatten(-1, (3, 2, -1)).unbind(2)
    return cp.gather(function(q, k, v, causal=True), dim=1, sequence=tokens)


def run_compiled():
    mesh, outs = make_mesh(2, 1), []
    for function in (flash.flash_attn_func, flash.flash_attn_3_func):

        def call(x, function=function):
            with UnifiedAttnMode(mesh) as cp:
                return compiled(function, x, cp)

        call = torch.compile(call, backend="aot_eager", fullgraph=True)
        # Dynamo instantiates the autograd.Function that it traces, which warns.
        with torch.no_grad(), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            outs.append([call(torch.randn(1, S, 48, generator=torch.Generator().manual_seed(S))) for S in (7, 10)])
    return outs


@pytest.mark.long
def test_compiled_flash_attention_equals_one_device(rank_pool):
    for outs in rank_pool.run(run_compiled, 2):
        for function, pair in zip((flash.flash_attn_func, flash.flash_attn_3_func), outs, strict=True):
            for S, out in zip((7, 10), pair, strict=True):
                x = torch.randn(1, S, 48, generator=torch.Generator().manual_seed(S))
                expected = function(*x.unflatten(-1, (3, 2, -1)).unbind(2), causal=True)
                assert relative_error(out, expected) < 1e-5, S


def run_a_graph_that_was_compiled_without_the_mode():
    q, k, v = make_tensors(S_q=4, S_k=4, D=8)
    attend = torch.compile(flash.flash_attn_func, backend="aot_eager")

    @torch.compile(backend="aot_eager")
    def disabled(q, k, v):
        with UnifiedAttnMode.disable():
            return flash.flash_attn_func(q, k, v) + F.scaled_dot_product_attention(q, k, v)

    ignored = warnings.catch_warnings(action="ignore", category=DeprecationWarning)
    with ignored, torch.no_grad(), UnifiedAttnMode(make_mesh(1, 2)):
        return attend(q, k, v), disabled(q, k, v)


def test_graphs_run_as_they_were_traced(rank_pool):
    q, k, v = make_tensors(S_q=4, S_k=4, D=8)
    pair = [flash.flash_attn_func(q, torch.cat([k, k], 1), torch.cat([v, v], 1))]
    pair.append(flash.flash_attn_func(q, k, v) + F.scaled_dot_product_attention(q, k, v))
    for outs in rank_pool.run(run_a_graph_that_was_compiled_without_the_mode, 2):
        for out, expected in zip(outs, pair, strict=True):
            assert relative_error(out, expected) < 1e-5


# -- Models.


class Block(nn.Module):
    """Joint attention as in HunyuanVideo's official model: FlashAttention with offsets of a single sequence."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, offsets):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).flatten(0, 1).unbind(1)
        out = flash.flash_attn_varlen_func(q, k, v, offsets, offsets, x.shape[1], x.shape[1])
        return x + self.out(out.flatten(1).unflatten(0, x.shape[:2]))


class Refiner(nn.Module):
    """A token refiner as in HunyuanVideo: text attends to itself through SDPA with a mask."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)

    def forward(self, text, valid):
        q, k, v = self.qkv(text).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return text + F.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None, :]).transpose(
            1, 2
        ).flatten(2)


class Video(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.refiner, self.blocks = Refiner(), nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(16, 16)

    def forward(self, image, text, valid):
        text = self.refiner(text, valid)
        return self.last(self.attend(image, text, valid))

    def attend(self, image, text, valid):
        x = torch.cat([image, text], dim=1)
        # Image and valid text form one sequence, and padding forms another.
        offsets = torch.tensor([0, image.shape[1] + int(valid.sum()), x.shape[1]], dtype=torch.int32)
        for block in self.blocks:
            x = block(x, offsets)
        return x[:, : image.shape[1]]


def video_inputs(padding):
    generator = torch.Generator().manual_seed(1)
    image, text = (torch.randn(1, S, 16, generator=generator) for S in (9, 5 + padding))
    return image, text, torch.arange(5 + padding)[None] < 5


def run_video(padding, under_plan, grad):
    mesh, model = make_mesh(2, 1), Video().eval()
    image, text, valid = video_inputs(padding)
    with torch.set_grad_enabled(grad):
        if under_plan:
            plan = Plan(
                inputs={"image": Split(dim=1, segment="image")},
                outputs={"last": Gather(dim=1, segment="image")},
                joint_order=("image", "text"),
                attention={"refiner": (Attention(("text",)),)},
            )
            apply_plan(model, plan, sequence_mesh(mesh))
            try:
                return model(image, text, valid).detach()
            finally:
                remove_plan(model)
        with UnifiedAttnMode(mesh) as cp:
            layout = SequenceLayout((Segment("image", 9), Segment("text", text.shape[1], replicated=True)), 2)
            text = cp.replicated(text, dim=1)
            with cp.using(SequenceLayout((Segment("text", text.shape[1], replicated=True),), 2)):
                text = model.refiner(text, valid)
            part = cp.shard(image, dim=1)
            with cp.using(layout):
                part = model.attend(part, text, valid)
            return cp.gather(model.last(part), dim=1).detach()


@pytest.mark.parametrize(("under_plan", "grad"), [(False, False), (True, False), (True, True)])
def test_an_official_video_model_is_exact_without_padding(rank_pool, under_plan, grad):
    with torch.no_grad():
        expected = Video().eval()(*video_inputs(0))
    for out in rank_pool.run(run_video, 2, padding=0, under_plan=under_plan, grad=grad):
        assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("under_plan", [False, True])
def test_padding_as_a_second_sequence_raises(rank_pool, under_plan):
    with pytest.raises(Exception, match=r"cu_seqlens_. .*2 sequence"):
        rank_pool.run(run_video, 2, padding=3, under_plan=under_plan, grad=False)


class OneBlock(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.operator, self.last = operator, nn.Identity()

    def forward(self, x):
        return self.last(self.operator(x, x, x, 0.3, False)[0])


def run_a_build_of_the_hub():
    """Run FlashAttention from a namespace with a hash, as builds of the Hub have, under a plan."""
    library = torch.library.Library("_flash_attn2_1a2b3c", "FRAGMENT")
    library.define(
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor, Tensor)"
    )
    library.impl("_flash_attn_forward", flash.attention, "CPU")
    plan = Plan(
        inputs={"x": Split(dim=1, segment="image")},
        outputs={"last": Gather(dim=1, segment="image")},
        joint_order=("image",),
    )
    x = make_tensors()[0]
    try:
        model = OneBlock(torch.ops._flash_attn2_1a2b3c._flash_attn_forward)
        with torch.no_grad():
            expected = model(x)
            apply_plan(model, plan, sequence_mesh(make_mesh(2, 1)))
            return relative_error(model(x), expected)
    finally:
        library._destroy()
        delattr(torch.ops, "_flash_attn2_1a2b3c")


def test_a_plan_sees_builds_under_other_names(rank_pool):
    assert max(rank_pool.run(run_a_build_of_the_hub, 2)) < 1e-5


def checkpoint_flash_attention():
    mesh, results = make_mesh(2, 1), []
    for reentrant in (True, False):
        with UnifiedAttnMode(mesh) as cp:

            def call(q, k, v, reentrant=reentrant):
                function = functools.partial(flash.flash_attn_func, causal=True)
                return torch.utils.checkpoint.checkpoint(function, q, k, v, use_reentrant=reentrant)

            inputs = [x.requires_grad_() for x in make_tensors(D=16)]
            cp.gather(call(*[cp.shard(x, dim=1) for x in inputs]), dim=1).square().sum().backward()
        for x in inputs:
            dist.all_reduce(x.grad)
        results.append([x.grad / 2 for x in inputs])
    return results


def test_checkpointed_flash_attention_has_the_gradient_of_one_device(rank_pool):
    expected = gradients("plain", {"D": 16})
    for results in rank_pool.run(checkpoint_flash_attention, 2):
        for grads in results:
            for grad, whole in zip(grads, expected, strict=True):
                assert relative_error(grad, whole) < 1e-5


# -- FlashAttention as attn_func.


def attend_with_flash(query, key, value, *, attn_mask, dropout_p, is_causal, scale):
    tensors = [x.transpose(1, 2) for x in (query, key, value)]
    return flash.flash_attn_func(*tensors, causal=is_causal, softmax_scale=scale).transpose(1, 2)


def attend_with_sdpa(query, key, value, **options):
    return F.scaled_dot_product_attention(query, key, value, **options)


def nest_modes(compiled):
    mesh, outs = make_mesh(1, 2), []
    for attn_func in (attend_with_flash, attend_with_sdpa):

        def attend(x, attn_func=attn_func):
            with UnifiedAttnMode(mesh), UnifiedAttnMode(mesh, attn_func=attn_func) as cp:
                tokens = cp.sequence(x.shape[2])
                part = cp.shard(x, dim=2, sequence=tokens)
                return cp.gather(F.scaled_dot_product_attention(part, part, part), dim=2, sequence=tokens)

        if compiled:
            attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            outs.append(attend(make_tensors(D=8)[0].transpose(1, 2)))
    return outs


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_calls_inside_attn_func_are_not_intercepted(rank_pool, compiled):
    x = make_tensors(D=8)[0].transpose(1, 2)
    for outs in rank_pool.run(nest_modes, 2, compiled):
        for out in outs:
            assert relative_error(out, F.scaled_dot_product_attention(x, x, x)) < 1e-5


def test_operators_of_diffusers_are_no_other_build():
    assert diffusers.models.attention_dispatch.dispatch_attention_fn
    assert hasattr(torch.ops, "_diffusers_flash_attn_3")
    assert not has_other_builds()
