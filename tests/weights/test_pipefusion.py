"""PipeFusion on any number of stages computes the same as a plain loop over patches in one process."""

from contextlib import nullcontext
from functools import reduce
from itertools import chain, repeat
from math import prod
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import UniPCMultistepScheduler
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from para_core import PipeFusion
from para_core.adapters import parallelize_pipe, pipefusion_report, unparallelize_pipe
from para_core.lazy_tensors import Expected, LazyTensor, LiveTensors, materialize
from para_core.plans.plan import Entries, Gather, Plan, Split
from para_core.weights.patch_plan import Frames, PatchPlan, patch_plan
from para_core.weights.patches import Arrival
from tests.tiny import flux_call, flux_inputs, flux_pipe, relative_error
from tests.weights.pipes import generate, make

# Mochi asks for an autocast that the CPU does not have.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:In CPU autocast")]

STEPS = 8
GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}


def run(pipe, name="flux", **call):
    return generate(pipe, name, num_inference_steps=STEPS, **call)


def by_hand(num_patches, warmup_steps=1, cooldown_steps=0, **call):
    """Run the unmodified pipeline, calling its transformer for each patch and keeping the keys in a dict."""
    pipe = flux_pipe()
    forward, held, calls, cache_context = pipe.transformer.forward, {}, {}, mock.MagicMock()
    scaled_dot_product_attention = F.scaled_dot_product_attention

    def transformer(hidden_states, encoder_hidden_states, img_ids, txt_ids, **rest):
        name = cache_context.call_args.args[0]
        calls[name] = calls.get(name, 0) + 1
        whole = calls[name] <= warmup_steps or calls[name] > STEPS - cooldown_steps
        num_text, num_image = encoder_hidden_states.shape[1], hidden_states.shape[1]
        noise = []
        for index, image in enumerate(torch.arange(num_image).tensor_split(1 if whole else num_patches)):
            text = torch.arange(num_text if index == 0 else 0)
            rows, number = torch.cat([text, num_text + image]), [0]

            def attend(query, key, value, *args, rows=rows, number=number, **kwargs):
                stored = held.setdefault((name, number[0]), [torch.empty(0), torch.empty(0)])
                number[0] += 1
                for at, new in enumerate((key, value)):
                    if whole:
                        stored[at] = new.clone(memory_format=torch.contiguous_format)
                    else:
                        stored[at][:, :, rows] = new
                pair = (key, value) if whole else stored
                return scaled_dot_product_attention(query, *pair, *args, **kwargs)

            with mock.patch.object(F, "scaled_dot_product_attention", attend):
                noise += forward(
                    hidden_states=hidden_states[:, image].contiguous(),
                    encoder_hidden_states=encoder_hidden_states[:, text],
                    img_ids=img_ids[image],
                    txt_ids=txt_ids[text],
                    **rest,
                )
        return (torch.cat(noise, dim=1),)

    with mock.patch.multiple(pipe.transformer, forward=transformer, cache_context=cache_context):
        return run(pipe, **call)


@pytest.mark.parametrize(("count", "warmup", "cooldown", "call"), [(5, 2, 3, {}), (3, 1, 0, GUIDED), (4, STEPS, 0, {})])
def test_one_process_equals_patches_by_hand(count, warmup, cooldown, call):
    pipe = parallelize_pipe(flux_pipe(), pipefusion=PipeFusion(count, warmup_steps=warmup, cooldown_steps=cooldown))
    output, report = run(pipe, **call), pipefusion_report(pipe)
    assert torch.equal(output, by_hand(count, warmup, cooldown, **call))
    branches, whole = 2 if call else 1, warmup + cooldown
    assert (report.whole_calls, report.patched_calls) == (branches * whole, branches * (STEPS - whole))
    # Keys and values are 2 · L · B · (T + S) · D numbers of 4 bytes in each branch.
    assert report.key_bytes == branches * 2 * 4 * (13 + 63) * 64 * 4
    exact = run(flux_pipe(), **call)
    # PipeFusion is a good approximation. It is exact if all steps are whole.
    assert torch.equal(output, exact) if whole == STEPS else 0 < relative_error(output, exact) < 0.2


def predictions(name, pipefusion=None):
    """Return the output of each call of the transformer for latents and a time that never change."""
    pipe, outputs = make(name), []
    scheduler = type(pipe.scheduler)

    class Still(scheduler):
        scale_model_input = staticmethod(lambda sample, timestep: sample)  # Bria asks a scheduler of another class.

        def step(self, model_output, timestep, sample, *args, **kwargs):
            outputs.append(model_output.clone())
            scheduler.step(self, model_output, timestep, sample, *args, **kwargs)
            return (sample,)

    def set_time(module, args, kwargs):
        return args, {**kwargs, "timestep": torch.full_like(kwargs["timestep"], 0.7)}

    pipe.scheduler.__class__ = Still
    for module in filter(None, map(pipe.components.get, ("transformer", "transformer_2", "controlnet"))):
        module.register_forward_pre_hook(set_time, with_kwargs=True)
    run(parallelize_pipe(pipe, pipefusion=pipefusion), name)
    if pipefusion is not None:
        # The first call of each of at most two branches of two transformers is whole.
        assert pipefusion_report(pipe).whole_calls <= 4
    return outputs


