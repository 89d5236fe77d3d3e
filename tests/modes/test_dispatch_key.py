"""The spare dispatch key is registered at its first use. Without it the function mode gives the same result."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from para_core.adapters import parallelize_transformer
from para_core.modes import interceptor
from para_core.torch_internals import SpareDispatchKey
from tests.tiny import cpu_mesh, flux_inputs, flux_transformer, relative_error
from tests.weights.test_pipefusion import by_hand, fused

# torch has several keys for tests. The package uses another one of them.
NAME = "TESTING_ONLY_GenericWrapper"
ADD = ("aten", "add.Tensor")
Q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))


def registered():
    key = torch._C._dispatch_key_parse(NAME)
    return torch._C._dispatch_has_backend_fallback(key), torch._C._dispatch_get_registrations_for_dispatch_key(NAME)


def constant(x, y, *, alpha=1):
    return torch.full_like(x, 7.0)


def test_key_lives_from_first_use_to_its_owner_end():
    key = SpareDispatchKey(NAME, {ADD: constant})
    assert registered() == (False, [])
    assert key.is_available()
    assert registered() == (True, ["aten::add.Tensor"])
    x = torch.ones(3)
    with key.included():
        assert torch.equal(x + x, torch.full((3,), 7.0))
        assert torch.equal(x * 2, torch.full((3,), 2.0))
        with key.excluded():
            assert torch.equal(x + x, torch.full((3,), 2.0))
    assert torch.equal(x + x, torch.full((3,), 2.0))
    del key
    assert registered() == (False, [])


def test_key_missing_in_torch_is_unavailable():
    key = SpareDispatchKey("NoSuchKey", {ADD: constant})
    assert not key.is_available()
    with key.excluded():
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))


@pytest.mark.parametrize("taken_by", ["fallback", "kernel"])
def test_foreign_key_is_unavailable_and_untouched(taken_by):
    library = torch.library.Library("_" if taken_by == "fallback" else "aten", "IMPL")
    if taken_by == "fallback":
        library.fallback(torch.library.fallthrough_kernel, NAME)
    else:
        library.impl("mul.Tensor", lambda x, y: x, NAME)
    before = registered()
    assert any(before)
    assert not SpareDispatchKey(NAME, {ADD: constant}).is_available()
    assert registered() == before


def test_a_registration_that_fails_leaves_nothing_registered():
    key = SpareDispatchKey(NAME, {ADD: constant, ("no namespace", "::"): constant})
    assert not key.is_available()
    assert registered() == (False, [])


def parallel_flux(has_key):
    key = interceptor._DISPATCH_KEY if has_key else SpareDispatchKey("NoSuchKey", {})
    model, inputs = flux_transformer(), flux_inputs(13, 5)
    # A mode that intercepts by torch function also sees other functions, which tells the two ways apart.
    with mock.patch.object(interceptor, "_DISPATCH_KEY", key), torch.no_grad():
        parallelize_transformer(model, mesh=cpu_mesh(1, 2))
        model(**inputs)  # The first call checks the model's attention, which needs a mode.
        with (
            mock.patch.object(interceptor, "intercept", wraps=interceptor.intercept),
            mock.patch("para_core.plans.interception.intercept", wraps=interceptor.intercept) as intercept,
        ):
            out = model(**inputs).sample
    return out, intercept.called


@pytest.mark.parametrize("has_key", [True, False])
def test_parallel_model_is_exact_without_the_key(rank_pool, has_key):
    with torch.no_grad():
        expected = flux_transformer()(**flux_inputs(13, 5)).sample
    for out, by_mode in rank_pool.run(parallel_flux, 2, has_key):
        assert relative_error(out, expected) < 1e-5
        assert by_mode != has_key


@pytest.mark.parametrize("has_key", [True, False])
def test_pipefusion_gives_the_same_patches_without_the_key(has_key):
    key = interceptor._DISPATCH_KEY if has_key else SpareDispatchKey("NoSuchKey", {})
    with mock.patch.object(interceptor, "_DISPATCH_KEY", key):
        assert relative_error(fused(3)[0], by_hand(3)) < 1e-5


def test_the_dispatcher_refuses_without_the_key():
    with (
        mock.patch.object(interceptor, "_DISPATCH_KEY", SpareDispatchKey("NoSuchKey", {})),
        pytest.raises(RuntimeError),
        interceptor.at_the_dispatcher(F.scaled_dot_product_attention),
    ):
        pass
