"""The classes of ComfyUI's `comfy/ldm` whose recorded plans are exact, on ComfyUI's own code.

    COMFYUI=path/to/ComfyUI python -m benchmarks.comfyui.classes
    COMFYUI=path/to/ComfyUI python -m benchmarks.comfyui.classes --propose --only Wan  # the source of a plan

Each class is a tiny random model. Its output on 2 and 3 ranks (threads), with a ring and with Ulysses, for one and for
two samples, is compared with its output without a plan.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import markdown_table, parser_of, read_results, write_results

# Sizes that propose_plan has not seen: other numbers of frames, one frame, odd heights and widths.
SIZES = ((3, 14, 10), (1, 6, 8), (2, 9, 11))
MESHES = ((1, 2), (2, 1), (1, 3), (3, 1))  # ring × Ulysses
EXACT = 1e-5


def import_comfyui(path: str) -> str:
    """Make ComfyUI at ``path`` importable, with the flags of the CPU, and return its version."""
    sys.path.insert(0, path)
    arguments, sys.argv[1:] = sys.argv[1:], ["--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.cli_args
    from comfyui_version import __version__

    sys.argv[1:] = arguments
    return str(__version__)


def doubled(value: Any, name: str = "") -> Any:
    """Return ``value`` for two samples, of which the second differs."""
    if isinstance(value, Tensor) and value.ndim and value.shape[0] == 1:
        other = value if name in ("timestep", "timesteps", "t") or not value.is_floating_point() else 0.5 * value
        return torch.cat([value, other])
    if isinstance(value, dict):
        return {key: doubled(entry, key) for key, entry in value.items()}
    if isinstance(value, list):
        return [doubled(entry, name) for entry in value]
    return value


def calls(inputs_of: Any, sizes: Any) -> Iterator[Any]:
    for size in sizes:
        yield inputs_of(size)
        yield doubled(dict(inputs_of(size)))


def error_of(model: nn.Module, recorded: Any, inputs_of: Any, sizes: Any) -> tuple[float, int]:
    """Return the largest relative error of the plan over the calls and meshes, and the number of samples compared."""
    from para_core.adapters.registry import plan_for
    from para_core.comparison.tensor_parts import largest_error
    from para_core.comparison.virtual_ranks import copy_containers, run_on_virtual_ranks

    plan, errors, samples = plan_for(model, adapter=recorded.adapter), [], 1
    for inputs in calls(inputs_of, sizes):
        try:
            expected = model(**copy_containers(inputs))
        except RuntimeError:
            if len(inputs["context"]) == 1:
                raise
            continue  # Some models take one sample only if they have a mask.
        samples = max(samples, len(inputs["context"]))
        prepared = recorded.prepare(model, inputs) if recorded.prepare else inputs
        for ring, ulysses in MESHES:
            outs = run_on_virtual_ranks(model, plan, prepared, ring=ring, ulysses=ulysses)
            errors += [largest_error(out, expected) for out in outs]
    return max(errors), samples


def row_of(case: Any, condition: str, inputs_of: Any) -> dict[str, Any]:
    """Return the row of one model, given ``condition``."""
    from comfyui_para_core.checks import require_checked
    from comfyui_para_core.cut import use_cut
    from comfyui_para_core.plans import find_plan

    model = case.build()
    recorded = find_plan(type(model))
    row = {"model": case.name, "class": case.cls, "condition": condition}
    if recorded is None:
        return {**row, "verdict": "not recorded", "why": "no plan"}
    if recorded.refused:
        return {**row, "verdict": "refused", "why": recorded.refused}
    use_cut(model)
    sizes = case.sizes or SIZES
    try:
        require_checked(recorded, model, inputs_of(sizes[0]))
    except ValueError as refusal:
        return {**row, "verdict": "refused", "why": str(refusal)}
    try:
        error, samples = error_of(model, recorded, inputs_of, sizes)
    except Exception as failure:
        return {**row, "verdict": "wrong", "why": f"{type(failure).__name__}: {failure}"}
    verdict = "exact" if error < EXACT else "wrong"
    row = {**row, "verdict": verdict, "error": error, "samples": samples, "why": ""}
    if condition or recorded.adapter.blocks is None:
        return row
    return {**row, "cache": cache_error(model, recorded.adapter.blocks, inputs_of(sizes[0]))}


def cache_error(model: nn.Module, blocks: Any, inputs: Any) -> float:
    """Return the error of calls that skip blocks. Raise RuntimeError if they fail, or are not exact."""
    from comfyui_para_core.rank_model import keep_inputs_of_blocks
    from para_core.comparison.cached_call import error_of_cached_call

    keep_inputs_of_blocks(model, blocks)
    return error_of_cached_call(model, blocks, inputs, EXACT)


def propose(case: Any) -> None:
    """Print what propose_plan finds for the class of ``case``, to be recorded in comfyui_para_core/plans."""
    from comfyui_para_core.cut import use_cut
    from para_core.adapters import propose_plan

    model = case.build()
    use_cut(model)
    print(propose_plan(model, tuple(case.inputs(size) for size in case.shown)))


def other_rows() -> list[dict[str, Any]]:
    """Return rows of the classes of ComfyUI's diffusion models that no case is for."""
    import comfy.model_base

    from benchmarks.comfyui.cases import CASES
    from comfyui_para_core.plans import PLANS

    shown = {case.cls for case in CASES}
    rows = [
        {"model": plan.models, "class": plan.cls, "condition": "", "verdict": "refused", "why": plan.refused}
        for plan in PLANS.values()
        if plan.refused and plan.cls not in shown
    ]
    source = inspect.getsource(comfy.model_base)
    names = {name.removeprefix("comfy.ldm.") for name in re.findall(r"unet_model=(comfy\.ldm\.[\w.]+)", source)}
    why = "no plan recorded; proposed on a small copy of the model when it is first used"
    return rows + [
        {"model": name.rpartition(".")[2], "class": name, "condition": "", "verdict": "not recorded", "why": why}
        for name in sorted(names - shown - {row["class"] for row in rows})
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="models whose name contains this text; writes no results")
    parser.add_argument("--propose", action="store_true", help="propose plans instead, as source")
    options = parser.parse_args()
    if "COMFYUI" not in os.environ:
        sys.exit(
            "COMFYUI is not set; expected the folder of ComfyUI: COMFYUI=path python -m benchmarks.comfyui.classes"
        )
    version = import_comfyui(os.environ["COMFYUI"])
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    from benchmarks.comfyui.cases import CASES

    rows = []
    for case in CASES:
        if options.only.lower() not in case.name.lower():
            continue
        if options.propose:
            propose(case)
            continue
        for condition, inputs_of in {"": case.inputs, **case.variants}.items():
            rows.append(row_of(case, condition, inputs_of))
            row = rows[-1]
            print(f"{row['verdict']:13} {case.name} {condition} {row.get('error', '')} {row['why'][:300]}", flush=True)
    if not options.only and not options.propose:
        rows += other_rows()
        write_results("comfyui", {"comfyui": version, "sizes": SIZES, "meshes": MESHES, "models": rows})


