"""Block sizes of a call: the table's row for its shape, with room for further inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from para_core.kernels import attention_configs
from para_core.kernels.attention_configs import FLOAT32, TABLE, ConfigKey, KernelCall, adjusted, config_for


@pytest.fixture
def ampere(monkeypatch, tmp_path):
    """Return a device of compute capability 8.0 without tuned block sizes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU that is not here")
    attention_configs._on_device.cache_clear()
    yield
    attention_configs._on_device.cache_clear()


def on_cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype, is_cuda=True, device=SimpleNamespace(index=0))


QUERY, SHORT = on_cuda(2, 24, 4096, 128), on_cuda(2, 24, 1024, 72)
ROW, SHORT_ROW = TABLE[ConfigKey(80, 128, False, "long")], TABLE[ConfigKey(80, 96, False, "short")]
TWO_RANGES = on_cuda(2, 2, 2)
BYTES, BITS = on_cuda(2, 1, 4096, 4096, dtype=torch.bool), on_cuda(2, 1, 4096, 128, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, ROW),
        ({"mask": on_cuda(2, 1, 1, 4096, dtype=torch.bool)}, ROW),
        ({"mask": BYTES}, adjusted(ROW, 128, mask="bytes")),
        ({"mask": on_cuda(1, 1, 4096, 4096)}, adjusted(ROW, 128, mask="bytes")),
        ({"mask": BITS, "key_ranges": TWO_RANGES}, adjusted(ROW, 128, mask="bits", ranges=2)),
        ({"key_ranges": on_cuda(1, 1, 2)}, adjusted(ROW, 128, ranges=1)),
        ({"query": SHORT, "value": SHORT}, SHORT_ROW),
        ({"query": SHORT, "value": SHORT, "mask": BYTES}, adjusted(SHORT_ROW, 96, mask="bytes")),
        ({"value": on_cuda(2, 24, 4096, 200)}, TABLE[ConfigKey(80, 256, False, "long")]),
        ({"query": on_cuda(2, 24, 4096, 128, dtype=torch.float32)}, FLOAT32[0]),
        ({"query": on_cuda(2, 24, 4096, 136, dtype=torch.float32)}, FLOAT32[1]),
    ],
)
def test_call_uses_the_row_of_its_shape(ampere, call, expected):
    assert config_for(KernelCall(**{"query": QUERY, "key": QUERY, "value": QUERY, **call})) == expected


def test_int8_tile_counts_ranges_and_mask(ampere):
    call = KernelCall(QUERY, QUERY, QUERY)
    plain = config_for(call, eight_bits=True)
    assert config_for(call._replace(mask=BYTES), eight_bits=True).block_n < plain.block_n
    assert config_for(call._replace(key_ranges=TWO_RANGES), eight_bits=True).spills > plain.spills
    wide = on_cuda(2, 24, 4096, 136, dtype=torch.float32)
    assert config_for(KernelCall(wide, wide, wide), eight_bits=True).block_m == 128


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_tile_holds_whole_instructions_and_words(case):
    for mask, least in (("none", 16), ("bytes", 16), ("bits", 32)):
        for ranges in (0, 1, 2):
            config = adjusted(TABLE[case], case.head_dim, mask=mask, ranges=ranges)
            assert config.block_n % least == 0
            assert config.block_n <= TABLE[case].block_n
            # A warp multiplies at least 16 rows.
            assert config.num_warps <= config.block_m // 16 or config.num_warps == TABLE[case].num_warps
