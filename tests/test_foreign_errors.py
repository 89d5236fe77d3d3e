"""The meaning of other libraries' exceptions, from their type or from the message of each version."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from para_core.foreign_errors import (
    is_closed_connection,
    is_data_dependent,
    is_lost_connection,
    is_out_of_patience,
    is_slow_start_of_ray,
    mask_length_mismatch,
    sizes_that_differ,
)

# These messages of gloo are equal in torch 2.11, 2.13 and 2.15.
TIMED_OUT = (
    "[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv operation to "
    "complete"
)
CLOSED_BY_PEER = "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.1.1]:31337"
RESET = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error [127.0.0.1]:9: Connection reset by peer"
PAIR_CLOSURE = "[../third_party/gloo/gloo/transport/tcp/buffer.cc:72] Application timeout caused pair closure"
BROKEN_PIPE = "[../third_party/gloo/gloo/transport/tcp/pair.cc:446] writev [127.0.0.1]:9: Broken pipe"


@pytest.mark.parametrize("kind", [dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError])
def test_errors_of_torch_distributed_are_lost_connections_by_type(kind):
    assert is_lost_connection(kind("whatever it says"))
    assert not is_lost_connection(RuntimeError("whatever it says"))


@pytest.mark.parametrize(
    ("sentence", "closed"),
    [(TIMED_OUT, False), (CLOSED_BY_PEER, True), (RESET, True), (PAIR_CLOSURE, True), (BROKEN_PIPE, False)],
)
def test_sentences_of_gloo(sentence, closed):
    assert is_lost_connection(RuntimeError(sentence))
    assert is_closed_connection(RuntimeError(sentence)) is closed
    assert is_out_of_patience(RuntimeError(sentence)) is (sentence == TIMED_OUT)
    # Errors of these types come from a user's file or socket, and must not count as a lost connection.
    assert not is_lost_connection(ValueError(sentence)) and not is_closed_connection(OSError(sentence))


def test_a_collective_that_waits_in_vain_is_a_lost_connection(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with pytest.raises(RuntimeError) as caught:
        dist.ProcessGroupGloo(store, 0, 2, timedelta(milliseconds=200))
    assert is_lost_connection(caught.value)


def wait_for_a_late_rank():
    if dist.get_rank() == 1:
        time.sleep(1.0)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(milliseconds=100))
        assert is_out_of_patience(caught.value)
        assert not work.is_completed()
    assert work.wait(timedelta(seconds=20))


def test_wait_of_gloo_can_be_repeated_after_its_patience(rank_pool):
    rank_pool.run(wait_for_a_late_rank, 2)


def test_a_store_that_waits_in_vain_is_a_lost_connection():
    store = dist.TCPStore("localhost", 0, 1, is_master=True, timeout=timedelta(milliseconds=200))
    with pytest.raises(dist.DistError) as caught:
        store.get("missing")
    assert is_lost_connection(caught.value)


def branches(x):
    return x + 1 if x.sum() > 0 else x - 1


def prints(x):
    torch._dynamo.graph_break()
    return x


@pytest.mark.parametrize(("function", "expected"), [(branches, True), (prints, False)])
def test_a_branch_on_a_value_is_data_dependent(function, expected):
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2))
    assert is_data_dependent(caught.value) is expected
    assert not is_data_dependent(RuntimeError(str(caught.value)))


@pytest.mark.parametrize(("length", "mismatch"), [(128, True), (512, True), (256, False)])
def test_a_mask_of_another_length_is_a_mismatch(length, mismatch):
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    x = torch.randn(1, 1, length, 16)
    try:
        flex_attention(x, x, x, block_mask=mask)
    except Exception as error:
        message = mask_length_mismatch(error)
    else:
        message = None
    assert (message is not None) is mismatch


@pytest.mark.parametrize(
    ("sentence", "numbers"),
    [
        # This is the message of torch 2.11 and 2.13.
        (
            "block_mask was created for block_mask.shape=(1, 1, 8, 8) but got q_len=4 and kv_len=6. As the block mask",
            ["8", "4", "6"],
        ),
        # This is the message of torch 2.15.
        (
            (
                "block_mask was created for a smaller length than you're using it for, you likely need to create a new "
                "block mask."
            ),
            [],
        ),
        ("block_mask was created for a larger length than you're using it for, you can either 1. create", []),
    ],
)
def test_sentences_about_a_mask(sentence, numbers):
    for kind in (ValueError, RuntimeError):
        message = mask_length_mismatch(kind(sentence))
        assert message is not None
        assert all(number in message for number in numbers)
    assert mask_length_mismatch(ValueError("block_mask is no BlockMask")) is None
    assert mask_length_mismatch(None) is None


def test_a_slow_node_of_ray_is_a_bare_exception():
    sentence = (
        "The current node timed out during startup. This could happen because some of the raylet failed to startup."
    )
    assert is_slow_start_of_ray(Exception(sentence))
    assert not is_slow_start_of_ray(RuntimeError(sentence))
    assert not is_slow_start_of_ray(Exception("no room"))


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.ones(32) * torch.ones(63),
        lambda: torch.ones(32)[torch.ones(63, dtype=torch.bool)],
        lambda: torch.ones(2, 32) @ torch.ones(63, 2),
        lambda: torch.ones(32).expand(63),
        lambda: torch.cat([torch.ones(32, 1), torch.ones(63, 2)]),
        lambda: torch.ones(32).copy_(torch.ones(63)),
    ],
)
def test_sizes_that_differ_are_read_from_errors_of_torch(function):
    with pytest.raises((RuntimeError, IndexError)) as caught:
        function()
    assert sizes_that_differ(caught.value) & {63, 2}
    assert sizes_that_differ(RuntimeError("63 apples")) == set()


def test_a_plain_error_is_none_of_these():
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 3)(torch.ones(5))
    assert not is_lost_connection(caught.value)
    assert not is_closed_connection(caught.value)
    assert not is_data_dependent(caught.value)
