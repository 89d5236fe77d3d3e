"""Transforms of torch.func, forward-mode AD and second derivatives give an error message, never a wrong number."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from para_core import UnifiedAttnMode, unified_attention
from tests.attention.one_device import make_qkv

FORWARD_MODE = "forward-mode AD"
SECOND = "second derivative.*create_graph=True"


def setup(ring, ulysses):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    return mesh, [x.chunk(2, dim=2)[mesh.get_rank()].clone() for x in make_qkv(12, 4)]


def transform_forward(ring, ulysses, assume_equal):
    mesh, (q, k, v) = setup(ring, ulysses)

    def attend(q):
        return unified_attention(q, k, v, mesh=mesh, assume_equal=assume_equal)

    with pytest.raises(RuntimeError, match=FORWARD_MODE):
        torch.func.jvp(attend, (q,), (torch.ones_like(q),))
    with fwAD.dual_level(), pytest.raises(RuntimeError, match=FORWARD_MODE):
        attend(fwAD.make_dual(q, torch.ones_like(q)))
    with pytest.raises(RuntimeError, match=r"torch\.func\.vmap"):
        torch.func.vmap(attend)(q[:, None])
    with pytest.raises(Exception, match=FORWARD_MODE):
        torch.compile(lambda q: torch.func.jvp(attend, (q,), (torch.ones_like(q),)), backend="aot_eager")(q)
    return attend(q).shape


@pytest.mark.sample(1)
@pytest.mark.parametrize("assume_equal", [False, True], ids=["agreed", "assumed"])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_forward_mode_and_vmap_are_refused_before_communication(rank_pool, ring, ulysses, assume_equal):
    assert rank_pool.run(transform_forward, 2, ring, ulysses, assume_equal) == [(2, 4, 6, 8)] * 2


def differentiate_twice(ring, ulysses):
    mesh, qkv = setup(ring, ulysses)
    q, k, v = (x.requires_grad_() for x in qkv)
    with UnifiedAttnMode(mesh, assume_equal=True):
        # The gradient of this loss needs no grad_out that requires a gradient.
        linear = F.scaled_dot_product_attention(q, k, v).sum()
        squared = F.scaled_dot_product_attention(q, k, v).square().sum()
    for loss in (linear, squared):
        with pytest.raises(RuntimeError, match=SECOND):
            torch.autograd.grad(loss, q, create_graph=True)

    def loss(q):
        return unified_attention(q, k.detach(), v.detach(), mesh=mesh, assume_equal=True).sum()

    with pytest.raises(RuntimeError, match=SECOND):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q.detach())
    with pytest.raises(RuntimeError, match=SECOND):
        torch.func.grad(loss)(q)  # q also requires a gradient outside the transform.
    return torch.func.grad(loss)(q.detach())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_second_derivative_raises(rank_pool, ring, ulysses):
    q, k, v = make_qkv(12, 4)
    whole = torch.func.grad(lambda q: F.scaled_dot_product_attention(q, k, v).sum())(q)
    for rank, grad in enumerate(rank_pool.run(differentiate_twice, 2, ring, ulysses)):
        torch.testing.assert_close(grad, whole.chunk(2, dim=2)[rank], rtol=1e-4, atol=1e-5)
