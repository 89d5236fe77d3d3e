"""The default sizes that the planner counts are those of the first call that diffusers' pipelines make."""

import pytest
import torch

from para_core.adapters.planner.count import count_call, without_data
from para_core.adapters.planner.inputs import default_sizes, make_inputs
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.transformers.registry import MODELS


class FirstCallError(Exception):
    """Ends a generation at the first call of its transformer."""


def stop_at_call(module, args, kwargs):
    (hidden_states,) = args or (kwargs["hidden_states"],)
    raise FirstCallError(hidden_states.shape)


SIZES = ("height", "width", "num_frames", "num_inference_steps", "max_sequence_length")


@pytest.mark.parametrize(
    "name",
    ["auraflow", "chroma", "chronoedit", "cogvideox 1.5", "cogview4", "flux2", "ltx", "mochi", "pixart", "qwen-image"],
)
def test_default_sizes_are_those_of_the_pipeline(name):
    model = PIPELINES[name]
    pipe = model.build()
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.register_forward_pre_hook(stop_at_call, with_kwargs=True)
    with pytest.raises(FirstCallError) as caught:
        pipe(**{key: value for key, value in model.call().items() if key not in SIZES})
    (shape,) = caught.value.args
    sizes, steps = default_sizes(pipe, pipe.transformer, {})
    assert make_inputs(pipe.transformer, sizes)["hidden_states"].shape == shape
    assert steps == len(pipe.scheduler.timesteps)
    if name == "ltx":
        odd, _ = default_sizes(pipe, pipe.transformer, {"height": 96, "width": 160, "frames": 1})
        assert make_inputs(pipe.transformer, odd)["hidden_states"].shape[1] == 3 * 5


def test_default_sizes_of_an_unknown_pipeline_are_those_of_flux():
    pipe = type("WithoutDefaults", (), {"__call__": lambda self, prompt: prompt})()
    sizes, steps = default_sizes(pipe, MODELS["flux"].build(), {})
    assert (sizes.height, sizes.width, sizes.frames, sizes.text, steps) == (1024, 1024, 1, 512, 50)


@pytest.mark.parametrize("name", [pytest.param("cogvideox 1.5", id="CogVideoXTransformer3DModel")])
def test_a_call_with_patches_of_frames_is_counted(name):
    pipe = PIPELINES[name].build()
    sizes, _ = default_sizes(pipe, pipe.transformer, {})
    with without_data(torch.float32):
        assert count_call(pipe.transformer, sizes).attention
