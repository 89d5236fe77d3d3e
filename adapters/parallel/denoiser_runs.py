"""Make the handlers that run denoisers of the kinds that are no transformers on several ranks."""

from __future__ import annotations

from functools import partial

from torch import nn

from para_core.adapters.compatibility.checks import check_same_call_of_model
from para_core.adapters.denoisers import DenoiserKind, DenoiserRun
from para_core.distributed.mesh import GuidedMesh


def make_denoiser_run(
    kind: DenoiserKind, module: nn.Module, mesh: GuidedMesh, *, assume_equal: bool, batched: bool
) -> DenoiserRun:
    """Return the handler that will run ``module``, which was checked, over ``mesh``. Changes nothing yet.
    Collective: it may create process groups.
    """
    agree_on_inputs = partial(check_same_call_of_model, module, mesh, assume_equal=assume_equal)
    return kind.make_run(module, mesh, batched=batched, agree_on_inputs=agree_on_inputs)
