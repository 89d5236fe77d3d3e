"""Lookups of a plan at each call of its model, with replaced modules and with compiled ones."""

import pytest
import torch
from torch import nn

from benchmarks.harness import calls_in_python, fake_group
from para_core.adapters import parallelize_transformer
from para_core.distributed.agreed_inputs import assume_agreed
from para_core.instance.modules import ModuleTree
from para_core.plans.region import region_of
from tests.tiny import cpu_mesh, flux_inputs, flux_transformer, relative_error


def test_python_calls_do_not_grow_with_modules():
    with fake_group(2), torch.no_grad():
        transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2))

        def call():
            transformer(**flux_inputs(12, 4))

        counts = []
        with assume_agreed([region_of(transformer)]):
            call()  # This call checks the model's attention, through a mode.
            for _ in range(2):
                call()
                counts.append(calls_in_python(call))
                transformer.unused = nn.ModuleList([nn.Linear(1, 1) for _ in range(300)])
    assert counts[0] == counts[1]


def test_tree_sees_added_removed_and_replaced_modules():
    model = nn.Sequential(nn.Linear(1, 1), nn.ModuleDict())
    changes = [
        lambda: model[1].update({"a": nn.Linear(1, 1)}),
        lambda: model[1].update({"a": nn.Linear(1, 1)}),
        model[1].clear,
        lambda: setattr(model, "0", nn.Identity()),
    ]
    for change in changes:
        tree = ModuleTree(model)
        assert tree.is_unchanged()
        change()
        assert not tree.is_unchanged()


def test_a_tree_sees_modules_that_are_compiled_later():
    def in_place(model):
        model[1][0].compile(backend="eager")

    def forward(model):
        model[1][0].forward = torch.compile(model[1][0].forward, backend="eager")

    def as_a_module(model):
        model[1][0] = torch.compile(model[1][0], backend="eager")

    for compile_part in (in_place, forward, as_a_module):
        model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
        tree = ModuleTree(model)
        assert not tree.has_compiled_parts()
        compile_part(model)
        assert not tree.is_unchanged() or tree.has_compiled_parts()
        assert ModuleTree(model).has_compiled_parts()


def compile_a_block_between_calls():
    transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2))
    outs = []
    with torch.no_grad():
        for step in range(4):
            outs.append(transformer(**flux_inputs(13, 5), return_dict=False)[0])
            if step == 1:
                transformer.transformer_blocks[0].compile(backend="eager")
            if step == 2:
                transformer.transformer_blocks[1] = torch.compile(transformer.transformer_blocks[1], backend="eager")
    return outs


@pytest.mark.long
def test_blocks_compiled_between_calls_stay_exact(rank_pool):
    with torch.no_grad():
        expected = flux_transformer()(**flux_inputs(13, 5), return_dict=False)[0]
    for outs in rank_pool.run(compile_a_block_between_calls, 2):
        assert max(relative_error(out, expected) for out in outs) < 1e-5
