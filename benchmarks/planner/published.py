"""Seconds that the planner predicts, compared with those that others published:  python -m benchmarks.planner.published

Each table is fitted on its row of one device alone: one factor, of what its software takes over what the planner's
table of devices says. All other rows are predicted with it. What their code does around attention (how many
all-to-alls, whether a ring is overlapped) is written down from their sources, not fitted. Writes
benchmarks/results/planner_check.json (docs/planner.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.harness import markdown_table, parser_of, read_results, write_results
from para_core.adapters.planner.plan_mesh import plan_mesh
from para_core.adapters.planner.workload import workload
from para_core.planner.cost import Machine, MeshShape, Runtime
from para_core.planner.hardware import DEVICES, LINKS, Device, Link, Topology
from para_core.planner.prediction import Workload, predict

# diffusers and cache-dit: three all-to-alls before a call; a ring that gathers all keys first.
DIFFUSERS = Runtime(messages=3, copies=2, overlapped=False, merge_passes=10, ulysses_launches=20, ring_launches=15)
# yunchang, which xDiT calls: the same, but its ring sends while it attends; a merge is a cast and three operators in
# float32.
XDIT = Runtime(messages=3, copies=2, merge_passes=10, ulysses_launches=20, ring_launches=15)
# TensorRT-LLM's ring sends while it attends; in two dims it gathers, then attends.
TENSORRT = Runtime(compiled=True, messages=1, copies=2, merge_passes=10, gathered_grid=True)

XDIT_FLUX = "https://github.com/xdit-project/xDiT/blob/main/docs/performance/flux.md"
XDIT_HUNYUAN = "https://github.com/xdit-project/xDiT/blob/main/docs/performance/hunyuanvideo.md"
DIFFUSERS_PAGE = "https://huggingface.co/docs/diffusers/main/training/distributed_inference"
CACHE_DIT = "https://github.com/vipshop/cache-dit/issues/704"
NVL72 = LINKS["nvlink5"].source.rsplit(" ", 1)[-1]
SGLANG = "https://docs.sglang.io/docs/sglang-diffusion/ring_sp_performance.md"


@dataclass(frozen=True)
class Published:
    """One table.

    Args:
        one: seconds of one device, on which it is fitted; ``fitted_on``: where they stand, if not in this table.
        rows: seconds by mesh.
        sizes: what differs from the published generation of the model.
        denoising_alone: of text encoder and autoencoder only ``vae`` and ``tail`` are in the seconds: what one device
            takes to decode, which at most 8 ranks share, and all else.
    """

    name: str
    source: str
    model: str
    device: str
    runtime: Runtime
    one: float
    rows: tuple[tuple[MeshShape, float], ...]
    sizes: tuple[tuple[str, int], ...] = ()
    link: str | None = None
    denoising_alone: bool = False
    vae: float = 0.0
    tail: float = 0.0
    fitted_on: str = "its own row of one device"


def ulysses(*rows: tuple[int, float]) -> tuple[tuple[MeshShape, float], ...]:
    return tuple((MeshShape(ulysses=ranks), seconds) for ranks, seconds in rows)


_FLUX_MESHES = (
    MeshShape(ulysses=2),
    MeshShape(ring=2),
    MeshShape(ring=2, ulysses=2),
    MeshShape(ulysses=4),
    MeshShape(ring=4),
)


def xdit_flux(name: str, runtime: Runtime, one: float, *seconds: float) -> Published:
    rows = tuple(zip(_FLUX_MESHES, seconds, strict=True))
    return Published(f"xDiT, FLUX.1, {name}", XDIT_FLUX, "FLUX.1-dev", "H100", runtime, one, rows)


def xdit_hunyuan(size: str, device: str, one: float, *rows: tuple[int, float]) -> Published:
    sizes = (("height", 960), ("width", 960)) if size == "960 × 960" else ()
    name = f"xDiT, HunyuanVideo {size}, {device}"
    return Published(name, XDIT_HUNYUAN, "HunyuanVideo", device, XDIT, one, ulysses(*rows), sizes)


_WAN_5B = (("height", 480), ("width", 832), ("frames", 81), ("steps", 50))
SGLANG_RUNTIME = Runtime(merge_passes=10, ring_launches=15)
TABLES = (
    xdit_flux("compiled", replace(XDIT, compiled=True), 4.30, 2.68, 2.60, 1.80, 1.63, 1.98),
    xdit_flux("eager", XDIT, 6.71, 4.38, 5.31, 5.19, 4.24, 5.11),
    xdit_hunyuan("1280 × 720", "H100", 1904.08, (2, 925.04), (4, 514.08), (8, 337.58)),
    xdit_hunyuan("1280 × 720", "H20", 6639.17, (2, 3400.55), (4, 1762.86), (8, 940.97)),
    xdit_hunyuan("1280 × 720", "L20", 6043.88, (2, 3271.44), (4, 2080.05)),
    xdit_hunyuan("960 × 960", "H100", 1735.01, (2, 934.09), (3, 645.45), (6, 367.02)),
    xdit_hunyuan("960 × 960", "H20", 6621.46, (2, 3400.55), (3, 2310.48), (6, 1214.67)),
    xdit_hunyuan("960 × 960", "L20", 6039.08, (2, 3260.62), (3, 2284.74)),
    Published(
        "diffusers, FLUX.1, 50 steps",
        DIFFUSERS_PAGE,
        "FLUX.1-dev",
        "H100",
        DIFFUSERS,
        9.30,
        (
            (MeshShape(ulysses=4), 6.671),
            (MeshShape(ring=2, ulysses=2, ring_method="all-gather"), 11.069),
            (MeshShape(ring=4, ring_method="all-gather"), 13.076),
        ),
        (("steps", 50),),
        fitted_on="cache-dit's row of one H100, the same code; this table has none",
    ),
    Published(
        "cache-dit, FLUX.1, 50 steps",
        CACHE_DIT,
        "FLUX.1-dev",
        "H100",
        DIFFUSERS,
        9.30,
        ulysses((2, 6.04)),
        (("steps", 50),),
    ),
    Published(
        "TensorRT-LLM, Wan 2.2 A14B, denoising",
        NVL72,
        "Wan 2.2 A14B",
        "GB200",
        TENSORRT,
        342.04,
        (
            (MeshShape(batch=2), 179.96),
            (MeshShape(batch=2, ring=9, ulysses=4, ring_method="2d"), 7.04),
            (MeshShape(ring=9, ulysses=8, ring_method="2d"), 7.57),
            (MeshShape(batch=2, ring=9, ulysses=4), 12.88),
        ),
        (("frames", 80), ("steps", 40)),
        denoising_alone=True,
    ),
    Published(
        "TensorRT-LLM, Wan 2.2 A14B, end to end",
        NVL72,
        "Wan 2.2 A14B",
        "GB200",
        TENSORRT,
        346.16,
        ((MeshShape(batch=2, ring=9, ulysses=4, ring_method="2d"), 9.20),),
        (("frames", 80), ("steps", 40)),
        denoising_alone=True,
        vae=2.72,
        tail=346.16 - 342.04 - 2.72,
        fitted_on="one GB200; 373.35 s are of one B200",
    ),
    Published(
        "SGLang, Wan 2.2 TI2V 5B, end to end",
        SGLANG,
        "Wan 2.2 TI2V 5B",
        "RTX 4090",
        SGLANG_RUNTIME,
        90.63,
        ((MeshShape(ring=2), 63.74),),
        _WAN_5B,
        denoising_alone=True,
        vae=13.43,
        tail=90.63 - 71.68 - 13.43,
    ),
    Published(
        "SGLang, Wan 2.2 TI2V 5B, denoising",
        SGLANG,
        "Wan 2.2 TI2V 5B",
        "RTX 4090",
        SGLANG_RUNTIME,
        71.68,
        ((MeshShape(ring=2), 52.64),),
        _WAN_5B,
        denoising_alone=True,
    ),
)


@dataclass(frozen=True)
class Checked:
    """A row: seconds that were published, and predicted with the fit on one device and without it."""

    table: Published
    shape: MeshShape
    published: float
    predicted: float
    unfitted: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def machine_of(table: Published) -> Machine:
    device = DEVICES[table.device]
    link = LINKS[table.link or device.link]
    per_host = 72 if table.device == "GB200" else 8
    return Machine(device, Topology(link, Link("", 0, 1), per_host), runtime=table.runtime)


def seconds(table: Published, work: Workload, shape: MeshShape, machine: Machine) -> float:
    row = predict(shape, work, machine)
    if table.denoising_alone:
        return row.step.total * work.steps + table.vae / min(shape.ranks, 8) + table.tail
    return row.seconds


def fitted(table: Published, work: Workload, machine: Machine) -> Machine:
    """Return the machine with the slowdown for which one device takes as long as was published."""
    low, high = 0.05, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        if seconds(table, work, MeshShape(), replace(machine, slowdown=middle)) < table.one:
            low = middle
        else:
            high = middle
    return replace(machine, slowdown=high)


def check(table: Published, work: Workload) -> tuple[float, list[Checked]]:
    machine = fitted(table, work, machine_of(table))
    plain = machine_of(table)
    checked = [
        Checked(table, shape, published, seconds(table, work, shape, machine), seconds(table, work, shape, plain))
        for shape, published in table.rows
    ]
    return machine.slowdown, checked


def ratios_of(found: Sequence[Checked]) -> dict[str, list[float]]:
    """Return the smallest and largest ratio of published to predicted seconds without a fit, of all rows of a kind."""
    ratios = {
        kind: [row.published / row.unfitted for row in found if row.table.runtime.compiled == (kind == "compiled")]
        for kind in ("compiled", "eager")
    }
    return {kind: [round(min(values), 2), round(max(values), 2)] for kind, values in ratios.items()}


def errors_of(found: Sequence[Checked]) -> dict[str, float]:
    errors = [abs(one.error) for one in found]
    return {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)}


def summary(found: Sequence[Checked]) -> list[str]:
    errors, hit = errors_of(found), sum(abs(row.error) <= 0.2 for row in found)
    return [
        (
            f"{errors['rows']:.0f} rows: median error {errors['median']:.0%}, {hit} within 20 %, worst "
            f"{errors['worst']:.0%}."
        )
    ]


def name_of(shape: MeshShape) -> str:
    """Return the sizes above 1 of a mesh, as ``ring 2, ulysses 4``."""
    sizes = {name: getattr(shape, name) for name in ("batch", "pipe", "ring", "ulysses", "tensor")}
    named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join([*named, *(["2d"] if shape.ring_method == "2d" else [])])


def published_table(tables: Sequence[tuple[Published, float, list[Checked]]]) -> list[str]:
    """Return a row for each table: seconds of one device with the factor, then each mesh with its error."""
    rows = []
    for table, slowdown, checked in tables:
        meshes = []
        for row in checked:
            error = f"{row.error:+.0%}" if abs(row.error) <= 0.2 else f"**{row.error:+.0%}**"
            meshes.append(f"{name_of(row.shape)}: {row.published:,.2f} {error}")
        fit = f"{table.one:,.2f} ({slowdown:.2f})"
        rows.append([f"[{table.name}]({table.source})", table.device, fit, "; ".join(meshes)])
    return markdown_table(["table", "device", "one device, s (×)", "mesh: published, s, and error"], rows)


def sources() -> list[str]:
    """Return the planner's tables of devices and links, each followed by its sources."""
    devices = [
        [
            device.name,
            f"{device.products / 1e12:,.4g}",
            f"{device.of_products:.0%}, {device.of_attention:.0%}",
            f"{device.memory / 1e9:.0f}",
            f"{device.bandwidth / 1e9:,.0f}",
        ]
        for device in DEVICES.values()
    ]
    links = [
        [
            link.name,
            f"{1e6 * link.latency:.0f}",
            f"{link.bandwidth / 1e9:.4g}",
            f"{(link.all_to_all or link.bandwidth) / 1e9:.4g}",
        ]
        for link in LINKS.values()
    ]
    heads = ["", "TFLOP/s", "reached: products, attention", "GB", "GB/s"]
    return [
        *markdown_table(heads, devices, right=(1, 3, 4)),
        "",
        *_sources_of(DEVICES.values()),
        "",
        *markdown_table(["link", "latency, µs", "GB/s", "all-to-all, GB/s"], links, right=(1, 2, 3)),
        "",
        *_sources_of(LINKS.values()),
    ]


