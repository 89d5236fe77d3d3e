"""Tables of pages equal the JSON that a program of benchmarks/ wrote: each page is written again, and compared.

Measures nothing. docs/pipelines.md is in tests/test_supported_table.py.
"""

import json
import re
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.attention import compiled as kernel_resources
from benchmarks.attention import eight_bits
from benchmarks.attention import low_precision as int8_attention
from benchmarks.cache import forecasts as cache_forecasts
from benchmarks.cache import page as cache_quality
from benchmarks.demo import gallery
from benchmarks.faults import links as nodes
from benchmarks.faults import page as faults
from benchmarks.outside_models.table import table as outside_models
from benchmarks.page_parts import fill
from benchmarks.peers import page as peers
from benchmarks.pipelines import beside_diffusers, hooks, stages
from benchmarks.pipelines import generation as pipelines
from benchmarks.pipelines import pipefusion as pipefusion_quality
from benchmarks.pipelines import vae as vae_beside
from benchmarks.pipelines import vaes as vae_table
from benchmarks.pipelines import weights as weights_table
from benchmarks.planner import machines, propose
from benchmarks.planner import published as planner_check
from benchmarks.planner import traffic as real_sizes
from benchmarks.planner import weights as weights_memory
from benchmarks.serving import trials as fleet_trials

ROOT = Path(__file__).parents[1]


