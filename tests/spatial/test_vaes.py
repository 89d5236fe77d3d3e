"""Autoencoders of diffusers on ranks, compared with the unmodified ones on one device."""

import re
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading
from diffusers.models import autoencoders
from torch.utils._python_dispatch import TorchDispatchMode

from para_core.adapters import parallelize_vae, unparallelize_vae
from para_core.adapters.vae import vae as vae_module
from para_core.adapters.vae.families import REFUSED_VAES, VAES, rows_per_latent
from tests.attention.one_device import relative_error
from zoo.tiny.vaes import BY_TILES, TINY_VAES, random_image

NAMES = list(TINY_VAES)
# tests/spatial/test_tiles.py tests the autoencoders that run by tiles only.
ROWS = [name for name in NAMES if name not in BY_TILES]


@torch.no_grad()
def both_ways(names, wide, parallel, **options):
    """Decode and encode with each autoencoder. Return ``{(name, "decode"): tensor}``."""
    outs = {}
    for name in names:
        tiny = TINY_VAES[name]
        vae = tiny.make()
        if parallel:
            parallelize_vae(vae, **options)
        wide_here = wide and len(tiny.latents) > 3
        outs[name, "decode"] = tiny.decode(vae, random_image(tiny.latents, wide=wide_here))
        outs[name, "encode"] = tiny.encode(vae, random_image(tiny.pixels, wide=wide_here))
    return outs


@cache
def expected(name, wide):
    return both_ways([name], wide, parallel=False)


def require_equal(rank_pool, world_size, names, wide, tolerance=1e-5):
    for outs in rank_pool.run(both_ways, world_size, names, wide, parallel=True):
        errors = {
            key: relative_error(outs[key], reference)
            for name in names
            for key, reference in expected(name, wide).items()
        }
        assert not {key: error for key, error in errors.items() if error > tolerance}


class LargestTensor(TorchDispatchMode):
    """A recorder of the bytes of the largest tensor whose last dim has ``tokens`` elements, such as an attention
    mask.
    """

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.bytes = tokens, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim > 1 and out.shape[-1] == self.tokens:
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


@torch.no_grad()
def largest_mask(name, parallel):
    vae = TINY_VAES[name].make()
    if parallel:
        parallelize_vae(vae)
    latents = torch.randn(1, vae.config.latent_channels, 3, 12, 10)
    with LargestTensor(latents[0, 0].numel()) as largest:
        vae.decode(latents)
    return largest.bytes


# As docs/vae.md says, the mask of HunyuanVideo has the rows of this rank, and that of HunyuanVideo 1.5 has all rows.
@pytest.mark.parametrize(("name", "share"), [("HunyuanVideo", 0.5), ("HunyuanVideo15", 1.0)])
def test_causal_masks_have_the_documented_rows(rank_pool, name, share):
    alone = largest_mask(name, parallel=False)
    assert alone == 360 * 360 * 4
    assert rank_pool.run(largest_mask, 2, name, True) == [share * alone] * 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ROWS)
def test_decoding_and_encoding_on_two_ranks_equal_one_device(rank_pool, name):
    require_equal(rank_pool, 2, [name], wide=False)


@pytest.mark.long
def test_wide_images_on_three_ranks_equal_one_device(rank_pool):
    require_equal(rank_pool, 3, ["KL", "DC", "Wan 2.1", "HunyuanVideo", "CogVideoX"], wide=True)


@pytest.mark.long
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", ROWS)
def test_every_autoencoder_equals_one_device(rank_pool, name, world_size, wide):
    require_equal(rank_pool, world_size, [name], wide)


@torch.no_grad()
def decode_few(height, gather):
    tiny = TINY_VAES["KL"]
    vae = parallelize_vae(tiny.make(), gather=gather)
    x = random_image((1, 4, height, 3))
    image = tiny.decode(vae, x)
    return image, tiny.encode(vae, image) if gather == "all" else None


@pytest.mark.sample(3)
@pytest.mark.parametrize("gather", ["all", "first"])
@pytest.mark.parametrize("height", [7, 5, 3])  # These heights give rows to three ranks, to two, and to one.
def test_few_rows_use_fewer_ranks(rank_pool, height, gather):
    tiny, vae = TINY_VAES["KL"], TINY_VAES["KL"].make()
    image = tiny.decode(vae, random_image((1, 4, height, 3)))
    latents = tiny.encode(vae, image)
    for rank, (decoded, encoded) in enumerate(rank_pool.run(decode_few, 3, height, gather)):
        if gather == "all":
            assert relative_error(decoded, image) < 1e-5
            assert relative_error(encoded, latents) < 1e-5
        elif rank == 0:
            assert relative_error(decoded, image) < 1e-5
        else:
            assert decoded.shape == image.shape and not decoded.any()


