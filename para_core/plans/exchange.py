"""Exchanges between ranks around the modules of a plan: tokens for heads, sums over tokens, halo rows, cached
keys.

- Each rank runs a self-attention module on all tokens and some of the heads: :class:`HeadExchange`.
- Linear attention sums over the tokens of all ranks instead of this rank's tokens only:
  :class:`SumsOverRanks`.
- A module such as a convolution needs halo rows of neighbouring ranks: :func:`add_halo`.
- A call whose tokens are sharded appends only this rank's tokens to a key-value cache. The tokens of all
  ranks are gathered after the call, because a single new token in a later call, which no plan shards, must
  attend to all tokens on every rank: :class:`CachesOfCall`. The ``DynamicCache`` of transformers is
  recognised by its attributes (``get_seq_length``, ``layers``, ``keys``, ``values``, ``cumulative_length``),
  without importing transformers.

:mod:`.submodule_calls` uses the first three, :mod:`.region` the last. Tests: tests/plans/test_exactness.py,
and ``test_a_decoder_fills_its_cache_on_every_rank`` in tests/adapters/propose/test_structures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from para_core.distributed.collectives import all_gather, all_to_all
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.layout.halo import fetch_halo
from para_core.layout.sequence import Run, Segment
from para_core.layout.tokens import gather_parts
from para_core.modes.interceptor import SDPA, SDPA_OPERATOR, call_original
from para_core.plans.plan import AttentionByHeads, Halo, LinearAttention
from para_core.torch_internals import no_frame_of_its_own, pytree

# Name of the segment of keys that earlier calls cached, which precede the keys of the current call. Region
# notes it with length 0; planned_layouts infers its length from the number of keys.
PAST = "past of a key-value cache"


class HeadExchange:
    """The exchange of tokens for heads in one call of a module, from ``[B, S_local, H * D]`` to
    ``[B, S, H_local * D]``, and back: first over the ``ulysses`` mesh dim, then over ``ring``.

    Args:
        attention: The rule of the module.
        segment: The segment of the tokens, sharded in consecutive parts, or replicated: each rank then takes
            its heads from its own copy of the tokens.
        mesh: The ranks.
        module: The module.
        heads: The number of heads of all ranks, which the attribute of the module may not say now.

    Raises:
        ValueError: There are fewer heads than ranks.
    """

    def __init__(
        self, attention: AttentionByHeads, segment: Segment, mesh: SequenceMesh, module: nn.Module, heads: int
    ) -> None:
        if heads < mesh.ranks:
            raise ValueError(
                f"an attention module has {heads} heads, and {mesh.ranks} ranks share the tokens of a sequence; its "
                "plan gives each of them whole heads, at least one. Use fewer ranks for the sequence, and others "
                "along the mesh dim 'batch'."
            )
        self._attention = attention
        self._module = module
        self._heads = heads
        self._replicated = segment.replicated
        sizes = segment.sizes(mesh.ranks)
        width = mesh.ulysses.size
        blocks = [sizes[first : first + width] for first in range(0, mesh.ranks, width)]
        # Each step of the exchange is (mesh dim, tokens of each rank along this dim, heads of each rank along
        # this dim).
        of_ulysses = [Segment("heads", heads).runs(index, width)[0] for index in range(width)]
        first, count = of_ulysses[mesh.ulysses.index]
        of_ring = [Segment("heads", count).runs(index, mesh.ring.size)[0] for index in range(mesh.ring.size)]
        self._steps = [
            (mesh.ulysses, list(blocks[mesh.ring.index]), [number for _, number in of_ulysses]),
            (mesh.ring, [sum(block) for block in blocks], [number for _, number in of_ring]),
        ]
        start, number = of_ring[mesh.ring.index]
        # The first head of this rank, and the number of its heads.
        self._heads_on_rank: Run = (first + start, number)
        # For each projection that was called: entries per head in each tensor, and the parts that the plan
        # says.
        self._widths: list[tuple[int, int | None]] = []

    def enter(self, x: Tensor, parts: int | None) -> Tensor:
        """Exchange the output of a projection, ``[B, S_local, H * D]``, for ``[B, S, H_local * D]``.
        Collective, unless the tokens are replicated.

        Args:
            parts: As for one projection of :class:`~para_core.plans.plan.AttentionByHeads`.

        Raises:
            ValueError: The width of the output does not show which of its entries are those of a head.
        """
        count = parts or 1
        width, rest = divmod(x.shape[2], count * self._heads)
        if rest:
            raise ValueError(
                f"a projection of an attention module of {self._heads} heads has an output of {x.shape[2]} entries, "
                f"which are not {count} part(s) of equal heads: parts= in the AttentionByHeads of the plan does not "
                "fit, or there are fewer heads of keys than of queries, which is not supported."
            )
        self._widths.append((width, parts))
        self._check_head_widths()
        if count > 1:
            # Put the parts of each head next to each other, because the exchange moves consecutive entries.
            x = torch.unflatten(x, 2, (count, self._heads, width)).transpose(2, 3).flatten(2)
        if self._replicated:
            first, number = self._heads_on_rank
            x = x.narrow(2, first * count * width, number * count * width).contiguous()
        else:
            for dim, tokens, heads in self._steps:
                if dim.size > 1:
                    received_width = heads[dim.index] * count * width
                    shapes = [(x.shape[0], number, received_width) for number in tokens]
                    parts_of_ranks = x.split([number * count * width for number in heads], dim=2)
                    x = _swap_parts(parts_of_ranks, shapes, 1, dim)
        if count > 1:
            x = torch.unflatten(x, 2, (self._heads_on_rank[1], count, width)).transpose(2, 3).flatten(2)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Exchange an attention output, ``[B, S, H_local * D]``, for ``[B, S_local, H * D]``. Collective.

        Raises:
            RuntimeError: The module did not call each of its projections once, for example because they are
                fused.
            ValueError: As :meth:`enter`.
        """
        if len(self._widths) != len(self._attention.projections):
            raise RuntimeError(
                f"an attention module called {len(self._widths)} of its projections "
                f"{', '.join(self._attention.projections)}; its plan expects all of them. Undo fused projections: "
                "unfuse_qkv_projections()."
            )
        width = x.shape[2] // self._heads_on_rank[1]
        self._check_head_widths(width)
        for dim, tokens, heads in reversed(self._steps):
            if dim.size > 1 and self._replicated:
                x = all_gather(x, [number * width for number in heads], 2, dim)
            elif dim.size > 1:
                shapes = [(x.shape[0], tokens[dim.index], number * width) for number in heads]
                x = _swap_parts(x.split(tokens, dim=1), shapes, 2, dim)
        return x

    def _check_head_widths(self, output_width: int | None = None) -> None:
        """Raise ``ValueError`` if projections, or the output, differ in their number of entries per head."""
        widths = [width for width, parts in self._widths if parts != 1]
        if output_width is not None:
            widths.append(output_width)
        if len({*widths}) > 1:
            raise ValueError(
                f"an attention module of {self._heads} heads has {widths} entries for each of them in the outputs of "
                f"its projections {', '.join(self._attention.projections)} and in the input of "
                f"{self._attention.output}; expected one number, so which entries belong to a head is not known. Say "
                "it in the AttentionByHeads of the plan: parts=3 for a fused qkv in the order (3, heads, D), or "
                "parts=1 if all entries of a head are consecutive. Fewer heads of keys than of queries are not "
                "supported."
            )

    def run(self, call: Callable[..., Any], parameters: Sequence[str], args: Any, kwargs: Any) -> Any:
        """Return ``call(module, *args, **kwargs)``, in which the module has this rank's number of heads, and
        its key-value caches are narrowed to these heads: as views, so that what the module writes reaches the
        caller. ``parameters`` are the names of the module's positional parameters. Collective, because the
        call runs the projections, around which :meth:`enter` and :meth:`leave` run.
        """

        def narrow_heads(cache: Any, dim: int) -> Any:
            return pytree.tree_map_only(Tensor, lambda x: x.narrow(dim, *self._heads_on_rank), cache)

        positional = list(args)
        named = dict(kwargs)
        for name, dim in self._attention.caches:
            if name in named:
                named[name] = narrow_heads(named[name], dim)
            elif name in parameters[: len(positional)]:
                index = parameters.index(name)
                positional[index] = narrow_heads(positional[index], dim)
        setattr(self._module, self._attention.heads, self._heads_on_rank[1])
        try:
            return call(self._module, *positional, **named)
        finally:
            setattr(self._module, self._attention.heads, self._heads)


