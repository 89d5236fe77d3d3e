"""A cache that is removed leaves nothing on the pipeline, whatever was compiled, and does not keep the model alive."""

import gc
import weakref
from itertools import product

import pytest
import torch
from torch import nn

from para_core import BlockGroup, CachedBlocks, UnifiedAttnMode, apply_cache, remove_cache
from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, remove_cache_from_pipe, unparallelize_pipe
from tests.adapters.test_pipelines import build, generate
from tests.tiny import cpu_mesh

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*cache ")]


def state_of(pipe):
    """Return the classes, attributes, hooks and parameters of all modules, without those that torch.compile adds."""
    state = {}
    for name, component in pipe.components.items():
        for at, module in component.named_modules() if isinstance(component, nn.Module) else ():
            own = {key for key, value in vars(module).items() if value is not None}
            hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
            state[name, at] = (id(type(module)), own - {"_compiled_call_impl", "_is_torch_compile"}, hooks)
    return state


def removals():
    """Yield models, ways of compiling and orders. The default run has each of these values once."""
    short = [("wan", "in place", True), ("wan", "in its place", False), ("stable diffusion 3", "eager", False)]
    for case in product(
        ["wan", "qwen-image", "stable diffusion 3"], ["in place", "in its place", "eager"], [False, True]
    ):
        yield pytest.param(*case, marks=() if case in short else pytest.mark.long)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "way", "parallel_first"), [*removals()])
def test_removal_leaves_no_attribute_on_compiled_pipe(name, way, parallel_first):
    torch._dynamo.reset()
    pipe = build(name)
    plain, expected = pipe.transformer, generate(pipe, name)
    before = state_of(pipe)  # diffusers leaves its own registry after a call.
    applied = [lambda: apply_cache_on_pipe(pipe, residual_diff_threshold=1e9), lambda: parallelize_pipe(pipe)]
    for apply in reversed(applied) if parallel_first else applied:
        apply()
    if way == "in place":
        pipe.transformer.compile(backend="eager", fullgraph=True)
    elif way == "in its place":
        pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    generate(pipe, name)
    remove_cache_from_pipe(pipe)
    unparallelize_pipe(pipe)
    pipe.transformer = plain
    plain._compiled_call_impl = None
    for path, state in state_of(pipe).items():
        assert state == before[path], (path, state[1] ^ before[path][1])
    assert torch.equal(generate(pipe, name), expected)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states):
        return hidden_states + self.linear(hidden_states)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


BLOCKS = CachedBlocks((BlockGroup(("blocks",)),))


def test_model_with_removed_cache_is_collected():
    torch._dynamo.reset()
    model = apply_cache(Stack(), BLOCKS, residual_diff_threshold=0.1)
    model.compile(backend="eager", fullgraph=True)
    with torch.no_grad():
        model(torch.ones(1, 5, 4))
    remove_cache(model)
    alive = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None


def shard_at_the_first_block():
    mesh = cpu_mesh(1, 2)
    model = apply_cache(Stack(), BLOCKS, residual_diff_threshold=0.1, mesh=mesh)
    with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
        model.blocks[0].register_forward_pre_hook(lambda _, args: (cp.shard(args[0], dim=1),))
        # This model has no attention, so the warning about calls that were not intercepted is switched off.
        cp.intercepted = True
        with pytest.raises(ValueError, match=r"\(1, 7, 4\).*sharded.*hook") as error:
            model(torch.ones(1, 7, 4))
    return str(error.value)


def test_sharding_hook_at_first_block_is_named(rank_pool):
    for message in rank_pool.run(shard_at_the_first_block, 2):
        assert "streams=" not in message
