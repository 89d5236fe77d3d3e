"""``products="triton"``: which products the kernel computes, and the bytes of one process on several ranks."""

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import quantize_

from benchmarks.harness import fake_group
from para_core import triton_support
from para_core.adapters import parallelize_pipe, parallelize_transformer, unparallelize_pipe, unparallelize_transformer
from para_core.kernels.product import product
from para_core.products import TritonProducts
from tests.kernels.interpreted import interpreted
from tests.kernels.layouts import normal
from tests.tiny import cpu_mesh, flux_call, flux_pipe, flux_transformer

pytestmark = pytest.mark.slow

GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
X, MATRIX, WEIGHT, BIAS = normal(2, 7, 300), normal(300, 40, seed=1), normal(40, 300, seed=2), normal(40, seed=3)
# By name: the call of a model, and the same by the kernel.
MULTIPLIED = {
    "F.linear": (lambda: F.linear(X, WEIGHT, BIAS), lambda: product(X, WEIGHT, BIAS)),
    "F.linear of a vector": (lambda: F.linear(X[0, 0], WEIGHT), lambda: product(X[0, 0], WEIGHT)),
    "@": (lambda: X @ MATRIX, lambda: product(X, MATRIX.mT)),
    "matmul": (lambda: torch.matmul(X, other=MATRIX), lambda: product(X, MATRIX.mT)),
    "Tensor.matmul": (lambda: X.matmul(MATRIX), lambda: product(X, MATRIX.mT)),
    "mm": (lambda: torch.mm(X[0], MATRIX), lambda: product(X[0], MATRIX.mT)),
    "Tensor.mm": (lambda: X[1].mm(mat2=MATRIX), lambda: product(X[1], MATRIX.mT)),
    "addmm": (lambda: torch.addmm(BIAS, X[0], MATRIX), lambda: product(X[0], MATRIX.mT, BIAS)),
    "Tensor.addmm": (lambda: BIAS.addmm(X[0], MATRIX), lambda: product(X[0], MATRIX.mT, BIAS)),
}


@pytest.mark.parametrize(("call", "by_kernel"), MULTIPLIED.values(), ids=MULTIPLIED)
def test_kernel_computes_products_of_rows_with_a_matrix(call, by_kernel):
    with interpreted():
        with TritonProducts():
            out = call()
        expected = by_kernel()
    assert torch.equal(out, expected)
    # PyTorch adds up in another order.
    assert not torch.equal(call(), expected)


AS_EVER = {
    "bmm": lambda: X @ torch.stack([MATRIX, MATRIX]),
    "float64": lambda: F.linear(X.double(), WEIGHT.double()),
    "out": lambda: torch.mm(X[0], MATRIX, out=torch.empty(7, 40)),
    "factors": lambda: torch.addmm(BIAS, X[0], MATRIX, beta=2),
    "the deprecated order": lambda: torch.addmm(2, BIAS, X[0], MATRIX),
    "a matrix in place of a bias": lambda: torch.addmm(normal(7, 40), X[0], MATRIX),
    "convolution": lambda: F.conv1d(X.mT, WEIGHT[..., None]),
}


@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated")
@pytest.mark.parametrize("name", AS_EVER)
def test_other_products_are_computed_as_ever(name):
    with TritonProducts():  # Outside of the interpreter, the kernel would raise.
        out = AS_EVER[name]()
    assert torch.equal(out, AS_EVER[name]())


def test_invalid_products_raise_as_ever():
    for call in (lambda: F.linear(X, MATRIX), lambda: X @ WEIGHT, lambda: F.linear(X, WEIGHT.half()), F.linear):
        with pytest.raises((RuntimeError, TypeError)), TritonProducts():
            call()


def test_autocast_is_kept():
    with torch.autocast("cpu", torch.bfloat16), interpreted(), TritonProducts():
        out = F.linear(X, WEIGHT, BIAS)
    with interpreted():
        assert torch.equal(out, product(X.bfloat16(), WEIGHT.bfloat16(), BIAS.bfloat16()))


class Packed(Tensor):
    """A tensor that has a product of its own, like torchao's."""


