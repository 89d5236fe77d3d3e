"""Autoencoders that are offloaded, or run on the first rank only, give the results of the unmodified pipeline."""

from math import prod
from unittest import mock

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from torch import nn

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, unparallelize_pipe
from para_core.adapters.weights.offloaded_modules import offloader_of
from tests.adapters.parallel.test_undo import failing_at_the_end
from tests.tiny import flux_pipe, relative_error
from tests.weights.copying_group import CopyingGroup
from zoo.tiny.pipelines import PIPELINES


def make(name):
    if name == "flux":
        return flux_pipe(shared_parts=False)
    return PIPELINES[name].build()


def generate(pipe, name):
    call = {"prompt": "a cat", "height": 72, "width": 56, "num_inference_steps": 2, "max_sequence_length": 13}
    if name != "flux":
        call = PIPELINES[name].call()
    out = pipe(**{**call, "output_type": "pt", "generator": torch.Generator().manual_seed(7)})[0]
    return torch.as_tensor(out).detach()


def state_of(vae):
    """Return the class and the attributes of every module, and the bits of the weights."""
    return [(type(x), sorted(vars(x))) for x in vae.modules()], {k: x.clone() for k, x in vae.state_dict().items()}


def require_as(vae, before):
    modules, weights = state_of(vae)
    assert modules == before[0]
    assert all(torch.equal(x, before[1][name]) for name, x in weights.items())


def counted(pipe):
    """Count the calls of a layer of the VAE on this rank."""
    calls = []
    layer = next(x for x in pipe.vae.decoder.modules() if isinstance(x, (nn.Conv2d, nn.Conv3d)))
    layer.register_forward_hook(lambda *_: calls.append(1))
    return calls


def mesh_of(dims):
    return init_context_parallel_mesh("cpu", **{f"max_{name}_dim_size": size for name, size in dims.items()})


def place(name, dims, options):
    pipe = make(name)
    calls = counted(pipe)
    generate(pipe, name)  # Wan's VAE adds attributes to itself in its first call.
    calls.clear()
    before = state_of(pipe.vae)
    parallelize_pipe(pipe, mesh=mesh_of(dims), **options)
    outs = [generate(pipe, name) for _ in range(2)]
    num_calls = len(calls)
    unparallelize_pipe(pipe)
    require_as(pipe.vae, before)
    outs.append(generate(pipe, name))
    return outs, num_calls


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "dims", "options"),
    [
        ("flux", {"ulysses": 2}, {"vae_placement": "first"}),
        ("flux", {"ring": 2}, {"vae_placement": "offload", "vae": True}),
        ("flux", {"pipe": 2}, {"vae_placement": "offload", "text_encoders": "first"}),
        ("wan 2.2", {"batch": 2}, {"vae_placement": "first"}),
        pytest.param("wan 2.2", {"ring": 2}, {"vae_placement": "offload", "vae": True}, marks=pytest.mark.long),
        pytest.param("wan 2.2", {"batch": 2, "ring": 2}, {"vae_placement": "first"}, marks=pytest.mark.long),
        pytest.param("flux", {"ulysses": 2}, {"vae_placement": "first", "weights": "fsdp"}, marks=pytest.mark.long),
    ],
)
def test_placed_vaes_are_exact_and_undone(rank_pool, name, dims, options):
    expected = generate(make(name), name)
    for rank, (outs, num_calls) in enumerate(rank_pool.run(place, prod(dims.values()), name, dims, options)):
        assert max(relative_error(out, expected) for out in outs) < 1e-5
        assert (num_calls > 0) == (options["vae_placement"] != "first" or rank == 0)


def decode_one_branch():
    """Return the image if one of two ranks computes a branch of guidance and the VAE is the first to read it."""
    pipe = PIPELINES["wan 2.2"].build()
    call = {"output_type": "pt", "guidance_scale": 1.0, "guidance_scale_2": 1.0, "num_inference_steps": 2}
    expected = pipe(**{**PIPELINES["wan 2.2"].call(), **call, "generator": torch.Generator().manual_seed(7)})[0]
    parallelize_pipe(pipe, mesh=mesh_of({"batch": 2}), vae_placement="first")
    out = pipe(**{**PIPELINES["wan 2.2"].call(), **call, "generator": torch.Generator().manual_seed(7)})[0]
    return expected, out


