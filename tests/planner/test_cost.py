"""Predicted seconds follow what is known of them without the model: more bandwidth is never slower, bytes are those of
the formula.
"""

import cProfile
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from para_core.adapters import plan_mesh
from para_core.planner.cost import Machine, Runtime, attention_seconds, call_seconds, exchange_seconds
from para_core.planner.hardware import (
    DEVICES,
    LINKS,
    Host,
    Link,
    Topology,
    device_named,
    gpu_at_hand,
    link_named,
    measured_figures,
)
from para_core.planner.mesh_plan import make_plan
from para_core.planner.prediction import Workload, divisors, memory_of, predict, shapes
from para_core.planner.traffic import CallWork, CountedAttention, CountedGather, MeshShape, ModelCall, Product, Tokens
from para_core.planner.verdict import PUBLISHED_RATIOS, duration
from para_core.planner.weights import Choices, ModuleBytes, Placement, Weights
from para_core.weights.pipefusion_options import PipeFusion
from tests.planner.gpus import gpu_named

WIDTH = 3072
BLOCKS = ((2.0, 3 << 30), (2.0, 3 << 30), *[(1.0, 2 << 30)] * 8)
WEIGHTS = Weights(
    ModuleBytes(24 << 30, 23 << 30, 7 << 30, parts=11),
    tensor=17 << 30,
    encoders=ModuleBytes(9 << 30, 8 << 30, 1 << 30, parts=25),
    other=1 << 30,
    blocks=BLOCKS,
    no_stages=None,
    no_patches=None,
)


def model(tokens=4608, blocks=5, heads=24, samples=1):
    """Return a transformer of equal blocks, each with one attention call, on sharded tokens."""
    sharded = (Tokens(tokens, sharded=True),)
    attention = CountedAttention(samples, heads, heads, WIDTH // heads, WIDTH // heads, 2, sharded, sharded)
    products = [Product(samples, sharded, WIDTH, 12 * WIDTH, 2)]
    return CallWork(
        Counter([attention, *products] * blocks + [CountedGather(sharded[0], 128)]),
        returned=128 * tokens,
        launches=60 * blocks,
        moved=(40 * blocks * tokens * WIDTH * 2, 0),
        peak=(100 * tokens * WIDTH, 0),
    )


def attention_of(part):
    return next(x for x in part.operations if isinstance(x, CountedAttention))


def work(part=None, *, branches=1, parts=1):
    call = ModelCall(("model",), [part or model()])
    shared = ModelCall(("model",), [part or model()] * parts)
    return Workload("a model", {1: call, 2: shared}, branches, 28, WEIGHTS, 0.0, 0.0, heads=24)


def machine(device="H100", link=None, *, per_host=8, between="infiniband", **changes):
    spec = DEVICES[device]
    topology = Topology(link or LINKS[spec.link], LINKS[between], per_host)
    return Machine(spec, topology, Host(), Runtime(**changes))


SHAPES = [shape for ranks in (2, 4, 6, 8) for shape in shapes(ranks, sharing=("tensor", "stages"))]


@settings(max_examples=25, deadline=None)
@given(shape=st.sampled_from(SHAPES), slow=st.floats(1e8, 1e12), times=st.floats(1.0, 100.0))
def test_more_bandwidth_and_less_latency_are_never_slower(shape, slow, times):
    links = [Link("a", 1e-5, slow), Link("b", 1e-5, slow * times), Link("c", 1e-6, slow * times)]
    first, second, third = (predict(shape, work(), machine(link=link)).seconds for link in links)
    assert first >= second >= third


@settings(max_examples=25, deadline=None)
@given(shape=st.sampled_from(SHAPES), share=st.floats(0.1, 1.0))
def test_a_faster_device_is_never_slower(shape, share):
    fast = machine()
    slow = replace(fast, device=replace(fast.device, products=share * fast.device.products))
    assert predict(shape, work(), fast).seconds <= predict(shape, work(), slow).seconds * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([shape for shape in SHAPES if shape.pipe == 1 and shape.tensor == 1]),
    tokens=st.integers(64, 5000),
)
def test_no_rank_computes_less_than_its_share(shape, tokens):
    single, several = (call_seconds(model(tokens), each, machine()).products for each in (MeshShape(), shape))
    assert single / shape.sequence * 0.999 <= several <= single


def test_one_rank_sends_nothing_and_waits_for_nobody():
    row = predict(MeshShape(), work(), machine())
    assert row.sent == 0 and row.step.communication == 0


def test_attention_takes_its_operations_over_the_reached_peak():
    # Each of 128 multiprocessors has 3 of the 24 × 16 tiles.
    device = replace(DEVICES["H100"], products=1e15, of_attention=0.5, multiprocessors=128)
    call = attention_of(model(tokens=2048, blocks=1))
    seconds = attention_seconds(call, MeshShape(), replace(machine(), device=device))
    assert seconds == pytest.approx(4 * 2048 * 2048 * WIDTH / 5e14)


