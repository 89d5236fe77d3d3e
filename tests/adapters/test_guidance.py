"""Guidance over the ``batch`` mesh dim: each half of the ranks computes one branch, and the images stay the same."""

import copy

import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

from para_core.adapters import AttentionSchedule, apply_cache_on_pipe, parallelize_pipe, unparallelize_pipe
from para_core.adapters.cfg.output_form import predict_output
from tests.adapters.test_pipelines import PIPELINES
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer, relative_error

GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 2.0}
# These pipelines guide one branch after the other. Values are their options, and whether a rank has half of the calls
# in the first generation, or only in later ones, when the output's shape is known.
SEQUENTIAL = {
    "flux": (GUIDED, True),
    "wan 2.2": ({}, True),
    "qwen-image": ({}, True),
    # It mixes each branch with the latents before it calls the next one.
    "cosmos 2, image": ({}, True),
    "hunyuan": ({"negative_prompt": "a blue square", "true_cfg_scale": 3.0}, True),
    "cosmos 3": ({}, False),
}


def generate_counting(name, *shape):
    """Return the latents and this rank's transformer calls of four generations: with another size, then undone."""
    tiny, counts, outs = PIPELINES[name], [], []
    pipe = tiny.build()
    if shape:
        parallelize_pipe(pipe, mesh=cpu_mesh(*shape[1:], batch=shape[0]))
    for transformer in (pipe.transformer, getattr(pipe, "transformer_2", None)):
        if transformer is not None:
            transformer.proj_out.register_forward_hook(lambda *_: counts.__setitem__(-1, counts[-1] + 1))
    for options in ({}, {}, {"height": 32}, {}):
        if len(outs) == 3:
            unparallelize_pipe(pipe)
        counts.append(0)
        outs.append(pipe(**tiny.call(**{**SEQUENTIAL[name][0], **options}))[0])
    return outs, counts


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 2), (3, 1, 1)])
@pytest.mark.parametrize("name", SEQUENTIAL)
def test_each_rank_computes_half_of_the_calls(rank_pool, name, shape):
    expected, alone = generate_counting(name)
    for rank, (outs, counts) in enumerate(rank_pool.run(generate_counting, torch.Size(shape).numel(), name, *shape)):
        assert max(relative_error(*pair) for pair in zip(outs, expected, strict=True)) < 1e-5
        # The third of three ranks has no branch.
        has_branch = rank // (shape[1] * shape[2]) < 2
        half = [count // 2 * has_branch for count in alone[:3]] + alone[3:]
        assert counts[1] == half[1] and counts[3] == half[3]
        assert counts == half or not SEQUENTIAL[name][1]


def misuse_and_swap():
    """Call the transformer with an unknown argument, read latents on one rank, and undo after a swap."""
    schedule = AttentionSchedule("math", first=0, last=0)
    pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 1, batch=2), backend=schedule)
    expected = pipe(**flux_call(**GUIDED)).images
    component, steps = pipe.transformer, []

    def look(pipe, step, timestep, tensors):
        if dist.get_rank() == 0:
            steps.append(float(tensors["latents"].norm()))
        # A user who writes a file on one rank may wait for the others like this.
        dist.barrier()
        return {}

    def mistaken(pipe, step, timestep, tensors):
        component(**flux_inputs(4, 3), return_dict=False)
        component(**flux_inputs(4, 3), return_dict=False, guidance_of_another_model=3.0)

    with pytest.raises(TypeError, match="unexpected keyword argument 'guidance_of_another_model'"):
        pipe(**flux_call(**GUIDED, callback_on_step_end=mistaken))
    # Without guidance only the callback needs the results of a step.
    with pytest.warns(UserWarning, match=r"guidance.* 2 ranks .*'batch'") as caught:
        out = pipe(**flux_call(callback_on_step_end=look)).images
    assert len(caught) == 1
    assert (len(steps), steps[-1:]) == ((2, [float(out.norm())]) if dist.get_rank() == 0 else (0, []))
    error = relative_error(pipe(**flux_call(**GUIDED)).images, expected)
    pipe.transformer = flux_transformer()
    unparallelize_pipe(pipe)
    return error, type(component) is FluxTransformer2DModel


def test_callbacks_may_read_latents_or_raise_and_swapped_transformer_is_unwrapped(rank_pool):
    assert rank_pool.run(misuse_and_swap, 2) == [(0.0, True)] * 2


def draw_in_callback(batch, threshold):
    """Return the images of a pipeline and of a second one with its transformer, which a callback runs."""
    pipe = flux_pipe()
    other = type(pipe)(**{**pipe.components, "scheduler": type(pipe.scheduler).from_config(pipe.scheduler.config)})
    other.set_progress_bar_config(disable=True)
    if batch > 1:
        for each in (pipe, other):
            parallelize_pipe(each, mesh=cpu_mesh(1, 1, batch=batch))
    if threshold is not None:
        apply_cache_on_pipe(pipe, residual_diff_threshold=threshold, warmup_steps=1)
    images, outer = [], []

    def draw_other(pipe, step, timestep, tensors):
        if step == 1:
            images.append(other(**flux_call(**GUIDED)).images)
        return {}

    for _ in range(2):
        outer.append(pipe(**flux_call(**GUIDED, num_inference_steps=3, callback_on_step_end=draw_other)).images)
    return images + outer


@pytest.mark.sample(1)
@pytest.mark.parametrize("threshold", [None, 0.7])
def test_callback_draws_with_another_pipe_of_the_transformer(rank_pool, threshold):
    expected = draw_in_callback(1, threshold)
    for images in rank_pool.run(draw_in_callback, 2, 2, threshold):
        errors = [relative_error(*pair) for pair in zip(images, expected, strict=True)]
        assert max(errors) < 1e-5, errors


class Numbered(FluxTransformer2DModel):
    def forward(self, **inputs):
        return *super().forward(**inputs, return_dict=False), 7


def test_model_unlike_its_config_is_not_predicted():
    model, inputs = flux_transformer(), flux_inputs(4, 3)
    eightbit, wider, patched, hooked, early, adapted = (copy.deepcopy(model) for _ in range(6))
    eightbit.to(torch.float8_e4m3fn)
    wider.proj_out = torch.nn.Linear(wider.proj_out.in_features, 7)
    patched.forward = lambda **_: None
    hooked.register_forward_hook(lambda *_: None)
    early.register_forward_pre_hook(lambda *_: None)
    adapted.add_adapter(LoraConfig(target_modules=["to_q"]))
    assert predict_output(adapted, (), inputs) is not None
    for changed in (eightbit, wider, patched, hooked, early, torch.compile(model)):
        assert predict_output(changed, (), inputs) is None
    assert predict_output(Numbered(**model.config), (), inputs) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert predict_output(model, (), inputs) is None
    assert predict_output(model, (), {**inputs, "joint_attention_kwargs": {"store": object()}}) is None
