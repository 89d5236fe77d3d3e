"""On GPUs for which Triton does not compile, or without Triton, operators take their plain PyTorch form."""

import os
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from para_core import triton_support
from para_core.attention import merge, pack_ops, swap
from para_core.cache import residual_operators
from para_core.spatial import norm as spatial_norm

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
FLAT, HEADS, IMAGE = torch.zeros(2, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 4, 3, 3)
CALLS = {
    "merge": lambda: merge.merge_on_gpu(*[HEADS, HEADS[..., 0]] * 2),
    "pack": lambda: pack_ops.pack_on_gpu([HEADS], [0, 0, 3, 0, 2, 0, 16], 48),
    "unpack": lambda: pack_ops.unpack_on_gpu(FLAT, [0, 0, 1, 0, 2, 0, 8], [1, 2, 1, 4]),
    "residual_change": lambda: residual_operators.change_on_gpu(FLAT, FLAT),
    "forecast": lambda: residual_operators.forecast_on_gpu(FLAT, [FLAT], [1.0]),
    "group_moments": lambda: spatial_norm.moments_on_gpu(IMAGE, 2),
    "group_normalized": lambda: spatial_norm.normalized_on_gpu(
        IMAGE, torch.zeros(2, 2, 1, 2), torch.zeros(2), 2, None, None, 1e-5
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_operator_falls_back_by_the_device_of_its_tensors(monkeypatch, name):
    devices = []
    for module in (pack_ops, merge, residual_operators, spatial_norm):
        monkeypatch.setattr(module, "load_kernel", lambda _, device=None: devices.append(device))
    CALLS[name]()
    assert devices == [CPU]


@pytest.fixture(autouse=True)
def _forget():
    triton_support.load_kernel.cache_clear()
    yield
    triton_support.load_kernel.cache_clear()


@pytest.mark.parametrize(("numbers", "takes"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_device_is_asked_once(monkeypatch, numbers, takes):
    devices = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices.append(device) or numbers)
    assert [(triton_support.load_kernel("pack", GPU) is not None) for _ in range(3)] == [takes] * 3
    # A CPU (Triton's interpreter) and meta tensors have no capability.
    assert triton_support.load_kernel("pack", CPU) is not None
    assert devices == [GPU]
    with FakeTensorMode(), torch.no_grad():
        assert swap.takes_kernels(torch.zeros(1, 2, 3, 8, device=GPU)) == takes


def test_kernel_needs_triton_and_a_compiler():
    with mock.patch.object(triton_support, "import_module", side_effect=ModuleNotFoundError("no triton")):
        assert triton_support.load_kernel("pack") is None
    triton_support.load_kernel.cache_clear()
    with mock.patch.dict(os.environ, {"PATH": "", "CC": ""}):
        assert triton_support.load_kernel("pack") is None
