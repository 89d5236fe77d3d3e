"""The number of diffusers classes for which `propose_plan` finds the plan without help.

    python -m benchmarks.planner.propose

The search sees two calls of each tiny model of `zoo.tiny.transformers.registry`, and no adapter of `adapters/models/`.
The proposal is then checked again, at sizes and on meshes that the search has not seen.
"""

from __future__ import annotations

import time
import warnings
from itertools import product
from typing import Any

import torch
from torch import nn

from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from para_core.adapters.propose.proposal import Proposal
from para_core.adapters.propose.propose import propose_plan
from para_core.comparison.tensor_parts import largest_error
from para_core.comparison.virtual_ranks import run_on_virtual_ranks
from zoo.tiny.transformers.registry import MODELS

# The sizes are (frames, height, width) in latent pixels.
SHOWN = ((3, 6, 6), (3, 6, 10))
# The sizes have more tokens, odd numbers of tokens, and fewer tokens than ranks. The meshes are ring × ulysses.
UNSEEN, MESHES = ((3, 10, 10), (1, 6, 6), (1, 2, 2)), ((1, 3), (2, 2))
EXACT = 1e-5


def inputs_of(name: str, size: tuple[int, int, int]) -> dict[str, Any]:
    frames = size[0] * 2 if name == "cogvideox 1.5" else size[0]
    return MODELS[name].inputs(frames, *size[1:])


def error_unseen(name: str, module: nn.Module, proposal: Proposal) -> float:
    """Return the largest error at unseen sizes and meshes, also with replicated text if text is sharded."""
    errors = []
    assert proposal.plan is not None
    plans = [proposal.plan] + ([proposal.plan.with_replicated("text")] if proposal.plan.splits("text") else [])
    for size in UNSEEN:
        with torch.no_grad():
            expected = module(**inputs_of(name, size))
        for plan, (ring, ulysses) in product(plans, MESHES):
            outs = run_on_virtual_ranks(module, plan, inputs_of(name, size), ring=ring, ulysses=ulysses)
            errors += [largest_error(out, expected) for out in outs]
    return max(errors)


def score(name: str) -> dict[str, Any]:
    """Return the row of one model, with the verdict ``found``, ``asked`` or ``wrong``."""
    module, began = MODELS[name].build(), time.perf_counter()
    row: dict[str, Any] = {"model": name, "class": MODELS[name].cls}
    try:
        small, large = (inputs_of(name, size) for size in SHOWN)
        proposal = propose_plan(module, (small, large))
    except (ValueError, TypeError) as error:
        return {**row, "verdict": "asked", "why": str(error)}
    row["seconds"] = round(time.perf_counter() - began, 1)
    if proposal.plan is None:
        return {**row, "verdict": "asked", "why": " ".join(proposal.questions)}
    try:
        error = error_unseen(name, module, proposal)
    except Exception as failure:
        return {**row, "verdict": "wrong", "why": f"{type(failure).__name__}: {failure}"}
    blocks = proposal.blocks
    named = sorted({*blocks.uncached, *[x for group in blocks.groups for x in group.between]}) if blocks else []
    return {
        **row,
        "verdict": "found" if error < EXACT else "wrong",
        "error": error,
        "blocks": blocks is not None,
        "text": proposal.plan.splits("text"),
        "named": named,
        "why": " ".join(proposal.questions),
    }


def main() -> None:
    parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    # Mochi asks for an autocast that the CPU does not have.
    warnings.filterwarnings("ignore", message="In CPU autocast")
    rows = []
    for name in MODELS:
        rows.append(score(name))
        print(
            f"{rows[-1]['verdict']:8} {name:45} {rows[-1].get('error', '')} {rows[-1].get('blocks', '')} "
            f"{rows[-1]['why'][:150]}",
            flush=True,
        )
    counts = {verdict: classes_of(rows, verdict) for verdict in ("found", "asked", "wrong")}
    print(", ".join(f"{verdict}: {len(classes)} classes" for verdict, classes in counts.items()))
    write_results("propose", {"shown": SHOWN, "unseen": UNSEEN, "meshes": MESHES, "models": rows}, "diffusers")


def classes_of(rows: list[dict[str, Any]], verdict: str) -> list[str]:
    """Return the classes with a model of this verdict."""
    return sorted({row["class"] for row in rows if row["verdict"] == verdict})


def parts() -> dict[str, list[str]]:
    """Return the table of docs/new_model.md. The JSON has the verdict of each model."""
    rows = read_results("propose")["models"]
    proposed, wrong = classes_of(rows, "found"), classes_of(rows, "wrong")
    exact = [row for row in rows if row["verdict"] == "found"]
    cached, text, named = (len({row["class"] for row in exact if row[kind]}) for kind in ("blocks", "text", "named"))
    rest = sorted({row["class"] for row in rows} - {*proposed})
    lines = [
        ("a plan, exact at sizes and on meshes that the search had not seen", len(proposed), ""),
        ("of these, with the block stack", cached, ""),
        ("of these, with text that may be sharded", text, ""),
        ("of these, with `between` or `uncached`", named, ""),
        ("no plan, and a question", len(rest), ", ".join(rest)),
        ("a wrong plan", len(wrong), ", ".join(wrong)),
    ]
    return {"proposals": markdown_table(["", "classes", ""], lines)}


if __name__ == "__main__":
    main()
