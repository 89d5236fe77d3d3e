"""A mode in which each head attends to a share of the keys. Not exact."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.attention.kept_keys import KeptKeys
from para_core.distributed.mesh import SequenceMesh
from para_core.modes.unified import UnifiedAttnMode


class SparseKVAttnMode(UnifiedAttnMode):
    """An approximate :class:`UnifiedAttnMode`, in which each head attends only to the keys with the highest
    attention weights.

    The criterion is that of SnapKV (Li et al. 2024, arXiv:2404.14469). For each sample and query head:

    1. Observe ``window`` queries: those in the middle of ``window`` equal parts of the sequence. Observe all
       queries if there are at most ``window``.
    2. Score each key by the sum of its attention weights over the observed queries. The softmax covers all
       keys that the mask and ``is_causal`` allow.
    3. Keep the ``ceil(share * S_k)`` keys with the highest scores. Among equal scores, earlier keys come
       first.

    The result equals the result on one device with all other keys masked out, on any mesh. A ring sends only
    the kept keys and values, unless the call requires a gradient, is causal, has a mask with a row per query,
    a float mask together with ``attn_func``, or fewer key heads than query heads. If a rank of a ring of
    several has fewer than two queries, any mask counts as one with a row per query.

    Args:
        mesh (`DeviceMesh` or `ProcessGroup`): See :class:`UnifiedAttnMode`.
        share (`float`): The share of the keys to keep, ``0 < share <= 1``.
        window (`int`, *optional*, defaults to `64`): Number of observed queries.
        options (*optional*): The options of :class:`UnifiedAttnMode`.

    Raises:
        ValueError: If ``share``, ``window`` or an option is invalid.
    """

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup | SequenceMesh,
        *,
        share: float,
        window: int = 64,
        **options: Any,
    ) -> None:
        super().__init__(mesh, kept_keys=KeptKeys(share, window), **options)