def _swap_parts(
    parts: Sequence[Tensor], shapes: Sequence[tuple[int, int, int]], joined_dim: int, dim: MeshDim
) -> Tensor:
    """Send ``parts[i]`` to rank i of ``dim``, and return the received parts, of ``shapes``, concatenated
    along tensor dim ``joined_dim``. Collective.
    """
    sizes = [prod(shape) for shape in shapes]
    sent = torch.cat([part.flatten() for part in parts])
    received = all_to_all(sent, [part.numel() for part in parts], sizes, dim).split(sizes)
    return torch.cat([part.view(shape) for part, shape in zip(received, shapes, strict=True)], dim=joined_dim)


def add_halo(x: Tensor, halo: Halo, segment: Segment, mesh: SequenceMesh) -> Tensor:
    """Return ``x``, this rank's rows of ``segment``, between ``halo.size`` rows of the previous and of the
    next rank.

    The first and the last rank of the sequence get rows on one side only. Collective.

    Raises:
        ValueError: A rank has fewer than ``halo.size`` rows. All ranks raise, because all know the number of
            rows.
    """
    if segment.total // mesh.ranks < halo.size:
        raise ValueError(
            f"{segment.total} rows on {mesh.ranks} ranks are fewer for some than the {halo.size} that their neighbours "
            "need. Use fewer ranks."
        )
    return fetch_halo(x, halo.dim, halo.size, segment.sizes(mesh.ranks), mesh)


