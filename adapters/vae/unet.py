"""Run UNets and ControlNets of diffusers on several ranks: each rank computes rows of the image, or some of
the samples.

Nothing but the table :data:`para_core.adapters.denoisers.KINDS` refers to this file for pipelines: they use
:data:`KIND`. For a UNet without a pipeline, ``adapters/parallel/unet.py`` has ``parallelize_unet``. Which
classes are supported is in ``adapters/models/unets.py``. Tests: tests/spatial/test_unet_pipelines.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from para_core.adapters.denoisers import DenoiserKind
from para_core.adapters.models.unets import REFUSED_UNETS, UNETS, UnetAdapter
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import check_pipeline_or_model, transformers_of
from para_core.adapters.vae.call import RowRanks, run_on_rows, run_on_workers
from para_core.distributed.collectives import all_gather
from para_core.distributed.mesh import GuidedMesh, one_guided_rank
from para_core.instance.modules import has_compiled_parts, uncompiled
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

# ControlNets, which no pipeline consists of, have no names of pipelines.
_PIPELINES = {name: adapter.pipelines for name, adapter in UNETS.items() if adapter.pipelines}
_SUPPORTED = "; ".join(_PIPELINES.values())


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


def unets_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the UNet and the supported ControlNets of ``pipe`` by path; empty with a transformer or without a UNet.

    An unsupported UNet is returned too, so that :func:`require_unet_adapter` refuses the pipeline and says
    why. An unsupported ControlNet computes all rows on each rank.
    """
    unet = uncompiled(getattr(pipe, "unet", None))
    if not isinstance(unet, nn.Module) or transformers_of(pipe):
        return {}
    controlnet = uncompiled(getattr(pipe, "controlnet", None))
    paths = {"controlnet": controlnet}
    for index, net in enumerate(getattr(controlnet, "nets", ())):
        paths[f"controlnet.nets.{index}"] = uncompiled(net)
    return {
        "unet": unet,
        **{path: module for path, module in paths.items() if unet_adapter(module) is not None},
    }


