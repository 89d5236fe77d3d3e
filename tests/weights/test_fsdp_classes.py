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


def sharded_model(layers=None, permits_copies=False):
    """Return a sharded model. With ``layers``, its container is sharded as one block, and has a plan if they are
    "wrapped".
    """
    mesh, model = init_device_mesh("cpu", (2,)), Model()
    wrapped = model.layers if layers else model
    shard_blocks(model, [model.layers] if layers else list(model.layers), mesh)
    if layers == "wrapped" or permits_copies:
        fill_slot(wrapped, Slot.PLAN, {"forward": lambda call, *args: call(*args)}, permits_copies=permits_copies)
    return model


def classes_of_sharded_modules():
    """Return the class names of a layer that the user sharded, before and after para_core shards its own; and the
    errors of copies.
    """
    own, mesh, errors, slices = [Layer(), Layer()], init_device_mesh("cpu", (2,)), [], []
    fully_shard(own[0], mesh=mesh)
    before = [names(own[0])]
    model = sharded_model()
    fully_shard(own[1], mesh=mesh)
    before.append(names(own[1]))
    ours = {names(layer) for layer in model.layers}, len({type(layer) for layer in model.layers})
    for copied in (model, sharded_model(permits_copies=True)):
        for way in (copy.copy, copy.deepcopy, pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            for module in (copied, copied.layers[0]):
                with pytest.raises(TypeError, match=r"state_dict\(\)") as caught:
                    way(module)
                errors.append(unwrapped_class(module).__name__ in str(caught.value))
    for layers in ("plain", "wrapped"):
        model = sharded_model(layers)
        part = model.layers[1:]
        slices.append((isinstance(model.layers, FSDPModule), isinstance(part, FSDPModule), len(part)))
        slices.append(unwrapped_class(part).__name__)
    return before, [names(layer) for layer in own], ours, errors, slices


def test_classes_of_sharded_modules_are_private(rank_pool):
    written = (Layer.__name__, Layer.__qualname__, Layer.__module__)
    for before, after, ours, errors, slices in rank_pool.run(classes_of_sharded_modules, 2):
        assert before == after
        assert before[0][0] == "FSDPLayer"
        # The layers have one class, so that they share one graph.
        assert ours == ({written}, 1)
        assert len(errors) == 16 and all(errors)
        # A slice of a sharded container is plain.
        assert slices == [(True, False, 2), "Sequential"] * 2


ORDERS_OF_COMPILING = [("parallelize", "shard", "compile"), ("shard", "parallelize", "compile"), ("shard", "compile")]


def compiled_blocks():
    """Return, for each order, whether each block is compiled."""
    compiled, mesh = [], init_context_parallel_mesh("cpu")
    for order in ORDERS_OF_COMPILING:
        pipe = make("flux")
        for step in order:
            if step == "parallelize":
                parallelize_pipe(pipe, mesh=mesh)
            elif step == "shard":
                shard_weights(pipe, mesh, components=["transformer"])
            else:
                pipe.transformer.compile_repeated_blocks(backend="eager")
        blocks = [*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks]
        compiled.append([block._compiled_call_impl is not None for block in blocks])
    return compiled


def test_compile_repeated_blocks_finds_sharded_blocks(rank_pool):
    for compiled in rank_pool.run(compiled_blocks, 2):
        assert all(len(blocks) >= 2 and all(blocks) for blocks in compiled), compiled


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
# FSDP2 keeps the classes that it makes, so an earlier model could change a later one.
ORDERS = [
    BEFORE,
    AFTER,
    ("parallelize", ("root",)),
    ("parallelize", ("blocks",)),
    (("blocks",), "parallelize", ("root",)),
    (*AFTER, "unparallelize"),
    BEFORE,
    (("blocks", "root"),),
    AFTER,
]


@pytest.mark.filterwarnings("ignore::para_core.ForeignCodeWarning")  # The hook of this test only counts tokens.
def test_own_fully_shard_is_parallel_and_exact_in_any_order(rank_pool):
    expected, all_tokens, _ = call_in_order(())
    for rank, of_models in enumerate(rank_pool.run(call_in_orders, 2, ORDERS)):
        for order, (out, tokens, classes) in zip(ORDERS, of_models, strict=True):
            is_parallel = "parallelize" in order and "unparallelize" not in order
            assert tokens == ({(23, 22)[rank]} if is_parallel else all_tokens), order
            assert relative_error(out, expected) < 1e-5, order
            sharded = any("blocks" in step for step in order if isinstance(step, tuple))
            assert classes == {(sharded, "WanTransformerBlock")}, order