def drop_halo(y: Tensor, halo: Halo, rows: int, mesh: SequenceMesh) -> Tensor:
    """Return this rank's ``rows`` rows of ``y``, without the halo rows added by :func:`add_halo`."""
    # The first rank has no halo rows before its own.
    start = 0
    if mesh.rank > 0:
        start = halo.size
    return y.narrow(halo.dim, start, rows)


class SumsOverRanks(TorchFunctionMode):
    """Mode for one call of a linear attention module, in which the sums over tokens that the plan names are
    added up over all ranks. A call of ``scaled_dot_product_attention``, which would miss the tokens of other
    ranks, raises ``RuntimeError``. The calls are told apart by the names of torch functions and by their
    order, so all ranks must make the same calls.
    """

    def __init__(self, attention: LinearAttention, mesh: SequenceMesh) -> None:
        super().__init__()
        self.attention = attention
        self.mesh = mesh
        self.names = {name for name, _ in attention.sums}
        self.called: list[str] = []

    @no_frame_of_its_own
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is SDPA or func is SDPA_OPERATOR:
            raise RuntimeError(
                f"scaled_dot_product_attention was called where the plan says {self.attention}. {_WAY_OUT}"
            )
        out = call_original(func, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name not in self.names:
            return out
        index = self.called.count(name)
        self.called.append(name)
        if (name, index) not in self.attention.sums:
            return out
        return sum_over_ranks(out, self.mesh)

    def check_summed(self) -> None:
        """Raise ``RuntimeError`` if the module did not make all the calls whose outputs the plan sums over ranks."""
        missing = [(name, index) for name, index in self.attention.sums if self.called.count(name) <= index]
        if missing:
            raise RuntimeError(f"the plan says {self.attention}, and {missing} were not called. {_WAY_OUT}")


_WAY_OUT = (
    "This module's attention processor is not the one that the plan was made for, so each rank would attend to its "
    "own tokens only: set that one again, or describe this one in Plan.attention."
)


def sum_over_ranks(x: Tensor, mesh: SequenceMesh) -> Tensor:
    """Return the sum of ``x`` over all sequence ranks, with the same bits on every rank. Collective."""
    for dim in mesh.dims:
        x = all_gather(x[None], [1] * dim.size, 0, dim).sum(dim=0)
    return x


class CachesOfCall:
    """A snapshot of the key-value caches among a call's arguments, taken before the call. ``hold_tokens``
    says whether any of them already holds tokens. Layers are known by their ids, so the caller must keep the
    arguments until :meth:`gather`.
    """

    def __init__(self, arguments: Iterable[Any]) -> None:
        # The keys and values of each layer before the call, [B, H, S, D]; None in a layer without tokens.
        self._layers: dict[int, tuple[Any, Any]] = {}
        self.hold_tokens = False
        for cache in _caches_in(arguments):
            for layer in cache.layers:
                keys = getattr(layer, "keys", None)
                self._layers[id(layer)] = keys, getattr(layer, "values", None)
                self.hold_tokens = self.hold_tokens or (isinstance(keys, Tensor) and keys.numel() > 0)

    def gather(
        self, arguments: Iterable[Any], output: Any, segments: Sequence[Segment], mesh: SequenceMesh
    ) -> None:
        """Complete the caches among ``arguments`` and in ``output`` in place: replace the tokens that this
        rank appended during the call by those of all ranks, if one of ``segments`` is sharded. Collective.

        Raises:
            ValueError: A cache did not grow by this rank's tokens (a static cache does not), or the call
                shards more than one segment.
        """
        caches = _caches_in([*arguments, output])
        if not caches:
            return
        sharded = [segment for segment in segments if not segment.replicated]
        if not sharded:
            return
        if len(sharded) > 1:
            names = [segment.name for segment in sharded]
            raise ValueError(
                f"{type(caches[0]).__name__} was filled in a call that shards several sequences {names}, and which of "
                "them it holds is not known. Call the model without a cache (use_cache=False)."
            )
        for cache in caches:
            for layer in cache.layers:
                before = self._layers.get(id(layer), (None, None))
                # A static layer is written in place, so that its keys say nothing of this call.
                if _is_static(layer) or getattr(layer, "keys", None) is not before[0]:
                    _gather_layer(cache, layer, before, sharded[0], mesh)


def _caches_in(values: Iterable[Any]) -> list[Any]:
    """Return the key-value caches in ``values``, also in lists, tuples and dicts in them, each once."""
    caches: dict[int, Any] = {}
    # A stack instead of recursion saves Python calls in each call of a model.
    remaining = list(values)[::-1]
    while remaining:
        value = remaining.pop()
        if value is None or isinstance(value, (Tensor, str, int, float)):
            continue
        if isinstance(value, Mapping):
            remaining.extend(reversed(list(value.values())))
        elif isinstance(value, (list, tuple)):
            remaining.extend(reversed(value))
        elif hasattr(value, "get_seq_length") and isinstance(getattr(value, "layers", None), list):
            caches[id(value)] = value
    return list(caches.values())


def _gather_layer(
    cache: Any, layer: Any, before: tuple[Any, Any], segment: Segment, mesh: SequenceMesh
) -> None:
    """Replace the tokens that this rank appended to ``layer``, whose keys and values were ``before``, by
    those of all ranks. Raise ``ValueError`` if it did not grow by this rank's tokens. Collective.
    """
    past = 0
    if isinstance(before[0], Tensor) and before[0].numel() > 0:
        past = before[0].shape[-2]
    window = _window_of(layer)
    sizes = segment.sizes(mesh.ranks)
    lengths = [past + size for size in sizes]
    if window is not None:
        lengths = [min(length, window) for length in lengths]
    keys = layer.keys
    if _is_static(layer) or not isinstance(keys, Tensor) or keys.shape[-2] != lengths[mesh.rank]:
        raise ValueError(
            f"a plan cannot complete a {type(cache).__name__} with a {type(layer).__name__}: expected a cache that "
            f"grows by the {sizes[mesh.rank]} tokens of this rank. Use a DynamicCache, or call the model without a "
            "cache (use_cache=False)."
        )
    # Gather only the last tokens, which this call added. The earlier tokens are already complete and equal on
    # all ranks.
    added = [min(size, length) for size, length in zip(sizes, lengths, strict=True)]
    for name, old in zip(("keys", "values"), before, strict=True):
        part = getattr(layer, name)
        last = part[..., part.shape[-2] - added[mesh.rank] :, :]
        tokens = gather_parts(last, part.ndim - 2, added, mesh)
        if past:
            tokens = torch.cat([old, tokens], dim=-2)
        if window is not None:
            tokens = tokens[..., -window:, :]
        setattr(layer, name, tokens)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length += segment.total - sizes[mesh.rank]


def _is_static(layer: Any) -> bool:
    """Whether ``layer`` has room for a fixed number of tokens, to which it writes in place."""
    return hasattr(layer, "max_cache_len")


def _window_of(layer: Any) -> int | None:
    """Return the maximum number of tokens in a sliding-window layer; None if the layer keeps all tokens."""
    window = getattr(layer, "sliding_window", None)
    if window is None or getattr(layer, "record_past", False):
        return None
    # The sliding layer of transformers keeps the last window - 1 tokens for the next call.
    return int(window) - 1
