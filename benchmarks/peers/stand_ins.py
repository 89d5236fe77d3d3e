"""The CUDA-only operators with which peers compute attention on one device, for the CPU, in plain PyTorch.

The peers' own code for sharding, sending and merging runs unchanged. The stand-ins keep the operators' contracts: the
accepted shapes, the form of the log-sum-exp, and the corner where a causal mask starts. Only the dtype is free, because
the originals of FlashAttention and cuDNN accept only half precision, and float32 shows an error of the parallel part
more clearly.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

_LIBRARIES: list[torch.library.Library] = []  # An implementation ends with its Library, so keep them.


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return ``out`` in the dtype of the query, and ``lse`` ``[B, H, S_q]`` in float32. Key heads may be shared."""
    lse = _scores(q, k, bias, causal, scale).logsumexp(-1)
    out = _weights(q, k, bias, causal, scale, lse) @ _for_all_heads(v, q).float()
    return _lie_like(out.to(q.dtype), q), lse


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: Tensor | None,
    scale: float | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from ``out`` and ``lse`` of the whole row."""
    weights = _weights(q, k, bias, causal, scale, lse)
    grad = grad.float()
    rowsum = (grad * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (grad @ _for_all_heads(v, q).float().mT - rowsum)
    grad_scores = grad_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    grad_q = grad_scores @ _for_all_heads(k, q).float()
    # Heads that share a key add their gradients.
    grad_k, grad_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (grad_scores.mT @ q.float(), weights.mT @ grad))
    return tuple(_lie_like(g.to(x.dtype), x) for g, x in ((grad_q, q), (grad_k, k), (grad_v, v)))


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: Tensor | None, scale: float | None) -> Tensor:
    scores = q.float() @ _for_all_heads(k, q).float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        if any(size not in (1, wanted) for size, wanted in zip(bias.shape[::-1], scores.shape[::-1], strict=False)):
            raise RuntimeError(f"attn_bias {list(bias.shape)} does not fit scores {list(scores.shape)} (stand-in)")
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias.float()
    return scores if causal is None else scores.masked_fill(~causal, float("-inf"))


def _weights(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: Tensor | None, scale: float | None, lse: Tensor
) -> Tensor:
    # -inf minus -inf is NaN, but a row that saw no key has no weight.
    return torch.exp(_scores(q, k, bias, causal, scale) - lse.float()[..., None]).nan_to_num(0.0)


def _for_all_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _lie_like(x: Tensor, like: Tensor) -> Tensor:
    if like.transpose(1, 2).is_contiguous():
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return x.contiguous()


def _triangle(q: Tensor, k: Tensor, is_causal: bool, *, corner: str = "top left") -> Tensor | None:
    if not is_causal:
        return None
    diagonal = 0 if corner == "top left" else k.shape[2] - q.shape[2]
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(diagonal)


def _check_head_dims(name: str, q: Tensor, v: Tensor) -> None:
    if v.shape[-1] != q.shape[-1]:
        raise RuntimeError(f"{name}: value must have the query's head dim {q.shape[-1]}, got {v.shape[-1]} (stand-in)")


def _aten_flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None) -> tuple[Any, ...]:
    _check_head_dims("flash attention", q, v)
    out, lse = attention(q, k, v, None, _triangle(q, k, is_causal), scale)
    state, unused = torch.empty(2, dtype=torch.uint64), torch.empty((), dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], state, unused, None


def _aten_flash_backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
) -> tuple[Tensor, ...]:
    return attention_backward(grad, q, k, v, None, _triangle(q, k, is_causal), scale, out, lse)


def _aten_efficient(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None) -> tuple[Tensor, ...]:
    if k.shape[1] != q.shape[1]:
        raise RuntimeError(f"efficient attention: {q.shape[1]} query heads, {k.shape[1]} key heads (stand-in)")
    out, lse = attention(q, k, v, bias, _triangle(q, k, is_causal), scale)
    seed = torch.empty((), dtype=torch.long)
    return out, lse, seed, seed.clone()


def _aten_efficient_backward(
    grad, q, k, v, bias, out, lse, seed, offset, dropout_p, wanted, is_causal=False, *, scale=None
) -> tuple[Tensor, ...]:
    return *attention_backward(grad, q, k, v, bias, _triangle(q, k, is_causal), scale, out, lse), None


def _aten_cudnn(
    q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
) -> tuple[Any, ...]:
    out, lse = attention(q, k, v, bias, _triangle(q, k, is_causal), scale)
    seed = torch.empty((), dtype=torch.long)
    return out, lse[..., None], None, None, q.shape[2], k.shape[2], seed, seed.clone(), None


def _aten_cudnn_backward(
    grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *, scale=None
) -> tuple[Tensor, ...]:
    return attention_backward(grad, q, k, v, bias, _triangle(q, k, is_causal), scale, out, lse[..., 0])


def for_aten() -> None:
    """Register CPU kernels for ``torch.ops.aten._scaled_dot_product_{flash,efficient,cudnn}_attention`` and their
    backward.
    """
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "flash": (_aten_flash, _aten_flash_backward),
        "efficient": (_aten_efficient, _aten_efficient_backward),
        "cudnn": (_aten_cudnn, _aten_cudnn_backward),
    }
    for name, (forward, backward) in kernels.items():
        library.impl(f"_scaled_dot_product_{name}_attention", forward, "CPU")
        library.impl(f"_scaled_dot_product_{name}_attention_backward", backward, "CPU")
    _LIBRARIES.append(library)


def _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal, **options) -> tuple[Any, ...]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _check_head_dims("flash_attn", q, v)
    out, lse = attention(q, k, v, None, _triangle(q, k, causal, corner="bottom right"), softmax_scale)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(grad, q, k, v, out, lse, dq, dk, dv, dropout_p, softmax_scale, causal, *options) -> None:
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    triangle = _triangle(q, k, causal, corner="bottom right")
    gradients = attention_backward(grad, q, k, v, None, triangle, softmax_scale, out, lse)
    for into, gradient in zip((dq, dk, dv), gradients, strict=True):
        into.copy_(gradient.transpose(1, 2))


def _flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, **options) -> Tensor:
    return _flash_attn_forward(q, k, v, dropout_p, softmax_scale, causal)[0]


def for_flash_attn() -> None:
    """Install a module named ``flash_attn`` with the names that yunchang imports."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__version__ = "2.8.3"  # Callers choose the number of expected results by it.
    package.flash_attn_func = _flash_attn_func
    # yunchang imports these, but does not call them here.
    interface._flash_attn_varlen_forward = interface._flash_attn_varlen_backward = None
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    package.flash_attn_interface = interface
    sys.modules["flash_attn"], sys.modules["flash_attn.flash_attn_interface"] = package, interface


