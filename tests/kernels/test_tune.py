"""Block sizes: the table, what tuning finds with a given clock, and the file that keeps the result."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest
import torch
from triton.runtime.errors import OutOfResources

from para_core.kernels import attention_configs, tune
from para_core.kernels.attention_configs import (
    TABLE,
    Config,
    ConfigKey,
    KernelCall,
    cache_file,
    config_for,
    keep,
    tuned,
)

CASE = ConfigKey(90, 128, False, "long")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    attention_configs._on_device.cache_clear()
    yield cache_file()
    attention_configs._on_device.cache_clear()


def clock_with(times, otherwise=1.0):
    def clock(case, config):
        milliseconds = times.get((config.block_m, config.block_n, config.num_warps, config.num_stages), otherwise)
        if milliseconds is None:
            raise OutOfResources(300000, 232448, "shared memory")
        return milliseconds

    return clock


def own_blocks(case=CASE):
    return tune.blocks_of(TABLE[case])


def test_the_fastest_candidate_wins():
    best, times = tune.fastest(CASE, clock_with({(64, 64, 4, 2): 0.5}))
    assert tune.blocks_of(best) == (64, 64, 4, 2)
    assert times[best] == 0.5
    assert len(times) == len(set(map(tune.blocks_of, times)))


def test_row_of_the_table_stays_without_a_clear_gain():
    best, _ = tune.fastest(CASE, clock_with({own_blocks(): 1.0, (64, 64, 4, 2): 0.99}, otherwise=2.0))
    assert best == TABLE[CASE]


def test_what_does_not_fit_is_no_candidate():
    best, times = tune.fastest(CASE, clock_with({own_blocks(): None, (64, 64, 4, 2): 0.9}))
    assert tune.blocks_of(best) == (64, 64, 4, 2)
    assert TABLE[CASE] not in times
    with pytest.raises(RuntimeError, match="sm_90 D=128 full long"):
        tune.fastest(CASE, clock_with({}, otherwise=None))


def test_one_slow_measurement_does_not_decide():
    slow = iter([9.0])

    def clock(case, config):
        return next(slow, 0.5) if tune.blocks_of(config) == (64, 64, 4, 2) else 1.0

    assert tune.blocks_of(tune.fastest(CASE, clock)[0]) == (64, 64, 4, 2)


def test_candidates_begin_with_table_and_fit_registers():
    for case in TABLE:
        first, *others = tune.candidates(case)
        assert first == TABLE[case]
        assert all(config.block_m * case.head_dim <= config.num_warps * 32 * 128 for config in others)


def test_tuned_blocks_are_used_on_that_device_only(cache, monkeypatch):
    config = Config(64, 64, 4, 2)
    assert keep("NVIDIA H200", {CASE: config}) == cache
    keep("NVIDIA A100", {ConfigKey(80, 64, False, "long"): config})
    keep("NVIDIA H200", {ConfigKey(90, 64, True, "short"): config})
    assert tuned("NVIDIA H200") == {CASE: config, ConfigKey(90, 64, True, "short"): config}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for name, expected in (("NVIDIA H200", config), ("NVIDIA H100", TABLE[CASE])):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index, name=name: name)
        attention_configs._on_device.cache_clear()
        assert attention_configs._on_device(0, 128, False, "long") == expected
        assert attention_configs._on_device(0, 96, False, "long") == TABLE[ConfigKey(90, 96, False, "long")]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"%s": [{"case": {}}]}', '{"%s": 3}'])
def test_a_file_that_cannot_be_read_is_no_error(cache, content):
    cache.parent.mkdir(parents=True)
    cache.write_text(content.replace("%s", attention_configs._key("GPU")))
    assert tuned("GPU") == {}
    keep("GPU", {CASE: TABLE[CASE]})
    assert tuned("GPU") == {CASE: TABLE[CASE]}


def test_without_a_gpu_it_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 2
    assert "CUDA" in capsys.readouterr().out


def test_table_covers_every_case():
    assert len(TABLE) == 5 * 4 * 2 * 2
    x = torch.empty(1, 1, 5000, 64)
    assert config_for(KernelCall(x, x, x)) == attention_configs.INTERPRETED


@pytest.mark.parametrize("module", ["attention_configs", "attention"])
def test_the_doctests_hold(module):
    result = doctest.testmod(import_module(f"para_core.kernels.{module}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_a_device_before_ampere_is_an_error():
    with pytest.raises(RuntimeError, match=r"compute capability 7\.5"):
        attention_configs.row_of(7, 5)