MODELS = ["wan", "qwen-image", "hunyuan", "cogvideox", "mochi", "flux2 klein", "ovis", "longcat-image", "bria", "ltx"]
MODELS += ["chronoedit", "wan 2.2", "wan, a time step for each token", "cogvideox, rotary", "cogvideox 1.5"]
MODELS += ["qwen-image, editing", "qwen-image, controlnet", "wan, image"]


# Stored keys of equal inputs are those of this step, so patches must give the output of the whole model.
@pytest.mark.parametrize("name", [*MODELS[:3], *(pytest.param(name, marks=pytest.mark.long) for name in MODELS[3:])])
def test_patches_of_equal_inputs_are_exact(name):
    for output, expected in zip(predictions(name, PipeFusion(2)), predictions(name), strict=True):
        assert relative_error(output, expected) < 1e-5


@pytest.mark.parametrize("has_arrived", [False, True])
def test_result_recorded_before_a_write_keeps_its_values(has_arrived):
    # torch.equal, although pointwise, waits for the tensor, and computes nothing that reads it.
    for write in (lambda x: x.add_(1), lambda x: x[0].add_(int(torch.equal(x, x))), lambda x: materialize(x).add_(1)):
        arrival = Arrival(torch.zeros(1, 2), [(0, 1), (1, 1)], LiveTensors())
        x = LazyTensor.make(arrival, Expected(torch.zeros(1, 2, device="meta"), torch.device("cpu")))
        for _ in range(2):
            arrival.add(lambda: torch.ones(1, 1))
        doubled = x.detach().double().clone() * 2
        assert isinstance(doubled, LazyTensor)
        power = reduce(lambda y, _: y * y, range(40), x)  # whose inputs are asked 40 times, not 2 ** 40
        if has_arrived:
            arrival.value()
        assert power.source.is_ready == has_arrived
        write(x)
        assert (doubled.tolist(), x.tolist()) == ([[2, 2]], [[2, 2]])