@torch.no_grad()  # This is a kernel for inference.
def _flash_attn_varlen_func(
    q, k, v, *, cu_seqlens_q=None, softmax_scale=None, causal=False, return_softmax_lse=False, **options
) -> Any:
    if cu_seqlens_q is not None:
        raise RuntimeError("packed sequences are not offered (stand-in)")
    out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, softmax_scale, causal)
    return (out, lse) if return_softmax_lse else out


# -- Packages that a peer imports and that the called code does not use.


class _Placeholder(type):
    """The type of everything that is imported from a package that is not installed."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(name, (), {"is_placeholder": True})

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if "is_placeholder" not in vars(cls):  # The class is derived from a placeholder by the peer.
            return super().__call__(*args, **options)
        return _Nothing()(*args, **options)

    def __bool__(cls) -> bool:
        return False


class _Nothing:
    """An instance of a placeholder. It is false, and has no effect as a function, decorator or logger."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        decorates = len(args) == 1 and not options and isinstance(args[0], (type, types.FunctionType))
        return args[0] if decorates else self

    def __bool__(self) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: False


class _Package(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return (
            getattr(_Placeholder, name) if name.startswith("__") else _Placeholder(name, (), {"is_placeholder": True})
        )


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the named packages and all their modules."""
        if name.split(".", maxsplit=1)[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return a module in which every name is a placeholder."""
        return _Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing."""


def for_packages(peer: str, names: tuple[str, ...]) -> None:
    """Import placeholders for ``names`` that are not installed, and ``peer`` without its ``__init__``, which starts
    parts of a server.
    """
    sys.meta_path.append(_Finder(names))  # Come last, so that an installed package is found first.
    spec = importlib.util.find_spec(peer)
    package = types.ModuleType(peer)
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules[peer] = package
