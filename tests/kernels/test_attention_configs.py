"""Block sizes of a call: the table's row for its shape, with room for further inputs."""

from __future__ import annotations

import doctest
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from para_core.kernels import attention_configs
from para_core.kernels.attention_configs import (
    FLOAT32,
    FLOAT32_WIDE,
    INTERPRETED,
    INTERPRETED_BITS,
    TABLE,
    KernelCall,
    config_for,
    fit_inputs,
)


@pytest.fixture
def ampere(monkeypatch):
    """Let the current device have compute capability 8.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    attention_configs.row_of_device.cache_clear()
    yield
    attention_configs.row_of_device.cache_clear()


def on_cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype, is_cuda=True, device=SimpleNamespace(index=0))


QUERY, NARROW = on_cuda(2, 24, 4096, 128), on_cuda(2, 24, 1024, 72)
TWO_RANGES = on_cuda(2, 2, 2)
BYTES, BITS = on_cuda(2, 1, 4096, 4096, dtype=torch.bool), on_cuda(2, 1, 4096, 128, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, TABLE[80][128]),
        ({"mask": on_cuda(2, 1, 1, 4096, dtype=torch.bool)}, TABLE[80][128]),
        ({"mask": BYTES}, fit_inputs(80, 128, mask="bytes")),
        ({"mask": on_cuda(1, 1, 4096, 4096)}, fit_inputs(80, 128, mask="bytes")),
        ({"mask": BITS, "key_ranges": TWO_RANGES}, fit_inputs(80, 128, mask="bits", ranges=2)),
        ({"key_ranges": on_cuda(1, 1, 2)}, fit_inputs(80, 128, ranges=1)),
        ({"query": NARROW, "value": NARROW}, TABLE[80][96]),
        ({"query": NARROW, "value": NARROW, "mask": BYTES}, fit_inputs(80, 96, mask="bytes")),
        ({"value": on_cuda(2, 24, 4096, 200)}, TABLE[80][256]),
        ({"query": on_cuda(2, 24, 4096, 128, dtype=torch.float32)}, FLOAT32),
        ({"query": on_cuda(2, 24, 4096, 136, dtype=torch.float32)}, FLOAT32_WIDE),
    ],
)
def test_call_uses_the_row_of_its_shape(ampere, call, expected):
    assert config_for(KernelCall(**{"query": QUERY, "key": QUERY, "value": QUERY, **call})) == expected


def test_interpreter_has_smallest_tiles():
    x = torch.empty(1, 1, 5000, 64)
    assert config_for(KernelCall(x, x, x)) == INTERPRETED
    words = torch.empty(1, 1, 5000, 157, dtype=torch.int32)
    assert config_for(KernelCall(x, x, x, mask=words)) == INTERPRETED_BITS


def test_int8_tile_counts_ranges_and_mask(ampere):
    call = KernelCall(QUERY, QUERY, QUERY)
    plain = config_for(call, eight_bits=True)
    assert plain.block_n <= config_for(call).block_n
    assert config_for(call._replace(mask=BYTES), eight_bits=True).block_n < plain.block_n
    wide = on_cuda(2, 24, 4096, 136)
    two_ranges = KernelCall(wide, wide, wide, key_ranges=TWO_RANGES)
    assert config_for(two_ranges, eight_bits=True).block_n == 32


@pytest.mark.parametrize("arch", TABLE)
@pytest.mark.parametrize("head_dim", TABLE[80])
def test_tile_holds_whole_instructions_and_words(arch, head_dim):
    row = TABLE[arch][head_dim]
    for mask, least in (("none", 16), ("bytes", 16), ("bits", 32)):
        for ranges in (0, 1, 2):
            config = fit_inputs(arch, head_dim, mask=mask, ranges=ranges)
            assert config.block_n % least == 0
            assert config.block_n <= row.block_n
            # A warp multiplies at least 16 rows.
            assert config.num_warps <= config.block_m // 16 or config.num_warps == row.num_warps


def test_table_has_each_head_dim_for_each_arch():
    assert {tuple(rows) for rows in TABLE.values()} == {(64, 96, 128, 256)}


@pytest.mark.parametrize("module", ["attention_configs", "attention_launch"])
def test_the_doctests_hold(module):
    result = doctest.testmod(import_module(f"para_core.kernels.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_a_device_before_ampere_is_an_error():
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5"):
        attention_configs.row_of(7, 5)
