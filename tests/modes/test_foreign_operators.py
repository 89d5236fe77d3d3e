"""Operators of other packages: those whose name says that they compute attention, and calls of them by graphs."""

import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode

from para_core.modes import foreign_operators

NAMES = {
    True: """a_library.masked_attention _C.masked_multihead_attention a_library.attention_with_bias
        cuequivariance.attention_pair_bias torchao.fp8_fa3_rope_sdpa transformers_msa.sparse_atten
        a_library.attn_no_grad torch_attn._varlen_attn vllm.unified_attention_with_output
        xformers.efficient_attention_forward_cutlass xformers_flash.flash_fwd
        _flash_attn_9e27194.varlen_fwd _vllm_fa2_C.fwd_kvcache sgl_kernel.fwd sgl_kernel.varlen_fwd_sparse
        aten._scaled_dot_product_flash_attention sageattention_qattn.qk_int8_sv_f16_accum_f16_attn""",
    False: """aten._scaled_dot_product_flash_attention.default aten.scaled_dot_product_attention para_core.attention
        aten._scaled_dot_product_efficient_attention_backward flash_attn._flash_attn_varlen_backward flash_attn_3.bwd
        xformers.fmha_merge_attentions_varlen _C.merge_attn_states flash_attn_3.fwd_combine a_library.attn_combine
        _vllm_fa3_C.get_scheduler_metadata a_library.create_attention_mask a_library.attention_grad other.fwd
        a_library.attenuate vllm.flash_attn_kv_cache_update sgl_kernel.rotary_embedding flash_attn.apply_rotary""",
}


@pytest.mark.parametrize("expected", [True, False])
def test_operators_that_compute_attention_are_found_by_name(expected):
    for name in NAMES[expected].split():
        # Only for aten does it matter whether the operator is an overload.
        operator = functools.reduce(getattr, name.split("."), torch.ops) if name.startswith("aten.") else name
        assert foreign_operators.computes_attention(operator) == expected, name


@pytest.mark.parametrize(("namespace", "expected"), [("_flash_attn_9e27194", True), ("xformers_flash", False)])
def test_builds_that_the_dispatcher_does_not_know_are_found(monkeypatch, namespace, expected):
    monkeypatch.setattr(torch, "ops", type("Operators", (), {})())
    setattr(torch.ops, namespace, None)
    torch.ops.flash_attn = None
    assert foreign_operators.has_other_builds() == expected


@torch.library.custom_op("a_library::attention_plus_one", mutates_args=())
def attend(q: torch.Tensor) -> torch.Tensor:
    return q + 1


attend.register_fake(torch.empty_like)


class Callers(TorchFunctionMode):
    """Notes for each operator that it sees in eager code whether a graph calls it."""

    def __enter__(self):
        self.by_graphs = []
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not torch.compiler.is_compiling() and type(func) in foreign_operators.OPERATOR_TYPES:
            self.by_graphs.append(foreign_operators.is_called_by_a_graph(func))
        return func(*args, **(kwargs or {}))


def attend_by_overload(q):
    return torch.ops.a_library.attention_plus_one.default(q)


CALLS = [(attend, False), (torch.ops.a_library.attention_plus_one, False), (attend_by_overload, False)]
COMPILED = [(torch.compile(attend_by_overload, backend=backend), True) for backend in ("eager", "aot_eager")]


@pytest.mark.parametrize(("call", "expected"), CALLS + COMPILED)
def test_calls_of_graphs_are_told_from_those_of_eager_code(call, expected):
    # A user's mode may see the call first.
    with Callers() as callers, torch.device("cpu"), Callers() as inner:
        call(torch.ones(3))
    assert callers.by_graphs == inner.by_graphs == [expected]