def unet_adapter(unet: Any) -> UnetAdapter | None:
    """Return the adapter for the class of ``unet``, or for the nearest of its base classes; None if there is none."""
    names = [cls.__name__ for cls in original_class(unet).__mro__]
    return next((UNETS[name] for name in names if name in UNETS), None)


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
        self.images = require_unet_adapter(module, module).images
        self.batched, self.agree_on_inputs = batched, agree_on_inputs
        row_mesh = replace(one_guided_rank(mesh.sequence.device_type), sequence=mesh.sequence)
        self.rows = RowRanks(one_group(row_mesh), dim_groups(row_mesh))
        self.parameters = parameters_of(module)
        # True while the caller guarantees that all ranks have equal inputs. The inputs are not compared again
        # then. Set from outside, by assume_agreed().
        self.inputs_agreed = False
        self.warnings = WarningLog()
        # The code inside the UNet when it was last looked at; None before apply().
        self._code: ModelCode | None = None

    def _warn_of_foreign_code(self) -> None:
        """Warn of code inside the UNet that is the user's own. Later calls look again if code has changed."""
        self._code = ModelCode(self.unet)
        if self.mesh.sequence.ranks == 1:
            return
        written_for = next(cls for cls in original_class(self.unet).__mro__ if cls.__name__ in UNETS)
        for code in find_foreign_code(self.unet, written_for):
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
            self._warn_of_foreign_code()
            fill_slot(self.unet, Slot.PARALLEL_DENOISER, {"__call__": self.run}, owner=self)

    def remove(self) -> None:
        """Remove any wrapper of the UNet's ``__call__`` that shards rows."""
        empty_slot(self.unet, Slot.PARALLEL_DENOISER)

    def run(self, call: Callable[..., Any], unet: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the UNet on this rank's samples and rows, and return its whole output. Collective."""
        inputs = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        if not self.inputs_agreed:
            self.agree_on_inputs(inputs)
        if self._code is None or not self._code.is_unchanged():
            self._warn_of_foreign_code()
        images = [inputs.get(name) for name in self.images]
        are_images = all(isinstance(image, Tensor) and image.ndim >= 4 for image in images)
        if len(args) + len(kwargs) > len(inputs) or not are_images:
            # Pass invalid arguments to the model unchanged, because the model's own error explains them best.
            return call(unet, *args, **kwargs)
        if torch.is_grad_enabled():
            self._check_no_gradient(inputs)
        with torch.no_grad():
            return self._run_samples(partial(call, unet), inputs)

    def _check_no_gradient(self, inputs: Mapping[str, Any]) -> None:
        """Raise ``RuntimeError`` if an argument or a parameter of the UNet requires a gradient."""
        arguments = [name for name, value in inputs.items() if _requires_gradient(value)]
        parameters = [name for name, x in self.unet.named_parameters() if x.requires_grad]
        if arguments or parameters:
            cls = original_class(self.unet).__name__
            raise RuntimeError(
                f"{[*arguments, *parameters][0]} requires a gradient, and none is computed over ranks. Call the {cls} "
                "under torch.no_grad(), or unparallelize it."
            )

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
        """
        sample = inputs[self.images[0]]
        dim = -1 if sample.shape[-1] > sample.shape[-2] else -2
        # With two units a rank holds two rows at the innermost level: match_reshape (para_core/spatial/views.py)
        # looks for rows in the shape that a rank holds, and would take another dim of size 1 for a single row.
        rows, workers = self.rows.shard(sample, dim, self._rows_per_unit(), min_units=2)
        compute = partial(call, **inputs)
        if workers.size > 1:
            sharded = self._sizes_of_images(inputs, dim, rows.sizes)
            compute = partial(run_on_rows, SpatialShardMode(workers), call, (), inputs, sharded)
        return run_on_workers(compute, workers.size, self.rows.ranks, self.rows.mesh, "all")

    def _rows_per_unit(self) -> int:
        """Return the number of rows of the sample that are one row at the innermost level."""
        unet: Any = self.unet
        levels = sum(getattr(block, "downsamplers", None) is not None for block in unet.down_blocks)
        return 1 << levels

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


# -- The page docs/refusals.md lists the following checks. benchmarks/refusals.py finds them as the global names
# that the functions of KIND use, and takes their rows from docstrings that begin with "Refuse" and from their
# raise statements. tests/test_pages.py fails if a row is then missing or new.


def require_unet_adapter(owner: Any, module: Any) -> UnetAdapter:
    """Return the adapter for the UNet ``module``.

    Raises ``TypeError`` if there is none. The message names ``owner``, the pipeline or UNet.
    """
    adapter = unet_adapter(module)
    if adapter is None:
        reason = REFUSED_UNETS.get(original_class(module).__name__, "para_core has no adapter for it")
        raise TypeError(
            f"{original_class(owner).__name__} is not supported: the rows of images in "
            f"{original_class(module).__name__} cannot be sharded: {reason}. Give each rank its own prompts instead. "
            f"Supported are the UNets of {_SUPPORTED}."
        )
    return adapter


def check_no_tensor_ranks_of_unet(module: nn.Module, mesh: GuidedMesh) -> None:
    """Refuse a UNet on a mesh with ranks along tensor."""
    # A UNet has no tensor plan, so all ranks along 'tensor' would compute the same rows.
    if mesh.tensor.size > 1:
        raise ValueError(
            f"the mesh has {mesh.tensor.size} ranks along 'tensor', which shard the heads of a transformer, and "
            f"{original_class(module).__name__} is a UNet, whose weights are not sharded. Give these ranks to "
            "'ulysses' or 'ring', which shard the rows of its images, or to 'batch'."
        )


def check_unet_not_compiled(module: nn.Module, name: str, called: Any) -> None:
    """Refuse a compiled UNet."""
    if called is not module or has_compiled_parts(module):
        raise RuntimeError(
            f"{name} was compiled, and a compiled graph does not know the layout of the rows. Use it uncompiled, or "
            "unparallelize_pipe(pipe)."
        )


def check_no_freeu(module: nn.Module, name: str) -> None:
    """Refuse FreeU, which filters the frequencies of whole images, in a UNet."""
    blocks = getattr(module, "up_blocks", ())
    if any(getattr(block, factor, None) for block in blocks for factor in ("s1", "s2", "b1", "b2")):
        raise refusal(
            RuntimeError,
            f"{name} has FreeU, which filters the frequencies of whole images, and each rank has some rows of them.",
            "Call pipe.disable_freeu(), or unparallelize_pipe(pipe).",
        )


def check_cache_not_on_unet(owner: Any, module: nn.Module) -> None:
    """Refuse a cache on a UNet."""
    raise refusal(
        TypeError,
        f"{original_class(owner).__name__} cannot be cached: First Block Cache skips blocks whose output has the size "
        f"of their input. The blocks of {original_class(module).__name__} pass residuals of many sizes to each other.",
        "Leave the cache out; parallelize_pipe runs it on several ranks.",
    )


def check_unet_before_parallelize(owner: Any, module: Any, mesh: GuidedMesh | None) -> None:
    """Run the checks of a UNet before it is parallelized; those that need the mesh if ``mesh`` is given."""
    require_unet_adapter(owner, module)
    if mesh is not None:
        check_no_tensor_ranks_of_unet(module, mesh)


def check_unet_before_call(module: nn.Module, name: str, called: Any) -> None:
    """Run the checks of a UNet before a parallel call."""
    check_unet_not_compiled(module, name, called)
    check_no_freeu(module, name)


def check_unet_before_cache(owner: Any, module: nn.Module) -> None:
    """Run the checks of a UNet before a cache is applied to it."""
    check_cache_not_on_unet(owner, module)


def has_unet_class(pipeline: str, components: Mapping[str, Any]) -> bool:
    """Whether ``components``, classes by name, has a UNet. Raise ``TypeError`` if its class is not supported."""
    unet = components.get("unet")
    if unet is None:
        return False
    if not any(base.__name__ in UNETS for base in unet.__mro__):
        raise TypeError(
            f"{pipeline} is not supported: the rows of images in {unet.__name__} cannot be sharded. Supported are the "
            f"UNets of {_SUPPORTED}."
        )
    return True


KIND = DenoiserKind(
    name="unet",
    find=unets_of,
    describes=lambda module: unet_adapter(module) is not None,
    make_run=UnetRun,
    why_no_stages="it is a UNet, whose blocks pass residuals to each other",
    pipelines=_PIPELINES,
    has_class=has_unet_class,
    check_parallelize=check_unet_before_parallelize,
    check_parallel_call=check_unet_before_call,
    check_cache=check_unet_before_cache,
)
