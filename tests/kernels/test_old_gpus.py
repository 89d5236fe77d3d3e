"""On GPUs for which Triton does not compile, every operator takes its plain PyTorch form."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from para_core import triton_support
from para_core.attention import merge, pack_ops, swap
from para_core.cache import residual_operators
from para_core.kernels.pack_reference import CopyRegion
from para_core.spatial import norm as spatial_norm

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PACKED = pack_ops.as_numbers([CopyRegion(0, 0, 3, 0, 2, 0, 16)])
ROUNDED = pack_ops.as_numbers([CopyRegion(0, 0, 3, 0, 2, 0, 24)])


def zeros(*shape, dtype=torch.bfloat16, device=CPU):
    return torch.zeros(shape, dtype=dtype, device=device)


def _partial():
    return zeros(1, 2, 3, 8), zeros(1, 2, 3, dtype=torch.float32)


CALLS = {
    "merge": lambda: merge.merge_on_gpu(*_partial(), *_partial()),
    "merge_": lambda: merge.merge_on_gpu_in_place(zeros(1, 2, 3, 8, dtype=torch.float32), _partial()[1], *_partial()),
    "pack": lambda: pack_ops.pack_on_gpu([zeros(1, 2, 3, 8)], PACKED, 48),
    "unpack": lambda: pack_ops.unpack_on_gpu(zeros(48), PACKED, [1, 2, 3, 8]),
    "pack to 8 bits": lambda: pack_ops.pack_on_gpu([zeros(1, 2, 3, 8)], ROUNDED, 72, torch.int8),
    "unpack from 8 bits": lambda: pack_ops.unpack_on_gpu(
        zeros(72, dtype=torch.uint8), ROUNDED, [1, 2, 3, 8], torch.int8, torch.bfloat16
    ),
    "residual_change": lambda: residual_operators.change_on_gpu(zeros(2, 8), zeros(2, 8)),
    "forecast": lambda: residual_operators.forecast_on_gpu(zeros(2, 8), [zeros(2, 8)], [1.0]),
    "group_moments": lambda: spatial_norm.moments_on_gpu(zeros(1, 4, 3, 3), 2),
    "group_normalized": lambda: spatial_norm.normalized_on_gpu(
        zeros(1, 4, 3, 3), zeros(2, 2, 1, 2), zeros(2), 2, zeros(4), zeros(4), 1e-5
    ),
}


@pytest.fixture
def capability(monkeypatch):
    """Set the compute capability of the GPU, and return the list of devices whose capability is read."""
    triton_support.load_kernel.cache_clear()
    devices = []

    def be(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: devices.append(device) or capability)
        return devices

    yield be
    triton_support.load_kernel.cache_clear()


@pytest.mark.parametrize("name", CALLS)
def test_operator_falls_back_on_old_gpus(monkeypatch, name):
    devices = []

    def without(module, device=None):
        devices.append(device)

    for module in (pack_ops, merge, residual_operators, spatial_norm):
        monkeypatch.setattr(module, "load_kernel", without)
    CALLS[name]()
    assert devices == [CPU]


def test_the_test_covers_every_operator_that_launches_a_kernel():
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("para_core::")}
    with_form = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")}
    # Attention in Triton runs only if it is named, and refuses such a GPU by its capability.
    assert {name.removeprefix("para_core::") for name in with_form} - {
        "triton_attention",
        "triton_attention_int8",
    } <= set(CALLS)


@pytest.mark.parametrize(("numbers", "takes"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_a_device_is_asked_once(capability, numbers, takes):
    devices = capability(*numbers)
    assert [(triton_support.load_kernel("pack", GPU) is not None) for _ in range(3)] == [takes] * 3
    assert devices == [GPU]
    assert triton_support.load_kernel("pack", torch.device("cuda", 1)) is (
        triton_support.load_kernel("pack") if takes else None
    )
    # A CPU (Triton's interpreter) and meta tensors have no capability.
    assert triton_support.load_kernel("pack", CPU) is not None
    assert len(devices) == 2


def test_an_exchange_is_planned_without_kernels_before_ampere(capability):
    capability(7, 0)
    with FakeTensorMode(), torch.no_grad():
        assert not swap.takes_kernels(zeros(1, 2, 3, 8, device=GPU))
    triton_support.load_kernel.cache_clear()
    capability(8, 6)
    with FakeTensorMode(), torch.no_grad():
        assert swap.takes_kernels(zeros(1, 2, 3, 8, device=GPU))