def test_few_heads_leave_multiprocessors_idle():
    # 3 heads × 44 tiles fill 132 multiprocessors. 3 × 45 tiles need a second wave for the last three.
    fits, more = (
        attention_seconds(attention_of(model(tokens, 1, heads=3)), MeshShape(), machine())
        for tokens in (44 * 128, 45 * 128)
    )
    assert more / fits == pytest.approx(2 * 45 / 44)


def test_measured_device_scales_predicted_compute():
    call = model(blocks=1)
    fast, slow = (call_seconds(call, MeshShape(), replace(machine(), slowdown=factor)) for factor in (1.0, 1.5))
    assert slow.compute == pytest.approx(1.5 * fast.compute)


def test_ulysses_waits_for_its_bytes_and_two_latencies():
    link = Link("", latency=1e-3, bandwidth=1e9)
    call = attention_of(model(tokens=4096, blocks=1))
    waiting, _ = exchange_seconds(call, MeshShape(ulysses=4), machine(link=link), attending=0.0)
    # Queries, keys, values and results each hold a quarter of the tokens and three quarters of the heads.
    sent = 4 * (4096 // 4) * (WIDTH * 3 // 4) * 2
    assert waiting == pytest.approx(2e-3 + sent / 1e9)


def test_a_ring_hides_what_travels_behind_what_is_computed():
    link = Link("", latency=0.0, bandwidth=1e9)
    call = attention_of(model(tokens=4096, blocks=1))
    hop = 2 * 1024 * WIDTH * 2 / 1e9
    shown = [
        exchange_seconds(call, MeshShape(ring=4), machine(link=link), attending=x)[0] for x in (0.0, 2 * hop, 100 * hop)
    ]
    # A step is 4 blocks of attention. The hidden share of a hop costs 20 of 132 multiprocessors.
    assert shown[0] == pytest.approx(3 * hop)
    assert shown[1] == pytest.approx(3 * (hop / 2 + hop / 2 * 20 / 132))
    assert shown[2] == pytest.approx(3 * hop * 20 / 132)
    gathered = machine(link=link, overlapped=False)
    assert exchange_seconds(call, MeshShape(ring=4), gathered, attending=100 * hop)[0] == pytest.approx(3 * hop)


def test_two_dims_send_with_the_root_of_the_ring():
    link = Link("", latency=0.0, bandwidth=1e9)
    seconds = {
        (ring, method): exchange_seconds(
            attention_of(model(tokens=ring * 256, blocks=1)),
            MeshShape(ring=ring, ring_method=method),
            machine(link=link, per_host=64, overlapped=False),
            attending=0.0,
        )[0]
        for ring in (16, 64)
        for method in ("rotate", "2d")
    }
    # Keys and values of a rank's 256 tokens travel P - 1 times around a ring, or √P - 1 times along each side of the
    # grid, with queries and results.
    assert seconds[64, "rotate"] / seconds[16, "rotate"] == pytest.approx(63 / 15)
    assert seconds[64, "2d"] / seconds[16, "2d"] == pytest.approx(7 / 3, rel=0.01)
    assert seconds[64, "2d"] < seconds[64, "rotate"] / 4


def test_all_to_all_between_hosts_costs_outgoing_bytes():
    fast, slow = Link("", 0.0, 1e12), Link("", 1e-3, 1e9)
    topology = Topology(fast, slow, per_host=4)
    assert topology.all_to_all(7e9, stride=1, size=8) == pytest.approx(1e-3 + 4.0)
    assert topology.all_to_all(3e9, stride=1, size=4) == pytest.approx(3e-3)
    # All neighbours along this dim are on different hosts.
    assert topology.all_to_all(1e9, stride=4, size=2) == pytest.approx(1e-3 + 1.0)


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 12])
def test_every_mesh_has_all_ranks_and_is_listed_once(ranks):
    meshes = list(shapes(ranks, sharing=("tensor", "stages"), pipefusion=PipeFusion()))
    assert all(shape.ranks == ranks for shape in meshes)
    assert len(set(meshes)) == len(meshes)
    without = [
        (1, ring, u, t) for ring in divisors(ranks) for u in divisors(ranks // ring) for t in [ranks // ring // u]
    ]
    assert {(s.batch, s.ring, s.ulysses, s.tensor) for s in meshes if s.batch == s.pipe == 1} == set(without)


def test_two_cards_on_slow_bus_are_slower_than_one():
    plan = make_plan(work(), machine("L20", Link("slow", 3e-5, 5e8)), 2, Choices(()))
    assert plan.best.seconds > plan.fewer[1].seconds
    assert plan.fastest.shape == MeshShape()
    assert re.match(r"2 ranks .*use 1,", plan.advice)


def test_guidance_goes_first_where_there_are_branches():
    assert make_plan(work(branches=2), machine(), 2, Choices(())).best.shape == MeshShape(batch=2)
    rows = make_plan(work(), machine(), 2, Choices(())).rows
    assert rows[0].shape.batch == 1
    assert next(row.problem for row in rows if row.shape.batch == 2) is not None


def test_between_hosts_the_ring_and_within_them_ulysses():
    best = make_plan(work(model(tokens=120_000)), machine(per_host=8, between="ethernet"), 16, Choices(())).best
    assert best.shape.ulysses <= 8 and best.shape.ring >= 2


def large(**changes):
    """Return work whose weights do not fit one H100."""
    weights = replace(WEIGHTS, transformer=ModuleBytes(100 << 30, 96 << 30, 8 << 30, parts=21), tensor=90 << 30)
    return replace(work(), weights=replace(weights, **changes))


def test_rows_beyond_memory_come_last():
    plan = make_plan(large(), machine(), 4)
    assert plan.best.memory < 74e9
    fitting = [row.memory <= 74e9 for row in plan.rows if row.problem is None]
    assert fitting == sorted(fitting, reverse=True) and not all(fitting)
    replicated = next(row for row in plan.rows if row.shape == MeshShape(ulysses=4))
    assert re.search(r"109 GB .*74", replicated.why)
    assert re.match("4 ranks ", plan.advice)
    assert 1 not in plan.fewer


def test_gathered_weights_count_as_sent_bytes():
    rows = {row.shape: row for row in make_plan(large(), machine(), 4, Choices(text_encoders="replicate")).rows}
    whole, gathered = rows[MeshShape(ulysses=4)], rows[MeshShape(ulysses=4, fsdp=True)]
    # 96 of 100 GiB are sharded. In addition, 8 are gathered into their own buffers.
    assert whole.memory - gathered.memory == pytest.approx((0.75 * 96 - 8) * 2**30)
    assert gathered.sent - whole.sent == pytest.approx(0.75 * 96 * 2**30)
    assert gathered.step.total > whole.step.total
    # If all weights fit, no rank gathers them.
    assert not any(row.shape.fsdp for row in make_plan(work(), machine(), 4).rows)


def test_fast_link_hides_all_but_first_block():
    link = Link("", latency=0.0, bandwidth=1e15)
    slow = replace(DEVICES["H100"], products=1e12, multiprocessors=1)
    on = Machine(slow, Topology(link, link, per_host=8))
    whole, gathered = (predict(MeshShape(ulysses=2, fsdp=is_so), large(), on).step for is_so in (False, True))
    first = 0.5 * 96 * 2**30 / 1e15 / 21
    assert gathered.communication - whole.communication == pytest.approx(first)


def test_impossible_memory_names_least_needed():
    plan = make_plan(large(), machine(), 2, Choices(()))
    assert re.match(r"2 ranks .* 109 GB of 74 ", plan.advice)
    assert "parallelize_pipe(" not in str(plan)


PLACED = replace(
    Weights(ModuleBytes(60 << 30, 56 << 30, 6 << 30, parts=21)),
    encoders=ModuleBytes(30 << 30, 28 << 30, 2 << 30, parts=25, largest_layer=1 << 30),
    blocks=tuple((1.0, 3 << 30) for _ in range(18)),
    no_stages=None,
)


def test_text_encoders_wait_in_host_memory_where_nothing_else_fits():
    some = replace(work(), weights=PLACED)
    row = make_plan(some, machine(), 1).best
    assert row.placement == Placement("offload")
    assert row.options == {"text_encoders": "offload"}
    whole = make_plan(some, machine(), 1, Choices(text_encoders="replicate", offload=False)).best
    # The difference is the text encoders, less their largest layer if that exceeds the activations.
    assert whole.memory - row.memory == pytest.approx(30 * 2**30, rel=0.05)
    assert row.host_memory == 30 << 30
    assert row.encoder - whole.encoder == pytest.approx((30 << 30) / DEVICES["H100"].host_bandwidth)


def test_as_many_blocks_as_fit_stay_on_the_device():
    larger = replace(PLACED, transformer=ModuleBytes(90 << 30), blocks=tuple((1.0, 4 << 30) for _ in range(20)))
    some = replace(work(), weights=larger)
    plan = make_plan(some, machine(), 1)
    row = plan.best
    assert row.placement.resident is not None
    assert plan.runs(row)
    one_more = predict(row.shape, some, machine(), replace(row.placement, resident=row.placement.resident + 1))
    assert not plan.runs(one_more)
    copied = (20 - row.placement.resident) * (4 << 30)
    assert row.host_memory == copied + (30 << 30)
    copying = copied / DEVICES["H100"].host_bandwidth
    assert row.step.communication == pytest.approx(max(0.0, copying - row.step.compute))


def test_int8_is_considered_if_nothing_exact_fits_and_said():
    huge = replace(PLACED, transformer=ModuleBytes(200 << 30), blocks=(), no_stages="none")
    assert not make_plan(replace(work(), weights=huge), machine(), 1).best.placement.quantize
    plan = make_plan(
        replace(work(), weights=replace(huge, in_8_bits=replace(huge, transformer=ModuleBytes(50 << 30)))), machine(), 1
    )
    assert plan.best.placement.quantize == "int8"
    assert plan.runs(plan.best)
    assert "not exact" in str(plan)


def work_with_vae(transformer):
    """Return work whose blocks are not described, so no mesh of one rank saves memory of the transformer. A VAE has 4
    GiB.

    ``transformer`` has GiB of weights and of whole activations, of which a step has 4, so a waiting VAE needs no more.
    """
    part = model()
    of_step = replace(part, peak=(part.peak[0], 4 << 30))
    return replace(work(of_step), weights=Weights(ModuleBytes((transformer - 4) << 30), vae=4 << 30))


@pytest.mark.parametrize(("ranks", "placement"), [(1, "offload"), (2, "first")])
def test_vae_waits_in_host_memory_where_nothing_else_fits(ranks, placement):
    plan = make_plan(work_with_vae(66), machine(), ranks)
    best = plan.best
    assert plan.runs(best)
    assert best.options == {"vae_placement": placement}
    assert f"VAE {placement}" in str(best) and best.call in str(plan)
    on_device = make_plan(work_with_vae(66), machine(), ranks, Choices(vae_placement="replicate"))
    whole = next(row for row in on_device.rows if row.shape == best.shape)
    assert not on_device.runs(whole)
    assert whole.memory - best.memory == best.host_memory == 4 << 30
    assert best.decoder - whole.decoder == pytest.approx((4 << 30) / DEVICES["H100"].host_bandwidth)
    # Meshes that cannot run are listed once, and a smaller transformer leaves the VAE where it is.
    assert len({str(row) for row in plan.rows}) == len(plan.rows)
    assert not any(row.placement.vae_waits for row in make_plan(work_with_vae(60), machine(), ranks).rows)


def test_a_vae_that_waits_is_on_the_device_while_it_decodes():
    weights = Weights(ModuleBytes(10 << 30), vae=20 << 30)
    at_rest, waiting = (
        memory_of(MeshShape(), replace(work(), weights=weights), Placement(vae=placement))
        for placement in ("replicate", "offload")
    )
    assert waiting == 30 << 30
    assert at_rest > waiting


def test_vae_waits_before_int8_is_considered():
    def best(transformer, in_8_bits):
        some = work_with_vae(transformer)
        quantized = replace(some.weights, transformer=ModuleBytes((in_8_bits - 4) << 30))
        placement = make_plan(replace(some, weights=replace(some.weights, in_8_bits=quantized)), machine(), 1)
        return placement.best.placement.vae, placement.best.placement.quantize

    assert best(66, 33) == ("offload", None)
    assert best(80, 40) == ("replicate", "int8")
    assert best(132, 66) == ("offload", "int8")


def test_unknown_placement_of_a_vae_is_refused():
    with pytest.raises(ValueError, match=r"'fsdp'.*'first'"):
        Choices(vae_placement="fsdp")


def test_a_way_out_is_named_where_nothing_runs():
    huge = replace(PLACED, transformer=ModuleBytes(100 << 30, 99 << 30, 6 << 30), blocks=(), no_stages="none")
    plan = make_plan(replace(work(), weights=huge), machine(), 1)
    assert not plan.runs(plan.best)
    assert plan.more is not None
    assert f"{plan.more.shape.ranks} ranks" in plan.advice


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("device", ["RTX 4090", "L40S"])
@pytest.mark.parametrize("model", ["FLUX.1-dev", "FLUX.2-dev", "Qwen-Image", "HunyuanVideo", "Wan 2.2 A14B"])
def test_published_models_run_on_cards_of_24_and_48_gb(model, device, ranks):
    plan = plan_mesh(model, ranks=ranks, device=device, compiled=True)
    assert plan.runs(plan.best), plan.advice
    assert plan.best.call in str(plan)
    if (model, device, ranks) == ("FLUX.1-dev", "RTX 4090", 4):
        assert plan.best.seconds < 12
        assert plan.best.placement.quantize is None


def test_more_ulysses_ranks_than_heads_have_their_reason():
    plan = make_plan(replace(work(), heads=4), machine(), 8, Choices(()))
    assert plan.best.shape.ulysses <= 4
    problem = next(row.problem for row in plan.rows if row.shape == MeshShape(ulysses=8))
    assert re.search(r"ulysses 8 × tensor 1 .*4 heads", problem)


def test_exact_stages_save_memory_and_no_time():
    row, alone = (predict(shape, work(), machine()) for shape in (MeshShape(pipe=2), MeshShape()))
    assert row.step.compute == alone.step.compute and row.step.communication > 0
    # There are 22 GiB of blocks. The stages cost 6 and 6, and the second one holds 12.
    assert alone.memory - row.memory == pytest.approx(10 * 2**30)
    # Each stage sends the tokens of each branch to the next one.
    assert row.sent == 4608 * WIDTH * 2
    rows = make_plan(work(), machine(), 2).rows
    assert rows[0].shape.pipe == 1
    assert next(row.why for row in rows if row.shape.pipe == 2)


def test_stages_are_chosen_where_nothing_else_fits():
    # Only blocks can be sharded, and a slow link makes gathering expensive.
    blocks = ((1.0, 10 << 30),) * 10
    some = large(tensor=0, blocks=blocks)
    plan = make_plan(some, machine(link=Link("slow", 1e-4, 1e8)), 4)
    assert plan.best.shape.pipe == 4 and plan.best.shape.pipefusion is None


def test_pipefusion_is_predicted_where_it_is_asked_for():
    slow = machine(link=Link("slow", 3e-5, 2e9))
    assert not any(row.shape.pipefusion for row in make_plan(work(), slow, 4).rows)
    fusion = PipeFusion(num_patches=4)
    plan = make_plan(work(), slow, 4, Choices((), pipefusion=fusion))
    assert plan.best.shape == MeshShape(pipe=4, pipefusion=fusion)
    assert "PipeFusion" in str(plan) and f"pipefusion={fusion!r}" in plan.best.call
    exact = predict(MeshShape(pipe=4), work(), slow)
    # Each rank computes a quarter of every step but the first, and holds the keys of the previous step.
    assert plan.best.step.compute == pytest.approx(exact.step.compute / 4, rel=0.2)
    keys = 5 * 2 * 4608 * WIDTH * 2 / 4
    assert plan.best.memory - exact.memory == pytest.approx(keys)
    whole = predict(MeshShape(pipe=4, pipefusion=replace(fusion, warmup_steps=28)), work(), slow)
    assert whole.seconds == pytest.approx(exact.seconds)


def test_absent_stages_and_patches_are_not_offered():
    unknown = replace(WEIGHTS, no_stages="it hands more on", no_patches="it makes tokens itself", blocks=())
    rows = make_plan(replace(work(), weights=unknown), machine(), 2, Choices(pipefusion=PipeFusion())).rows
    staged = [row.problem for row in rows if row.shape.pipe > 1]
    assert staged
    assert all("it hands more on" in problem for problem in staged)
    few = replace(WEIGHTS, blocks=BLOCKS[:1])
    rows = make_plan(replace(work(), weights=few), machine(), 2).rows
    assert any(re.match(r"1 blocks .*2 stages", row.problem or "") for row in rows)


def test_two_dims_are_chosen_where_they_win():
    # Many ranks and a slow link: 6 blocks of keys and queries travel instead of 15 of keys and values.
    far = make_plan(work(model(tokens=100_000)), machine(per_host=1, between="ethernet"), 16, Choices(()))
    ring, two_dims = (
        next(row for row in far.rows if row.shape == MeshShape(ring=16, ring_method=method))
        for method in ("rotate", "2d")
    )
    assert two_dims.seconds < ring.seconds / 2 and two_dims.sent < ring.sent / 2
    # Two heads can be shared by at most two ranks.
    few_heads = replace(work(model(tokens=100_000, heads=2)), heads=2)
    best = make_plan(few_heads, machine(per_host=1, between="ethernet"), 16, Choices(())).best
    assert best.shape.ring_method == "2d" and best.options == {"rotate_method": "2d"}


def test_two_dim_ring_hides_more_traffic():
    call, link = attention_of(model(tokens=4 * 1024, blocks=1)), Link("", latency=0.0, bandwidth=1e9)
    shape = MeshShape(ring=4, ring_method="2d")
    queries = 1024 * WIDTH * 2 / 1e9
    partial = queries + 1024 * 24 * 4 / 1e9
    none, all_of_it = (
        exchange_seconds(
            call, shape, replace(machine(link=link), device=replace(DEVICES["H100"], multiprocessors=1)), attending
        )[0]
        for attending in (0.0, 1e3)
    )
    assert none == pytest.approx(3 * queries + partial)
    assert all_of_it == pytest.approx(0.0, abs=1e-9)
    gathered = machine(link=link, gathered_grid=True)
    assert exchange_seconds(call, shape, gathered, 1e3)[0] == pytest.approx(3 * queries + partial)


def test_a_row_says_the_line_that_runs_it():
    rows = {row.shape: row for row in make_plan(large(), machine(), 8, Choices(pipefusion=PipeFusion())).rows}
    assert rows[MeshShape(ring=4, ulysses=2)].placement.text_encoders == "first"
    assert rows[MeshShape(ring=4, ulysses=2, ring_method="2d", fsdp=True)].call == (
        "parallelize_pipe(pipe, mesh=init_context_parallel_mesh(max_ring_dim_size=4, max_ulysses_dim_size=2), "
        "rotate_method='2d', weights='fsdp')"
    )
    assert rows[MeshShape(ulysses=4, tensor=2)].call == (
        "parallelize_pipe(pipe, mesh=init_context_parallel_mesh(max_ring_dim_size=1, max_ulysses_dim_size=4, "
        "max_tensor_dim_size=2), weights='tensor')"
    )
    assert rows[MeshShape(pipe=2, ulysses=4)].call == (
        "parallelize_pipe(pipe, mesh=init_context_parallel_mesh(max_pipe_dim_size=2, max_ring_dim_size=1, "
        "max_ulysses_dim_size=4), text_encoders='first')"
    )


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True])
def test_a_number_of_ranks_is_a_positive_integer(ranks):
    with pytest.raises(ValueError, match="expected a positive integer"):
        make_plan(work(), machine(), ranks)


