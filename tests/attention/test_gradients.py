"""Gradients over every mesh and transport equal those of the sum of all losses on one device; what has none raises."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import fake_group
from para_core import UnifiedAttnMode, init_context_parallel_mesh, unified_attention
from para_core.attention import operator
from para_core.attention.ring import Ring
from tests.attention.cases import check_all, cpu_mesh, own_attention
from tests.attention.one_device import make_qkv, relative_error
from tests.attention.test_exactness import F32, calls_of, ways


@ways
def test_gradients_equal_those_of_one_device(rank_pool, ring, ulysses, options):
    check_all(rank_pool, calls_of(ring, ulysses, options, learns=True), ring, ulysses, learns=True, **options)


def cancelling_gradients(inputs, dims, options, compiled):
    """Return the gradients of a sum, whose parts nearly cancel."""
    *qkv, mask = (None if x is None else x.clone().requires_grad_() for x in inputs)

    def attend(*whole):
        rows = None if mask is None else cp.shard(mask, dim=-2, sequence=tokens)
        parts = [cp.shard(x, dim=2, sequence=tokens) for x in whole]
        return F.scaled_dot_product_attention(*parts, attn_mask=rows)

    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    backends = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(backends[: 1 if mask is None else None]), UnifiedAttnMode(cpu_mesh(*dims), **options) as cp:
        tokens = cp.sequence(qkv[0].shape[2])
        attend(*qkv).sum().backward()
    return [x.grad for x in (*qkv, mask) if x is not None]


@pytest.mark.parametrize(
    ("dims", "options", "dtype", "learned_mask", "compiled"),
    [
        ((1, 2), {}, torch.bfloat16, True, False),
        ((2, 1), {}, torch.float16, False, False),
        ((2, 1), {}, torch.bfloat16, False, True),
        ((3, 1), {"rotate_method": "allgather"}, torch.bfloat16, False, False),
        ((4, 1), {"rotate_method": "2d"}, torch.float16, True, False),
    ],
)
def test_cancelling_gradient_is_as_exact_as_one_device(rank_pool, dims, options, dtype, learned_mask, compiled):
    shapes = [(1, 4, 33, 16)] * 3 + [(1, 1, 33, 33)] * learned_mask
    inputs = [torch.rand(s, generator=torch.Generator().manual_seed(i)).to(dtype) for i, s in enumerate(shapes)]
    exact, alone = ([x.to(wide, copy=True).requires_grad_() for x in inputs] for wide in (torch.float64, dtype))
    with sdpa_kernel([SDPBackend.MATH]):
        for tensors in (exact, alone):
            F.scaled_dot_product_attention(*tensors).sum().backward()
    of_ranks = rank_pool.run(cancelling_gradients, dims[0] * dims[1], [*inputs, None][:4], dims, options, compiled)
    # The gradient of a mask is a sum over heads, and each Ulysses rank rounds the sum over its own heads.
    for x, y, factor, *parts in zip(exact, alone, [1.2, 1.2, 1.2, 2.0], *of_ranks, strict=False):
        error = relative_error(sum(grad.double() for grad in parts), x.grad)
        assert error <= factor * relative_error(y.grad.double(), x.grad)


def learn_scale_and_mask(ring, ulysses, dtype):
    scale = torch.tensor(0.7, requires_grad=True)
    bias = torch.full((12, 12), 0.7, dtype=dtype, requires_grad=dtype == F32)
    own = {"attn_func": lambda query, *others, **options: own_attention(query * scale, *others, **options)}
    own |= {"comm_dtype": torch.int8} if dtype == F32 else {"rotate_method": "2d"}
    mesh = cpu_mesh(ring, ulysses)
    qkv = [x.to(dtype).chunk(mesh.size(), dim=2)[mesh.get_rank()] for x in make_qkv(12, 1)]
    with UnifiedAttnMode(mesh, **own) as cp:
        F.scaled_dot_product_attention(*qkv, cp.shard(bias, dim=-2)).square().sum().backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in (scale, bias)]


# With Ulysses one rank has no head. On the grid, in 16 bits, only the function learns.
@pytest.mark.parametrize(("ring", "ulysses", "dtype"), [(2, 1, F32), (1, 2, F32), (4, 1, torch.float16)])
def test_mask_and_what_the_users_function_captures_get_their_gradients(rank_pool, ring, ulysses, dtype):
    scale, bias = inputs = [torch.full(shape, 0.7, requires_grad=True) for shape in ((), (12, 12))]
    query, key, value = make_qkv(12, 1)
    F.scaled_dot_product_attention(query * scale, key, value, bias).square().sum().backward()
    of_inputs = zip(inputs, *rank_pool.run(learn_scale_and_mask, ring * ulysses, ring, ulysses, dtype), strict=True)
    for x, *of_ranks in list(of_inputs)[: 2 if dtype == F32 else 1]:
        assert relative_error(sum(of_ranks), x.grad) < (1e-4 if dtype == F32 else 1e-2)


def transform(ring, ulysses, assume_equal):
    """Return gradients by torch.func, and if the first rank's is None. Other transforms and second gradients raise."""
    mesh = cpu_mesh(ring, ulysses)
    q, k, v = (x.chunk(2, dim=2)[mesh.get_rank()].clone() for x in make_qkv(12, 4))

    def attend(q):
        return unified_attention(q, k, v, mesh=mesh, assume_equal=assume_equal)

    def linear(q):  # The gradient of this loss needs no grad_out that requires a gradient.
        return attend(q).sum()

    forward_mode = pytest.raises(RuntimeError, match="forward-mode AD")
    with forward_mode:
        torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    with fwAD.dual_level(), forward_mode:
        attend(fwAD.make_dual(q, torch.ones_like(q)))
    with pytest.raises(Exception, match="forward-mode AD"):
        torch.compile(lambda q: torch.func.jvp(attend, (q,), (torch.ones_like(q),)), backend="aot_eager")(q)
    with pytest.raises(RuntimeError, match=r"torch\.func\.vmap"):
        torch.func.vmap(attend)(q[:, None])
    leaf = q.clone().requires_grad_()
    second = pytest.raises(RuntimeError, match=r"second derivative.*create_graph=True")
    for loss in (linear, lambda q: attend(q).square().sum(), torch.compile(linear, backend="eager")):
        with second:
            torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    for loss, x in ((lambda q: torch.func.grad(linear)(q).sum(), q), (linear, leaf)):
        with second:
            torch.func.grad(loss)(x)  # The leaf also requires a gradient outside the transform.
    for call in (attend, torch.compile(attend, backend="eager")):
        out = call(leaf)
        if mesh.get_rank() == 0:  # A user's function that uses the output may also return None as gradient.
            out.grad_fn.register_prehook(lambda grads: (None,) * len(grads))
        out.sum().backward()
    return torch.func.grad(linear)(q), leaf.grad


