"""Attention that a model computes by hand inside a mode is named, whichever way the softmax is written."""

import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from para_core import ParallelWarning, UnifiedAttnMode
from tests.tiny import cpu_mesh

TOKENS = 22
aten = torch.ops.aten


def by_sum(scores):
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


SPELLINGS = {
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "a negative dim counted from the front": lambda x: torch.softmax(x, x.ndim - 1),
    "keyword": lambda x: torch.softmax(input=x, dim=-1),
    "method": lambda x: x.softmax(dim=-1),
    "F.softmax": lambda x: F.softmax(x, dim=-1),
    "torch.special": lambda x: torch.special.softmax(x, -1),
    "module": nn.Softmax(dim=-1),
    "another dtype": lambda x: F.softmax(x, dim=-1, dtype=torch.float64).float(),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1).exp(),
    "softmin": lambda x: F.softmin(-x, dim=-1),
    "logsumexp": lambda x: (x - torch.logsumexp(x, -1, keepdim=True)).exp(),
    "exp and sum": by_sum,
    "operator": lambda x: aten._softmax.default(x, -1, False),
    "operator without overload": lambda x: aten.softmax(x, -1),
    "private": lambda x: torch._softmax(x, -1, False),
    "sigmoid": torch.sigmoid,
    "over rows of the transposed scores": lambda x: x.mT.softmax(-2).mT,
    "heads last": lambda x: x.permute(0, 2, 3, 1).softmax(2).permute(0, 3, 1, 2),
    "a column of a sink": lambda x: torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], -1).softmax(-1)[..., :-1],
    "a padded column": lambda x: F.pad(x, (0, 2)).softmax(-1)[..., :-2],
}


def attend(x, normalize):
    q, k, v = x.unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    return (normalize(q @ k.mT * 8**-0.5) @ v).transpose(1, 2).flatten(2)


def spelled_by_hand():
    """Return the exceptions or warnings of each way to write a softmax, alone and next to SDPA in the mode."""
    x = torch.randn(2, TOKENS, 96)
    mesh, outcomes = cpu_mesh(1, 2), {}
    for name, normalize in SPELLINGS.items():
        for beside in (False, True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    with UnifiedAttnMode(mesh) as cp:
                        part = cp.shard(x, dim=1)
                        attend(part, normalize)
                        if beside:
                            F.scaled_dot_product_attention(*[part[:, None, :, :32]] * 3)
                    outcomes[name, beside] = {warning.category for warning in caught}
                except RuntimeError:
                    outcomes[name, beside] = RuntimeError
    return outcomes


def test_softmax_by_hand_raises_alone_and_warns_next_to_sdpa(rank_pool):
    for outcomes in rank_pool.run(spelled_by_hand, 2):
        for (name, beside), outcome in outcomes.items():
            assert outcome == ({ParallelWarning} if beside else RuntimeError), (name, beside)


def without_scores():
    """Call softmax and exp next to SDPA for purposes other than attention over tokens."""
    x = torch.randn(2, TOKENS, 96)
    with UnifiedAttnMode(cpu_mesh(1, 2)) as cp:
        part = cp.shard(x, dim=1)
        q = part[:, None, :, :32]
        F.scaled_dot_product_attention(q, q, q)
        part.softmax(-1)  # This is a softmax over channels.
        torch.cat([part, part], -1).exp()
        (q @ torch.randn(2, 1, 7, 32).mT).softmax(-1)  # The keys are seven replicated tokens of text.
        part[0].softmax(0)  # A router has no dim of heads or samples.
    return True


def test_softmax_over_channels_and_text_is_no_attention(rank_pool):
    assert all(rank_pool.run(without_scores, 2))


def other_attention(query, key, value, **options):
    return torch.ops.aten.scaled_dot_product_attention(query, key, value, **options)


def enter_with_replaced_sdpa(ranks):
    with mock.patch.object(F, "scaled_dot_product_attention", other_attention):
        if ranks == 1:
            with UnifiedAttnMode(cpu_mesh(1, 1)):
                return True
        with (
            pytest.raises(RuntimeError, match=r"test_handwritten\.other_attention.* 2 ranks"),
            UnifiedAttnMode(cpu_mesh(1, 2)),
        ):
            pass
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_replaced_sdpa_is_refused_before_the_model_runs(rank_pool, ranks):
    assert all(rank_pool.run(enter_with_replaced_sdpa, ranks, ranks))
