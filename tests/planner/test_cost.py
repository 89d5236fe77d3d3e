"""Predicted seconds follow what is known of them without the model: more bandwidth is never slower, bytes are those of the formula."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from para_core.adapters import plan_mesh
from para_core.planner.cost import Machine, Runtime, Shape, attention_seconds, call_seconds, exchange_seconds
from para_core.planner.hardware import DEVICES, LINKS, Host, Link, Topology, device_named, link_named, measured_figures
from para_core.planner.mesh_plan import Workload, divisors, make_plan, predict, shapes
from para_core.planner.traffic import AttentionCall, Gathered, ModelCall, Part, Product, Tokens

WIDTH = 3072


def model(tokens=4608, blocks=5, heads=24, samples=1):
    """A transformer of equal blocks, each with one attention call, on sharded tokens."""
    sharded = (Tokens(tokens, cut=True),)
    attention = AttentionCall(samples, heads, heads, WIDTH // heads, WIDTH // heads, 2, sharded, sharded)
    products = [Product(samples, sharded, WIDTH, 12 * WIDTH, 2)]
    return Part(
        [attention, *products] * blocks + [Gathered(sharded[0], 128)],
        returned=128 * tokens,
        launches=60 * blocks,
        moved=(40 * blocks * tokens * WIDTH * 2, 0),
        peak=(100 * tokens * WIDTH, 0),
    )


def work(part=None, *, branches=1, parts=1):
    call = ModelCall(("model",), [part or model()])
    shared = ModelCall(("model",), [part or model()] * parts)
    return Workload("a model", {1: call, 2: shared}, branches, 28, 24e9, 17e9, 10e9, 0.0, 0.0, heads=24)


def machine(device="H100", link=None, *, per_host=8, between="infiniband", **changes):
    known = DEVICES[device]
    topology = Topology(link or LINKS[known.link], LINKS[between], per_host)
    return Machine(known, topology, Host(), Runtime(**changes))


SHAPES = [shape for ranks in (2, 4, 6, 8) for shape in shapes(ranks, pipe=True, two_dims=True)]


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
    one, several = (call_seconds(model(tokens), each, machine()).products for each in (Shape(), shape))
    assert one / shape.sequence * 0.999 <= several <= one


def test_one_rank_sends_nothing_and_waits_for_nobody():
    row = predict(Shape(), work(), machine())
    assert row.sent == 0 and row.step.communication == 0


def test_attention_takes_its_operations_over_the_reached_peak():
    # Of 128 multiprocessors each has 3 of the 24 × 16 tiles.
    device = replace(DEVICES["H100"], products=1e15, of_attention=0.5, multiprocessors=128)
    call = model(tokens=2048, blocks=1).events[0]
    seconds = attention_seconds(call, Shape(), replace(machine(), device=device))
    assert seconds == pytest.approx(4 * 2048 * 2048 * WIDTH / 5e14)


def test_few_heads_leave_multiprocessors_idle():
    # Of 132, 3 heads × 44 tiles fill all, 3 × 45 need a second wave for the last three.
    fits, more = (
        attention_seconds(model(tokens, 1, heads=3).events[0], Shape(), machine()) for tokens in (44 * 128, 45 * 128)
    )
    assert more / fits == pytest.approx(2 * 45 / 44)


def test_what_one_device_was_measured_to_take_scales_what_it_computes():
    call = model(blocks=1)
    fast, slow = (call_seconds(call, Shape(), replace(machine(), slowdown=factor)) for factor in (1.0, 1.5))
    assert slow.compute == pytest.approx(1.5 * fast.compute)


def test_ulysses_waits_for_its_bytes_and_two_latencies():
    link = Link("", latency=1e-3, bandwidth=1e9)
    call = model(tokens=4096, blocks=1).events[0]
    waiting, _ = exchange_seconds(call, Shape(ulysses=4), machine(link=link), attending=0.0)
    # A quarter of the tokens, of three quarters of the heads: queries, keys, values, and as much of the results.
    sent = 4 * (4096 // 4) * (WIDTH * 3 // 4) * 2
    assert waiting == pytest.approx(2e-3 + sent / 1e9)


def test_a_ring_hides_what_travels_behind_what_is_computed():
    link = Link("", latency=0.0, bandwidth=1e9)
    call = model(tokens=4096, blocks=1).events[0]
    hop = 2 * 1024 * WIDTH * 2 / 1e9
    shown = [
        exchange_seconds(call, Shape(ring=4), machine(link=link), attending=x)[0] for x in (0.0, 2 * hop, 100 * hop)
    ]
    # A step is 4 blocks of attention; the hidden share of a hop costs 20 of 132 multiprocessors.
    assert shown[0] == pytest.approx(3 * hop)
    assert shown[1] == pytest.approx(3 * (hop / 2 + hop / 2 * 20 / 132))
    assert shown[2] == pytest.approx(3 * hop * 20 / 132)
    gathered = machine(link=link, overlapped=False)
    assert exchange_seconds(call, Shape(ring=4), gathered, attending=100 * hop)[0] == pytest.approx(3 * hop)


def test_two_dims_send_with_the_root_of_the_ring():
    link = Link("", latency=0.0, bandwidth=1e9)
    seconds = {
        (ring, method): exchange_seconds(
            model(tokens=ring * 256, blocks=1).events[0],
            Shape(ring=ring, ring_method=method),
            machine(link=link, per_host=64, overlapped=False),
            attending=0.0,
        )[0]
        for ring in (16, 64)
        for method in ("rotate", "2d")
    }
    # Of a rank's 256 tokens, keys and values: P - 1 times around a ring; √P - 1 times along each side, with queries and results.
    assert seconds[64, "rotate"] / seconds[16, "rotate"] == pytest.approx(63 / 15)
    assert seconds[64, "2d"] / seconds[16, "2d"] == pytest.approx(7 / 3, rel=0.01)
    assert seconds[64, "2d"] < seconds[64, "rotate"] / 4


def test_all_to_all_between_hosts_takes_as_long_as_what_leaves_the_host():
    fast, slow = Link("", 0.0, 1e12), Link("", 1e-3, 1e9)
    topology = Topology(fast, slow, per_host=4)
    assert topology.all_to_all(7e9, stride=1, size=8) == pytest.approx(1e-3 + 4.0)
    assert topology.all_to_all(3e9, stride=1, size=4) == pytest.approx(3e-3)
    # Neighbours along this dim are on different hosts, all of them.
    assert topology.all_to_all(1e9, stride=4, size=2) == pytest.approx(1e-3 + 1.0)


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 12])
def test_every_mesh_has_all_ranks_and_is_listed_once(ranks):
    found = list(shapes(ranks, pipe=True))
    assert all(shape.ranks == ranks for shape in found)
    assert len(set(found)) == len(found)
    without = [
        (1, ring, u, t) for ring in divisors(ranks) for u in divisors(ranks // ring) for t in [ranks // ring // u]
    ]
    assert {(s.batch, s.ring, s.ulysses, s.tensor) for s in found if s.batch == s.pipe == 1} == set(without)


def test_two_cards_on_a_slow_bus_are_said_to_be_slower_than_one():
    plan = make_plan(work(), machine("L20", Link("slow", 3e-5, 5e8)), 2, tensor=False)
    assert plan.best.seconds > plan.fewer[1].seconds
    assert plan.fastest.shape == Shape()
    assert plan.advice.startswith("2 ranks take") and "use 1, and the others for other prompts" in plan.advice
    assert "waits for what travels" in plan.advice


def test_guidance_goes_first_where_there_are_branches():
    assert make_plan(work(branches=2), machine(), 2, tensor=False).best.shape == Shape(batch=2)
    rows = make_plan(work(), machine(), 2, tensor=False).rows
    assert rows[0].shape.batch == 1
    assert "one branch" in next(row.problem for row in rows if row.shape.batch == 2)


def test_between_hosts_the_ring_and_within_them_ulysses():
    best = make_plan(work(model(tokens=120_000)), machine(per_host=8, between="ethernet"), 16, tensor=False).best
    assert best.shape.ulysses <= 8 and best.shape.ring >= 2


def test_what_does_not_fit_into_memory_stands_behind_what_does():
    large = replace(work(), weights=100e9, shared_weights=90e9)
    plan = make_plan(large, machine(), 4)
    assert plan.best.shape.tensor > 1 and plan.best.memory < 74e9
    replicated = next(row for row in plan.rows if row.shape == Shape(ulysses=4))
    assert "110 GB do not fit into 74" in replicated.why


def test_more_ulysses_ranks_than_heads_have_their_reason():
    plan = make_plan(replace(work(), heads=4), machine(), 8, tensor=False)
    assert plan.best.shape.ulysses <= 4
    problem = next(row.problem for row in plan.rows if row.shape == Shape(ulysses=8))
    assert problem == "ulysses 8 × tensor 1 is more than 4 heads: a rank would have none"


def test_a_pipe_and_two_dims_are_predicted_and_never_chosen():
    plan = make_plan(work(model(tokens=100_000)), machine(), 16, planned=True)
    assert all(row.shape.pipe == 1 and row.shape.ring_method == "rotate" for row in plan.rows)
    assert any(row.shape.pipe > 1 for row in plan.planned)
    assert any(row.shape.ring_method == "2d" for row in plan.planned)


@pytest.mark.parametrize("ranks", [0, -1, 2.0, True])
def test_a_number_of_ranks_is_a_positive_integer(ranks):
    with pytest.raises(ValueError, match="expected a positive integer"):
        make_plan(work(), machine(), ranks)


def test_names_are_those_of_cuda_too():
    assert device_named("NVIDIA H100 80GB HBM3") is DEVICES["H100"]
    assert device_named("NVIDIA H100 PCIe") is DEVICES["H100 PCIe"]
    assert device_named("NVIDIA GeForce RTX 4090") is DEVICES["RTX 4090"]
    assert device_named("NVIDIA A100-SXM4-80GB") is DEVICES["A100"]
    with pytest.raises(ValueError, match="known are H100"):
        device_named("TPU v5")
    assert link_named("nvlink", DEVICES["A100"]) is LINKS["nvlink3"]
    assert link_named("nvlink", DEVICES["H200"]) is LINKS["nvlink4"]
    with pytest.raises(ValueError, match="link is 'string'"):
        link_named("string", DEVICES["H100"])


def test_every_figure_has_a_source():
    assert all(x.source for x in (*DEVICES.values(), *LINKS.values(), Host()))


def test_figures_of_gpu_check_go_before_the_table(tmp_path):
    file = tmp_path / "attention.json"
    file.write_text('{"section": "attention", "rows": [{"way": "flash", "TFLOP/s": 600.0}, {"verdict": "ok"}]}')
    device, link, _ = measured_figures(file, DEVICES["H100"], LINKS["nvlink4"], Host())
    assert device.products * device.of_attention == pytest.approx(600e12)
    assert link is LINKS["nvlink4"] and device.source == str(file)
    file.write_text("{}")
    with pytest.raises(ValueError, match="neither"):
        measured_figures(file, DEVICES["H100"], LINKS["nvlink4"], Host())


def test_a_plan_is_printed_and_drawn(tmp_path):
    plan = make_plan(work(), machine(), 4)
    text = str(plan)
    assert text.startswith("a model, 28 steps, on 4 × H100 (nvlink4)")
    assert text.count("\n| ") == len(plan.rows) + 2
    assert "4 ranks take" in text.splitlines()[-1]
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_tensor_ranks_send_what_is_summed_and_less_of_attention():
    plans = {row.shape: row.sent for row in plan_mesh("FLUX.1-dev", ranks=4).rows}
    by = {(shape.ring, shape.ulysses, shape.tensor): sent for shape, sent in plans.items() if shape.batch == 1}
    # 19 double blocks sum two results for each stream, 38 single ones one, of 3,072 numbers of 2 bytes; a ring of 4 sends 3/2 of it.
    tokens = 19 * 2 * (4096 + 512) + 38 * (4096 + 512)
    assert by[1, 1, 4] == pytest.approx(2 * 3 / 4 * tokens * 3072 * 2, rel=0.02)
    assert 0 < by[1, 2, 2] != by[1, 4, 1]
