"""Find the UNets and ControlNets of a pipeline, and refuse those that cannot run on several ranks.

``unet.py`` runs them, and puts these functions into its ``KIND``; which classes are supported is in
``adapters/models/unets.py``. Tests: tests/spatial/test_unet_pipelines.py, and
tests/adapters/compatibility/test_checks.py for the checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from para_core.adapters.models.unets import REFUSED_UNETS, UNETS
from para_core.adapters.refusal import refusal
from para_core.adapters.registry import transformers_of
from para_core.distributed.mesh import GuidedMesh
from para_core.instance.modules import has_compiled_parts, uncompiled
from para_core.instance.private_class import original_class

# ControlNets, which no pipeline consists of, have no names of pipelines.
PIPELINES = {name: adapter.pipelines for name, adapter in UNETS.items() if adapter.pipelines}


def unets_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the UNet and the supported ControlNets of ``pipe`` by path; empty with a transformer or without a UNet.

    An unsupported UNet is returned too, so that :func:`require_described_class` refuses the pipeline and says why.
    An unsupported ControlNet computes all rows on each rank.
    """
    unet = uncompiled(getattr(pipe, "unet", None))
    if not isinstance(unet, nn.Module) or transformers_of(pipe):
        return {}
    controlnet = uncompiled(getattr(pipe, "controlnet", None))
    paths = {"controlnet": controlnet}
    for index, net in enumerate(getattr(controlnet, "nets", ())):
        paths[f"controlnet.nets.{index}"] = uncompiled(net)
    return {"unet": unet, **{path: module for path, module in paths.items() if is_described(module)}}


def is_described(module: Any) -> bool:
    """Whether :data:`UNETS` describes the class of ``module``, or one of its base classes."""
    return described_class(original_class(module)) is not None


def described_class(cls: type) -> type | None:
    """Return ``cls`` or the nearest of its base classes that :data:`UNETS` describes; None if there is none."""
    return next((base for base in cls.__mro__ if base.__name__ in UNETS), None)


# -- The page docs/refusals.md lists the following checks. benchmarks/refusals.py finds them as the global names
# that the functions of KIND use, and takes their rows from docstrings that begin with "Refuse" and from their
# raise statements. tests/test_pages.py fails if a row is then missing or new. The first check has no row, because the
# supported classes are listed in docs/vae.md, so its docstring begins otherwise.


def require_described_class(owner: str, cls: type) -> type:
    """Return :func:`described_class` of ``cls``, the class of a UNet or ControlNet.

    Raise ``TypeError`` if it is not supported. The message names ``owner``, the class of the pipeline or UNet.
    """
    described = described_class(cls)
    if described is None:
        reasons = (REFUSED_UNETS[base.__name__] for base in cls.__mro__ if base.__name__ in REFUSED_UNETS)
        reason = next(reasons, "para_core has no adapter for it")
        raise TypeError(
            f"{owner} is not supported: the rows of images in {cls.__name__} cannot be sharded: {reason}. Give each "
            f"rank its own prompts instead. Supported are the UNets of {'; '.join(PIPELINES.values())}."
        )
    return described


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
    """Refuse a compiled UNet.

    ``called`` is the object that the pipeline calls: the compiled wrapper of ``module``, or ``module`` itself.
    """
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
    require_described_class(original_class(owner).__name__, original_class(module))
    if mesh is not None:
        check_no_tensor_ranks_of_unet(module, mesh)


def check_unet_before_call(module: nn.Module, name: str, called: Any) -> None:
    """Run the checks of a UNet before a parallel call."""
    check_unet_not_compiled(module, name, called)
    check_no_freeu(module, name)


def check_unet_before_cache(owner: Any, module: nn.Module) -> None:
    """Run the checks of a UNet before a cache is applied to it."""
    check_cache_not_on_unet(owner, module)


def check_unet_of_components(pipeline: str, components: Mapping[str, Any]) -> bool:
    """Return whether ``components``, classes by name, has a UNet.

    Raise ``TypeError`` if its class is not supported. The message names ``pipeline``.
    """
    unet = components.get("unet")
    if unet is not None:
        require_described_class(pipeline, unet)
    return unet is not None
