"""A pipeline that torchao quantizes while it is loaded computes the same on several ranks as in one process."""

from math import prod

import pytest
import torch
from diffusers import FluxPipeline, TorchAoConfig
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import quantize_

from para_core import init_context_parallel_mesh
from para_core.adapters import from_pretrained_sharded, parallelize_pipe
from para_core.adapters.weights.quantize import loading_config, torchao_config
from para_core.option_values import require_quantize_fits
from para_core.weights.parameters import plain_tensors
from tests.tiny import relative_error
from tests.weights.pipes import generate, make

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("flux")
    make("flux").save_pretrained(path)
    return path


def mesh_of(dims):
    return init_context_parallel_mesh("cpu", **{f"max_{name}_dim_size": size for name, size in dims.items()})


def quantized_alone(folder, scheme, weights):
    pipe = FluxPipeline.from_pretrained(folder, dtype=torch.float32)
    if weights == "fsdp":
        quantize_(pipe.transformer.transformer_blocks, int8_weight_only_quantized_training())
        quantize_(pipe.transformer.single_transformer_blocks, int8_weight_only_quantized_training())
    else:
        quantize_(pipe.transformer, torchao_config(scheme))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def weights_of(pipe):
    return {
        name: [part.clone() for part in plain_tensors(x.detach())] for name, x in pipe.transformer.named_parameters()
    }


def load(folder, scheme, weights, dims, placement):
    mesh = mesh_of(dims)
    if weights is None:
        pipe = FluxPipeline.from_pretrained(folder, dtype=torch.float32, quantization_config=loading_config(scheme))
    else:
        pipe = from_pretrained_sharded(
            FluxPipeline, folder, mesh=mesh, weights=weights, quantize=scheme, dtype=torch.float32
        )
    pipe.set_progress_bar_config(disable=True)
    parallelize_pipe(pipe, mesh=mesh, text_encoders=placement)
    return [generate(pipe, "flux") for _ in range(2)]


CASES = [
    ("int8", None, {"ulysses": 2}),
    ("fp8", None, {"ring": 2}),
    ("int8", "fsdp", {"ulysses": 2}),
    ("int8", "tensor", {"tensor": 2}),
    ("fp8", "tensor", {"tensor": 2}),
    ("int8", "stages", {"pipe": 2}),
    ("fp8", "stages", {"pipe": 2}),
    ("int8", "fsdp", {"ring": 2, "ulysses": 2}),
    ("int8", "tensor", {"ring": 2, "tensor": 2}),
]


def placed_cases():
    """Yield every case with every placement of the text encoders.

    The default run has each case with one placement.
    """
    placements = [None, "offload", "first"]
    for index, (scheme, weights, dims) in enumerate(CASES):
        for number, placement in enumerate(placements):
            marks = () if number == index % 3 else pytest.mark.long
            yield pytest.param(scheme, weights, dims, placement, marks=marks)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("scheme", "weights", "dims", "placement"), [*placed_cases()])
def test_quantized_weights_equal_one_process(rank_pool, folder, scheme, weights, dims, placement):
    expected = generate(quantized_alone(folder, scheme, weights), "flux")
    for outs in rank_pool.run(load, prod(dims.values()), folder, scheme, weights, dims, placement):
        assert max(relative_error(out, expected) for out in outs) < 1e-5


@pytest.mark.parametrize(
    ("scheme", "weights"), [("fp8", "fsdp"), ("int8-dynamic", "fsdp"), ("int8-dynamic", "tensor"), ("int4", None)]
)
def test_a_scheme_that_does_not_go_with_the_sharding_is_refused(scheme, weights):
    with pytest.raises(ValueError, match="quantize"):
        require_quantize_fits(scheme, weights)


def test_quantizing_changes_the_result(folder):
    expected = generate(make("flux"), "flux")
    for scheme in ("int8", "fp8", "int8-dynamic"):
        assert 1e-3 < relative_error(generate(quantized_alone(folder, scheme, None), "flux"), expected) < 0.2


def test_loading_config_equals_quantize(folder):
    config = loading_config("int8")
    assert isinstance(config.quant_mapping["transformer"], TorchAoConfig)
    loaded = FluxPipeline.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    for name, parts in weights_of(quantized_alone(folder, "int8", None)).items():
        assert all(map(torch.equal, parts, weights_of(loaded)[name])), name
