"""Which transformers and UNets run in parallel, and by which plan."""

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

# Components that denoise; Wan 2.2 has one for each half of the steps, Ideogram 4 one for each branch of guidance.
TRANSFORMERS = ("transformer", "transformer_2", "unconditional_transformer")


def plan_for(module: nn.Module, text: Text | None = None, adapter: Adapter | None = None) -> Plan | None:
    """Our plan for ``module``, or the one that its class publishes (``_cp_plan``); None if there is neither.

    Args:
        text: None: the faster way.
        adapter: goes before both where it is for this class.

    Raises:
        ValueError: ``text`` is unknown, or this model's text cannot be sharded.
    """
    if text not in (None, "shard", "replicate"):
        raise ValueError(f"text is {text!r}; expected 'shard', 'replicate', or None for the faster of both.")
    known = adapter_for(module, adapter)
    if known is not None and known.plan is not None:
        plan = known.plan if known.complete is None else known.complete(known.plan, uncompiled(module))
        return _with_text(plan, "text", text or known.text, asked=text, module=module)
    published: Any = getattr(module, "_cp_plan", None)
    if published is None:
        return None
    return _with_text(published_plan(published), "encoder_hidden_states", text or "shard", asked=text, module=module)


def tensor_plan_for(module: nn.Module) -> TensorPlan | None:
    """What tensor parallelism shards of a transformer: our plan, or the one that its class publishes (``_tp_plan``); None: nothing."""
    known = adapter_for(module)
    if known is not None and known.tensor is not None:
        return known.tensor
    published: Any = getattr(module, "_tp_plan", None)
    # Models of transformers have such plans, too, in another form.
    return published_tensor_plan(published) if published and known is not None else None


def adapter_for(module: nn.Module, adapter: Adapter | None = None) -> Adapter | None:
    """What is known of ``module``; None if nothing.

    Args:
        adapter: goes before what is known here where it is for this class.
    """
    names = [cls.__name__ for cls in type(module).__mro__]
    candidates = [*([] if adapter is None else [adapter]), *ADAPTERS]
    return next((known for name in names for known in candidates if known.transformer == name), None)


def why_refused(module: nn.Module) -> str | None:
    """Why a class of diffusers has no plan; None where nothing is known against one."""
    return next((REFUSED[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in REFUSED), None)


def _with_text(plan: Plan, segment: str, text: Text, *, asked: Text | None, module: nn.Module) -> Plan:
    if text == "replicate":
        return plan.with_replicated(segment)
    if asked == "shard" and not plan.cuts(segment):
        raise ValueError(
            f"text='shard' was given, but {original_class(module).__name__} needs all text tokens on every rank: it makes "
            "masks or positions for the whole sequence, or only its keys are text. Leave text= out."
        )
    return plan


def transformers_of(pipe: Any) -> dict[str, nn.Module]:
    """What denoises in a pipeline, by the name of the component, as it was before ``torch.compile``."""
    found = {name: uncompiled(getattr(pipe, name, None)) for name in TRANSFORMERS}
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


def unets_of(pipe: Any) -> dict[str, nn.Module]:
    """The UNet of a pipeline without a transformer, and the ControlNets beside it that run as it does, by their paths."""
    unet = uncompiled(getattr(pipe, "unet", None))
    if not isinstance(unet, nn.Module) or transformers_of(pipe):
        return {}
    beside = uncompiled(getattr(pipe, "controlnet", None))
    several = enumerate(getattr(beside, "nets", ()))
    found = {"controlnet": beside, **{f"controlnet.nets.{place}": uncompiled(net) for place, net in several}}
    return {"unet": unet, **{name: module for name, module in found.items() if unet_adapter(module) is not None}}


def component_of(pipe: Any, path: str) -> Any:
    """What stands at ``path``; None if nothing does."""
    return reduce(lambda found, part: getattr(found, part, None), path.split("."), pipe)


def supported() -> str:
    """What runs in parallel, for messages."""
    return "; ".join(
        [
            *[adapter.pipelines for adapter in ADAPTERS if adapter.plan is not None],
            *[adapter.pipelines for adapter in UNETS.values() if adapter.pipelines],
            "every model that publishes a _cp_plan",
        ]
    )


def cached() -> str:
    """What First Block Cache works on, for messages."""
    return "; ".join(adapter.pipelines for adapter in ADAPTERS if adapter.blocks is not None)
