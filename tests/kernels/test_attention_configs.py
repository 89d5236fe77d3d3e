"""Block sizes of a call: the table's row for its shape, with room for further inputs."""

from types import SimpleNamespace

import pytest
import torch

from para_core.kernels import attention_configs
from para_core.kernels.attention_configs import FLOAT32, FLOAT32_WIDE, TABLE, Config, KernelCall, config_for, fit_inputs


def on_cuda(*shape, dtype=torch.bfloat16):
    return SimpleNamespace(shape=shape, dtype=dtype, is_cuda=True, device=SimpleNamespace(index=0))


def heads(dim, dtype=torch.bfloat16):
    return on_cuda(2, 24, 4096, dim, dtype=dtype)


FP32, BYTES = torch.float32, on_cuda(2, 1, 4096, 4096, dtype=torch.bool)
# Query, value, further inputs, and the block sizes on a GPU of compute capability 8.0.
CALLS = [
    (heads(128), heads(128), {}, TABLE[80][128]),
    (heads(72), heads(72), {}, TABLE[80][96]),
    (heads(128), heads(200), {}, TABLE[80][256]),
    (heads(128), heads(128), {"mask": on_cuda(2, 1, 1, 4096, dtype=torch.bool)}, TABLE[80][128]),
    (heads(128), heads(128), {"mask": BYTES}, Config(128, 32, 8, 2)),
    (heads(128), heads(128), {"mask": on_cuda(1, 1, 4096, 4096)}, Config(128, 32, 8, 2)),
    (heads(128), heads(128), {"mask": on_cuda(2, 1, 4096, 128, dtype=torch.int32)}, Config(128, 64, 8, 3)),
    (heads(136), heads(136), {"key_ranges": on_cuda(2, 2, 2)}, Config(128, 32, 8, 2, split_values=True)),
    (heads(128, FP32), heads(128, FP32), {}, FLOAT32),
    (heads(136, FP32), heads(136, FP32), {}, FLOAT32_WIDE),
]


@pytest.mark.parametrize(("query", "value", "more", "expected"), CALLS)
def test_call_uses_the_row_of_its_shape(monkeypatch, query, value, more, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    attention_configs.row_of_device.cache_clear()
    assert config_for(KernelCall(query, query, value, **more)) == expected
    attention_configs.row_of_device.cache_clear()


# The largest number of keys per tile by mask and number of ranges: of head dims up to 128, and above.
MOST_KEYS = {
    ("none", 0): (128, 128),
    ("none", 1): (64, 64),
    ("none", 2): (64, 32),
    ("bits", 0): (64, 32),
    ("bytes", 2): (32, 16),
}


@pytest.mark.parametrize("arch", TABLE)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("mask", "ranges"), MOST_KEYS)
def test_inputs_limit_the_tile(arch, head_dim, mask, ranges):
    row, is_wide = TABLE[arch][head_dim], head_dim > 128
    for eight_bits in (False, True):
        config = fit_inputs(arch, head_dim, mask=mask, ranges=ranges, eight_bits=eight_bits)
        most = min(row.block_n, MOST_KEYS[mask, ranges][is_wide])
        assert config.block_n == (min(most, 32 if is_wide else 64) if eight_bits else most)
        # A warp multiplies at least 16 rows.
        assert config.num_warps == (row.num_warps if mask == "none" else max(row.num_warps, row.block_m // 16))
        assert config.num_stages == (2 if mask == "bytes" else row.num_stages)


def test_device_before_ampere_is_an_error():
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5"):
        attention_configs.row_of(7, 5)
