"""Attention backends and wire dtypes of a parallel pipeline, and resolve_backend in it, also on one rank."""

from unittest import mock

import pytest
import torch

from para_core.adapters import parallelize_pipe, parallelize_transformer, unparallelize_pipe
from para_core.attention import local
from para_core.kernels import attention
from tests.kernels.attention_cases import by_formula
from tests.kernels.interpreted import interpreted
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer, relative_error
from zoo.tiny.pipelines.unet import UNET_PIPELINES


class ByHand:
    """An ``attn_func`` that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, query, key, value, *, attn_mask, dropout_p, is_causal, scale):
        self.calls += 1
        out, lse = by_formula(query, key, value, scale=scale)
        return out.to(query.dtype), lse.float()


def named_backends(function):
    """Return the result of ``function``, and the backends with which local attention was called."""
    with mock.patch.object(local, "resolve_backend", wraps=local.resolve_backend) as resolve_backend:
        output = function()
    return output, {call.args[0] for call in resolve_backend.call_args_list}


def draw(pipe):
    return pipe(**flux_call()).images


def in_every_way(ring, ulysses):
    mesh = cpu_mesh(ring, ulysses)
    by_hand = ByHand()
    pipe = flux_pipe()
    outputs = {
        "math": named_backends(lambda: draw(parallelize_pipe(pipe, mesh=mesh, backend="math"))),
        "int8": draw(parallelize_pipe(pipe, mesh=mesh, comm_dtype=torch.int8)),
        "by hand": draw(parallelize_pipe(pipe, mesh=mesh, attn_func=by_hand)),
        "as it is": named_backends(lambda: draw(parallelize_pipe(pipe, mesh=mesh))),
    }
    return outputs, by_hand.calls


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_pipeline_uses_the_requested_backend(rank_pool, ring, ulysses):
    expected = draw(flux_pipe())
    for outputs, calls in rank_pool.run(in_every_way, 2, ring, ulysses):
        (by_math, named), (as_it_is, unnamed) = outputs["math"], outputs["as it is"]
        assert named == {"math"}
        assert unnamed <= {None}
        for out in (by_math, outputs["by hand"], as_it_is):
            assert relative_error(out, expected) < 1e-5
        assert 1e-5 < relative_error(outputs["int8"], expected) < 0.05
        assert calls > 0


def test_one_rank_uses_options_until_undone():
    expected = draw(flux_pipe())
    pipe, by_hand = flux_pipe(), ByHand()
    output, named = named_backends(lambda: draw(parallelize_pipe(pipe, backend="math")))
    assert named == {"math"}
    assert relative_error(output, expected) < 1e-5
    assert relative_error(draw(parallelize_pipe(pipe, attn_func=by_hand)), expected) < 1e-5
    assert by_hand.calls > 0
    calls = by_hand.calls
    assert torch.equal(draw(unparallelize_pipe(pipe)), expected)
    assert torch.equal(draw(parallelize_pipe(pipe, comm_dtype=torch.int8)), expected)
    assert by_hand.calls == calls


@pytest.mark.long
def test_a_pipeline_runs_on_the_triton_kernel():
    pipe = parallelize_pipe(flux_pipe(), backend="triton")
    with interpreted(), mock.patch.object(attention, "launch", wraps=attention.launch) as launch:
        assert relative_error(draw(pipe), draw(flux_pipe())) < 1e-5
    assert launch.call_count > 0
    with pytest.raises(RuntimeError, match=r"triton.* CUDA .*CPU"):
        draw(pipe)


def small_pipe():
    """Return a pipeline with one block of each kind, which halves compile time."""
    return flux_pipe(transformer=flux_transformer(num_layers=1, num_single_layers=1))


def compiled(ranks):
    pipe = parallelize_pipe(small_pipe(), mesh=cpu_mesh(1, ranks), backend="math", comm_dtype=torch.int8)
    pipe.transformer.compile(backend="aot_eager", fullgraph=True)
    return draw(pipe)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_in_one_graph_it_computes_the_same(rank_pool, ranks):
    expected = draw(small_pipe())
    for out in rank_pool.run(compiled, ranks, ranks):
        assert relative_error(out, expected) < (1e-5 if ranks == 1 else 0.05)


REFUSED = [
    ({"backend": "fast"}, "backend .*'fast'; .*flash, efficient, cudnn, math, triton, triton-int8"),
    ({"comm_dtype": torch.bfloat16}, r"comm_dtype .*torch\.bfloat16; .*torch\.int8 "),
    ({"comm_dtype": torch.int8, "rotate_method": "2d"}, r"rotate_method='2d' .*comm_dtype .*torch\.int8"),
    ({"backend": "math", "attn_func": ByHand()}, "backend='math' .*attn_func"),
    ({"cross_backend": "fast"}, r"cross_backend is 'fast'; .*flash3"),
    ({"cross_backend": "math", "attn_func": ByHand()}, "cross_backend='math' and attn_func"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_unknown_options_are_refused_at_once(options, message):
    pipe = flux_pipe()
    for function, target in ((parallelize_pipe, pipe), (parallelize_transformer, pipe.transformer)):
        with pytest.raises(ValueError, match=message):
            function(target, **options)
    assert torch.equal(draw(pipe), draw(flux_pipe()))


def test_libraries_that_are_missing_and_pipelines_without_a_transformer_are_refused():
    with pytest.raises(ImportError, match="flash_attn_interface"):
        parallelize_pipe(flux_pipe(), cross_backend="flash3")
    with pytest.raises(ValueError, match="backend='math': StableVideoDiffusionPipeline "):
        parallelize_pipe(UNET_PIPELINES["svd"].build(), backend="math")
