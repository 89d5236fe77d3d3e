"""Tables on a device are kept, but not those in the memory pool of a CUDA graph."""

from types import SimpleNamespace

import pytest
import torch

from para_core.kernels import device_tables, pack
from para_core.kernels.device_tables import MOST_TABLES, keep_outside_graphs, new_table
from para_core.kernels.pack_reference import CopyRegion
from para_core.recorder.run_counter import RunCounter

CPU = torch.device("cpu")


@pytest.fixture
def capture(monkeypatch):
    """Return a stand-in for the capture of a CUDA graph, which captures while ``on`` is set."""
    stub = SimpleNamespace(on=False)
    monkeypatch.setattr(device_tables, "is_capturing", lambda: stub.on)
    return stub


def test_table_that_a_graph_reads_is_never_dropped(capture):
    made = []

    @keep_outside_graphs
    def table(number, device):
        made.append(number)
        return new_table([number], torch.float32, device)

    with torch.inference_mode(), torch.device("meta"):  # The default device of a user is not that of the table.
        kept = table(0, CPU)
    # Autograd may save it.
    x = torch.ones(1, requires_grad=True)
    (x * table(0, CPU)).sum().backward()
    capture.on = True
    assert table(0, CPU) is kept
    capture.on = False
    for number in range(1, MOST_TABLES + 1):
        table(number, CPU)
    assert table(0, CPU) is kept and table(1, CPU) is table(1, CPU)
    assert made == [*range(MOST_TABLES + 1)]
    # The oldest of the other tables is evicted: that of 2, since that of 1 was used again.
    table(MOST_TABLES + 1, CPU)
    assert [table(number, CPU).item() for number in (1, 2)] == [1, 2]
    assert made[MOST_TABLES + 1 :] == [MOST_TABLES + 1, 2]


def test_graph_records_a_table_without_host_copy(capture):
    capture.on = True
    for numbers, dtype in (([3, 2**40, 7], torch.int64), ([0.1, 1 / 3, 7.0], torch.float64), ([], torch.int64)):
        with RunCounter() as counter:
            recorded = new_table(numbers, dtype, CPU)
        assert torch.equal(recorded, torch.tensor(numbers, dtype=dtype)) and recorded.dtype == dtype
        assert counter.by_operator["fill_"] == len(numbers) and "_to_copy" not in counter.by_operator


def test_no_table_is_first_kept_in_graph_pool(capture):
    table, key = pack._regions_on_device, ((CopyRegion(0, 0, 3, 0, 2, 0, 10),),)
    capture.on = True
    recorded = [table(*key, CPU) for _ in range(2)]
    capture.on = False
    kept = table(*key, CPU)
    assert all(torch.equal(x, kept) for x in recorded)
    # All three are alive, so equal addresses would mean one tensor.
    assert len({x.data_ptr() for x in (*recorded, kept)}) == 3
    assert table(*key, CPU) is kept