def test_names_are_those_of_cuda_too():
    assert device_named("NVIDIA H100 80GB HBM3") is DEVICES["H100"]
    assert device_named("NVIDIA H100 PCIe") is DEVICES["H100 PCIe"]
    assert device_named("NVIDIA GeForce RTX 4090") is DEVICES["RTX 4090"]
    with pytest.raises(ValueError, match=r"TPU v5.*H100"):
        device_named("TPU v5")
    assert link_named("nvlink", DEVICES["A100"]) is LINKS["nvlink3"]
    assert link_named("NVLink", DEVICES["RTX 3090"]) is LINKS["nvlink bridge"]
    assert link_named("nvlink", DEVICES["H200"]) is LINKS["nvlink4"]
    with pytest.raises(ValueError, match="link is 'string'"):
        link_named("string", DEVICES["H100"])


@pytest.mark.parametrize(
    ("name", "device", "memory", "link"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", 80, "nvlink3"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 40, "nvlink3"),
        ("A100-40GB", "A100 40GB", 40, "nvlink3"),
        ("a100 40 gb", "A100 40GB", 40, "nvlink3"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe", 80, "pcie4"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB PCIe", 40, "pcie4"),
        ("H100 80GB", "H100", 80, "nvlink4"),
        ("B200 192GB", "B200", 180, "nvlink5"),
    ],
)
def test_variants_have_their_own_memory_and_link(name, device, memory, link):
    spec = device_named(name)
    assert spec is DEVICES[device]
    assert (spec.memory, link_named(None, spec)) == (memory * 1e9, LINKS[link])
    if "A100" in device:
        assert (link_named("nvlink", spec), link_named("pcie", spec)) == (LINKS["nvlink3"], LINKS["pcie4"])


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("RTX-3090-24GB", "RTX 3090"),
        ("h100 sxm", "H100"),
        ("H100SXM5", "H100"),
        ("h100pcie", "H100 PCIe"),
        ("a100 40g", "A100 40GB"),
        ("L 40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10", "A10"),
        ("rtxA6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("rtx6000ada", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("rtxpro6000", "RTX PRO 6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("a800-sxm4-80gb", "A800"),
    ],
)
def test_device_is_found_in_any_spelling(spelling, name):
    assert device_named(spelling) is DEVICES[name]


