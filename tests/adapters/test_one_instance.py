"""parallelize_pipe changes one instance only, also one that shares its transformer, and compares what ranks give it."""

import copy
import io
import pickle
import re
import tempfile
import unittest
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxImg2ImgPipeline, FluxPipeline, FluxTransformer2DModel
from PIL import Image
from torch.overrides import _get_current_function_mode_stack

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe, parallelize_transformer, unparallelize_pipe
from para_core.adapters.agree import arguments
from para_core.plans.region import mesh_of_plan
from tests.tiny import FLUX_CHANNELS, cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error


def live_beside_each_other():
    other, pipe = flux_pipe(shared_parts=False), flux_pipe(shared_parts=False)
    alone = other(**flux_call()).images
    parallelize_pipe(pipe, mesh=cpu_mesh(1, 2), vae=True)
    assert relative_error(pipe(**flux_call()).images, alone) < 1e-5
    assert torch.equal(other(**flux_call()).images, alone)
    assert (type(other), type(other.transformer)) == (FluxPipeline, FluxTransformer2DModel)
    for mine, plain in ((pipe, other), (pipe.transformer, other.transformer)):
        assert (type(mine).__name__, repr(mine)) == (type(plain).__name__, repr(plain))
        assert (dict(mine.config), mine.dtype) == (dict(plain.config), plain.dtype)
    assert pipe.components.keys() == other.components.keys()
    assert pipe.transformer.state_dict().keys() == other.transformer.state_dict().keys()
    for part in (pipe, pipe.transformer, pipe.vae):
        for way in (copy.deepcopy, copy.copy, pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
            with pytest.raises(TypeError, match=r"unparallelize_pipe.*remove_cache_from_pipe"):
                way(part)
    with pytest.raises(TypeError, match="FluxTransformer2DModel"):
        copy.deepcopy(torch.compile(pipe.transformer, backend="eager"))
    with tempfile.TemporaryDirectory() as folder:  # transformers itself saves on the first rank only.
        if dist.get_rank() == 0:
            pipe.save_pretrained(folder)
            loaded = FluxPipeline.from_pretrained(folder)
            loaded.set_progress_bar_config(disable=True)
            # Loaded parameters have other addresses in memory, which changes the last bits, also without para_core.
            assert relative_error(loaded(**flux_call()).images, alone) < 1e-6
    # A refused copy leaves the pipe parallel, on another mesh too, with one private class and not one for each call.
    parallelize_pipe(pipe, mesh=cpu_mesh(2, 1))
    assert mesh_of_plan(pipe.transformer).ring.size == 2
    assert relative_error(pipe(**flux_call()).images, alone) < 1e-5
    assert type(pipe).__mro__[1] is FluxPipeline
    unparallelize_pipe(pipe)
    for each in (pipe, copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert (type(each), type(each.transformer)) == (FluxPipeline, FluxTransformer2DModel)
        assert vars(each).keys() == vars(other).keys()
        assert torch.equal(each(**flux_call()).images, alone)
    unparallelize_pipe(pipe)  # Nothing is left to undo.
    assert not _get_current_function_mode_stack()


def parallelize_without_mesh():
    case = unittest.TestCase()
    if dist.get_rank() == 0:
        with case.assertLogs("para_core", "INFO") as logs:
            pipe = parallelize_pipe(flux_pipe())
        (text,) = logs.output
        assert re.search(r"batch × ring × ulysses = 1 × 1 × 2 .*4 heads", text)
        assert "init_context_parallel_mesh('cpu', max_batch_dim_size=1, max_ring_dim_size=1)" in text
    else:
        with case.assertNoLogs("para_core", "INFO"):
            pipe = parallelize_pipe(flux_pipe())
    assert mesh_of_plan(pipe.transformer).ranks == 2
    expected = flux_pipe()(**flux_call()).images
    for each in (pipe, parallelize_pipe(flux_pipe(), mesh=dist.group.WORLD)):
        assert relative_error(each(**flux_call()).images, expected) < 1e-5


@pytest.mark.parametrize("world_size", [None, "1"])
def test_without_a_process_group_one_process_works_alone(monkeypatch, world_size):
    pipe = flux_pipe()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE .*2, .*init_process_group"):
        parallelize_pipe(pipe)
    monkeypatch.delenv("WORLD_SIZE")
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    alone = pipe(**flux_call()).images
    assert parallelize_pipe(pipe) is pipe
    assert type(pipe) is FluxPipeline
    assert type(pipe.transformer) is FluxTransformer2DModel
    assert torch.equal(pipe(**flux_call()).images, alone)
    unparallelize_pipe(pipe)


IMAGE = Image.linear_gradient("L").convert("RGB").resize((56, 72))


def raised(call):
    with pytest.raises((RuntimeError, ValueError)) as error:
        call()
    return str(error.value)


def share_transformer():
    """Share a transformer with a second pipeline, which is not parallel until it gets its mesh."""
    options = {"image": IMAGE, "strength": 0.9}
    plain, of_image = flux_pipe()(**flux_call()).images, flux_pipe(FluxImg2ImgPipeline)
    alone = of_image(**flux_call(**options)).images
    torch.manual_seed(0)
    drawn = of_image(**flux_call(**options, generator=None)).images
    mesh, rank = cpu_mesh(1, 2), dist.get_rank()
    pipe = parallelize_pipe(flux_pipe(), mesh=mesh)
    other = FluxImg2ImgPipeline.from_pipe(pipe)
    assert other.transformer is pipe.transformer and type(other) is FluxImg2ImgPipeline
    assert relative_error(other(**flux_call(**options)).images, alone) < 1e-5
    torch.manual_seed(rank)
    error = raised(lambda: other(**flux_call(**options, generator=None)))
    assert re.search(rf"hidden_states: rank 0 .*tensor\[1, 63, {FLUX_CHANNELS}\]", error)
    assert "parallelize_pipe(the_other_pipe, mesh=mesh)" in error
    parallelize_pipe(other, mesh=mesh)
    torch.manual_seed(rank)
    assert relative_error(other(**flux_call(**options, generator=None)).images, drawn) < 1e-5
    assert relative_error(pipe(**flux_call()).images, plain) < 1e-5
    unparallelize_pipe(other)
    assert "parallelize_pipe(pipe, mesh=...)" in raised(lambda: pipe(**flux_call()))
    assert torch.equal(unparallelize_pipe(pipe)(**flux_call()).images, plain)
    # Sharded weights are shared, too.
    for weights, ranks in (("fsdp", mesh), ("tensor", init_context_parallel_mesh("cpu", max_tensor_dim_size=2))):
        pipe = parallelize_pipe(flux_pipe(), mesh=ranks, weights=weights)
        other = parallelize_pipe(FluxImg2ImgPipeline.from_pipe(pipe), mesh=ranks)
        assert other.transformer is pipe.transformer
        assert relative_error(other(**flux_call(**options)).images, alone) < 1e-5
        assert relative_error(pipe(**flux_call()).images, plain) < 1e-5


def exchanges_of(call):
    with mock.patch.object(arguments, "agree", wraps=arguments.agree) as agree:
        call()
    return agree.call_count


def call_without_comparing():
    """Call a pipe that compares nothing between ranks. It still draws equally, and checks itself."""
    pipe = flux_pipe()
    torch.manual_seed(0)
    expected = pipe(**flux_call(generator=None)).images
    for assume_equal in (False, True):
        pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2), assume_equal=assume_equal)
        assert exchanges_of(lambda pipe=pipe: pipe(**flux_call())) == (not assume_equal)
        assert exchanges_of(lambda pipe=pipe: pipe.transformer(**flux_inputs(10, 3))) == (not assume_equal)
    torch.manual_seed(dist.get_rank())
    assert relative_error(pipe(**flux_call(generator=None)).images, expected) < 1e-5
    pipe.transformer = flux_transformer()
    assert re.search(r"pipe\.transformer .*another .*parallelized", raised(lambda: pipe(**flux_call())))


