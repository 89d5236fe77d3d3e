"""A mode for batch parallelism, in which each rank computes some samples of the batch.

The mode changes attention masks only: each rank uses the part of a mask that belongs to its samples. Nothing
else in the library uses it: pipelines share samples by :mod:`para_core.plans.samples`. Tests:
tests/modes/test_batch_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.sdpa_call import SdpaCall, check_dropout
from para_core.distributed.create_mesh import check_distinct_gpus
from para_core.distributed.mesh import batch_mesh
from para_core.layout.sequence import SequenceLayout, even_layout
from para_core.layout.tokens import shard_tokens
from para_core.modes.interceptor import RUN_FUNCTIONS, SDPA, SDPA_OPERATOR, run_functions
from para_core.modes.sharding_mode import ShardingMode, segments_of
from para_core.torch_internals import no_frame_of_its_own

# The names of the arguments of torch's function, in its order.
_OF_MULTI_HEAD = tuple(signature(F.multi_head_attention_forward).parameters)


class BatchParallelAttnMode(ShardingMode):
    """A context in which each rank computes some samples of a batch.

    ``x = cp.shard(x, dim=0)`` shards the batch and ``cp.gather(y, dim=0)`` gathers it. Parts may be uneven,
    and a rank may hold no sample. Attention needs no communication, because samples do not attend to each
    other. The mode only changes the masks of ``scaled_dot_product_attention``: if an ``attn_mask`` covers the
    whole batch, each rank uses the rows of its own samples. Dropout in attention raises ValueError. Other
    attention functions (``flash_attn``, fused encoders, ``nn.MultiheadAttention``) run unchanged: shard their
    masks with :meth:`shard`.

    Args:
        mesh (`DeviceMesh` or `ProcessGroup`): A mesh with a ``batch`` dim; its other dims are ignored. All
            ranks of a ProcessGroup share the batch. To combine this mode with a :class:`UnifiedAttnMode` over
            ``ring`` and ``ulysses``, enter the ``UnifiedAttnMode`` first and this mode inside it, so that
            masks are reduced to this rank's samples before the ``UnifiedAttnMode`` gets them.
        assume_equal (`bool`, *optional*, defaults to `False`): Whether to skip the small exchanges between
            ranks. In eager code, an exchange before each ``shard`` and ``gather`` turns invalid input on one
            rank into an error on all ranks. On NCCL, another exchange in this constructor detects ranks that
            share a GPU.
    """

    def __init__(self, mesh: DeviceMesh | ProcessGroup, *, assume_equal: bool = False) -> None:
        batch = batch_mesh(mesh)
        if not assume_equal:
            check_distinct_gpus(mesh, batch)
        super().__init__(batch, assume_equal=assume_equal)

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (SDPA, SDPA_OPERATOR) and self._mesh.ranks > 1:
            return self._attend(SdpaCall(*args, **kwargs))
        if func in RUN_FUNCTIONS and self._mesh.ranks > 1:
            return run_functions(self, func, args, kwargs)
        if func is F.multi_head_attention_forward and self._mesh.ranks > 1:
            arguments = {**dict(zip(_OF_MULTI_HEAD, args, strict=False)), **kwargs}
            if arguments.get("training", True):
                check_dropout(arguments["dropout_p"])
        return func(*args, **kwargs)

    def _attend(self, call: SdpaCall) -> Tensor:
        """Return the output of an SDPA call of this rank's samples. A mask without a dim of samples is not changed."""
        check_dropout(call.dropout_p)
        query = call.query
        mask = call.attn_mask
        if mask is not None and mask.ndim == query.ndim >= 3:
            call = call.with_tensors(query, call.key, call.value, self._select_samples(mask, query.shape[0]))
        return call.original()

    def _select_samples(self, mask: Tensor, num_samples: int) -> Tensor:
        """Return the rows of ``mask`` for the ``num_samples`` samples of this rank. Raise ``ValueError`` if
        the mask is for neither one sample, nor these, nor a batch that was sharded through this mode.
        """
        if mask.shape[0] in (1, num_samples):
            return mask
        rank = self._mesh.rank
        ranks = self._mesh.ranks
        sequences = [SequenceLayout((segment,), ranks) for segment in segments_of(self._known)]
        if not sequences:
            sequences = [even_layout(num_samples * ranks, ranks)]
        layouts = [layout for layout in sequences if layout.size(rank) == num_samples]
        for layout in layouts:
            if layout.total == mask.shape[0]:
                return shard_tokens(mask, 0, layout, self._mesh)
        expected = ", ".join([f"{layout.total} (the whole batch)" for layout in layouts])
        raise ValueError(
            f"attn_mask {list(mask.shape)} is for {mask.shape[0]} samples; expected 1, {num_samples} (this rank's)"
            f"{expected and ' or '}{expected}."
        )
