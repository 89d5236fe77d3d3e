"""A LoRA of the tiny FLUX learns the same on several ranks as on one device."""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch.nn import functional as F

from para_core.adapters import parallelize_transformer
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, flux_inputs, flux_transformer

STEPS = 20


def learn(mesh_shape, checkpointing=False):
    """Return the loss of each step."""
    transformer = flux_transformer().requires_grad_(False).train()
    torch.manual_seed(3)
    transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "add_k_proj"]))
    weights = [weight for weight in transformer.parameters() if weight.requires_grad]
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    if mesh_shape is not None:
        parallelize_transformer(transformer, mesh=cpu_mesh(*mesh_shape))
    inputs = flux_inputs(29, 13)
    target = torch.randn(inputs["hidden_states"].shape, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    losses = []
    for _ in range(STEPS):
        heartbeat()
        # Every rank computes the loss of the whole output, so the gradients are averaged, as DistributedDataParallel
        # does.
        loss = F.mse_loss(transformer(**inputs, return_dict=False)[0], target)
        loss.backward()
        if mesh_shape is not None:
            for weight in weights:
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def losses_alone():
    losses = learn(None)
    assert losses[-1] < 0.5 * losses[0]
    return torch.tensor(losses)


@pytest.mark.parametrize(
    ("mesh_shape", "checkpointing"),
    [
        pytest.param((2, 1), False, id="ring", marks=pytest.mark.long),
        pytest.param((1, 2), True, id="ulysses, activation checkpointing"),
        pytest.param((1, 2), False, id="ulysses", marks=pytest.mark.long),
        pytest.param((2, 1), True, id="ring, activation checkpointing", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_the_loss_curve_is_that_of_one_rank(rank_pool, losses_alone, mesh_shape, checkpointing):
    for losses in rank_pool.run(learn, 2, mesh_shape, checkpointing):
        assert ((torch.tensor(losses) - losses_alone).abs() / losses_alone).max() < 1e-4
