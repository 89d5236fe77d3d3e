"""SparseKVAttnMode, compared with dense attention under the mask of its definition."""

from dataclasses import replace
from functools import partial
from math import ceil

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from para_core import BlockSparseAttnMode, SparseKVAttnMode
from para_core.attention.attention_options import AttnOptions
from para_core.attention.kept_keys import KeptKeys
from para_core.distributed.mesh import one_rank
from tests.attention.cases import BALANCED, CAUSAL, FEW_CALLS, Case, Mask, check_all, cpu_mesh, own_attention
from tests.attention.one_device import make_qkv, relative_error
from tests.attention.test_traffic import Traffic
from tests.operators import ASK_THE_HOST, Operators

aten = torch.ops.aten


def kept_by_definition(case, share, window):
    """Return the kept keys, bool ``[B, H, 1, S_k]``, by the definition in the docstring of SparseKVAttnMode."""
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


def sparse(case, share=0.4, window=4):
    mode = partial(SparseKVAttnMode, share=share, window=window)
    return replace(case, mode=mode, visible=kept_by_definition(case, share, window))


ONE_KEY_HEAD = Case(13, 4, H_kv=1, options={"enable_gqa": True})
CASES = [
    *FEW_CALLS,
    Case(13, 3, options=CAUSAL),
    Case(13, 3, S_k=7, D_v=5, options={"scale": 0.7}),
    ONE_KEY_HEAD,
    Case(H=3, segments=BALANCED, options=CAUSAL),
    Case(13, 3, mask=Mask("hk", torch.float32)),
    Case(13, 3, mask=Mask("bhqk", torch.float32, "local")),
    Case(13, 3, mask=Mask("qk"), options=CAUSAL),
    Case(4, 2, S_k=9, mask=Mask("qk")),  # On three ranks, two have one query.
    Case(13, 2, mask=Mask("bk", torch.float32, share=1.0, low=(torch.finfo(torch.float32).min,))),
]


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize(
    ("ring", "ulysses", "share", "window", "options"),
    [(3, 1, 0.4, 4, {}), (2, 2, 0.4, 4, {}), (1, 3, 0.7, 64, {}), (2, 1, 1.0, 1, {"attn_func": own_attention})],
)
def test_kept_keys_equal_dense_masked_attention(rank_pool, ring, ulysses, share, window, options, learns):
    cases = [sparse(case, share, window) for case in CASES if not learns or case.qkv()[0].numel()]
    check_all(rank_pool, cases, ring, ulysses, learns=learns, **options)


def test_kept_keys_in_one_graph(rank_pool):
    check_all(rank_pool, [sparse(ONE_KEY_HEAD)], 2, 1, learns=True, compile_with="aot_eager")


def test_on_one_rank_it_is_sparse_too_and_share_may_be_of_numpy():
    case = sparse(Case(13, 3), 0.5)
    for share in (0.5, np.float32(0.5)):
        with torch.no_grad(), SparseKVAttnMode(one_rank("cpu"), share=share, window=4):
            assert relative_error(F.scaled_dot_product_attention(*case.qkv()), case.on_one_device()) < 1e-5


def waits(func, args):
    """Whether the host waits for an accelerator: for a value, or for the number of positions of a bool index."""
    indices = args[1] if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) else ()
    return func.overloadpacket in ASK_THE_HOST or any(x is not None and x.dtype == torch.bool for x in indices)


def send(share):
    mesh = cpu_mesh(2, 1)
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(512, 2, 16, B=1)]
    with torch.no_grad(), SparseKVAttnMode(mesh, share=share, window=4, assume_equal=True):
        with Traffic() as traffic:
            F.scaled_dot_product_attention(*qkv)
        with Operators() as plain:
            F.scaled_dot_product_attention(*qkv)
        with Operators() as causal:
            F.scaled_dot_product_attention(*qkv, is_causal=True)
    return max(traffic.sent), *(sum(waits(*call[:2]) for call in ran.calls) for ran in (plain, causal))


def test_only_kept_keys_travel_and_the_host_waits_once_at_most(rank_pool):
    for whole, *_ in rank_pool.run(send, 2, 1.0):
        assert whole == 4 * 2 * 2 * 256 * 16
    for part, plain, causal in rank_pool.run(send, 2, 0.25):
        # The data determine which rank keeps most keys. Heads are padded to the one that keeps most.
        assert part < 0.4 * whole
        assert plain <= 1 and causal == 0


def test_options_survive_their_json_and_take_another_share():
    options = AttnOptions.of(kept_keys=KeptKeys(1 / 3, 7), backend="math")
    assert AttnOptions.read(options.as_text()) == options
    assert options.with_option(KeptKeys(0.5)) == AttnOptions.of(kept_keys=KeptKeys(0.5), backend="math")
    with pytest.raises(TypeError, match=r"kept_keys is 0\.5; expected a KeptKeys"):
        AttnOptions.of(kept_keys=0.5)
    with pytest.raises(TypeError, match="by_position"):
        type("Unplaced", (KeptKeys,), {"by_position": False})
    with pytest.raises(ValueError, match="block_mask and kept_keys"):
        BlockSparseAttnMode(one_rank("cpu"), torch.ones(1, 1).bool(), block_size=4, kept_keys=KeptKeys(0.5))


@pytest.mark.parametrize(("share", "window"), [(0, 64), (1.5, 64), (True, 64), (None, 64), (0.5, 0), (0.5, True)])
def test_bad_shares_and_windows_are_refused(share, window):
    with pytest.raises(ValueError, match=rf"share is {share}; .*<= 1|window is {window}; "):
        SparseKVAttnMode(one_rank("cpu"), share=share, window=window)
