"""Budgets of the host for one attention call: the kernels that it launches, and its path through Python."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import para_core
from benchmarks.attention.large_worlds import call as call_on_a_world
from benchmarks.harness import fake_group
from para_core import UnifiedAttnMode
from para_core.distributed.collectives import all_gather_into
from para_core.recorder.run_counter import RunCounter
from tests.launches import count_attention
from tests.tiny import cpu_mesh


@torch.library.custom_op("para_core_test::twice_and_one", mutates_args=())
def twice_and_one(x: Tensor) -> Tensor:
    return x * 2 + torch.ops.para_core_test.one_like(x)


@torch.library.custom_op("para_core_test::one_like", mutates_args=())
def one_like(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def test_what_counts_as_a_launch():
    """Views, allocations and waits are none. Custom operators are opened, also one inside another."""
    x = torch.randn(2, 3, 4)
    with fake_group(2), torch.no_grad(), RunCounter() as counter:
        x.view(6, 4).transpose(0, 1).unsqueeze(0).expand(3, 4, 6)[1:].unbind(0)
        torch.empty(3), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2,), (1,))
        x.transpose(0, 1).contiguous()
        torch.cat([x, x])
        twice_and_one(x)
        dist.all_to_all_single(torch.empty_like(x), x)
        functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
        functional.wait_tensor(functional.all_to_all_single(x, [1, 1], [1, 1], group))
        functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 2, group))
        dist.all_reduce(x), dist.broadcast(x, 0)
        # Attention in 8 bits gathers bytes, which are no record.
        all_gather_into(x.new_empty(6, dtype=torch.uint8), x.new_empty(3, dtype=torch.uint8))
        pair = [dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, torch.empty_like(x), 1)]
        [work.wait() for work in dist.batch_isend_irecv(pair)]
        F.scaled_dot_product_attention(x[None], x[None], x[None])
    names = ("alltoall_base_", "_allgather_base_", "send", "recv_", "allreduce_", "broadcast_")
    collectives = [f"c10d::{name}" for name in names]
    collectives += [f"_c10d_functional::{name}" for name in ("all_to_all_single", "reduce_scatter_tensor")]
    attention = next(name for name in counter.by_operator if "dot_product" in name)
    operators = ("clone", "cat", "mul", "ones_like", "add", *collectives, attention)
    assert dict(counter.by_operator) == dict.fromkeys(operators, 1)
    assert counter.bytes_sent == (3 / 2 + 3) * x.nbytes + 3


def require_at_most(budget, counter):
    assert counter.launches <= budget, f"at most {budget} are allowed; {counter}"


@pytest.fixture(params=[(288, 24, "cpu"), (291, 25, "cpu"), (288, 24, "meta"), (291, 25, "meta")], ids=str)
def counted(request):
    tokens, heads, device = request.param
    return partial(count_attention, tokens=tokens, heads=heads, device=device)


@pytest.mark.parametrize("ranks", [2, 8])
def test_launches_of_a_call(ranks, counted):
    even = counted.keywords["tokens"] % ranks == counted.keywords["heads"] % ranks == 0
    ulysses = counted(1, ranks)
    require_at_most(8 if even else 8 + ranks, ulysses)
    require_at_most(ulysses.launches, counted(1, ranks, batch=2))
    require_at_most(3 + 4 * (ranks - 1), counted(ranks, 1))


@pytest.mark.parametrize("ranks", [2, 8])
def test_launches_on_a_grid_2d(ranks, counted):
    # The grids are 2 × 1, which is one column, and 4 × 2. 16-bit tensors need casts.
    of_one_column, of_more = (6, 14) if counted.keywords["device"] == "cpu" else (7, 17)
    require_at_most(of_one_column if ranks == 2 else of_more, counted(ranks, 1, rotate_method="2d"))


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("tokens", "heads"), [(288, 24), (291, 25)])
def test_launches_with_exact_triton(ranks, tokens, heads):
    counted = partial(count_attention, tokens=tokens, heads=heads, device="meta")
    for ulysses in (counted(1, ranks), counted(1, ranks, backend="triton")):
        require_at_most(5, ulysses)
        assert ulysses.by_operator["para_core::pack"] == 1
    triton = counted(ranks, 1, backend="triton")
    require_at_most(3 + 2 * (ranks - 1), triton)
    assert triton.by_operator["para_core::triton_attention"] == ranks
    assert triton.by_operator["para_core::merge"] == 0


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 8), (8, 1), (2, 4)])
def test_block_on_meta_is_one_flash_kernel(ring, ulysses):
    counter = count_attention(ring, ulysses, device="meta")
    kernels = {name: number for name, number in counter.by_operator.items() if "dot_product" in name or "mm" in name}
    assert kernels == {"_scaled_dot_product_flash_attention": ring}
    if ring == 2:
        require_at_most(14, counter)
        require_at_most(14, count_attention(2, 4))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32], ids=str)
def test_a_mask_costs_a_few_launches_per_call_and_for_rows_some_per_block(device, dtype):
    ranks, plain = 4, count_attention(4, 1, device=device)

    def masked(rows):
        return count_attention(ranks, 1, device=device, mask=torch.ones(1, 1, rows, 288, dtype=dtype, device=device))

    of_keys, per_call, per_block = (5, 3, 2) if dtype == torch.bool else (10, 9, 1)
    require_at_most(plain.launches + of_keys, masked(1))
    require_at_most(plain.launches + per_call + per_block * ranks, masked(288))


@pytest.mark.parametrize("method", ["alltoall", "allgather"])
def test_python_calls_of_a_ring_grow_with_its_blocks(method):
    counts = []
    for ranks in (8, 64):
        with fake_group(ranks):
            counts.append(call_on_a_world(cpu_mesh(ranks, 1), {"rotate_method": method})["call, functions"])
    # Eight times as many, and not the square of that.
    assert counts[1] < 10 * counts[0]


ROOT = Path(para_core.__file__).parent

# A reader who follows one call opens these files. docs/how_it_works.md walks through them.
MOST_FILES = {"ulysses": 7, "ring": 11}
# Python 3.11, which counts comprehensions as calls, needs 39 and 65, and some more after other tests in its process.
MOST_PYTHON_CALLS = {"ulysses": 50, "ring": 76}


def trace_call(kind, assume_equal):
    """Return the files of para_core in which a call runs, and its number of Python calls, after two calls like it."""
    files, num_calls = set(), 0

    def note(frame, event, _):
        nonlocal num_calls
        if event == "call":
            num_calls += 1
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                files.add(str(path.relative_to(ROOT)))

    mesh = cpu_mesh(2, 1) if kind == "ring" else cpu_mesh(1, 2)
    with torch.no_grad(), UnifiedAttnMode(mesh, assume_equal=assume_equal) as cp:
        q = cp.shard(torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(0)), dim=2)
        for _ in range(2):
            F.scaled_dot_product_attention(q, q, q)
        sys.setprofile(note)
        try:
            F.scaled_dot_product_attention(q, q, q)
        finally:
            sys.setprofile(None)
    return sorted(files), num_calls


@pytest.mark.parametrize(("kind", "assume_equal"), [("ulysses", False), ("ring", False), ("ring", True)])
def test_a_call_passes_few_files_and_python_calls(rank_pool, kind, assume_equal):
    for files, num_calls in rank_pool.run(trace_call, 2, kind, assume_equal):
        assert "modes/unified.py" in files and "attention/mesh_attention.py" in files
        assert len(files) <= MOST_FILES[kind] - assume_equal, files
        assert num_calls <= MOST_PYTHON_CALLS[kind]
        assert ("distributed/agree.py" in files) == (not assume_equal)
