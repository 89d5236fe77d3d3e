"""Speed and memory of devices, and of the links between them, from data sheets.
Imports no torch at import time.

The planner (``adapters/planner/``) predicts by these figures, :mod:`.doctor` compares what it measures with
them, and ``cli/plan.py`` lists the names. Tests: tests/test_devices.py, tests/planner/test_predict.py.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Bytes per second of a copy from pinned host memory over 16 lanes of these generations of PCIe.
PCIE4, PCIE5 = 22e9, 45e9
# Share of the peak bandwidth of a data sheet that operators reach.
_OF_BANDWIDTH = 0.8


@dataclass(frozen=True)
class Device:
    """The speed and memory of one accelerator.

    Args:
        products (`float`): Peak floating-point operations per second of dense 16-bit matrix products.
        memory (`float`): Bytes of device memory.
        bandwidth (`float`): Peak bytes of memory read or written per second.
        link (`str`): Name of the link to other devices of the same host, a key of ``LINKS``.
        of_products, of_attention (`float`): Shares of ``products`` that large matrix products and attention
            reach.
        host_bandwidth (`float`): Bytes per second of a copy from pinned host memory.
    """

    name: str
    products: float
    memory: float
    bandwidth: float
    link: str
    of_products: float = 0.72
    of_attention: float = 0.5
    host_bandwidth: float = PCIE4

    @property
    def product_speed(self) -> float:
        """Floating-point operations per second that large matrix products reach."""
        return self.products * self.of_products

    @property
    def attention_speed(self) -> float:
        """Floating-point operations per second that attention reaches."""
        return self.products * self.of_attention

    @property
    def copy_speed(self) -> float:
        """Bytes per second that operators read and write in device memory."""
        return self.bandwidth * _OF_BANDWIDTH


@dataclass(frozen=True)
class Link:
    """A connection between ranks. A message of n bytes takes ``latency + n / bandwidth`` seconds (alpha-beta
    model).

    Args:
        latency (`float`): Seconds per message.
        bandwidth (`float`): Bytes per second that a rank sends in a collective.
        all_to_all (`float`, *optional*): Bytes per second in an all-to-all. Defaults to ``bandwidth``.
    """

    name: str
    latency: float
    bandwidth: float
    all_to_all: float | None = None

    def seconds(self, sent: float, messages: int = 1, *, all_to_all: bool = False) -> float:
        """Return the seconds that ``messages`` messages with ``sent`` bytes in total take.

        >>> Link("", latency=1e-5, bandwidth=1e9).seconds(1e6, messages=2)
        0.00102
        """
        bandwidth = self.bandwidth
        if all_to_all and self.all_to_all is not None:
            bandwidth = self.all_to_all
        return self.latency * messages + sent / bandwidth


# Bytes of device memory that a model cannot use: the CUDA context, NCCL's buffers and the allocator's
# fragmentation. An assumption.
RESERVED = 6e9

# Sources: NVIDIA's data sheets and architecture whitepapers (half of what they state with sparsity), AMD's data sheet,
# and https://www.techpowerup.com/gpu-specs for the H20 and the L20. What attention reaches is published for the A100
# (arXiv:2307.08691), the H100 (arXiv:2407.08608) and the B200 (FlashAttention-4), and assumed to be as on a similar
# device for the others. The A800 and the H800 are an A100 and an H100 with 400 GB/s of NVLink.
# fmt: off
_DEVICES = (
    Device("H100", 989e12, 80e9, 3.35e12, "nvlink4", host_bandwidth=PCIE5),
    Device("H100 PCIe", 756e12, 80e9, 2.0e12, "pcie5", host_bandwidth=PCIE5),
    Device("H200", 989e12, 141e9, 4.8e12, "nvlink4", host_bandwidth=PCIE5),
    Device("H20", 148e12, 96e9, 4.0e12, "nvlink4", 0.9, 0.8, host_bandwidth=PCIE5),
    Device("A100", 312e12, 80e9, 2.04e12, "nvlink3", 0.8, 0.65),
    Device("A100 40GB", 312e12, 40e9, 1.555e12, "nvlink3", 0.8, 0.65),
    Device("A100 PCIe", 312e12, 80e9, 1.935e12, "pcie4", 0.8, 0.65),
    Device("A100 40GB PCIe", 312e12, 40e9, 1.555e12, "pcie4", 0.8, 0.65),
    Device("B200", 2.25e15, 180e9, 8e12, "nvlink5", 0.72, 0.65, host_bandwidth=PCIE5),
    Device("GB200", 2.5e15, 186e9, 8e12, "nvlink5", 0.72, 0.65, host_bandwidth=PCIE5),
    Device("L20", 119.5e12, 48e9, 0.864e12, "pcie4", 0.85, 0.7),
    Device("L40S", 362e12, 48e9, 0.864e12, "pcie4", 0.6),
    Device("L40", 181e12, 48e9, 0.864e12, "pcie4", 0.85, 0.7),
    Device("L4", 121e12, 24e9, 0.3e12, "pcie4", 0.6),
    Device("A10", 125e12, 24e9, 0.6e12, "pcie4", 0.6),
    Device("A40", 149.7e12, 48e9, 0.696e12, "pcie4", 0.8, 0.65),
    Device("A800", 312e12, 80e9, 2.04e12, "nvlink 400", 0.8, 0.65),
    Device("A800 PCIe", 312e12, 80e9, 1.935e12, "pcie4", 0.8, 0.65),
    Device("H800", 989e12, 80e9, 3.35e12, "nvlink 400", host_bandwidth=PCIE5),
    Device("H800 PCIe", 756e12, 80e9, 2.0e12, "pcie5", host_bandwidth=PCIE5),
    Device("A6000", 154.8e12, 48e9, 0.768e12, "pcie4", 0.8, 0.65),
    Device("RTX 6000 Ada", 364.2e12, 48e9, 0.96e12, "pcie4", 0.6),
    Device("RTX PRO 6000", 503.8e12, 96e9, 1.792e12, "pcie5", 0.6, host_bandwidth=PCIE5),
    Device("RTX 3090", 71e12, 24e9, 0.936e12, "pcie4 via host", 0.9, 0.85),
    Device("RTX 4080", 97.5e12, 16e9, 0.7168e12, "pcie4 via host", 0.9, 0.85),
    Device("RTX 4090", 165e12, 24e9, 1.008e12, "pcie4 via host", 0.9, 0.85),
    Device("RTX 5090", 209.5e12, 32e9, 1.792e12, "pcie5 via host", 0.9, 0.85, host_bandwidth=PCIE5),
    Device("MI300X", 1307e12, 192e9, 5.3e12, "infinity fabric", 0.5, 0.35, host_bandwidth=PCIE5),
    # CPUs differ too much for a prediction of seconds. These assumed figures only serve to compare meshes.
    Device("CPU", 1e11, 16e9, 2e10, "gloo"),
)
# fmt: on
DEVICES = {device.name: device for device in _DEVICES}

# NCCL reaches 80 % of a line's rate (https://github.com/NVIDIA/nccl-tests/issues/212). GeForce cards have no
# peer-to-peer access, so they copy through the host (issues/74). The all-to-all of NVLink 5 follows from a
# table of https://github.com/NVIDIA/TensorRT-LLM (blog25, on Wan 2.2), InfiniBand's latency from
# nccl-tests/issues/214.
LINKS = {
    link.name: link
    for link in (
        Link("nvlink3", 16e-6, 240e9),
        Link("nvlink4", 16e-6, 370e9),
        Link("nvlink5", 16e-6, 720e9, 140e9),
        Link("nvlink 400", 16e-6, 160e9),
        Link("nvlink bridge", 16e-6, 45e9),
        Link("infinity fabric", 20e-6, 310e9),
        Link("pcie4", 25e-6, 22e9),
        Link("pcie5", 25e-6, 45e9),
        Link("pcie4 via host", 30e-6, 10e9),
        Link("pcie5 via host", 30e-6, 20e9),
        Link("infiniband", 34e-6, 48e9),
        Link("ethernet", 5e-5, 1.2e9),
        Link("gloo", 2e-4, 2e9),
    )
}
# The generations of links that the user may name without it, of devices whose usual link is of another kind.
_NVLINK = {
    **dict.fromkeys(("A100 PCIe", "A100 40GB PCIe", "A800 PCIe"), "nvlink3"),
    **dict.fromkeys(("A40", "A6000", "RTX 3090"), "nvlink bridge"),
}
_GENERATIONS = ("nvlink", "pcie")
_NUMBER = re.compile(r"\d+(\.\d+)?")
# Of a device that is described by its memory, speed and link alone: operations per byte of memory bandwidth.
_OPERATIONS_PER_BYTE = 200

# These words of device names are ignored, because they do not distinguish variants of a device in the table.
_USUAL_WORDS = {
    *("nvidia", "geforce", "tesla", "quadro", "gpu", "rtx", "generation", "amd", "instinct", "radeon", "oam"),
    *("sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "hbm2", "hbm2e", "hbm3", "hbm3e"),
}
# Of the RTX PRO 6000, the editions of a workstation; the server's has another memory bandwidth.
_EDITION = {"blackwell", "workstation", "edition"}
_GIGABYTES = re.compile(r"(\d+)gb")
# Words that are often written without a space before or after them.
_JOINED = re.compile(
    r"(nvidia|geforce|rtx|pro(?=\d)|sxm\d?|pcie|nvl\b|(?<=\d)ada\b|(?<=[a-z]\d\d\d)(?=\d+gb))"
)


def device_named(name: str | Device, *, memory: float | None = None) -> Device:
    """Return the device with this name from the table, or the one that ``"name,GB,TFLOPs,link"`` describes.

    ``name`` may be a name that CUDA reports, and be spelt as users do. ``memory``, the bytes that the device
    reports, replaces that of the table.

    >>> device_named("NVIDIA H100 80GB HBM3").name, device_named("NVIDIA A100-SXM4-40GB").name
    ('H100', 'A100 40GB')
    >>> device_named("4090").name, device_named("rtx5090").name, device_named("h100 sxm").name
    ('RTX 4090', 'RTX 5090', 'H100')
    >>> device_named("my card, 24, 140, pcie").memory
    24000000000.0

    Raises:
        TypeError: ``name`` is neither a string nor a :class:`Device` (which is returned unchanged).
        ValueError: The table does not have this device, or has only other variants of it, or a figure is no
            number.
    """
    if isinstance(name, Device):
        return name
    if not isinstance(name, str):
        raise TypeError(
            f"device is {name!r}; expected a name such as 'H100', or a para_core.devices.Device with its figures."
        )
    if "," in name:
        return _read_device(name)
    words, joined = _words_of(name), {"".join(name.lower().split())}
    fitting = [x for x in DEVICES.values() if _required_words(x) <= words or _required_words(x) == joined]
    device = max(fitting, key=lambda x: len(x.name), default=None)
    hint = ""
    if device is None:
        hint = similar_names(name, DEVICES)
    if device is not None and joined != _required_words(device):
        hint = _unknown_variant(device, words, memory)
    if device is None or hint:
        raise ValueError(
            f"device is {name!r}{hint}; expected one of {', '.join(DEVICES)}, or the "
            "figures of another one as 'name,GB,TFLOPs,link', such as 'my card,24,140,pcie' (in Python also a "
            "para_core.devices.Device)."
        )
    if memory is None:
        return device
    return replace(device, memory=memory)


def _words_of(name: str) -> set[str]:
    """Return the words of a device's name in lower case, with joined words apart, and ``80gb`` for ``80 GB``."""
    text = _JOINED.sub(r" \1 ", re.sub(r"[\s_()/-]+", " ", name.lower()))
    return set(re.sub(r"(\d) ?gb?(?= |$)", r"\1gb", " ".join(text.split())).split())


