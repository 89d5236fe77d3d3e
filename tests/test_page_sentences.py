"""Figures in sentences, and in tables that no program writes: each is said anew from the JSON, or from its formula, and looked for on its page.

Generated tables are in tests/test_pages.py. A figure with a unit in a sentence is one of these here, or one that is no measurement (CONSTANTS).
"""

import json
import re
from pathlib import Path

import pytest

from benchmarks.eight_bits import OUTLIER
from para_core.planner.hardware import DEVICES

ROOT = Path(__file__).parents[1]
PART = re.compile(r"<!-- ([^>]+?) -->\n.*?<!-- end of \1 -->", re.DOTALL)
CODE = re.compile(r"^```.*?^```|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"(?:[-+]?\d[\d.,]*(?: to )?)+ ?(?:dB|ms|µs|s|%|MB|GB|kB|times|minutes)(?!\w)|\d+\.\d+ ×")


def result(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def text_of(page):
    return " ".join((ROOT / page).read_text().split())


def cache():
    found = result("cache_forecasts")
    hits = {row["name"]: row["cost of a hit"] for row in found["rules"]["rows"] if "name" in row}
    by_share = {
        row["threshold"]: row["psnr beside first_block"][0]
        for row in found["rules"]["rows"]
        if row.get("at equal") == "share of 57 blocks"
    }
    own = {
        row["wanted"]: row["psnr beside the first"]
        for row in found["decisions"]["rows"]
        if row["name"].endswith("forecast of its residual")
    }
    few = {(row["of"], row["name"]): row["psnr beside the first"][0] for row in found["few"]["rows"]}
    foca = [row["psnr beside the first"][0] for row in found["forecasts"]["rows"] if row["name"] == "FoCa"]
    skipped = [few[8, f"steps {steps}, order 1"] for steps in ("[0, 1, 3, 5, 7]", "[0, 2, 4, 6]", "[0, 3, 6]")]
    last = [
        few[of, f"steps {steps}, order {order}"]
        for of, steps in ((4, "[0, 1, 2]"), (8, "[0, 1, 2, 3, 4, 5, 6]"))
        for order in (0, 1)
    ]
    images = [row["psnr"] for row in result("cache_images")["rows"]]
    cost = result("cache_cost")
    return [
        "PSNR {:.1f}, {:.1f}, {:.1f} and {:.1f} dB against the image without the cache".format(*images),
        f"takes {hits['first_block']:.2f} of a computed one with `first_block` and {hits['modulated_input']:.2f} with `modulated_input`",
        f"the rule is ahead by {by_share[0.075]:.0f} dB at 12 computed steps",
        "was behind `first_block` at 8 computed steps ({:.1f} ± {:.1f} dB)".format(*own[8]),
        f"It is ahead of order 1, by {min(foca):.0f} to {max(foca):.0f} dB",
        f"better than 3 to 5 steps do, by {min(skipped):.0f} to {max(skipped):.0f} dB",
        f"is worse than one step less, by {-max(last):.0f} to {-min(last):.0f} dB",
        (f"a hit takes {cost['eager']['skipped / block 0 alone']:.2f} × of what the same model with its first block alone takes, "
        f"compiled {cost['compiled']['skipped / block 0 alone']:.2f} ×"),
        *[f"a computed step takes {cost[way]['computed / without']:.2f} × of one without the cache in both" for way in ("eager", "compiled")],
    ]  # fmt: skip


def cache_quality():
    found = {(row["steps"], row["cache"], row["setting"]): row for row in result("cache_quality")["quality"]}

    def beside(steps, name, setting, baseline="forecast"):
        mean, error = found[steps, name, setting][f"psnr beside {baseline}"]
        return f"{mean:+.1f} ± {error:.1f}"

    ours, low = "para_core first_block", "no cache, text encoders and transformer in bfloat16"
    taylor = "cache-dit DBCache F1B0 + TaylorSeer, order 1, max_warmup_steps=4"
    warm = f"{ours}, forecast_order=1, warmup_steps=4"
    ahead = {
        steps: [
            row["psnr beside first_block"][0]
            for key, row in found.items()
            if key[:2] == (steps, f"{ours}, forecast_order=1")
        ]
        for steps in (28, 50)
    }
    right = [row["right"] for key, row in found.items() if not key[1].startswith("no cache")]
    verdicts = [row["as without"] for key, row in found.items() if not key[1].startswith("no cache")]
    sea = "diffusers SeaCache, order 1"
    return [
        f"is {max(ahead[28]):.0f} to {min(ahead[28]):.0f} dB ahead of none at 12 to 4 of 28 computed steps, and {max(ahead[50]):.0f} to {min(ahead[50]):.0f} at 13 to 6 of 50",
        (f"bfloat16 is {found[28, low, '']['psnr']:.1f} and {found[50, low, '']['psnr']:.1f} dB from float32; the forecast at 12 of 28 steps "
        f"{found[28, f'{ours}, forecast_order=1', 'threshold 0.08']['psnr']:.1f}"),
        f"order 2 is level at 9 of 28 ({beside(28, f'{ours}, forecast_order=2', 'threshold 0.12')}) and a little behind at 6 ({beside(28, f'{ours}, forecast_order=2', 'threshold 0.2')})",
        f"Hermite polynomials are behind ({beside(28, f'{ours}, hermite 1, sigma 0.5', 'threshold 0.12')}, {beside(28, f'{ours}, hermite 1, sigma 0.5', 'threshold 0.2')})",
        f"FoCa is ahead ({beside(28, f'{ours}, foca', 'threshold 0.12')}, {beside(28, f'{ours}, foca', 'threshold 0.2')})",
        f"better spent later ({beside(28, warm, 'threshold 0.12')} at 11, {beside(28, warm, 'threshold 0.2')} at 8.5)",
        f"is behind as well ({beside(28, taylor, 'threshold 0.12')}, {beside(28, taylor, 'threshold 0.2')}; at 50 steps {beside(50, taylor, 'threshold 0.12')})",
        f"ahead at 12 of 50 ({beside(50, 'para_core modulated_input', 'threshold 0.09')})",
        f"para_core's ({beside(28, f'{sea}, at most 2 in a row', 'threshold 0.5')}), without that limit behind ({beside(28, sea, 'threshold 0.5')})",
        f"behind at every 3rd of 28 ({beside(28, 'diffusers TaylorSeer, lite, order 1', 'every 3 steps')})",
        (f"without a forecast as well ({beside(28, 'EasyCache (written here), 3 steps of warm-up', 'threshold 0.05', 'first_block')}, "
        f"{beside(28, 'diffusers MagCache', 'threshold 0.24, at most 5 in a row', 'first_block')})"),
        f"*All right* is {100 * min(right):.1f} to {100 * max(right):.1f} % in all rows, without a cache {100 * found[28, 'no cache', '']['right']:.1f} %",
        f"that of the image without a cache in {100 * min(verdicts):.0f} to {100 * max(verdicts):.0f} %",
    ]  # fmt: skip


def how_it_works():
    host, overlap = result("host_cost")["after"], result("overlap")["calls"]
    call = {name: row["ratio of the lowest"] for name, row in host["one call on a fake group of 8"].items()}
    step = {
        name: row["ratio of the lowest"]
        for name, row in host["FLUX of 57 blocks, 8 heads of 8, 16 tokens per rank, on a fake group of 8"].items()
    }
    everything = step["unmodified, the tokens of all ranks"]
    launches = {name: row["launches"] for name, row in host["launches of one call"].items()}
    far, d2 = result("far_worlds"), result("attention_2d")["4 ranks"]
    traces = [row["trace s"] for row in far["traces"]]
    counted = {(row["method"], row["world"]): row for row in far["calls"]}
    methods = {"ring × 8": "ring × 8 Ulysses", "ring × 8, 2-D": "ring × 8 Ulysses, 2-D"}
    rings = {"2-D, 2 × 2": "ring, 2-D"}
    masks = {"is_causal, balanced cut": "is_causal, balanced sharding"}
    early = result("early_ulysses")["on paper"]
    return [
        (f"One call is {launches['ulysses 8']} launches with Ulysses on any number of ranks (on CPUs {launches['ulysses 8, uneven tokens and heads']} where heads do not "
        f"divide), {launches['ring 8']} on a ring of 8 (on CUDA {launches['ring 8, CUDA']};"),
        (f"A call takes {call['ulysses, eager']:.2f} times the host's time of Ulysses written by hand on 8 ranks, {call['ring, eager']:.2f} times that of a ring; "
        f"in a graph {call['ulysses, compiled']:.2f} and {call['ring, compiled']:.2f} times"),
        (f"{step['ulysses']:.2f} times that of the unmodified model on a rank's tokens (by hand {step['ulysses, by hand']:.2f}), on a ring {step['ring']:.2f} times "
        f"(by hand {step['ring, by hand']:.2f}); against the unmodified model on the tokens of all ranks {step['ulysses'] / everything:.2f} and "
        f"{step['ring'] / everything:.2f} times"),
        (f"{100 * overlap['ring']['overlapped']:.1f} % of the time is hidden behind attention at 4,096 tokens; of Ulysses in four chunks, "
        f"{100 * overlap['ulysses, 4 chunks']['overlapped']:.0f} %"),
        f"is traced for 8, 64 and 512 ranks in {min(traces):.1f} to {max(traces):.1f} s",
        f"Over PCIe between two H100 {100 * next(row['gained'] for row in early if (row['link'], row['ranks']) == ('pcie5', 2)):.1f} % would be left",
        *[
            f"| {rings.get(name, name)} | {row['forward bytes'] / 1e6:.1f} | {row['forward collectives']} | {row['forward s']:.2f} | "
            f"{row['both bytes'] / 1e6:.1f} | {row['both collectives']} | {row['both s']:.2f} |"
            for name, row in d2.items()
        ],
        *[
            f"| {methods.get(name, name)} | "
            + " | ".join(f"{counted[name, world][f'{what}, functions']:,}" for what in ("plan", "call") for world in (8, 64, 512))
            + " |"
            for name in dict.fromkeys(row["method"] for row in far["calls"])
        ],
        *[
            f"| {masks.get(row['input'], row['input'])} | {row['1 rank']['ms']:.0f} | {row['ring']['ms']:.0f}, {row['ring']['speed-up']:.2f} × | "
            f"{row['ulysses']['ms']:.0f}, {row['ulysses']['speed-up']:.2f} × | {row['ring']['against no mask']:.2f}, "
            f"{row['ulysses']['against no mask']:.2f} ({row['1 rank']['against no mask']:.2f}) |"
            for row in result("mask_speed")["rows"]
        ],
    ]  # fmt: skip


def eight_bits():
    return [
        f"one of the keys' is {OUTLIER:.0f} times as large",
        *[
            f"Both send {row[name]['bytes'] / row['bfloat16']['bytes']:.3f} of bfloat16's bytes"
            for row in result("eight_bits")["rows"]
            for name in ("int8", "float8_e4m3fn")
        ],
    ]


def vae():
    found = result("vae_speed")
    return [
        f"{found['alone']:.2f} s alone, {found['parallel']:.2f} s on two ranks of one thread, {found['speedup']:.2f} times as fast"
    ]


def weights():
    flux2 = result("weights_memory")["gigabytes"]["FLUX.2 [dev], 1024 × 1024"]
    held = flux2["held"]["fsdp"]["8"]
    encoder = 2 * flux2["text encoder, billions"] / 8
    return [f"FLUX.2 on 8 × 24 GB then holds {held - encoder:.0f} GB beside its activations instead of {held:.0f}"]


def attention_kernel():
    """By formula: tiles of keys and values, and the backward of a ring block, on a H200's datasheet."""
    heads, head_dim, device = 24, 128, DEVICES["H200"]
    lines = []
    for queries in (1152, 16384):
        products, moved = 5 * 2 * queries**2 * head_dim * heads, 2 * 3 * queries * heads * head_dim * 2
        seconds, copying = products / device.products, moved / device.bandwidth
        lines.append((queries, products, seconds, moved, copying))
    small, large = lines
    table = [
        f"| {small[1] / 1e9:.0f} GFLOP, {1e6 * small[2]:.0f} µs | {small[3] / 1e6:.0f} MB, {1e6 * small[4]:.0f} µs, and 3 launches | {100 * small[4] / small[2]:.0f} % |",
        f"| {large[1] / 1e12:.1f} TFLOP, {1e3 * large[2]:.1f} ms | {large[3] / 1e6:.0f} MB, {1e6 * large[4]:.0f} µs, and 3 launches | {100 * large[4] / large[2]:.1f} % |",
    ]
    for name, size, keys in (("0", 0, 64), ("1/8", 1 / 8, 64), ("1", 1, 32), ("2", 2, 64)):
        loaded = 2 * keys * head_dim * 2 + 128 * keys * size
        table.append(
            f"| {name} | 128 × {keys} | {4 * head_dim * 128 * keys / loaded:.0f} | {2 * loaded / 1024:.0f} KiB |"
        )
    compiled = {(row["kernel"], row["device"], row["D"]): row for row in result("attention_roofline")["rows"]}
    tier, portable = ([compiled[name, "H200", dim] for dim in (128, 256)] for name in ("triton, Hopper tier", "triton"))
    assert not tier[1]["spilled bytes"]
    return [
        *table,
        f"7 instead of 5, {100 * (7 / 5 - 1):.0f} % more",
        f"({tier[0]['registers']} instead of {portable[0]['registers']} in D = 128; {tier[1]['registers']} and no spill in D = 256)",
        f"Each byte loaded once, it is {portable[0]['flops per byte, each loaded once']:,.0f}, far above on all",
    ]


def readme():
    classes, runs = re.search(
        r"Of (\d+) classes in diffusers \S+, (\d+) run in parallel", (ROOT / "docs/pipelines.md").read_text()
    ).groups()
    inputs = len(result("peers")["cells"]["para_core"])
    return [
        f"Run FLUX, HunyuanVideo, Wan and {int(runs) - 3} more diffusion transformers",
        f"{runs} of the {classes} transformer classes of diffusers",
        f"One attention call each: {inputs} inputs",
        f"median of {('', 'one', 'two', 'three', 'four', 'five', 'six', 'seven')[result('parallel_speed')['settings']['rounds']]}",
    ]  # fmt: skip


def tiny_video():
    held, caches = result("tiny_video")["held_out"], result("tiny_video_caches")["rows"]
    names = ("colour", "shape", "direction", "steady", "one", "background", "all")
    said = {
        "guidance 2": "guidance_2.0",
        "without guidance": "guidance_1.0",
        "true videos through the VAE": "true_videos_through_vae",
    }
    lines = [
        f"| {name} | " + " | ".join(f"{100 * held[key][x]:.0f} %" for x in names) + " |" for name, key in said.items()
    ]
    for row in caches:
        shares = " | ".join(f"{100 * row[name]:.0f} %" for name in ("colour", "shape", "direction", "all"))
        far = f"{row['psnr']:.1f} ({row['least psnr']:.1f})" if "psnr" in row else ""
        lines.append(f"| {row['computed steps']:.1f} of 20 | {far} | {shares} |".replace("|  |", "| |"))
    return lines


SAID = {
    "README.md": readme,
    "docs/attention_kernel.md": attention_kernel,
    "docs/cache.md": cache,
    "docs/cache_quality.md": cache_quality,
    "docs/how_it_works.md": how_it_works,
    "docs/own_model.md": eight_bits,
    "docs/vae.md": vae,
    "docs/weights.md": weights,
    "benchmarks/tiny_video/README.md": tiny_video,
}

# Figures with a unit that nobody measures: settings, assumptions, what a sentence says of others with their source, or what a test bounds.
CONSTANTS = {
    "docs/attention_kernel.md": ["20 times", "4 times", "2 %"],
    "README.md": ["45 minutes"],
    "docs/cache.md": ["40 dB", "100 dB"],
    "docs/cache_quality.md": ["2 %"],
    "docs/faults.md": ["14 s", "2 s", "5 %"],
    "docs/gpu_check.md": ["45 minutes", "10 minutes", "30 GB"],
    "docs/how_it_works.md": ["0.1 s", "2.4 to 4.1 %", "0.87 times"],
    "docs/memory.md": ["6 GB", "180 GB"],
    "docs/planner.md": ["35 %", "6 GB", "0.2 GB"],
    "docs/time_outs.md": ["30 minutes", "10 minutes", "8 minutes", "5 s"],
    "docs/vae.md": ["900 GB", "25 µs", "2 GB", "64 times"],
    "docs/weights.md": ["80 GB", "6 GB", "350 GB", "1.2 ×"],
}
# Written from the first line to the last by programs (tests/test_pages.py), or of another test (tests/fleet/test_load_figures.py).
GENERATED = ("docs/exactness.md", "docs/hooks.md", "docs/traffic.md", "docs/beside_diffusers.md", "docs/serving.md")
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", SAID)
def test_a_sentence_says_what_was_measured(page):
    text = text_of(page)
    missing = [said for said in SAID[page]() if " ".join(said.split()) not in text]
    assert not missing, "measured or computed is now, and not on the page: " + "; ".join(missing)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED])
def test_no_figure_stands_in_a_sentence_that_nothing_checks(page):
    text = " ".join(CODE.sub(" ", PART.sub(" ", (ROOT / page).read_text())).split())
    for said in SAID.get(page, list)():
        text = text.replace(" ".join(CODE.sub(" ", said).split()), " ")
    loose = [found for found in FIGURE.findall(text) if found.strip() not in CONSTANTS.get(page, [])]
    assert not loose, f"say where {loose} come from: in SAID of this file, or in CONSTANTS"
