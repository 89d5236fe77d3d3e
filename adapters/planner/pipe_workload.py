"""The work of one generation, counted on a pipeline without its weights. Imports torch."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from para_core.adapters.inspect.components import components_with_blocks, vaes_of
from para_core.adapters.inspect.guidance import default_guidance, number_of_heads
from para_core.adapters.planner import count
from para_core.adapters.planner.inputs import default_sizes
from para_core.adapters.planner.weights import ModuleBytes, Weights
from para_core.adapters.planner.work import GenerationSizes, Workload, check_size
from para_core.adapters.registry import plan_for, transformers_of
from para_core.instance.modules import uncompiled
from para_core.instance.private_class import original_class


def pipe_workload(pipe: Any, changed: dict[str, int], steps: int | None) -> Workload:
    """Return the work of one generation with ``pipe``, of its default sizes but for those of ``changed``.

    Raises:
        UnknownModelError: ``pipe`` has no transformer, or the inputs or the plan of its transformer are
            unknown.
        ValueError: The pipeline cannot generate a result of this size.
    """
    transformer = next(iter(transformers_of(pipe).values()), None)
    if transformer is None:
        raise count.UnknownModelError(
            f"{type(pipe).__name__} has no transformer; expected a pipeline with one, or the name of a published model."
        )
    count.check_known(transformer)
    sizes, default_steps = default_sizes(pipe, transformer, changed)
    # The inputs of a modular pipeline are those of its blocks.
    block_inputs = {getattr(x, "name", None) for x in getattr(getattr(pipe, "blocks", None), "inputs", ())}
    takes_frames = "num_frames" in {
        *inspect.signature(original_class(pipe).__call__).parameters,
        *block_inputs,
    }
    check_size(original_class(pipe).__name__, sizes, is_video=takes_frames or "frames" not in changed)
    dtype = next((x.dtype for x in transformer.parameters() if x.is_floating_point()), torch.bfloat16)
    with count.without_data(dtype):
        call = count.count_call(transformer, replace(sizes, dtype=dtype))
    plan = plan_for(transformer)
    branches = 2
    if default_guidance(pipe, transformer) is None:
        branches = 1
    return Workload(
        name=f"{_model_name(pipe)}, {sizes}",
        sizes=sizes,
        steps=steps or default_steps,
        weights=pipe_weights(pipe),
        call=call,
        branches=branches,
        batched=plan is not None and bool(plan.batched) and branches > 1,
        heads=number_of_heads(transformer) or 0,
    )


def uncounted_workload(pipe: Any, reason: str) -> Workload:
    """Return a workload with only the weights of ``pipe``, whose operations cannot be counted for ``reason``."""
    return Workload(_model_name(pipe), GenerationSizes(0, 0, 1, 0), 0, pipe_weights(pipe), uncounted=reason)


def pipe_weights(pipe: Any) -> Weights:
    """Return the bytes of the weights of ``pipe``."""
    transformers, vaes = transformers_of(pipe), vaes_of(pipe).values()
    encoders = [module for name, module in components_with_blocks(pipe).items() if name not in transformers]
    counted = {id(x) for x in (*transformers.values(), *encoders, *vaes)}
    modules = {id(x): x for x in map(uncompiled, pipe.components.values()) if isinstance(x, nn.Module)}
    other = sum(count.bytes_of(x) for key, x in modules.items() if key not in counted)
    vae = sum(map(count.bytes_of, vaes))
    if not transformers:
        weights = count.count_weights(nn.Module(), encoders, vae=vae, other=other)
        return replace(weights, transformer=ModuleBytes(), in_8_bits=1.0)
    first = next(iter(transformers.values()))
    return count.count_weights(first, encoders, vae=vae, other=other, transformers=len(transformers))


def _model_name(pipe: Any) -> str:
    """Return the last part of the folder or repository from which ``pipe`` was made; its class if that is unknown."""
    path = str(getattr(pipe, "name_or_path", None) or "").rstrip("/")
    return path.rpartition("/")[2] or original_class(pipe).__name__
