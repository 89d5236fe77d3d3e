"""The parts of benchmarks/peers that decide a verdict. They need no peer and no network."""

import datetime
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks.peers import __main__ as peers
from benchmarks.peers import stand_ins, xdit
from benchmarks.peers.cells import best, verdict
from tests.attention.one_device import make_qkv, relative_error

ROOT = Path(__file__).parents[1]


def done(error, positions, bound=1e-5):
    return {"errors": {"out": error}, "bounds": {"out": bound}, "positions": positions}


def raised(message, at=1.0):
    return {"raised": message, "at": at}


GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [::1]:1: Connection reset by peer"


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ([done(2e-7, [0, 1]), done(3e-7, [2])], "exact"),
        ([done(2e-7, [0, 1]), done(2e-5, [2])], "wrong"),
        ([done(2e-7, [0, 1]), done(float("inf"), [2])], "wrong"),
        ([done(2e-7, [0]), done(2e-7, [2])], "wrong"),  # No rank has token 1.
        ([done(2e-7, [0, 1, 2]), None], "hangs"),
        ([raised("ValueError: no"), None], "refused"),
        ([done(2e-7, [0, 1]), raised("AssertionError: Must be CUDA tensors")], "needs CUDA"),
        ([{"died": -6}, raised(GLOO)], "crashes"),
        ([{"died": -6}, raised("ValueError: 7 does not divide")], "refused"),
    ],
)
def test_a_verdict_is_that_of_the_worst_rank(ranks, word):
    assert verdict(ranks, tokens=3)["verdict"] == word


def test_first_message_not_about_connections_is_kept():
    result = verdict([raised(GLOO, at=1.0), raised("ValueError: later", at=3.0), raised("ValueError: no", at=2.0)], 3)
    assert result["message"] == "ValueError: no"


def test_exact_attempt_counts_else_the_first():
    wrong, refused, exact = ({"verdict": word} for word in ("wrong", "refused", "exact"))
    assert best([refused, wrong, exact]) is exact
    assert best([refused, wrong]) is refused


def test_placeholders_stand_for_named_packages_alone(monkeypatch):
    finder = stand_ins._Finder(("no_such_server",))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    module = importlib.import_module("no_such_server.config")

    class Derived(module.Base):
        size = 3

    assert Derived().size == 3 and not module.HAS_GPU and not module.version() >= 10
    assert module.decorated(Derived) is Derived
    assert module.named(1)(Derived) is Derived
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_client")


def test_every_copy_of_text_counts_for_cosmos3():
    once, twice = (xdit.Cosmos3("text", S=6, H=2, D=4, keys=3, copies=copies).on_one_device()[0] for copies in (1, 2))
    assert once.shape == (1, 1, 6, 8)
    assert relative_error(twice, once) > 0.01
    none = (xdit.Cosmos3("none", S=6, H=2, D=4, copies=copies).on_one_device()[0] for copies in (1, 2))
    assert relative_error(*none) == 0


@pytest.mark.parametrize("kind", ["plain", "causal", "bool", "float", "shared heads"])
def test_stand_ins_are_attention(kind):
    q, k, v = (x.requires_grad_() for x in make_qkv(12, 4, H_kv=2 if kind == "shared heads" else None))
    visible = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0)) < 0.7
    visible[:, :, 3] = False  # This row sees no key.
    bias = {"bool": visible, "float": torch.where(visible, 0.5, -1.0)}.get(kind)
    expected = F.scaled_dot_product_attention(q, k, v, bias, is_causal=kind == "causal", enable_gqa=True)
    grad = make_qkv(12, 4, seed=1)[0]
    expected.backward(grad)

    causal = stand_ins._triangle(q, k, kind == "causal")
    with torch.no_grad():
        out, lse = stand_ins.attention(q, k, v, bias, causal, None)
        gradients = stand_ins.attention_backward(grad, q, k, v, bias, causal, None, out, lse)
    assert relative_error(out, expected.detach()) < 1e-6
    for gradient, x in zip(gradients, (q, k, v), strict=True):
        assert relative_error(gradient, x.grad) < 1e-6


def test_flash_attn_aligns_causal_mask_with_last_key():
    q, k, v = make_qkv(3, 2, S_k=5)
    out = stand_ins._flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)
    visible = torch.ones(3, 5, dtype=torch.bool).tril(2)
    assert relative_error(out, F.scaled_dot_product_attention(q, k, v, visible)) < 1e-6


def test_one_column_is_replaced_and_the_others_stay(monkeypatch):
    written = {}
    monkeypatch.setattr(peers, "write_results", lambda name, results: written.update(results))
    before = json.loads((ROOT / "benchmarks/results/peers.json").read_text())
    outcome = {"cells": {"a row": {}}, "versions": {"para-attn": "9"}, "own rows": {"own": {}}, "facts": {}}
    peers.record({"with_para_attn": outcome}, {"with_para_attn": outcome})
    assert written["cells"].pop("ParaAttention") == {"a row": {}}
    assert written["cells"] == {name: cells for name, cells in before["cells"].items() if name != "ParaAttention"}
    assert written["own rows"] == before["own rows"] | {"ParaAttention": {"own": {}}}
    assert written["facts"] == before["facts"]
    assert written["dates"] == before["dates"] | {"ParaAttention": datetime.date.today().isoformat()}
    assert written["versions of the peers"]["para-attn"] == "9"
