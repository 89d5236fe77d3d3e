"""Transformers on two ranks, and each cached one against the same cached on one device.

A check of `benchmarks.pipelines.exactness`: every tiny transformer, an odd number of tokens. On a mesh along ``batch`` if the plan shares
samples. Its JSON has the errors of `benchmarks.pipelines.supported`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.harness import largest_over_ranks, relative_error
from para_core import apply_cache, model_cache_report, remove_cache
from para_core.adapters import parallelize_transformer, unparallelize_transformer
from para_core.adapters.registry import adapter_for, plan_for
from para_core.cache.branches import conditions_of
from zoo.tiny.transformers.registry import MODELS

# batch × ring × ulysses
MESHES = {"2 Ulysses": (1, 1, 2), "2 ring": (1, 2, 1), "2 batch": (2, 1, 1)}
# Of the second call's floating-point inputs: it is another step.
OTHER_STEP = 1.01
SKIP_ALWAYS = 1e9


def inputs_of(name: str) -> dict[str, Any]:
    """Odd numbers of tokens where the model takes them."""
    return MODELS[name].inputs(6 if name == "cogvideox 1.5" else 3, 6, 10)


def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """All that the model returns, as one tensor."""
    # HunyuanDiT takes residuals of a ControlNet out of the list that it is given.
    given = {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}
    with torch.no_grad(), warnings.catch_warnings():
        # Mochi asks for an autocast that the CPU does not have.
        warnings.filterwarnings("ignore", message="In CPU autocast")
        output = model(**given, return_dict=False)
    return torch.cat([x.double().flatten() for x in tree_leaves(output) if isinstance(x, Tensor)])


def run_cached(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, int]:
    """What a second call returns that takes what the first has stored, and how many calls did."""
    known = adapter_for(model)
    if known is None or known.blocks is None:
        raise TypeError(f"{type(model).__name__} has no blocks to cache.")
    apply_cache(model, known.blocks, residual_diff_threshold=SKIP_ALWAYS)
    run(model, inputs)
    # What tells branches of guidance apart stays as it is.
    conditions = conditions_of(model, known.blocks)
    later = {name: value for name, value in inputs.items() if name not in conditions}
    later = tree_map_only(Tensor, lambda x: x * OTHER_STEP if x.is_floating_point() else x, later)
    out = run(model, {**inputs, **later})
    hits = model_cache_report(model).hits
    remove_cache(model)
    return out, hits


def measure(names: list[str]) -> dict[str, Any]:
    """Return the errors of models, of the worst rank."""
    return {name: _measure(name) for name in names}


def _measure(name: str) -> dict[str, Any]:
    model, inputs = MODELS[name].build(), inputs_of(name)
    plan = plan_for(model)
    known = adapter_for(model)
    caches = known is None or known.blocks is not None
    expected, (expected_cached, hits) = run(model, inputs), run_cached(model, inputs) if caches else (None, 0)
    errors, cached = {}, {}
    for label, shape in MESHES.items():
        if shape[0] > 1 and (plan is None or not plan.batched):
            continue
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("batch", "ring", "ulysses"))
        parallelize_transformer(model, mesh=mesh)
        errors[label] = largest_over_ranks(relative_error(run(model, inputs), expected))
        if expected_cached is not None:
            out, hits_here = run_cached(model, inputs)
            if hits_here != hits:
                raise RuntimeError(f"{name} on {label}: {hits_here} calls took stored residuals, alone {hits}.")
            cached[label] = largest_over_ranks(relative_error(out, expected_cached))
        unparallelize_transformer(model)
    return {"class": MODELS[name].cls, "errors": errors, "cached": cached, "hits": hits}
