"""Launch counts: operators of this process as they are dispatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import fake_group
from para_core import SequenceLayout, UnifiedAttnMode, init_context_parallel_mesh
from para_core.attention import local, usp
from para_core.attention.attention_options import AttnOptions, RotateMethod
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.backend_selection import Backend
from para_core.attention.spec import AttentionSpec
from para_core.distributed.layout import even_layout
from para_core.distributed.mesh import sequence_mesh

# Beside views, which their schema tells: what launches nothing on a device.
_NO_LAUNCH = {
    "aten::_unsafe_view",
    "aten::_fused_sdp_choice",  # reads shapes and switches
    "aten::empty",
    "aten::empty_like",
    "aten::empty_permuted",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "_c10d_functional::wait_tensor",
}
_BUILT_IN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd"}
# Launches of CUDA, whatever their form for the CPU consists of.
_WHOLE = {
    "para_core::merge": 1,
    "para_core::merge_": 1,
    "para_core::triton_attention": 1,
    "para_core::triton_attention_int8": 3,
    "para_core::pack": 1,
    "para_core::unpack": 1,
    "para_core::pack_8_bits": 1,
    "para_core::unpack_8_bits": 1,
    "para_core::residual_change": 2,
    "para_core::forecast": 1,
    "para_core::group_moments": 2,
    "para_core::group_normalized": 1,
}


class LaunchCounter(TorchDispatchMode):
    """Inside, counts launches: operators that are not views, and collectives; waits and allocations aside.

    A fused attention kernel is one operator. (Where SDPA decomposes into matrix products, each of these counts: give it
    what the flash kernel takes.) Custom operators are opened, what they consist of counts, except those in Triton. What
    goes round the dispatcher is not seen: a Triton kernel that is launched from Python outside of an operator. Under
    any such mode torch runs compiled functions as eager code, so these are not counted as compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_operator: Counter[str] = Counter()

    @property
    def launches(self) -> int:
        return self.by_operator.total()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if func.namespace not in _BUILT_IN and name not in _WHOLE:
            with self:
                return func.redispatch(_kernel_keys([*args, *(kwargs or {}).values()]), *args, **(kwargs or {}))
        if name not in _NO_LAUNCH and not _is_view(func):
            self.by_operator[name.removeprefix("aten::")] += _WHOLE.get(name, 1)
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        """The operators by number: what is shown where a budget is exceeded."""
        parts = [f"{number} {name}" for name, number in self.by_operator.most_common()]
        return f"{self.launches} launches: {', '.join(parts)}"


def _is_view(func: OpOverload) -> bool:
    """Whether what it returns is memory of an argument, not written to."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _kernel_keys(args: Sequence[Any]) -> DispatchKeySet:
    """The device's own kernel of an operator: below autograd, and below the modes that have seen it."""
    device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
    return DispatchKeySet(getattr(DispatchKey, {"cuda": "CUDA", "meta": "Meta"}.get(device, "CPU")))


Attend = Callable[[Tensor, Tensor, Tensor], Any]


def count_attention(
    ring: int,
    ulysses: int,
    *,
    tokens: int = 288,
    heads: int = 24,
    head_dim: int = 16,
    batch: int = 1,
    device: Literal["cpu", "meta"] = "cpu",
    backend: Backend | None = None,
    rotate_method: RotateMethod = "alltoall",
    comm_dtype: torch.dtype | None = None,
) -> LaunchCounter:
    """The launches of one intercepted call on rank 0, forward, without a mask: of the second call, when sizes are
    known.

    Args:
        tokens, heads: of the whole sequence; 288 × 24 are sharded as FLUX' 4608 × 24 at 1024² are.
        device: of the tensors. ``"meta"``: what CUDA would launch for bfloat16, with the flash backend chosen.
        backend: that is named, with ``"meta"``.
    """
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with fake_group(ring * ulysses), torch.no_grad():
        mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=ring, max_ulysses_dim_size=ulysses)
        layout = even_layout(tokens, ring * ulysses)
        # [B, S, H, D] in memory, as the projections of a model leave it.
        shape = (batch, layout.size(0), heads, head_dim)
        tensors = [torch.empty(shape, dtype=dtype, device=device).transpose(1, 2) for _ in range(3)]
        options = AttnOptions(backend=backend, rotate_method=rotate_method, comm_dtype=comm_dtype)
        on_device = _intercepted if device == "cpu" else _as_on_cuda
        with on_device(mesh, layout, heads, options) as attend:
            attend(*tensors)
            with LaunchCounter() as counter:
                attend(*tensors)
    return counter


@contextmanager
def _intercepted(mesh: DeviceMesh, layout: SequenceLayout, _: int, options: AttnOptions) -> Iterator[Attend]:
    given = {"rotate_method": options.rotate_method, "comm_dtype": options.comm_dtype}
    with UnifiedAttnMode(mesh, layout=layout, assume_equal=True, **given):
        yield F.scaled_dot_product_attention


@contextmanager
def _as_on_cuda(mesh: DeviceMesh, layout: SequenceLayout, heads: int, options: AttnOptions) -> Iterator[Attend]:
    """Run what the attention operator runs on a GPU. A mode stops earlier, at the shapes of meta tensors."""
    text = options.as_text()
    spec = AttentionSpec(layout, layout, sequence_mesh(mesh), heads, heads, options=options, options_text=text)

    def sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        # SDPA computes meta tensors by matrix products, and GPU tensors by the one kernel that is called here.
        return local.local_attention_with_lse(query, key, value, **options)[0]

    with (
        mock.patch.object(local, "choose_backend", lambda *_: SDPBackend.FLASH_ATTENTION.value),
        mock.patch.object(usp, "local_attention", sdpa),
    ):
        yield lambda query, key, value: usp.usp_forward(AttentionPlan(spec), query, key, value, None)