def _required_words(device: Device) -> set[str]:
    """Return the words that a name must have to mean ``device``."""
    return set(device.name.lower().split()) - {"rtx"}


def _unknown_variant(device: Device, words: set[str], memory: float | None) -> str:
    """Return how the variant that ``words`` name differs from ``device``, as a phrase for an error message.

    It is empty if the variant does not differ, or differs only in its memory and ``memory`` is given.
    """
    more = words - set(device.name.lower().split()) - _USUAL_WORDS
    if device.name == "RTX PRO 6000":
        more -= _EDITION
    sizes = {word: int(match[1]) for word in more if (match := _GIGABYTES.fullmatch(word))}
    unknown = sorted(more - set(sizes))
    if unknown:
        return f", and the table knows no {device.name} with {' '.join(unknown)!r}"
    # Accept a difference of up to 10 %, because a name may state more memory than a GPU reports: a B200 is
    # sold with 192 GB and has 180 GB.
    if memory is None and any(abs(size * 1e9 / device.memory - 1) > 0.1 for size in sizes.values()):
        return f", and the table's {device.name} has {device.memory / 1e9:.0f} GB"
    return ""


def similar_names(name: str, names: Iterable[str]) -> str:
    """Return a phrase that suggests up to three of ``names`` that are similar to ``name``; empty if none is.

    >>> similar_names("RTX 5900", ["RTX 5090", "H100"])
    ' (did you mean RTX 5090?)'
    """
    by_letters = {letters_of(candidate): candidate for candidate in names}
    letters = letters_of(name)
    similar = difflib.get_close_matches(letters, by_letters, n=3, cutoff=0.6)
    similar += [candidate for candidate in by_letters if len(letters) > 1 and letters in candidate]
    close = list(dict.fromkeys(by_letters[key] for key in similar))[:3]
    if close:
        return f" (did you mean {' or '.join(close)}?)"
    return ""


