"""Autoencoders on ranks inside compiled functions are captured in one graph, and are exact."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from para_core.adapters import parallelize_vae
from tests.attention.one_device import relative_error
from zoo.tiny.vaes import BY_TILES, TINY_VAES, random_image

# encode() of these autoencoders constructs a distribution.
NOT_ENCODED = ("TemporalDecoder", "Kandinsky6SR", "MiniMaxH3, sound")


def compiled(vae, way, backend="aot_eager", **options):
    counter = CompileCounterWithBackend(backend)
    setattr(vae, way, torch.compile(getattr(vae, way), backend=counter, fullgraph=True, **options))
    return counter


def errors_of(name, way, sizes, first, backend="aot_eager"):
    """Return the errors of two images of each size and of one in eager code afterwards, and the number of graphs."""
    tiny = TINY_VAES[name]
    torch._dynamo.reset()
    vae = tiny.make().requires_grad_(True)
    if not first:
        parallelize_vae(vae)
    counter = compiled(vae, way, backend)
    if first:
        parallelize_vae(vae)
    errors = []
    for size in sizes:
        for seed in (1, 2):
            x = random_image(size, seed=seed)
            with torch.no_grad():
                alone = getattr(tiny, way)(tiny.make(), x)
            errors.append(relative_error(getattr(tiny, way)(vae, x), alone))
    delattr(vae, way)
    # Tracing must leave nothing on the VAE.
    return [*errors, relative_error(getattr(tiny, way)(vae, x), alone)], counter.frame_count


# The VAE is compiled after or before it runs on ranks.
@pytest.mark.long
@pytest.mark.parametrize("first", [False, True])
def test_compiled_decode_is_one_exact_graph_per_size(rank_pool, first):
    sizes = [TINY_VAES["KL"].latents, (1, 4, 6, 9)][: 1 + first]
    for errors, graphs in rank_pool.run(errors_of, 2, "KL", "decode", sizes, first):
        assert max(errors) < 1e-5 and graphs == len(sizes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in TINY_VAES
        for way in ("decode", "encode")
        if name not in BY_TILES and not (way == "encode" and name in NOT_ENCODED)
    ],
)
def test_every_autoencoder_is_one_graph_on_ranks(rank_pool, name, way):
    shape = TINY_VAES[name].latents if way == "decode" else TINY_VAES[name].pixels
    for errors, graphs in rank_pool.run(errors_of, 2, name, way, [shape], False, timeout=900):
        assert max(errors) < 1e-5 and graphs == 1


@pytest.mark.long
@pytest.mark.parametrize("name", ["KL", "Tiny"])
def test_inductor_decodes_on_ranks_from_one_graph(rank_pool, name):
    sizes = [TINY_VAES[name].latents]
    for errors, graphs in rank_pool.run(errors_of, 2, name, "decode", sizes, False, "inductor", timeout=900):
        assert max(errors) < 1e-5 and graphs == 1


@torch.no_grad()
def compile_what_cannot_be(how):
    tiny = TINY_VAES["KL"]
    vae = tiny.make_tiled() if how == "tiles" else tiny.make()
    parallelize_vae(vae, method="tiled" if how == "method" else "exact")
    compiled(vae, "decode")
    tiny.decode(vae, random_image((1, 4, 3, 3) if how == "few rows" else tiny.latents))


@pytest.mark.long
@pytest.mark.parametrize(("how", "says"), [("method", "shapes of tiles"), ("tiles", ""), ("few rows", "")])
def test_uncompilable_decode_raises_on_every_rank(rank_pool, how, says):
    for error in rank_pool.run_expecting_errors(compile_what_cannot_be, 2, how):
        assert isinstance(error, torch._dynamo.exc.Unsupported) and says in str(error)


def encode_a_distribution():
    vae = parallelize_vae(TINY_VAES["TemporalDecoder"].make())
    compiled(vae, "encode")
    vae.encode(random_image(TINY_VAES["TemporalDecoder"].pixels))


@pytest.mark.long
def test_compiled_encode_of_a_distribution_raises(rank_pool):
    for error in rank_pool.run_expecting_errors(encode_a_distribution, 2):
        assert isinstance(error, torch._dynamo.exc.Unsupported)


@torch.no_grad()
def change_a_setting():
    tiny, x = TINY_VAES["KL"], random_image(TINY_VAES["KL"].latents)
    vae = parallelize_vae(tiny.make())
    counter, counts, errors = compiled(vae, "decode"), [], []
    for overlap in (0.25, 0.25, 0.5, 0.5):
        vae.tile_overlap_factor = overlap
        errors.append(relative_error(tiny.decode(vae, x), tiny.decode(tiny.make(), x)))
        counts.append(counter.frame_count)
    return max(errors), counts


@pytest.mark.long
def test_another_setting_of_tiling_is_another_graph(rank_pool):
    for error, (first, again, other, other_again) in rank_pool.run(change_a_setting, 2):
        assert error < 1e-5
        # Dynamo calls the backend twice for a float that has changed: with the float as an input, and as a constant.
        assert first == again < other == other_again
