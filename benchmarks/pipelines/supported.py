"""The transformers of the installed diffusers: which ones run in parallel and how, or why not (docs/pipelines.md).

The table comes from diffusers' classes, their adapters in `para_core.adapters`, and the errors that `python -m
benchmarks.pipelines.exactness models` measured (benchmarks/results/model_errors.json). No model is run.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin
from diffusers.models import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.harness import largest_over_ranks, markdown_table, read_results, relative_error
from benchmarks.pipelines.latents import TWO_RANKS, device_meshes
from para_core import apply_cache, model_cache_report, remove_cache
from para_core.adapters import parallelize_transformer, unparallelize_transformer
from para_core.adapters.adapter import Adapter
from para_core.adapters.models import ADAPTERS
from para_core.adapters.models.unsupported import REFUSED
from para_core.adapters.registry import adapter_for, plan_for
from para_core.cache.branches import conditions_of
from para_core.plans.plan import Split
from zoo.tiny.transformers.registry import MODELS, NO_WHOLE_GRAPH

# -- Errors, a check of `benchmarks.pipelines.exactness`.


# The floating-point inputs of the second call are multiplied by this factor, which makes it another step.
OTHER_STEP = 1.01
SKIP_ALWAYS = 1e9


def inputs_of(name: str) -> dict[str, Any]:
    """Return inputs with odd numbers of tokens if the model accepts them."""
    return MODELS[name].inputs(6 if name == "cogvideox 1.5" else 3, 6, 10)


def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Return all outputs of the model as one tensor."""
    # HunyuanDiT removes residuals of a ControlNet from the list that it receives.
    kwargs = {name: list(value) if isinstance(value, list) else value for name, value in inputs.items()}
    with torch.no_grad(), warnings.catch_warnings():
        # Mochi asks for an autocast that the CPU does not have.
        warnings.filterwarnings("ignore", message="In CPU autocast")
        output = model(**kwargs, return_dict=False)
    return torch.cat([x.double().flatten() for x in tree_leaves(output) if isinstance(x, Tensor)])


