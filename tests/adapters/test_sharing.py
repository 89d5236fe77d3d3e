"""Two pipelines share a transformer. The second becomes parallel too, and its errors say what it needs."""

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxImg2ImgPipeline
from PIL import Image

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, parallelize_transformer, unparallelize_pipe
from para_core.adapters.agree import arguments
from tests.tiny import FLUX_CHANNELS, cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error

IMAGE = Image.linear_gradient("L").convert("RGB").resize((56, 72))


def raised(call):
    with pytest.raises((RuntimeError, ValueError)) as error:
        call()
    return str(error.value)


def share_transformer():
    mesh = cpu_mesh(1, 2)
    pipe = parallelize_pipe(flux_pipe(), mesh=mesh)
    other = FluxImg2ImgPipeline.from_pipe(pipe)
    outs = {"shared": other.transformer is pipe.transformer, "class": type(other) is FluxImg2ImgPipeline}
    options = {"image": IMAGE, "strength": 0.9}
    outs["generator"] = other(**flux_call(**options)).images
    torch.manual_seed(torch.distributed.get_rank())
    outs["error"] = raised(lambda: other(**flux_call(**options, generator=None)))
    parallelize_pipe(other, mesh=mesh)
    torch.manual_seed(torch.distributed.get_rank())
    outs["after the line"] = other(**flux_call(**options, generator=None)).images
    outs["first pipe"] = pipe(**flux_call()).images
    unparallelize_pipe(other)
    outs["first pipe, after the other was undone"] = raised(lambda: pipe(**flux_call()))
    unparallelize_pipe(pipe)
    outs["undone"] = pipe(**flux_call()).images
    return outs


def test_from_pipe_is_parallel_and_asks_for_its_mesh(rank_pool):
    other = flux_pipe(FluxImg2ImgPipeline)
    alone = other(**flux_call(image=IMAGE, strength=0.9)).images
    torch.manual_seed(0)
    generated = other(**flux_call(image=IMAGE, strength=0.9, generator=None)).images
    plain = flux_pipe()(**flux_call()).images
    for outs in rank_pool.run(share_transformer, 2):
        assert outs["shared"]
        assert outs["class"]
        assert relative_error(outs["generator"], alone) < 1e-5
        assert re.search(rf"hidden_states: rank 0 .*tensor\[1, 63, {FLUX_CHANNELS}\]", outs["error"])
        assert "parallelize_pipe(the_other_pipe, mesh=mesh)" in outs["error"]
        assert relative_error(outs["after the line"], generated) < 1e-5
        assert relative_error(outs["first pipe"], plain) < 1e-5
        assert "parallelize_pipe(pipe, mesh=...)" in outs["first pipe, after the other was undone"]
        assert torch.equal(outs["undone"], plain)


def share_sharded_weights(weights):
    mesh = cpu_mesh(1, 2) if weights == "fsdp" else init_context_parallel_mesh("cpu", max_tensor_dim_size=2)
    pipe = parallelize_pipe(flux_pipe(), mesh=mesh, weights=weights)
    other = parallelize_pipe(FluxImg2ImgPipeline.from_pipe(pipe), mesh=mesh)
    assert other.transformer is pipe.transformer
    return other(**flux_call(image=IMAGE, strength=0.9)).images, pipe(**flux_call()).images


@pytest.mark.sample(1)
@pytest.mark.parametrize("weights", ["fsdp", "tensor"])
def test_from_pipe_shares_sharded_transformer(rank_pool, weights):
    expected = flux_pipe(FluxImg2ImgPipeline)(**flux_call(image=IMAGE, strength=0.9)).images
    plain = flux_pipe()(**flux_call()).images
    for image_to_image, text_to_image in rank_pool.run(share_sharded_weights, 2, weights):
        assert relative_error(image_to_image, expected) < 1e-5
        assert relative_error(text_to_image, plain) < 1e-5


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(()).expand(1),
        torch.arange(6.0).view(2, 3)[:1, :1],
        torch.arange(6.0).view(2, 3).T,
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
    ],
    ids=["expanded", "size 1", "transposed", "conjugated", "empty", "bool"],
)
def test_fingerprint_ignores_memory_layout(x):
    assert arguments.describe(x) == arguments.describe(x.resolve_conj().clone(memory_format=torch.contiguous_format))
    if x.numel():
        assert arguments.describe(x) != arguments.describe(~x if x.dtype == torch.bool else x + 1)


