"""Exchange tokens for heads by all-to-all, so that each rank runs a self-attention module on all tokens and some of the
heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from para_core.distributed.collectives import all_to_all
from para_core.distributed.layout import Run, Segment
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.plans.plan import AttentionByHeads


class HeadExchange:
    """The exchange of tokens for heads in one call of a module, from ``[B, S_local, H * D]`` to ``[B, S, H_local *
    D]``, and the exchange back.

    Tokens are exchanged for heads first over the ``ulysses`` mesh dim, then over ``ring``. The attribute ``own`` is
    (first head, number of heads) of this rank.

    Args:
        attention: The plan entry of the module.
        segment: The segment of the tokens, sharded in consecutive parts.
        mesh: The ranks that hold the sequence.
        heads: Number of heads of the module, over all ranks.

    Raises:
        ValueError: There are fewer heads than ranks.
    """

    def __init__(self, attention: AttentionByHeads, segment: Segment, mesh: SequenceMesh, heads: int) -> None:
        if heads < mesh.ranks:
            raise ValueError(
                f"an attention module has {heads} heads, and {mesh.ranks} ranks share the tokens of a sequence; its "
                "plan gives each of them whole heads, at least one. Use fewer ranks for the sequence, and others "
                "along the mesh dim 'batch'."
            )
        self.attention, self._heads = attention, heads
        sizes = segment.sizes(mesh.ranks)
        width = mesh.ulysses.size
        blocks = [sizes[first : first + width] for first in range(0, mesh.ranks, width)]
        # Each step of the exchange is (mesh dim, tokens of each rank along this dim, heads of each rank along this
        # dim).
        of_ulysses = [Segment("heads", heads).runs(index, width)[0] for index in range(width)]
        first, count = of_ulysses[mesh.ulysses.index]
        of_ring = [Segment("heads", count).runs(index, mesh.ring.size)[0] for index in range(mesh.ring.size)]
        self._steps = [
            (mesh.ulysses, list(blocks[mesh.ring.index]), [number for _, number in of_ulysses]),
            (mesh.ring, [sum(block) for block in blocks], [number for _, number in of_ring]),
        ]
        start, number = of_ring[mesh.ring.index]
        self.own: Run = (first + start, number)
        self._entered = 0

    def enter(self, x: Tensor) -> Tensor:
        """Return the output of a projection for all tokens and this rank's heads, given ``x``, the output for this
        rank's tokens and all heads. Collective.
        """
        self._entered += 1
        for dim, tokens, heads in self._steps:
            x = _to_heads(x, tokens, heads, dim)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Return the attention output for this rank's tokens and all heads, given ``x``, the output for all tokens and
        this rank's heads. Collective.

        Raises:
            RuntimeError: The module did not call each of its projections exactly once, for example because the
                projections are fused.
        """
        if self._entered != len(self.attention.projections):
            raise RuntimeError(
                f"an attention module called {self._entered} of its projections "
                f"{', '.join(self.attention.projections)}; its plan expects all of them. Undo fused projections: "
                "unfuse_qkv_projections()."
            )
        for dim, tokens, heads in reversed(self._steps):
            x = _to_tokens(x, tokens, heads, dim)
        return x

    @contextmanager
    def own_heads(self, module: nn.Module) -> Iterator[None]:
        """Set the module's number of heads to the number of this rank's heads inside the ``with`` block."""
        setattr(module, self.attention.heads, self.own[1])
        try:
            yield
        finally:
            setattr(module, self.attention.heads, self._heads)

    def own_caches(
        self, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the module's ``args`` and ``kwargs``, with the key-value caches among them narrowed to this rank's
        heads.

        The narrowed tensors are views, so what the module writes reaches the caller's caches.

        Args:
            parameters: Names of the module's positional parameters.
        """
        positional = list(args)
        kwargs = dict(kwargs)
        for name, dim in self.attention.caches:
            if name in kwargs:
                kwargs[name] = self._own_views(kwargs[name], dim)
            elif name in parameters[: len(positional)]:
                index = parameters.index(name)
                positional[index] = self._own_views(positional[index], dim)
        return tuple(positional), kwargs

    def _own_views(self, value: Any, dim: int) -> Any:
        if isinstance(value, Tensor):
            return value.narrow(dim, *self.own)
        if isinstance(value, Mapping):
            return {key: self._own_views(item, dim) for key, item in value.items()}
        return value


def _to_heads(x: Tensor, tokens: list[int], heads: list[int], dim: MeshDim) -> Tensor:
    """Exchange ``[B, S_local, H * D]`` for ``[B, S, H_local * D]`` over one mesh dim. Collective.

    Args:
        tokens: Number of tokens of each rank of ``dim``.
        heads: Number of heads of each rank of ``dim``.
    """
    if dim.size == 1:
        return x
    batch, width = x.shape[0], x.shape[2] // sum(heads)
    parts = x.split([number * width for number in heads], dim=2)
    own = heads[dim.index] * width
    received = all_to_all(
        torch.cat([part.flatten() for part in parts]),
        [batch * tokens[dim.index] * number * width for number in heads],
        [batch * number * own for number in tokens],
        dim,
    )
    ends = list(accumulate([batch * number * own for number in tokens], initial=0))
    whole = [
        received.narrow(0, start, batch * number * own).view(batch, number, own)
        for start, number in zip(ends, tokens, strict=False)
    ]
    return torch.cat(whole, dim=1)


def _to_tokens(x: Tensor, tokens: list[int], heads: list[int], dim: MeshDim) -> Tensor:
    """Exchange ``[B, S, H_local * D]`` for ``[B, S_local, H * D]`` over one mesh dim: undo :func:`_to_heads`."""
    if dim.size == 1:
        return x
    batch, width = x.shape[0], x.shape[2] // heads[dim.index]
    parts = x.split(tokens, dim=1)
    own = tokens[dim.index]
    received = all_to_all(
        torch.cat([part.flatten() for part in parts]),
        [batch * number * heads[dim.index] * width for number in tokens],
        [batch * own * number * width for number in heads],
        dim,
    )
    ends = list(accumulate([batch * own * number * width for number in heads], initial=0))
    whole = [
        received.narrow(0, start, batch * own * number * width).view(batch, own, number * width)
        for start, number in zip(ends, heads, strict=False)
    ]
    return torch.cat(whole, dim=2)
