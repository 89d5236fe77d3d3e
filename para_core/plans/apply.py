"""Apply a plan to a model in place, and remove it.

What a call then does is in :mod:`para_core.plans.region`. Pipelines come here from
``adapters/parallel/transformer.py``, and users by :mod:`.context_parallel`. Tests: tests/plans/test_plan.py,
tests/plans/test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn

from para_core.attention.attention_options import AttnOptions
from para_core.attention.local import AttnFunc
from para_core.distributed.agreed_inputs import AgreeOnInputs
from para_core.distributed.mesh import MeshDim, SequenceMesh
from para_core.instance.modules import submodules_of
from para_core.instance.record import empty_slots, fill_slot, restore_on_failure
from para_core.instance.slots import Slot
from para_core.option_values import Backend
from para_core.plans.plan import Plan
from para_core.plans.published_plan import convert_published_plan
from para_core.plans.region import Region, region_of
from para_core.torch_internals import CALL_WITH_HOOKS


def apply_plan(
    module: nn.Module,
    plan: Plan | Mapping[str, Any],
    mesh: SequenceMesh,
    *,
    batch: MeshDim | None = None,
    agree_on_inputs: AgreeOnInputs | None = None,
    options: AttnOptions | None = None,
    attn_func: AttnFunc | None = None,
    cross_backend: Backend | None = None,
    on_one_rank: bool = False,
    call_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    written_for: type | None = None,
) -> None:
    """Change ``module`` in place so that its calls run over ``mesh``, with sharded inputs, attention over all
    ranks and gathered outputs. A plan that was applied before is replaced; it stays if this call raises.

    On a mesh of one rank nothing is applied, unless ``options.backend``, ``attn_func``, ``cross_backend`` or
    ``on_one_rank`` is given, or ``batch`` splits samples. Inside
    :func:`~para_core.distributed.agreed_inputs.assume_agreed`, neither ``agree_on_inputs`` nor
    ``call_context`` is called.

    Args:
        plan: A :class:`Plan`, or a ``_cp_plan`` of diffusers.
        batch: The mesh dim over which the samples of a batch are split, if ``plan.batched`` is set.
        agree_on_inputs: Called with the arguments of each eager call; raises if they differ between ranks.
        attn_func: Computes local attention instead of SDPA.
        options, cross_backend: As in :meth:`Region.use`.
        on_one_rank: Whether to apply the plan on one rank too, because :meth:`Region.use` may set other
            options later.
        call_context: Returns a context manager in which each eager call runs, entered after
            ``agree_on_inputs``.
        written_for: The class of ``module``, or a base class of it, whose code the plan describes. Other code
            inside ``module`` then gets a :class:`ForeignCodeWarning`. None if the plan was written for this
            very module.

    Raises:
        ValueError: The plan names a module that does not exist. Not on one rank, if nothing is applied there;
            an earlier plan is removed then, too.
    """
    earlier = region_of(module)
    with ExitStack() as earlier_stays:
        if earlier is not None:
            earlier_stays.enter_context(restore_on_failure(submodules_of(module)))
            _detach(module, earlier)
        if not isinstance(plan, Plan):
            plan = convert_published_plan(plan)
        options = options or AttnOptions()
        region = Region(
            module,
            plan=plan,
            mesh=mesh,
            batch=batch,
            agree_on_inputs=agree_on_inputs,
            options=options,
            attn_func=attn_func,
            cross_backend=cross_backend,
            call_context=call_context,
            written_for=written_for,
        )
        is_default_attention = options.backend is None and cross_backend is None and attn_func is None
        if mesh.ranks == 1 and is_default_attention and not on_one_rank and region.batch is None:
            return
        try:
            region.attach(module)
            region.check_new_code(module)
            of_module = {CALL_WITH_HOOKS: region.run, "__call__": region.call_outer}
            fill_slot(module, Slot.PLAN, of_module, owner=region)
        except BaseException:
            # Without the slot of the module, remove_plan() would not find these hooks.
            _detach(module, region)
            raise


def remove_plan(module: nn.Module) -> None:
    """Undo :func:`apply_plan`. Does nothing if no plan is applied."""
    region = region_of(module)
    if region is not None:
        _detach(module, region)


def _detach(module: nn.Module, region: Region) -> None:
    """Empty the slots that ``region`` and its check have filled in ``module``, let the check forget its
    modules, and restore the attributes that the region has set.
    """
    # A graph may have left this rank's number of heads in the attribute: see Region.heads.
    for submodule, (attribute, heads) in region.heads.items():
        setattr(submodule, attribute, heads)
    region.check.release()
    # After a rollback slots of the check may be filled that it has forgotten.
    empty_slots([*submodules_of(module), *region.submodules.values()], Slot.PLAN, Slot.ATTENTION_CHECK)
