"""A kernel and its plain PyTorch reference have the same signature, so that either can replace the other."""

from importlib import import_module
from inspect import Parameter, signature

import pytest

PAIRS = {
    "attention": ["attention"],
    "attention_int8": ["attention"],
    "merge": ["merge"],
    "pack": ["pack", "unpack"],
    "residual": ["change", "forecast"],
    "norm": ["moments", "normalized"],
}
# This argument is not part of the contract. Tests compare with it.
OF_THE_REFERENCE_ALONE = {"attention_int8": {"smooth"}}


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PAIRS.items() for name in names])
def test_a_kernel_has_the_signature_of_its_reference(module, name):
    kernel, reference = (
        signature(getattr(import_module(f"para_core.kernels.{module}{suffix}"), name), eval_str=True)
        for suffix in ("", "_reference")
    )
    alone = OF_THE_REFERENCE_ALONE.get(module, set())
    expected = [parameter for parameter in reference.parameters.values() if parameter.name not in alone]
    assert list(kernel.parameters.values()) == expected
    assert kernel.return_annotation == reference.return_annotation
    assert all(reference.parameters[parameter].default is not Parameter.empty for parameter in alone)
