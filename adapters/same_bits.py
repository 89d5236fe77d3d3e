"""``same_bits=True`` of parallelize_pipe and parallelize_vae: the bits of one process on any number of ranks.

``adapters/weights/features.py`` finds :data:`FEATURE`. The work is done in ``para_core/same_bits``; here is
what goes with which option. Tests: tests/same_bits/test_pipelines.py.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from para_core.adapters.registry import plan_for
from para_core.adapters.weights.feature import ChangeRequest, Feature, FeatureChange
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.slots import Slot
from para_core.option_values import METHOD_WITH_BITS
from para_core.plans.plan import LinearAttention
from para_core.same_bits.call import SameBitsCalls
from para_core.same_bits.device_settings import check_workspaces
from para_core.same_bits.image_rows import SameBitsModes


class SameBitsChange(FeatureChange):
    """``same_bits=True`` on the transformers of one pipeline."""

    name = "same_bits=True"

    def __init__(self, transformers: list[nn.Module], mesh: GuidedMesh) -> None:
        self._calls = [SameBitsCalls(module, mesh) for module in transformers]

    def apply(self) -> None:
        """Fill the slots of the transformers."""
        for calls in self._calls:
            calls.install()

    def undo(self) -> None:
        """Empty the slots of the transformers."""
        for calls in self._calls:
            calls.remove()

    def generation(self, pipe: Any, kwargs: dict[str, Any]) -> AbstractContextManager[dict[str, Any]]:
        """Let all ranks check again what has changed on one of them. Collective."""
        for calls in self._calls:
            calls.begin_generation()
        return nullcontext(kwargs)


def same_bits(request: ChangeRequest) -> list[SameBitsChange]:
    """Return the change by the option ``same_bits``; none without it.

    Raises:
        ValueError: Another option, the mesh or a transformer adds up in another order than one process does.
    """
    if not request.options.get("same_bits"):
        return []
    _check_sums(request)
    check_workspaces()
    return [SameBitsChange([*request.transformers.values()], request.mesh)]


def _check_sums(request: ChangeRequest) -> None:
    """Raise ``ValueError`` if an option, the mesh or a transformer adds up in another order than one process."""
    mesh, options = request.mesh, request.options
    if options.get("comm_dtype") is not None:
        raise ValueError(
            "same_bits=True with comm_dtype: what ranks send is rounded to 8 bits. Leave one out."
        )
    if options.get("pipefusion") is not None:
        raise ValueError("same_bits=True with pipefusion: it takes keys of an earlier step. Leave one out.")
    if mesh.tensor.size > 1 or options.get("weights") == "tensor":
        raise ValueError(
            "same_bits=True with weights='tensor': ranks add up parts of each product. Leave one out."
        )
    method = options.get("rotate_method")
    # "allgather" does not keep the bits, but names how keys travel, not in which order they are added up.
    # TransformerOptions.attention replaces it by METHOD_WITH_BITS, as it replaces None.
    if method not in (None, "allgather", METHOD_WITH_BITS):
        way = "Leave one out."
        if METHOD_WITH_BITS is not None:
            way = f"Use {METHOD_WITH_BITS!r}, which gathers them first, or leave one out."
        raise ValueError(
            f"same_bits=True with rotate_method={method!r}: each block of keys is added up on its own. {way}"
        )
    if mesh.sequence.ring.size > 1 and METHOD_WITH_BITS is None:
        raise ValueError(
            f"same_bits=True with a ring of {mesh.sequence.ring.size} ranks: each block of keys is added up on its "
            "own. Use the dim 'ulysses', or leave same_bits out."
        )
    if mesh.sequence.ranks == 1:
        return
    for name, module in request.transformers_by_path.items():
        plan = plan_for(module, adapter=request.adapter)
        if plan is None:
            continue
        if any(isinstance(kind, LinearAttention) for kind in plan.attention.values()):
            raise ValueError(
                f"same_bits=True with {name}, a {type(module).__name__}: its linear attention is a sum over "
                "ranks. Leave same_bits out, or use one rank."
            )


FEATURE = Feature(
    option="same_bits",
    changes=same_bits,
    image_modes=SameBitsModes,
    # Those that SameBitsCalls fills.
    transformer_slots=(Slot.SAME_BITS, Slot.SAME_BITS_PRODUCTS),
)
