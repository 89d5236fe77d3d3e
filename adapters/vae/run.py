"""Run the calls of one autoencoder on several ranks: each rank computes rows of the image, or some of its tiles.

``vae.py`` makes a :class:`VaeRun`. A call of the user goes through :meth:`VaeRun.run_public_method`, ``run``,
where the ranks compare it, and ``run_distributed``. Which methods these are is in ``families.py``; how a
function computes rows is in ``para_core/spatial/mode.py``. Tests: tests/spatial/test_vaes.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from para_core.adapters.agree.failures import Places, places_of_all, share_reasons
from para_core.adapters.agree.rng import share_random_state
from para_core.adapters.vae.call import (
    GatherTo,
    RowRanks,
    dim_of_rows,
    holds_distribution,
    run_on_rows,
    run_on_workers,
)
from para_core.adapters.vae.call_check import check_equal_calls
from para_core.adapters.vae.families import (
    INPUT_NAMES,
    FamilyRows,
    VaeMethod,
    parts_of,
    require_parallel_vae,
    rows_per_latent,
)
from para_core.adapters.vae.vae_compile import make_traceable
from para_core.adapters.weights.feature import ImageModes
from para_core.distributed.agree import raise_on_all_ranks
from para_core.distributed.mesh import MeshDim, one_guided_rank
from para_core.instance.private_class import original_class
from para_core.instance.record import fill_slot
from para_core.instance.slots import Slot
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.row_tag import RowTag
from para_core.spatial.tiles import Tiles

logger = logging.getLogger(__name__)

Way = Literal["encode", "decode"]

# The methods by which users and pipelines call an autoencoder.
_PUBLIC_METHODS = ("encode", "decode", "forward")
_NO_TILES_IN_GRAPHS = (
    "ranks exchange the shapes of tiles, which a graph cannot do. Call the VAE uncompiled; or compile it with "
    "method='exact', and vae.disable_tiling()."
)


def _call_with_tiling(vae: Any, call: Callable[[], Any]) -> Any:
    """Return the output of ``call``, in which ``vae`` tiles."""
    before, vae.use_tiling = vae.use_tiling, True
    try:
        return call()
    finally:
        vae.use_tiling = before


class _Stage(Enum):
    """The progress of a call of a public method, by which an error of this rank is told to the others or not."""

    # The other ranks meet this one in the comparison of run(), of the first or the next slice of images: told there.
    APART = auto()
    # run() has compared a call, which runs on all ranks.
    TOGETHER = auto()
    # run() has failed after that, where no rank waits for an error of another: not told.
    FAILED = auto()


class VaeRun:
    """The handler of the calls of one autoencoder on several ranks. Raises as :func:`require_parallel_vae`.

    Args:
        make_mode: Returns the mode under which a call computes this rank's rows, given the ranks that compute
            rows.
    """

    def __init__(
        self, vae: nn.Module, row_ranks: RowRanks, method: VaeMethod, gather: GatherTo, make_mode: ImageModes
    ) -> None:
        self.adapter = require_parallel_vae(vae, method)
        self.row_ranks, self.ranks, self.mesh = row_ranks, row_ranks.ranks, row_ranks.mesh
        self.method, self.gather, self.make_mode = method, gather, make_mode
        # Inside a function that the user compiles, these functions run in place of the wrapped encode and
        # decode.
        ways: dict[Way, str | None] = {"encode": self.adapter.encode, "decode": self.adapter.decode}
        self.ways = {way: name for way, name in ways.items() if name is not None}
        self.graphs = {
            way: make_traceable(
                vae,
                partial(self.run_traced, vae, getattr(original_class(vae), name), way),
                forgets_frames=self.adapter.forgets_frames,
            )
            for way, name in self.ways.items()
        }
        self.family_rows: FamilyRows | None = None
        if self.adapter.rows is not None:
            self.family_rows = self.adapter.rows(self.ranks)
        # Process and host of each rank, for error messages. The ranks exchange them in the first call.
        self.places: Places = {}
        # Sharding mode of the current call, None outside of a call that runs on rows.
        self.mode: SpatialShardMode | None = None
        # Distributes the tiles of the current call, None outside of a tiled call.
        self.distributed_tiles: Tiles | None = None
        self.stage = _Stage.APART

    def attach(self, vae: Any) -> None:
        """Wrap the methods of ``vae`` that take and return images, and those that split them into tiles."""
        public = [name for name in _PUBLIC_METHODS if hasattr(vae, name)]
        handlers: dict[str, Callable[..., Any]] = dict.fromkeys(public, self.run_public_method)
        handlers.update({name: partial(self.run, way) for way, name in self.ways.items()})
        handlers.update({name: self.run_tiled_method for name in self.adapter.tiled if hasattr(vae, name)})
        if self.adapter.tiled and self.adapter.distributes_tiles:
            for part in parts_of(vae):
                fill_slot(part, Slot.PARALLEL_VAE, {"__call__": self.run_tile})
            if self.adapter.begins_tile:
                handlers[self.adapter.begins_tile] = self.begin_tile
        fill_slot(vae, Slot.PARALLEL_VAE, handlers, owner=self)
        if self.family_rows is not None:
            self.family_rows.attach(vae)

    def run_public_method(self, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run ``call``, a public method. If it fails on this rank before :meth:`run` or between two slices of
        the images, the other ranks wait for this one in :meth:`run`: raise the error on all ranks. If it
        fails after the last slice, they take part by their next call.
        """
        if torch.compiler.is_compiling() or self.stage is _Stage.TOGETHER:
            return call(vae, *args, **kwargs)
        self.stage = _Stage.APART
        try:
            return call(vae, *args, **kwargs)
        except Exception as error:
            if self.stage is _Stage.FAILED:
                raise
            name = self.adapter.vae
            raise_on_all_ranks(error, self.mesh, f"this call of the {name} failed", call=f"the {name}")

    def run(self, way: Way, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of ``encode`` or ``decode`` (``way``) on all ranks, without gradients.
        Raise as :func:`check_equal_calls` does.
        """
        # The caller is another wrapped method, which already shards.
        if self.mode is not None or self.distributed_tiles is not None:
            return call(vae, *args, **kwargs)
        if not args:
            first = next((name for name in INPUT_NAMES if name in kwargs), "")
            args, kwargs = (
                (kwargs.get(first),),
                {name: value for name, value in kwargs.items() if name != first},
            )
        if torch.compiler.is_compiling():
            if self.method == "tiled" or self.adapter.only_tiled:
                raise RuntimeError(_NO_TILES_IN_GRAPHS)
            return self.graphs[way](*args, **kwargs)
        check_equal_calls(self.adapter.vae, vae, args[0], [*args[1:], *kwargs.items()], self.mesh)
        self.places = self.places or places_of_all(self.mesh)
        self.stage = _Stage.TOGETHER
        try:
            with torch.no_grad(), share_random_state(self.mesh) as token, share_reasons(token, self.places):
                output = self.run_distributed(vae, call, way, *args, **kwargs)
        except BaseException:
            self.stage = _Stage.FAILED
            raise
        self.stage = _Stage.APART
        return output

    def run_distributed(
        self, vae: Any, call: Callable[..., Any], way: Way, x: Tensor, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``call`` with its rows or tiles distributed over the ranks, and return the gathered output."""
        compute = partial(call, vae, x, *args, **kwargs)
        if self.family_rows is not None:
            with self.family_rows.sharded(x):
                return run_on_workers(compute, self.ranks.size, self.row_ranks, self.gather)
        if self.method == "tiled" or self.adapter.only_tiled:
            in_tiles = partial(_call_with_tiling, vae, compute)
            return run_on_workers(in_tiles, self.ranks.size, self.row_ranks, self.gather)
        rows, workers = self._rows_and_workers(vae, way, x)
        if workers.size > 1:
            compute = partial(self._call_on_rows, workers, rows, partial(call, vae), x, *args, **kwargs)
        return run_on_workers(compute, workers.size, self.row_ranks, self.gather)

    def _rows_and_workers(self, vae: Any, way: Way, x: Tensor) -> tuple[RowTag, MeshDim]:
        """Return the rows of each rank, and the ranks that get rows: at least two rows of latents or their pixels.

        Raises:
            RuntimeError: While compiling, some rank would get none.
        """
        dim = dim_of_rows(x)
        unit = 1
        if way == "encode":
            unit = rows_per_latent(vae)
        rows, workers = self.row_ranks.shard(x, dim, unit, min_units=2)
        if workers.size < self.ranks.size and torch.compiler.is_compiling():
            raise RuntimeError(
                f"an image of {x.shape[dim]} rows along dim {dim} occupies {workers.size} of {self.ranks.size} ranks, "
                "and a graph cannot hold the exchange with the others. Call it uncompiled, or parallelize_vae with a "
                "smaller mesh."
            )
        return rows, workers

    def _call_on_rows(
        self,
        workers: MeshDim,
        rows: RowTag,
        call: Callable[..., Any],
        x: Tensor,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the output of ``call`` for this rank's ``rows`` of ``x``, under the mode of ``workers``."""
        self.mode = self.make_mode(workers)
        try:
            return run_on_rows(self.mode, call, (x, *args), kwargs, {0: (rows.dim, rows.sizes)})
        finally:
            self.mode = None

    def run_traced(
        self, vae: Any, call: Callable[..., Any], way: Way, x: Tensor, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the output of a call inside a compiled function, where ranks compare no inputs, without
        gradients.
        """
        try:
            with torch.no_grad():
                output = self.run_distributed(vae, call, way, x, *args, **kwargs)
            if holds_distribution(output):
                raise RuntimeError("its encode() returns a distribution object, which a graph cannot return.")
            return output
        except Exception as error:
            # Log the reason, which Dynamo's message shows last in a chain of causes.
            logger.error("%s cannot be compiled on these ranks: %s", self.adapter.vae, error)
            raise

    def run_tiled_method(self, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the output of ``call``, a method of ``vae`` that splits an image into tiles, which the ranks
        share.

        The method takes and returns all rows, so sharded positional arguments are gathered first. It runs
        unchanged if ``vae.use_tiling`` is False. A direct call by the user also runs unchanged, unless
        :attr:`method` is ``"tiled"`` or the VAE runs only in tiles. If the adapter does not distribute tiles,
        every rank computes all of them. Raise ``RuntimeError`` while compiling.
        """
        called_by_user = self.mode is None and self.method == "exact" and not self.adapter.only_tiled
        if self.distributed_tiles is not None or called_by_user or not vae.use_tiling:
            return call(vae, *args, **kwargs)
        if torch.compiler.is_compiling():
            raise RuntimeError(_NO_TILES_IN_GRAPHS)
        mode, self.mode = self.mode, None
        ranks = self.ranks
        try:
            if mode is not None:
                ranks = mode.ranks
                args = tuple([mode.gather(x) for x in args])
            if not self.adapter.distributes_tiles:
                return call(vae, *args, **kwargs)
            self.distributed_tiles = Tiles(ranks, replace(one_guided_rank("cpu"), batch=ranks))
            with self.distributed_tiles as tiles:
                return tiles.materialize(call(vae, *args, **kwargs))
        finally:
            self.mode, self.distributed_tiles = mode, None

    def run_tile(self, call: Callable[..., Any], part: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the encoder or decoder. In a tiled call it computes one tile, on one of the ranks."""
        if self.distributed_tiles is None:
            return call(part, *args, **kwargs)
        return self.distributed_tiles.call(partial(call, part), args, kwargs)

    def begin_tile(self, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the output of ``call``, the method that the VAE calls at the beginning of each tile."""
        if self.distributed_tiles is not None:
            self.distributed_tiles.begin_tile()
        return call(vae, *args, **kwargs)
