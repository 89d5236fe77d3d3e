"""Context in which rules of compatibility are tested: one transformer or UNet that is about to run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from para_core.adapters.models.unets import unet_adapter
from para_core.adapters.registry import cached, supported, transformers_of, unets_of
from para_core.adapters.spec import Adapter
from para_core.cache.options import CacheOptions
from para_core.distributed.mesh import GuidedMesh, SequenceMesh
from para_core.instance_patching import original_class


class When(Enum):
    """Call before which rules are tested."""

    PARALLELIZE = auto()
    PARALLEL_CALL = auto()
    CACHE = auto()
    CACHED_CALL = auto()
    SHARD = auto()


@dataclass(frozen=True)
class CompatibilityContext:
    """One transformer or UNet that is about to run, and how.

    Args:
        owner: The pipeline of ``module``, or ``module`` itself.
        module: The transformer or UNet; None if the pipeline has none.
        component: Name of ``module`` in the pipeline; empty without a pipeline.
        adapter: Adapter that the user gave.
        mesh: Mesh of the call; None if it is not known yet, or has one rank.
        applied: Ranks over which the tokens or rows of ``module`` were sharded when it was parallelized.
        options: Options of the cache on ``module``.
        unshards: Whether weights that are sharded now are gathered before ``module`` runs.
    """

    owner: Any
    module: Any
    component: str = ""
    adapter: Adapter | None = None
    mesh: GuidedMesh | None = None
    applied: SequenceMesh | None = None
    options: CacheOptions | None = None
    unshards: bool = False

    @property
    def ranks(self) -> int:
        return 1 if self.mesh is None else self.mesh.ranks

    @property
    def sequence_ranks(self) -> int:
        """Ranks over which tokens are sharded."""
        return 1 if self.mesh is None else self.mesh.sequence.ranks

    @property
    def fields(self) -> dict[str, Any]:
        """Fields that every message may use."""
        return {
            "owner": original_class(self.owner).__name__,
            "cls": original_class(self.module).__name__,
            "name": f"pipe.{self.component}" if self.component else "unet" if is_unet(self) else "transformer",
            "adapter": self.adapter,
            "sequence_ranks": self.sequence_ranks,
            "supported": supported(),
            "cached": cached(),
        }


def cases_of(
    pipe: Any, adapter: Adapter | None = None, mesh: GuidedMesh | None = None, *, unshards: bool = False
) -> list[CompatibilityContext]:
    """Return a context for each transformer, or UNet, of ``pipe``. Without any, return one whose module is None."""
    modules = transformers_of(pipe) or unets_of(pipe)
    return [
        CompatibilityContext(pipe, module, name, adapter, mesh, unshards=unshards) for name, module in modules.items()
    ] or [CompatibilityContext(pipe, None)]


def is_unet(case: CompatibilityContext) -> bool:
    return case.module is not None and unet_adapter(case.module) is not None
