"""A stand-in for attention on meta and fake tensors: an output with the right shape, dtype and strides.

``adapters/planner/count.py`` and ``benchmarks/pipelines/observe.py`` give it to their recorders, and
``adapters/cfg/output_form.py`` computes a model on the meta device inside :func:`attention_without_data`. Tests:
tests/recorder/test_recorder.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from para_core.attention.sdpa_call import SdpaCall
from para_core.recorder.events import Event
from para_core.recorder.recorder import Recorder
from para_core.torch_internals import FakeTensor


def attend_without_data(call: SdpaCall) -> Tensor:
    """Return the output of ``call``, not initialized if its query is a meta or fake tensor; SDPA computes
    other calls.

    It has the memory layout of a fused kernel, ``[..., S_q, H, D_v]``. On these tensors SDPA itself would
    make a tensor of all scores, whose size a count of memory would take for the model's.
    """
    query = call.query
    if not query.is_meta and not isinstance(query, FakeTensor):
        return call.original()
    if query.ndim < 3:
        return query.new_empty(*query.shape[:-1], call.value.shape[-1])
    batch = torch.broadcast_shapes(query.shape[:-3], call.key.shape[:-3], call.value.shape[:-3])
    heads, queries = query.shape[-3:-1]
    return query.new_empty(*batch, queries, heads, call.value.shape[-1]).transpose(-2, -3)


@contextmanager
def attention_without_data() -> Iterator[None]:
    """Compute attention by :func:`attend_without_data` inside the ``with`` block, in each form that a
    :class:`~para_core.recorder.recorder.Recorder` reroutes.
    """

    def ignore(_: Event) -> None:
        pass

    with Recorder(ignore, compute_attention=attend_without_data):
        yield
