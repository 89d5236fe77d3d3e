"""The choice of a backend for attention on one device, including the Triton kernel."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from para_core import UnifiedAttnMode
from para_core.attention import local
from para_core.attention.attention_options import AttnOptions
from para_core.attention.backend_selection import check_backend, check_some_backend
from para_core.attention.backends import triton_backend
from para_core.attention.local import continue_attention, local_attention, local_attention_with_lse
from para_core.attention.local_call import LocalAttentionCall
from para_core.attention.merge import Merged
from para_core.distributed.mesh import one_rank
from para_core.option_values import BACKENDS
from tests.attention.cases import CAUSAL, Case, Mask, check_all, lay_out
from tests.attention.cases import attend as attend_over_mesh
from tests.attention.one_device import relative_error
from tests.kernels.attention_cases import by_formula, error, make
from tests.kernels.interpreted import interpreted


def test_the_named_backend_computes_on_one_rank(monkeypatch):
    """Check a named backend on one rank with strides, a mask, shared heads, more keys than queries, and gradients."""
    query, key, value = (lay_out(x, "strided") for x in make(5, 7, key_heads=1))
    query.requires_grad_()
    mask = torch.ones(5, 7, dtype=torch.bool).tril(1)
    by_math = []
    for table in (local.FORWARD, local.BACKWARD):
        function = table[local.OF_PYTORCH["math"]]
        counted = lambda *args, function=function: by_math.append(function) or function(*args)  # noqa: E731
        monkeypatch.setitem(table, local.OF_PYTORCH["math"], counted)

    def call(*tensors):
        return F.scaled_dot_product_attention(*tensors, attn_mask=mask, scale=0.3, enable_gqa=True)

    grads = []
    for backend, expected in (("flash", 0), ("math", 2)):
        by_math.clear()
        with UnifiedAttnMode(one_rank("cpu"), backend=backend):
            out = call(query, key, value)
            grads += torch.autograd.grad(out.sum(), query)
        assert len(by_math) == expected
        assert error(out.detach(), by_formula(query.detach(), key, value, mask=mask, scale=0.3)[0]) < 1e-6
    assert relative_error(*grads) < 1e-5


def attend(backend, *tensors, **options):
    with UnifiedAttnMode(one_rank("cpu"), backend=backend):
        return F.scaled_dot_product_attention(*tensors, **options)


def with_math_alone(function, *args):
    with sdpa_kernel([SDPBackend.MATH]):
        check_backend("math", X[0], X[2], masked=False)
        return function(*args, backend="flash")


X = make(5, 7)
ON_GPU = [x.half().to("meta") for x in X]  # The meta device runs the kernels of CUDA.
GPU_MASK = torch.ones(1, 1, 1, 7, dtype=torch.bool, device="meta")
REFUSED = {
    "unknown": (lambda: AttnOptions(backend="xformers"), f"xformers.*{', '.join(BACKENDS)}"),
    "unknown option": (lambda: AttnOptions.of(is_causal=True), "no option 'is_causal'; expected one of rotate_method"),
    "triton on a CPU": (lambda: attend("triton", *X), r"triton.* CUDA .*CPU.*TRITON_INTERPRET=1"),
    "triton is missing": (
        mock.patch.object(triton_backend, "has_triton", lambda: False)(lambda: attend("triton", *X)),
        r'pip install "triton>=3\.5"',
    ),
    "triton in float64": (
        lambda: check_some_backend(X[0].double(), X[2].double(), backend="triton"),
        r"triton.*float32.* 256.* torch\.float64 .*16",
    ),
    "triton of wide heads": (
        lambda: check_some_backend(X[0].new_empty(1, 1, 1, 264), X[2], backend="triton"),
        r"triton.*float32.* 256.* torch\.float32 .*264",
    ),
    "cudnn on a CPU": (lambda: attend("cudnn", X[0].clone().requires_grad_(), *X[1:]), r"cudnn.* CUDA .*CPU"),
    **{
        f"forbidden {function.__name__}": (partial(with_math_alone, function, *args), r"flash.* sdpa_kernel\(")
        for function, *args in [
            (local_attention, LocalAttentionCall(*X)),
            (local_attention_with_lse, LocalAttentionCall(*X)),
            (continue_attention, Merged(), LocalAttentionCall(*X)),
            (check_some_backend, X[0], X[2]),
        ]
    },
    "flash of two widths": (lambda: attend("flash", X[0], X[1], X[2][..., :3]), r"flash.* head dim; .* and 3"),
    "flash of a rectangle": (
        lambda: local_attention_with_lse(LocalAttentionCall(*ON_GPU, is_causal=True), backend="flash"),
        r"flash.* 5 .*7 ",
    ),
    "flash with a mask": (
        lambda: check_some_backend(ON_GPU[0], ON_GPU[2], mask=GPU_MASK, backend="flash"),
        r"flash.* attn_mask",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_backend_refuses_what_it_cannot_compute(name):
    call, message = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        call()


def test_triton_runs_on_one_rank_eager_and_in_a_graph():
    tensors = [x.half() for x in X]
    with torch.no_grad(), interpreted():
        out = attend("triton", *tensors, **CAUSAL)
        with UnifiedAttnMode(one_rank("cpu"), backend="triton"):
            call = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
            assert torch.equal(call(*tensors, is_causal=True), out)
    assert error(out, by_formula(*tensors, **CAUSAL)[0]) < 1e-3


def attend_interpreted(*args):
    with interpreted():
        return attend_over_mesh(*args)


def test_a_ring_of_triton_kernels_equals_one_device(rank_pool):
    cases = [Case(13, 2), Case(13, 2, options=CAUSAL), Case(13, 2, mask=Mask("k"))]
    check_all(rank_pool, cases, 2, 1, run=attend_interpreted, backend="triton")
