"""The meaning of other libraries' exceptions, from their type or from the message of each version."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from para_core.foreign_errors import (
    is_closed_connection,
    is_lost_connection,
    is_out_of_patience,
    is_ray_running_already,
    is_slow_start_of_ray,
    mask_length_mismatch,
    sizes_that_differ,
)

GLOO = "[../third_party/gloo/gloo/transport/tcp/"
# These messages of gloo are equal in torch 2.11, 2.13 and 2.15. Whether the connection is closed, or patience ended.
SENTENCES = {
    f"{GLOO}unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to complete": (False, True),
    f"{GLOO}pair.cc:547] Connection closed by peer [127.0.1.1]:31337": (True, False),
    f"{GLOO}pair.cc:534] Read error [127.0.0.1]:9: Connection reset by peer": (True, False),
    f"{GLOO}buffer.cc:72] Application timeout caused pair closure": (True, False),
    f"{GLOO}pair.cc:446] writev [127.0.0.1]:9: Broken pipe": (False, False),
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentences_of_gloo(sentence):
    error = RuntimeError(sentence)
    assert is_lost_connection(error)
    assert (is_closed_connection(error), is_out_of_patience(error)) == SENTENCES[sentence]
    # Errors of these types come from a user's file or socket, and must not count as a lost connection.
    assert not is_lost_connection(ValueError(sentence)) and not is_closed_connection(OSError(sentence))


def test_errors_of_torch_distributed_are_lost_connections_by_type(tmp_path):
    for kind in (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError):
        assert is_lost_connection(kind("whatever it says"))
    assert not is_lost_connection(RuntimeError("whatever it says"))
    with pytest.raises(RuntimeError) as caught:
        dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 2), 0, 2, timedelta(milliseconds=200))
    assert is_lost_connection(caught.value)
    store = dist.TCPStore("localhost", 0, 1, is_master=True, timeout=timedelta(milliseconds=200))
    with pytest.raises(dist.DistError) as caught:
        store.get("missing")
    assert is_lost_connection(caught.value)


# The first is the message of torch 2.11 and 2.13, the others are those of torch 2.15.
MASK_SENTENCES = {
    "block_mask was created for block_mask.shape=(1, 1, 8, 8) but got q_len=4 and kv_len=6.": ["8", "4", "6"],
    "block_mask was created for a smaller length than you're using it for, you likely need to create": [],
    "block_mask was created for a larger length than you're using it for, you can either 1. create": [],
}


def test_sentences_about_a_mask():
    for sentence, numbers in MASK_SENTENCES.items():
        for kind in (ValueError, RuntimeError):
            message = mask_length_mismatch(kind(sentence))
            assert message is not None and all(number in message for number in numbers)
    assert mask_length_mismatch(ValueError("block_mask is no BlockMask")) is None
    assert mask_length_mismatch(None) is None


def test_errors_of_ray():
    refused = "When connecting to an existing cluster, num_cpus and num_gpus must not be provided."
    assert is_ray_running_already(ValueError(refused))
    assert not is_ray_running_already(ValueError("Invalid address format: head"))
    sentence = "The current node timed out during startup. This could happen because some of the raylet failed."
    assert is_slow_start_of_ray(Exception(sentence))
    assert not is_slow_start_of_ray(RuntimeError(sentence))
    assert not is_slow_start_of_ray(Exception("no room"))


DIFFERENT_SIZES = [
    lambda: torch.ones(32) * torch.ones(63),
    lambda: torch.ones(32)[torch.ones(63, dtype=torch.bool)],
    lambda: torch.ones(2, 32) @ torch.ones(63, 2),
    lambda: torch.ones(32).expand(63),
    lambda: torch.cat([torch.ones(32, 1), torch.ones(63, 2)]),
]


@pytest.mark.parametrize("function", DIFFERENT_SIZES)
def test_sizes_that_differ_are_read_from_errors_of_torch(function):
    with pytest.raises((RuntimeError, IndexError)) as caught:
        function()
    assert sizes_that_differ(caught.value) & {63, 2}
    assert sizes_that_differ(RuntimeError("63 apples")) == set()
    for is_kind in (is_lost_connection, is_closed_connection, is_out_of_patience):
        assert not is_kind(caught.value)
