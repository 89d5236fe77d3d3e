"""Exchange tokens for heads by all-to-all, so that each rank runs a self-attention module on all tokens and some of the
heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
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
        width = x.shape[2] // self._heads
        for dim, tokens, heads in self._steps:
            if dim.size > 1:
                own = heads[dim.index] * width
                shapes = [(x.shape[0], number, own) for number in tokens]
                x = _exchange(x.split([number * width for number in heads], dim=2), shapes, 1, dim)
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
        width = x.shape[2] // self.own[1]
        for dim, tokens, heads in reversed(self._steps):
            if dim.size > 1:
                shapes = [(x.shape[0], tokens[dim.index], number * width) for number in heads]
                x = _exchange(x.split(tokens, dim=1), shapes, 2, dim)
        return x

    def run(
        self, call: Callable[..., Any], module: nn.Module, parameters: Sequence[str], args: Any, kwargs: Any
    ) -> Any:
        """Return ``call(module, *args, **kwargs)``, in which the module has this rank's number of heads, and its
        key-value caches are narrowed to these heads.

        The narrowed tensors are views, so what the module writes reaches the caller's caches.

        Args:
            parameters: Names of the module's positional parameters.
        """
        positional, named = list(args), dict(kwargs)
        for name, dim in self.attention.caches:
            if name in named:
                named[name] = self._own_views(named[name], dim)
            elif name in parameters[: len(positional)]:
                index = parameters.index(name)
                positional[index] = self._own_views(positional[index], dim)
        setattr(module, self.attention.heads, self.own[1])
        try:
            return call(module, *positional, **named)
        finally:
            setattr(module, self.attention.heads, self._heads)

    def _own_views(self, value: Any, dim: int) -> Any:
        if isinstance(value, Tensor):
            return value.narrow(dim, *self.own)
        if isinstance(value, Mapping):
            return {key: self._own_views(item, dim) for key, item in value.items()}
        return value


def _exchange(parts: Sequence[Tensor], shapes: Sequence[tuple[int, int, int]], join: int, dim: MeshDim) -> Tensor:
    """Send ``parts[i]`` to rank i of ``dim``, and return the parts of all ranks, concatenated along dim ``join``.
    Collective.

    Args:
        shapes: The shape of the part that each rank sends to this rank.
    """
    sizes = [prod(shape) for shape in shapes]
    sent = torch.cat([part.flatten() for part in parts])
    received = all_to_all(sent, [part.numel() for part in parts], sizes, dim).split(sizes)
    return torch.cat([part.view(shape) for part, shape in zip(received, shapes, strict=True)], dim=join)