@pytest.mark.filterwarnings("ignore:.*branches of guidance")
def test_a_rank_without_a_branch_waits_for_the_latents(rank_pool):
    for expected, out in rank_pool.run(decode_one_branch, 2):
        assert relative_error(out, expected) < 1e-5


def encode(placement):
    pipe = make("flux")
    if placement is not None:
        parallelize_pipe(pipe, mesh=mesh_of({"ring": 2}), vae_placement=placement)
    image = torch.rand(1, 3, 24, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        latents = pipe.vae.encode(image).latent_dist
    return latents.mean, latents.sample(torch.Generator().manual_seed(2))


def test_an_image_is_encoded_on_the_first_rank(rank_pool):
    expected = encode(None)
    for out in rank_pool.run(encode, 2, "first"):
        assert all(map(torch.equal, out, expected))


def fail_and_place_again():
    """Decode with bad input, change the placement with a failure, and then change it without."""
    pipe, mesh = make("flux"), mesh_of({"ring": 2})
    parallelize_pipe(pipe, mesh=mesh, vae_placement="first")
    with pytest.raises(RuntimeError) as error:
        pipe.vae.decode(torch.ones(1, 3, 5, 5))
    outs = [generate(pipe, "flux")]
    with failing_at_the_end():
        parallelize_pipe(pipe, mesh=mesh, vae_placement="offload")
    calls = counted(pipe)
    outs.append(generate(pipe, "flux"))
    on_this_rank = bool(calls)
    parallelize_pipe(pipe, mesh=mesh, vae_placement="offload")
    outs.append(generate(pipe, "flux"))
    parallelize_pipe(pipe, mesh=mesh)
    outs.append(generate(pipe, "flux"))
    return outs, on_this_rank, offloader_of(pipe.vae), str(error.value)


def test_failed_placement_raises_and_changes_nothing(rank_pool):
    expected = generate(make("flux"), "flux")
    for rank, (outs, decoded, offloader, error) in enumerate(rank_pool.run(fail_and_place_again, 2)):
        assert max(relative_error(out, expected) for out in outs) < 1e-5
        assert decoded == (rank == 0)
        assert offloader is None
        assert "pipe.vae" in error


def share_a_vae():
    """Place the VAE of two pipelines on the first rank through one, and on all ranks through the other, in either
    order.
    """
    mesh, first, rows = mesh_of({"ulysses": 2}), {"vae_placement": "first"}, {"vae": True}
    outs = []
    for earlier, later in ((first, rows), (rows, first)):
        pipes = [flux_pipe(shared_parts=False) for _ in range(2)]
        pipes[1].vae = pipes[0].vae
        parallelize_pipe(pipes[0], mesh=mesh, **earlier)
        with pytest.raises(ValueError, match="vae_placement='first'"):
            parallelize_pipe(pipes[1], mesh=mesh, **later)
        outs += [generate(pipe, "flux") for pipe in pipes]
    return outs


def test_a_shared_vae_runs_on_the_first_rank_or_on_all(rank_pool):
    expected = generate(make("flux"), "flux")
    for outs in rank_pool.run(share_a_vae, 2):
        assert max(relative_error(out, expected) for out in outs) < 1e-5


def test_a_vae_is_offloaded_on_one_rank_and_restored():
    expected, pipe = generate(make("flux"), "flux"), make("flux")
    before = state_of(pipe.vae)
    parallelize_pipe(pipe, vae_placement="offload")
    assert offloader_of(pipe.vae) is not None
    assert torch.equal(generate(pipe, "flux"), expected)
    unparallelize_pipe(pipe)
    require_as(pipe.vae, before)
    assert torch.equal(generate(pipe, "flux"), expected)


def tensors_of(*modules):
    return [x for module in modules for x in (*module.parameters(), *module.buffers())]


@torch.no_grad()
def test_video_needs_one_copy_of_the_weights():
    pipe, expected = make("wan"), make("wan").vae
    vae = pipe.vae
    with mock.patch("diffusers.hooks.group_offloading.ModuleGroup", CopyingGroup):
        parallelize_pipe(pipe, vae_placement="offload")
        held = [x.data_ptr() for x in tensors_of(vae)]
        for frames in (1, 3, 5):
            CopyingGroup.copies = 0
            latents = torch.randn(1, vae.config.z_dim, frames, 4, 3)
            assert torch.equal(vae.decode(latents).sample, expected.decode(latents).sample)
            assert CopyingGroup.copies == len(tensors_of(vae.decoder, vae.post_quant_conv, vae.quant_conv))
            CopyingGroup.copies = 0
            video = torch.randn(1, 3, 4 * frames - 3, 16, 24)
            assert torch.equal(vae.encode(video).latent_dist.mean, expected.encode(video).latent_dist.mean)
            assert CopyingGroup.copies == len(tensors_of(vae.encoder, vae.post_quant_conv, vae.quant_conv))
            # The weights in host memory are the same tensors, so nothing was copied back.
            assert [x.data_ptr() for x in tensors_of(vae)] == held
        vae.decoder.conv_out.weight.data.mul_(1.5)
        expected.decoder.conv_out.weight.data.mul_(1.5)
        assert torch.equal(vae.decode(latents).sample, expected.decode(latents).sample)
        # A failure frees the copies too.
        with pytest.raises(RuntimeError):
            vae.decode(torch.ones(1, 1, 1, 1, 1))
        assert [x.data_ptr() for x in tensors_of(vae)] == held
        unparallelize_pipe(pipe)
    assert torch.equal(vae.decode(latents).sample, expected.decode(latents).sample)


@torch.no_grad()
def test_a_lora_that_is_loaded_later_leaves_the_vae_offloaded():
    """Check a LoRA that is loaded later: diffusers then applies its group offload again, to all components that seem to
    have it.
    """
    pipe, alone = make("flux"), make("flux")
    before = state_of(pipe.vae)
    with mock.patch("diffusers.hooks.group_offloading.ModuleGroup", CopyingGroup):
        parallelize_pipe(pipe, vae_placement="offload")
        weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
        lora = {
            "transformer.context_embedder.lora_A.weight": torch.randn(2, alone.transformer.context_embedder.in_features)
        }
        lora["transformer.context_embedder.lora_B.weight"] = weight.T.contiguous()
        for each in (pipe, alone):
            each.load_lora_weights(dict(lora))
        CopyingGroup.copies = 0
        assert torch.equal(generate(pipe, "flux"), generate(alone, "flux"))
        assert CopyingGroup.copies == len(tensors_of(pipe.vae.decoder))
        unparallelize_pipe(pipe)
    require_as(pipe.vae, before)


def test_diffusers_finds_the_device_of_an_offloaded_vae():
    pipe = make("flux")
    parallelize_pipe(pipe, vae_placement="offload")
    with mock.patch.object(pipe.vae._diffusers_hook.get_hook("group_offloading").config, "onload_device", "there"):
        assert pipe._execution_device == pipe.vae.device == "there"
    unparallelize_pipe(pipe)
    assert pipe._execution_device == pipe.vae.device == torch.device("cpu")


@torch.no_grad()
def test_the_decoder_of_an_offloaded_vae_may_be_compiled():
    pipe, latents = make("flux"), torch.randn(1, 16, 9, 7)
    latents = latents[:, : pipe.vae.config.latent_channels]
    expected = pipe.vae.decode(latents).sample
    parallelize_pipe(pipe, vae_placement="offload")
    decode = torch.compile(pipe.vae.decode, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"vae\.decoder\.compile"):
        decode(latents)
    torch.compiler.reset()
    pipe.vae.decoder.compile(backend="eager", fullgraph=True)
    assert torch.equal(pipe.vae.decode(latents).sample, expected)


def test_refused_placements_change_nothing():
    pipe = make("flux")
    before = state_of(pipe.vae)
    for options in ({"vae_placement": "fsdp"}, {"vae_placement": "first", "vae": True}):
        with pytest.raises(ValueError, match="first"):
            parallelize_pipe(pipe, **options)
    require_as(pipe.vae, before)
    apply_group_offloading(pipe.vae, torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(ValueError, match=r"pipe\.vae"):
        parallelize_pipe(pipe, vae_placement="offload")
    pipe.vae = None
    with pytest.raises(ValueError, match="autoencoder"):
        parallelize_pipe(pipe, vae_placement="first")
