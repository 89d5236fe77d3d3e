"""The product of rows with a matrix: its error against float64, and the bits of a row among any other rows."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from para_core.kernels import product, product_reference
from tests.kernels.layouts import laid_out, normal

pytestmark = pytest.mark.slow

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# A size less than, equal to and more than a tile, and none at all.
SIZES = st.sampled_from([0, 1, 3, 16, 33, 70])


def bound_of(x, weight, bias):
    """Return the largest error of each element: one rounding of each addition in float32, and one of the result.

    An addition of n terms in any order rounds at most n times, each time by 2⁻²⁴ of a sum that is at most the sum of
    the absolute terms. Triton's interpreter truncates to 16 bits where a GPU rounds.
    """
    terms = x.shape[-1] + (bias is not None)
    absolute = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    info = torch.finfo(x.dtype)
    return absolute * (terms * 2.0**-24 + info.eps) + info.smallest_normal * info.eps


@pytest.mark.parametrize("tile", [product.TILE_INTERPRETED, product.ProductTile(16, 16, 16)], ids=["sum", "dot"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(data=st.data())
def test_kernel_and_reference_equal_float64(tile, dtype, data):
    rows, columns, inputs = (data.draw(SIZES) for _ in range(3))
    x, weight, bias = normal(2, rows, inputs), normal(columns, inputs, seed=1), normal(columns, seed=2)
    x, weight, bias = (data.draw(laid_out(y.to(dtype))) for y in (x, weight, bias))
    if data.draw(st.booleans()):
        bias = None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with mock.patch.object(product, "TILE_INTERPRETED", tile):
        outs = [module.product(x, weight, bias) for module in (product, product_reference)]
    for out in outs:
        assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, exact.shape, True)
        assert ((out.double() - exact).abs() <= bound_of(x, weight, bias)).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_row_has_the_same_bits_among_any_rows(dtype, data):
    total, columns = 75, 70
    inputs = data.draw(st.sampled_from([1, 32, 45, 100]))
    x, weight, bias = (normal(*shape, dtype=dtype) for shape in [(total, inputs), (columns, inputs), (columns,)])
    whole = product.product(x, weight, bias)
    chosen = data.draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=total))
    part = data.draw(laid_out(x[chosen]))
    assert torch.equal(product.product(part, weight, bias), whole[chosen])
    # The bits of an element do not depend on other columns, either.
    half = data.draw(st.integers(1, columns))
    assert torch.equal(product.product(part[None], weight[:half], bias[:half])[0], whole[chosen][:, :half])


@pytest.mark.parametrize(("rows", "inputs", "columns"), [(3, 9, 5), (0, 9, 5), (3, 0, 5), (3, 9, 0)])
def test_gradients_are_those_of_a_linear_layer(rows, inputs, columns):
    tensors = [normal(2, rows, inputs), normal(columns, inputs, seed=1), normal(columns, seed=2)]
    grad = normal(2, rows, columns, seed=3)
    gradients = []
    for function in (product.product, F.linear):
        inputs = [x.clone().requires_grad_() for x in tensors]
        # In the second product only x has a gradient.
        outs = [function(*inputs), function(inputs[0], tensors[1])]
        gradients.append(torch.autograd.grad(outs, inputs, [grad, grad]))
    torch.testing.assert_close(*gradients)


def test_rows_at_any_address_are_passed_at_a_multiple_of_16_bytes():
    x = normal(65)[1:].view(2, 32)
    rows, _ = product._in_blocks(x, normal(4, 32), 32)
    assert (x.data_ptr() % 16, rows.data_ptr() % 16) == (4, 0)


def test_operator_has_a_schema_a_shape_and_a_backward_in_graphs():
    x, weight, bias = normal(2, 3, 9), normal(5, 9).requires_grad_(), normal(5).requires_grad_()
    for arguments in ((x, weight, bias), (x.bfloat16(), weight.detach().bfloat16(), None)):
        torch.library.opcheck(torch.ops.para_core.product.default, arguments)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ((normal(2, 3), normal(4, 3).half()), TypeError, "float32, float16; .*float16, bfloat16 or float32"),
        ((normal(2, 3), normal(4, 3), normal(4).half()), TypeError, "float32, float32, float16"),
        ((normal(2, 3), normal(3, 4)), ValueError, r"\[2, 3\] and weight \[3, 4\]"),
        ((torch.tensor(1.0), normal(3, 1)), ValueError, r"x is \[\]"),
        ((normal(2, 3), normal(4, 3), normal(3)), ValueError, r"bias is \[3\] .*\[4\]"),
    ],
)
def test_what_is_no_product_is_refused(tensors, error, message):
    with pytest.raises(error, match=message):
        product.product(*tensors)
