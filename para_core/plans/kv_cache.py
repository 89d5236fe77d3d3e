"""Key-value caches of decoders under a plan: after each call every rank holds the keys and values of all tokens.

In a call whose tokens are sharded, the model appends only this rank's tokens to the cache. The tokens of all ranks are
gathered after the call, because a single new token in a later call, which no plan shards, must attend to all tokens on
every rank. The ``DynamicCache`` of transformers is recognised by its attributes, without importing transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from para_core.distributed.collectives import all_gather
from para_core.distributed.layout import Segment
from para_core.distributed.mesh import SequenceMesh

# Name of the segment of keys that earlier calls cached, which precede the keys of the current call. The length of the
# segment is inferred from the number of keys.
PAST = "past of a key-value cache"


class CachesOfCall:
    """A snapshot of the key-value caches among a call's arguments, taken before the call.

    The attribute ``hold_tokens`` says whether any of these caches already holds tokens.
    """

    def __init__(self, arguments: Iterable[Any]) -> None:
        layers = [layer for cache in _caches_in(arguments) for layer in cache.layers]
        # The keys and values of each layer before the call, [B, H, S, D]; None in a layer without tokens.
        self._layers = {id(x): (getattr(x, "keys", None), getattr(x, "values", None)) for x in layers}
        self.hold_tokens = any(isinstance(keys, Tensor) and keys.numel() > 0 for keys, _ in self._layers.values())

    def gather(self, arguments: Iterable[Any], output: Any, segments: Sequence[Segment], mesh: SequenceMesh) -> None:
        """Complete the caches among ``arguments`` and in ``output`` in place: replace the tokens that this rank
        appended during the call by the tokens that all ranks appended. Collective.

        Does nothing if none of the ``segments`` of the call is sharded.

        Raises:
            ValueError: A cache did not grow by this rank's tokens (a static cache does not), or the call shards more
                than one segment.
        """
        sharded = [segment for segment in segments if not segment.replicated]
        caches = _caches_in([*arguments, output]) if sharded else []
        for cache in caches:
            if len(sharded) != 1:
                names = [segment.name for segment in sharded]
                raise ValueError(
                    f"{type(cache).__name__} was filled in a call that shards several sequences {names}, and which of "
                    "them it holds is not known. Call the model without a cache (use_cache=False)."
                )
            for layer in cache.layers:
                before = self._layers.get(id(layer), (None, None))
                if getattr(layer, "keys", None) is not before[0]:
                    _gather_layer(cache, layer, before, sharded[0], mesh)


def _caches_in(values: Iterable[Any]) -> list[Any]:
    caches: dict[int, Any] = {}
    for value in values:
        items = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(items, (list, tuple)):
            caches.update({id(cache): cache for cache in _caches_in(items)})
        elif hasattr(value, "get_seq_length") and isinstance(getattr(value, "layers", None), list):
            caches[id(value)] = value
    return list(caches.values())


def _gather_layer(cache: Any, layer: Any, before: tuple[Any, Any], segment: Segment, mesh: SequenceMesh) -> None:
    past = before[0].shape[-2] if isinstance(before[0], Tensor) and before[0].numel() > 0 else 0
    # The maximum number of tokens in a sliding-window layer; None if the layer keeps all tokens.
    window = getattr(layer, "sliding_window", None)
    window = None if window is None or getattr(layer, "record_past", False) else int(window) - 1
    sizes = segment.sizes(mesh.ranks)
    held = [past + size if window is None else min(past + size, window) for size in sizes]
    keys = layer.keys
    if hasattr(layer, "max_cache_len") or not isinstance(keys, Tensor) or keys.shape[-2] != held[mesh.rank]:
        raise ValueError(
            f"a plan cannot complete a {type(cache).__name__} with a {type(layer).__name__}: expected a cache that "
            f"grows by the {sizes[mesh.rank]} tokens of this rank. Use a DynamicCache, or call the model without a "
            "cache (use_cache=False)."
        )
    # Gather only the last tokens, which this call added. The earlier tokens are already complete and equal on all
    # ranks.
    added = [min(size, length) for size, length in zip(sizes, held, strict=True)]
    width = mesh.ulysses.size
    blocks = [added[first : first + width] for first in range(0, mesh.ranks, width)]
    for name, old in zip(("keys", "values"), before, strict=True):
        part = getattr(layer, name)
        block = part[..., part.shape[-2] - added[mesh.rank] :, :]
        block = all_gather(block, blocks[mesh.ring.index], part.ndim - 2, mesh.ulysses)
        whole = all_gather(block, [sum(of_block) for of_block in blocks], part.ndim - 2, mesh.ring)
        if past:
            whole = torch.cat([old, whole], dim=-2)
        setattr(layer, name, whole if window is None else whole[..., -window:, :])
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length += segment.total - sizes[mesh.rank]
