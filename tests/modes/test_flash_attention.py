"""FlashAttention's operators inside a mode and under a plan, compared with the same call on one device."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from para_core import UnifiedAttnMode
from tests.attention.one_device import relative_error
from tests.modes import fake_flash_attn as flash
from tests.modes.outcomes import outcome
from tests.tiny import cpu_mesh


def make_tensors(S_q=7, S_k=7, H=4, H_kv=4, D=20, batch=2):
    """Return query, key and value in FlashAttention's shape ``[B, S, H, D]``."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, S, heads, D, generator=generator) for S, heads in ((S_q, H), (S_k, H_kv), (S_k, H_kv))]


def varlen(q, k, v, **options):
    offsets = [torch.tensor([0, x.shape[1]], dtype=torch.int32) for x in (q, k)]
    return flash.flash_attn_varlen_func(q[0], k[0], v[0], *offsets, q.shape[1], k.shape[1], **options)[None]


def varlen_packed(q, k, v, **options):
    offsets = torch.tensor([0, q.shape[1], q.shape[1]], dtype=torch.int32)  # The second sequence is empty.
    return flash.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 2)[0], offsets, q.shape[1], **options)[None]


# As in FlashAttention-3, the Python function of a custom operator is called.
@torch.library.custom_op(
    "flash_attn_3::_flash_attn_forward",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal=False) -> (Tensor, Tensor)",
)
def flash_attn_3_forward(q, k, v, softmax_scale, causal=False):
    return flash.attention(q, k, v, softmax_scale, causal)


FUNCTIONS = {
    "version 3": lambda q, k, v, causal: flash_attn_3_forward(q, k, v, 0.3, causal)[0],
    "plain": flash.flash_attn_func,
    "varlen": varlen,
    "varlen packed": varlen_packed,
}
CASES = [
    ("plain", {}, {}),
    ("plain", {"H_kv": 2}, {"causal": True}),
    ("plain", {"D": 16}, {"softmax_scale": 0.3, "window_size": (-1, 0)}),
    ("plain", {"S_q": 5, "S_k": 9}, {"softcap": 0.0, "deterministic": True}),
    ("varlen", {"batch": 1}, {"causal": True, "softmax_scale": 0.1}),
    ("varlen", {"batch": 1, "S_q": 3, "S_k": 8, "H_kv": 1}, {}),
    ("varlen packed", {"batch": 1, "D": 8}, {}),
    ("version 3", {"D": 24}, {"causal": True}),
]


def run_cases(ring, ulysses):
    mesh, outs = cpu_mesh(ring, ulysses), []
    for name, shape, options in CASES:
        with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
            q, k, v = make_tensors(**shape)
            queries, keys = cp.sequence(q.shape[1]), cp.sequence(k.shape[1])
            q = cp.shard(q, dim=1, sequence=queries)
            k, v = (cp.shard(x, dim=1, sequence=keys) for x in (k, v))
            with cp.using(queries, key_layout=keys):
                outs.append(cp.gather(FUNCTIONS[name](q, k, v, **options), dim=1, sequence=queries))
    return outs


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_flash_attention_equals_one_device(rank_pool, ring, ulysses):
    for outs in rank_pool.run(run_cases, ring * ulysses, ring=ring, ulysses=ulysses):
        for (name, shape, options), out in zip(CASES, outs, strict=True):
            expected = FUNCTIONS[name](*make_tensors(**shape), **options)
            assert relative_error(out, expected) < 1e-5, (name, shape, options)


