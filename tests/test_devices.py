"""Devices are found by the names that CUDA reports and users type, and other variants are refused."""

import re
from dataclasses import replace

import pytest

from para_core.devices import DEVICES, LINKS, PCIE4, device_named, gpu_at_hand, link_named
from tests.gpus import gpu_named

# Spellings of devices, as CUDA and as users write them.
NAMES = {
    "H100": ("NVIDIA H100 80GB HBM3", "h100 sxm", "H100SXM5", "H100 80GB"),
    "H100 PCIe": ("NVIDIA H100 PCIe", "h100pcie"),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", "rtx4090", "4090"),
    "RTX 3090": ("RTX-3090-24GB",),
    "A100": ("NVIDIA A100-SXM4-80GB",),
    "A100 40GB": ("NVIDIA A100-SXM4-40GB", "A100-40GB", "a100 40 gb", "a100 40g"),
    "A100 PCIe": ("NVIDIA A100 80GB PCIe",),
    "A100 40GB PCIe": ("NVIDIA A100-PCIE-40GB",),
    "B200": ("B200 192GB",),
    "L40S": ("L 40S",),
    "A6000": ("rtxA6000",),
    "RTX 6000 Ada": ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
    "RTX PRO 6000": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
    "MI300X": ("AMD Instinct MI300X",),
}


def test_device_is_found_in_any_spelling():
    for name, spellings in NAMES.items():
        assert [device_named(spelling).name for spelling in spellings] == [name] * len(spellings)
    assert {name: device_named(name.lower()) for name in DEVICES} == DEVICES
    assert {device.link for device in DEVICES.values()} <= LINKS.keys()


@pytest.mark.parametrize(
    ("name", "memory", "usual", "nvlink"),
    [
        ("A100", 80, "nvlink3", "nvlink3"),
        ("A100 40GB PCIe", 40, "pcie4", "nvlink3"),
        ("B200", 180, "nvlink5", "nvlink5"),
        ("RTX 3090", 24, "pcie4 via host", "nvlink bridge"),
    ],
)
def test_variants_have_their_own_memory_and_links(name, memory, usual, nvlink):
    device = device_named(name)
    assert device.memory == memory * 1e9
    assert (link_named(None, device), link_named("NVLink", device)) == (LINKS[usual], LINKS[nvlink])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("TPU v5", "TPU v5.*H100"),
        ("rtx 5900", "did you mean RTX 5090"),
        ("rtx 6000", "did you mean RTX PRO 6000 or RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "'server'"),
        ("4090 48GB", "RTX 4090 has 24 GB"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "'1g.5gb mig'"),
        ("NVIDIA H100 NVL", "'nvl'"),
        ("card,24,140", "four parts"),
        (",24,140,pcie", "four parts"),
        ("card,24 GB,140,pcie", "'24 GB' stands for GB of memory"),
        ("card,24,-1,pcie", "'-1' stands for TFLOPs"),
        ("card,24,inf,pcie", "'inf' stands for TFLOPs"),
        ("card,24,140,nvlnk", "link is 'nvlnk' .did you mean nvlink"),
    ],
)
def test_unknown_variant_or_wrong_description_raises(text, error):
    with pytest.raises(ValueError, match=error):
        device_named(text)


def test_device_and_link_can_be_described():
    device = device_named(" my card, 24,140.5 ,NVLink")
    assert (device.name, device.memory, device.products, device.link) == ("my card", 24e9, 140.5e12, "nvlink4")
    device = device_named("my card,24,140,25")
    assert (link_named(None, device).bandwidth, device.host_bandwidth) == (25e9, PCIE4)
    for speed in ("11", "11.0", " 11 ", "11 GB/s"):
        link = link_named(speed, DEVICES["L20"])
        assert (link.bandwidth, link.latency) == (11e9, LINKS["pcie4"].latency)
    for speed in ("0", "-3", "inf", "nan", "1e3", "string"):
        with pytest.raises(ValueError, match=f"link is '{re.escape(speed)}'.*or GB/s"):
            link_named(speed, DEVICES["L20"])


def test_gpu_at_hand_is_asked_for_its_memory():
    with gpu_named("NVIDIA A100-SXM-64GB", memory=68e9):
        assert gpu_at_hand() == replace(DEVICES["A100"], memory=68e9)
