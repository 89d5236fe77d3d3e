"""SparseKVAttnMode against dense attention with the mask that its definition gives."""

from functools import partial
from math import ceil

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from para_core import SparseKVAttnMode
from tests.attention.approximate.sparse_cases import SparseCase, check_all
from tests.attention.cases import BALANCED, IMAGE_FIRST, ON_FEW_MESHES, TEXT_FIRST, Case, Mask
from tests.attention.one_device import make_qkv, relative_error
from tests.rank_pool import RankPoolError

on_few_meshes = pytest.mark.parametrize(("ring", "ulysses"), ON_FEW_MESHES)
CAUSAL = {"is_causal": True}


def kept_by_definition(case, share, window):
    """bool ``[B, H, 1, S_k]``, written down as the docstring of SparseKVAttnMode says it."""
    q, k, _ = case.qkv()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    S_q, S_k = q.shape[-2], k.shape[-2]
    scores = q @ k.mT * (case.options.get("scale") or q.shape[-1] ** -0.5)
    mask = case.whole_mask()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if case.options.get("is_causal"):
        scores = scores.masked_fill(~torch.ones(S_q, S_k, dtype=torch.bool).tril(), float("-inf"))
    parts = min(window, S_q)
    observed = [int((i + 0.5) * S_q / parts) if S_q > window else i for i in range(parts)]
    votes = scores[:, :, observed].softmax(-1).nan_to_num(0.0).sum(2)
    ranked = votes.sort(dim=-1, descending=True, stable=True).indices[..., : ceil(share * S_k)]
    return torch.zeros_like(votes, dtype=torch.bool).scatter(-1, ranked, True)[:, :, None]


def sparse_case(case, share, window):
    make_mode = partial(SparseKVAttnMode, share=share, window=window)
    return SparseCase(case, make_mode, kept_by_definition(case, share, window))


CASES = [
    Case(13, 4),
    Case(13, 3, options=CAUSAL),
    Case(13, 3, S_k=7, D_v=5, options={"scale": 0.7}),
    Case(3, 1),
    Case(13, 6, H_kv=2, options={"enable_gqa": True}),
    Case(13, 4, H_kv=1, options={"enable_gqa": True}),
    Case(H=3, segments=TEXT_FIRST),
    Case(H=4, segments=IMAGE_FIRST),
    Case(H=3, segments=IMAGE_FIRST, key_segments=(("text", 5, True),)),
    Case(H=3, segments=BALANCED, options=CAUSAL),
    Case(13, 3, mask=Mask("bk")),
    Case(13, 3, mask=Mask("hk", torch.float32)),
    Case(13, 3, mask=Mask("bhqk", torch.float32, "local")),
    Case(13, 3, mask=Mask("qk"), options=CAUSAL),
    Case(13, 2, B=0),
    Case(0, 2),
]


@on_few_meshes
@pytest.mark.parametrize(("share", "window"), [(0.4, 4), (0.7, 64), (1.0, 1)])
def test_it_equals_dense_attention_with_the_mask_of_its_definition(rank_pool, ring, ulysses, share, window):
    check_all(rank_pool, [sparse_case(case, share, window) for case in CASES], ring, ulysses)


@pytest.mark.parametrize(
    ("ring", "ulysses"), [(1, 2), *[pytest.param(*mesh, marks=pytest.mark.long) for mesh in ((2, 1), (2, 2))]]
)
def test_compiled_it_is_the_same(rank_pool, ring, ulysses):
    check_all(rank_pool, [sparse_case(case, 0.5, 4) for case in CASES[:11:5]], ring, ulysses, "aot_eager")


class LargestSent(TorchDispatchMode):
    """Elements of the largest tensor that a collective took."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.alltoall_base_.default:
            self.elements = max(self.elements, args[1].numel())
        return func(*args, **(kwargs or {}))


def send(share):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(512, 2, 16, B=1)]
    with torch.no_grad(), SparseKVAttnMode(mesh, share=share, window=4, assume_equal=True), LargestSent() as sent:
        F.scaled_dot_product_attention(*qkv)
    return sent.elements


def test_only_kept_keys_travel(rank_pool):
    whole, part = rank_pool.run(send, 2, 1.0), rank_pool.run(send, 2, 0.25)
    assert whole == [2 * 2 * 256 * 16] * 2
    # Which rank has more of the kept keys is in the data; padded to the head that keeps most.
    assert all(elements < 0.4 * whole[0] for elements in part)


def attend_alone():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("ring", "ulysses"))
    with SparseKVAttnMode(mesh, share=0.5, window=4), CommDebugMode() as counter:
        return F.scaled_dot_product_attention(*Case(13, 3).qkv()), counter.get_total_counts()


def test_on_one_rank_it_is_sparse_too(rank_pool):
    out, collectives = rank_pool.run(attend_alone, 1)[0]
    assert relative_error(out, sparse_case(Case(13, 3), 0.5, 4).on_one_device()) < 1e-5
    assert collectives == 0


def make_mode(options):
    SparseKVAttnMode(init_device_mesh("cpu", (2,), mesh_dim_names=("ring",)), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, "share is 0.0; expected the share of the keys to keep"),
        ({"share": 1.5}, "share is 1.5; expected"),
        ({"share": 0.5, "window": 0}, "window is 0; expected a positive number"),
    ],
)
def test_what_does_not_fit_is_an_error(rank_pool, options, message):
    with pytest.raises(RankPoolError, match=message):
        rank_pool.run(make_mode, 2, options)