def test_every_device_is_found_by_its_own_name():
    assert {name: device_named(name.lower()).name for name in DEVICES} == {name: name for name in DEVICES}
    assert {device.link for device in DEVICES.values()} <= LINKS.keys()


@pytest.mark.parametrize(
    ("typo", "meant"), [("rtx 5900", "RTX 5090"), ("rtx 6000", "RTX PRO 6000 or RTX 6000 Ada"), ("mi300", "MI300X")]
)
def test_misspelt_device_names_what_was_meant(typo, meant):
    with pytest.raises(ValueError, match=f"did you mean {meant}"):
        device_named(typo)


def test_device_can_be_described():
    device = device_named(" my card, 24,140.5 ,NVLink")
    assert (device.name, device.memory, device.products, device.link) == ("my card", 24e9, 140.5e12, "nvlink4")
    fast, slow = (device_named(f"card,80,{speed},pcie5") for speed in (600, 300))
    seconds = [make_plan(work(), replace(machine(), device=device), 1).best.seconds for device in (fast, slow)]
    assert seconds[0] < 0.7 * seconds[1]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("card,24,140", "four parts"),
        ("card,24,140,pcie,3", "four parts"),
        (",24,140,pcie", "four parts"),
        ("card,24 GB,140,pcie", "'24 GB' stands for GB of memory"),
        ("card,24,-1,pcie", "'-1' stands for TFLOPs"),
        ("card,nan,140,pcie", "'nan' stands for GB"),
        ("card,24,inf,pcie", "'inf' stands for TFLOPs"),
        ("card,24,140,nvlnk", "link is 'nvlnk' .did you mean nvlink"),
    ],
)
def test_device_that_is_described_wrongly_raises(text, error):
    with pytest.raises(ValueError, match=error):
        device_named(text)


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "'server'"),
        ("RTX 4080 SUPER", "'super'"),
        ("4090 48GB", "RTX 4090 has 24 GB"),
        ("NVIDIA A100-SXM-64GB", "A100 has 80 GB"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "'1g.5gb mig'"),
        ("NVIDIA H100 NVL", "'nvl'"),
        ("NVIDIA GeForce RTX 4090 Laptop", "'laptop'"),
    ],
)
def test_unknown_variant_is_not_planned_as_the_usual_one(name, unknown):
    with pytest.raises(ValueError, match=re.escape(unknown)):
        device_named(name)