def result(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def written(module, monkeypatch, tmp_path, text, *arguments):
    """What ``module.write_page`` makes of its page."""
    path = tmp_path / "page.md"
    path.write_text(text)
    monkeypatch.setattr(module, "PAGE", path)
    module.write_page(*arguments)
    return path.read_text()


def parts_of_stages():
    found = result("stages")
    return {
        "exactness": stages.exactness_table(found["by ranks"]),
        "held": stages.held_table(found["by ranks"]),
        "times": stages.time_table(found["fused, 2 ranks"], 2),
        **{name: pipefusion_quality.table(result("pipefusion_quality")[name]) for name in ("images", "videos")},
        "sent": stages.paper_table(),
    }


def parts_of_weights():
    # The keys of JSON are text.
    gigabytes = {
        model: {
            **row,
            **{
                kind: {method: {int(ranks): x for ranks, x in cells.items()} for method, cells in row[kind].items()}
                for kind in ("held", "received per step")
            },
        }
        for model, row in result("weights_memory")["gigabytes"].items()
    }
    by_ranks = {int(ranks): rows for ranks, rows in result("weights_table")["by ranks"].items()}
    return {
        "held": weights_memory.held_table(gigabytes),
        "sent": weights_memory.sent_table(gigabytes),
        "exactness": weights_table.exactness_table(by_ranks),
        "bytes": weights_table.bytes_table(by_ranks),
    }


def parts_of_vae():
    return {
        **vae_table.tables(result("vae_table")["ranks"]),
        "vae beside": vae_beside.table(result("vae_beside")),
    }


def parts_of_planner():
    found = result("planner_check")
    tables = []
    for table in planner_check.TABLES:
        rows = [row for row in found["rows"] if row["table"] == table.name]
        checked = [
            planner_check.Checked(table, shape, row["published"], row["predicted"], None)
            for (shape, _), row in zip(table.rows, rows, strict=True)
        ]
        tables.append((table, found["fits"][table.name]["slowdown"], checked))
    return {
        "summary": planner_check.summary([row for *_, checked in tables for row in checked]),
        "published": planner_check.page(tables),
        "lacking": planner_check.lacking(tables),
        "sources": planner_check.sources(),
        "plans": planner_check.plans(),
    }


# From the text of a page to what its program would make of it now.
WRITERS = {
    "README.md": readme.render,
    "docs/any_model.md": lambda text: fill(text, {"outside": outside_models(result("outside_models")["rows"])}),
    "docs/attention_kernel.md": lambda text: fill(
        text, {"int8": int8_attention.table(result("int8_attention")["rows"])}
    ),
    "docs/beside_diffusers.md": lambda text: beside_diffusers.page(result("beside_diffusers")),
    "docs/cache.md": lambda text: cache_forecasts.render(text, result("cache_forecasts")),
    "docs/cache_quality.md": lambda text: cache_quality.render(text, result("cache_quality")),
    "docs/gallery.md": lambda text: gallery.render(text, result("gallery")),
    "docs/kernels.md": lambda text: fill(
        text, {"registers": kernel_resources.table(result("kernel_resources")["launches"])}
    ),
    "docs/memory.md": lambda text: machines.render_memory(text, result("machines")),
    "docs/new_model.md": lambda text: fill(text, {"proposals": propose.table(result("propose")["models"])}),
    "docs/own_model.md": lambda text: fill(text, {"eight_bits": eight_bits.table(result("eight_bits")["rows"])}),
    "docs/peers.md": lambda text: peers.render(text, result("peers")),
    "docs/planner.md": lambda text: fill(text, parts_of_planner()),
    "docs/several_nodes.md": lambda text: fill(text, {"links": nodes.table(result("nodes")["rows"])}),
    "docs/serving.md": lambda text: fill(text, {"fleet_trials": fleet_trials.table(result("fleet_trials"))}),
    "docs/stages.md": lambda text: fill(text, parts_of_stages()),
    "docs/traffic.md": lambda text: real_sizes.page(
        result("real_sizes")["gigabytes per step"], result("pipelines")["pipelines"]
    ),
    "docs/vae.md": lambda text: fill(text, parts_of_vae()),
    "docs/weights.md": lambda text: fill(text, parts_of_weights()),
    "docs/which_option.md": lambda text: machines.render_option(text, result("machines")),
}
# Those that write their page themselves.
PAGE_WRITERS = {
    "docs/exactness.md": (pipelines, list),
    "docs/faults.md": (faults, lambda: [result("faults")]),
    "docs/hooks.md": (hooks, lambda: [result("hooks")["hooks"]]),
}


@pytest.mark.parametrize("page", [*WRITERS, *PAGE_WRITERS])
def test_a_page_says_what_its_results_say(page, monkeypatch, tmp_path):
    text = (ROOT / page).read_text()
    if page in WRITERS:
        again = WRITERS[page](text)
    else:
        module, arguments = PAGE_WRITERS[page]
        again = written(module, monkeypatch, tmp_path, text, *arguments())
    assert again == text, "figures and results differ: run the program that the page names"


@pytest.mark.long
def test_the_planner_predicts_what_its_results_say():
    for table in planner_check.TABLES:
        slowdown, checked = planner_check.check(table, planner_check.workload(table.model, **dict(table.sizes)))
        assert slowdown == pytest.approx(result("planner_check")["fits"][table.name]["slowdown"])
        said = [row["predicted"] for row in result("planner_check")["rows"] if row["table"] == table.name]
        assert [row.predicted for row in checked] == pytest.approx(said)


def test_the_readme_of_the_tiny_flux_says_what_was_measured():
    lines = (ROOT / "zoo/flux/README.md").read_text().splitlines()
    cells = {line.split("|")[1].strip(" *"): line.split("|")[2:-1] for line in lines if line.startswith("|")}

    def figures(row):
        return [float(cell.strip(" %")) for cell in cells[row] if "%" in cell]

    for things in (1, 2, 3):
        found = result("tiny_flux")["held_out"][f"things_{things}"]
        names = ("colour", "shape", "place", "size", "count", "background", "all", "ceiling_all")
        assert figures(str(things)) == pytest.approx([100 * found[name] for name in names], abs=0.06)


def figures_of_attention():
    """Return the figures of each row of the two tables in docs/how_it_works.md that no program writes."""
    rings = [
        [
            figure
            for direction in ("forward", "both")
            for figure in (
                f"{row[f'{direction} bytes'] / 1e6:.1f}",
                str(row[f"{direction} collectives"]),
                f"{row[f'{direction} s']:.2f}",
            )
        ]
        for row in result("attention_2d")["4 ranks"].values()
    ]
    calls = {(row["method"], row["world"]): row for row in result("far_worlds")["calls"]}
    methods = [
        [f"{calls[method, world][f'{what}, functions']:,}" for what in ("plan", "call") for world in (8, 64, 512)]
        for method in dict.fromkeys(method for method, _ in calls)
    ]
    return [*rings, *methods]


def figures_of_tiny_video():
    held_out = result("tiny_video")["held_out"]
    names = ("colour", "shape", "direction", "steady", "one", "background", "all")
    rows = [
        [f"{100 * held_out[key][name]:.0f}" for name in names]
        for key in ("guidance_2.0", "guidance_1.0", "true_videos_through_vae")
    ]
    for row in result("tiny_video_caches")["rows"]:
        psnr = [f"{row['psnr']:.1f}", f"{row['least psnr']:.1f}"] if "psnr" in row else []
        shares = [f"{100 * row[name]:.0f}" for name in ("colour", "shape", "direction", "all")]
        rows.append([f"{row['computed steps']:.1f}", "20", *psnr, *shares])
    return rows


@pytest.mark.parametrize(
    ("page", "rows"),
    [("docs/how_it_works.md", figures_of_attention), ("zoo/video/README.md", figures_of_tiny_video)],
)
def test_rows_written_by_hand_equal_the_results(page, rows):
    tables = [line.split("|", 2)[2] for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    figures = [re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", cells) for cells in tables]
    assert rows()
    for row in rows():
        assert row in figures
