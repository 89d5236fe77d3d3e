"""Running an autoencoder of diffusers on several ranks: each holds rows of the image, or computes some of its tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.consistency.arguments import describe
from para_core.adapters.consistency.failures import Place, places_of_all, reasons_shared
from para_core.adapters.consistency.rng import random_state_of_first_rank
from para_core.adapters.models.vaes import REFUSED_VAES, VAES, VaeAdapter, rows_per_latent, vae_adapter
from para_core.adapters.rows.groups import RowRanks, on_rows
from para_core.adapters.rows.output import Gather, delivered, holds_distribution
from para_core.adapters.rows.vae_compile import traceable
from para_core.distributed.consistency import Record, check_consistent, raising_on_all, signature
from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.distributed.mesh import GuidedMesh, MeshDim, one_guided_rank, require_process_group
from para_core.instance_patching import (
    WrapperPriority,
    has_compiled_parts,
    original_class,
    restored_on_failure,
    uncompiled,
    unwrap,
    wrap_method,
)
from para_core.spatial.fetch import gather as gather_rows
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.one_group import dim_groups, one_group
from para_core.spatial.tag import Rows, rows_of
from para_core.spatial.tiles import Tiles
from para_core.torch_internals import DisableTorchFunction

logger = logging.getLogger(__name__)

Vae = TypeVar("Vae", bound=nn.Module)
Method = Literal["exact", "tiled"]
Way = Literal["encode", "decode"]

_KEY = "parallel_vae"
# Beyond so many, what ranks wait for each other is more than what they save.
_MANY = 8
# Of an input larger than this, some of its values stand for all where ranks compare them.
_MOST_COMPARED = 1 << 24  # bytes
_NO_TILES_IN_GRAPHS = (
    "ranks tell each other the shapes of tiles, which is no part of a graph. Call the VAE uncompiled; or compile it with "
    "method='exact', and vae.disable_tiling()."
)


def parallelize_vae(
    vae: Vae,
    *,
    mesh: DeviceMesh | ProcessGroup | GuidedMesh | None = None,
    method: Method = "exact",
    gather: Gather = "all",
) -> Vae:
    """Encode and decode each image with this one autoencoder on all ranks of ``mesh``, which all call it alike.

    Calling this again with other settings takes effect; :func:`unparallelize_vae` undoes it. If it is refused or fails on a rank, the VAE
    stays as it was on every rank. Nothing is computed for a gradient.
    ``vae.decode = torch.compile(vae.decode, fullgraph=True)`` is one graph for each size, in which nothing is compared over ranks.

    Args:
        vae: an autoencoder of diffusers (docs/vae.md lists them).
        mesh: all its ranks take part, along whatever dims. Left out: all ranks; one where there is no process group.
        method: ``"exact"``: every rank computes on rows of the image (columns where it is wider than high), and gets from others
            what convolutions, norms and attention need: the numbers of one device, up to floating-point order. What the VAE would
            tile by itself (``enable_tiling``) is tiled. ``"tiled"``: diffusers' own tiling, its tiles distributed: bit by bit what
            diffusers' tiling gives on one device, seams included.
        gather: ``"all"`` ranks get the result, or only the ``"first"`` one of the mesh: the others get zeros of its shape.

    Returns:
        ``vae``.

    Raises:
        TypeError: an unknown class.
        ValueError: an unknown ``method`` or ``gather``, or a class that has no tiling.
        RuntimeError: one of the methods that are changed was replaced on the instance (compiled, say) before.
    """
    if method not in ("exact", "tiled") or gather not in ("all", "first"):
        raise ValueError(
            f"method={method!r}, gather={gather!r}; expected method='exact' or 'tiled', and gather='all' or 'first'."
        )
    module = uncompiled(vae)
    require_parallel_vae(module, method)
    resolved = _mesh(mesh, module)
    ranks = one_group(resolved)
    if ranks.size == 1:
        unparallelize_vae(vae)
        return vae
    if ranks.size > _MANY and ranks.index == 0:
        logger.warning(
            "parallelize_vae: %d ranks; beyond %d an image of 720 rows is not decoded faster, for ranks wait for each other at every "
            "layer. Pass a smaller mesh, and gather='first' if only one rank needs the image.",
            ranks.size,
            _MANY,
        )
    row_ranks = RowRanks(ranks, dim_groups(resolved))
    with (
        restored_on_failure([module, *_parts(module)]),
        raising_on_all(row_ranks.mesh, f"this {original_class(module).__name__} cannot run on these ranks"),
    ):
        unparallelize_vae(vae)
        _wrap(module, row_ranks, method, gather)
    return vae


def require_parallel_vae(module: nn.Module, method: Method = "exact") -> VaeAdapter:
    """Return what is known of ``module``.

    Raises:
        TypeError: An unknown class.
        ValueError: A class that has no tiling, for ``method="tiled"``.
        RuntimeError: A method that would be wrapped was replaced on the instance.
    """
    adapter = vae_adapter(module)
    if adapter is None:
        name = original_class(module).__name__
        reason = REFUSED_VAES.get(name, "nothing is known of it")
        raise TypeError(f"{name} does not run on several ranks: {reason}. Supported are {', '.join(VAES)}.")
    if method == "tiled" and not (adapter.tiled and adapter.shares_tiles):
        reason = adapter.why_not_tiles or "diffusers has no tiling for it"
        raise ValueError(f"the tiles of {adapter.vae} cannot be distributed: {reason}. Use method='exact'.")
    replaced = next((name for name in (adapter.encode, adapter.decode) if name in vars(module)), None)
    if replaced is not None:
        raise RuntimeError(
            f"{adapter.vae}.{replaced} is set on this instance, and would be called instead of what runs on several ranks. Compile "
            "it after parallelize_vae, or delete the attribute."
        )
    return adapter


def _wrap(module: nn.Module, ranks: RowRanks, method: Method, gather: Gather) -> None:
    adapter = require_parallel_vae(module, method)
    run = _Run(module, adapter, ranks, method, gather)
    wrap_method(module, adapter.encode, _KEY, run.encode, order=WrapperPriority.PARALLEL)
    wrap_method(module, adapter.decode, _KEY, run.decode, order=WrapperPriority.PARALLEL)
    for name in adapter.tiled:
        if hasattr(module, name):
            wrap_method(module, name, _KEY, run.tiles, order=WrapperPriority.PARALLEL)
    if adapter.tiled and adapter.shares_tiles:
        for part in _parts(module):
            wrap_method(part, "__call__", _KEY, run.tile, order=WrapperPriority.PARALLEL)
        if hasattr(module, "clear_cache"):
            wrap_method(module, "clear_cache", _KEY, run.clear, order=WrapperPriority.PARALLEL)


def unparallelize_vae(vae: Vae) -> Vae:
    """Undo :func:`parallelize_vae`; returns ``vae``, which is then what it was before."""
    module = uncompiled(vae)
    for part in (module, *_parts(module)):
        unwrap(part, _KEY)
    return vae


def _parts(vae: nn.Module) -> list[nn.Module]:
    parts = [getattr(vae, name, None) for name in ("encoder", "decoder")]
    return [part for part in parts if isinstance(part, nn.Module)]


def _mesh(
    mesh: DeviceMesh | ProcessGroup | GuidedMesh | None, vae: nn.Module
) -> DeviceMesh | ProcessGroup | GuidedMesh:
    if mesh is not None:
        return mesh
    device_type = next(vae.parameters()).device.type
    if not (dist.is_available() and dist.is_initialized()):
        return one_guided_rank(device_type)
    require_process_group("parallelize_vae")
    return init_context_parallel_mesh(device_type)


class _Run:
    """One autoencoder on the ranks that share its rows."""

    def __init__(self, vae: nn.Module, adapter: VaeAdapter, ranks: RowRanks, method: Method, gather: Gather) -> None:
        self.adapter, self.ranks, self.method, self.gather = adapter, ranks.ranks, method, gather
        self.row_ranks = ranks
        self.mesh = self.row_ranks.mesh
        # What compiled functions call instead.
        methods: dict[Way, str] = {"encode": adapter.encode, "decode": adapter.decode}
        self.graphs = {
            way: traceable(vae, partial(self.traced, vae, getattr(original_class(vae), name), way))
            for way, name in methods.items()
        }
        self.places: list[Place] = []  # of all ranks, once they have met
        # What runs now: on rows, and on tiles.
        self.mode: SpatialShardMode | None = None
        self.sharing: Tiles | None = None

    def encode(self, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(vae, call, args, kwargs, "encode")

    def decode(self, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(vae, call, args, kwargs, "decode")

    def run(self, vae: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], way: Way) -> Any:
        if self.mode is not None or self.sharing is not None:  # one of these methods inside of another
            return call(vae, *args, **kwargs)
        if not args:
            first = next(name for name in ("x", "z", "sample", "latents") if name in kwargs)
            args, kwargs = (kwargs[first],), {name: value for name, value in kwargs.items() if name != first}
        if torch.compiler.is_compiling():
            if self.method == "tiled" or self.adapter.only_tiled:
                raise RuntimeError(_NO_TILES_IN_GRAPHS)
            return self.graphs[way](*args, **kwargs)
        self.check(vae, args[0])
        self.places = self.places or places_of_all(self.mesh)
        with torch.no_grad(), random_state_of_first_rank(self.mesh) as token, reasons_shared(token, self.places):
            return self.computed(vae, call, way, *args, **kwargs)

    def computed(self, vae: Any, call: Callable[..., Any], way: Way, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """``call`` on this rank's rows, of which every rank holds whole rows of latents, and at least two; or in tiles."""
        if self.method == "tiled" or self.adapter.only_tiled:
            compute = partial(self.in_tiles, vae, partial(call, vae, x, *args, **kwargs))
            return delivered(compute, self.ranks.size, self.ranks, self.mesh, self.gather)
        # A waveform [B, C, length], or [C, length], has no height.
        dim = -1 if x.ndim <= 3 or x.shape[-1] > x.shape[-2] else -2
        unit = rows_per_latent(vae) if way == "encode" else 1
        rows, workers = self.row_ranks.share(x, dim, unit, least=2)
        if workers.size < self.ranks.size and torch.compiler.is_compiling():
            raise RuntimeError(
                f"an image of {x.shape[dim]} rows along dim {dim} is work for {workers.size} of {self.ranks.size} ranks, and what they "
                "tell the others is no part of a graph. Call it uncompiled, or parallelize_vae with a smaller mesh."
            )
        compute = partial(self.in_rows, partial(call, vae), x, args, kwargs, rows, workers)
        return delivered(compute, workers.size, self.ranks, self.mesh, self.gather)

    def traced(self, vae: Any, call: Callable[..., Any], way: Way, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        """What a compiled function traces: nothing is compared over ranks, and no records are exchanged."""
        try:
            with torch.no_grad():
                found = self.computed(vae, call, way, x, *args, **kwargs)
            if holds_distribution(found):
                raise RuntimeError(
                    "its encode() makes the distribution itself, which this call cannot return from a graph."
                )
            return found
        except Exception as error:
            # Dynamo says only that this cannot be captured, and names the reason at the end of a chain.
            logger.error("%s cannot be compiled on these ranks: %s", self.adapter.vae, error)
            raise

    def in_rows(
        self,
        call: Callable[..., Any],
        x: Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rows: Rows,
        workers: MeshDim,
    ) -> Any:
        """What ``call`` gives on this worker's rows."""
        if workers.size == 1:
            return call(x, *args, **kwargs)
        self.mode = SpatialShardMode(workers)
        try:
            return on_rows(self.mode, call, (x, *args), kwargs, {0: (rows.dim, rows.layout)})
        finally:
            self.mode = None

    def in_tiles(self, vae: Any, call: Callable[[], Any]) -> Any:
        """``call`` under diffusers' own tiling."""
        before, vae.use_tiling = vae.use_tiling, True
        try:
            return call()
        finally:
            vae.use_tiling = before

    def tiles(self, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A method that tiles: it gets all rows, and gives all. Its tiles are distributed."""
        by_itself = self.mode is None and self.method == "exact" and not self.adapter.only_tiled
        if self.sharing is not None or by_itself or not vae.use_tiling:
            return call(vae, *args, **kwargs)
        if torch.compiler.is_compiling():
            raise RuntimeError(_NO_TILES_IN_GRAPHS)
        mode, self.mode = self.mode, None
        ranks = self.ranks if mode is None else mode.ranks
        try:
            with DisableTorchFunction():
                whole = [gather_rows(x, rows, ranks) if (rows := rows_of(x)) else x for x in args]
            if not self.adapter.shares_tiles:
                return call(vae, *whole, **kwargs)
            self.sharing = Tiles(ranks, replace(one_guided_rank("cpu"), batch=ranks))
            with self.sharing:
                return self.sharing.finished(call(vae, *whole, **kwargs))
        finally:
            self.mode, self.sharing = mode, None

    def tile(self, call: Callable[..., Any], part: Any, /, *args: Any, **kwargs: Any) -> Any:
        """One call of the encoder or the decoder, which is of one tile if tiles are distributed."""
        if self.sharing is None:
            return call(part, *args, **kwargs)
        return self.sharing.call(partial(call, part), args, kwargs)

    def clear(self, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Where a cache of frames is emptied, a tile begins."""
        if self.sharing is not None:
            self.sharing.begin_tile()
        return call(vae, *args, **kwargs)

    def check(self, vae: Any, x: Tensor) -> None:
        """Raise on every rank unless all can run, and have the same image."""
        problem: Exception | None = None
        if x.requires_grad and torch.is_grad_enabled():
            problem = RuntimeError(
                "a gradient of the image was asked for, and none is computed over ranks. Call it under torch.no_grad(), or "
                "unparallelize_vae(vae)."
            )
        elif has_compiled_parts(vae):
            problem = RuntimeError(
                f"a part of this {self.adapter.vae} was compiled, and a graph of a part does not see the sizes of all ranks. Compile "
                "the method around it (vae.decode = torch.compile(vae.decode)), or unparallelize_vae(vae)."
            )
        some = x if x.nbytes <= _MOST_COMPARED else x.flatten()[:: -(-x.nbytes // _MOST_COMPARED)]
        tiling = {name: value for name, value in vars(vae).items() if name.startswith(("tile_", "use_"))}
        given = {"sample": f"{list(x.shape)} {describe(some)}", "tiling": repr(sorted(tiling.items()))}
        check_consistent(problem or signature(given), self.mesh, explain=self.explain)

    def explain(self, records: list[Record]) -> str:
        elsewhere = next((rank for rank, record in enumerate(records) if "sample" not in record), None)
        if elsewhere is not None:
            return (
                f"rank {elsewhere} does not call this {self.adapter.vae}, and other ranks do: in a callback, say, on one rank alone. "
                "All ranks call it, and any of them may use what it gives."
            )
        differs = sorted({name for record in records for name in record if record[name] != records[0].get(name)})
        rank = next(rank for rank, record in enumerate(records) if record != records[0])
        return (
            f"the ranks call this {self.adapter.vae} with different {' and '.join(differs)}: rank 0 has "
            f"{records[0].get(differs[0])}, rank {rank} has {records[rank].get(differs[0])}. Every rank gives it the same image, "
            "and has the same settings; draw random numbers from a generator of the same seed on all ranks."
        )
