"""Autoencoders of diffusers on ranks, compared with the unmodified ones on one device."""

import re
from unittest import TestCase, mock

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.hooks import apply_group_offloading
from diffusers.models import autoencoders
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness import PeakMemory, TrafficCounter
from para_core.adapters import parallelize_pipe, parallelize_vae, unparallelize_pipe, unparallelize_vae
from para_core.adapters.vae import call_check
from para_core.adapters.vae import vae as vae_module
from para_core.adapters.vae.call import run_on_workers
from para_core.adapters.vae.families import REFUSED_VAES, VAES, rows_per_latent
from para_core.distributed.agree import agree
from para_core.instance.record import is_filled, slot_owner
from para_core.instance.slots import Slot
from para_core.spatial.row_tag import RowTag, set_rows
from tests.adapters.test_pipelines import generate
from tests.attention.one_device import relative_error
from tests.operators import Operators
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.vaes import BY_TILES, NO_TILES_ENCODED, NOT_TILED, TINY_VAES, random_image

ROWS = [name for name in TINY_VAES if name not in BY_TILES]


def shapes_of(name):
    """Return shapes of latents and pixels by name: odd sizes, wide ones, and more frames or a single one."""
    tiny = TINY_VAES[name]
    shapes = {"plain": (tiny.latents, tiny.pixels)}
    if len(tiny.latents) == 4:
        shapes["wide"] = tuple((*shape[:-2], shape[-1], shape[-2]) for shape in shapes["plain"])
    # Qwen-Image's latents have a frame dim, but its autoencoder accepts only one frame.
    if len(tiny.latents) == 5 and not name.startswith("QwenImage"):
        (*batch, frames, height, width), (*images, num_images, rows, columns) = shapes["plain"]
        # Caches of frames are filled, used and passed on.
        shapes["longer"] = (*batch, frames + 2, height, width), (*images, num_images + 8, rows, columns)
        # A cache of no frame has no elements, but it has rows. The pools of VidTok take three frames.
        if name != "VidTok":
            shapes["one frame"] = (*batch, 1, height, width), (*images, 1, rows, columns)
    return shapes


@torch.no_grad()
def require_equal(name, **options):
    """Decode and encode images of each shape on the ranks and on this one."""
    tiny = TINY_VAES[name]
    alone, vae = tiny.make(), parallelize_vae(tiny.make(), **options)
    for shape, sizes in shapes_of(name).items():
        for way, size in zip(("decode", "encode"), sizes, strict=True):
            expected, out = (getattr(tiny, way)(each, random_image(size)) for each in (alone, vae))
            assert relative_error(out, expected) < 1e-5, (name, shape, way)


def check_autoencoders(*names):
    for name in names:
        heartbeat()
        require_equal(name)


def check_groups(*names):
    """Share rows over a group without rank 0, and over all dims of meshes, whose groups the first ranks use."""
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        require_equal(*names, mesh=group)
    for ranks, name in (([[0, 1], [2, 3]], "ulysses"), ([[0, 2], [1, 3]], "ring")):
        mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("ring", "ulysses"))
        require_equal(*names, mesh=mesh)
        run = slot_owner(parallelize_vae(TINY_VAES["KL"].make(), mesh=mesh), Slot.PARALLEL_VAE, object)
        assert (run.row_ranks.first(2).group is mesh.get_group(name)) == (dist.get_rank() < 2)


@torch.no_grad()
def check_few_rows():
    """Decode and encode images with more and more rows, so that idle ranks join. Gather two runs of rows, too."""
    rank, tiny, unsorted = dist.get_rank(), TINY_VAES["KL"], dist.new_group([2, 0, 3, 1], sort_ranks=False)
    for gather, mesh in (("all", None), ("first", None), ("all", unsorted), ("first", unsorted)):
        alone, vae = tiny.make(), parallelize_vae(tiny.make(), mesh=mesh, gather=gather)
        for height in (2, 5, 7, 9):  # One rank has rows, then two, three and four.
            x = random_image((1, 4, height, 3))
            image, expected = tiny.decode(vae, x), tiny.decode(alone, x)
            if gather == "all" or rank == 0:
                assert relative_error(image, expected) < 1e-5, (gather, height)
            else:
                assert image.shape == expected.shape and not image.any()
            if gather == "all":
                assert relative_error(tiny.encode(vae, image), tiny.encode(alone, image)) < 1e-5, height
        row_ranks = slot_owner(vae, Slot.PARALLEL_VAE, object).row_ranks
        part = set_rows(torch.tensor([rank, 4 + rank]), RowTag(0, (1,) * 4, outer=2))
        runs = run_on_workers(lambda part=part: part, 4, row_ranks, gather)
        assert runs.tolist() == (list(range(8)) if gather == "all" or rank == 0 else [0] * 8)


