"""Speed and memory of devices, links and hosts: a table with sources, whose figures measurements can replace."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


# Bytes per second of a copy from pinned host memory over 16 lanes of these generations of PCIe.
PCIE4, PCIE5 = 22e9, 45e9


@dataclass(frozen=True)
class Device:
    """The speed and memory of one accelerator.

    Args:
        products (`float`): Peak floating-point operations per second of bfloat16 matrix products, from the data sheet.
        memory (`float`): Bytes of device memory.
        bandwidth (`float`): Peak bytes of memory read or written per second.
        multiprocessors (`int`): Number of multiprocessors, each of which computes attention for 128 queries of one head
            at a time.
        link (`str`): Name of the link to other devices of the same host, a key of ``LINKS``.
        of_products, of_attention, of_convolutions (`float`): Fractions of the peak ``products`` that matrix products,
            attention and convolutions reach.
        of_bandwidth (`float`): Fraction of the peak ``bandwidth`` that operators reach.
        host_bandwidth (`float`): Bytes per second of a copy from pinned host memory. Defaults to the 22 GB/s of PCIe 4
            with 16 lanes.
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
    host_bandwidth: float = PCIE4
    source: str = ""


@dataclass(frozen=True)
class Link:
    """A connection between ranks. A message of n bytes takes ``latency + n / bandwidth`` seconds (alpha-beta model).

    Args:
        latency (`float`): Seconds per message.
        bandwidth (`float`): Bytes per second that a rank sends in a collective.
        all_to_all (`float`, *optional*): Bytes per second in an all-to-all. Defaults to ``bandwidth``.
    """

    name: str
    latency: float
    bandwidth: float
    all_to_all: float | None = None
    source: str = ""

    def seconds(self, sent: float, messages: int = 1, *, all_to_all: bool = False) -> float:
        """Return the seconds that ``messages`` messages with ``sent`` bytes in total take.

        >>> Link("", latency=1e-5, bandwidth=1e9).seconds(1e6, messages=2)
        0.00102
        """
        bandwidth = (self.all_to_all or self.bandwidth) if all_to_all else self.bandwidth
        return self.latency * messages + sent / bandwidth


@dataclass(frozen=True)
class Host:
    """The time that the host takes to launch operators.

    The defaults were measured: the 3,737 launches of 57 small FLUX blocks take 21.2 ms.

    Args:
        launch (`float`): Seconds per launch in eager code.
        compiled_launch (`float`): Seconds per launch in a compiled graph.
        fused (`float`): Number of launches in a compiled graph, divided by the number in eager code.
    """

    launch: float = 5.7e-6
    compiled_launch: float = 4e-6
    fused: float = 0.35
    source: str = "benchmarks/results/host_cost.json"


