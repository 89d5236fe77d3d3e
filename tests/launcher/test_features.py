"""Launched pipelines of all kinds: videos, modular ones, caches, compilation, sharded weights, LoRAs, verify."""

import numpy as np
import pytest
import torch

from para_core import launch
from tests.modular_folders import plain_modular, save_modular
from zoo.tiny.pipelines import PIPELINES


def result(output):
    """Return the frames or images of an output as an array."""
    samples = output.frames if hasattr(output, "frames") else output.images
    return np.asarray(samples, dtype=np.float64)


def call(pipe, name, **options):
    arguments = {**PIPELINES[name].call(), "output_type": "np", "generator": torch.Generator().manual_seed(3)}
    return result(pipe(**{**arguments, **options}))


def loading(name, **options):
    """Return a function that loads the tiny pipeline ``name``, and makes it parallel with ``options``."""

    def load():
        from para_core.adapters import parallelize_pipe
        from zoo.tiny.pipelines import PIPELINES

        return parallelize_pipe(PIPELINES[name].build(), **options)

    return load


def difference(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


def _raise(pipe, step, timestep, tensors):
    raise ValueError("own")


@pytest.mark.parametrize(
    "name", ["wan", *(pytest.param(x, marks=pytest.mark.long) for x in ("qwen-image", "ltx", "hunyuan", "mochi"))]
)
def test_pipelines_are_those_of_one_process(name):
    expected = call(PIPELINES[name].build(), name)
    with launch(loading(name), ranks=2, progress=False) as pipe:
        assert difference(call(pipe, name), expected) < 1e-4
        steps = []
        call(pipe, name, callback_on_step_end=lambda pipe, step, timestep, tensors: steps.append(step) or tensors)
        assert steps == list(range(PIPELINES[name].call()["num_inference_steps"]))
        with pytest.raises(ValueError, match="own"):
            call(pipe, name, callback_on_step_end=_raise)


def add_cache(pipe):
    from para_core.adapters import apply_cache_on_pipe

    apply_cache_on_pipe(pipe, residual_diff_threshold=0.4)


def add_lora(pipe):
    from peft import LoraConfig

    pipe.transformer.add_adapter(LoraConfig(r=2, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in pipe.transformer.named_parameters():
        if "lora" in name:
            parameter.data.normal_(generator=generator)


def compile_whole(pipe):
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="aot_eager")


# Options of parallelize_pipe, what run() changes after it, and whether this changes the video.
FEATURES = {
    "verify": ({"verify": True}, id, False),
    "fsdp": ({"weights": "fsdp"}, id, False),
    "a cache": ({}, add_cache, True),
    "a LoRA": ({}, add_lora, True),
    "compiled": ({}, compile_whole, False),
}


@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=pytest.mark.long if name == "compiled" else ()) for name in FEATURES]
)
def test_features_are_those_of_one_process(feature):
    options, change, is_other = FEATURES[feature]
    alone = PIPELINES["wan"].build()
    expected = plain = call(alone, "wan", num_inference_steps=8)
    if is_other:
        change(alone)
        expected = call(alone, "wan", num_inference_steps=8)
        assert difference(expected, plain) > 1e-4
    with launch(loading("wan", **options), ranks=2, progress=False) as pipe:
        pipe.run(change)
        assert difference(call(pipe, "wan", num_inference_steps=8), expected) < 1e-4


def test_modular_pipeline_is_exact_and_its_steps_are_seen(tmp_path):
    save_modular("flux", str(tmp_path))
    arguments = {"prompt": "a red circle", "height": 64, "width": 64, "num_inference_steps": 3}

    def load():
        import torch
        from diffusers import ModularPipeline

        from para_core.adapters import parallelize_pipe

        pipe = ModularPipeline.from_pretrained(str(tmp_path))
        pipe.load_components(dtype=torch.float32)
        return parallelize_pipe(pipe)

    expected = plain_modular(str(tmp_path), "images", seed=7, **arguments)
    seen = []
    with launch(load, ranks=2, progress=lambda done, total: seen.append((done, total))) as pipe:
        images = pipe(output="images", output_type="pil", generator=torch.Generator().manual_seed(7), **arguments)
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert difference(np.asarray(images[0], dtype=float), np.asarray(expected[0], dtype=float)) < 0.01
