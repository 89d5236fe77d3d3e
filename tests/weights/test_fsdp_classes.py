"""Sharding by FSDP2 changes the classes of the sharded instances, and no class of torch or of the user."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from para_core import init_context_parallel_mesh
from para_core.adapters import (
    parallelize_pipe,
    parallelize_transformer,
    shard_weights,
    unparallelize_transformer,
)
from para_core.instance.private_class import unwrapped_class
from para_core.instance.record import fill_slot
from para_core.instance.slots import Slot
from para_core.weights.fsdp import shard_blocks
from tests.tiny import cpu_mesh, relative_error
from tests.weights.pipes import make
from zoo.tiny.transformers.registry import MODELS


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.linear(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


def names(module):
    cls = type(module)
    return cls.__name__, cls.__qualname__, cls.__module__


def names_of_own_classes(own_first):
    """Return the class names of a layer that the user sharded, before and after para_core shards its own layers, and
    those of the latter.
    """
    mesh, model, own = init_device_mesh("cpu", (2,)), Model(), Layer()
    if own_first:
        fully_shard(own, mesh=mesh)
        before = names(own)
    shard_blocks(model, list(model.layers), mesh)
    if not own_first:
        fully_shard(own, mesh=mesh)
        before = names(own)
    ours = {names(layer) for layer in model.layers}
    return before, names(own), ours, len({type(layer) for layer in model.layers})


@pytest.mark.parametrize("own_first", [True, False])
def test_sharding_renames_no_class_of_the_users_own_fsdp(rank_pool, own_first):
    written = (Layer.__name__, Layer.__qualname__, Layer.__module__)
    for before, after, ours, shared in rank_pool.run(names_of_own_classes, 2, own_first):
        assert before == after
        assert before[0] == "FSDPLayer"
        assert ours == {written}
        assert shared == 1  # The layers have one class, so that they share one graph.


def refused_copies(wrapped):
    """Return the errors of copying and pickling sharded modules."""
    mesh, model = init_device_mesh("cpu", (2,)), Model()
    if wrapped:
        fill_slot(model, Slot.PLAN, {"forward": lambda call, *args: call(*args)}, permits_copies=True)
    shard_blocks(model, list(model.layers), mesh)
    errors = []
    for way in (copy.copy, copy.deepcopy, pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
        for module in (model, model.layers[0]):
            with pytest.raises(TypeError) as caught:
                way(module)
            errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("wrapped", [False, True])
def test_sharded_module_refuses_copies(rank_pool, wrapped):
    for errors in rank_pool.run(refused_copies, 2, wrapped):
        for index, error in enumerate(errors):
            assert ("Layer" if index % 2 else "Model") in error
            assert "state_dict()" in error


def slice_of_sharded_layers(wrapped):
    mesh, model = init_device_mesh("cpu", (2,)), Model()
    shard_blocks(model, [model.layers], mesh)
    if wrapped:
        fill_slot(model.layers, Slot.PLAN, {"forward": lambda call, *args: call(*args)})
    part = model.layers[1:]
    return isinstance(model.layers, FSDPModule), isinstance(part, FSDPModule), unwrapped_class(part).__name__, len(part)


@pytest.mark.parametrize("wrapped", [False, True])
def test_slice_of_sharded_container_is_plain(rank_pool, wrapped):
    for result in rank_pool.run(slice_of_sharded_layers, 2, wrapped):
        assert result == (True, False, "Sequential", 2)


def compiled_blocks(order):
    """Return how many blocks ``compile_repeated_blocks`` compiles, and how many the transformer has."""
    pipe = make("flux")
    mesh = init_context_parallel_mesh("cpu")
    for step in order:
        if step == "parallelize":
            parallelize_pipe(pipe, mesh=mesh)
        elif step == "shard":
            shard_weights(pipe, mesh, components=["transformer"])
        else:
            pipe.transformer.compile_repeated_blocks(backend="eager")
    blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
    return [block._compiled_call_impl is not None for block in blocks]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "order",
    [
        ("parallelize", "shard", "compile"),
        ("shard", "parallelize", "compile"),
        ("shard", "compile"),
    ],
)
def test_compile_repeated_blocks_finds_sharded_blocks(rank_pool, order):
    for compiled in rank_pool.run(compiled_blocks, 2, order):
        assert all(compiled)
        assert len(compiled) >= 2


# -- The user's own fully_shard, before and after parallelize_transformer.


SIZE = (3, 6, 10)  # Two ranks shard 45 tokens.


def shard_own(transformer, parts):
    for block in transformer.blocks if "blocks" in parts else ():
        fully_shard(block)
    if "root" in parts:
        fully_shard(transformer)


def call_in_order(order):
    """Run a transformer after ``order``. Return its output, the number of tokens that its blocks saw, and their
    classes.
    """
    transformer = MODELS["wan"].build()
    for step in order:
        if step == "parallelize":
            parallelize_transformer(transformer, mesh=cpu_mesh(1, 2))
        elif step == "unparallelize":
            unparallelize_transformer(transformer)
        else:
            shard_own(transformer, step)
    tokens = set()
    for block in transformer.blocks:
        block.attn1.to_q.register_forward_pre_hook(lambda module, args: tokens.add(args[0].shape[1]))
    with torch.no_grad():
        out = transformer(**MODELS["wan"].inputs(*SIZE), return_dict=False)[0].clone()
    classes = {(isinstance(block, FSDPModule), unwrapped_class(block).__name__) for block in transformer.blocks}
    return out, tokens, classes


def call_in_orders(orders):
    return [call_in_order(order) for order in orders]


BEFORE, AFTER = (("blocks", "root"), "parallelize"), ("parallelize", ("blocks", "root"))
ORDERS = {
    "before": [BEFORE],
    "after": [AFTER],
    "root after": [("parallelize", ("root",))],
    "blocks after": [("parallelize", ("blocks",))],
    "blocks before, root after": [(("blocks",), "parallelize", ("root",))],
    "after, undone": [(*AFTER, "unparallelize")],
    # FSDP2 keeps the classes that it makes, so an earlier model could change a later one.
    "after, then before": [AFTER, BEFORE, (("blocks", "root"),), AFTER],
    "before, then after": [BEFORE, AFTER, (("blocks", "root"),)],
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hook of this test only counts tokens.
def test_own_fully_shard_is_parallel_and_exact_in_any_order(rank_pool, name):
    expected, all_tokens, _ = call_in_order(())
    outs = rank_pool.run(call_in_orders, 2, ORDERS[name])
    for rank, of_models in enumerate(outs):
        for order, (out, tokens, classes) in zip(ORDERS[name], of_models, strict=True):
            is_parallel = "parallelize" in order and "unparallelize" not in order
            assert tokens == ({(23, 22)[rank]} if is_parallel else all_tokens)
            assert relative_error(out, expected) < 1e-5
            sharded = any("blocks" in step for step in order if isinstance(step, tuple))
            assert classes == {(sharded, "WanTransformerBlock")}