def test_few_rows_use_fewer_ranks(rank_pool):
    rank_pool.run(check_few_rows, 4)


# As docs/vae.md says, the mask of HunyuanVideo has the rows of this rank, and that of HunyuanVideo 1.5 has all rows.
MASKS = {"HunyuanVideo": 0.5, "HunyuanVideo15": 1.0}
TOKENS = 3 * 8 * 5


@torch.no_grad()
def costs(parallel):
    """Return the largest masks, the traffic of a decode, and the peak memory of one that the first rank gathers."""
    masks, tiny = [], TINY_VAES["KL"]
    for name in MASKS:
        vae = parallelize_vae(TINY_VAES[name].make()) if parallel else TINY_VAES[name].make()
        with Operators() as ran:
            vae.decode(torch.randn(1, vae.config.latent_channels, 3, 8, 5))
        outs = [x for _, _, x in ran.calls if isinstance(x, torch.Tensor) and x.ndim > 1 and not x.is_meta]
        outs = [x for x in outs if x.shape[-1] == TOKENS]
        masks.append(max(x.untyped_storage().nbytes() for x in outs))
    vae = parallelize_vae(tiny.make()) if parallel else tiny.make()
    with TrafficCounter() as traffic:
        tiny.decode(vae, random_image((1, 4, 12, 5)))
    vae = parallelize_vae(tiny.make(), gather="first") if parallel else tiny.make()
    with PeakMemory() as memory:
        tiny.decode(vae, random_image((1, 4, 32, 16)))
    return masks, (traffic.collectives, traffic.bytes), memory.peak


