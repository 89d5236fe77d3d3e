"""Write the tables of all pages between their markers, from the JSON of benchmarks/results and from setup.py.

    python -m benchmarks.pages [PAGE ...]

Measures nothing. A part of a page is between ``<!-- name -->`` and ``<!-- end of name -->``. tests/test_pages.py
compares each page with the output of this program.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from unittest import mock

from benchmarks import one_process, option_tables, refusals, reports, simulated_gpu
from benchmarks.attention import low_precision
from benchmarks.cache import forecasts, quality
from benchmarks.comfyui import classes as comfyui
from benchmarks.demo import gallery
from benchmarks.faults import cells as faults
from benchmarks.harness import ROOT, fill, markdown_table, parser_of
from benchmarks.peers import page as peers
from benchmarks.pipelines import (
    autoencoders,
    beside_diffusers,
    latents,
    lossy,
    modular_pipelines,
    same_bits,
    same_bits_cost,
    stages,
    supported,
    vae,
    weights,
)
from benchmarks.planner import memory, propose, published, sizes, traffic
from benchmarks.serving import load, trials


def extras() -> dict[str, list[str]]:
    """Return the table of docs/install.md: the extras of setup.py, with the packages of an extra inside another."""
    with mock.patch("setuptools.setup") as setup:
        groups: dict[str, tuple[list[str], str]] = runpy.run_path(str(ROOT / "setup.py"))["EXTRAS"]
    always = ", ".join(map(_requirement, setup.call_args.kwargs["install_requires"]))
    rows = [["none", always, "`UnifiedAttnMode`, `init_context_parallel_mesh`, the planner"]]
    for name, (packages, purpose) in groups.items():
        if name != "test":
            rows.append([f"`{name}`", ", ".join(map(_requirement, packages)), purpose])
    return {"extras": markdown_table(["extra", "brings", "for"], rows)}


def _requirement(text: str) -> str:
    own = re.fullmatch(r"para_core\[(.+)\]", text)
    return f"all of `{own[1]}`" if own else re.sub(r"\[.*\]", "", text).replace(">=", " ≥ ")


# A page has the parts of these programs. A program may have parts of several pages.
PAGES: dict[str, tuple[Callable[[], dict[str, list[str]]], ...]] = {
    "README.md": (peers.parts, beside_diffusers.parts),
    "docs/cache.md": (option_tables.cache_parts, forecasts.parts),
    "docs/comfyui.md": (comfyui.parts,),
    "docs/command.md": (memory.encode_first_parts,),
    "docs/install.md": (extras,),
    "docs/kernels.md": (low_precision.parts,),
    "docs/new_model.md": (propose.parts,),
    "docs/one_process.md": (one_process.parts,),
    "docs/same_bits.md": (same_bits.parts, same_bits_cost.parts),
    "docs/own_model.md": (low_precision.parts,),
    "docs/pipelines.md": (option_tables.pipeline_parts, supported.parts, modular_pipelines.parts),
    "docs/planner.md": (published.parts, memory.parts),
    "docs/refusals.md": (refusals.parts,),
    "docs/serving.md": (load.parts, trials.parts),
    "docs/stages.md": (stages.parts, lossy.parts),
    "docs/vae.md": (autoencoders.parts, vae.parts),
    "docs/weights.md": (sizes.parts, weights.parts, lossy.parts),
    "docs/which_option.md": (sizes.parts,),
    "docs/measured/cache_quality.md": (quality.parts, forecasts.parts, lossy.parts, gallery.parts),
    "docs/measured/exactness.md": (latents.parts, traffic.parts),
    "docs/measured/faults.md": (faults.parts,),
    "docs/measured/peers.md": (peers.parts, beside_diffusers.parts),
    "docs/measured/reports.md": (reports.parts,),
    "docs/measured/simulated_gpu.md": (simulated_gpu.parts,),
    "zoo/video/README.md": (lossy.parts,),
}


def render(page: str) -> str:
    """Return the text of ``page`` with each of its parts written again.

    Raises:
        ValueError: the page has a part that none of its programs writes.
    """
    text = (ROOT / page).read_text()
    parts = {name: lines for program in PAGES[page] for name, lines in program().items()}
    markers = re.findall(r"^<!-- (?!end of )(.+) -->$", text, re.MULTILINE)
    unknown = {*markers} - {*parts}
    if unknown:
        raise ValueError(f"{page} has the parts {sorted(unknown)}; expected some of {sorted(parts)}.")
    return fill(text, {name: parts[name] for name in markers})


def main() -> None:
    """Write pages."""
    parser = parser_of(__doc__)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"default: all of {', '.join(PAGES)}")
    for page in parser.parse_args().pages or PAGES:
        (ROOT / page).write_text(render(page))


if __name__ == "__main__":
    main()
