"""Without Triton, or on GPUs for which it does not compile, no kernel is loaded: operators run in plain PyTorch."""

import os
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from para_core import triton_support
from para_core.attention import swap

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# Each kernel is an optional feature, and this module of the same folder is not.
MODULE = "device_tables"


@pytest.fixture(autouse=True)
def _forget():
    triton_support.load_kernel.cache_clear()
    yield
    triton_support.load_kernel.cache_clear()


@pytest.mark.parametrize(("numbers", "takes"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_device_is_asked_once_and_an_exchange_takes_kernels_on_new_gpus(monkeypatch, numbers, takes):
    devices = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices.append(device) or numbers)
    assert [(triton_support.load_kernel(MODULE, GPU) is not None) for _ in range(3)] == [takes] * 3
    # A CPU (Triton's interpreter) and meta tensors have no capability.
    assert triton_support.load_kernel(MODULE, CPU) is not None
    assert devices == [GPU]
    with FakeTensorMode(), torch.no_grad():
        assert swap.takes_kernels(torch.zeros(1, 2, 3, 8, device=GPU)) == takes


def test_kernel_needs_triton_and_a_compiler():
    with mock.patch.object(triton_support, "_HAS_TRITON", False):
        assert triton_support.load_kernel(MODULE) is None
    triton_support.load_kernel.cache_clear()
    with mock.patch.dict(os.environ, {"PATH": "", "CC": ""}):
        assert triton_support.load_kernel(MODULE) is None


def test_broken_import_of_a_kernel_is_an_error():
    patch = mock.patch.object(triton_support, "import_module", side_effect=ImportError("cannot import name"))
    with patch, pytest.raises(ImportError, match="cannot import name"):
        triton_support.load_kernel(MODULE)