@torch.no_grad()
def expected_traffic(rank, ranks):
    """Return the collectives and bytes of ``rank``: halos, statistics, keys and values, and the image."""
    tiny, counts = TINY_VAES["KL"], []
    vae = tiny.make()
    neighbours = (rank > 0) + (rank < ranks - 1)

    def note(module, inputs, out):
        x = inputs[0]
        if isinstance(module, nn.Conv2d) and module.kernel_size[0] == 3:
            counts.append(neighbours * x[:, :, :1].numel())
        elif isinstance(module, nn.GroupNorm):
            counts.append((ranks - 1) * 2 * x.shape[0] * module.num_groups)
        elif type(module).__name__ == "Attention":
            counts.append((ranks - 1) * 2 * x.numel() // ranks)

    for module in vae.modules():
        module.register_forward_hook(note)
    image = tiny.decode(vae, random_image((1, 4, 12, 5)))
    # Numbers have four bytes.
    return len(counts) + 1, 4 * (sum(counts) + (ranks - 1) * image.numel() // ranks)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_masks_traffic_and_activations(rank_pool, ranks):
    masks, _, alone = costs(False)
    assert masks == [TOKENS * TOKENS * 4] * 2
    for rank, (of_rank, traffic, peak) in enumerate(rank_pool.run(costs, ranks, True)):
        assert ranks == 3 or of_rank == [share * mask for share, mask in zip(MASKS.values(), masks, strict=True)]
        assert traffic == expected_traffic(rank, ranks)
        # The first rank also gets the image, with 3 channels in addition to the 8 of the last layer.
        assert peak < (0.85 if rank == 0 else 0.65) * alone


@torch.no_grad()
def check_settings():
    tiny, here, errors = TINY_VAES["KL"], torch.device("cpu"), {}
    batch = random_image((3, *tiny.latents[1:]))
    plain = tiny.decode(tiny.make(), batch)
    half = tiny.make().bfloat16()
    bound = 1.2 * relative_error(tiny.decode(half, batch.bfloat16()).float(), plain)
    assert relative_error(tiny.decode(parallelize_vae(half), batch.bfloat16()).float(), plain) < bound
    group = {"onload_device": here, "num_blocks_per_group": 1}
    changes = {
        "slicing": lambda vae: vae.enable_slicing(),
        "sequential offload": lambda vae: cpu_offload(vae, execution_device=here),
        "offload of the whole model": lambda vae: cpu_offload_with_hook(vae, here),
        "offload of leaves": lambda vae: apply_group_offloading(vae, offload_type="leaf_level", **group),
        "offload of blocks": lambda vae: apply_group_offloading(vae, offload_type="block_level", **group),
        "tiling": lambda vae: vars(vae).update(vars(tiny.make_tiled()), _modules=vars(vae)["_modules"]),
    }
    seams = relative_error(tiny.decode(tiny.make_tiled(), batch), plain)
    for name, change in changes.items():
        alone = tiny.make()
        change(alone)
        expected = tiny.decode(alone, batch)
        for order in ((change, parallelize_vae), (parallelize_vae, change)):
            vae = tiny.make()
            for apply in order:
                apply(vae)
            errors[name, order[0] is change] = relative_error(tiny.decode(vae, batch), expected)
    # The first rank tells of more ranks than are useful.
    logged = TestCase().assertLogs if dist.get_rank() == 0 else TestCase().assertNoLogs
    with mock.patch.object(vae_module, "_MOST_USEFUL_RANKS", 1), logged(vae_module.logger):
        parallelize_vae(tiny.make())
    # Another autoencoder of the class stays as it is, and undoing leaves nothing.
    video = TINY_VAES["Wan 2.1"]
    vae, other, x = video.make(), video.make(), random_image(video.latents)
    before, plain = (vars(vae).keys(), type(vae), type(vae.decoder)), video.decode(vae, x)
    parallelize_vae(parallelize_vae(vae, method="tiled"))
    assert type(other) is before[1] and type(vae) is not before[1]
    sharded = video.decode(vae, x)
    errors["tiled, then exact"] = relative_error(sharded, plain)
    assert not any(hasattr(value, "_para_core_rows") for value in (x, sharded, *vae.parameters()))
    assert unparallelize_vae(vae) is vae
    assert (vars(vae).keys(), type(vae), type(vae.decoder)) == before
    assert torch.equal(video.decode(vae, x), plain)
    # An encoder that draws its latents.
    sound = TINY_VAES["LongCatAudioDiT"]
    vaes, x = (sound.make(), parallelize_vae(sound.make())), random_image(sound.pixels)
    drawn = [vae.encode(sample=x, generator=torch.Generator().manual_seed(3)).latents for vae in vaes]
    assert relative_error(drawn[0], sound.encode(vaes[0], x)) > 1e-5
    errors["drawn latents"] = relative_error(drawn[1], drawn[0])
    # This autoencoder always decodes by tiles, and encodes without them too.
    tiled = TINY_VAES["MiniMaxH3"]
    vaes, x = (tiled.make(), parallelize_vae(tiled.make())), random_image(tiled.pixels)
    for vae in vaes:
        vae.disable_tiling()
    errors["encoded without tiles"] = relative_error(tiled.encode(vaes[1], x), tiled.encode(vaes[0], x))
    with pytest.raises(RuntimeError, match=r"^getitem .*dim 1 "):
        tiled.decode(vaes[1], random_image(tiled.latents))
    assert max(errors.values()) < 1e-5 < seams, errors


# encode() of these autoencoders constructs a distribution.
NOT_ENCODED = ("TemporalDecoder", "Kandinsky6SR", "MiniMaxH3, sound")
WAYS = [(name, way) for name in ROWS for way in ("decode", "encode") if way == "decode" or name not in NOT_ENCODED]


def compiled(vae, way):
    counter = CompileCounterWithBackend("eager")
    setattr(vae, way, torch.compile(getattr(vae, way), backend=counter, fullgraph=True))
    return counter


@torch.no_grad()
def compile_way(name, way):
    """Return the errors of two images and of one in eager code afterwards, and the number of graphs."""
    tiny = TINY_VAES[name]
    vae = parallelize_vae(tiny.make())
    counter, errors, shape = compiled(vae, way), [], tiny.latents if way == "decode" else tiny.pixels
    for seed in (1, 2, 2):
        if len(errors) == 2:
            delattr(vae, way)  # Tracing must leave nothing on the VAE.
        x = random_image(shape, seed=seed)
        errors.append(relative_error(getattr(tiny, way)(vae, x), getattr(tiny, way)(tiny.make(), x)))
    if name == "KL":
        compiled(parallelize_vae(vae, method="tiled"), "decode")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="shapes of tiles"):
            tiny.decode(vae, random_image(tiny.latents))
    return errors, counter.frame_count


@pytest.mark.parametrize(
    ("name", "way"), [pytest.param(*case, marks=() if case == ("KL", "decode") else pytest.mark.long) for case in WAYS]
)
def test_compiled_autoencoder_is_one_exact_graph(rank_pool, name, way):
    for errors, graphs in rank_pool.run(compile_way, 2, name, way, timeout=900):
        assert max(errors) < 1e-5 and graphs == 1


def on_second_rank(change):
    return lambda vae, x: change(vae, x) if dist.get_rank() == 1 else None


def replace_first_layer(forward):
    return lambda vae, x: setattr(vae.decoder.conv_in, "forward", forward)


def agree_elsewhere(vae, x):
    agree({}, slot_owner(vae, Slot.PARALLEL_VAE, object).mesh)


def fail_between_slices(vae, x):
    vae.enable_slicing()
    x.set_(x.repeat(2, 1, 1, 1))
    if dist.get_rank() == 1:
        x.split = lambda size: (x[:1] if index == 0 else {}["a slice"] for index in range(2))


# Each row has a change, the rows of latents, of which five leave one of three ranks idle, and what every rank says.
ERRORS = {
    "other latents": (on_second_rank(lambda vae, x: x.mul_(2)), 9, "AutoencoderKL .*sample"),
    "other large latents": (on_second_rank(lambda vae, x: x.mul_(2)), 9, "AutoencoderKL .*sample"),
    "other settings": (on_second_rank(lambda vae, x: vae.enable_tiling()), 9, "AutoencoderKL .*tiling"),
    "no tensor": (on_second_rank(lambda vae, x: vae.decode(None)), 9, "AutoencoderKL .*NoneType"),
    "no latents": (on_second_rank(lambda vae, x: vae.decode()), 9, "AutoencoderKL .*missing .*'z'"),
    "no dims": (lambda vae, x: x.set_(x.new_ones(())), 9, r"AutoencoderKL .*shape \[\]"),
    "two dims": (on_second_rank(lambda vae, x: vae.decode(x[0, 0])), 9, "AutoencoderKL .*sample"),
    "between slices": (fail_between_slices, 9, "AutoencoderKL failed: .*KeyError: 'a slice'"),
    "another call": (on_second_rank(agree_elsewhere), 9, "rank 1 does not call this AutoencoderKL|disagree"),
    "gradient": (lambda vae, x: x.requires_grad_(), 9, "gradient"),
    "compiled": (lambda vae, x: vae.decoder.compile(backend="eager"), 9, r"torch\.compile\(vae\.decode\)"),
    "mixes rows": (replace_first_layer(lambda x: x.roll(1, -2)), 5, "roll .*dim 2 .*2 ranks"),
    "an error of working ranks": (replace_first_layer(lambda x: {}["a key"]), 5, "KeyError: 'a key'"),
}


def check_errors():
    for how, (change, height, message) in ERRORS.items():
        heartbeat()
        vae, x = parallelize_vae(TINY_VAES["KL"].make()), random_image((1, 4, height, 3))
        errors = (TypeError, ValueError, RuntimeError)
        # Of latents with more bytes, ranks compare evenly spaced values.
        few = mock.patch.object(call_check, "_MAX_COMPARED_BYTES", 64 if how == "other large latents" else 1 << 24)
        with few, torch.set_grad_enabled(how == "gradient"), pytest.raises(errors, match=message):
            change(vae, x)
            TINY_VAES["KL"].decode(vae, x)
        # The ranks still meet in the next call.
        if how.startswith("no "):
            dist.barrier()
            whole = random_image((1, 4, 9, 3))
            assert relative_error(vae.decode(whole).sample, TINY_VAES["KL"].make().decode(whole).sample) < 1e-5
    # The methods of this autoencoder run on all ranks themselves, without another around them.
    tiny = TINY_VAES["TemporalDecoder"]
    for wrong in (lambda vae, x: vae.decode(), lambda vae, x: vae.decode(x, num_frames=1, tiles=2)):
        vae, x = parallelize_vae(tiny.make()), random_image(tiny.latents)
        with pytest.raises((TypeError, ValueError), match="AutoencoderKLTemporalDecoder"):
            on_second_rank(wrong)(vae, x)
            tiny.decode(vae, x)


@pytest.mark.parametrize(
    ("check", "ranks", "arguments"),
    [
        (check_autoencoders, 2, ["KL", "Wan 2.1", "HunyuanVideo15", "KVAE, video"]),
        (check_groups, 4, ["KL"]),
        (check_settings, 2, ()),
        (check_errors, 3, ()),
        *[pytest.param(check_autoencoders, n, [name], marks=pytest.mark.long) for name in ROWS for n in (2, 3, 4)],
    ],
)
def test_autoencoders_are_exact_or_raise_on_every_rank(rank_pool, check, ranks, arguments):
    rank_pool.run(check, ranks, *arguments)


def test_refused_autoencoders_and_words_are_errors_that_name_them():
    with pytest.raises(TypeError, match=r"^Linear "):
        parallelize_vae(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"method='fast', gather='all'; .*'exact' .*'tiled'"):
        parallelize_vae(TINY_VAES["KL"].make(), method="fast")
    with pytest.raises(TypeError, match="same_bits is 'no'"):
        parallelize_vae(TINY_VAES["KL"].make(), same_bits="no")
    with pytest.raises(ValueError, match="AutoencoderTiny "):
        parallelize_vae(TINY_VAES["Tiny"].make(), method="tiled")
    for name, reason in REFUSED_VAES.items():
        # Default sizes have billions of weights.
        vae = getattr(autoencoders, name).__new__(getattr(autoencoders, name))
        nn.Module.__init__(vae)
        with pytest.raises(TypeError, match=rf"^{name} .*{re.escape(reason)}"):
            parallelize_vae(vae)
    # Without a process group nothing is changed.
    vae = TINY_VAES["KL"].make()
    assert parallelize_vae(vae) is vae and type(vae) is autoencoders.AutoencoderKL


def test_every_autoencoder_of_diffusers_runs_or_has_a_reason():
    vocoders = {"MMAudioVocoder", "MiniMaxMusic3Vocoder"}
    names = {name for name, value in vars(autoencoders).items() if isinstance(value, type)}
    assert len(names) > 30
    assert names - vocoders == set(VAES) | set(REFUSED_VAES)
    for name, tiny in TINY_VAES.items():
        if name != "LTXVideo 0.9.5":
            dims, ratio = (-1,) if len(tiny.latents) == 3 else (-2, -1), rows_per_latent(tiny.make())
            assert all(tiny.pixels[dim] // ratio == tiny.latents[dim] for dim in dims), name


def check_pipeline(name):
    """Compare an image with one process. Then decode previews in a callback, and leave the VAE out."""
    pipe, previews = PIPELINES[name].build(), []
    alone = generate(pipe, name, output_type="pt")
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), vae=True)
    vaes = [pipe.vae, *([pipe.audio_vae] if name == "ltx2" else [])]
    assert all(is_filled(vae, Slot.PARALLEL_VAE) for vae in vaes)
    assert relative_error(generate(pipe, name, output_type="pt"), alone) < 1e-4

    def show(pipe, step, time, kwargs):
        previews.append(pipe.vae.decode(torch.ones(1, pipe.vae.config.latent_channels, 6, 10)).sample)
        return {}

    if name == "ovis":
        generate(pipe, name, callback_on_step_end=show)
        assert previews
    unparallelize_pipe(pipe)
    assert not any(is_filled(vae, Slot.PARALLEL_VAE) for vae in vaes)
    pipe.vae = None
    with pytest.raises(TypeError, match=r"pipe\.vae"):
        parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), vae=True)


