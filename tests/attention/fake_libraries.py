"""Stand-ins for FlashAttention-3, FlashAttention-4 and SageAttention, which compute by the formula."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest import mock

import torch

from para_core.attention.backends import library
from tests.kernels.attention_cases import by_formula


# These parameters, of more, are from Dao-AILab/flash-attention, hopper/flash_attn_interface.py, commit 01afd16.
def flash_attn_3(q, k, v, softmax_scale=None, causal=False, return_attn_probs=False):
    """Attend over ``[B, S, H, D]``, with lse ``[B, H, S_q]``. The diagonal ends at the last query and key."""
    shift = k.shape[1] - q.shape[1]
    options = {"scale": softmax_scale, "is_causal": causal, "query_offset": shift}
    result, lse = by_formula(*[x.transpose(1, 2) for x in (q, k, v)], **options)
    out = result.transpose(1, 2).contiguous().to(q.dtype)
    return (out, lse.float()) if return_attn_probs else out


def earlier_flash_attn_3(q, k, v, softmax_scale=None, causal=False):
    return flash_attn_3(q, k, v, softmax_scale, causal, return_attn_probs=True)


# These parameters, of more, are from PyPI's flash-attn-4 4.0.0b36, flash_attn/cute/interface.py.
def flash_attn_4(q, k, v, softmax_scale=None, causal=False, return_lse=False):
    """Attend as FlashAttention-3 does, but always return a pair, whose lse is None unless it is requested."""
    out, lse = flash_attn_3(q, k, v, softmax_scale, causal, return_attn_probs=True)
    return out, lse if return_lse else None


# The signature is that of thu-ml/SageAttention, sageattention/core.py, commit 0116592.
def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
    # Its docstring says "only applicable when qo_len == kv_len".
    assert tensor_layout == "HND" and not (is_causal and q.shape[2] != k.shape[2])
    out, lse = by_formula(q, k, v, scale=sm_scale, is_causal=is_causal)
    return (out.to(q.dtype), lse.float()) if return_lse else out.to(q.dtype)


# Each backend has the module in which its library defines the function.
PLACES = {
    "flash3": ("flash_attn_interface", "flash_attn_func", flash_attn_3),
    "flash4": ("flash_attn.cute", "flash_attn_func", flash_attn_4),
    "sage": ("sageattention", "sageattn", sageattn),
}


@contextmanager
def libraries_installed():
    """Install the stand-ins for all devices and dtypes. Yield the number of calls of each by its backend."""
    calls = Counter()
    with ExitStack() as stack:
        for backend, (module_name, function_name, function) in PLACES.items():
            module = ModuleType(module_name)

            def count(*args, _backend=backend, _function=function, **kwargs):
                calls[_backend] += 1
                return _function(*args, **kwargs)

            count.__signature__ = library.signature(function)
            setattr(module, function_name, count)
            stack.enter_context(mock.patch.dict(sys.modules, {module_name: module}))
        stack.enter_context(mock.patch.object(library, "LIBRARY_DEVICES", ("cuda", "cpu")))
        stack.enter_context(mock.patch.object(library, "LIBRARY_DTYPES", (*library.LIBRARY_DTYPES, torch.float32)))
        yield calls