@dataclass(frozen=True)
class Topology:
    """The links between ranks: ``inside`` a host, and ``between`` hosts with ``per_host`` consecutive ranks each.

    >>> topology = Topology(Link("fast", 0, 2), Link("slow", 0, 1), per_host=4)
    >>> topology.link(stride=1, size=4).name, topology.link(stride=4, size=2).name
    ('fast', 'slow')
    """

    inside: Link
    between: Link
    per_host: int

    def link(self, stride: int, size: int) -> Link:
        """Return the link among ``size`` ranks that are ``stride`` ranks apart: ``between`` if they span hosts."""
        return self.inside if stride * size <= self.per_host else self.between

    def all_to_all(self, sent: float, stride: int, size: int, messages: int = 1) -> float:
        """Return the seconds of ``messages`` all-to-alls among ``size`` ranks that are ``stride`` apart.

        Each rank sends ``sent`` bytes in all of them.
        """
        if size == 1:
            return 0.0
        near = max(1, min(size, self.per_host // stride))
        if near >= size:
            return self.inside.seconds(sent, messages, all_to_all=True)
        # Messages inside a host and messages between hosts are sent at the same time, so the slower of both counts.
        far = sent * (size - near) / (size - 1)
        inside = self.inside.seconds(sent - far, messages, all_to_all=True)
        return max(inside, self.between.seconds(far, messages, all_to_all=True))


# The figures of ``products`` are for dense bfloat16 matrices: half the figure of a data sheet that only states the
# speed with sparsity.
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_TECHPOWERUP = "https://www.techpowerup.com/gpu-specs"
_WORKSTATION = "https://www.nvidia.com/en-us/design-visualization"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf, appendix A"
_FA2 = "attention: arXiv:2307.08691 (FlashAttention-2, up to 73 %)"
_FA3 = "attention: arXiv:2407.08608, FlashAttention-2 on an H100 (35 to 40 %), cuDNN's (60 %)"
_FA4 = "attention: FlashAttention-4 (71 %)"
_BLOG = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/main/docs/source/blogs/tech_blog/"
    "blog25_Scaling_Video_Generation_Across_NVL72_Rack_with_TensorRT-LLM.md"
)
_VAE = f"convolutions: Wan's decoder in 2.72 s on one GB200, {_BLOG}"
_GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf, appendix"
_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf, appendix"
)
_PRO_6000 = (
    "https://www.nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000/ (an eighth of 4,000 "
    "TOPS in FP4 with sparsity)"
)
_MI300X = (
    "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf"
)
# The fractions of the peak that these devices reach are assumed to be those of a similar one.
_AS_L40S, _AS_L20, _AS_A100, _AS_4090 = (
    f"reached: assumed, as on {name}" for name in ("L40S", "L20", "A100", "RTX 4090")
)
_H100, _A100 = f"{_NVIDIA}/h100/; {_FA3}", f"{_NVIDIA}/a100/; {_FA2}"
_B200, _GB200 = f"{_NVIDIA}/dgx-b200/; {_FA4}; {_VAE}", f"{_NVIDIA}/gb200-nvl72/; {_VAE}"
_H20, _L20 = f"{_TECHPOWERUP}/h20.c4133", f"{_TECHPOWERUP}/l20.c4206"
# The positional arguments of each Device are name, products, memory, bandwidth, multiprocessors, link, of_products,
# of_attention and of_convolutions.
# fmt: off
_DEVICES = (
    Device("H100", 989e12, 80e9, 3.35e12, 132, "nvlink4", host_bandwidth=PCIE5, source=_H100),
    Device("H100 PCIe", 756e12, 80e9, 2.0e12, 114, "pcie5", host_bandwidth=PCIE5, source=_H100),
    Device("H200", 989e12, 141e9, 4.8e12, 132, "nvlink4", host_bandwidth=PCIE5, source=f"{_NVIDIA}/h200/; {_FA3}"),
    Device("H20", 148e12, 96e9, 4.0e12, 78, "nvlink4", 0.9, 0.8, host_bandwidth=PCIE5, source=_H20),
    Device("A100", 312e12, 80e9, 2.04e12, 108, "nvlink3", 0.8, 0.65, source=_A100),
    Device("A100 40GB", 312e12, 40e9, 1.555e12, 108, "nvlink3", 0.8, 0.65, source=_A100),
    Device("A100 PCIe", 312e12, 80e9, 1.935e12, 108, "pcie4", 0.8, 0.65, source=_A100),
    Device("A100 40GB PCIe", 312e12, 40e9, 1.555e12, 108, "pcie4", 0.8, 0.65, source=_A100),
    Device("B200", 2.25e15, 180e9, 8e12, 148, "nvlink5", 0.72, 0.65, 0.1, host_bandwidth=PCIE5, source=_B200),
    Device("GB200", 2.5e15, 186e9, 8e12, 148, "nvlink5", 0.72, 0.65, 0.094, host_bandwidth=PCIE5, source=_GB200),
    Device("L20", 119.5e12, 48e9, 0.864e12, 92, "pcie4", 0.85, 0.7, source=_L20),
    Device("L40S", 362e12, 48e9, 0.864e12, 142, "pcie4", 0.6, source=f"{_NVIDIA}/l40s/"),
    Device("L40", 181e12, 48e9, 0.864e12, 142, "pcie4", 0.85, 0.7, source=f"{_NVIDIA}/l40/; {_AS_L20}"),
    Device("L4", 121e12, 24e9, 0.3e12, 58, "pcie4", 0.6, source=f"{_NVIDIA}/l4/; {_AS_L40S}"),
    Device("A10", 125e12, 24e9, 0.6e12, 72, "pcie4", 0.6, source=f"{_NVIDIA}/products/a10-gpu/; {_AS_L40S}"),
    Device("A40", 149.7e12, 48e9, 0.696e12, 84, "pcie4", 0.8, 0.65, source=f"{_NVIDIA}/a40/; {_AS_A100}"),
    # The A800 and the H800 are an A100 and an H100 with 400 GB/s of NVLink in both directions together.
    Device("A800", 312e12, 80e9, 2.04e12, 108, "nvlink3 of 8 links", 0.8, 0.65, source=_A100),
    Device("A800 PCIe", 312e12, 80e9, 1.935e12, 108, "pcie4", 0.8, 0.65, source=_A100),
    Device("H800", 989e12, 80e9, 3.35e12, 132, "nvlink4 of 8 links", host_bandwidth=PCIE5, source=_H100),
    Device("H800 PCIe", 756e12, 80e9, 2.0e12, 114, "pcie5", host_bandwidth=PCIE5, source=_H100),
    Device("A6000", 154.8e12, 48e9, 0.768e12, 84, "pcie4", 0.8, 0.65, source=f"{_WORKSTATION}/rtx-a6000/; {_AS_A100}"),
    Device("RTX 6000 Ada", 364.2e12, 48e9, 0.96e12, 142, "pcie4", 0.6, source=f"{_WORKSTATION}/rtx-6000/; {_AS_L40S}"),
    Device(
        "RTX PRO 6000", 503.8e12, 96e9, 1.792e12, 188, "pcie5", 0.6, host_bandwidth=PCIE5,
        source=f"{_PRO_6000}; {_AS_L40S}",
    ),
    Device("RTX 3090", 71e12, 24e9, 0.936e12, 82, "pcie4 via host", 0.9, 0.85, source=f"{_GA102}; {_AS_4090}"),
    Device("RTX 4080", 97.5e12, 16e9, 0.7168e12, 76, "pcie4 via host", 0.9, 0.85, source=f"{_ADA}; {_AS_4090}"),
    Device("RTX 4090", 165e12, 24e9, 1.008e12, 128, "pcie4 via host", 0.9, 0.85, source=_ADA),
    Device(
        "RTX 5090", 209.5e12, 32e9, 1.792e12, 170, "pcie5 via host", 0.9, 0.85, host_bandwidth=PCIE5,
        source=f"{_BLACKWELL}; {_AS_4090}",
    ),
    Device(
        "MI300X", 1307e12, 192e9, 5.3e12, 304, "infinity fabric", 0.5, 0.35, 0.2, host_bandwidth=PCIE5,
        source=f"{_MI300X}; reached: assumed",
    ),
    # CPUs differ too much for a prediction of seconds. These assumed figures only serve to compare meshes.
    Device("CPU", 1e11, 16e9, 2e10, 1, "gloo", source="assumed"),
)
# fmt: on
DEVICES = {device.name: device for device in _DEVICES}

