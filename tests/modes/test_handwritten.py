"""Attention that a model computes by hand inside a mode is named, whichever way the softmax is written."""

import re
import warnings
from unittest import mock

import torch
import torch.nn.functional as F

from para_core import UnifiedAttnMode
from tests.modes.outcomes import outcome, warnings_of
from tests.tiny import cpu_mesh

TOKENS = 22


def by_sum(scores):
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


SPELLINGS = {
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "method": lambda x: x.softmax(axis=-1),
    "another dtype": lambda x: F.softmax(x, dim=-1, dtype=torch.float64).float(),
    "exp and sum": by_sum,
    "operator": lambda x: torch.ops.aten._softmax.default(x, -1, False),
    "private": lambda x: torch._softmax(x, -1, False),
    "sigmoid": torch.sigmoid,
    "heads last": lambda x: x.permute(0, 2, 3, 1).softmax(2).permute(0, 3, 1, 2),
    "a column of a sink": lambda x: torch.cat([x, x.new_zeros(*x.shape[:-1], 1)], -1).softmax(-1)[..., :-1],
}


def attend(x, normalize):
    q, k, v = x.unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    return (normalize(q @ k.mT * 8**-0.5) @ v).transpose(1, 2).flatten(2)


def sdpa(part):
    return F.scaled_dot_product_attention(*[part[:, None, :, :32]] * 3)


def disabled(cp, part):
    with UnifiedAttnMode.disable():
        attend(part, torch.sigmoid)


def recomputed(cp, part):
    torch.utils.checkpoint.checkpoint(attend, part.requires_grad_(), torch.sigmoid, use_reentrant=True).sum().backward()


def no_scores(cp, part):
    """Call softmax and exp next to SDPA for purposes other than attention over tokens."""
    sdpa(part)
    part.softmax(-1)  # This is a softmax over channels.
    torch.cat([part, part], -1).exp()
    (part[:, None, :, :32] @ torch.randn(2, 1, 7, 32).mT).softmax(-1)  # The keys are seven replicated tokens of text.
    part[0].softmax(0)  # A router has no dim of heads or samples.
    with warnings.catch_warnings(action="ignore"):
        torch.nested.nested_tensor([*part[:, :, None]]).softmax(-1)


# What a mode is used for, and the pattern of each warning or of the error.
BY_HAND, NOTHING = "attn_implementation='sdpa'", "intercepted no scaled_dot_product_attention"
USES = {
    "disabled": (disabled, NOTHING),
    "another exception": (lambda cp, part: (attend(part, torch.sigmoid), 1 / 0), "ZeroDivisionError: "),
    "channels alone": (lambda cp, part: cp.gather(part.softmax(-1), dim=1), NOTHING),
    "no scores": (no_scores, None),
    "nothing": (lambda cp, part: part + 1, f"ParallelWarning {__file__}: UnifiedAttnMode on 2 ranks {NOTHING}"),
    "nothing again": (lambda cp, part: part + 1, None),
    "by hand": (lambda cp, part: attend(part, torch.sigmoid), "RuntimeError: .*" + BY_HAND),
    "recomputed": (recomputed, "RuntimeError: .*" + BY_HAND),
    "after by hand": (lambda cp, part: sdpa(part), None),
}
for name, normalize in SPELLINGS.items():
    USES[name] = (lambda cp, part, f=normalize: attend(part, f), "RuntimeError: .*" + BY_HAND)
    USES[f"{name}, beside SDPA"] = (lambda cp, part, f=normalize: (sdpa(part), attend(part, f)), BY_HAND)


def use_modes():
    x, again, outcomes = torch.randn(2, TOKENS, 96), UnifiedAttnMode(cpu_mesh(1, 2)), {}
    for name, (body, _) in USES.items():
        # These uses are of one mode: each is judged by itself, and a mode warns once that it intercepts nothing.
        shares = name in ("nothing", "nothing again", "by hand", "after by hand")
        mode = again if shares else UnifiedAttnMode(cpu_mesh(1, 2))

        def use(mode=mode, body=body):
            with mode as cp:
                body(cp, cp.shard(x, dim=1))

        outcomes[name] = warnings_of(use)
    return outcomes


def test_softmax_by_hand_raises_alone_and_warns_next_to_sdpa(rank_pool):
    for outcomes in rank_pool.run(use_modes, 2):
        for name, (_, words) in USES.items():
            found = outcomes[name]
            if words is None:
                assert found == [], name
                continue
            assert isinstance(found, str) == ("Error: " in words), (name, found)
            if not isinstance(found, str):
                (found,) = found
                assert found.startswith("ParallelWarning"), (name, found)
            assert re.search(words, found), (name, found)


def attend_by_hand(query, key, value, scale=None, **_):
    scores = query @ key.mT * (scale or query.shape[-1] ** -0.5)
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


def in_graphs():
    """Return the warnings of a ring around compiled code, by who computes attention by hand, and the backend."""
    mesh, outcomes = cpu_mesh(2, 1), {}
    x = torch.randn(3, 1, 4, TOKENS, 8, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(*x)

    def attend_twice(x):
        return attend_by_hand(*x)[0] + F.scaled_dot_product_attention(*x)

    for backend in ("eager", "aot_eager"):
        compiled = {
            "own local attention": torch.compile(lambda x: F.scaled_dot_product_attention(*x), backend=backend),
            "the model": torch.compile(attend_twice, backend=backend),
        }
        for who, function in compiled.items():
            mode = UnifiedAttnMode(mesh, attn_func=None if who == "the model" else attend_by_hand)

            def use(mode=mode, function=function, is_exact=who != "the model"):
                with mode as cp:
                    out = cp.gather(function(cp.shard(x, dim=3)), dim=2)
                assert torch.allclose(out, expected, atol=1e-5) == is_exact

            outcomes[who, backend] = warnings_of(use)
    return outcomes


def test_own_local_attention_in_a_graph_is_not_taken_for_the_models(rank_pool):
    for outcomes in rank_pool.run(in_graphs, 2):
        for (who, backend), warned in outcomes.items():
            words = [text for text in warned if BY_HAND in text]
            assert len(words) == len(warned) == (who == "the model"), (who, backend, warned)


def enter_with_replaced_sdpa(ranks):
    def enter():
        with UnifiedAttnMode(cpu_mesh(1, ranks)) as mode:
            return mode.ranks

    with mock.patch.object(F, "scaled_dot_product_attention", attend_by_hand):
        return outcome(enter)


def test_replaced_sdpa_is_refused_before_the_model_runs(rank_pool):
    assert rank_pool.run(enter_with_replaced_sdpa, 1, 1) == [1]
    for error in rank_pool.run(enter_with_replaced_sdpa, 2, 2):
        assert re.match(r"RuntimeError: .*test_handwritten\.attend_by_hand.* 2 ranks", error)
