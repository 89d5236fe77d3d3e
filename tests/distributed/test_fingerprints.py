"""Fingerprints of tensors are equal for equal bytes, differ for all others, and cost the host little."""

import numpy as np
import pytest
import torch

from para_core.adapters.agree.arguments import describe
from para_core.distributed.fingerprints import digest, fingerprints
from para_core.recorder.run_counter import RunCounter

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
SHAPES = [(0,), (), (1,), (3,), (7, 5), (2, 3, 4, 5)]


def sample(shape, dtype):
    generator = torch.Generator().manual_seed(1)
    numel = torch.Size(shape).numel()
    return torch.randint(0, 2 if dtype == torch.bool else 100, (numel,), generator=generator).to(dtype).view(shape)


def split_mix(data):
    """Return the fingerprint of these bytes, computed with numpy's unsigned integers."""
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    with np.errstate(over="ignore"):
        z = words + np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return f"{(z ^ (z >> np.uint64(31))).sum(dtype=np.uint64):016x}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_covers_bytes_of_any_dtype(dtype):
    tensors = [sample(shape, dtype) for shape in SHAPES]
    data = [bytes(x.contiguous().view(-1).view(torch.uint8).tolist()) for x in tensors]
    assert fingerprints(tensors) == [split_mix(each) for each in data]
    assert [fingerprints([x])[0] for x in tensors] == fingerprints(tensors)


def test_many_words_are_mixed_in_parts(monkeypatch):
    tensors = [sample(shape, torch.float32) for shape in SHAPES]
    expected = fingerprints(tensors)
    monkeypatch.setattr("para_core.distributed.fingerprints._MAX_WORDS", 5)
    assert fingerprints(tensors) == expected


def padded(x):
    data = bytes(x.contiguous().view(-1).view(torch.uint8).tolist())
    return data + bytes(-len(data) % 8)


@pytest.mark.parametrize("chunk", [1, 4, 1 << 16])
def test_digest_is_the_fingerprint_of_all_bytes_in_order(monkeypatch, chunk):
    monkeypatch.setattr("para_core.distributed.fingerprints._CHUNK_WORDS_CPU", chunk)
    tensors = [sample(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    # The words begin between two words of the storage.
    tensors.append(torch.arange(9, dtype=torch.float32)[1:])
    assert f"{digest(tensors).item() % 2**64:016x}" == split_mix(b"".join(map(padded, tensors)))
    assert not torch.equal(digest(tensors), digest(tensors[::-1]))
    assert digest([]).item() == 0


def test_digest_of_aligned_tensors_is_a_few_launches():
    with RunCounter() as counted:
        digest([torch.ones(4, 6) for _ in range(200)])
    # The 200 launches of torch.ones do not count.
    assert counted.launches - 200 < 25, counted.by_operator


def test_fingerprint_ignores_memory_layout():
    x = sample((4, 6, 5), torch.float32)
    other = torch.zeros(4, 6, 11)[:, :, 3:8].copy_(x)
    assert len({*fingerprints([x, x.mT.contiguous().mT, other, torch.nn.Parameter(x)])}) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_and_every_position_counts(dtype):
    x = sample((3, 7), dtype)
    size = x.nbytes
    variants = [x]
    for bit in range(size * 8) if dtype != torch.bool else range(0, size * 8, 8):
        data = x.clone()
        data.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        variants.append(data)
    distinct = fingerprints(variants)
    assert len({*distinct}) == len(variants)
    # Elements, and words of 8 bytes, are in another order.
    backwards = torch.arange(20, -1, -1)
    orders = [
        backwards,
        torch.arange(21).roll(1),
        torch.arange(21).roll(8 // x.itemsize),
        torch.arange(21).view(3, 7).T,
    ]
    permuted = [x.view(-1)[order.flatten()].view(3, 7) for order in orders]
    permuted = [y for y in permuted if not same_bytes(x, y)]
    assert permuted
    assert fingerprints([x])[0] not in fingerprints(permuted)


def same_bytes(x, y):
    return torch.equal(x.contiguous().view(-1).view(torch.uint8), y.contiguous().view(-1).view(torch.uint8))


def test_signed_zeros_differ_and_equal_nans_do_not():
    zeros, nans = torch.zeros(9), torch.full((9,), torch.nan)
    negative, other = zeros.clone(), nans.clone()
    negative[4] = -0.0
    other.view(torch.int32)[4] += 1  # This NaN has another payload.
    assert fingerprints([zeros]) != fingerprints([negative])
    assert fingerprints([nans]) == fingerprints([nans.clone()])
    assert torch.isnan(other).all()
    assert fingerprints([nans]) != fingerprints([other])


def test_random_tensors_have_different_fingerprints():
    tensors = list(torch.randint(0, 2, (20000, 64), dtype=torch.int8, generator=torch.Generator().manual_seed(0)))
    assert len({*fingerprints(tensors)}) == len(tensors)


def test_the_host_reads_8_bytes_per_tensor_at_once(monkeypatch):
    readings = []
    for name in ("tolist", "numpy", "item", "cpu", "__array__"):
        read = getattr(torch.Tensor, name)

        def counted(x, *args, read=read, name=name, **kwargs):
            readings.append(x.nbytes)
            return read(x, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    nested = {"ids": torch.arange(30), "embeds": [torch.randn(4, 100), torch.randn(7).bfloat16()]}
    text = describe(nested)
    assert readings == [24]
    readings.clear()
    assert describe({**nested, "ids": torch.arange(30) + 1}) != text
    assert readings == [24]