_NCCL_TESTS = "https://github.com/NVIDIA/nccl-tests/issues"
_NCCL = f"NCCL reaches 80 % of a line's rate, its maintainer says: {_NCCL_TESTS}/212"
_INFINIBAND = f"400 Gbit/s for each rank: {_NCCL_TESTS}/267; latency: issues/214"
LINKS = {
    x.name: x
    for x in (
        Link("nvlink3", 16e-6, 240e9, source=f"300 GB/s; {_NCCL}"),
        Link("nvlink4", 16e-6, 370e9, source=f"450 GB/s; {_NCCL}"),
        # The latency and the all-to-all bandwidth are computed from two measurements in that table: 419 µs on 4 ranks
        # that each send 56.6 MB, and 251 µs on 8 ranks that each send 33.0 MB.
        Link("nvlink5", 16e-6, 720e9, 140e9, source=f"900 GB/s; {_NCCL}; latency, all-to-all: a table of {_BLOG}"),
        # The links of the A800 and the H800 are limited to 400 GB/s in both directions.
        Link("nvlink3 of 8 links", 16e-6, 160e9, source=f"200 GB/s; {_NCCL}"),
        Link("nvlink4 of 8 links", 16e-6, 160e9, source=f"200 GB/s; {_NCCL}"),
        Link("nvlink bridge", 16e-6, 45e9, source=f"56 GB/s; {_GA102}; {_NCCL}"),
        Link("infinity fabric", 20e-6, 310e9, source=f"7 × 64 GB/s to the 7 other devices; 70 % assumed; {_MI300X}"),
        Link("pcie4", 25e-6, 22e9, source="32 GB/s on paper; NCCL reaches 22"),
        Link("pcie5", 25e-6, 45e9, source="64 GB/s on paper; NCCL reaches 45"),
        # GeForce cards have no peer-to-peer access, so they copy through the host. Both directions together reach 19 to
        # 21 GB/s, so one direction gets half of that.
        Link("pcie4 via host", 30e-6, 10e9, source=f"{_NCCL_TESTS}/74 (p2p disabled)"),
        Link("pcie5 via host", 30e-6, 20e9, source=f"twice pcie4 via host, assumed; {_NCCL_TESTS}/74"),
        Link("infiniband", 34e-6, 48e9, source=_INFINIBAND),
        Link("ethernet", 5e-5, 1.2e9, source="10 Gbit/s"),
        Link("gloo", 2e-4, 2e9, source="benchmarks/results/host_cost.json: one call on 2 gloo ranks"),
    )
}
# The generations of links that the user may name without it, and of devices whose usual link is of another kind.
_GENERATIONS = {
    "nvlink": (
        "nvlink4",
        {
            **dict.fromkeys(("A100 PCIe", "A100 40GB PCIe", "A800 PCIe"), "nvlink3"),
            **dict.fromkeys(("A40", "A6000", "RTX 3090"), "nvlink bridge"),
        },
    ),
    "pcie": ("pcie4", dict.fromkeys(("H100", "H200", "H20", "H800", "B200", "GB200", "MI300X"), "pcie5")),
}
# Of a device that is described by its memory, speed and link alone: operations per byte of memory bandwidth, as on most
# cards (76 to 419), and the number of multiprocessors.
_OPERATIONS_PER_BYTE, _MULTIPROCESSORS = 200, 128


