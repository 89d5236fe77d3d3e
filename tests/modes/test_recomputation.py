"""Activation checkpointing inside a mode gives the gradients of one device, whichever way it is called."""

import itertools
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from para_core import UnifiedAttnMode
from tests.attention.one_device import relative_error
from tests.modes.test_unified import Attention
from tests.tiny import cpu_mesh

S = 7


class Block(Attention):
    def forward(self, x):
        return x + super().forward(x).tanh()


def make_blocks():
    torch.manual_seed(0)
    return nn.ModuleList(Block(16, 2, is_causal=True) for _ in range(2))


def make_input(length=S):
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(length)).requires_grad_()


def gradient(*lengths):
    """Return the gradient of the first block's weight on one device."""
    blocks = make_blocks()
    for length in lengths:
        blocks[1](blocks[0](make_input(length))).square().mean().backward()
    return blocks[0].qkv.weight.grad


def of_all_ranks(parameter):
    """Return the gradient of a loss that every rank computes from the whole output."""
    dist.all_reduce(parameter.grad)
    return parameter.grad / dist.get_world_size()


def call_unbound(cp, block, x, reentrant):
    return checkpoint(block, x, use_reentrant=reentrant)


def call_bound(cp, block, x, reentrant):
    return checkpoint(cp.bound(block), x, use_reentrant=reentrant)


def call_compiled(cp, block, x, reentrant):
    # Dynamo reads the gradient of the tensors that it traces.
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return checkpoint(torch.compile(block, backend="aot_eager"), x, use_reentrant=reentrant)


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


CALLS = list(itertools.product((call_unbound, call_bound), (True, False), (True, False)))
CALLS += [(call_in_own_function, True, True), (call_in_own_function, True, False)]
CALLS += [(call_compiled, True, False), (call_compiled, False, True)]


def learn():
    mesh, grads = cpu_mesh(1, 2), []
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


def test_checkpointed_gradient_in_mode_equals_one_device(rank_pool):
    expected = gradient(S)
    for grads in rank_pool.run(learn, 2):
        for (call, reentrant, inside), grad in zip(CALLS, grads, strict=True):
            assert relative_error(grad, expected) < 1e-5, (call.__name__, reentrant, inside)


def loss_of_two_lengths(mesh, blocks, reentrant):
    losses = []
    for length in (S, S + 2):
        with UnifiedAttnMode(mesh) as cp:
            y = checkpoint(blocks[0], cp.shard(make_input(length), dim=1), use_reentrant=reentrant)
            losses.append(cp.gather(blocks[1](y), dim=1).square().mean())
    return sum(losses)


def learn_in_other_orders():
    mesh, grads = cpu_mesh(2, 1), []
    for reentrant in (True, False):
        blocks = make_blocks()
        loss = loss_of_two_lengths(mesh, blocks, reentrant)
        with UnifiedAttnMode(mesh) as cp:  # The next call of the model has begun.
            cp.intercepted = True
            loss.backward()
        grads.append(of_all_ranks(blocks[0].qkv.weight))
    return grads


def test_recomputation_has_the_state_of_its_call(rank_pool):
    expected = gradient(S, S + 2)
    for grads in rank_pool.run(learn_in_other_orders, 2):
        for grad in grads:
            assert relative_error(grad, expected) < 1e-5
