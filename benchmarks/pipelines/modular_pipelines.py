"""Every modular pipeline of diffusers on two ranks: exact, cached, and undone (docs/pipelines.md).

A check of `benchmarks.pipelines.exactness`: the blocks that denoise run three steps, and are compared with the
unmodified pipeline in the same process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness import largest_over_ranks, markdown_table, read_results, relative_error, true_on_all_ranks
from benchmarks.pipelines.latents import TWO_RANKS, device_meshes
from para_core import ForeignCodeWarning
from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, remove_cache_from_pipe, unparallelize_pipe
from para_core.adapters.denoisers import other_denoisers_of
from para_core.adapters.registry import transformers_of
from zoo.tiny.pipelines.modular import MODULAR, TinyModular

_LAYERS = (nn.Linear, nn.Conv2d, nn.Conv3d)
LIMIT = 1e-5
# A rank that computed the pipeline alone would have a share of 1. HunyuanVideo 1.5 replicates 729 tokens of an image.
LARGEST_SHARE = 0.98


def measure(names: list[str]) -> dict[str, Any]:
    """Return a row for each pipeline, of the worst rank."""
    meshes, rows = device_meshes(TWO_RANKS), {}
    for name in names:
        tiny = MODULAR[name]
        classes = [type(module).__name__ for module in denoisers(tiny.build())]
        cells = {x: _measure(tiny, mesh) for x, mesh in meshes.items() if tiny.guided or x != "2 batch"}
        rows[name] = {"transformers": list(dict.fromkeys(classes)), "meshes": cells}
    return rows


def denoisers(pipe: Any) -> list[nn.Module]:
    return list((transformers_of(pipe) or other_denoisers_of(pipe)).values())


def _measure(tiny: TinyModular, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the error, the share of the computation, and whether the cached and the undone pipeline give equal bits.

    ``cached`` is the reason if the pipeline cannot be cached. The share of a UNet is None, because its layers see
    global shapes.
    """
    pipe = tiny.build()
    before, total = counted(pipe, tiny.generate)
    parallelize_pipe(pipe, mesh=mesh)
    out, own = counted(pipe, tiny.generate)
    try:
        # With this threshold no step skips its blocks.
        apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
    except TypeError as error:
        cached: bool | str = str(error).split(": ", 3)[-1].split(". ")[0]
    else:
        cached = true_on_all_ranks(torch.equal(tiny.generate(pipe), out))
        remove_cache_from_pipe(pipe)
    unparallelize_pipe(pipe)
    return {
        "error": largest_over_ranks(relative_error(out, before)),
        "share": largest_over_ranks(own / total) if transformers_of(pipe) else None,
        "cached": cached,
        "undone": true_on_all_ranks(torch.equal(tiny.generate(pipe), before)),
    }


def counted(pipe: Any, generate: Callable[[Any], Tensor]) -> tuple[Tensor, int]:
    """Return the result of ``generate(pipe)``, and the number of elements that this rank passed to the layers of its
    denoisers.
    """
    elements = [0]

    def count(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args[0].is_meta:
            elements[0] += args[0].numel()

    layers = [layer for module in denoisers(pipe) for layer in module.modules() if isinstance(layer, _LAYERS)]
    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    with warnings.catch_warnings():
        # The hooks only count.
        warnings.simplefilter("ignore", ForeignCodeWarning)
        out = generate(pipe)
    for hook in hooks:
        hook.remove()
    return out, elements[0]


def problems(rows: dict[str, Any]) -> list[str]:
    """Return the results that are not as exact as the page says, one line each."""
    return [
        f"{name} on {mesh}: {cells}"
        for name, row in rows.items()
        for mesh, cells in row["meshes"].items()
        if cells["error"] > LIMIT or (cells["share"] or 0) > LARGEST_SHARE or not (cells["cached"] and cells["undone"])
    ]


# -- The table.


def row(names: list[str], pipelines: dict[str, Any]) -> list[str]:
    """Return the names, the largest error on any mesh, those that use ``batch``, and those that cannot be cached."""
    meshes = {name: pipelines[name]["meshes"] for name in names}
    error = max(cell["error"] for cells in meshes.values() for cell in cells.values())
    batch = [name for name in names if "2 batch" in meshes[name]]
    uncached = [name for name in names if any(cell["cached"] is not True for cell in meshes[name].values())]
    guided = "all" if batch == names else ", ".join(batch)
    return [", ".join(names), f"{error:.0e}", guided, f"not {', '.join(uncached)}" if uncached else "all"]


def parts() -> dict[str, list[str]]:
    """Return the table of docs/pipelines.md on modular pipelines, with a row for each set of transformers."""
    pipelines = read_results("modular")["pipelines"]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, cells in pipelines.items():
        groups.setdefault(tuple(cells["transformers"]), []).append(name)
    rows = [row(names, pipelines) for names in groups.values()]
    return {"modular": markdown_table(["pipelines", "error", "`batch`", "cached"], rows)}
