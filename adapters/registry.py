"""Lookup of adapters, plans, transformers and UNets."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import nn

from para_core.adapters.models import ADAPTERS
from para_core.adapters.models.unets import UNETS, unet_adapter
from para_core.adapters.models.unsupported import REFUSED
from para_core.adapters.spec import Adapter, Text
from para_core.instance_patching import original_class, uncompiled
from para_core.plans.plan import Plan
from para_core.plans.published import published_plan
from para_core.weights.tensor_plan import TensorPlan, published_tensor_plan

# Names of the components that denoise. Wan 2.2 has one for each part of the schedule, Ideogram 4 one for each branch of
# guidance.
TRANSFORMERS = ("transformer", "transformer_2", "unconditional_transformer")


def plan_for(module: nn.Module, text: Text | None = None, adapter: Adapter | None = None) -> Plan | None:
    """Return the plan of the adapter for ``module``, or the published one (``_cp_plan``); None if there is neither.

    Args:
        text: Whether the plan shards or replicates text. None for the faster way.
        adapter: An adapter that has priority if it is for the class of ``module``.

    Raises:
        ValueError: If ``text`` is unknown, or the text of this model cannot be sharded.
    """
    if text not in (None, "shard", "replicate"):
        raise ValueError(f"text is {text!r}; expected 'shard', 'replicate', or None for the faster one.")
    adapter = adapter_for(module, adapter)
    published: Any = getattr(module, "_cp_plan", None)
    if adapter is not None and adapter.plan is not None:
        plan, segment, default = adapter.plan, "text", adapter.text
        if adapter.complete is not None:
            plan = adapter.complete(plan, uncompiled(module))
    elif published is not None:
        plan, segment, default = published_plan(published), "encoder_hidden_states", "shard"
    else:
        return None
    if (text or default) == "replicate":
        return plan.with_replicated(segment)
    if text == "shard" and not plan.cuts(segment):
        raise ValueError(
            f"text='shard' was given, but {original_class(module).__name__} needs all text tokens on every rank: it "
            "makes masks or positions for the whole sequence, or only its keys are text. Leave text= out."
        )
    return plan


def tensor_plan_for(module: nn.Module) -> TensorPlan | None:
    """Return the tensor plan of the adapter, or the published one (``_tp_plan``); None if there is neither."""
    adapter = adapter_for(module)
    if adapter is None:
        # Models of the transformers library publish plans of another form under this name.
        return None
    if adapter.tensor is not None:
        return adapter.tensor
    published: Any = getattr(module, "_tp_plan", None)
    return published_tensor_plan(published) if published else None


def adapter_for(module: nn.Module, adapter: Adapter | None = None) -> Adapter | None:
    """Return the adapter for the class of ``module``, or for the nearest of its base classes; None if there is none.

    Args:
        adapter: An adapter that has priority if it is for the same class.
    """
    candidates = ADAPTERS if adapter is None else (adapter, *ADAPTERS)
    names = [cls.__name__ for cls in type(module).__mro__]
    return next((candidate for name in names for candidate in candidates if candidate.transformer == name), None)


def why_refused(module: nn.Module) -> str | None:
    """Return the reason why the class of ``module`` cannot have a plan; None if no reason is known."""
    return next((REFUSED[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in REFUSED), None)


def transformers_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the transformers of ``pipe`` by the name of the component, without the wrappers of ``torch.compile``."""
    components = {name: uncompiled(getattr(pipe, name, None)) for name in TRANSFORMERS}
    return {name: module for name, module in components.items() if isinstance(module, nn.Module)}


def unets_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the UNet of a pipeline without a transformer, and its supported ControlNets, by path."""
    unet = uncompiled(getattr(pipe, "unet", None))
    if not isinstance(unet, nn.Module) or transformers_of(pipe):
        return {}
    controlnet = uncompiled(getattr(pipe, "controlnet", None))
    nets = enumerate(getattr(controlnet, "nets", ()))
    paths = {"controlnet": controlnet, **{f"controlnet.nets.{index}": uncompiled(net) for index, net in nets}}
    return {"unet": unet, **{path: module for path, module in paths.items() if unet_adapter(module) is not None}}


def component_of(pipe: Any, path: str) -> Any:
    """Return the component at a dotted ``path`` of ``pipe``; None if there is none."""
    return reduce(lambda owner, name: getattr(owner, name, None), path.split("."), pipe)


def supported() -> str:
    """Return a list of the pipelines that run in parallel, for messages."""
    return "; ".join(
        [
            *[adapter.pipelines for adapter in ADAPTERS if adapter.plan is not None],
            *[adapter.pipelines for adapter in UNETS.values() if adapter.pipelines],
            "every model that publishes a _cp_plan",
        ]
    )


def cached() -> str:
    """Return a list of the pipelines that First Block Cache supports, for messages."""
    return "; ".join(adapter.pipelines for adapter in ADAPTERS if adapter.blocks is not None)
