"""Activation checkpointing inside a mode gives the gradients of one device, whichever way it is called."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from para_core import UnifiedAttnMode
from tests.attention.one_device import relative_error

S = 7


def make_mesh(ring, ulysses):
    return init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))


class Block(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(out.transpose(1, 2).flatten(2).tanh())


def make_blocks():
    torch.manual_seed(0)
    return nn.ModuleList([Block(), Block()])


def make_input(length=S):
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length)).requires_grad_()


def gradient(lengths=(S,)):
    """Return the gradient of the first block's weight on one device."""
    blocks = make_blocks()
    for length in lengths:
        blocks[1](blocks[0](make_input(length))).square().mean().backward()
    return blocks[0].qkv.weight.grad


def of_all_ranks(parameter):
    """Return the gradient of a loss that every rank computes from the whole output."""
    dist.all_reduce(parameter.grad)
    return parameter.grad / dist.get_world_size()


# -- Ways to call it.


def call_unbound(cp, block, x, reentrant):
    return checkpoint(block, x, use_reentrant=reentrant)


def call_bound(cp, block, x, reentrant):
    return checkpoint(cp.bound(block), x, use_reentrant=reentrant)


def call_nested(cp, block, x, reentrant, outer=None):
    """Call ``block`` with nested checkpoints. The input kept by the second inner one depends on the first."""

    def run(x):
        y = checkpoint(block, x, use_reentrant=reentrant)
        return checkpoint(lambda y: y.exp().log(), y, use_reentrant=reentrant)

    # The forward of an outer checkpoint with use_reentrant=True has no gradients.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return checkpoint(run, x, use_reentrant=reentrant if outer is None else outer)


def call_nested_in_other_kind(cp, block, x, reentrant):
    return call_nested(cp, block, x, reentrant, outer=not reentrant)


def call_compiled(cp, block, x, reentrant):
    # Dynamo reads the gradient of the tensors that it traces.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return checkpoint(torch.compile(block, backend="aot_eager"), x, use_reentrant=reentrant)


