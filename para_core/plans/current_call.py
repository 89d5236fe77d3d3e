"""Access to the current call of a model with a plan, for code that runs inside the call: caches, pipeline
stages, PipeFusion, same_bits, comparisons and ``verify=``.

The state itself belongs to :mod:`.region`, which empties it at the end of a call. Tests:
tests/weights/test_pipefusion.py, tests/weights/test_stages.py; tests/cache/test_state.py for skipped
attention.
"""

from __future__ import annotations

from torch import nn

from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.layout.sequence import Segment
from para_core.modes.unified import UnifiedAttnMode
from para_core.plans.interception import Interception
from para_core.plans.region import Region, region_of
from para_core.torch_internals import function_mode_stack


def ranks_sharing_samples(module: nn.Module) -> MeshDim | None:
    """Return the mesh dim over which the samples of the current call of ``module`` are split; None if none is."""
    region = region_of(module)
    if region is None or not region.sharing_samples:
        return None
    return region.sharing_samples[-1]


def segments_under_way(module: nn.Module) -> tuple[SequenceMesh, tuple[Segment, ...]] | None:
    """Return the mesh and the segments of the current call of ``module``; None outside of one, or on one rank.

    There are no segments yet before the plan has split the first tensor of the call.
    """
    region = region_of(module)
    if region is None or region.mesh.ranks == 1 or region.interception is None:
        return None
    return region.mesh, region.segments


def interception_of(module: nn.Module) -> Interception | None:
    """Return the :class:`Interception` of the current call of ``module``; None outside of a call, or without a plan."""
    region = region_of(module)
    if region is None:
        return None
    return region.interception


def allow_skipped_attention(module: nn.Module) -> None:
    """Allow the current call of ``module`` to end without an intercepted attention call, which else raises.

    A cache that skips all blocks calls no attention, and PipeFusion computes the attention of patches itself.
    """
    allow_skipped_attention_of(region_of(module))


def allow_skipped_attention_of(region: Region | None) -> None:
    """Do what :func:`allow_skipped_attention` does, for a model with this ``region``; None without a plan.

    Modes that a user has entered around the model are told, too, because they raise if no attention was
    called. They cannot know which model skips, so all of them are told.
    """
    if region is not None and region.interceptions:
        planned = region.interceptions[-1].planned
        planned.intercepted[0] = True
        planned.skipped[0] = True
    for mode in function_mode_stack():
        if isinstance(mode, UnifiedAttnMode):
            mode.intercepted = True
