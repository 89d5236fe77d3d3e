"""16-bit attention over a ring rounds each ring block's result and the last sum, and nothing in between."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from para_core import UnifiedAttnMode
from tests.attention.one_device import make_qkv, relative_error

in_16_bits = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def attend(q, k, v):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("ring",))
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        q, k, v = (cp.shard(x, dim=2) for x in (q, k, v))
        return cp.gather(F.scaled_dot_product_attention(q, k, v), dim=2)


@in_16_bits
def test_mean_in_16_bits_is_exact_beyond_its_sums(rank_pool, dtype):
    # Queries of zero weigh all keys equally, and all keys of a rank have one value: 1 plus a number of last bits. The
    # mean of these bits over all four ranks is a whole number of bits. Over two or three ranks it is not.
    bits = torch.randint(0, 64, (4, 256), generator=torch.Generator().manual_seed(0))
    bits[-1] -= bits.sum(0) % 4
    values, expected = (1 + x * torch.finfo(dtype).eps for x in (bits, bits.sum(0) // 4))
    q, k = (x.to(dtype) for x in (torch.zeros(1, 1, 32, 256), torch.randn(1, 1, 32, 256)))
    v = values.repeat_interleave(8, dim=0)[None, None].to(dtype)
    for out in rank_pool.run(attend, 4, q, k, v):
        assert torch.equal(out, expected.to(dtype).expand_as(v))


# Two ring blocks need one merge, so nothing is rounded in between.
@in_16_bits
@pytest.mark.parametrize("ring", [3, 4])
def test_error_is_that_of_sdpa_plus_one_rounding(rank_pool, ring, dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(64, 4, 32))
    v = v + 1  # The mean is not zero, so that errors of the parts do not cancel.
    exact = F.scaled_dot_product_attention(*[x.double() for x in (q, k, v)])
    alone = relative_error(F.scaled_dot_product_attention(q, k, v), exact)
    for out in rank_pool.run(attend, ring, q, k, v):
        # Each block's result is rounded once, which gives 1.12 times SDPA's own error. Merging in 16 bits gives 1.4
        # times, and lse in 16 bits gives 1.28 times.
        assert relative_error(out, exact) <= 1.2 * alone


ALL = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def gradients(inputs, dims, options, mask, compiled=False):
    mesh = init_device_mesh("cpu", tuple(dims), mesh_dim_names=("ring", "ulysses"))
    q, k, v = (x.clone().requires_grad_() for x in inputs)
    mask = None if mask is None else mask.clone().requires_grad_()

    def attend(*whole):
        rows = None if mask is None else cp.shard(mask, dim=-2, sequence=tokens)
        parts = [cp.shard(x, dim=2, sequence=tokens) for x in whole]
        return F.scaled_dot_product_attention(*parts, attn_mask=rows)

    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with sdpa_kernel([SDPBackend.MATH] if mask is None else ALL), UnifiedAttnMode(mesh, **options) as cp:
        tokens = cp.sequence(q.shape[2])
        attend(q, k, v).sum().backward()
    return [x.grad for x in (q, k, v, mask) if x is not None]


def require_errors_of_one_device(inputs, of_ranks):
    exact, alone = (
        [x.to(wide, copy=True).requires_grad_() for x in inputs] for wide in (torch.float64, inputs[0].dtype)
    )
    with sdpa_kernel([SDPBackend.MATH]):
        for tensors in (exact, alone):
            F.scaled_dot_product_attention(*tensors).sum().backward()
    errors = [
        (relative_error(sum(grad.double() for grad in parts), x.grad), relative_error(y.grad.double(), x.grad))
        for x, y, parts in zip(exact, alone, zip(*of_ranks, strict=True), strict=True)
    ]
    # The gradient of a mask is a sum over heads, and each Ulysses rank rounds the sum over its own heads.
    allowed = [1.2, 1.2, 1.2, 2.0]
    assert all(error <= factor * of_one for (error, of_one), factor in zip(errors, allowed, strict=False)), errors


def rand(*shapes, dtype):
    return [torch.rand(s, generator=torch.Generator().manual_seed(i)).to(dtype) for i, s in enumerate(shapes)]


@pytest.mark.sample(3)
@in_16_bits
@pytest.mark.parametrize("learned_mask", [False, True], ids=["MATH", "learned mask"])
@pytest.mark.parametrize(
    ("dims", "options"),
    [((1, 2), {}), ((2, 1), {}), ((3, 1), {"rotate_method": "allgather"}), ((4, 1), {"rotate_method": "2d"})],
    ids=["ulysses", "ring", "gathered ring", "2d"],
)
def test_cancelling_gradient_is_as_exact_as_one_device(rank_pool, dtype, learned_mask, dims, options):
    inputs = rand(*[(1, 4, 33, 16)] * 3, *[(1, 1, 33, 33)] * learned_mask, dtype=dtype)
    mask = inputs[3] if learned_mask else None
    require_errors_of_one_device(inputs, rank_pool.run(gradients, dims[0] * dims[1], inputs[:3], dims, options, mask))


def test_compiled_cancelling_gradient_is_as_exact(rank_pool):
    inputs = rand(*[(1, 4, 33, 16)] * 3, dtype=torch.bfloat16)
    require_errors_of_one_device(inputs, rank_pool.run(gradients, 2, inputs, (2, 1), {}, None, compiled=True))