# These words of device names are ignored, because they do not distinguish variants of a device in the table.
_USUAL_WORDS = {
    *("nvidia", "geforce", "tesla", "quadro", "gpu", "rtx", "generation", "amd", "instinct", "radeon", "oam"),
    *("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "hbm2", "hbm2e", "hbm3", "hbm3e"),
}
# Of the RTX PRO 6000, the editions of a workstation; the server's has another memory bandwidth.
_EDITION = {"blackwell", "workstation", "edition"}
_GIGABYTES = re.compile(r"(\d+)gb")
# Words that are often written without a space before or after them.
_JOINED = re.compile(r"(nvidia|geforce|rtx|pro(?=\d)|sxm\d?|pcie|nvl\b|(?<=\d)ada\b|(?<=[a-z]\d\d\d)(?=\d+gb))")


def device_named(name: str | Device, *, memory: float | None = None) -> Device:
    """Return the device with this name from the table, or the one that ``"name,GB,TFLOPs,link"`` describes.

    ``name`` may be a name that CUDA reports, and be spelt as users do. ``memory``, the bytes that the device reports,
    replaces that of the table.

    >>> device_named("NVIDIA H100 80GB HBM3").name, device_named("NVIDIA A100-SXM4-40GB").name
    ('H100', 'A100 40GB')
    >>> device_named("4090").name, device_named("rtx5090").name, device_named("h100 sxm").name
    ('RTX 4090', 'RTX 5090', 'H100')
    >>> device_named("my card, 24, 140, pcie").memory
    24000000000.0

    Raises:
        TypeError: ``name`` is neither a string nor a :class:`Device` (which is returned unchanged).
        ValueError: The table does not have this device, or has only other variants of it, or a figure is no number.
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"device is {name!r}; expected a name such as 'H100', or a para_core.planner.Device with its figures."
        )
    if "," in name:
        return _described_device(name)
    words = _words_of(name)
    joined = "".join(name.lower().split())
    fitting = [x for x in DEVICES.values() if _own_words(x) <= words or _own_words(x) == {joined}]
    device = max(fitting, key=lambda x: len(x.name), default=None)
    problem = "" if device is None or {joined} == _own_words(device) else _unknown_variant(device, words, memory)
    if device is None or problem:
        hint = problem or _similar(name, DEVICES)
        raise ValueError(
            f"device is {name!r}{hint}; expected one of {', '.join(DEVICES)}, or the "
            "figures of another one as 'name,GB,TFLOPs,link', such as 'my card,24,140,pcie' (in Python also a "
            "para_core.planner.Device)."
        )
    return device if memory is None else replace(device, memory=memory)


def _words_of(name: str) -> set[str]:
    """Return the words of a device's name in lower case, with joined words apart, and ``80gb`` for ``80 GB``."""
    text = _JOINED.sub(r" \1 ", re.sub(r"[\s_()/-]+", " ", name.lower()))
    return set(re.sub(r"(\d) ?gb?(?= |$)", r"\1gb", " ".join(text.split())).split())


def _own_words(device: Device) -> set[str]:
    """Return the words that a name must have to mean ``device``."""
    return set(device.name.lower().split()) - {"rtx"}


def _similar(name: str, names: Iterable[str]) -> str:
    """Return a phrase that suggests up to three of ``names`` that are similar to ``name``; empty if none is.

    >>> _similar("RTX 5900", ["RTX 5090", "H100"])
    ' (did you mean RTX 5090?)'
    """
    by_letters = {re.sub(r"[^a-z0-9]", "", candidate.lower()): candidate for candidate in names}
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    similar = difflib.get_close_matches(letters, by_letters, n=3, cutoff=0.6)
    similar += [candidate for candidate in by_letters if len(letters) > 1 and letters in candidate]
    close = list(dict.fromkeys(by_letters[key] for key in similar))[:3]
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _described_device(text: str) -> Device:
    """Return the device of ``"name,GB,TFLOPs,link"``. Raise ValueError if a part is missing or invalid."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 4 or not all(parts):
        raise ValueError(
            f"device is {text!r}; expected a name of the table, or 'name,GB,TFLOPs,link': four parts, such as "
            "'my card,24,140,pcie'."
        )
    name, gigabytes, teraflops, link = parts
    memory, speed = (
        _positive(text, figure, unit)
        for figure, unit in ((gigabytes, "GB of memory"), (teraflops, "TFLOPs (dense, 16 bits)"))
    )
    device = Device(
        name,
        speed * 1e12,
        memory * 1e9,
        speed * 1e12 / _OPERATIONS_PER_BYTE,
        _MULTIPROCESSORS,
        "pcie4",
        source="given by the user",
    )
    usual_link = link_named(link, device)
    return replace(device, link=usual_link.name, host_bandwidth=PCIE5 if "5" in usual_link.name else PCIE4)


def _positive(text: str, figure: str, unit: str) -> float:
    try:
        value = float(figure)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"device is {text!r}, where {figure!r} stands for {unit}; expected a positive number, as in "
            "'my card,24,140,pcie'."
        )
    return value


def _unknown_variant(device: Device, words: set[str], memory: float | None) -> str:
    """Return how the variant that ``words`` name differs from ``device``, as a phrase for an error message.

    It is empty if the variant does not differ, or differs only in its memory and ``memory`` is given.
    """
    left = words - set(device.name.lower().split()) - _USUAL_WORDS
    left -= _EDITION if device.name == "RTX PRO 6000" else set()
    sizes = {word: int(match[1]) for word in left if (match := _GIGABYTES.fullmatch(word))}
    unknown = sorted(left - set(sizes))
    if unknown:
        return f", and the table knows no {device.name} with {' '.join(unknown)!r}"
    # Accept a difference of up to 10 %, because a name may state more memory than a GPU reports: a B200 is sold with
    # 192 GB and has 180 GB.
    if memory is None and any(abs(size * 1e9 / device.memory - 1) > 0.1 for size in sizes.values()):
        return f", and the table's {device.name} has {device.memory / 1e9:.0f} GB"
    return ""


def gpu_at_hand(device: torch.device | None = None) -> Device:
    """Return the figures of a GPU of this process, by default the current one, with the memory that the GPU reports.

    Raises:
        ValueError: The table does not have this GPU.
    """
    # Imported here, because predictions need no torch.
    import torch

    index = torch.cuda.current_device() if device is None else device
    return device_named(torch.cuda.get_device_name(index), memory=torch.cuda.get_device_properties(index).total_memory)


def link_named(name: str | Link | None, device: Device) -> Link:
    """Return the link with this name from the table; for None, the usual link of ``device``.

    ``"nvlink"`` and ``"pcie"`` without a number mean the generation that ``device`` has.

    Raises:
        TypeError: ``name`` is neither None, a string nor a :class:`Link` (which is returned unchanged).
        ValueError: The table does not have this link.
    """
    if isinstance(name, Link):
        return name
    if name is None:
        return LINKS[device.link]
    if not isinstance(name, str):
        raise TypeError(
            f"link is {name!r}; expected a name such as 'nvlink', or a para_core.planner.Link with its figures."
        )
    wanted = " ".join(name.lower().split())
    if wanted in _GENERATIONS:
        default, others = _GENERATIONS[wanted]
        wanted = device.link if device.link.startswith(wanted) else others.get(device.name, default)
    if wanted not in LINKS:
        link_names = [*_GENERATIONS, *LINKS]
        raise ValueError(
            f"link is {name!r}{_similar(name, link_names)}; expected one of {', '.join(link_names)}; in Python also a "
            "para_core.planner.Link with its figures."
        )
    return LINKS[wanted]


# The ways of attention.json that compute attention of all keys.
_EXACT_ATTENTION = ("flash", "cudnn", "triton")


def measured_figures(path: str | Path, device: Device, link: Link, host: Host) -> tuple[Device, Link, Host]:
    """Return ``device``, ``link`` and ``host`` with the measured figures of a JSON file.

    The file is one of ``python -m para_core.doctor``, or attention.json of ``make gpu-check``.

    Raises:
        ValueError: The file cannot be read, or is neither of these.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); expected a file of python -m para_core.doctor.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
    if not isinstance(content, dict):
        content = {}
    if "doctor" in content:
        figures, source = content["doctor"], str(path)
        if figures.get("products"):
            device = replace(device, products=figures["products"], of_products=1.0, source=source)
        if figures.get("attention"):
            device = replace(device, of_attention=figures["attention"] / device.products, source=source)
        if figures.get("launch"):
            host = replace(host, launch=figures["launch"], source=source)
        slowest = min(figures.get("mesh dims", []), key=lambda x: float(x["bytes per second"]), default=None)
        if slowest is not None:
            bandwidth, in_all_to_all = slowest["bytes per second"], slowest["all-to-all bytes per second"]
            link = Link(f"{link.name}, measured", slowest["latency"], bandwidth, in_all_to_all, source)
        return device, link, host
    # Other ways of the file round to 8 bits, or leave out keys.
    exact = [row for row in content.get("rows", []) if row.get("way") in _EXACT_ATTENTION and row.get("TFLOP/s")]
    if exact:
        best = max(float(row["TFLOP/s"]) for row in exact)
        return replace(device, of_attention=best * 1e12 / device.products, source=str(path)), link, host
    raise ValueError(
        f"{path} is neither a file that python -m para_core.doctor wrote, nor an attention.json of make gpu-check "
        "with measured rows."
    )
