"""Modes around and inside torch.compile(fullgraph=True): numbers, graphs, recompiles, warnings."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from para_core import UnifiedAttnMode, ring_attention, ulysses_attention, unified_attention
from tests.attention.one_device import make_qkv, relative_error
from tests.modes.test_unified import MODULES, call_module, make_module, make_transformer, tokens
from tests.rank_pool import RankPoolError

MESHES = [(2, 1), (1, 2), (2, 2)]
# The default run has both dims at once. Tests of other forms have each dim alone.
BOTH_DIMS = [(2, 2), *[pytest.param(*mesh, marks=pytest.mark.long) for mesh in MESHES[:2]]]
LENGTHS = [16, 16, 13, 7, 9, 16, 21, 5, 30, 11, 8, 19, 26, 3]  # Twelve of the lengths are different.


def make_mesh(ring, ulysses):
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


class Counter:
    """A recorder of a backend's graphs, with one entry per compilation."""

    def __init__(self, backend="aot_eager"):
        self.graphs = []
        self._backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.graphs.append(graph.code)
        return self._backend(graph, inputs)


def compile_around(ring, ulysses, lengths, backend="counter"):
    """Enter the mode outside the compiled function, a new mode for every call."""
    mesh, model, counter = make_mesh(ring, ulysses), make_transformer(), Counter()
    compiled = torch.compile(model, fullgraph=True, backend=counter if backend == "counter" else backend)
    outs, graphs = [], []
    with torch.no_grad():
        for S in lengths:
            with UnifiedAttnMode(mesh) as cp:
                outs.append(cp.gather(compiled(cp.shard(tokens(S), dim=1)), dim=1))
            graphs.append(len(counter.graphs))
    return outs, graphs


def check(results, lengths):
    model = make_transformer()
    for rank, (outs, _) in enumerate(results):
        with torch.no_grad():
            for S, out in zip(lengths, outs, strict=True):
                assert relative_error(out, model(tokens(S))) < 1e-5, f"{S} tokens, rank {rank}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("ring", "ulysses"), [(2, 1), *[pytest.param(*mesh, marks=pytest.mark.long) for mesh in MESHES[1:]]]
)
def test_twelve_lengths_are_right_and_cost_few_compilations(rank_pool, ring, ulysses):
    results = rank_pool.run(compile_around, ring * ulysses, ring, ulysses, LENGTHS)
    check(results, LENGTHS)
    for _, graphs in results:
        assert graphs[1] == 1
        assert graphs[-1] <= 5


def compile_with_the_mode_inside(ring, ulysses, form):
    # The place where the mode is entered matters to the tracer only, so no code is generated.
    mesh, model, counter = make_mesh(ring, ulysses), make_transformer(), Counter("eager")
    outside = UnifiedAttnMode(mesh)

    def made_inside(x):
        with UnifiedAttnMode(mesh) as cp:
            sequence = cp.sequence(x.shape[1])
            return cp.gather(model(cp.shard(x, dim=1, sequence=sequence)), dim=1, sequence=sequence)

    def made_outside(x):
        sequence = outside.sequence(x.shape[1])
        with outside:
            return outside.gather(model(outside.shard(x, dim=1, sequence=sequence)), dim=1, sequence=sequence)

    compiled = torch.compile(
        {"made inside": made_inside, "made outside": made_outside}[form], fullgraph=True, backend=counter
    )
    outs, graphs = [], []
    with torch.no_grad():
        for S in [12, 12, 12, 13, 7, 9, 12]:
            outs.append(compiled(tokens(S)))
            graphs.append(len(counter.graphs))
    return outs, graphs


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ring", "ulysses", "form"),
    [
        (2, 1, "made outside"),
        (1, 2, "made inside"),
        *[
            pytest.param(*rest, marks=pytest.mark.long)
            for rest in [
                (2, 1, "made inside"),
                (2, 2, "made inside"),
                (1, 2, "made outside"),
                (2, 2, "made outside"),
            ]
        ],
    ],
)
def test_a_mode_is_entered_inside_the_compiled_function(rank_pool, ring, ulysses, form):
    results = rank_pool.run(compile_with_the_mode_inside, ring * ulysses, ring, ulysses, form)
    check(results, [12, 12, 12, 13, 7, 9, 12])
    for _, graphs in results:
        assert graphs[2] == 1
        assert graphs[-1] <= 4


def compile_without_sequence():
    mode = UnifiedAttnMode(make_mesh(1, 2))

    def shard(x):
        with mode:
            return mode.shard(x, dim=1)

    with pytest.raises(Exception, match=r"sequence=.* cp\.sequence"):
        torch.compile(shard, fullgraph=True, backend="eager")(tokens(4))


