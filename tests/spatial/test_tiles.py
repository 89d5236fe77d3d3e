"""diffusers' own tiling with distributed tiles gives the bits of one device."""

import pytest
import torch

from para_core.adapters import parallelize_vae
from para_core.adapters.vae.families import VAES
from zoo.tiny.vaes import NO_TILES_ENCODED, NOT_TILED, TINY_VAES, random_image

NAMES = [
    name
    for name, tiny in TINY_VAES.items()
    if VAES[tiny.cls].tiled and VAES[tiny.cls].distributes_tiles and name not in NOT_TILED
]


@torch.no_grad()
def both_ways(name, method):
    """Decode and encode. Return the results, and the number of decoder and encoder calls that this rank computed."""
    tiny, vae = TINY_VAES[name], TINY_VAES[name].make_tiled()
    if method is not None:
        parallelize_vae(vae, method=method)
    calls = []
    for part in (vae.decoder, vae.encoder):
        part.register_forward_hook(lambda *_: calls.append(1))
    outs = [tiny.decode(vae, random_image(tiny.latents))]
    if name not in NO_TILES_ENCODED:
        outs.append(tiny.encode(vae, random_image(tiny.pixels)))
    return outs, len(calls)


def require_equal(rank_pool, name, world_size, method):
    expected, all_calls = both_ways(name, None)
    reports = rank_pool.run(both_ways, world_size, name, method)
    for outs, _ in reports:
        assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))
    assert sum(calls for _, calls in reports) == all_calls


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["KL", "Wan 2.1", "CogVideoX", "Allegro"])
def test_tiles_on_two_ranks_are_bit_exact(rank_pool, name):
    require_equal(rank_pool, name, 2, "tiled")


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_tiles_of_every_autoencoder_are_bit_exact(rank_pool, name, world_size):
    require_equal(rank_pool, name, world_size, "tiled")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["KL", "HunyuanVideo"])
def test_an_exact_vae_that_tiles_by_itself_is_tiled(rank_pool, name):
    require_equal(rank_pool, name, 2, "exact")
