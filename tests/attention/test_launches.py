"""The number of kernels that the host launches for one attention call, and the counter of launches itself."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import fake_group
from para_core.recorder.run_counter import RunCounter
from tests.launches import count_attention


def counted(function, *args):
    with torch.no_grad(), RunCounter() as counter:
        function(*args)
    return dict(counter.by_operator)


# -- The counter.


def test_views_are_not_launches():
    def views(x):
        x.view(6, 4).transpose(0, 1).unsqueeze(0).expand(3, 4, 6)[1:].unbind(0)
        x.permute(2, 0, 1).narrow(0, 1, 2).split([1, 1], dim=0)
        x.unflatten(2, (2, 2)).detach().chunk(2)
        x.reshape(6, 4).diagonal()

    assert counted(views, torch.randn(2, 3, 4)) == {}


def test_copies_and_arithmetic_are_launches():
    def work(x):
        x.transpose(0, 1).contiguous()
        x.transpose(0, 1).reshape(-1)
        torch.cat([x, x])
        x.new_empty(2, 3).copy_(x)
        torch.stack([x, x]) + 1
        x.to(torch.bfloat16)

    expected = {"clone": 2, "cat": 1, "copy_": 1, "stack": 1, "add": 1, "_to_copy": 1}
    assert counted(work, torch.randn(2, 3)) == expected


def test_allocations_are_not_launches():
    def allocate(x):
        torch.empty(3), torch.empty_like(x), x.new_empty(2), torch.empty_strided((2,), (1,))

    assert counted(allocate, torch.randn(2, 3)) == {}
    assert counted(lambda: torch.zeros(3)) == {"zeros": 1}


def test_a_fused_attention_kernel_is_one_launch():
    x = torch.randn(1, 2, 8, 16)
    assert sum(counted(F.scaled_dot_product_attention, x, x, x).values()) == 1


def test_collective_is_one_launch_and_wait_none():
    def functional(x):
        sent = torch.ops._c10d_functional.all_to_all_single(x, [2, 2], [2, 2], dist.group.WORLD.group_name)
        torch.ops._c10d_functional.wait_tensor(sent)

    def in_place(x):
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.group.WORLD.alltoall_base(torch.empty_like(x), x, [], []).wait()

    def point_to_point(x):
        sent = dist.P2POp(dist.isend, x, 1)
        received = dist.P2POp(dist.irecv, torch.empty_like(x), 1)
        [work.wait() for work in dist.batch_isend_irecv([sent, received])]

    with fake_group(2):
        assert counted(functional, torch.randn(4)) == {"_c10d_functional::all_to_all_single": 1}
        assert counted(in_place, torch.randn(4)) == {"c10d::alltoall_base_": 2}
        assert counted(point_to_point, torch.randn(4)) == {"c10d::send": 1, "c10d::recv_": 1}


@torch.library.custom_op("para_core_test::twice_and_one", mutates_args=())
def twice_and_one(x: Tensor) -> Tensor:
    return x * 2 + torch.ops.para_core_test.one_like(x)


@torch.library.custom_op("para_core_test::one_like", mutates_args=())
def one_like(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def test_custom_operators_are_opened_also_one_inside_another():
    x = torch.randn(3)
    assert counted(torch.ops.para_core_test.twice_and_one, x) == {"mul": 1, "ones_like": 1, "add": 1}
    with RunCounter():
        opened = torch.ops.para_core_test.twice_and_one(x)
    torch.testing.assert_close(opened, 2 * x + 1)


# -- The cost of one forward call without a mask.


def require_at_most(budget, counter):
    assert counter.launches <= budget, f"at most {budget} are allowed; {counter}"


DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])  # The meta device runs the kernels of CUDA.


@DEVICES
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("batch", [1, 2])
def test_even_ulysses_launches_8(ranks, batch, device):
    require_at_most(8, count_attention(1, ranks, batch=batch, device=device))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("tokens", "heads"), [(288, 24), (291, 24), (288, 25), (291, 25)])
def test_ulysses_with_kernels_launches_5(ranks, batch, tokens, heads):
    counter = count_attention(1, ranks, batch=batch, tokens=tokens, heads=heads, device="meta")
    require_at_most(5, counter)
    assert counter.by_operator["para_core::pack"] == 1


@DEVICES
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(("tokens", "heads"), [(291, 24), (288, 25), (291, 25)])
def test_uneven_ulysses_launches_one_more_per_rank(ranks, tokens, heads, device):
    require_at_most(8 + ranks, count_attention(1, ranks, tokens=tokens, heads=heads, device=device))


@DEVICES
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [288, 291])
def test_ring_launches_3_and_4_per_further_block(ranks, tokens, device):
    require_at_most(3 + 4 * (ranks - 1), count_attention(ranks, 1, tokens=tokens, device=device))


@DEVICES
def test_ring_2_times_ulysses_4_launches_14(device):
    require_at_most(14, count_attention(2, 4, device=device))


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 8), (8, 1), (2, 4)])
def test_block_on_meta_is_one_flash_kernel(ring, ulysses):
    counter = count_attention(ring, ulysses, device="meta")
    kernels = {name: number for name, number in counter.by_operator.items() if "dot_product" in name or "mm" in name}
    assert kernels == {"_scaled_dot_product_flash_attention": ring}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("tokens", [288, 291])
def test_continuing_ring_launches_3_and_2_per_block(ranks, tokens):
    counter = count_attention(ranks, 1, tokens=tokens, device="meta", backend="triton")
    require_at_most(3 + 2 * (ranks - 1), counter)
    assert counter.by_operator["para_core::triton_attention"] == ranks
    assert counter.by_operator["para_core::merge"] == 0


def test_ulysses_with_triton_launches_as_with_flash():
    require_at_most(
        count_attention(1, 8, device="meta").launches, count_attention(1, 8, device="meta", backend="triton")
    )


# -- With a mask. It costs a few launches per call, and none per block unless it has a row per query.


MASKS = pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float32], ids=str)


@MASKS
@DEVICES
@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_with_a_mask_of_keys_launches_10_more_at_most(ranks, device, dtype):
    plain = count_attention(ranks, 1, device=device)
    masked = count_attention(ranks, 1, device=device, mask=torch.ones(1, 1, 1, 288, dtype=dtype, device=device))
    require_at_most(plain.launches + (5 if dtype == torch.bool else 10), masked)


@MASKS
@DEVICES
@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_with_a_mask_of_rows_launches_2_more_per_block(ranks, device, dtype):
    plain = count_attention(ranks, 1, device=device)
    masked = count_attention(ranks, 1, device=device, mask=torch.ones(1, 1, 288, 288, dtype=dtype, device=device))
    per_call, per_block = (3, 2) if dtype == torch.bool else (9, 1)
    require_at_most(plain.launches + per_call + per_block * ranks, masked)
