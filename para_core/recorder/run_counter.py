"""Count launches, collectives and sent bytes of this process, while a model or pipeline runs on real tensors.

``cli/measurement.py`` reports these counts, and tests compare them with what is expected. A new kernel behind
an operator must be added to ``_KERNELS``: without it the operators of its plain code are counted on a CPU or
the meta device, which only the budgets of attention would notice, and nothing is counted on a GPU, where the
kernel runs. So an operator of another package whose kernel is compiled code counts as no launch. Tests:
tests/attention/test_launches.py, tests/kernels/test_device_tables.py, and for the bytes of a whole run
tests/cli/test_bench.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from para_core.attention.backends.added import ADDED
from para_core.distributed.agree import is_record
from para_core.recorder.operator_count import is_launch, leaf_tensors
from para_core.torch_internals import OpOverload, TorchDispatchMode, call_kernel, group_named, schema_of

# The namespaces of torch's own operators. Others are custom operators, whose inner operators are counted
# instead.
_BUILT_IN = {"aten", "prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd"}
# The number of kernels that each of these operators launches on CUDA. The operators inside them are not
# counted, because there are such operators only on the CPU.
_KERNELS = {
    "para_core::merge": 1,
    "para_core::merge_": 1,
    "para_core::pack": 1,
    "para_core::unpack": 1,
    "para_core::product": 1,
    "para_core::residual_change": 2,
    "para_core::forecast": 1,
    "para_core::group_moments": 2,
    "para_core::group_normalized": 1,
    **{name: number for backend in ADDED.values() for name, number in backend.launches.items()},
}


class RunCounter(TorchDispatchMode):
    """A mode that counts launches, collectives, and the bytes that this rank sends in collectives.

    A launch is a collective, or an operator for which :func:`is_launch` is True. A fused attention
    kernel counts as one launch; if SDPA decomposes into matrix products, as on meta tensors, each product
    counts. Operators inside a custom operator are counted, unless the custom operator is one of our Triton
    kernels. Triton kernels that Python launches outside of an operator are not counted. Under a dispatch mode
    torch runs compiled functions as eager code, so the launches of graphs cannot be counted.

    An all-reduce of n ranks is taken to send ``2 * (n - 1) / n`` of its bytes, as a ring does. Exchanges of
    small records between CPUs, by which ranks compare their inputs, count as launches only.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_operator: Counter[str] = Counter()
        self.collectives = self.bytes_sent = 0
        # The number of running custom operators whose bytes were counted as a whole, so that collectives
        # inside them must not be counted again.
        self._counted_outside = 0

    @property
    def launches(self) -> int:
        return self.by_operator.total()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__ for kind in types):
            # Let the tensor subclass run the operator. The operators that it calls on its inner tensors then
            # arrive in this method.
            return NotImplemented
        name = schema_of(func).name
        sent = None
        if not self._counted_outside:
            sent = bytes_sent(func, args)
        if sent is not None:
            self.collectives += 1
            self.bytes_sent += sent
        if func.namespace not in _BUILT_IN and name not in _KERNELS:
            # The kernel is that of the first tensor: for CUDA, the meta device, or else a CPU (call_kernel), which
            # fails on tensors of other devices.
            device = "cpu"
            operands = leaf_tensors((args, kwargs))
            if operands:
                device = operands[0].device.type
            self._counted_outside += sent is not None
            try:
                with self:
                    return call_kernel(func, device, args, kwargs)
            finally:
                self._counted_outside -= sent is not None
        if is_launch(func):
            self.by_operator[name.removeprefix("aten::")] += _KERNELS.get(name, 1)
        return func(*args, **kwargs)

    def __str__(self) -> str:
        """Return a line with the total number of launches, and the number of each operator, the most frequent
        first.
        """
        parts = [f"{number} {name}" for name, number in self.by_operator.most_common()]
        return f"{self.launches} launches: {', '.join(parts)}"


# The names of c10d's operators, and of the collectives in _c10d_functional that do the same.
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather_into_tensor",
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_base_": "all_to_all_single",
    "broadcast_": "broadcast",
    "send": "send",
}


def bytes_sent(func: OpOverload, args: Sequence[Any]) -> int | None:
    """Return the bytes that this rank sends to other ranks in a call of the operator ``func``.

    A broadcast counts on every rank, as if each passed the bytes on. Return None if ``func`` is not a
    collective, is one of c10d that nothing here uses (not in ``_KINDS``), or only exchanges records between
    CPUs.
    """
    namespace, _, name = schema_of(func).name.partition("::")
    if namespace == "para_core" and name == "all_gather":
        return int(args[0].nbytes) * (len(args[1]) - 1)
    if namespace == "para_core" and name == "all_to_all":
        return _bytes_to_others(args[0], args[1], group_named(args[3]))
    if namespace == "c10d":
        return _bytes_of_c10d(name, args)
    if namespace == "_c10d_functional":
        return _bytes_of_functional(name, args)
    return None


def _bytes_of_c10d(name: str, args: Sequence[Any]) -> int | None:
    """Return what :func:`bytes_sent` returns for an operator of c10d, whose arguments hold the group itself."""
    boxed = next((value for value in args if isinstance(value, torch.ScriptObject)), None)
    if boxed is None or name not in _KINDS:
        return None
    group = dist.ProcessGroup.unbox(boxed)
    if name == "alltoall_base_":
        # The arguments are the output, the input, the group, and the sizes of the parts of both; none are
        # equal parts.
        sizes = args[4] or [len(args[1]) // group.size()] * group.size()
        return _bytes_to_others(args[1], sizes, group)
    # These operators take the output first and the input second; the others take the input first.
    inputs = leaf_tensors(args[0])
    if name in ("allgather_", "_allgather_base_", "_reduce_scatter_base_"):
        inputs = leaf_tensors(args[1])
    if name == "_allgather_base_" and is_record(args[0]):
        return None
    # Those of all_gather_object are bytes on the CPU. Models do not use this operator.
    if name == "allgather_" and all(x.dtype == torch.uint8 and x.device.type == "cpu" for x in inputs):
        return None
    return _bytes_of_kind(_KINDS[name], inputs, group.size())


def _bytes_of_functional(name: str, args: Sequence[Any]) -> int | None:
    """Return what :func:`bytes_sent` returns for a functional collective, whose arguments hold the group's name."""
    strings = [value for value in args if isinstance(value, str)]
    if not strings:
        return None
    # The last string among the arguments is the name of the group.
    group = group_named(strings[-1])
    kind = name.removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
    if kind == "all_to_all_single":
        return _bytes_to_others(args[0], args[2], group)
    return _bytes_of_kind(kind, leaf_tensors(args[0]), group.size())


def _bytes_of_kind(kind: str, inputs: Sequence[Tensor], ranks: int) -> int | None:
    """Return the bytes that each of ``ranks`` ranks sends in a collective of this kind; None for an unknown kind."""
    total = sum(x.nbytes for x in inputs)
    sent = {
        "all_reduce": 2 * total * (ranks - 1) / ranks,
        "all_gather_into_tensor": total * (ranks - 1),
        "reduce_scatter_tensor": total * (ranks - 1) / ranks,
        "broadcast": total,
        "send": total,
    }.get(kind)
    if sent is None:
        return None
    return round(sent)


def _bytes_to_others(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> int:
    """Return the bytes of ``x`` without this rank's part, if it is split along dim 0 into parts of these ``sizes``."""
    per_row = x.element_size() * (x.numel() // max(1, len(x)))
    return int((sum(sizes) - sizes[group.rank()]) * per_row)