def letters_of(name: str) -> str:
    """Return the letters and digits of a name in lower case, by which spellings are compared."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read_device(text: str) -> Device:
    """Return the device of ``"name,GB,TFLOPs,link"``. Raise ValueError if a part is missing or invalid."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 4 or not all(parts):
        raise ValueError(
            f"device is {text!r}; expected a name of the table, or 'name,GB,TFLOPs,link': four parts, such as "
            "'my card,24,140,pcie'."
        )
    name, gigabytes, teraflops, link = parts
    memory = 1e9 * _require_figure(text, gigabytes, "GB of memory")
    speed = 1e12 * _require_figure(text, teraflops, "TFLOPs (dense, 16 bits)")
    device = Device(name, speed, memory, speed / _OPERATIONS_PER_BYTE, "pcie4")
    usual_link, host_bandwidth = link_named(link, device).name, PCIE4
    if usual_link in ("nvlink5", "pcie5", "pcie5 via host"):
        host_bandwidth = PCIE5
    return replace(device, link=usual_link, host_bandwidth=host_bandwidth)


def _require_figure(text: str, figure: str, unit: str) -> float:
    """Return ``figure`` of the described device ``text`` as a number; raise ValueError if it is not positive."""
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


def gpu_at_hand(device: torch.device | None = None) -> Device:
    """Return the figures of a GPU of this process, by default the current one, with the memory that the GPU
    reports.

    Raises:
        ValueError: The table does not have this GPU.
    """
    # Imported here, because predictions need no torch.
    import torch

    index: torch.device | int | None = device
    if index is None:
        index = torch.cuda.current_device()
    return device_named(
        torch.cuda.get_device_name(index), memory=torch.cuda.get_device_properties(index).total_memory
    )