# The pipelines start from text or from an image, which is encoded. Some have videos, and one also has sound.
@pytest.mark.parametrize(
    "name", ["ovis", *[pytest.param(name, marks=pytest.mark.long) for name in ("chroma, image", "wan, image", "ltx2")]]
)
def test_pipeline_with_parallel_vae_equals_one_device(rank_pool, name):
    rank_pool.run(check_pipeline, 2, name)


TILED = [
    name
    for name, tiny in TINY_VAES.items()
    if VAES[tiny.cls].tiled and VAES[tiny.cls].distributes_tiles and name not in NOT_TILED
]


@torch.no_grad()
def by_tiles(name, method):
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


# An exact VAE that tiles by itself is tiled, too.
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("KL", "tiled"),
        ("Wan 2.1", "exact"),
        *[pytest.param(name, method, marks=pytest.mark.long) for name in TILED for method in ("tiled", "exact")],
    ],
)
def test_tiles_on_two_ranks_are_bit_exact(rank_pool, name, method):
    expected, all_calls = by_tiles(name, None)
    reports = rank_pool.run(by_tiles, 2, name, method)
    for outs, _ in reports:
        assert all(torch.equal(x, y) for x, y in zip(outs, expected, strict=True))
    assert sum(calls for _, calls in reports) == all_calls
