"""SparseKVAttnMode, compared with dense attention under the mask of its definition."""

from contextlib import contextmanager
from functools import partial
from math import ceil
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from para_core import SparseKVAttnMode
from para_core.attention.approximate import snapkv
from para_core.attention.attention_options import AttnOptions
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.kept_keys import KeptKeys
from para_core.attention.spec import AttentionSpec
from para_core.distributed.mesh import MeshDim, SequenceMesh, one_rank
from para_core.layout.sequence import Segment, SequenceLayout
from tests.attention.cases import BALANCED, CAUSAL, IMAGE_FIRST, TEXT_FIRST, Case, Mask, on_few_meshes
from tests.attention.one_device import make_qkv, relative_error
from tests.attention.sparse_cases import SparseCase, check_all
from tests.rank_pool import RankPoolError

aten = torch.ops.aten


def kept_by_definition(case, share, window):
    """Return the kept keys, bool ``[B, H, 1, S_k]``, by the definition in the docstring of SparseKVAttnMode."""
    q, k, _ = case.qkv()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    S_q, S_k = q.shape[-2], k.shape[-2]
    scores = q @ k.mT * (case.options.get("scale") or q.shape[-1] ** -0.5)
    mask = case.whole_mask()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if case.options.get("is_causal"):
        scores = scores.masked_fill(~torch.ones(S_q, S_k, dtype=torch.bool).tril(), float("-inf"))
    parts = min(window, S_q)
    observed = [int((i + 0.5) * S_q / parts) if S_q > window else i for i in range(parts)]
    votes = scores[:, :, observed].softmax(-1).nan_to_num(0.0).sum(2)
    ranked = votes.sort(dim=-1, descending=True, stable=True).indices[..., : ceil(share * S_k)]
    return torch.zeros_like(votes, dtype=torch.bool).scatter(-1, ranked, True)[:, :, None]


def sparse_case(case, share, window):
    make_mode = partial(SparseKVAttnMode, share=share, window=window)
    return SparseCase(case, make_mode, kept_by_definition(case, share, window))


CASES = [
    Case(13, 4),
    Case(13, 3, options=CAUSAL),
    Case(13, 3, S_k=7, D_v=5, options={"scale": 0.7}),
    Case(3, 1),
    Case(13, 6, H_kv=2, options={"enable_gqa": True}),
    Case(13, 4, H_kv=1, options={"enable_gqa": True}),
    Case(H=3, segments=TEXT_FIRST),
    Case(H=4, segments=IMAGE_FIRST),
    Case(H=3, segments=IMAGE_FIRST, key_segments=(("text", 5, True),)),
    Case(H=3, segments=BALANCED, options=CAUSAL),
    Case(13, 3, mask=Mask("bk")),
    Case(13, 3, mask=Mask("hk", torch.float32)),
    Case(13, 3, mask=Mask("bhqk", torch.float32, "local")),
    Case(13, 3, mask=Mask("qk"), options=CAUSAL),
    Case(13, 2, B=0),
    Case(0, 2),
]


@pytest.mark.sample(2)
@on_few_meshes
@pytest.mark.parametrize(("share", "window"), [(0.4, 4), (0.7, 64), (1.0, 1)])
def test_kept_keys_equal_dense_masked_attention(rank_pool, ring, ulysses, share, window):
    check_all(rank_pool, [sparse_case(case, share, window) for case in CASES], ring, ulysses)


@pytest.mark.long
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 1), (2, 2)])
def test_compiled_it_is_the_same(rank_pool, ring, ulysses):
    check_all(rank_pool, [sparse_case(case, 0.5, 4) for case in CASES[:11:5]], ring, ulysses, "aot_eager")


class LargestSent(TorchDispatchMode):
    """A recorder of the number of elements of the largest input of an all-to-all."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d.alltoall_base_.default:
            self.elements = max(self.elements, args[1].numel())
        return func(*args, **(kwargs or {}))


def send(share):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(512, 2, 16, B=1)]
    with torch.no_grad(), SparseKVAttnMode(mesh, share=share, window=4, assume_equal=True), LargestSent() as sent:
        F.scaled_dot_product_attention(*qkv)
    return sent.elements


def test_only_kept_keys_travel(rank_pool):
    whole, part = rank_pool.run(send, 2, 1.0), rank_pool.run(send, 2, 0.25)
    assert whole == [2 * 2 * 256 * 16] * 2
    # The data determine which rank keeps most keys. Heads are padded to the one that keeps most.
    assert all(elements < 0.4 * whole[0] for elements in part)


class HostReadings(TorchDispatchMode):
    """A counter of reads of values and sizes of tensors, for which the host would wait for an accelerator."""

    ASK = (aten._local_scalar_dense, aten.is_nonzero, aten.item, aten.equal, aten.nonzero, aten.masked_select)

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indices = args[1] if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) else ()
        # A bool index is converted to positions, and the host has to wait for their number.
        by_mask = any(index is not None and index.dtype == torch.bool for index in indices)
        self.count += by_mask or func.overloadpacket in self.ASK
        return func(*args, **(kwargs or {}))

    @contextmanager
    def with_constructors(self):
        """Count ``tolist`` too in this context, and ``torch.tensor(device=)``, which is a copy to an accelerator that
        the host waits for.
        """
        tolist, make = torch.Tensor.tolist, torch.tensor

        def counted_tolist(x):
            self.count += 1
            return tolist(x)

        def counted_tensor(*args, device=None, **kwargs):
            self.count += device is not None
            return make(*args, device=device, **kwargs)

        with (
            mock.patch.object(torch.Tensor, "tolist", counted_tolist),
            mock.patch.object(torch, "tensor", counted_tensor),
        ):
            yield


def count_readings(options):
    """Return how often the host would wait for the device in one attention call."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ring", "ulysses"))
    qkv = [x.chunk(2, dim=2)[mesh.get_rank()] for x in make_qkv(26, 3, 8)]
    mask = options.pop("mask", None)
    mode = SparseKVAttnMode(mesh, share=0.4, window=4, assume_equal=True)
    with torch.no_grad(), mode, HostReadings() as readings, readings.with_constructors():
        F.scaled_dot_product_attention(*qkv, mask, **options)
    return readings.count


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 1),
        ({"mask": torch.ones(1, 1, 26, 26).tril(3).bool()}, 0),
        ({"mask": torch.randn(1, 1, 1, 26)}, 1),
        (CAUSAL, 0),
    ],
)
def test_kept_keys_wait_for_device_once_per_call(rank_pool, options, most):
    assert max(rank_pool.run(count_readings, 2, options)) <= most