def call_with_activations_on_cpu(cp, block, x, reentrant):
    """Call ``block`` with ``save_on_cpu`` inside and around a checkpoint. The checkpoint recomputes the tensors that
    ``log`` keeps.
    """

    def run(x):
        with save_on_cpu():
            y = block(x).exp()
        return y.log()

    with save_on_cpu():
        return checkpoint(run, x, use_reentrant=reentrant)


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as guided-diffusion implements it."""

    @staticmethod
    def forward(ctx, run_function, length, *tensors):
        ctx.run_function, ctx.inputs, ctx.parameters = run_function, tensors[:length], tensors[length:]
        with torch.no_grad():
            return ctx.run_function(*ctx.inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run_function(*inputs)
        return None, None, *torch.autograd.grad(out, [*inputs, *ctx.parameters], grad)


def call_in_own_function(cp, block, x, reentrant):
    return OwnCheckpoint.apply(block, 1, x, *block.parameters())


WAYS = (
    call_unbound,
    call_bound,
    call_nested,
    call_nested_in_other_kind,
    call_compiled,
    call_with_activations_on_cpu,
)
CALLS = list(itertools.product(WAYS, (True, False), (True, False)))
CALLS += [(call_in_own_function, True, True), (call_in_own_function, True, False)]


def learn(ring, ulysses):
    mesh, grads = make_mesh(ring, ulysses), []
    for call, reentrant, inside in CALLS:
        blocks = make_blocks()
        with UnifiedAttnMode(mesh) as cp:
            x = cp.shard(make_input(), dim=1)
            for block in blocks:
                x = call(cp, block, x, reentrant)
            loss = cp.gather(x, dim=1).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads.append(of_all_ranks(blocks[0].qkv.weight))
    return grads


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.long)])
def test_checkpointed_gradient_in_mode_equals_one_device(rank_pool, ring, ulysses):
    expected = gradient()
    for grads in rank_pool.run(learn, 2, ring, ulysses):
        for (call, reentrant, inside), grad in zip(CALLS, grads, strict=True):
            assert relative_error(grad, expected) < 1e-5, (call.__name__, reentrant, inside)


class Frozen(nn.Module):
    """A layer without gradients. A product keeps the values of its output."""

    def __init__(self):
        super().__init__()
        self.blocks, self.reentrant = make_blocks(), None

    def layer(self, x):
        with torch.no_grad():
            frozen = self.blocks[0](x)
        return self.blocks[1].out(x * frozen)

    def forward(self, x):
        return self.layer(x) if self.reentrant is None else checkpoint(self.layer, x, use_reentrant=self.reentrant)


def learn_behind_frozen():
    grads = []
    for reentrant in (True, False):
        model = Frozen()
        model.reentrant = reentrant
        with UnifiedAttnMode(make_mesh(2, 1)) as cp:
            loss = cp.gather(model(cp.shard(make_input(), dim=1)), dim=1).square().mean()
        loss.backward()
        grads.append(of_all_ranks(model.blocks[1].out.weight))
    return grads


def test_attention_without_gradient_is_recomputed_over_mesh(rank_pool):
    model = Frozen()
    model(make_input()).square().mean().backward()
    for grads in rank_pool.run(learn_behind_frozen, 2):
        for grad in grads:
            assert relative_error(grad, model.blocks[1].out.weight.grad) < 1e-5


# -- State of a mode.


def learn_in_other_orders():
    mesh, results = make_mesh(2, 1), {}
    for reentrant in (True, False):
        blocks = make_blocks()
        with UnifiedAttnMode(mesh) as cp:
            # In this expression the function is bound before the input is sharded.
            y = checkpoint(cp.bound(blocks[0]), cp.shard(make_input(), dim=1), use_reentrant=reentrant)
            loss = cp.gather(blocks[1](y), dim=1).square().mean()
        loss.backward()
        results["one expression", reentrant] = of_all_ranks(blocks[0].qkv.weight)

        blocks = make_blocks()
        losses = []
        for length in (S, S + 2):
            with UnifiedAttnMode(mesh) as cp:
                y = checkpoint(blocks[0], cp.shard(make_input(length), dim=1), use_reentrant=reentrant)
                losses.append(cp.gather(blocks[1](y), dim=1).square().mean())
        sum(losses).backward()
        results["two lengths", reentrant] = of_all_ranks(blocks[0].qkv.weight)

        blocks = make_blocks()
        mode = UnifiedAttnMode(mesh)
        with mode as cp:
            layout, other = cp.sequence(S), cp.sequence(S + 2)
            cp.shard(make_input(S + 2), dim=1)

            def block_with_layout(x, cp=cp, layout=layout, block=blocks[0]):
                with cp.using(layout):
                    return block(x)

            x = cp.shard(make_input(), dim=1)
            with cp.using(other):
                y = checkpoint(block_with_layout, x, use_reentrant=reentrant)
            with cp.using(layout):
                y = blocks[1](y)
            loss = cp.gather(y, dim=1, sequence=layout).square().mean()
        with mode:  # The next call of the model has begun.
            loss.backward()
        results["layout inside", reentrant] = of_all_ranks(blocks[0].qkv.weight)

        blocks = make_blocks()
        with UnifiedAttnMode(mesh) as cp:
            cp.intercepted = True
            with UnifiedAttnMode.disable():
                x = make_input()
                for block in blocks:
                    x = checkpoint(block, x, use_reentrant=reentrant)
        x.square().mean().backward()
        results["disabled", reentrant] = of_all_ranks(blocks[0].qkv.weight)
    return results


def test_recomputation_has_the_state_of_its_call(rank_pool):
    expected, of_two = gradient(), gradient((S, S + 2))
    for results in rank_pool.run(learn_in_other_orders, 2):
        for (name, reentrant), grad in results.items():
            assert relative_error(grad, of_two if name == "two lengths" else expected) < 1e-5, (name, reentrant)


# -- Hugging Face transformers.


def make_decoder():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=30, **sizes)).train()


def decoder_gradient(model, shard=lambda x: x, gather=lambda y: y):
    tokens = torch.randint(30, (2, S), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(S).expand(2, S)
    logits = gather(model(input_ids=shard(tokens), position_ids=shard(positions), use_cache=False).logits)
    logits.square().mean().backward()
    return model.model.layers[0].self_attn.q_proj.weight


def learn_with_transformers():
    grads = []
    for reentrant in (True, False):
        model = make_decoder()
        # transformers 5.20 introduced this name.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
        with UnifiedAttnMode(make_mesh(2, 1)) as cp:
            weight = decoder_gradient(model, lambda x, cp=cp: cp.shard(x, dim=1), lambda y, cp=cp: cp.gather(y, dim=1))
        grads.append(of_all_ranks(weight))
    return grads


def test_gradient_checkpointing_of_transformers_is_exact(rank_pool):
    expected = decoder_gradient(make_decoder()).grad
    for grads in rank_pool.run(learn_with_transformers, 2):
        for grad in grads:
            assert relative_error(grad, expected) < 1e-5