@torch.no_grad()
def decode_more_and_more():
    """Return the errors of latents with enough rows for one, two, three and four ranks."""
    tiny, errors = TINY_VAES["KL"], {}
    vae, alone = parallelize_vae(tiny.make()), tiny.make()
    for height in (2, 5, 7, 9):
        x = random_image((1, 4, height, 3))
        errors[height] = relative_error(tiny.decode(vae, x), tiny.decode(alone, x))
    return errors


def test_formerly_idle_ranks_join_later_calls(rank_pool):
    for errors in rank_pool.run(decode_more_and_more, 4, timeout=60):
        assert max(errors.values()) < 1e-5


@torch.no_grad()
def decode_few_wrongly(how):
    vae = parallelize_vae(TINY_VAES["KL"].make())
    vae.decoder.conv_in.forward = {"mixes": lambda x: x.roll(1, -2), "lacks": lambda x: {}["a key"]}[how]
    TINY_VAES["KL"].decode(vae, random_image((1, 4, 5, 3)))


@pytest.mark.parametrize(
    ("how", "says"),
    [("mixes", "roll .*dim 2 .*2 ranks"), ("lacks", "KeyError: 'a key'")],
)
def test_error_of_working_ranks_is_raised_on_all(rank_pool, how, says):
    for error in rank_pool.run_expecting_errors(decode_few_wrongly, 3, how, timeout=60):
        assert isinstance(error, RuntimeError) and re.search(says, str(error))


@torch.no_grad()
def raise_on_one_rank():
    vae = parallelize_vae(TINY_VAES["KL"].make(), mesh=dist.new_group(timeout=timedelta(seconds=3)))
    if dist.get_rank() == 1:
        vae.decoder.up_blocks[0].forward = lambda *_: {}["a key"]
    TINY_VAES["KL"].decode(vae, random_image(TINY_VAES["KL"].latents))


@pytest.mark.long
def test_exception_on_one_rank_is_named_by_waiting_ones(rank_pool):
    waited, raised = rank_pool.run_expecting_errors(raise_on_one_rank, 2, timeout=90)
    assert isinstance(raised, KeyError)
    assert isinstance(waited, RuntimeError) and "rank 1 raised KeyError: 'a key'" in str(waited)


@torch.no_grad()
def settings_of_a_vae(name):
    tiny = TINY_VAES[name]
    vae = tiny.make()
    batch = random_image((3, *tiny.latents[1:]))
    plain = tiny.decode(vae, batch[:1])
    errors = {}
    vae.enable_slicing()
    parallelize_vae(vae)
    errors["slicing set before"] = relative_error(
        tiny.decode(vae, batch), torch.cat([plain, tiny.decode(tiny.make(), batch[1:])])
    )
    vae.disable_slicing()
    errors["slicing taken back"] = relative_error(tiny.decode(vae, batch[:1]), plain)
    half = tiny.make().bfloat16()
    in_16_bits = tiny.decode(half, batch[:1].bfloat16())
    parallelize_vae(half)
    errors["16 bits"] = relative_error(tiny.decode(half, batch[:1].bfloat16()).float(), plain)
    errors["16 bits alone"] = relative_error(in_16_bits.float(), plain)
    return errors


def test_slicing_toggles_and_16_bits_stay_exact(rank_pool):
    for errors in rank_pool.run(settings_of_a_vae, 2, "KL"):
        assert errors["16 bits"] < 1.2 * errors["16 bits alone"]
        assert max(errors["slicing set before"], errors["slicing taken back"]) < 1e-5


@torch.no_grad()
def on_and_off():
    tiny = TINY_VAES["Wan 2.1"]
    vae, other = tiny.make(), tiny.make()
    x = random_image(tiny.latents)
    before = vars(vae).keys(), type(vae), type(vae.decoder)
    plain = tiny.decode(vae, x)
    parallelize_vae(vae)
    parallelize_vae(vae, method="tiled")
    assert type(other) is before[1] and type(vae) is not before[1]
    parallelize_vae(vae)
    sharded = tiny.decode(vae, x)
    assert not any(hasattr(value, "_para_core_rows") for value in (x, sharded, *vae.parameters()))
    assert unparallelize_vae(vae) is vae
    assert (vars(vae).keys(), type(vae), type(vae.decoder)) == before and type(vae.decoder) is before[2]
    return relative_error(sharded, plain), torch.equal(tiny.decode(vae, x), plain)


def test_undoing_restores_one_instance_only(rank_pool):
    for error, same in rank_pool.run(on_and_off, 2):
        assert 0 < error < 1e-5 and same


@torch.no_grad()
def on_some_ranks():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    return both_ways(["KL"], False, parallel=True, mesh=group)