def test_gpu_at_hand_is_asked_for_its_memory():
    with gpu_named("NVIDIA A100-SXM-64GB", memory=68e9):
        assert gpu_at_hand() == replace(DEVICES["A100"], memory=68e9)
    with gpu_named("NVIDIA H100 NVL"), pytest.raises(ValueError, match="nvl"):
        gpu_at_hand()


def test_every_figure_has_a_source():
    assert all(x.source for x in (*DEVICES.values(), *LINKS.values(), Host()))


def test_figures_of_gpu_check_go_before_the_table(tmp_path):
    file = tmp_path / "attention.json"
    rows = [{"way": "flash", "TFLOP/s": 600.0}, {"way": "cudnn", "refused": "no"}, {"verdict": "ok"}]
    # Neither of these says how long attention of all keys takes.
    rows += [{"way": "triton-int8, not exact", "TFLOP/s": 900.0}]
    rows += [{"way": "triton, half of the keys padded", "TFLOP/s": 1100.0}]
    file.write_text(json.dumps({"section": "attention", "rows": rows}))
    device, link, _ = measured_figures(file, DEVICES["H100"], LINKS["nvlink4"], Host())
    assert device.products * device.of_attention == pytest.approx(600e12)
    assert link is LINKS["nvlink4"] and device.source == str(file)
    for nothing in (
        "{}",
        '{"section": "attention", "rows": []}',
        json.dumps({"section": "attention", "rows": rows[1:]}),
    ):
        file.write_text(nothing)
        with pytest.raises(ValueError, match="neither"):
            measured_figures(file, DEVICES["H100"], LINKS["nvlink4"], Host())


