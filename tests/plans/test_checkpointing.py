"""Activation checkpointing under a plan gives the gradients of one device, whoever calls torch.utils.checkpoint."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from para_core.distributed.mesh import sequence_mesh
from para_core.plans.apply import apply_plan
from para_core.plans.plan import Attention, Gather, Plan, Split
from tests.attention.one_device import relative_error


class CrossAttention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads, self.query, self.key = heads, nn.Linear(width, width), nn.Linear(width, 2 * width)

    def forward(self, x, context):
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.key(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = CrossAttention(), CrossAttention()

    def forward(self, x, text):
        x = x + self.attn1(x, x).tanh()
        return x + self.attn2(x, text).sin()


class Model(nn.Module):
    """A video transformer in outline: image tokens attend to each other, and then to replicated text."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.gradient_checkpointing = way, way == "diffusers"
        self._gradient_checkpointing_func = lambda function, *args: checkpoint(function, *args, use_reentrant=False)
        self.blocks, self.last = nn.ModuleList([Block(), Block()]), nn.Linear(16, 16)

    def forward(self, image, text):
        for block in self.blocks:
            if self.way == "diffusers":
                image = self._gradient_checkpointing_func(block, image, text)
            elif self.way == "attention alone":
                image = image + checkpoint(block.attn1, image, image, use_reentrant=False).tanh()
                image = image + checkpoint(block.attn2, image, text, use_reentrant=True).sin()
            elif self.way == "nested":
                image = checkpoint(self.nested, block, image, text, use_reentrant=False)
            elif self.way == "none":
                image = block(image, text)
            else:
                image = checkpoint(block, image, text, use_reentrant=self.way == "reentrant")
        return self.last(image)

    def nested(self, block, image, text):
        """Call ``block`` with nested checkpoints. The input kept by the second inner one depends on the first."""
        image = image + checkpoint(block.attn1, image, image, use_reentrant=False).tanh()
        return image + checkpoint(block.attn2, image, text, use_reentrant=True).sin()


PLAN = Plan(
    inputs={"image": Split(dim=1, segment="image")},
    outputs={"last": Gather(dim=1, segment="image")},
    joint_order=("image",),
    attention={"blocks.*.attn2": (Attention(("image",), keys=("text",)),)},
)


def gradients(model, image_length=7):
    # The text is as long as a rank's part of the image, so only the plan can tell them apart.
    shapes = (image_length, 4)
    image, text = (torch.randn(2, S, 16, generator=torch.Generator().manual_seed(S)) for S in shapes)
    model(image.requires_grad_(), text).square().mean().backward()
    return [parameter.grad for parameter in (model.blocks[0].attn1.query.weight, model.blocks[0].attn2.key.weight)]


def learn(ring, ulysses, way):
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    model = Model(way)
    apply_plan(model, PLAN, sequence_mesh(mesh))
    grads = gradients(model)
    for grad in grads:
        dist.all_reduce(grad)
    return [grad / 2 for grad in grads]


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", ["reentrant", "not reentrant", "diffusers", "attention alone", "nested"])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_checkpointed_gradient_under_plan_equals_one_device(rank_pool, ring, ulysses, way):
    expected = gradients(Model("none"))
    for grads in rank_pool.run(learn, 2, ring, ulysses, way):
        for grad, whole in zip(grads, expected, strict=True):
            assert relative_error(grad, whole) < 1e-5
