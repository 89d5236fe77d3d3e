"""Predictions follow what is known of them without the model: bytes by hand, and more bandwidth is never slower."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from para_core.adapters import plan_mesh
from para_core.adapters.planner.choose import EQUALLY_FAST, Choices
from para_core.adapters.planner.mesh import MeshShape, all_shapes
from para_core.adapters.planner.predict import Machine, predict, traffic_of
from para_core.adapters.planner.predictions import PUBLISHED_RATIOS, duration, predict_meshes
from para_core.adapters.planner.weights import ModuleBytes, Placement, Weights
from para_core.adapters.planner.work import AttentionWork, CallWork, GenerationSizes, Workload
from para_core.devices import DEVICES, LINKS, RESERVED, Link

WIDTH = 3072
BLOCKS = ((2.0, 3 << 30), (2.0, 3 << 30), *[(1.0, 2 << 30)] * 8)
WEIGHTS = Weights(
    ModuleBytes(24 << 30, 23 << 30, 7 << 30),
    tensor=17 << 30,
    encoders=ModuleBytes(9 << 30, 8 << 30, 1 << 30),
    other=1 << 30,
    blocks=BLOCKS,
    no_stages="",
)


def model(tokens=4608, blocks=5, heads=24):
    """Return a transformer of equal blocks, each with one attention call, on sharded tokens."""
    products = 2.0 * tokens * WIDTH * 12 * WIDTH * blocks
    return CallWork(
        attention=(AttentionWork(blocks, 1, heads, heads, 2 * WIDTH // heads, 2, tokens, tokens, exchanges=True),),
        products=products,
        moved=40.0 * blocks * tokens * WIDTH * 2,
        peak=(100.0 * tokens * WIDTH, 0.0),
        summed=2.0 * blocks * tokens * WIDTH * 2,
        launches=60 * blocks,
    )


def work(call=None, **changes):
    named = {"branches": 1, "heads": 24, "weights": WEIGHTS, **changes}
    return Workload("a model", GenerationSizes(1024, 1024, 1, 512), 28, call=call or model(), **named)


def machine(device="H100", link=None, between="infiniband", **changes):
    spec = DEVICES[device]
    return Machine(spec, link or LINKS[spec.link], LINKS[between], **changes)


SHAPES = [shape for ranks in (2, 4, 6, 8) for shape in all_shapes(ranks)]


@settings(max_examples=25, deadline=None)
@given(shape=st.sampled_from(SHAPES), slow=st.floats(1e8, 1e12), times=st.floats(1.0, 100.0), share=st.floats(0.1, 1.0))
def test_better_links_and_devices_are_never_slower(shape, slow, times, share):
    links = [Link("a", 1e-5, slow), Link("b", 1e-5, slow * times), Link("c", 1e-6, slow * times)]
    first, second, third = (predict(shape, work(), machine(link=link)).seconds for link in links)
    assert first >= second * (1 - 1e-9) >= third * (1 - 1e-9) ** 2
    fast = machine()
    slower = replace(fast, device=replace(fast.device, products=share * fast.device.products))
    assert predict(shape, work(), fast).seconds <= predict(shape, work(), slower).seconds * (1 + 1e-9)


def test_best_mesh_follows_link_guidance_and_hosts():
    assert traffic_of(MeshShape(), work()) == 0
    slow = predict_meshes(work(), machine("L20", Link("slow", 3e-5, 1e8)), 2, Choices("replicate"))
    assert slow.other is not None and slow.other.shape.ranks == 1 and slow.best.seconds > slow.other.seconds
    assert "as fast on 1 of these 2 ranks" in slow.advice
    assert predict_meshes(work(branches=2), machine(), 2).best.shape == MeshShape(batch=2)
    samples = replace(model(), attention=(replace(model().attention[0], samples=2),))
    assert predict_meshes(work(samples, branches=2, batched=True), machine(), 2).best.shape == MeshShape(batch=2)
    unguided = predict_meshes(work(), machine(), 4)
    assert unguided.best.shape == MeshShape(ulysses=4)
    assert next(row.problem for row in unguided.rows if row.shape.batch == 2)
    fastest = min(row.seconds for row in unguided.rows if row.runs)
    assert fastest <= unguided.best.seconds <= EQUALLY_FAST * fastest
    hosts = predict_meshes(work(model(tokens=120_000)), machine(between="ethernet"), 16, Choices("replicate")).best
    assert hosts.shape.ulysses <= 8 and hosts.shape.ring >= 2


def large(**changes):
    """Return work whose weights do not fit one H100."""
    weights = replace(WEIGHTS, transformer=ModuleBytes(100 << 30, 96 << 30, 8 << 30), tensor=90 << 30)
    return work(weights=replace(weights, **changes))


def test_gathered_weights_count_as_sent_bytes_and_are_held():
    plan = predict_meshes(large(), machine(), 4)
    assert plan.best.memory < 74e9
    fitting = [row.fits for row in plan.rows if not row.problem]
    assert fitting == sorted(fitting, reverse=True) and not all(fitting)
    assert any(re.search(r"GB do not fit into 74", row.why) for row in plan.rows)
    shapes = MeshShape(ulysses=4), MeshShape(ulysses=4, fsdp=True)
    whole, gathered = (predict(shape, large(), machine(), Placement("replicate")) for shape in shapes)
    # 96 of 100 GiB are sharded. In addition, 8 are gathered into their own buffers.
    assert whole.memory - gathered.memory == pytest.approx((0.75 * 96 - 8) * 2**30)
    assert gathered.sent - whole.sent == pytest.approx(0.75 * 96 * 2**30)
    half = predict(shapes[1], large(in_8_bits=0.5), machine(), Placement("replicate", quantize="int8"))
    assert half.sent - whole.sent == pytest.approx(0.75 * 48 * 2**30)
    assert gathered.step > whole.step
    # If all weights fit, no rank gathers them.
    assert not any(row.shape.fsdp for row in predict_meshes(work(), machine(), 4).rows)


PLACED = replace(
    Weights(ModuleBytes(60 << 30, 56 << 30, 6 << 30)),
    encoders=ModuleBytes(30 << 30, 28 << 30, 2 << 30, largest_layer=1 << 30),
    blocks=tuple((1.0, 3 << 30) for _ in range(18)),
    no_stages="",
)


def test_int8_is_considered_if_nothing_exact_fits_and_said():
    huge = replace(PLACED, transformer=ModuleBytes(200 << 30), blocks=(), no_stages="none")
    assert predict_meshes(work(weights=huge), machine(), 1).best.placement.quantize is None
    plan = predict_meshes(work(weights=replace(huge, in_8_bits=0.25)), machine(), 1)
    assert plan.best.placement.quantize == "int8" and plan.best.runs
    assert "not exact" in str(plan)


# Weights of 62 GiB and activations of 4 in a step, and a VAE of 4, which does not run in a step.
FULL = work(replace(model(), peak=(0.0, 4 << 30)), weights=Weights(ModuleBytes(62 << 30), vae=4 << 30))


@pytest.mark.parametrize(
    ("some", "ranks", "options", "host_memory"),
    [
        (work(weights=PLACED), 1, {"text_encoders": "offload"}, 30 << 30),
        (FULL, 1, {"vae_placement": "offload"}, 4 << 30),
        (FULL, 2, {"vae_placement": "first"}, 4 << 30),
    ],
)
def test_what_waits_in_host_memory_where_nothing_else_fits(some, ranks, options, host_memory):
    best = predict_meshes(some, machine(), ranks).best
    assert best.runs and best.options == options
    whole = predict(best.shape, some, machine())
    assert not whole.runs
    assert best.host_memory == host_memory
    assert whole.memory - best.memory == pytest.approx(host_memory, rel=0.05)
    if "text_encoders" in options:
        assert best.seconds - whole.seconds == pytest.approx(host_memory / DEVICES["H100"].host_bandwidth)


def test_problems_of_meshes_are_named():
    heads = predict_meshes(work(heads=4), machine(), 8).rows
    assert any(re.search(r"ulysses 8 × tensor 1 .*4 heads", row.problem) for row in heads)
    unknown = replace(WEIGHTS, no_stages="it hands more on", blocks=())
    rows = predict_meshes(work(weights=unknown), machine(), 2).rows
    assert all("it hands more on" in row.problem for row in rows if row.shape.pipe > 1)
    few = predict_meshes(work(weights=replace(WEIGHTS, blocks=BLOCKS[:1])), machine(), 2).rows
    assert any(re.match(r"1 blocks .*2 stages", row.problem) for row in few)
    tensor = (MeshShape(tensor=2), "int8-dynamic", "tensor")
    for shape, scheme, words in ((MeshShape(ulysses=2, fsdp=True), "fp8", "FSDP2"), tensor):
        assert words in predict(shape, work(), machine(), Placement(quantize=scheme)).problem


def test_a_way_out_is_named_where_nothing_runs():
    huge = replace(PLACED, transformer=ModuleBytes(100 << 30, 99 << 30, 6 << 30), blocks=(), no_stages="none")
    plan = predict_meshes(work(weights=huge), machine(), 1)
    assert not plan.best.runs
    assert "does not fit 1 × H100" in plan.verdict
    assert re.match(r"It runs on \d+ ranks: .*fsdp", plan.advice)
    assert "parallelize_pipe(" not in str(plan)


def test_a_row_says_the_line_that_runs_it():
    lines = {
        MeshShape(ring=4, ulysses=2, ring_method="2d", fsdp=True): (
            "parallelize_pipe(pipe, mesh=init_context_parallel_mesh(max_ring_dim_size=4, max_ulysses_dim_size=2), "
            "rotate_method='2d', weights='fsdp')"
        ),
        MeshShape(ulysses=4, tensor=2): (
            "parallelize_pipe(pipe, mesh=init_context_parallel_mesh(max_ring_dim_size=1, max_ulysses_dim_size=4, "
            "max_tensor_dim_size=2), weights='tensor')"
        ),
        MeshShape(): "pipe = pipe  # one device: unchanged",
    }
    for shape, line in lines.items():
        assert predict(shape, work(), machine()).code == line


def test_demands_are_those_of_every_row():
    for weights in ("replicate", "fsdp", "tensor"):
        for ranks, device in ((1, "H100"), (2, "RTX 4090"), (6, "H100")):
            rows = plan_mesh("FLUX.1-dev", ranks=ranks, device=device, weights=weights).rows
            expected = None if weights == "replicate" or ranks == 1 else weights
            assert {row.options.get("weights") for row in rows} == {expected}
    for ranks, mesh, expected in (
        (4, {"ring": 2}, (1, 1, 2, 2, 1)),
        (4, {"tensor": 2, "ring": 8}, (1, 1, 2, 1, 2)),
        (4, {"pipe": 2, "ulysses": 2}, (1, 2, 1, 2, 1)),
        (32, {"batch": 1}, (1, 1, 4, 8, 1)),  # No Ulysses group spans two hosts of 8.
    ):
        rows = plan_mesh("Wan 2.1 14B", ranks=ranks, mesh=mesh).rows
        assert {(x.batch, x.pipe, x.ring, x.ulysses, x.tensor) for x in (row.shape for row in rows)} == {expected}
    for ranks in (1, 2):
        rows = plan_mesh("FLUX.1-dev", ranks=ranks, offload="blocks").rows
        assert {row.options.get("offload") for row in rows if not row.problem} == {"blocks"}
        assert all(row.placement.takes_turns for row in plan_mesh("FLUX.1-dev", ranks=ranks, offload="model").rows)


def test_memory_of_a_rank_replaces_that_of_the_device():
    rows = {size: plan_mesh("FLUX.1-dev", ranks=1, memory=size).best for size in (34e9, 33e9)}
    assert rows[34e9].options == {} and rows[34e9].room == 34e9
    assert rows[33e9].memory <= 33e9 and rows[33e9].options
    assert plan_mesh("FLUX.1-dev", ranks=1).best.room == 80e9 - RESERVED
    for name, device in (("FLUX.2-dev", "RTX 4090"), ("Wan 2.2 A14B", "RTX 4090"), ("HunyuanVideo", "L40S")):
        plan = plan_mesh(name, ranks=4, device=device)
        assert plan.best.runs, plan.advice
        assert plan.best.code in str(plan)


def test_first_line_states_seconds_bytes_and_cards():
    for compiled, ranks, kind in ((True, 1, "compiled"), (False, 1, "eager, one device"), (False, 2, "eager")):
        plan = predict_meshes(work(), machine(compiled=compiled), ranks)
        least, most = (duration(ratio * plan.best.seconds) for ratio in PUBLISHED_RATIOS[kind])
        assert f"{least} to {most}" in plan.verdict
        assert str(plan).startswith(plan.verdict)
    small, whole = predict_meshes(work(), machine(), 1), predict(MeshShape(), work(), machine())
    assert f"fits 1 × H100: {whole.memory / 1e9:.0f} of the 74 GB" in small.verdict
    # The weights of this model need more than one device has.
    plan = predict_meshes(large(), machine(), 8)
    assert f"one device needs {plan.on_one.memory / 1e9:.0f} GB" in plan.verdict
    nothing = predict_meshes(large(), machine(room=1e9), 1)
    assert "does not fit 1 × H100" in nothing.verdict and "may hold 1 GB" in nothing.verdict
    rows = predict_meshes(large(), machine(room=1e9), 4).rows
    assert rows[0].memory == min(row.memory for row in rows if not row.problem)


def test_weights_alone_are_compared_with_the_device():
    some = Workload("a unet", GenerationSizes(0, 0, 1, 0), 0, Weights(ModuleBytes(), other=5e9), uncounted="not known.")
    plan = predict_meshes(some, machine(), 2)
    assert plan.best.runs and plan.best.memory == 5e9
    assert re.match(r"a unet, weights alone: fits 2 × H100.*not predicted: not known\.", plan.verdict)
    assert not predict_meshes(some, machine(room=4e9), 1).best.runs