def exchanges_of(call):
    with mock.patch.object(arguments, "agree", wraps=arguments.agree) as agree:
        call()
    return agree.call_count


def count_exchanges(assume_equal):
    """Return how often a pipe and its transformer compare their inputs."""
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(2, 1), assume_equal=assume_equal)
    of_pipe = exchanges_of(lambda: pipe(**flux_call()))
    return of_pipe, exchanges_of(lambda: pipe.transformer(**flux_inputs(10, 3)))


def call_without_comparing():
    counts = [count_exchanges(assume_equal) for assume_equal in (False, True)]
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2), assume_equal=True)
    torch.manual_seed(torch.distributed.get_rank())
    out = pipe(**flux_call(generator=None)).images
    pipe.transformer = flux_transformer()
    return counts, out, raised(lambda: pipe(**flux_call()))


def test_unchecked_pipe_is_exact_and_checks_itself(rank_pool):
    pipe = flux_pipe()
    torch.manual_seed(0)
    expected = pipe(**flux_call(generator=None)).images
    for counts, out, error in rank_pool.run(call_without_comparing, 2):
        assert counts == [(1, 1), (0, 0)]
        assert relative_error(out, expected) < 1e-5
        assert re.search(r"pipe\.transformer .*another .*parallelized", error)


def changed(x, how):
    """Return a copy of ``x`` in which the last element, or one bit of it, differs."""
    x = x.clone()
    last = x.view(-1)[-1:]
    if how == "zero":
        last.copy_(-last)
    elif how == "nan":
        last.fill_(torch.nan)
    else:
        last.view(torch.uint8)[0] ^= 1
    return x


def call_with_another_bit():
    """Return the errors of ranks 0 and 1 for each difference. Then call with equal inputs, also with NaNs."""
    transformer = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2))
    plain = flux_transformer()
    inputs = flux_inputs(37, 7)
    inputs["pooled_projections"].view(-1)[-1] = 0.0
    inputs["img_ids"] = inputs["img_ids"].to(torch.int64)
    errors = {}
    for name, how in DIFFERENT_INPUTS:
        local_inputs = {**inputs, name: changed(inputs[name], how)} if dist.get_rank() == 1 else inputs
        with pytest.raises(ValueError, match=r"rank 0 .*rank 1 ") as error, torch.no_grad():
            transformer(**local_inputs)
        errors[name, how] = str(error.value)
    other = inputs if dist.get_rank() == 0 else {**inputs, "hidden_states": inputs["hidden_states"][:, :-1]}
    with pytest.raises(ValueError, match=r"rank 0 .*rank 1 ") as error, torch.no_grad():
        transformer(**other)
    errors["hidden_states", "shape"] = str(error.value)
    inputs["timestep"] = inputs["timestep"].expand(1)
    with torch.no_grad():
        difference = relative_error(transformer(**inputs)[0], plain(**inputs)[0])
        not_a_number = transformer(**{**inputs, "timestep": torch.full((1,), torch.nan)})[0]
    return errors, difference, torch.isnan(not_a_number).all().item()


DIFFERENT_INPUTS = [
    ("hidden_states", "bit"),
    ("hidden_states", "nan"),
    ("encoder_hidden_states", "bit"),
    ("pooled_projections", "zero"),
    ("timestep", "bit"),
    ("img_ids", "bit"),
    ("txt_ids", "zero"),
]


def test_one_bit_difference_is_named_on_all_ranks(rank_pool):
    for errors, difference, is_nan in rank_pool.run(call_with_another_bit, 2):
        assert difference < 1e-5
        assert is_nan
        for (name, how), message in errors.items():
            assert re.search(rf"{name}: rank 0 .*tensor", message), how
            assert message.count(": rank 0 ") == message.count(", rank 1 ") == 1, how