def test_group_without_rank_0_runs(rank_pool):
    for outs in rank_pool.run(on_some_ranks, 3)[1:]:
        for key, reference in expected("KL", False).items():
            assert relative_error(outs[key], reference) < 1e-5


@torch.no_grad()
def over_all_dims_of_a_mesh():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batch", "ulysses"))
    return both_ways(["KL"], False, parallel=True, mesh=mesh)


def test_all_mesh_ranks_share_the_rows(rank_pool):
    for outs in rank_pool.run(over_all_dims_of_a_mesh, 4):
        for key, reference in expected("KL", False).items():
            assert relative_error(outs[key], reference) < 1e-5


def decode_differently(how):
    tiny = TINY_VAES["KL"]
    vae = parallelize_vae(tiny.make())
    x = random_image(tiny.latents, seed=dist.get_rank() if how == "latents" else 0)
    if how == "settings" and dist.get_rank() == 1:
        vae.enable_tiling()
    if how == "gradient":
        x.requires_grad_()
    if how == "compiled":
        vae.decoder.compile(backend="eager")
    if how == "no tensor":
        vae.decode(None if dist.get_rank() == 1 else x)
    if how == "no argument":
        vae.decode(*([] if dist.get_rank() == 1 else [x]))
    tiny.decode(vae, x)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no tensor", "AutoencoderKL .*NoneType"),
        ("no argument", "AutoencoderKL .*NoneType"),
        ("latents", "AutoencoderKL .*sample"),
        ("settings", "AutoencoderKL .*tiling"),
        ("gradient", "gradient"),
        ("compiled", r"vae\.decode = torch\.compile\(vae\.decode\)"),
    ],
)
def test_inexact_changes_raise_on_every_rank(rank_pool, how, message):
    for error in rank_pool.run_expecting_errors(decode_differently, 2, how):
        assert isinstance(error, (TypeError, ValueError, RuntimeError)) and re.search(message, str(error))


def test_unknown_autoencoders_and_words_are_errors_that_name_them():
    with pytest.raises(TypeError, match=r"^Linear "):
        parallelize_vae(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"method='fast', gather='all'; .*'exact' .*'tiled'"):
        parallelize_vae(TINY_VAES["KL"].make(), method="fast")
    with pytest.raises(ValueError, match="AutoencoderTiny "):
        parallelize_vae(TINY_VAES["Tiny"].make(), method="tiled")


@pytest.mark.parametrize("name", REFUSED_VAES)
def test_refused_autoencoder_raises_with_the_reason(name):
    cls = getattr(autoencoders, name)
    vae = cls.__new__(cls)  # The instance has no weights, because default sizes have billions.
    torch.nn.Module.__init__(vae)
    with pytest.raises(TypeError, match=rf"^{name} .*{re.escape(REFUSED_VAES[name])}"):
        parallelize_vae(vae)


def test_every_autoencoder_of_diffusers_runs_or_has_a_reason():
    # These are vocoders.
    others = {"MMAudioVocoder", "MiniMaxMusic3Vocoder"}
    names = {name for name, value in vars(autoencoders).items() if isinstance(value, type)}
    assert len(names) > 30
    assert names - others == set(VAES) | set(REFUSED_VAES)


def warn_of_many(caplog_name):
    import logging

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger(caplog_name).addHandler(handler)
    vae_module._MOST_USEFUL_RANKS = 1
    try:
        parallelize_vae(TINY_VAES["KL"].make())
    finally:
        vae_module._MOST_USEFUL_RANKS = 8
        logging.getLogger(caplog_name).removeHandler(handler)
    return messages


def test_useless_ranks_are_logged(rank_pool):
    first, second = rank_pool.run(warn_of_many, 2, vae_module.logger.name)
    assert "2 ranks; beyond 1" in first[0] and not second


def test_without_a_process_group_nothing_is_changed():
    vae = TINY_VAES["KL"].make()
    cls = type(vae)
    assert parallelize_vae(vae) is vae and type(vae) is cls