def _sources_of(entries: Iterable[Device | Link]) -> list[str]:
    """Return a line for the entries that cite the same sources."""
    names: dict[str, list[str]] = {}
    for entry in entries:
        for source in entry.source.split("; "):
            names.setdefault(source, []).append(entry.name)
    sources: dict[str, list[str]] = {}
    for source, cited in names.items():
        sources.setdefault(", ".join(cited), []).append(source)
    return [f"- {cited}: {'; '.join(found)}" for cited, found in sources.items()]


def plans() -> list[str]:
    """Return a plan for cards on which two ranks are slower than one."""
    link = Link("pcie3 via host", 3e-5, 2e9)
    plan = plan_mesh("FLUX.1-dev", ranks=2, device="L20", link=link, weights=(), compiled=True)
    return ["```text", *str(plan).splitlines(), "```"]


def parts() -> dict[str, list[str]]:
    """Return the parts of docs/planner.md."""
    results = read_results("planner_check")
    tables = []
    for table in TABLES:
        rows = [row for row in results["rows"] if row["table"] == table.name]
        checked = [
            Checked(table, shape, row["published"], row["predicted"])
            for (shape, _), row in zip(table.rows, rows, strict=True)
        ]
        tables.append((table, results["fits"][table.name]["slowdown"], checked))
    return {
        "summary": summary([row for *_, checked in tables for row in checked]),
        "published": published_table(tables),
        "sources": sources(),
        "plans": plans(),
    }


def main() -> None:
    """Predict every row, compare it with the published one, and write both."""
    parser_of(__doc__).parse_args()
    fits, rows = {}, []
    for table in TABLES:
        slowdown, checked = check(table, workload(table.model, **dict(table.sizes)))
        fits[table.name] = {"one device": table.one, "fitted on": table.fitted_on, "slowdown": slowdown}
        rows += checked
    written = [
        {
            "table": row.table.name,
            "source": row.table.source,
            "mesh": str(row.shape),
            "published": row.published,
            "predicted": row.predicted,
            "unfitted": row.unfitted,
            "error": row.error,
        }
        for row in rows
    ]
    print(*summary(rows))
    print(
        write_results(
            "planner_check",
            {"errors": errors_of(rows), "ratios": ratios_of(rows), "fits": fits, "rows": written},
            "diffusers",
        )
    )


if __name__ == "__main__":
    main()
