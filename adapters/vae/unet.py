"""Run UNets and ControlNets of diffusers on several ranks: each rank computes rows of the image, or some of
the samples.

Pipelines find :data:`KIND` by the table :data:`para_core.adapters.denoisers.KINDS`. For a UNet without a
pipeline, ``adapters/parallel/unet.py`` has ``parallelize_unet``; :func:`unparallelize_unet` here undoes it.
What a class must satisfy is in the docstring of ``UnetAdapter`` (``adapters/models/unets.py``). Which UNets of
a pipeline these are, and which are refused, is in ``unet_checks.py``. Tests:
tests/spatial/test_unet_pipelines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from para_core.adapters.denoisers import DenoiserKind
from para_core.adapters.models.unets import UNETS
from para_core.adapters.registry import check_pipeline_or_model
from para_core.adapters.vae.call import RowRanks, dim_of_rows, run_on_rows, run_on_workers
from para_core.adapters.vae.unet_checks import (
    PIPELINES,
    check_unet_before_cache,
    check_unet_before_call,
    check_unet_before_parallelize,
    check_unet_of_components,
    is_described,
    require_described_class,
    unets_of,
)
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import GuidedMesh, one_guided_rank
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class
from para_core.instance.record import empty_slot, fill_slot
from para_core.instance.slots import Slot
from para_core.layout.windows import Sizes
from para_core.plans.attention_check import ModelCode
from para_core.plans.foreign_code import find_foreign_code
from para_core.plans.module_matching import parameters_of
from para_core.plans.samples import select_samples
from para_core.spatial.mode import SpatialShardMode
from para_core.spatial.row_group import dim_groups, one_group
from para_core.torch_internals import pytree
from para_core.user_warnings import ForeignCodeWarning, ParallelWarning, WarningLog

Unet = TypeVar("Unet", bound=nn.Module)


def unparallelize_unet(unet: Unet) -> Unet:
    """Undo :func:`~para_core.adapters.parallel.unet.parallelize_unet`, and return ``unet`` as it was before.
    Does nothing if it is not parallel.

    Args:
        unet (`nn.Module`): The UNet or ControlNet, compiled or not.

    Returns:
        ``unet`` itself.

    Raises:
        TypeError: If ``unet`` is not a model.
    """
    check_pipeline_or_model("model", unet, "unparallelize_pipe takes a pipeline.")
    empty_slot(uncompiled(unet), Slot.PARALLEL_DENOISER)
    return unet


class UnetRun:
    """Handler that runs the calls of one UNet with rows, and perhaps samples, sharded over a mesh.

    Args:
        module: The UNet or ControlNet, not compiled.
        mesh: The ranks. Those along ``ring`` and ``ulysses`` shard rows; if ``batched``, those along
            ``batch`` samples.
        agree_on_inputs: Called with the named arguments of each call; raises if ranks differ. It is not
            called inside :func:`~para_core.distributed.agreed_inputs.assume_agreed`.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: GuidedMesh,
        *,
        batched: bool,
        agree_on_inputs: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.unet, self.mesh = module, mesh
        cls = original_class(module)
        self.described = require_described_class(cls.__name__, cls)
        self.images = UNETS[self.described.__name__].images
        self.batched, self.agree_on_inputs = batched, agree_on_inputs
        row_mesh = replace(one_guided_rank(mesh.sequence.device_type), sequence=mesh.sequence)
        self.rows = RowRanks(one_group(row_mesh), dim_groups(row_mesh))
        self.parameters = parameters_of(module)
        # True while the caller guarantees that all ranks have equal inputs. The inputs are not compared again
        # then. Set from outside, by assume_agreed().
        self.inputs_agreed = False
        self.warnings = WarningLog()
        # The code inside the UNet when _warn_of_changed_code last looked at it; None before apply().
        self._code: ModelCode | None = None

    def _warn_of_changed_code(self) -> None:
        """Warn of the user's own code inside the UNet, if code has changed since the last call of this method."""
        if self._code is not None and self._code.is_unchanged():
            return
        self._code = ModelCode(self.unet)
        if self.mesh.sequence.ranks == 1:
            return
        for code in find_foreign_code(self.unet, self.described):
            self.warnings.warn(
                code,
                f"{code} sees only this rank's rows of the image. What counts or indexes rows, or looks at the whole "
                "image, is wrong there: compare a result with that of one process. If they are equal, silence this: "
                "warnings.filterwarnings('ignore', category=para_core.ForeignCodeWarning).",
                ForeignCodeWarning,
            )

    def apply(self) -> None:
        """Replace any wrapper of the UNet's ``__call__`` by one that shards rows.
        On one rank, only remove it.
        """
        self.remove()
        if self.mesh.ranks > 1:
            self._warn_of_changed_code()
            fill_slot(self.unet, Slot.PARALLEL_DENOISER, {"__call__": self.run}, owner=self)

    def remove(self) -> None:
        """Remove any wrapper of the UNet's ``__call__`` that shards rows."""
        empty_slot(self.unet, Slot.PARALLEL_DENOISER)

    def run(self, call: Callable[..., Any], unet: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the UNet on this rank's samples and rows, and return its whole output. Collective."""
        inputs = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        with_gradient = self._name_with_gradient(inputs)
        if not self.inputs_agreed:
            # Ranks compare this name too: one that raised alone would leave the others in a collective.
            self.agree_on_inputs({**inputs, "requires_grad": with_gradient})
        # The lines below may raise, and then do on all ranks, whose inputs are equal.
        self._warn_of_changed_code()
        images = [inputs.get(name) for name in self.images]
        are_images = all(isinstance(image, Tensor) and image.ndim >= 4 for image in images)
        if len(args) + len(kwargs) > len(inputs) or not are_images:
            # Pass invalid arguments to the model unchanged, because the model's own error explains them best.
            return call(unet, *args, **kwargs)
        if with_gradient is not None:
            raise RuntimeError(
                f"{with_gradient} requires a gradient, and none is computed over ranks. Call the "
                f"{original_class(unet).__name__} under torch.no_grad(), or unparallelize it."
            )
        with torch.no_grad():
            return self._run_samples(partial(call, unet), inputs)

    def _name_with_gradient(self, inputs: Mapping[str, Any]) -> str | None:
        """Return the name of the first argument, or else parameter, that requires a gradient.

        None if there is none, and under ``no_grad``.
        """
        if not torch.is_grad_enabled():
            return None
        named = chain(inputs.items(), self.unet.named_parameters())
        return next((name for name, value in named if _requires_gradient(value)), None)

    def _run_samples(self, call: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Return ``call(**inputs)``, computed with samples sharded over ``batch`` if they divide evenly, and
        rows. Collective.
        """
        num_samples, batch = inputs[self.images[0]].shape[0], self.mesh.batch
        if batch.size == 1 or not self.batched:
            return self._run_rows(call, inputs)
        if num_samples % batch.size:
            self.warnings.warn(
                "batch",
                f"a call has {num_samples} sample(s), which cannot be sharded over {batch.size} ranks along "
                "'batch': each rank computes all of them. Use guidance, or give these ranks to the rows.",
                ParallelWarning,
            )
            return self._run_rows(call, inputs)
        # A tensor has samples along dim 0, or one entry there that applies to all of them: see UnetAdapter.
        inputs = {name: select_samples(value, 0, num_samples, batch) for name, value in inputs.items()}
        out = self._run_rows(call, inputs)
        sizes = [num_samples // batch.size] * batch.size
        return pytree.tree_map_only(Tensor, lambda x: all_gather(x, sizes, 0, batch).contiguous(), out)

    def _run_rows(self, call: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Return the output of ``call(**inputs)``, computed with rows sharded over the ranks, with all rows.
        Collective.

        Only images are sharded here. Residuals of a ControlNet are passed with all rows, and the mode takes
        this rank's rows of them where the UNet adds them.
        """
        sample = inputs[self.images[0]]
        dim = dim_of_rows(sample)
        # SpatialShardMode.shard takes two units for each rank at least.
        rows, workers = self.rows.shard(sample, dim, self._rows_per_unit(), min_units=2)
        compute = partial(call, **inputs)
        if workers.size > 1:
            sharded = self._sizes_of_images(inputs, dim, rows.sizes)
            compute = partial(run_on_rows, SpatialShardMode(workers), call, (), inputs, sharded)
        return run_on_workers(compute, workers.size, self.rows, "all")

    def _rows_per_unit(self) -> int:
        """Return the number of rows of the sample that are one row at the innermost level.

        Each downsampler halves the rows: see UnetAdapter.
        """
        unet: Any = self.unet
        downsamplers = sum(getattr(block, "downsamplers", None) is not None for block in unet.down_blocks)
        rows: int = 2**downsamplers
        return rows

    def _sizes_of_images(
        self, inputs: Mapping[str, Any], dim: int, sizes: Sizes
    ) -> dict[str | int, tuple[int, Sizes]]:
        """Return ``dim`` and the rows of each rank, of every image that is sharded, given the ``sizes`` of the first.

        An image whose number of rows is no multiple of the first's is passed whole.
        """
        sharded: dict[str | int, tuple[int, Sizes]] = {}
        for name in self.images:
            scale, remainder = divmod(inputs[name].shape[dim], sum(sizes))
            if remainder == 0 and scale > 0:
                sharded[name] = (dim, tuple([scale * size for size in sizes]))
        return sharded


def _requires_gradient(value: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(value))


KIND = DenoiserKind(
    name="unet",
    find=unets_of,
    describes=is_described,
    make_run=UnetRun,
    why_no_stages="it is a UNet, whose blocks pass residuals to each other",
    pipelines=PIPELINES,
    check_components=check_unet_of_components,
    check_parallelize=check_unet_before_parallelize,
    check_parallel_call=check_unet_before_call,
    check_cache=check_unet_before_cache,
)