def test_a_plan_is_printed_and_drawn(tmp_path):
    plan = make_plan(work(), machine(), 4)
    text = str(plan)
    assert re.match(r"a model, 28 steps: fits 4 × H100 .*\n.*28 steps, on 4 × H100 \(nvlink4\)", text, re.DOTALL)
    assert plan.markdown().count("\n| ") == min(14, len(plan.rows)) + 2
    assert all(str(row) in " ".join(text.split()) for row in plan.rows[:14])
    assert plan.best.call in text
    assert plan.advice in text
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_chart_leaves_out_meshes_beyond_memory(tmp_path):
    plan = make_plan(large(), machine(), 4)
    plan.plot(tmp_path / "plan.svg", rows=len(plan.rows))
    # Matplotlib writes each text as a comment before its glyphs.
    drawn = re.findall("<!-- (.*?) -->", (tmp_path / "plan.svg").read_text())
    assert {str(row): str(row) in drawn for row in plan.rows} == {str(row): plan.runs(row) for row in plan.rows}


def test_tensor_ranks_send_sums_and_less_attention():
    plans = {row.shape: row.sent for row in plan_mesh("FLUX.1-dev", ranks=4).rows}
    by = {(shape.ring, shape.ulysses, shape.tensor): sent for shape, sent in plans.items() if shape.batch == 1}
    # Each of the 19 double blocks all-reduces two results per stream, each of the 38 single blocks one. A result has
    # 3,072 numbers of 2 bytes per token. A ring all-reduce over 4 ranks sends 2 * 3/4 of the result's bytes.
    tokens = 19 * 2 * (4096 + 512) + 38 * (4096 + 512)
    assert by[1, 1, 4] == pytest.approx(2 * 3 / 4 * tokens * 3072 * 2, rel=0.02)
    assert 0 < by[1, 2, 2] != by[1, 4, 1]