class Copies(TorchDispatchMode):
    """A recorder of copies from the host to a device: whether each one waits."""

    def __init__(self):
        super().__init__()
        self.waiting = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is aten._to_copy.default and args[0].device.type == "cpu" and out.device.type != "cpu":
            self.waiting.append(not (kwargs or {}).get("non_blocking", False))
        return out


def gather_shape(x, sizes, tensor_dim, dim):
    shape = list(x.shape)
    shape[tensor_dim] = sum(sizes)
    return x.new_empty(shape)


@pytest.mark.parametrize("options", [{}, CAUSAL])
@pytest.mark.parametrize("ring_index", [0, 1])
def test_keys_are_selected_without_waiting_for_device(options, ring_index):
    segments = (Segment("text", 5, replicated=True), Segment("image", 21))
    layout = SequenceLayout(segments, 2)
    ring = MeshDim("ring", 2, ring_index, "a ring", None)
    mesh = SequenceMesh(ring, MeshDim("ulysses", 1, 0, "", None), "cuda")
    plan = AttentionPlan(
        AttentionSpec(layout, layout, mesh, 3, 3, options=AttnOptions.of(kept_keys=KeptKeys(0.4, 4)), **options)
    )
    local = 5 + 11 - ring_index
    # Reading a value of a meta tensor raises.
    query = torch.empty(2, 3, local, 8, device="meta")
    mask = torch.empty(2, 1, local, 26, dtype=torch.bool, device="meta")
    with mock.patch.object(snapkv, "all_gather", gather_shape), Copies() as copies:
        visible = snapkv.select_keys(plan.spec.options.others[0], query, query.clone(), mask, plan.ring, heads=None)
    assert visible.shape == (2, 3, 26)
    assert visible.device == query.device
    assert copies.waiting
    assert not any(copies.waiting)


def test_offsets_of_positions_in_runs():
    runs = [(8, 3), (11, 0), (2, 4), (4, 0)]
    held = [position for start, length in runs for position in range(start, start + length)]
    expected = [held.index(position) if position in held else None for position in range(13)]
    assert snapkv._offsets(range(13), runs) == expected
    assert snapkv._offsets([3], []) == [None]


def attend_alone():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("ring", "ulysses"))
    with SparseKVAttnMode(mesh, share=0.5, window=4), CommDebugMode() as counter:
        return F.scaled_dot_product_attention(*Case(13, 3).qkv()), counter.get_total_counts()


def test_on_one_rank_it_is_sparse_too(rank_pool):
    out, collectives = rank_pool.run(attend_alone, 1)[0]
    assert relative_error(out, sparse_case(Case(13, 3), 0.5, 4).on_one_device()) < 1e-5
    assert collectives == 0


def make_mode(options):
    SparseKVAttnMode(init_device_mesh("cpu", (2,), mesh_dim_names=("ring",)), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, r"ValueError: .*share.* 0\.0.* <= 1"),
        ({"share": 1.5}, r"ValueError: .*share.* 1\.5.* <= 1"),
        ({"share": 0.5, "window": 0}, "ValueError: .*window.* 0"),
    ],
)
def test_what_does_not_fit_is_an_error(rank_pool, options, message):
    with pytest.raises(RankPoolError, match=message):
        rank_pool.run(make_mode, 2, options)


def test_share_may_be_a_number_of_numpy():
    outs = []
    for share in (0.5, np.float32(0.5)):
        with torch.no_grad(), SparseKVAttnMode(one_rank("cpu"), share=share, window=4):
            outs.append(F.scaled_dot_product_attention(*Case(13, 3).qkv()))
    assert torch.equal(*outs)


def test_options_survive_their_json_and_take_another_share():
    options = AttnOptions.of(kept_keys=KeptKeys(1 / 3, 7), backend="math")
    assert AttnOptions.read(options.as_text()) == options
    assert options.with_option(KeptKeys(0.5)) == AttnOptions.of(kept_keys=KeptKeys(0.5), backend="math")
    with pytest.raises(TypeError, match=r"kept_keys is 0\.5; expected a KeptKeys"):
        AttnOptions.of(kept_keys=0.5)