def over_stages(name, shape, options, call):
    """Return the output and the report, the output of whole steps, and that of stages without PipeFusion."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipe", "batch", "ring", "ulysses"))
    norms = []

    def look(pipe, step, time, tensors):
        # Reading latents on one rank needs no call on the others.
        if dist.get_rank() == 0:
            norms.append(tensors["latents"].norm().item())
        return {}

    pipe = parallelize_pipe(make(name), mesh=mesh, pipefusion=options)
    output, report = run(pipe, name, callback_on_step_end=look, **call), pipefusion_report(pipe)
    assert len(norms) == (STEPS if dist.get_rank() == 0 else 0)
    # The stages stay, and PipeFusion goes.
    others = PipeFusion(2, warmup_steps=STEPS), None
    whole = [run(parallelize_pipe(pipe, mesh=mesh, pipefusion=steps), name, **call) for steps in others]
    return output, report, whole


def check_ranks(rank_pool, name, shape, options, call=None):
    """Compare the ranks with one process. Return whether all have its bits, and the bytes of keys per byte of it."""
    alone, call, pairs = parallelize_pipe(make(name), pipefusion=options), call or {}, []
    expected, report = run(alone, name, **call), pipefusion_report(alone)
    exact = run(unparallelize_pipe(alone), name, **call)
    results = rank_pool.run(over_stages, prod(shape), name, shape, options, call)
    for output, of_rank, whole in results:
        pairs += [(output, expected), *[(each, exact) for each in whole]]
        assert relative_error(output, exact) > 1e-5
        # Ranks along batch share the branches of guidance.
        assert shape[1] * of_rank.whole_calls == report.whole_calls
        assert shape[1] * of_rank.patched_calls == report.patched_calls > 0
        # The first call after a whole one has all of its tokens. The scheduler works on single elements of the others.
        assert name != "flux" or call or of_rank.overlapping_calls == report.patched_calls - 1
    assert max(relative_error(*pair) for pair in pairs) < 1e-5
    keys = sum(of_rank.key_bytes for _, of_rank, _ in results) / report.key_bytes
    return all(torch.equal(*pair) for pair in pairs), keys


# Shapes are pipe × batch × ring × ulysses.
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "shape", "options", "call"),
    [
        ("flux", (2, 1, 1, 1), PipeFusion(3, cooldown_steps=2), GUIDED),
        ("flux", (4, 1, 1, 1), PipeFusion(8, warmup_steps=2), {}),
        ("cogvideox", (2, 1, 1, 1), PipeFusion(2), {}),
    ],
)
def test_any_number_of_stages_equals_one_process(rank_pool, name, shape, options, call):
    # Each rank stores the keys of its own blocks only.
    assert check_ranks(rank_pool, name, shape, options, call) == (True, 1)


def test_ranks_of_a_stage_may_share_each_patch(rank_pool):
    # Each rank holds the keys of all tokens.
    assert check_ranks(rank_pool, "hunyuan", (1, 1, 1, 2), PipeFusion(2))[1] == 2


@pytest.mark.parametrize("fail", [False, True])
def test_no_patched_tensor_outlives_the_call(fail):
    pipe, kept = make("wan"), []
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
    parallelize_pipe(pipe, pipefusion=PipeFusion(2))

    def keep(pipe, step, timestep, tensors):
        kept.append(tensors["latents"])
        with pytest.raises(RuntimeError, match="already running"):
            run(pipe, "wan")
        if fail and step == 6:
            raise KeyError("stop")
        return {}

    with pytest.raises(KeyError) if fail else nullcontext():
        run(pipe, "wan", callback_on_step_end=keep)
    assert pipefusion_report(pipe).patched_calls > 0
    kept += [x for x in pytree.tree_leaves(vars(pipe.scheduler)) if isinstance(x, torch.Tensor)]
    assert all(type(x) is torch.Tensor for x in kept)
    assert all(x.isfinite().all() for x in kept if x.is_floating_point() and x.ndim > 1)


# FLUX has three shapes: all tokens, a patch with text, and a patch without text.
@pytest.mark.long
@torch._dynamo.config.patch(recompile_limit=3)
def test_compiled_block_gives_the_bits_of_eager_patches():
    pipe = parallelize_pipe(make("flux"), pipefusion=PipeFusion(3))
    expected = run(pipe)
    pipe.transformer.single_transformer_blocks[0].compile(backend="eager", fullgraph=True)
    assert torch.equal(run(pipe), expected)
    torch.compiler.reset()


def test_few_steps_switch_it_off_with_a_warning():
    pipe = parallelize_pipe(flux_pipe(), pipefusion=PipeFusion())
    with pytest.warns(UserWarning, match=r"PipeFusion .*FluxPipeline.* 8 steps"), torch.no_grad():
        output = pipe(**flux_call(num_inference_steps=4))[0]
        # A call outside of a generation does not count, and keeps no keys.
        pipe.transformer(**flux_inputs(20, 7))
    assert pipefusion_report(pipe).whole_calls == 4
    assert torch.equal(output, flux_pipe()(**flux_call(num_inference_steps=4))[0])


def fuse_and_run(name, options, change=lambda pipe: None):
    pipe = parallelize_pipe(make(name), pipefusion=options)
    change(pipe)
    run(pipe, name)


def compile_forward(pipe):
    pipe.transformer.forward = torch.compile(pipe.transformer.forward, backend="eager")


def compile_in_its_place(pipe):
    pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)


def attend_once(pipe):
    attention = pipe.transformer.single_transformer_blocks[0].attn
    forwards = chain([attention.forward], repeat(lambda hidden_states, **_: hidden_states))
    attention.forward = lambda **inputs: next(forwards)(**inputs)  # noqa: PLW0108


COMPILED = r"pipe\.transformer .*compile_repeated_blocks\(fullgraph=True\)"


def plan_in_patches(dim, output="", frames=None, **rules):
    plan = Plan(rules, {output: Gather(dim, segment="image")}, ("image",))
    return patch_plan(plan, flux_pipe().transformer, frames)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: plan_in_patches(2), TypeError, "tokens in dim 2"),
        (lambda: plan_in_patches(1, x=Entries((Split(1, like="image", then_replicated=True),))), TypeError, "share a"),
        (lambda: plan_in_patches(1, x=Split(1, "video", together=(2,))), TypeError, "split before"),
        (lambda: plan_in_patches(1, "proj_out", Frames(2, "size")), TypeError, "config has no 'size'"),
        (
            lambda: PatchPlan(Plan({}, {}, ()), "image", "frames", 2, together=2).runs(torch.ones(1, 1, 10, 1, 1), 6),
            ValueError,
            "5 groups of 2 frames .*num_patches=6 ",
        ),
        (lambda: PipeFusion(warmup_steps=0), ValueError, r"warmup_steps=0\).*1"),
        (lambda: PipeFusion(1), ValueError, "num_patches=1.*at least 2, .*leave pipefusion= out"),
        (lambda: PipeFusion(2.0), TypeError, r"num_patches=2\.0\)"),
        (lambda: fuse_and_run("stable diffusion 3", PipeFusion()), TypeError, "PipeFusion .*SD3Transformer2DModel"),
        (lambda: fuse_and_run("flux", PipeFusion(64)), ValueError, "63 tokens .*num_patches=64 "),
        (lambda: fuse_and_run("hunyuan", PipeFusion(4)), ValueError, "3 frames .*num_patches=4 "),
        (lambda: fuse_and_run("flux", PipeFusion(), attend_once), RuntimeError, "4 attention .* and 3 for a"),
        (lambda: fuse_and_run("flux", PipeFusion(), compile_forward), RuntimeError, COMPILED),
        (lambda: fuse_and_run("mochi", PipeFusion(), compile_in_its_place), RuntimeError, COMPILED),
        (lambda: fuse_and_run("flux", PipeFusion(), lambda pipe: pipe.transformer(None)), RuntimeError, "no_grad"),
    ],
)
def test_invalid_use_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