def link_named(name: str | Link | None, device: Device) -> Link:
    """Return the link with this name from the table; for None, the usual link of ``device``.

    ``"nvlink"`` and ``"pcie"`` without a number mean the generation that ``device`` has. A number means the
    gigabytes per second that a device sends.

    >>> link_named("11", DEVICES["L20"]).bandwidth
    11000000000.0

    Raises:
        TypeError: ``name`` is neither None, a string nor a :class:`Link` (which is returned unchanged).
        ValueError: The table does not have this link.
    """
    if isinstance(name, Link):
        return name
    if name is None:
        name = device.link
    if not isinstance(name, str):
        raise TypeError(
            f"link is {name!r}; expected a name such as 'nvlink', or a para_core.devices.Link with its figures."
        )
    wanted = " ".join(name.lower().split())
    number = wanted.removesuffix(" gb/s")
    if _NUMBER.fullmatch(number) and float(number) > 0:
        # A device that the user describes may have such a link itself.
        latency = LINKS.get(device.link, LINKS["pcie4"]).latency
        return Link(f"{number} GB/s", latency, float(number) * 1e9)
    if wanted in _GENERATIONS and device.link.startswith(wanted):
        wanted = device.link
    elif wanted == "nvlink":
        wanted = _NVLINK.get(device.name, "nvlink4")
    elif wanted == "pcie":
        wanted = "pcie5"
        if device.host_bandwidth == PCIE4:
            wanted = "pcie4"
    if wanted not in LINKS:
        link_names = [*_GENERATIONS, *LINKS]
        raise ValueError(
            f"link is {name!r}{similar_names(name, link_names)}; expected one of {', '.join(link_names)}, or GB/s; "
            "in Python also a para_core.devices.Link with its figures."
        )
    return LINKS[wanted]
