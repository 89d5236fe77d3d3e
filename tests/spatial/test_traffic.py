"""Bytes that a decode sends, compared with a formula over the unmodified VAE's layers."""

import pytest
import torch
from torch import nn

from benchmarks.harness import PeakMemory, TrafficCounter
from para_core.adapters import parallelize_vae
from zoo.tiny.vaes import TINY_VAES, random_image

FLOAT = 4


@torch.no_grad()
def decode_and_count():
    tiny = TINY_VAES["KL"]
    vae = parallelize_vae(tiny.make())
    with TrafficCounter() as traffic:
        tiny.decode(vae, random_image((1, 4, 12, 5)))
    return traffic.collectives, traffic.bytes


@torch.no_grad()
def expected_of(rank, ranks):
    """Return the collectives and bytes of ``rank``: halos of convolutions, statistics, keys and values, and the
    image.
    """
    tiny = TINY_VAES["KL"]
    vae = tiny.make()
    collectives, sent = 0, 0
    neighbours = (rank > 0) + (rank < ranks - 1)

    def note(module, inputs, out):
        nonlocal collectives, sent
        x = inputs[0]
        if isinstance(module, nn.Conv2d) and module.kernel_size[0] == 3:
            collectives += 1
            sent += neighbours * x[:, :, :1].numel() * FLOAT
        elif isinstance(module, nn.GroupNorm):
            collectives += 1
            sent += (ranks - 1) * 2 * x.shape[0] * module.num_groups * FLOAT
        elif type(module).__name__ == "Attention":
            collectives += 1
            sent += (ranks - 1) * 2 * x.numel() // ranks * FLOAT

    for module in vae.modules():
        module.register_forward_hook(note)
    image = tiny.decode(vae, random_image((1, 4, 12, 5)))
    return collectives + 1, sent + (ranks - 1) * image.numel() // ranks * FLOAT


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_decode_sends_halos_statistics_keys_and_image(rank_pool, ranks):
    traffic = rank_pool.run(decode_and_count, ranks)
    assert traffic == [expected_of(rank, ranks) for rank in range(ranks)]


@torch.no_grad()
def most_memory(parallel):
    tiny = TINY_VAES["KL"]
    vae = tiny.make()
    if parallel:
        parallelize_vae(vae, gather="first")
    with PeakMemory() as memory:
        tiny.decode(vae, random_image((1, 4, 32, 16)))
    return memory.peak


def test_two_ranks_halve_activations(rank_pool):
    alone = most_memory(False)
    for rank, peak in enumerate(rank_pool.run(most_memory, 2, True)):
        # The first rank also gets the image, with 3 channels in addition to the 8 of the last layer.
        assert peak < (0.85 if rank == 0 else 0.65) * alone