def refuse():
    """Return the errors of calls that cannot be computed over several ranks, some of which only one rank makes."""
    rank, (q, k, v) = dist.get_rank(), make_tensors(S_q=4, S_k=4, D=8, batch=1)
    two, long = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 3, 4], [0, 9 if rank == 0 else 4]))
    options = {
        "window_size": {"window_size": (2, 2)},
        "window_size (2, 0)": {"window_size": (2, -1), "causal": True},
        "dropout_p": {"dropout_p": 0.1 if rank == 1 else 0.0},
        "softcap": {"softcap": 20.0 if rank == 0 else 0.0},
        "alibi_slopes": {"alibi_slopes": torch.ones(4)},
    }
    calls = {name: functools.partial(flash.flash_attn_func, q, k, v, **kwargs) for name, kwargs in options.items()}
    for name, ends in (("2 sequence(s)", two), ("9 tokens", long)):
        calls[name] = functools.partial(flash.flash_attn_varlen_func, q[0], k[0], v[0], ends, ends, 4, 4)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    calls["UnifiedAttnMode.disable()"] = functools.partial(operator, q, k, v)
    calls["a_library.memory_efficient_attention"] = functools.partial(call_other_library, q, k, v)
    overload = torch.ops.a_library.memory_efficient_attention.default
    calls["a_library.memory_efficient_attention.default"] = lambda: overload(q, k, v)
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(1, 2)) as cp:
        messages = {name: outcome(call) for name, call in calls.items()}
        with cp.using(cp.sequence(8), key_layout=cp.sequence(12)):
            keys = k.repeat(1, 2, 1, 1)[:, :6]
            messages["8 queries and 12 keys"] = outcome(lambda: flash.flash_attn_func(q, keys, keys, causal=True))
        _out, lse, _ = flash.flash_attn_func(q, k, v, return_attn_probs=True)
        messages["return_attn_probs"] = outcome(lambda: lse + 1)
        with UnifiedAttnMode.disable():
            alone = flash.flash_attn_func(q, k, v, window_size=(2, 2))
            other = call_other_library(q, k, v)
    expected = flash.flash_attn_func(q, k, v, window_size=(2, 2))
    return messages, relative_error(alone, expected), torch.equal(other, q + 1), list(lse.shape)


@torch.library.custom_op("a_library::memory_efficient_attention", mutates_args=())
def call_other_library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q + 1


def test_operators_without_a_route_raise_on_every_rank(rank_pool):
    for messages, error, is_called, lse_shape in rank_pool.run(refuse, 2):
        for name, message in messages.items():
            assert name in message, (name, message)
        assert error < 1e-6 and is_called and lse_shape == [1, 4, 4]


EXACT = [(flash.flash_attn_func, {"D": 16}), (flash.flash_attn_func, {"D": 8, "H_kv": 2})]


def gradients(function, shape, shard=lambda x: x, gather=lambda y: y):
    inputs = [x.requires_grad_() for x in make_tensors(**shape)]
    out = gather(function(*[shard(x) for x in inputs], causal=True))
    out.square().sum().backward()
    return [x.grad for x in inputs]


def gradients_over(mesh, function, shape):
    with UnifiedAttnMode(mesh) as cp:
        grads = gradients(function, shape, lambda x: cp.shard(x, dim=1), lambda y: cp.gather(y, dim=1))
    for grad in grads:
        dist.all_reduce(grad)
    return [grad / 2 for grad in grads]


def gradients_of_ranks():
    mesh = cpu_mesh(2, 1)
    cases = [*EXACT, (flash.flash_attn_func, {"D": 20})]
    return [outcome(functools.partial(gradients_over, mesh, *case)) for case in cases]


def test_gradients_are_of_the_mesh_or_raise(rank_pool):
    for *results, padded in rank_pool.run(gradients_of_ranks, 2):
        for grads, (_, shape) in zip(results, EXACT, strict=True):
            for grad, expected in zip(grads, gradients(flash.flash_attn_func, shape), strict=True):
                assert relative_error(grad, expected) < 1e-5, shape
        assert "multiple of 8" in padded


def run_compiled():
    mesh = cpu_mesh(2, 1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x):
        with UnifiedAttnMode(mesh) as cp:
            tokens = cp.sequence(x.shape[1])
            q, k, v = cp.shard(x, dim=1, sequence=tokens).unflatten(-1, (3, 2, -1)).unbind(2)
            return cp.gather(flash.flash_attn_func(q, k, v, causal=True), dim=1, sequence=tokens)

    # Dynamo instantiates the autograd.Function that it traces, which warns.
    with torch.no_grad(), warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return call(make_tensors(H=6, D=8)[0].flatten(2))


def test_compiled_flash_attention_equals_one_device(rank_pool):
    q, k, v = make_tensors(H=6, D=8)[0].unflatten(2, (3, 2)).unbind(2)
    expected = flash.flash_attn_func(q, k, v, causal=True)
    for out in rank_pool.run(run_compiled, 2):
        assert relative_error(out, expected) < 1e-5