def parts() -> dict[str, list[str]]:
    """Return the table of docs/comfyui.md, one line for each model, and the classes without a recorded plan."""
    results = read_results("comfyui")
    by_model: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in results["models"]:
        by_model.setdefault((row["model"], row["class"]), []).append(row)
    lines = [_line(model, cls, rows) for (model, cls), rows in by_model.items() if rows[0]["verdict"] != "not recorded"]
    others = [f"`{cls}`" for (_, cls), rows in by_model.items() if rows[0]["verdict"] == "not recorded"]
    heads = ["model", "class of `comfy/ldm`", "2 and 3 ranks", "also with", "refused", "cache"]
    counts = [row["verdict"] for row in results["models"]]
    summary = (
        f"ComfyUI {results['comfyui']}: {counts.count('exact')} calls exact, {counts.count('refused')} refused, "
        f"{counts.count('wrong')} wrong. No plan is recorded for {', '.join(sorted(others))}."
    )
    return {"comfyui models": markdown_table(heads, lines), "comfyui others": [summary]}


def _line(model: str, cls: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the cells of a model, whose first row is its call without further conditions."""
    first, more = rows[0], rows[1:]
    verdict = first["why"] if first["verdict"] == "refused" else first["verdict"]
    named = {
        kind: "; ".join(row["condition"] for row in more if row["verdict"] == kind) for kind in ("exact", "refused")
    }
    return (
        model,
        f"`{cls}`",
        verdict,
        named["exact"],
        named["refused"],
        "yes" if first.get("cache", 1.0) < EXACT else "",
    )


if __name__ == "__main__":
    main()
