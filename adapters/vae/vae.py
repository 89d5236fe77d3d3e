"""Run autoencoders of diffusers on several ranks: each rank computes rows of the image, or some of its tiles.

The two public functions: they check and choose ranks. ``run.py`` (``VaeRun``) runs the calls, ``families.py``
says what each class of autoencoders needs. ``adapters/vae/pipeline.py`` calls both for
``parallelize_pipe(vae=True)``. Tests: tests/spatial/test_vaes.py.
"""

from __future__ import annotations

import logging
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from para_core.adapters.agree.options import agree_on_options
from para_core.adapters.registry import check_pipeline_or_model
from para_core.adapters.vae.call import GatherTo, RowRanks
from para_core.adapters.vae.families import VaeMethod, parts_of, require_parallel_vae
from para_core.adapters.vae.run import VaeRun
from para_core.adapters.weights.feature import ImageModes
from para_core.adapters.weights.features import require_image_modes
from para_core.distributed.agree import together
from para_core.distributed.create_mesh import init_context_parallel_mesh
from para_core.distributed.mesh import GuidedMesh, one_guided_rank
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slots, is_filled, restore_on_failure
from para_core.instance.slots import Slot
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.row_group import dim_groups, one_group

logger = logging.getLogger(__name__)

Vae = TypeVar("Vae", bound=nn.Module)

# With more ranks than this, parallelize_vae warns if rows are computed: the ranks wait for each other at
# every layer, which then takes longer than the computation that they save. Tiles wait for each other only at
# the end.
_MOST_USEFUL_RANKS = 8


def parallelize_vae(
    vae: Vae,
    *,
    mesh: DeviceMesh | ProcessGroup | GuidedMesh | None = None,
    method: VaeMethod = "exact",
    gather: GatherTo = "all",
    same_bits: bool = False,
) -> Vae:
    """Run one autoencoder on all ranks of a mesh. Each rank passes the same inputs to ``encode`` or
    ``decode``.

    Calling it again replaces the previous settings; :func:`unparallelize_vae` undoes it, as does a mesh of
    one rank. If anything is invalid or fails on any rank, every rank raises, and the VAE stays as it was. No
    gradients are computed. ``vae.decode = torch.compile(vae.decode, fullgraph=True)`` gives one graph per
    size of the image; in a graph nothing is compared between ranks.

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
            lowest rank of the mesh; the others then get zeros of its shape. In tiles, which all ranks
            exchange, all get it in any case.
        same_bits (`bool`, defaults to `False`): Whether the result has the bytes of one process with
            ``method="exact"`` (the tiles of ``"tiled"`` have them in any case), on this machine, with this
            torch and one thread per process. It costs time: for each GroupNorm a rank sends its rows twice
            (``2 · n · (ranks − 1) / ranks`` bytes of the ``n`` bytes of its input) to get whole groups of
            channels; resampling, transposed convolutions and sums over rows run on gathered rows, in full on
            each rank; and the first call with each size takes the memory of one process in each function, as
            it compares each new kind of function on this rank's rows and at their place in zeros of one
            process's sizes. Functions that differ, such as small convolutions, are computed at that place. A
            call that is compiled raises, as do functions without a rule.

    Returns:
        ``vae`` itself.

    Raises:
        TypeError: If the class is not supported, or ``same_bits`` is no bool.
        ValueError: If ``method`` or ``gather`` is unknown, ``method`` is ``"tiled"`` and the tiles of the
            class cannot be distributed, or the first rank alone runs the autoencoder. If ``same_bits`` is
            True, and the class computes rows in its own way.
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
        if not isinstance(same_bits, bool):
            raise TypeError(f"same_bits is {same_bits!r}; expected True or False.")
        check_pipeline_or_model("model", vae, "parallelize_pipe(pipe, vae=True) takes a pipeline.")
        require_parallel_vae(module, method, same_bits=same_bits)
        make_mode: ImageModes = SpatialShardMode
        if same_bits:
            make_mode = require_image_modes("same_bits")
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
    if method == "exact" and ranks.size > _MOST_USEFUL_RANKS and ranks.index == 0:
        logger.warning(
            "parallelize_vae: %d ranks; beyond %d an image of 720 rows is not decoded faster, because ranks wait for "
            "each other at every layer. Pass a smaller mesh, and gather='first' if only one rank needs the image.",
            ranks.size,
            _MOST_USEFUL_RANKS,
        )
    row_ranks = RowRanks(ranks, dim_groups(mesh))
    with (
        restore_on_failure([module, *parts_of(module)]),
        together(row_ranks.mesh, f"this {original_class(module).__name__} cannot run on these ranks"),
    ):
        if is_filled(module, Slot.FIRST_RANK):
            raise ValueError(
                "the first rank alone runs it, by vae_placement='first' of a parallel pipeline. Place it by 'offload', "
                "which goes with several ranks, or call unparallelize_pipe(...) of that pipeline first."
            )
        # VaeRun reads the methods of the VAE and refuses ones that were replaced, so they are restored
        # before. If it refuses on any rank, the previous settings come back on all.
        unparallelize_vae(vae)
        VaeRun(module, row_ranks, method, gather, make_mode).attach(module)
    return vae


def unparallelize_vae(vae: Vae) -> Vae:
    """Undo :func:`parallelize_vae`, and return ``vae`` as it was before. Does nothing if it is not parallel.

    Args:
        vae (`nn.Module`): The autoencoder, compiled or not.

    Returns:
        ``vae`` itself.

    Raises:
        TypeError: If ``vae`` is not a model.
    """
    check_pipeline_or_model("model", vae, "unparallelize_pipe takes a pipeline.")
    module = uncompiled(vae)
    empty_slots([module, *parts_of(module)], Slot.PARALLEL_VAE)
    return vae
