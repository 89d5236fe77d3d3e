"""Fingerprints of tensors are equal for equal bytes, differ for all others, and cost the host little."""

import numpy as np
import pytest
import torch

from para_core.adapters.agree.arguments import describe_value
from para_core.distributed.fingerprints import PendingFingerprints, joint_fingerprint

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
SHAPES = [(0,), (), (1,), (3,), (7, 5), (2, 3, 4, 5)]


def sample(shape, dtype):
    numbers = torch.arange(torch.Size(shape).numel()) * 7919 % (2 if dtype == torch.bool else 97)
    return numbers.to(dtype).view(shape)


def split_mix(data):
    """Return the fingerprint of these bytes, computed with numpy's unsigned integers."""
    words = np.frombuffer(data, dtype="<u8")
    with np.errstate(over="ignore"):
        z = words + np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return f"{(z ^ (z >> np.uint64(31))).sum(dtype=np.uint64):016x}"


def padded(x):
    data = bytes(x.contiguous().view(-1).view(torch.uint8).tolist())
    return data + bytes(-len(data) % 8)


@pytest.mark.parametrize("words_at_once", [None, 5])
def test_fingerprint_covers_bytes_of_any_dtype(monkeypatch, words_at_once):
    if words_at_once is not None:
        monkeypatch.setattr("para_core.distributed.fingerprints._MAX_WORDS", words_at_once)
    for dtype in DTYPES:
        tensors = [sample(shape, dtype) for shape in SHAPES]
        expected = [split_mix(padded(x)) for x in tensors]
        assert expected == PendingFingerprints(tensors).wait() == [PendingFingerprints([x]).wait()[0] for x in tensors]


@pytest.mark.parametrize("chunk", [4, 1 << 16])
def test_digest_is_the_fingerprint_of_all_bytes_in_order(monkeypatch, chunk):
    monkeypatch.setattr("para_core.distributed.fingerprints._CHUNK_WORDS_CPU", chunk)
    tensors = [sample(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    # The words begin between two words of the storage.
    tensors.append(torch.arange(9, dtype=torch.float32)[1:])
    assert f"{joint_fingerprint(tensors).item() % 2**64:016x}" == split_mix(b"".join(map(padded, tensors)))
    assert not torch.equal(joint_fingerprint(tensors), joint_fingerprint(tensors[::-1]))
    assert joint_fingerprint([]).item() == 0


def test_the_host_reads_8_bytes_per_tensor_at_once(monkeypatch):
    readings, read = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: readings.append(x.nbytes) or read(x))
    nested = {"ids": torch.arange(30), "embeds": [torch.randn(4, 100), torch.randn(7).bfloat16()]}
    assert describe_value(nested) != describe_value({**nested, "ids": torch.arange(30) + 1})
    assert readings == [24, 24]