@pytest.mark.parametrize(("ring", "ulysses", "assume_equal"), [(2, 1, False), (1, 2, True)])
def test_transforms_and_second_gradients_raise_or_are_right(rank_pool, ring, ulysses, assume_equal):
    q, k, v = make_qkv(12, 4)
    whole = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q)
    for rank, (grad, of_two) in enumerate(rank_pool.run(transform, 2, ring, ulysses, assume_equal)):
        torch.testing.assert_close(grad, whole.chunk(2, dim=2)[rank], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(of_two, 2 * rank * grad)


@pytest.mark.parametrize("missing", [(operator, "_DIFFERENTIATE", []), (Ring, "gradient", "gradients.missing:ring")])
def test_missing_feature_for_gradients_is_refused(monkeypatch, missing):
    """Inference works without it, and a call that requires a gradient says what is missing."""
    monkeypatch.setattr(*missing)
    query = torch.randn(1, 2, 3, 4, requires_grad=True)
    with fake_group(2):
        mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=2)
        with UnifiedAttnMode(mesh, assume_equal=True):
            with torch.no_grad():
                assert F.scaled_dot_product_attention(query, query, query).shape == query.shape
            with pytest.raises(RuntimeError, match="requires a gradient"):
                F.scaled_dot_product_attention(query, query, query)
