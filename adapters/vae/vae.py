"""Run autoencoders of diffusers on several ranks: each rank computes rows of the image, or some of its tiles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.agree.arguments import describe_value
from para_core.adapters.agree.failures import Places, places_of_all, share_reasons
from para_core.adapters.agree.options import agree_on_options
from para_core.adapters.agree.rng import share_random_state
from para_core.adapters.model_checks import check_not_fsdp1, check_not_wrapped
from para_core.adapters.registry import require_kind
from para_core.adapters.vae.call import Gather, RowRanks, deliver, holds_distribution, on_rows
from para_core.adapters.vae.families import (
    REFUSED_VAES,
    VAES,
    FamilyRows,
    VaeAdapter,
    parts_of,
    rows_per_latent,
    vae_adapter,
)
from para_core.adapters.vae.vae_compile import traceable
from para_core.adapters.weights.feature import ImageModes
from para_core.adapters.weights.features import require_image_modes
from para_core.distributed.agree import agree, together
from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.distributed.mesh import GuidedMesh, MeshDim, one_guided_rank
from para_core.distributed.records import Record, describe_differences
from para_core.instance.modules import has_compiled_parts, uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slots, fill_slot, is_filled, restored_on_failure
from para_core.instance.slots import Slot
from para_core.spatial.fetch import gather as gather_rows
from para_core.spatial.mode import SpatialShardMode, dim_groups, one_group
from para_core.spatial.row_tag import rows_of
from para_core.spatial.tiles import Tiles
from para_core.torch_internals import DisableTorchFunction

logger = logging.getLogger(__name__)

Vae = TypeVar("Vae", bound=nn.Module)
Method = Literal["exact", "tiled"]
Way = Literal["encode", "decode"]

# With more ranks than this, parallelize_vae warns: the ranks wait for each other at every layer, which then
# takes longer than the computation that they save.
_MOST_USEFUL_RANKS = 8
# Ranks compare their inputs up to this number of bytes. Of a larger input they compare evenly spaced values.
_MAX_COMPARED_BYTES = 1 << 24
_NO_TILES_IN_GRAPHS = (
    "ranks exchange the shapes of tiles, which a graph cannot do. Call the VAE uncompiled; or compile it with "
    "method='exact', and vae.disable_tiling()."
)


def parallelize_vae(
    vae: Vae,
    *,
    mesh: DeviceMesh | ProcessGroup | GuidedMesh | None = None,
    method: Method = "exact",
    gather: Gather = "all",
    same_bits: bool = False,
) -> Vae:
    """Run one autoencoder on all ranks of a mesh. Each rank passes the same inputs to ``encode`` or
    ``decode``.

    Calling it again replaces the previous settings; :func:`unparallelize_vae` undoes it. If anything is
    invalid or fails on any rank, every rank raises, and the VAE stays as it was. No gradients are computed.
    ``vae.decode = torch.compile(vae.decode, fullgraph=True)`` gives one graph per size of the image; in a
    graph nothing is compared between ranks.

    Args:
        vae (`nn.Module`): An autoencoder of diffusers (docs/vae.md lists them).
        mesh (`DeviceMesh` or `ProcessGroup`, *optional*): Ranks to use, along all dims. Defaults to all
            ranks, and to one rank without a process group.
        method (`"exact"` or `"tiled"`, defaults to `"exact"`): With ``"exact"`` each rank computes rows of
            the image (columns, if it is wider than high) and fetches from others what convolutions, norms and
            attention need. The result equals that of one device up to floating-point order; images that the
            VAE tiles (``enable_tiling``) are tiled. With ``"tiled"`` the tiles of diffusers' tiling are
            distributed. The result is bitwise that of diffusers' tiling on one device, including its seams.
        gather (`"all"` or `"first"`, defaults to `"all"`): Whether all ranks get the result, or only the
            first rank of the mesh; the others then get zeros of its shape.
        same_bits (`bool`, defaults to `False`): Whether the result has the bytes of one process with
            ``method="exact"``, on this machine, with this torch and one thread per process. It costs time: for
            each GroupNorm a rank sends its rows twice (``2 · n · (ranks − 1) / ranks`` bytes of the ``n`` bytes
            of its input) to get whole groups of channels; resampling, transposed convolutions and sums over
            rows run on gathered rows, in full on each rank; and the first call with each size takes the memory
            of one process in each function, as it compares each new kind of function on this rank's rows and at
            their place in zeros of one process's sizes. Functions that differ, such as small convolutions, are
            computed at that place. A call that is compiled raises, as do functions without a rule.

    Returns:
        ``vae`` itself.

    Raises:
        TypeError: If the class is not supported.
        ValueError: If ``method`` or ``gather`` is unknown, ``method`` is ``"tiled"`` and the tiles of the
            class cannot be distributed, or the first rank alone runs the autoencoder. If ``same_bits`` is True,
            and the class computes rows in its own way.
        RuntimeError: If a method that must be wrapped was replaced on the instance, for example compiled
            before.
    """
    module = uncompiled(vae)
    with agree_on_options(
        "parallelize_vae", mesh, {"method": method, "gather": gather, "same_bits": same_bits}
    ):
        if method not in ("exact", "tiled") or gather not in ("all", "first"):
            raise ValueError(
                f"method={method!r}, gather={gather!r}; expected method='exact' or 'tiled', and gather='all' or "
                "'first'."
            )
        require_kind("model", vae, "parallelize_pipe(pipe, vae=True) takes a pipeline.")
        require_parallel_vae(module, method, same_bits=same_bits)
        modes: ImageModes = SpatialShardMode
        if same_bits:
            modes = require_image_modes("same_bits")
    if mesh is None:
        device_type = next(module.parameters()).device.type
        if dist.is_available() and dist.is_initialized():
            mesh = init_context_parallel_mesh(device_type)
        else:
            mesh = one_guided_rank(device_type)
    ranks = one_group(mesh)
    if ranks.size == 1:
        unparallelize_vae(vae)
        return vae
    if ranks.size > _MOST_USEFUL_RANKS and ranks.index == 0:
        logger.warning(
            "parallelize_vae: %d ranks; beyond %d an image of 720 rows is not decoded faster, because ranks wait for "
            "each other at every layer. Pass a smaller mesh, and gather='first' if only one rank needs the image.",
            ranks.size,
            _MOST_USEFUL_RANKS,
        )
    row_ranks = RowRanks(ranks, dim_groups(mesh))
    with (
        restored_on_failure([module, *parts_of(module)]),
        together(row_ranks.mesh, f"this {original_class(module).__name__} cannot run on these ranks"),
    ):
        if is_filled(module, Slot.FIRST_RANK):
            raise ValueError(
                "the first rank alone runs it, by vae_placement='first' of a parallel pipeline. Place it by 'offload', "
                "which goes with several ranks, or call unparallelize_pipe(...) of that pipeline first."
            )
        unparallelize_vae(vae)
        _VaeRun(module, row_ranks, method, gather, modes).attach(module)
    return vae


def require_parallel_vae(
    module: nn.Module, method: Method = "exact", *, same_bits: bool = False
) -> VaeAdapter:
    """Return the adapter of the autoencoder ``module``. Raises the errors of :func:`parallelize_vae`."""
    adapter = vae_adapter(module)
    if adapter is None:
        check_not_fsdp1(module, "vae")
        check_not_wrapped(module, "vae")
        name = original_class(module).__name__
        reason = REFUSED_VAES.get(name, "para_core has no adapter for it")
        raise TypeError(f"{name} does not run on several ranks: {reason}. Supported are {', '.join(VAES)}.")
    if method == "tiled" and not (adapter.tiled and adapter.distributes_tiles):
        reason = adapter.why_not_tiles or "diffusers has no tiling for it"
        raise ValueError(f"the tiles of {adapter.vae} cannot be distributed: {reason}. Use method='exact'.")
    if same_bits and adapter.rows is not None:
        raise ValueError(
            f"same_bits=True: {adapter.vae} computes its rows in its own way, which adds up in another order than one "
            "process does. Leave same_bits out."
        )
    replaced = next((name for name in adapter.methods if name in vars(module)), None)
    if replaced is not None:
        raise RuntimeError(
            f"{adapter.vae}.{replaced} is set on this instance, and would be called instead of the method that runs on "
            "several ranks. Compile it after parallelize_vae, or delete the attribute."
        )
    return adapter


def unparallelize_vae(vae: Vae) -> Vae:
    """Undo :func:`parallelize_vae` and return ``vae`` as it was before."""
    require_kind("model", vae, "unparallelize_pipe takes a pipeline.")
    module = uncompiled(vae)
    empty_slots([module, *parts_of(module)], Slot.PARALLEL_VAE)
    return vae


def _gather_if_sharded(x: Any, ranks: MeshDim) -> Any:
    """Return all rows of ``x`` if it is a tensor of which this rank holds some; ``x`` itself otherwise.
    Collective.
    """
    rows = rows_of(x)
    if rows is None:
        return x
    return gather_rows(x, rows, ranks)


class _VaeRun:
    """Handler that runs the calls of one autoencoder on several ranks.
    Raises as :func:`require_parallel_vae`.
    """

    def __init__(
        self, vae: nn.Module, row_ranks: RowRanks, method: Method, gather: Gather, modes: ImageModes
    ) -> None:
        self.adapter = require_parallel_vae(vae, method)
        self.row_ranks, self.ranks, self.mesh = row_ranks, row_ranks.ranks, row_ranks.mesh
        self.method, self.gather, self.modes = method, gather, modes
        # Inside a function that the user compiles, these functions run in place of the wrapped encode and
        # decode.
        ways: dict[Way, str | None] = {"encode": self.adapter.encode, "decode": self.adapter.decode}
        self.ways = {way: name for way, name in ways.items() if name is not None}
        self.graphs = {
            way: traceable(
                vae,
                partial(self.traced, vae, getattr(original_class(vae), name), way),
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

    def attach(self, vae: Any) -> None:
        """Wrap the methods of ``vae`` that take and return images, and those that split them into tiles."""
        handlers: dict[str, Callable[..., Any]] = {
            name: partial(self.run, way) for way, name in self.ways.items()
        }
        handlers.update({name: self.tiles for name in self.adapter.tiled if hasattr(vae, name)})
        if self.adapter.tiled and self.adapter.distributes_tiles:
            for part in parts_of(vae):
                fill_slot(part, Slot.PARALLEL_VAE, {"__call__": self.tile})
            if self.adapter.begins_tile:
                handlers[self.adapter.begins_tile] = self.begin_tile
        fill_slot(vae, Slot.PARALLEL_VAE, handlers, owner=self)
        if self.family_rows is not None:
            self.family_rows.attach(vae)

    def run(self, way: Way, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        # The caller is another wrapped method, which already shards.
        if self.mode is not None or self.distributed_tiles is not None:
            return call(vae, *args, **kwargs)
        if not args:
            first = next((name for name in ("x", "z", "sample", "latents") if name in kwargs), "")
            args, kwargs = (
                (kwargs.get(first),),
                {name: value for name, value in kwargs.items() if name != first},
            )
        if torch.compiler.is_compiling():
            if self.method == "tiled" or self.adapter.only_tiled:
                raise RuntimeError(_NO_TILES_IN_GRAPHS)
            return self.graphs[way](*args, **kwargs)
        self.check(vae, args[0], [*args[1:], *kwargs.values()])
        self.places = self.places or places_of_all(self.mesh)
        with torch.no_grad(), share_random_state(self.mesh) as token, share_reasons(token, self.places):
            return self.computed(vae, call, way, *args, **kwargs)

    def computed(
        self, vae: Any, call: Callable[..., Any], way: Way, x: Tensor, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``call`` with its rows or tiles distributed over the ranks, and return the gathered output.

        Each rank that computes rows gets at least two rows of latents or their pixels, so small images use
        fewer ranks.
        """
        if self.family_rows is not None:
            with self.family_rows.sharded(x):
                compute = partial(call, vae, x, *args, **kwargs)
                return deliver(compute, self.ranks.size, self.ranks, self.mesh, self.gather)
        if self.method == "tiled" or self.adapter.only_tiled:

            def in_tiles() -> Any:
                before, vae.use_tiling = vae.use_tiling, True
                try:
                    return call(vae, x, *args, **kwargs)
                finally:
                    vae.use_tiling = before

            return deliver(in_tiles, self.ranks.size, self.ranks, self.mesh, self.gather)
        # A waveform [B, C, length] or [C, length] has no height, so its samples are sharded.
        dim = -1 if x.ndim <= 3 or x.shape[-1] > x.shape[-2] else -2
        unit = rows_per_latent(vae) if way == "encode" else 1
        rows, workers = self.row_ranks.shard(x, dim, unit, min_units=2)
        if workers.size < self.ranks.size and torch.compiler.is_compiling():
            raise RuntimeError(
                f"an image of {x.shape[dim]} rows along dim {dim} occupies {workers.size} of {self.ranks.size} ranks, "
                "and a graph cannot hold the exchange with the others. Call it uncompiled, or parallelize_vae with a "
                "smaller mesh."
            )

        def in_rows() -> Any:
            if workers.size == 1:
                return call(vae, x, *args, **kwargs)
            self.mode = self.modes(workers)
            try:
                return on_rows(self.mode, partial(call, vae), (x, *args), kwargs, {0: (rows.dim, rows.sizes)})
            finally:
                self.mode = None

        return deliver(in_rows, workers.size, self.ranks, self.mesh, self.gather)

    def traced(
        self, vae: Any, call: Callable[..., Any], way: Way, x: Tensor, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the output of a call inside a compiled function, where ranks compare no inputs."""
        try:
            with torch.no_grad():
                output = self.computed(vae, call, way, x, *args, **kwargs)
            if holds_distribution(output):
                raise RuntimeError("its encode() returns a distribution object, which a graph cannot return.")
            return output
        except Exception as error:
            # Log the reason, which Dynamo's message shows last in a chain of causes.
            logger.error("%s cannot be compiled on these ranks: %s", self.adapter.vae, error)
            raise

    def tiles(self, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
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
        if mode is not None:
            ranks = mode.ranks
        try:
            with DisableTorchFunction():
                args = tuple([_gather_if_sharded(x, ranks) for x in args])
            if not self.adapter.distributes_tiles:
                return call(vae, *args, **kwargs)
            self.distributed_tiles = Tiles(ranks, replace(one_guided_rank("cpu"), batch=ranks))
            with self.distributed_tiles as tiles:
                return tiles.materialize(call(vae, *args, **kwargs))
        finally:
            self.mode, self.distributed_tiles = mode, None

    def tile(self, call: Callable[..., Any], part: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run one call of the encoder or decoder.
        In a tiled call it computes one tile, on one of the ranks.
        """
        if self.distributed_tiles is None:
            return call(part, *args, **kwargs)
        return self.distributed_tiles.call(partial(call, part), args, kwargs)

    def begin_tile(self, call: Callable[..., Any], vae: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Return the output of ``call``, the method that the VAE calls at the beginning of each tile."""
        if self.distributed_tiles is not None:
            self.distributed_tiles.begin_tile()
        return call(vae, *args, **kwargs)

    def check(self, vae: Any, x: Any, others: Sequence[Any]) -> None:
        """Raise on every rank if a rank cannot run this call, or if inputs or settings differ between ranks."""
        if not isinstance(x, Tensor):
            # This raises on every rank.
            refused = TypeError(
                f"this {self.adapter.vae} was called with a {type(x).__name__}; expected a tensor."
            )
            agree(refused, self.mesh)
        problem: Exception | None = None
        if x.requires_grad and torch.is_grad_enabled():
            problem = RuntimeError(
                "the image requires a gradient, and none is computed over ranks. Call the VAE under torch.no_grad(), "
                "or unparallelize_vae(vae)."
            )
        elif has_compiled_parts(vae):
            problem = RuntimeError(
                f"a part of this {self.adapter.vae} was compiled, and a graph of a part does not see the sizes of all "
                "ranks. Compile the method around it (vae.decode = torch.compile(vae.decode)), or "
                "unparallelize_vae(vae)."
            )
        values = x
        if x.nbytes > _MAX_COMPARED_BYTES:
            values = x.flatten()[:: -(-x.nbytes // _MAX_COMPARED_BYTES)]
        tiling = {name: value for name, value in vars(vae).items() if name.startswith(("tile_", "use_"))}
        record = {
            "sample": f"{list(x.shape)} {describe_value(values)}",
            "tiling": repr(sorted(tiling.items())),
        }
        generators: list[torch.Generator] = []
        for value in others:
            items = value if isinstance(value, (list, tuple)) else [value]
            generators += [item for item in items if isinstance(item, torch.Generator)]
        if generators:
            record["generators"] = describe_value(generators)
        agree(problem or record, self.mesh, explain=self.explain, call=f"the {self.adapter.vae}")

    def explain(self, records: list[Record]) -> str:
        elsewhere = next((rank for rank, record in enumerate(records) if "sample" not in record), None)
        if elsewhere is not None:
            return (
                f"rank {elsewhere} does not call this {self.adapter.vae}, and other ranks do, perhaps in a callback "
                "that runs on one rank. All ranks must call it, and any of them may use the result."
            )
        return (
            f"the ranks must call this {self.adapter.vae} with equal images and settings. "
            f"{'; '.join(describe_differences(records))}. Draw random numbers from a generator with the same seed on "
            "all ranks."
        )
