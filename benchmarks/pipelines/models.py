"""How far each tiny transformer on two ranks is from the unmodified one on one device, and each cached one from the same cached alone.

    python -m benchmarks.pipelines.models

Models of `zoo.tiny.transformers.registry`, every parameter random, float32, an odd number of tokens. Error: relative norm of what the model
returns; the worst rank's. On a mesh along ``batch`` where the plan shares samples. Cached: two calls, of which the second is given
slightly other inputs and takes the stored residuals. Writes benchmarks/results/model_errors.json, from which
`python -m benchmarks.pipelines.supported` has its errors.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm import tqdm

from benchmarks.environment import RESULTS, write_results
from benchmarks.launch import measured_on_ranks, write_part
from benchmarks.pipelines.generation import relative_error, worst
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


def measure(name: str) -> dict[str, Any]:
    """Errors of one model, of the worst rank."""
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
        errors[label] = worst(relative_error(run(model, inputs), expected))
        if expected_cached is not None:
            out, hits_here = run_cached(model, inputs)
            if hits_here != hits:
                raise RuntimeError(f"{name} on {label}: {hits_here} calls took stored residuals, alone {hits}.")
            cached[label] = worst(relative_error(out, expected_cached))
        unparallelize_transformer(model)
    return {"class": MODELS[name].cls, "errors": errors, "cached": cached, "hits": hits}


def measure_all(names: Iterable[str]) -> dict[str, Any]:
    """Measure each of ``names``."""
    return {name: measure(name) for name in tqdm(names, disable=dist.get_rank() != 0)}


def main() -> None:
    """Start two ranks, collect, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=Path, help="(of the ranks themselves) where their figures go")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="measure these, and keep the other rows of the file")
    args = parser.parse_args()
    if args.part is not None:
        write_part(args.part, partial(measure_all, args.only or list(MODELS)))
        return
    rows = measured_on_ranks("benchmarks.pipelines.models", 2, *(["--only", *args.only] if args.only else []))
    if args.only:
        before = json.loads((RESULTS / "model_errors.json").read_text())["models"]
        rows = {name: rows.get(name, before.get(name)) for name in MODELS if name in rows or name in before}
    write_results("model_errors", {"models": rows}, "diffusers")
    print(
        f"{len(rows)} models; the largest error is {max(max(row['errors'].values()) for row in rows.values()):.1e}, cached "
        f"{max(max(row['cached'].values(), default=0.0) for row in rows.values()):.1e}."
    )


if __name__ == "__main__":
    main()
