"""Tables on a device are kept, but not those in the memory pool of a CUDA graph."""

import pytest
import torch

from para_core.kernels import device_tables, pack
from para_core.kernels.device_tables import MOST_TABLES, kept_outside_graphs, new_table
from para_core.kernels.pack_reference import CopyRegion
from para_core.recorder.run_counter import RunCounter
from para_core.spatial import norm, resample

BICUBIC = resample._Resampling("bicubic", 7, 18, 7 / 18, False, 5, 12)
CPU = torch.device("cpu")


class Capture:
    """A stand-in for the capture of a CUDA graph, which captures while ``on`` is set."""

    on = False

    def __call__(self):
        return self.on


@pytest.fixture
def capture(monkeypatch):
    stub = Capture()
    monkeypatch.setattr(device_tables, "is_capturing", stub)
    return stub


@pytest.fixture
def table():
    """Return a cached function. Its ``keys`` are the arguments for which it made a tensor."""
    keys = []

    @kept_outside_graphs
    def table_of(numbers, device):
        keys.append(numbers)
        return new_table(numbers, torch.float32, device)

    table_of.keys = keys
    return table_of


def test_a_table_is_made_once(table):
    assert table((1, 2), CPU) is table((1, 2), CPU)
    assert table.keys == [(1, 2)]
    assert torch.equal(table((1, 2), CPU), torch.tensor([1.0, 2.0]))


def test_a_table_made_in_a_capture_is_not_kept(table, capture):
    capture.on = True
    first, second = table((1, 2), CPU), table((1, 2), CPU)
    assert first.data_ptr() != second.data_ptr()
    capture.on = False
    kept = table((1, 2), CPU)
    assert kept.data_ptr() not in (first.data_ptr(), second.data_ptr())
    capture.on = True
    # A table outside the pool serves graphs too.
    assert table((1, 2), CPU) is kept


def test_a_table_that_a_graph_reads_is_never_dropped(table, capture):
    kept = table((0,), CPU)
    capture.on = True
    assert table((0,), CPU) is kept
    capture.on = False
    for number in range(1, MOST_TABLES + 2):
        table((number,), CPU)
    misses = len(table.keys)
    assert table((0,), CPU) is kept
    # The oldest of the other tables is evicted.
    table((1,), CPU)
    assert len(table.keys) == misses + 1


def test_table_from_inference_mode_is_saved_for_backward(table):
    with torch.inference_mode():
        table((2, 3), CPU)
    x = torch.ones(2, requires_grad=True)
    (x * table((2, 3), CPU)).sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 3.0]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64])
def test_graph_records_a_table_without_host_copy(capture, dtype):
    numbers = [3, 2**40, 7] if dtype == torch.int64 else [0.1, 1 / 3, 7.0]
    expected = new_table(numbers, dtype, CPU)
    capture.on = True
    with RunCounter() as counter:
        recorded = new_table(numbers, dtype, CPU)
    assert torch.equal(recorded, expected) and recorded.dtype == dtype
    assert dict(counter.by_operator) == {"full": 3, "stack": 1}


@pytest.mark.parametrize(
    ("table", "key"),
    [
        (pack._on_device, ((CopyRegion(0, 0, 3, 0, 2, 0, 10),),)),
        (norm._fractions, ((5, 3, 3), torch.float32)),
        (resample._index_on, (BICUBIC,)),
        (resample._weights_on, (BICUBIC, torch.float64)),
    ],
    ids=["regions of an exchange", "shares of rows", "rows of a resampling", "weights of a resampling"],
)
def test_no_table_is_first_kept_in_graph_pool(capture, table, key):
    capture.on = True
    recorded = [table(*key, CPU) for _ in range(2)]
    capture.on = False
    kept = table(*key, CPU)
    assert all(torch.equal(x, kept) for x in recorded)
    # All three are alive, so equal addresses would mean one tensor.
    assert len({x.data_ptr() for x in (*recorded, kept)}) == 3
    assert table(*key, CPU) is kept
