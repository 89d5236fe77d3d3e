"""A kernel and its plain PyTorch reference have the same signature, so that either can replace the other."""

import doctest
from importlib import import_module
from inspect import signature

import pytest
import torch

PAIRS = {
    "attention": ["attention"],
    "attention_int8": ["attention"],
    "merge": ["merge"],
    "pack": ["pack", "unpack"],
    "residual": ["change", "forecast"],
    "norm": ["moments", "normalized"],
}
# This argument is not part of the contract. Tests compare with it.
OF_THE_REFERENCE_ALONE = ("smooth",)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PAIRS.items() for name in names])
def test_kernel_has_the_signature_of_its_reference(module, name):
    kernel, reference = (
        signature(getattr(import_module(f"para_core.kernels.{module}{suffix}"), name), eval_str=True)
        for suffix in ("", "_reference")
    )
    shared = [parameter for parameter in reference.parameters.values() if parameter.name not in OF_THE_REFERENCE_ALONE]
    assert list(kernel.parameters.values()) == shared
    assert kernel.return_annotation == reference.return_annotation


DOCTESTS = ("attention_reference", "attention_int8_reference", "attention_configs", "attention_launch")


@pytest.mark.parametrize("name", [*DOCTESTS, "merge_reference", "residual_reference"])
def test_doctests_hold(name):
    # Use the import name: pytest would import kernels/ a second time under another name.
    result = doctest.testmod(import_module(f"para_core.kernels.{name}"), extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
