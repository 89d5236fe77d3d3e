"""The Hopper tier of attention under Triton's interpreter, compared with the formula in float64. No call uses the tier
unasked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton
from torch import Tensor
from triton.runtime import _allocation

from para_core.kernels import attention as portable
from para_core.kernels import attention_configs, attention_hopper, tune
from para_core.kernels.attention_configs import (
    HOPPER,
    INTERPRETED,
    TABLE,
    ConfigKey,
    KernelCall,
    cache_file,
    keep,
    tuned,
)
from para_core.kernels.attention_hopper import takes
from tests.kernels.attention_cases import by_formula, check_lse, error, make, ranges
from tests.kernels.interpreted import interpreted

pytestmark = pytest.mark.slow

CASE = ConfigKey(90, 64, False, "long", "hopper")


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    with interpreted():
        yield


def hopper(*tensors: Tensor, is_causal: bool = False, specialized: bool = False, **options) -> tuple[Tensor, Tensor]:
    blocks = replace(INTERPRETED, specialized=specialized)
    return tune.attend(replace(CASE, is_causal=is_causal), blocks, *tensors, **options)


def tensors_of(num_queries: int, num_keys: int, **options) -> list[Tensor]:
    return make(num_queries, num_keys, 64, dtype=torch.float16, **options)


def check(outputs: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    """Check float16 results against exact ones. Weights and output are rounded once each."""
    assert error(outputs[0], exact[0]) < 5e-4
    check_lse(outputs[1], exact[1], 1e-5)


OPTIONS = {
    "all keys": {},
    "causal": {"is_causal": True},
    "causal, later queries": {"is_causal": True, "shift": 5},
    "causal, earlier queries": {"is_causal": True, "shift": -6},  # The first six queries see no key.
    "causal, nothing seen": {"is_causal": True, "shift": -100},
    "lengths": {"key_ranges": ranges([(0, 17)], [(0, 21)])},
    "lengths alike": {"key_ranges": ranges([(2, 19)])},
    "a length of 0": {"key_ranges": ranges([(0, 0)], [(0, 16)])},
    "beyond the keys": {"key_ranges": ranges([(-3, 9)], [(16, 99)])},
    "lengths, causal": {"key_ranges": ranges([(2, 20)], [(0, 17)]), "is_causal": True, "shift": 5},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("specialized", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_out_and_lse_equal_float64(on_the_cpu, kind, specialized):
    tensors = tensors_of(18, 21, heads=6, key_heads=2)
    options = dict(OPTIONS[kind])
    outputs = hopper(*tensors, **options, specialized=specialized)
    key_ranges = options.pop("key_ranges", None)
    if key_ranges is not None:
        key_ranges = key_ranges.clamp(0, 21)
    check(outputs, by_formula(*tensors, query_offset=options.pop("shift", 0), key_ranges=key_ranges, **options))


@pytest.mark.parametrize("specialized", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (16, 32), (17, 16), (1, 49)])
def test_any_length_equals_float64(on_the_cpu, num_queries, num_keys, specialized):
    tensors = tensors_of(num_queries, num_keys, batch=1, heads=1, key_heads=1)
    check(hopper(*tensors, specialized=specialized), by_formula(*tensors))


@pytest.mark.parametrize("shift", [13, 14, 15, 16])
def test_tile_is_masked_from_first_hidden_key(on_the_cpu, shift):
    tensors = tensors_of(3, 40, batch=1, heads=1, key_heads=1)
    outputs = hopper(*tensors, is_causal=True, shift=shift)
    check(outputs, by_formula(*tensors, is_causal=True, query_offset=shift))


@pytest.mark.parametrize("is_causal", [False, True])
def test_hopper_and_portable_calls_continue_each_other(on_the_cpu, is_causal):
    query, key, value = tensors = tensors_of(18, 37, batch=1)
    first = hopper(query, key[:, :, :7], value[:, :, :7], is_causal=is_causal, out_dtype=torch.float32)
    more = portable.attention(
        query,
        key[:, :, 7:16],
        value[:, :, 7:16],
        is_causal=is_causal,
        key_offset=7,
        so_far=first,
        out_dtype=torch.float32,
    )
    outputs = hopper(query, key[:, :, 16:], value[:, :, 16:], is_causal=is_causal, shift=-16, so_far=more)
    check(outputs, by_formula(*tensors, is_causal=is_causal))


def test_what_padding_holds_is_not_read(on_the_cpu):
    query, key, value = tensors = tensors_of(5, 21)
    exact = by_formula(*tensors, key_ranges=ranges([(0, 17)]))
    key[:, :, 17:], value[:, :, 17:] = torch.nan, torch.inf
    check(hopper(query, key, value, key_ranges=ranges([(0, 17)])), exact)


# -- Which calls the tier accepts.


def test_hopper_tier_accepts_tensors_that_tma_can_read():
    query, key, value = tensors_of(5, 21)
    assert takes(KernelCall(query, key, value, None, ranges([(0, 3)])))
    assert takes(KernelCall(query[:, :, 1:], key, value[:, :, :20]))
    refused = {
        "a mask": KernelCall(query, key, value, torch.ones(1, 1, 1, 21, dtype=torch.bool)),
        "two ranges": KernelCall(query, key, value, None, ranges([(0, 3), (4, 6)])),
        "a negative scale": KernelCall(query, key, value, scale=-0.1),
        "no key": KernelCall(query, key[:, :, :0], value[:, :, :0]),
        "float32": KernelCall(*[x.float() for x in (query, key, value)]),
        "another head dim": KernelCall(*[x[..., :56] for x in (query, key, value)]),
        "two head dims": KernelCall(query, key, torch.cat([value, value], -1)),
        "columns": KernelCall(query, key, value.mT.contiguous().mT),
        "rows of 130 bytes": KernelCall(query, key, torch.cat([value, value[..., :1]], -1)[..., :64]),
        "a row for all": KernelCall(query, key[:, :, :1].expand_as(key), value),
        "an odd start": KernelCall(query, key, torch.cat([value, value], -1)[..., 4:68]),
    }
    assert [name for name, call in refused.items() if takes(call)] == []


@pytest.fixture
def cache(tmp_path, monkeypatch):
    def forget():
        attention_configs._on_device.cache_clear()
        attention_configs._tuned_hopper.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield cache_file()
    forget()


@pytest.mark.parametrize(
    ("capability", "offered"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False)]
)
def test_hopper_tier_needs_tuning_on_this_device(cache, monkeypatch, capability, offered):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    assert attention_configs._tuned_hopper(0, 64, False, "long") is None
    assert not any(case.tier == "hopper" for case in TABLE)
    best = HOPPER[64][1]
    keep("a GPU", {CASE: best, replace(CASE, tier="portable"): INTERPRETED})
    assert attention_configs._tuned_hopper(0, 64, False, "long") == (best if offered else None)
    assert attention_configs._tuned_hopper(0, 64, True, "long") is None
    keep("a GPU", {CASE: None})
    assert attention_configs._tuned_hopper(0, 64, False, "long") is None
    assert list(tuned("a GPU")) == [replace(CASE, tier="portable")]


def test_tuned_kernel_computes_its_calls(on_the_cpu, monkeypatch):
    launched = []
    launch = attention_hopper.launch
    monkeypatch.setattr(portable, "hopper_config_for", lambda query, is_causal: INTERPRETED)
    monkeypatch.setattr(attention_hopper, "launch", lambda *args, **kwargs: launched.append(launch(*args, **kwargs)))
    tensors = tensors_of(5, 21)
    options = {"is_causal": True, "query_offset": 9, "key_offset": 2, "scale": 0.2}
    check(portable.attention(*tensors, **options), by_formula(*tensors, **options))
    assert len(launched) == 1
    mask = torch.rand(1, 1, 5, 21) > 0.5
    check(portable.attention(*tensors, **options, mask=mask), by_formula(*tensors, **options, mask=mask))
    assert len(launched) == 1


def test_a_users_allocator_stays(on_the_cpu):
    def own(size, alignment, stream):
        raise AssertionError("not asked for")

    before = _allocation._allocator.get()
    triton.set_allocator(own)
    try:
        hopper(*tensors_of(1, 1))
        assert _allocation._allocator.get() is own
    finally:
        triton.set_allocator(before)


# -- Tuning.


def clock_with(hopper_ms):
    def clock(case, config):
        if case.tier == "portable":
            return 1.0
        timing = hopper_ms[config.specialized]
        if isinstance(timing, Exception):
            raise timing
        return timing

    return clock


@pytest.mark.parametrize(
    ("milliseconds", "right", "expected"),
    [
        ({False: 0.9, True: 0.8}, {False, True}, True),
        ({False: 0.9, True: 0.8}, {False}, False),  # The fastest one computes a wrong result.
        ({False: 0.99, True: 1.2}, {False, True}, None),
        ({False: 0.9, True: RuntimeError("PassManager::run failed\nmore")}, {False, True}, False),
        ({False: RuntimeError(""), True: 0.5}, set(), None),
    ],
)
def test_tuning_keeps_hopper_tier_if_exact_and_faster(milliseconds, right, expected):
    case = replace(CASE, tier="portable")
    fastest = tune.faster(case, TABLE[case], clock_with(milliseconds), lambda case, config: config.specialized in right)
    assert fastest == (None if expected is None else HOPPER[64][expected])


def test_tuning_compares_whole_parts_lengths_and_continuing_calls(on_the_cpu, monkeypatch):
    tensors = tensors_of(4, 20, heads=1, key_heads=1)
    for case in (CASE, replace(CASE, is_causal=True)):
        assert tune.computes_the_same(case, INTERPRETED, INTERPRETED, *tensors)
    attend = tune.attend

    def wrong(index):
        """Return an ``attend`` in which call number ``index`` of the tier is off by 3 % in one result."""
        calls = iter(range(100))

        def call(case, *args, **kwargs):
            out, lse = attend(case, *args, **kwargs)
            return (out * 1.03, lse) if case.tier == "hopper" and next(calls) == index else (out, lse)

        return call

    for index in range(4):
        monkeypatch.setattr(tune, "attend", wrong(index))
        assert not tune.computes_the_same(CASE, INTERPRETED, INTERPRETED, *tensors)


def test_tuning_on_another_gpu_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert tune.main(["--hopper"]) == 2
    assert re.search(r"--hopper .*9\.0", capsys.readouterr().out)