def test_work_per_mesh_does_not_grow_with_ranks_and_blocks():
    def calls_per_mesh(ranks, blocks):
        profile = cProfile.Profile()
        with profile:
            rows = [predict(shape, work(model(blocks=blocks)), machine()) for shape in shapes(ranks)]
        return sum(entry.callcount for entry in profile.getstats()) / len(rows)

    assert calls_per_mesh(1000, 57) < 10 * calls_per_mesh(8, 1)


def test_published_ratios_are_those_of_the_check():
    results = json.loads((Path(__file__).parents[2] / "benchmarks/results/planner_check.json").read_text())
    assert {name: tuple(values) for name, values in results["ratios"].items()} == PUBLISHED_RATIOS


@pytest.mark.parametrize(
    ("compiled", "ranks", "kind"), [(True, 1, "compiled"), (False, 1, "eager, one device"), (False, 2, "eager")]
)
def test_first_line_states_the_normal_seconds(compiled, ranks, kind):
    plan = make_plan(work(), replace(machine(), runtime=Runtime(compiled=compiled)), ranks)
    least, most = (duration(ratio * plan.best.seconds) for ratio in PUBLISHED_RATIOS[kind])
    assert f"{least} to {most}" in plan.verdict[0]
    assert str(plan).startswith(plan.verdict[0])
    assert plan.markdown().startswith(plan.verdict[0])


