"""A quantized file as people download it computes the same on two ranks as alone, or is refused with a reason."""

import warnings

import pytest
import torch
from peft import LoraConfig

from para_core import init_context_parallel_mesh
from para_core.adapters import apply_cache_on_pipe, parallelize_pipe, unparallelize_pipe
from para_core.adapters.inspect.components import stack_of
from para_core.adapters.registry import tensor_plan_for
from para_core.adapters.weights.quantize import quantize_transformers
from para_core.weights.fsdp import check_shardable
from para_core.weights.parameters import plain_tensors
from para_core.weights.stages import check_freeable
from para_core.weights.tensor_checks import check_tensor_plan
from tests.rank_pool import heartbeat
from tests.tiny import flux_pipe, flux_transformer, relative_error
from tests.weights.pipes import generate
from tests.weights.quantized_files import BITS_4, BITS_8, load, require_package, write

KINDS = ("gguf", "fp8", "torchao", BITS_4, BITS_8, "nunchaku", "nvfp4")
ULYSSES, RING, STAGES = {"ulysses": 2}, {"ring": 2}, {"pipe": 2}


@pytest.fixture
def folder(kind, tmp_path):
    require_package(kind)
    write(kind, tmp_path)
    return tmp_path


def add_lora(pipe):
    pipe.transformer.add_adapter(LoraConfig(r=3, target_modules=["to_q", "to_v"], init_lora_weights=False))
    generator = torch.Generator().manual_seed(11)
    for name, x in sorted(pipe.transformer.named_parameters()):
        if "lora_" in name:
            x.data.copy_(0.2 * torch.randn(x.shape, generator=generator))


def cache(pipe):
    apply_cache_on_pipe(pipe, residual_diff_threshold=10.0, warmup_steps=1)


def compile_blocks(pipe):
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")


# Each way has the steps of the user, and the mesh and options of parallelize_pipe.
WAYS = {
    "ulysses": (None, ULYSSES, {}),
    "ring, cached": (cache, RING, {}),
    "with a LoRA": (add_lora, ULYSSES, {}),
    "blocks compiled": (compile_blocks, ULYSSES, {}),
    "fsdp": (None, ULYSSES, {"weights": "fsdp"}),
    "stages": (None, STAGES, {}),
    "blocks offloaded": (None, ULYSSES, {"offload": "blocks"}),
}


def parts_of(pipe):
    return {name: [y.clone() for y in plain_tensors(x.detach())] for name, x in pipe.transformer.named_parameters()}


def generate_in(kind, folder, ways, parallel):
    """Return the image of each way, the image after undoing everything, and whether the weights then have the same
    bits.
    """
    outs = {}
    for way in ways:
        heartbeat()
        change, dims, options = WAYS[way]
        pipe = flux_pipe(shared_parts=False, transformer=load(kind, folder))
        before = parts_of(pipe)
        if parallel:
            sizes = {f"max_{name}_dim_size": size for name, size in dims.items()}
            parallelize_pipe(pipe, mesh=init_context_parallel_mesh("cpu", **sizes), **options)
        if change is not None:
            change(pipe)
        images = [generate(pipe, "flux", num_inference_steps=3)]
        # Nothing undoes sharded weights and stages.
        if parallel and "weights" not in options and "pipe" not in dims:
            unparallelize_pipe(pipe)
            images.append(generate(pipe, "flux", num_inference_steps=3))
        after = parts_of(pipe)
        same = all(
            torch.equal(x.view(torch.uint8), y.view(torch.uint8))
            for name, parts in before.items()
            for x, y in zip(parts, after.get(name, parts), strict=True)
        )
        outs[way] = images, same
    return outs


# Each kind of file has its exact ways. diffusers loads no LoRA onto weights in fp8, also on one device.
EXACT = {
    "gguf": ("ulysses", "ring, cached", "with a LoRA", "blocks offloaded"),
    "fp8": ("stages", "ring, cached", "blocks offloaded"),
    "torchao": ("stages", "ring, cached"),
    BITS_4: ("ring, cached", "with a LoRA"),
    BITS_8: ("ring, cached", "with a LoRA"),
    "nunchaku": ("fsdp", "stages", "ring, cached", "blocks compiled"),
    "nvfp4": ("fsdp", "stages", "ring, cached", "blocks offloaded"),
}


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind == "nunchaku" else ()) for kind in KINDS]
)
def test_a_quantized_file_is_exact_on_ranks(rank_pool, kind, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = generate_in(kind, folder, EXACT[kind], False)
    for outs in rank_pool.run(generate_in, 2, kind, folder, EXACT[kind], True):
        for way, (images, same) in outs.items():
            errors = [relative_error(image, expected[way][0][0]) for image in images]
            assert max(errors) < 1e-5, (way, errors)
            assert same, way


CHECKS = {
    "fsdp": check_shardable,
    "tensor": lambda module: check_tensor_plan(module, tensor_plan_for(module), 2),
    "stages": lambda module: check_freeable(module, stack_of(module)),
    "quantize": lambda module: quantize_transformers(flux_pipe(transformer=module), "int8"),
}
REFUSED = {
    "gguf": ("fsdp", "tensor", "stages", "quantize"),
    "fp8": ("fsdp", "tensor", "quantize"),
    "torchao": ("fsdp", "tensor", "quantize"),
    BITS_4: ("fsdp", "tensor", "stages", "quantize"),
    BITS_8: ("fsdp", "tensor", "stages", "quantize"),
    "nunchaku": ("tensor",),
    "nvfp4": ("tensor", "quantize"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_that_cannot_be_sharded_are_refused(kind, folder):
    transformer = load(kind, folder)
    before = {name: (type(x), x.data_ptr()) for name, x in transformer.named_parameters()}
    for check, refuse in CHECKS.items():
        if check in REFUSED[kind]:
            with pytest.raises(ValueError, match=r"transformer_blocks\.0|time_text_embed"):
                refuse(transformer)

            assert {name: (type(x), x.data_ptr()) for name, x in transformer.named_parameters()} == before
        elif check != "quantize":
            refuse(transformer)


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_other_linear_layer_is_not_sharded_over_heads():
    transformer = flux_transformer()
    linear = transformer.transformer_blocks[0].attn.to_q
    transformer.transformer_blocks[0].attn.to_q = Doubled(linear.in_features, linear.out_features)
    with pytest.raises(ValueError, match=r"transformer_blocks\.0\.attn\.to_q .*Doubled"):
        check_tensor_plan(transformer, tensor_plan_for(transformer), 2)
