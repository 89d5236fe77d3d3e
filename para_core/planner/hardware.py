"""What devices, links and hosts do per second: a table with its sources, and figures of one's own machine in its place."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Args:
        products: floating-point operations per second of bfloat16 products of large matrices, by the data sheet.
        memory: bytes, of which ``bandwidth`` are read or written per second.
        multiprocessors: attention computes tiles of 128 queries of a head, as many at once.
        of_products, of_attention, of_convolutions: shares of ``products`` that are reached.
        link: to its neighbours in a host.
        source: of the figures.
    """

    name: str
    products: float
    memory: float
    bandwidth: float
    multiprocessors: int
    link: str
    of_products: float = 0.72
    of_attention: float = 0.5
    of_convolutions: float = 0.3
    of_bandwidth: float = 0.8
    source: str = ""


@dataclass(frozen=True)
class Link:
    """What connects two ranks: a message of n bytes takes ``latency + n / bandwidth`` seconds (alpha-beta).

    Args:
        bandwidth: bytes per second that a rank sends in a collective; ``all_to_all``: in that one, where it is slower.
        source: of the figures.
    """

    name: str
    latency: float
    bandwidth: float
    all_to_all: float | None = None
    source: str = ""

    def seconds(self, sent: float, messages: int = 1, *, all_to_all: bool = False) -> float:
        """Of ``messages`` that together have ``sent`` bytes.

        >>> Link("", latency=1e-5, bandwidth=1e9).seconds(1e6, messages=2)
        0.00102
        """
        bandwidth = (self.all_to_all or self.bandwidth) if all_to_all else self.bandwidth
        return self.latency * messages + sent / bandwidth


@dataclass(frozen=True)
class Host:
    """What the host takes before a device has work.

    Args:
        launch: seconds for each launch of eager code; ``compiled_launch``: of a compiled graph.
        fused: of the launches of eager code, the share that a compiled graph still has.
        source: of the figures: 57 small blocks of FLUX, 3,737 launches, take 21.2 ms.
    """

    launch: float = 5.7e-6
    compiled_launch: float = 4e-6
    fused: float = 0.35
    source: str = "benchmarks/results/host_cost.json"


