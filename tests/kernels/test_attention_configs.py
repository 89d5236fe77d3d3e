"""Block sizes of a call: the table's row for its shape, with room for further inputs."""

from types import SimpleNamespace

import pytest
import torch

from para_core.kernels import attention_configs
from para_core.kernels.attention_configs import FLOAT32, FLOAT32_WIDE, TABLE, Config, KernelCall, config_for


def on_cuda(*shape, dtype=torch.bfloat16):
    return SimpleNamespace(shape=shape, dtype=dtype, is_cuda=True, device=SimpleNamespace(index=0))


def heads(dim, dtype=torch.bfloat16):
    return on_cuda(2, 24, 4096, dim, dtype=dtype)


D72, D128, D136, D200 = (heads(dim) for dim in (72, 128, 136, 200))
FP32, BYTES = torch.float32, {"mask": on_cuda(2, 1, 4096, 4096, dtype=torch.bool)}
BITS = {"mask": on_cuda(2, 1, 4096, 128, dtype=torch.int32)}
# Query and key, value, further inputs, whether keys are in 8 bits, and the block sizes on compute capability 8.0.
CALLS = [
    (D128, D128, {}, False, Config(128, 64, 8, 3)),
    (D72, D72, {}, False, TABLE[80][96]),
    (D128, D200, {}, False, TABLE[80][256]),
    (D128, D200, {}, True, Config(128, 32, 8, 2, split_values=True)),
    (D128, D128, {"mask": on_cuda(2, 1, 1, 4096, dtype=torch.bool)}, False, TABLE[80][128]),
    (heads(64), heads(64), BYTES, False, Config(128, 32, 8, 2)),
    (D136, D136, BYTES, True, Config(128, 16, 8, 2, split_values=True)),
    (D136, D136, BITS, False, Config(128, 32, 8, 2, split_values=True)),
    (D136, D136, {"key_ranges": on_cuda(2, 2, 2)}, False, Config(128, 32, 8, 2, split_values=True)),
    (heads(128, FP32), heads(128, FP32), {}, False, FLOAT32),
    (heads(136, FP32), heads(136, FP32), {}, False, FLOAT32_WIDE),
]


@pytest.mark.parametrize(("query", "value", "more", "eight_bits", "expected"), CALLS)
def test_call_uses_the_row_of_its_shape(monkeypatch, query, value, more, eight_bits, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    attention_configs.row_of_device.cache_clear()
    assert config_for(KernelCall(query, query, value, **more), eight_bits=eight_bits) == expected
    attention_configs.row_of_device.cache_clear()


def test_device_before_ampere_is_an_error():
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5"):
        attention_configs.row_of(7, 5)
