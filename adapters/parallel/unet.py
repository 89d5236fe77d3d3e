"""Run one UNet or ControlNet of a denoising loop of your own on several ranks.

Pipelines do not call this: ``resolve.py`` makes the same handlers by ``denoiser_runs.py``. How the rows are
computed is in ``adapters/vae/unet.py``, which also has ``unparallelize_unet``. Tests:
tests/spatial/test_unet_pipelines.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from para_core.adapters.agree.options import agree_on_options
from para_core.adapters.compatibility.checks import CheckedModel, check_parallelize
from para_core.adapters.default_mesh import Mesh, guided_mesh_for
from para_core.adapters.parallel.denoiser_runs import make_denoiser_run
from para_core.adapters.registry import check_pipeline_or_model
from para_core.adapters.vae.unet import KIND
from para_core.distributed.agree import together
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import restore_on_failure

Unet = TypeVar("Unet", bound=nn.Module)


def parallelize_unet(
    unet: Unet, *, mesh: Mesh | GuidedMesh | None = None, assume_equal: bool = False, batched: bool = True
) -> Unet:
    """Run one UNet or ControlNet on all ranks of a mesh: each rank passes the same inputs and gets the full
    output.

    Use it in a denoising loop of your own, as :func:`parallelize_transformer`. Ranks along ``ring`` and
    ``ulysses`` shard the rows of the image (columns, if it is wider than high), and ranks along ``batch``
    shard the samples. No gradients are computed: unless gradients are disabled (``torch.no_grad()``), a call
    raises ``RuntimeError`` if an argument or a parameter requires one. Calling it again replaces the previous
    settings; :func:`unparallelize_unet` undoes it, as does a mesh of one rank.

    Args:
        unet (`nn.Module`): A supported UNet or ControlNet of diffusers (docs/vae.md lists them).
        mesh, assume_equal: As in :func:`parallelize_transformer`.
        batched (`bool`, defaults to `True`): Whether samples are sharded over ``batch``. Pass `False` if the
            model's output for a sample depends on its position in the batch.

    Returns:
        ``unet`` itself.

    Raises:
        TypeError: If the class is not supported, or an option has a wrong type.
        ValueError: If the mesh does not fit, or the ranks pass different options.
        RuntimeError: As for :func:`parallelize_pipe`.
    """
    module: nn.Module = uncompiled(unet)
    model = CheckedModel(module, module, kind=KIND)
    options = {"assume_equal": assume_equal, "batched": batched}
    with agree_on_options("parallelize_unet", mesh, options):
        check_pipeline_or_model("model", unet, "parallelize_pipe takes a pipeline.")
        _check_bools(options)
        check_parallelize([model])
    guided = guided_mesh_for(mesh, module)
    refusal = f"this {original_class(module).__name__} cannot run in rows"
    with together(guided, refusal):
        check_parallelize([model], guided)
    # This is collective, so it comes between the steps that may fail on one rank alone.
    run = make_denoiser_run(KIND, module, guided, assume_equal=assume_equal, batched=batched)
    with restore_on_failure([module]), together(guided, refusal):
        run.apply()
    return unet


def _check_bools(options: Mapping[str, object]) -> None:
    """Raise ``TypeError`` if a value of ``options`` is no bool, because no :class:`Option` declares these."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; expected True or False.")