def test_first_line_states_the_bytes_and_the_cards():
    small = make_plan(work(), machine(), 1)
    whole = predict(MeshShape(), work(), machine())
    assert f"fits 1 × H100: {whole.memory / 1e9:.0f} of 80 GB" in small.verdict[0]
    assert len(small.verdict) == 1 and small.fit.ways == ()
    # The weights of this model need 160 GB.
    plan = make_plan(large(), machine(), 8)
    assert f"all of it needs {plan.fit.whole.memory / 1e9:.0f} GB" in plan.verdict[0]
    for row in plan.fit.ways:
        assert row.runs
        named = [f"--{name} {value}" for name, value in row.command_options.items() if name.startswith("weights")]
        assert all(text in plan.verdict[1] for text in named)
    assert {row.shape.fsdp for row in plan.fit.ways} == {True, False}
    nothing = make_plan(large(), replace(machine(), room=1e9), 1)
    assert "does not fit 1 × H100" in nothing.verdict[0] and "may hold 1 GB" in nothing.verdict[0]
    assert nothing.fit.ways == () and "8 cards" in nothing.verdict[1]


def test_published_runs_of_the_same_generation_are_stated():
    verdict = plan_mesh("FLUX.1-dev", ranks=2).verdict
    # xDiT's table: one H100 4.30 and 6.71 s, two 2.60 to 5.31 s.
    assert "1 card 4.3 s to 6.71 s, 2 cards 2.6 s to 5.31 s" in verdict[-1]
    for other in ({"steps": 27}, {"height": 512}, {"device": "L40S"}):
        assert not any("4.3 s" in line for line in plan_mesh("FLUX.1-dev", **{"ranks": 2, **other}).verdict)


def test_memory_of_a_rank_replaces_that_of_the_device():
    rows = {size: plan_mesh("FLUX.1-dev", ranks=1, memory=size).best for size in (34e9, 33e9)}
    assert rows[34e9].options == {} and rows[34e9].room == 34e9
    assert rows[33e9].memory <= 33e9 and rows[33e9].options
    assert str(plan_mesh("FLUX.1-dev", ranks=1, device="L4", memory=34e9).best) == "one rank"


@pytest.mark.parametrize("weights", ["replicate", "fsdp", "tensor"])
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_demanded_way_to_shard_weights_is_that_of_every_row(weights, ranks):
    for device in ("H100", "RTX 4090"):
        rows = plan_mesh("FLUX.1-dev", ranks=ranks, device=device, weights=weights).rows
        expected = None if weights == "replicate" or ranks == 1 else weights
        assert {row.options.get("weights") for row in rows} == {expected}


def test_demanded_mesh_is_that_of_every_row():
    for mesh, expected in (
        ({"ring": 2}, (1, 1, 2, 2, 1)),
        ({"batch": 2}, (2, 1, 1, 2, 1)),
        ({"ulysses": 1}, (1, 1, 4, 1, 1)),
        ({"tensor": 2, "ring": 8}, (1, 1, 2, 1, 2)),
        ({"pipe": 3}, (1, 2, 1, 2, 1)),
        ({"pipe": 2, "ulysses": 2}, (1, 2, 1, 2, 1)),
    ):
        plan = plan_mesh("Wan 2.1 14B", ranks=4, mesh=mesh)
        shapes_of_rows = {(x.batch, x.pipe, x.ring, x.ulysses, x.tensor) for x in (row.shape for row in plan.rows)}
        assert shapes_of_rows == {expected}


def test_demanded_offload_is_that_of_every_row():
    for ranks in (1, 2):
        rows = plan_mesh("FLUX.1-dev", ranks=ranks, offload="blocks").rows
        assert {row.options.get("offload") for row in rows if row.problem is None} == {"blocks"}
        usual = plan_mesh("FLUX.1-dev", ranks=ranks)
        moved = plan_mesh("FLUX.1-dev", ranks=ranks, offload="model").best
        weights = usual.work.weights
        # Only the transformer and its activations are on the device; each component is copied once.
        assert moved.memory == pytest.approx(usual.best.memory - weights.encoders.total - weights.vae)
        copied = (weights.transformer.total + weights.encoders.total + weights.vae) / DEVICES["H100"].host_bandwidth
        assert moved.seconds == pytest.approx(usual.best.seconds + copied)
        assert moved.command_options["offload"] == "model"


def test_chart_compares_with_one_rank(tmp_path):
    def texts(plan):
        plan.plot(tmp_path / "plan.svg")
        return re.findall("<!-- (.*?) -->", (tmp_path / "plan.svg").read_text())

    plan = make_plan(work(), machine(), 4)
    drawn = texts(plan)
    assert "for comparison: one rank" in drawn and f" {duration(plan.fewer[1].seconds)}" in drawn
    assert f" {duration(plan.best.seconds)} – fastest" in drawn
    assert plan.title in " ".join(drawn)
    alone = texts(make_plan(work(), machine(), 1))
    assert any(text.startswith("with 8 ranks") for text in alone)
    nothing = make_plan(large(), replace(machine(), room=1e9), 1)
    assert "does not fit" not in texts(nothing) and any("cannot run" in text for text in texts(nothing))