def test_tiny_autoencoders_have_their_compression():
    for name, tiny in TINY_VAES.items():
        if name != "LTXVideo 0.9.5":
            dims = (-1,) if len(tiny.latents) == 3 else (-2, -1)
            ratio = rows_per_latent(tiny.make())
            assert all(tiny.pixels[dim] // ratio == tiny.latents[dim] for dim in dims), name


@torch.no_grad()
def offload_and_tile(first):
    """Return the errors of an autoencoder whose weights hooks move, and of one that is tiled. ``first`` says that this
    is done before it runs on ranks.
    """
    tiny, x = TINY_VAES["KL"], random_image(TINY_VAES["KL"].latents)
    here = torch.device("cpu")
    changes = {
        "sequential": lambda vae: cpu_offload(vae, execution_device=here),
        "of the whole model": lambda vae: cpu_offload_with_hook(vae, here),
        "of leaves": lambda vae: apply_group_offloading(vae, onload_device=here, offload_type="leaf_level"),
        "of blocks": lambda vae: apply_group_offloading(
            vae, onload_device=here, offload_type="block_level", num_blocks_per_group=1
        ),
        "tiled": lambda vae: vars(vae).update(vars(tiny.make_tiled()), _modules=vars(vae)["_modules"]),
    }
    errors = {}
    for name, change in changes.items():
        alone, vae = tiny.make(), tiny.make()
        for apply in (change, parallelize_vae) if first else (parallelize_vae, change):
            apply(vae)
        change(alone)
        errors[name] = relative_error(tiny.decode(vae, x), tiny.decode(alone, x))
    plain = tiny.decode(tiny.make(), x)
    return errors, relative_error(tiny.decode(tiny.make_tiled(), x), plain)


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", [True, False])
def test_offload_and_tiling_before_or_after_change_nothing(rank_pool, first):
    for errors, seams in rank_pool.run(offload_and_tile, 2, first):
        assert max(errors.values()) < 1e-5 < seams, errors


@torch.no_grad()
def draw_latents():
    tiny = TINY_VAES["LongCatAudioDiT"]
    x = random_image(tiny.pixels)
    vaes = tiny.make(), parallelize_vae(tiny.make())
    drawn = [vae.encode(sample=x, generator=torch.Generator().manual_seed(3)).latents for vae in vaes]
    return relative_error(drawn[1], drawn[0]), relative_error(drawn[0], tiny.encode(vaes[0], x))


def test_drawn_latents_equal_one_device(rank_pool):
    for error, noise in rank_pool.run(draw_latents, 2):
        assert error < 1e-5 < noise


@torch.no_grad()
def without_its_tiles():
    tiny, alone = TINY_VAES["MiniMaxH3"], TINY_VAES["MiniMaxH3"].make()
    vae = parallelize_vae(tiny.make())
    for model in (alone, vae):
        model.disable_tiling()
    encoded = relative_error(tiny.encode(vae, random_image(tiny.pixels)), tiny.encode(alone, random_image(tiny.pixels)))
    with pytest.raises(RuntimeError, match=r"^getitem .*dim 1 "):
        tiny.decode(vae, random_image(tiny.latents))
    return encoded


def test_untiled_minimax_encodes_but_does_not_decode(rank_pool):
    for error in rank_pool.run(without_its_tiles, 2):
        assert error < 1e-5


@torch.no_grad()
def longer_clip(name, parallel):
    """Process two latent frames more than elsewhere, so that caches of frames are filled, used and passed on."""
    tiny = TINY_VAES[name]
    vae = parallelize_vae(tiny.make()) if parallel else tiny.make()
    batch, channels, frames, *size = tiny.latents
    decoded = tiny.decode(vae, random_image((batch, channels, frames + 2, *size)))
    batch, channels, frames, *size = tiny.pixels
    return decoded, tiny.encode(vae, random_image((batch, channels, frames + 8, *size)))


# Qwen-Image's autoencoder is left out: its latents have a frame dim, but it accepts only one frame.
CLIPS = [name for name in ROWS if len(TINY_VAES[name].latents) == 5 and not name.startswith("QwenImage")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Wan 2.1" else pytest.mark.long) for name in CLIPS]
)
def test_longer_clips_on_two_ranks_equal_one_device(rank_pool, name):
    expected_clip = longer_clip(name, False)
    for outs in rank_pool.run(longer_clip, 2, name, True):
        for x, reference in zip(outs, expected_clip, strict=True):
            assert relative_error(x, reference) < 1e-5


@torch.no_grad()
def one_frame(name, parallel):
    """Process one frame. A cache of no frame has no elements, but it has rows."""
    tiny = TINY_VAES[name]
    vae = parallelize_vae(tiny.make()) if parallel else tiny.make()
    (batch, channels, _, *latents), (*_, height, width) = tiny.latents, tiny.pixels
    decoded = tiny.decode(vae, random_image((batch, channels, 1, *latents)))
    return decoded, tiny.encode(vae, random_image((1, 3, 1, height, width)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "HunyuanVideo15" else pytest.mark.long)
        for name in CLIPS
        if name != "VidTok"  # Its pools take three frames, also on one device.
    ],
)
def test_one_frame_on_two_ranks_equals_one_device(rank_pool, name):
    expected_frame = one_frame(name, False)
    for outs in rank_pool.run(one_frame, 2, name, True):
        for x, reference in zip(outs, expected_frame, strict=True):
            assert relative_error(x, reference) < 1e-5