def test_compiled_shard_needs_sequence(rank_pool):
    rank_pool.run(compile_without_sequence, 2)


def compile_on_two_meshes():
    meshes = [make_mesh(2, 2), make_mesh(1, 4), make_mesh(4, 1), make_mesh(2, 2)["ulysses"]]
    model = make_transformer()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    outs = []
    with torch.no_grad():
        for _ in range(2):
            for mesh in meshes:
                with UnifiedAttnMode(mesh) as cp:
                    outs.append(cp.gather(compiled(cp.shard(tokens(13), dim=1)), dim=1))
            outs.append(compiled(tokens(13)))  # This call is without any mode.
    return outs, None


@pytest.mark.long
def test_compiled_model_runs_on_two_meshes(rank_pool):
    check(rank_pool.run(compile_on_two_meshes, 4), [13] * 10)


def compile_equal_parts(ring, ulysses):
    mesh = make_mesh(ring, ulysses)
    counter = Counter()
    mode = UnifiedAttnMode(mesh)

    @torch.compile(fullgraph=True, backend=counter)
    def attend(q, k, v, is_causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    @torch.compile(fullgraph=True, backend=counter)
    def functional(q, k, v):
        return unified_attention(q, k, v, mesh=mesh, is_causal=True)

    q, k, v = (x.chunk(ring * ulysses, dim=-2)[mesh.get_rank()] for x in make_qkv(12, 3))
    outs = []
    with torch.no_grad():
        for _ in range(2):
            with mode:
                outs += [attend(q, k, v, False), attend(q, k, v, True)]
            outs.append(functional(q, k, v))
    return outs, len(counter.graphs)


@pytest.mark.long
@pytest.mark.parametrize(("ring", "ulysses"), BOTH_DIMS)
def test_user_parts_and_functional_forms_compile(rank_pool, ring, ulysses):
    full, causal = (F.scaled_dot_product_attention(*make_qkv(12, 3), is_causal=flag) for flag in (False, True))
    for rank, (outs, num_graphs) in enumerate(rank_pool.run(compile_equal_parts, ring * ulysses, ring, ulysses)):
        assert num_graphs == 3
        for out, whole in zip(outs, [full, causal, causal] * 2, strict=True):
            assert relative_error(out, whole.chunk(ring * ulysses, dim=-2)[rank]) < 1e-5, f"rank {rank}"


def compile_torchs_modules(ring, ulysses):
    mesh = make_mesh(ring, ulysses)
    outs = []
    with torch.no_grad():
        for kind, batch_first in MODULES:
            torch.compiler.reset()
            module = make_module(kind, batch_first)
            compiled = torch.compile(
                lambda x, m=module, kind=kind: call_module(m, kind, x), fullgraph=True, backend="eager"
            )
            x, dim = (tokens(7, width=12), 1) if batch_first else (tokens(7, width=12).transpose(0, 1), 0)
            with UnifiedAttnMode(mesh) as cp:
                outs.append(cp.gather(compiled(cp.shard(x, dim=dim)), dim=dim))
    return outs


@pytest.mark.long
def test_torchs_own_attention_modules_compile(rank_pool):
    expected = []
    with torch.no_grad():
        for kind, batch_first in MODULES:
            x = tokens(7, width=12)
            expected.append(call_module(make_module(kind, batch_first), kind, x if batch_first else x.transpose(0, 1)))
    for rank, outs in enumerate(rank_pool.run(compile_torchs_modules, 2, 2, 1)):
        for case, out, whole in zip(MODULES, outs, expected, strict=True):
            assert relative_error(out, whole) < 1e-5, f"{case}, rank {rank}"


def compile_alone():
    """Return the graph of aten operators that the compiler gets, without a mode and inside one."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def compile_model(graphs):
        def keep(graph, inputs):
            graphs.append(graph.code)
            return make_boxed_func(graph.forward)

        torch.compiler.reset()
        return torch.compile(make_transformer(), fullgraph=True, backend=aot_autograd(fw_compiler=keep))

    plain, inside = [], []
    with torch.no_grad():
        compile_model(plain)(tokens(7))
        compiled = compile_model(inside)
        with UnifiedAttnMode(make_mesh(1, 1)) as cp:
            cp.gather(compiled(cp.shard(tokens(7), dim=1)), dim=1)
    return plain, inside


def test_on_one_rank_the_graph_is_the_unmodified_models(rank_pool):
    plain, inside = rank_pool.run(compile_alone, 1)[0]
    assert len(plain) == 1
    assert "aten" in plain[0]
    assert inside == plain


def compile_with_nothing_to_intercept():
    mesh = make_mesh(1, 2)
    double = torch.compile(lambda x: x * 2, fullgraph=True, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with UnifiedAttnMode(mesh) as cp:
            double(cp.shard(tokens(4), dim=1))
    return [str(w.message) for w in caught]


def test_a_compiled_callee_without_attention_still_warns(rank_pool):
    for messages in rank_pool.run(compile_with_nothing_to_intercept, 2):
        assert any("intercepted no scaled_dot_product_attention" in message for message in messages)


def compile_functional_form_on_a_group(attention):
    counter = Counter()
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    parts = [x.chunk(2, dim=-2)[torch.distributed.get_rank()] for x in make_qkv(12, 4, seed=0)]
    with torch.no_grad():
        outs = [compiled(*parts, mesh=torch.distributed.group.WORLD) for _ in range(2)]
    return outs, len(counter.graphs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("attention", [ring_attention, ulysses_attention, unified_attention])
def test_functional_form_with_plain_group_is_one_graph(rank_pool, attention):
    expected = F.scaled_dot_product_attention(*make_qkv(12, 4, seed=0))
    for rank, (outs, graphs) in enumerate(rank_pool.run(compile_functional_form_on_a_group, 2, attention)):
        for out in outs:
            assert relative_error(out, expected.chunk(2, dim=-2)[rank]) < 1e-5
        assert graphs == 1


def test_inductor_on_one_mesh(rank_pool):
    check(rank_pool.run(compile_around, 2, 2, 1, [12, 12], backend="inductor", timeout=300), [12, 12])


def learn_through_checkpoints(ring, ulysses, inside):
    """Run a compiled training step whose backward recomputes attention, with the mode inside or outside the
    function.
    """
    from torch.utils.checkpoint import checkpoint

    mesh, counter = make_mesh(ring, ulysses), Counter()
    rank = mesh.get_rank()
    qkv = [x.tensor_split(ring * ulysses, dim=2)[rank].clone().requires_grad_() for x in make_qkv(16, 4)]
    mode = UnifiedAttnMode(mesh, assume_equal=True)

    def block(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v).sin()

    def run(q, k, v):
        return checkpoint(block, q, k, v, use_reentrant=False)

    def run_inside(q, k, v):
        with mode:
            return run(q, k, v)

    compiled = torch.compile(run_inside if inside else run, fullgraph=True, backend=counter)
    if inside:
        out = compiled(*qkv)
    else:
        with mode:
            out = compiled(*qkv)
    out.square().sum().backward()
    return out.detach(), [x.grad for x in qkv], len(counter.graphs)


@pytest.mark.parametrize(
    ("ring", "ulysses", "inside"),
    [
        (2, 1, True),
        (1, 2, False),
        *[
            pytest.param(*rest, marks=pytest.mark.long)
            for rest in [(2, 1, False), (1, 2, True), (2, 2, False), (2, 2, True)]
        ],
    ],
)
def test_activation_checkpointing_in_a_compiled_function_is_parallel(rank_pool, ring, ulysses, inside):
    qkv = [x.requires_grad_() for x in make_qkv(16, 4)]
    out = F.scaled_dot_product_attention(qkv[0] * 2, qkv[1], qkv[2]).sin()
    out.square().sum().backward()
    out, ranks = out.detach(), ring * ulysses
    for rank, (part, grads, graphs) in enumerate(
        rank_pool.run(learn_through_checkpoints, ranks, ring, ulysses, inside)
    ):
        assert graphs == 1
        assert relative_error(part, out.tensor_split(ranks, dim=2)[rank]) < 1e-5
        for grad, x in zip(grads, qkv, strict=True):
            assert relative_error(grad, x.grad.tensor_split(ranks, dim=2)[rank]) < 1e-5


def compile_a_nested_region():
    mode = UnifiedAttnMode(make_mesh(1, 2), assume_equal=True)
    region = torch.compiler.nested_compile_region(lambda x: F.scaled_dot_product_attention(x, x, x))
    with torch.no_grad(), mode:
        torch.compile(lambda x: region(x) + 1, fullgraph=True, backend="eager")(torch.randn(1, 2, 4, 8))


def test_a_nested_compile_region_is_refused_with_a_sentence(rank_pool):
    # Dynamo of torch 2.11 shows the line that raises, not its message.
    with pytest.raises(
        RankPoolError, match=r"RuntimeError: .*nested_compile_region|in intercept\n    raise RuntimeError"
    ):
        rank_pool.run(compile_a_nested_region, 2)


@pytest.mark.long
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (4, 1), (1, 4), (2, 2)])
def test_inductor_on_every_mesh(rank_pool, ring, ulysses):
    results = rank_pool.run(
        compile_around, ring * ulysses, ring, ulysses, [12, 12, 13], backend="inductor", timeout=600
    )
    check(results, [12, 12, 13])
