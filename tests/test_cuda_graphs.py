"""Operators of para_core end a CUDA graph, so that Inductor cuts a compiled model there."""

from importlib import import_module

import pytest
import torch

from tests.lift_out import ROOT, module_files

pytestmark = pytest.mark.slow


def test_every_operator_ends_a_cuda_graph():
    for name, path in module_files(ROOT).items():
        source = (ROOT / path).read_text()
        if name.startswith("para_core.kernels.") or "LIBRARY" in source or "define_collective(" in source:
            import_module(name)
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("para_core::")]
    operators = [getattr(torch.ops.para_core, name.split("::")[1].partition(".")[0]).default for name in registered]
    names = {operator._schema.name.removeprefix("para_core::") for operator in operators}
    assert {"all_to_all", "all_gather", "attention", "pack", "merge_", "triton_attention", "residual_change"} <= names
    untagged = [str(operator) for operator in operators if torch.Tag.cudagraph_unsafe not in operator.tags]
    assert untagged == []