@torch.no_grad()
def call_with_other_inputs():
    """Call a transformer with inputs that differ, then with equal ones, also with NaNs."""
    transformer, is_last = parallelize_transformer(flux_transformer(), mesh=cpu_mesh(1, 2)), dist.get_rank() == 1
    inputs = flux_inputs(37, 7)
    # That each bit of a tensor counts is in tests/distributed/test_fingerprints.py.
    others = {name: x + 1 for name, x in inputs.items()}
    for name, other in [*others.items(), ("hidden_states", inputs["hidden_states"][:, :-1])]:
        with pytest.raises(ValueError, match=rf"{name}: rank 0 .*tensor.*, rank 1 ") as error:
            transformer(**(inputs | ({name: other} if is_last else {})))
        assert str(error.value).count(": rank 0 ") == str(error.value).count(", rank 1 ") == 1, name
    inputs["timestep"] = inputs["timestep"].expand(1)
    assert relative_error(transformer(**inputs)[0], flux_transformer()(**inputs)[0]) < 1e-5
    assert transformer(**{**inputs, "timestep": torch.full((1,), torch.nan)})[0].isnan().all()


JOBS = [live_beside_each_other, parallelize_without_mesh, share_transformer, call_without_comparing]


@pytest.mark.parametrize("job", [*JOBS, call_with_other_inputs])
def test_on_two_ranks(rank_pool, job):
    rank_pool.run(job, 2)