def test_what_the_kernel_cannot_compute_is_refused():
    with TritonProducts():
        for multiply in (F.linear, torch.compile(lambda x, y: F.linear(x, y) + 1, backend="eager")):
            with pytest.raises(RuntimeError, match=r"CUDA device.*CPU.*TRITON_INTERPRET=1"):
                multiply(X, WEIGHT)
        with pytest.raises(TypeError, match=r"plain tensors.*Packed.*Leave products out"):
            F.linear(X, WEIGHT.as_subclass(Packed))
        with interpreted(), pytest.raises(RuntimeError, match="forward-mode AD"):
            torch.func.jvp(lambda x: F.linear(x, WEIGHT), (X,), (X,))


def test_pipeline_is_refused_before_it_changes():
    pipe = flux_pipe()
    absent = mock.patch.object(triton_support, "load_kernel", lambda *_: None)
    with absent, pytest.raises(ImportError, match="triton>="):
        parallelize_pipe(pipe, products="triton")
    for value in ("cublas", True):
        with pytest.raises(ValueError, match=re.escape(f"products is {value!r}; expected 'triton'")):
            parallelize_pipe(pipe, products=value)
    with fake_group(2), pytest.raises(ValueError, match=r'products="triton" with weights="tensor"'):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ulysses", "tensor"))
        parallelize_pipe(pipe, mesh=mesh, products="triton")
    with pytest.raises(ValueError, match=r'products="triton" with weights="tensor"'):
        parallelize_pipe(pipe, weights="tensor", products="triton")
    block = pipe.transformer.transformer_blocks[0]
    quantize_(block, int8_weight_only_quantized_training())
    for prepare in (id, fully_shard):
        with fake_group(2), pytest.raises(ValueError, match=r"pipe\.transformer\.transformer_blocks\.0\..*Int8Q"):
            prepare(block)
            parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), products="triton")
    with fake_group(2), pytest.raises(ValueError, match=r": transformer\.transformer_blocks\.0\..*Int8Q"):
        parallelize_transformer(pipe.transformer, mesh=cpu_mesh(1, 2), products="triton")


def test_graph_has_the_bits_of_eager_code():
    model = nn.Sequential(nn.Linear(300, 40), nn.GELU(), nn.Linear(40, 8)).eval()
    mode = TritonProducts()

    def run(x):
        with mode:
            return model(x) @ x.new_ones(8, 3)

    with interpreted(), torch.no_grad():
        expected = run(X)
        assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(X), expected)
        # A mode that is entered outside of the graph, as for blocks that are compiled one by one.
        block = torch.compile(model, backend="aot_eager", fullgraph=True)
        with mode:
            assert torch.equal(block(X) @ X.new_ones(8, 3), expected)


def flux(dtype):
    return flux_pipe(shared_parts=False, transformer=flux_transformer(num_layers=1, num_single_layers=1)).to(dtype)


def flux_on(mesh_sizes, dtype, call, options):
    pipe, mesh = flux(dtype), cpu_mesh(*mesh_sizes[1:], batch=mesh_sizes[0])
    parallelize_pipe(pipe, mesh=mesh, products="triton", **options)
    with interpreted():
        out = pipe(**flux_call(**call)).images
    unparallelize_pipe(pipe)
    # Without a pipeline, the plan of the transformer takes the option with it.
    parallelize_transformer(pipe.transformer, mesh=mesh, products="triton", **options)
    unparallelize_transformer(pipe.transformer)
    return out, pipe(**flux_call(**call)).images


@pytest.mark.parametrize(
    ("mesh", "dtype", "options"),
    [
        ((1, 1, 2), torch.bfloat16, {}),
        ((1, 1, 3), torch.float32, {"same_bits": True}),
        ((1, 2, 1), torch.bfloat16, {"same_bits": True}),
        ((2, 1, 1), torch.bfloat16, {"same_bits": True}),
    ],
)
def test_ranks_have_the_bytes_of_one_process_with_the_kernel(rank_pool, mesh, dtype, options):
    call = {"num_inference_steps": 1, **(GUIDED if mesh[0] > 1 else {})}
    pipe = flux(dtype)
    unmodified = pipe(**flux_call(**call)).images
    parallelize_pipe(pipe, products="triton")
    with interpreted():
        expected = pipe(**flux_call(**call)).images
    assert not torch.equal(expected, unmodified)
    for out, undone in rank_pool.run(flux_on, mesh[0] * mesh[1] * mesh[2], mesh, dtype, call, options):
        assert torch.equal(out, expected)
        assert torch.equal(undone, unmodified)