@dataclass(frozen=True)
class Topology:
    """Ranks in their order: ``per_host`` neighbours are connected by ``inside``, all others by ``between``.

    >>> fast, slow = Link("fast", 0, 2), Link("slow", 0, 1)
    >>> Topology(fast, slow, per_host=4).link(stride=1, size=4).name, Topology(fast, slow, per_host=4).link(stride=4, size=2).name
    ('fast', 'slow')
    """

    inside: Link
    between: Link
    per_host: int

    def link(self, stride: int, size: int) -> Link:
        """Of ``size`` ranks that are ``stride`` apart: the slowest that one of their messages takes."""
        return self.inside if stride * size <= self.per_host else self.between

    def all_to_all(self, sent: float, stride: int, size: int, messages: int = 1) -> float:
        """Seconds in which each of ``size`` ranks that are ``stride`` apart sends ``sent`` bytes, as many to each of the others."""
        if size == 1:
            return 0.0
        near = max(1, min(size, self.per_host // stride))
        if near >= size:
            return self.inside.seconds(sent, messages, all_to_all=True)
        # What goes to the own host and what leaves it travel at the same time.
        far = sent * (size - near) / (size - 1)
        inside = self.inside.seconds(sent - far, messages, all_to_all=True)
        return max(inside, self.between.seconds(far, messages, all_to_all=True))


# Data sheets: dense bfloat16. NVIDIA says twice as much where it counts sparse matrices.
_HOPPER = "https://www.nvidia.com/en-us/data-center/h100/"
_FA3 = "attention: arXiv:2407.08608, FlashAttention-2 on an H100 (35 to 40 %), cuDNN's (60 %)"
_BLOG = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/main/docs/source/blogs/tech_blog/"
    "blog25_Scaling_Video_Generation_Across_NVL72_Rack_with_TensorRT-LLM.md"
)
_VAE = f"convolutions: Wan's decoder in 2.72 s on one GB200, {_BLOG}"
DEVICES = {
    x.name: x
    for x in (
        Device("H100", 989e12, 80e9, 3.35e12, 132, "nvlink4", source=f"{_HOPPER}; {_FA3}"),
        Device("H100 PCIe", 756e12, 80e9, 2.0e12, 114, "pcie5", source=f"{_HOPPER}; {_FA3}"),
        Device(
            "H200",
            989e12,
            141e9,
            4.8e12,
            132,
            "nvlink4",
            source=f"https://www.nvidia.com/en-us/data-center/h200/; {_FA3}",
        ),
        Device(
            "H20",
            148e12,
            96e9,
            4.0e12,
            78,
            "nvlink4",
            of_products=0.9,
            of_attention=0.8,
            source="https://www.techpowerup.com/gpu-specs/h20.c4133",
        ),
        Device(
            "A100",
            312e12,
            80e9,
            2.04e12,
            108,
            "nvlink3",
            of_products=0.8,
            of_attention=0.65,
            source="https://www.nvidia.com/en-us/data-center/a100/; attention: arXiv:2307.08691 (FlashAttention-2, up to 73 %)",
        ),
        Device(
            "B200",
            2.25e15,
            180e9,
            8.0e12,
            148,
            "nvlink5",
            of_attention=0.65,
            of_convolutions=0.1,
            source=f"https://www.nvidia.com/en-us/data-center/dgx-b200/; attention: FlashAttention-4 (71 %); {_VAE}",
        ),
        Device(
            "GB200",
            2.5e15,
            186e9,
            8.0e12,
            148,
            "nvlink5",
            of_attention=0.65,
            of_convolutions=0.094,
            source=f"https://www.nvidia.com/en-us/data-center/gb200-nvl72/; {_VAE}",
        ),
        Device(
            "L20",
            119.5e12,
            48e9,
            0.864e12,
            92,
            "pcie4",
            of_products=0.85,
            of_attention=0.7,
            source="https://www.techpowerup.com/gpu-specs/l20.c4206",
        ),
        Device(
            "L40S",
            362e12,
            48e9,
            0.864e12,
            142,
            "pcie4",
            of_products=0.6,
            source="https://www.nvidia.com/en-us/data-center/l40s/",
        ),
        Device(
            "RTX 4090",
            165e12,
            24e9,
            1.008e12,
            128,
            "pcie4 via host",
            of_products=0.9,
            of_attention=0.85,
            source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf, appendix A",
        ),
        # Of a CPU nothing is promised: enough to put meshes in an order.
        Device("CPU", 1e11, 16e9, 2e10, 1, "gloo", source="assumed"),
    )
}

_NCCL = "NCCL reaches 80 % of a line's rate, its maintainer says: https://github.com/NVIDIA/nccl-tests/issues/212"
LINKS = {
    x.name: x
    for x in (
        Link("nvlink3", 16e-6, 240e9, source=f"300 GB/s; {_NCCL}"),
        Link("nvlink4", 16e-6, 370e9, source=f"450 GB/s; {_NCCL}"),
        # 419 µs on 4 and 251 µs on 8 ranks, for 56.6 and 33.0 MB that a rank sends: a line through both.
        Link(
            "nvlink5",
            16e-6,
            720e9,
            all_to_all=140e9,
            source=f"900 GB/s; {_NCCL}; latency, all-to-all: a table of {_BLOG}",
        ),
        Link("pcie4", 25e-6, 22e9, source="32 GB/s, of which NCCL reaches 22"),
        Link("pcie5", 25e-6, 45e9, source="64 GB/s, of which NCCL reaches 45"),
        # GeForce cards do not reach each other: both directions together 19 to 21 GB/s.
        Link("pcie4 via host", 30e-6, 10e9, source="https://github.com/NVIDIA/nccl-tests/issues/74 (p2p disabled)"),
        Link(
            "infiniband",
            34e-6,
            48e9,
            source="400 Gbit/s for each rank: https://github.com/NVIDIA/nccl-tests/issues/267; latency: issues/214",
        ),
        Link("ethernet", 5e-5, 1.2e9, source="10 Gbit/s"),
        Link("gloo", 2e-4, 2e9, source="benchmarks/results/host_cost.json: one call on 2 gloo ranks"),
    )
}
# What users write: of several generations, the one that the device has.
_GENERATIONS = {
    "nvlink": {"A100": "nvlink3", "B200": "nvlink5", "GB200": "nvlink5"},
    "pcie": {"H100 PCIe": "pcie5", "H100": "pcie5", "H200": "pcie5", "B200": "pcie5", "RTX 4090": "pcie4 via host"},
}
_DEFAULT_GENERATION = {"nvlink": "nvlink4", "pcie": "pcie4"}


def device_named(name: str | Device) -> Device:
    """What the table has under ``name``, which may be as CUDA names it (``"NVIDIA H100 80GB HBM3"``).

    >>> device_named("NVIDIA H100 80GB HBM3").name, device_named("NVIDIA H100 PCIe").name
    ('H100', 'H100 PCIe')

    Raises:
        TypeError, ValueError: it is no name, or the table has nothing.
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"device is {name!r}; expected a name, as 'H100', or a para_core.planner.Device with its figures."
        )
    words = name.replace("-", " ").lower().split()
    fitting = [x for x in DEVICES.values() if set(x.name.lower().split()) <= set(words)]
    if not fitting:
        raise ValueError(
            f"device is {name!r}; known are {', '.join(DEVICES)}. Pass a para_core.planner.Device with its figures, or measured= "
            "with the JSON of python -m para_core.doctor."
        )
    return max(fitting, key=lambda x: len(x.name))


def link_named(name: str | Link | None, device: Device) -> Link:
    """What the table has under ``name``, ``"nvlink"`` and ``"pcie"`` being those of ``device``; None: what ``device`` has.

    Raises:
        TypeError, ValueError: it is no name, or the table has nothing.
    """
    if isinstance(name, Link):
        return name
    if name is None:
        return LINKS[device.link]
    if not isinstance(name, str):
        raise TypeError(
            f"link is {name!r}; expected a name, as 'nvlink', or a para_core.planner.Link with its figures."
        )
    if name in _GENERATIONS:
        name = _GENERATIONS[name].get(device.name, _DEFAULT_GENERATION[name])
    if name not in LINKS:
        raise ValueError(
            f"link is {name!r}; known are {', '.join([*_GENERATIONS, *LINKS])}. Or pass a para_core.planner.Link with its figures."
        )
    return LINKS[name]


def measured_figures(path: str | Path, device: Device, link: Link, host: Host) -> tuple[Device, Link, Host]:
    """The table's figures, those of ``path`` in their place: a JSON of ``python -m para_core.doctor`` or of ``make gpu-check``.

    Raises:
        ValueError: it is neither.
    """
    found: dict[str, Any] = json.loads(Path(path).read_text())
    if "doctor" in found:
        return _from_doctor(found, str(path), device, link, host)
    if found.get("section") == "attention" or any("TFLOP/s" in row for row in found.get("rows", [])):
        best = max(float(row["TFLOP/s"]) for row in found["rows"] if row.get("TFLOP/s"))
        return replace(device, of_attention=best * 1e12 / device.products, source=str(path)), link, host
    raise ValueError(
        f"{path} has neither what python -m para_core.doctor writes, nor attention.json of make gpu-check."
    )


def _from_doctor(found: dict[str, Any], path: str, device: Device, link: Link, host: Host) -> tuple[Device, Link, Host]:
    figures = found["doctor"]
    if figures.get("products"):
        device = replace(device, products=figures["products"], of_products=1.0, source=path)
    if figures.get("attention"):
        device = replace(device, of_attention=figures["attention"] / device.products, source=path)
    if figures.get("launch"):
        host = replace(host, launch=figures["launch"], source=path)
    slowest = min(figures.get("mesh dims", []), key=lambda x: float(x["bytes per second"]), default=None)
    if slowest is not None:
        bandwidth = slowest["bytes per second"]
        link = Link(
            f"{link.name}, measured", slowest["latency"], bandwidth, slowest["all-to-all bytes per second"], path
        )
    return device, link, host
