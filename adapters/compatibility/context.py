"""One transformer, or UNet, that is about to be run: what refusals are asked of."""

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
    """Before what a refusal is asked for."""

    PARALLELIZE = auto()
    PARALLEL_CALL = auto()
    CACHE = auto()
    CACHED_CALL = auto()
    SHARD = auto()


@dataclass(frozen=True)
class CompatibilityContext:
    """One transformer, or UNet, that is about to be run, and what is known of how.

    Args:
        owner: its pipe, or the transformer itself.
        module: it; None: the pipe has none.
        component: its name in the pipe; empty without a pipe.
        adapter: what its user says of it.
        mesh: the ranks; None: not known yet, or one.
        applied: the ranks that share its tokens, or rows, by what was applied to it.
        options: of its cache.
        unshards: whether its weights, which are sharded now, are whole before it is run.
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
        """Those that share tokens."""
        return 1 if self.mesh is None else self.mesh.sequence.ranks

    @property
    def words(self) -> dict[str, Any]:
        """What a sentence may say of any case."""
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
    """One for each transformer, or UNet, of ``pipe``; where it has none, one without."""
    modules = transformers_of(pipe) or unets_of(pipe)
    cases = [
        CompatibilityContext(pipe, module, name, adapter, mesh, unshards=unshards) for name, module in modules.items()
    ]
    return cases or [CompatibilityContext(pipe, None)]


def is_unet(case: CompatibilityContext) -> bool:
    return case.module is not None and unet_adapter(case.module) is not None