def run_cached(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the output of a second call that takes the residuals of the first, and the number of hits."""
    adapter = adapter_for(model)
    if adapter is None or adapter.blocks is None:
        raise TypeError(f"{type(model).__name__} has no blocks to cache.")
    apply_cache(model, adapter.blocks, residual_diff_threshold=SKIP_ALWAYS)
    run(model, inputs)
    # The inputs by which the cache identifies CFG branches stay the same.
    conditions = conditions_of(model, adapter.blocks)
    later = {name: value for name, value in inputs.items() if name not in conditions}
    later = tree_map_only(Tensor, lambda x: x * OTHER_STEP if x.is_floating_point() else x, later)
    # A timestep may be an integer.
    for clock in ("timestep", "t"):
        if clock in inputs and not inputs[clock].is_floating_point():
            later[clock] = inputs[clock] - 1
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
    adapter = adapter_for(model)
    caches = adapter is None or adapter.blocks is not None
    expected, (expected_cached, hits) = run(model, inputs), run_cached(model, inputs) if caches else (None, 0)
    errors, cached = {}, {}
    for label, mesh in device_meshes(TWO_RANKS).items():
        if mesh.shape[0] > 1 and (plan is None or not plan.batched):
            continue
        parallelize_transformer(model, mesh=mesh)
        errors[label] = largest_over_ranks(relative_error(run(model, inputs), expected))
        if expected_cached is not None:
            out, hits_here = run_cached(model, inputs)
            if hits_here != hits:
                raise RuntimeError(f"{name} on {label}: {hits_here} calls took stored residuals, alone {hits}.")
            cached[label] = largest_over_ranks(relative_error(out, expected_cached))
        unparallelize_transformer(model)
    return {"class": MODELS[name].cls, "errors": errors, "cached": cached, "hits": hits}


# -- The table.


# A longer cell makes the other columns narrow.
_MOST_CHARACTERS = 80
# Their samples are lists, or are named by their index in the batch.
_LISTS = ("OmniGenTransformer2DModel", "JoyImageEditPlusTransformer3DModel")

# A pipeline has one of these models for each CFG branch.
_ONE_A_BRANCH = ("Ideogram4Transformer2DModel",)


@cache
def transformer_classes() -> tuple[str, ...]:
    """Return names of all models in ``diffusers.models.transformers``."""
    classes = set()
    for module in pkgutil.iter_modules(transformers.__path__, f"{transformers.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(value) and issubclass(value, ModelMixin) and value.__module__ == module.name:
                classes.add(name)
    return tuple(sorted(classes))


@cache
def _constructors() -> dict[str, str]:
    """Return the source of each pipeline's ``__init__``. Importing classes may need missing libraries."""
    sources = {}
    for path in sorted((Path(diffusers.__file__).parent / "pipelines").rglob("pipeline*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Pipeline"):
                inits = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
                sources[node.name] = "".join(ast.unparse(part.args) for part in inits)
    return sources


def pipelines_of(transformer: str) -> list[str]:
    """Return the names of the pipelines that take such a transformer, without their common ending."""
    names = [name for name, taken in _constructors().items() if re.search(rf"\b{transformer}\b", taken)]
    return sorted(name.removesuffix("Pipeline") for name in names)


def _listed(names: list[str]) -> str:
    """Return the names that fit into a cell of the table, and the number of the others."""
    for shown in range(len(names), 0, -1):
        rest = f" and {len(names) - shown} more" if shown < len(names) else ""
        cell = ", ".join(names[:shown]) + rest
        if len(cell) <= _MOST_CHARACTERS:
            return cell
    return f"{len(names)} pipelines" if names else ""


def row(transformer: str) -> list[str]:
    """Return class, pipelines, sharded segments, guidance, errors, and whether it is one graph. For a refused class
    return the reason.
    """
    listed = _listed(pipelines_of(transformer))
    entry = next((adapter for adapter in ADAPTERS if adapter.transformer == transformer), None)
    if entry is None:
        reason = REFUSED.get(transformer)
        if reason is None:
            raise ValueError(
                f"diffusers {diffusers.__version__} has {transformer}, of which adapters/models knows nothing: write "
                "an adapter, or say in adapters/models/unsupported.py why there is none."
            )
        return [transformer, listed, f"no: {reason}", *[""] * 4]
    cached = _largest_error(transformer, "cached") if entry.blocks is not None else "no"
    return [
        transformer,
        listed,
        _sharded(entry),
        _branches(entry),
        _largest_error(transformer, "errors"),
        cached,
        "no" if transformer in NO_WHOLE_GRAPH else "yes",
    ]


@cache
def _measured() -> dict[str, Any]:
    models: dict[str, Any] = read_results("model_errors")["models"]
    return models


def _largest_error(transformer: str, kind: str) -> str:
    """Return the largest error of all tiny models of a class, on all meshes."""
    errors = [error for row in _measured().values() if row["class"] == transformer for error in row[kind].values()]
    if not errors:
        raise ValueError(f"{transformer} was not measured: python -m benchmarks.pipelines.exactness models")
    return f"{max(errors):.0e}"


def _branches(adapter: Adapter) -> str:
    if adapter.transformer in _LISTS:
        return "one batch, on all ranks"
    if adapter.transformer in _ONE_A_BRANCH:
        return "sequential, two transformers"
    return "one batch" if adapter.plan is not None and adapter.plan.batched else "sequential"


def _sharded(adapter: Adapter) -> str:
    if adapter.plan is None:
        return "published plan"
    cuts = [*adapter.plan.inputs.values(), *[cut for cuts in adapter.plan.inner.values() for cut in cuts.values()]]
    names = sorted({cut.segment for cut in cuts if isinstance(cut, Split) and cut.segment is not None})
    return "all tokens" if names == ["tokens"] else ", ".join(names)


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/pipelines.md: the classes that run, with exceptions, and those that do not."""
    rows = [row(name) for name in transformer_classes()]
    run = [cells for cells in rows if not cells[2].startswith("no: ")]
    uncached, broken = ([cells[0] for cells in run if cells[column] == "no"] for column in (5, 6))
    errors = [max((cells[column] for cells in run if cells[column] != "no"), key=float) for column in (4, 5)]
    summary = [
        f"Of {len(rows)} classes in diffusers {diffusers.__version__}, {len(run)} run in parallel.",
        "",
        f"- Largest error of a class: {errors[0]}; with a cache, relative to one device with a cache: {errors[1]}.",
        f"- Not cached: {', '.join(uncached)}.",
        f"- No whole graph (`fullgraph=True`), nor has the unmodified model: {', '.join(broken)}.",
        "",
    ]
    table = markdown_table(["class", "pipelines", "sharded", "guidance"], [cells[:4] for cells in run])
    refused: dict[str, list[str]] = {}
    for cells in rows:
        if cells[2].startswith("no: "):
            refused.setdefault(cells[2].removeprefix("no: "), []).append(cells[0])
    reasons = [f"- {', '.join(names)}: {reason}" for reason, names in refused.items()]
    return {"supported": [*summary, *table], "unsupported": reasons}
