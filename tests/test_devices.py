"""Devices are found by the names that CUDA reports and users type, and other variants are refused."""

import re
from dataclasses import replace

import pytest

from para_core.devices import DEVICES, LINKS, device_named, gpu_at_hand, link_named
from tests.gpus import gpu_named


def test_names_are_those_of_cuda_too():
    assert device_named("NVIDIA H100 80GB HBM3") is DEVICES["H100"]
    assert device_named("NVIDIA H100 PCIe") is DEVICES["H100 PCIe"]
    assert device_named("NVIDIA GeForce RTX 4090") is DEVICES["RTX 4090"]
    with pytest.raises(ValueError, match=r"TPU v5.*H100"):
        device_named("TPU v5")
    assert link_named("nvlink", DEVICES["A100"]) is LINKS["nvlink3"]
    assert link_named("NVLink", DEVICES["RTX 3090"]) is LINKS["nvlink bridge"]
    assert link_named("nvlink", DEVICES["H200"]) is LINKS["nvlink4"]
    with pytest.raises(ValueError, match="link is 'string'"):
        link_named("string", DEVICES["H100"])


@pytest.mark.parametrize(
    ("name", "device", "memory", "link"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", 80, "nvlink3"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 40, "nvlink3"),
        ("A100-40GB", "A100 40GB", 40, "nvlink3"),
        ("a100 40 gb", "A100 40GB", 40, "nvlink3"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe", 80, "pcie4"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe", 40, "pcie4"),
        ("H100 80GB", "H100", 80, "nvlink4"),
        ("B200 192GB", "B200", 180, "nvlink5"),
    ],
)
def test_variants_have_their_own_memory_and_link(name, device, memory, link):
    spec = device_named(name)
    assert spec is DEVICES[device]
    assert (spec.memory, link_named(None, spec)) == (memory * 1e9, LINKS[link])
    if "A100" in device:
        assert (link_named("nvlink", spec), link_named("pcie", spec)) == (LINKS["nvlink3"], LINKS["pcie4"])


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("RTX-3090-24GB", "RTX 3090"),
        ("h100 sxm", "H100"),
        ("H100SXM5", "H100"),
        ("h100pcie", "H100 PCIe"),
        ("a100 40g", "A100 40GB"),
        ("L 40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("rtxA6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("rtx6000ada", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("rtxpro6000", "RTX PRO 6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("a800-sxm4-80gb", "A800"),
    ],
)
def test_device_is_found_in_any_spelling(spelling, name):
    assert device_named(spelling) is DEVICES[name]


def test_every_device_is_found_by_its_own_name():
    assert {name: device_named(name.lower()).name for name in DEVICES} == {name: name for name in DEVICES}
    assert {device.link for device in DEVICES.values()} <= LINKS.keys()


@pytest.mark.parametrize(
    ("typo", "meant"), [("rtx 5900", "RTX 5090"), ("rtx 6000", "RTX PRO 6000 or RTX 6000 Ada"), ("mi300", "MI300X")]
)
def test_misspelt_device_names_what_was_meant(typo, meant):
    with pytest.raises(ValueError, match=f"did you mean {meant}"):
        device_named(typo)


def test_device_can_be_described():
    device = device_named(" my card, 24,140.5 ,NVLink")
    assert (device.name, device.memory, device.products, device.link) == ("my card", 24e9, 140.5e12, "nvlink4")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("card,24,140", "four parts"),
        ("card,24,140,pcie,3", "four parts"),
        (",24,140,pcie", "four parts"),
        ("card,24 GB,140,pcie", "'24 GB' stands for GB of memory"),
        ("card,24,-1,pcie", "'-1' stands for TFLOPs"),
        ("card,nan,140,pcie", "'nan' stands for GB"),
        ("card,24,inf,pcie", "'inf' stands for TFLOPs"),
        ("card,24,140,nvlnk", "link is 'nvlnk' .did you mean nvlink"),
    ],
)
def test_device_that_is_described_wrongly_raises(text, error):
    with pytest.raises(ValueError, match=error):
        device_named(text)


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "'server'"),
        ("RTX 4080 SUPER", "'super'"),
        ("4090 48GB", "RTX 4090 has 24 GB"),
        ("NVIDIA A100-SXM-64GB", "A100 has 80 GB"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "'1g.5gb mig'"),
        ("NVIDIA H100 NVL", "'nvl'"),
        ("NVIDIA GeForce RTX 4090 Laptop", "'laptop'"),
    ],
)
def test_unknown_variant_is_not_planned_as_the_usual_one(name, unknown):
    with pytest.raises(ValueError, match=re.escape(unknown)):
        device_named(name)


def test_gpu_at_hand_is_asked_for_its_memory():
    with gpu_named("NVIDIA A100-SXM-64GB", memory=68e9):
        assert gpu_at_hand() == replace(DEVICES["A100"], memory=68e9)
    with gpu_named("NVIDIA H100 NVL"), pytest.raises(ValueError, match="nvl"):
        gpu_at_hand()


@pytest.mark.parametrize("speed", ["11", "11.0", " 11 "])
def test_link_of_any_speed_is_a_number(speed):
    link = link_named(speed, DEVICES["L20"])
    assert (link.bandwidth, link.latency) == (11e9, LINKS["pcie4"].latency)


@pytest.mark.parametrize("speed", ["0", "-3", "inf", "nan", "1e3", "11 GB/s"])
def test_link_of_no_speed_is_refused(speed):
    with pytest.raises(ValueError, match="or GB/s"):
        link_named(speed, DEVICES["L20"])
