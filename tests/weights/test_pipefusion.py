"""PipeFusion on any number of stages computes the same as a plain loop over patches in one process."""

import copy
import warnings
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from para_core import PipeFusion, init_context_parallel_mesh
from para_core.adapters import (
    apply_cache_on_pipe,
    parallelize_pipe,
    pipefusion_report,
    unparallelize_pipe,
)
from para_core.lazy_tensors import Expected, LazyTensor, LiveTensors
from para_core.weights.patch_plan import patch_runs
from para_core.weights.patches import Arrival
from tests.tiny import flux_call, flux_pipe, relative_error
from zoo.tiny.pipelines import PIPELINES

# Mochi asks for an autocast that the CPU does not have.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:In CPU autocast")]

STEPS = 9
GUIDED = {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}


def run(pipe, **options):
    return pipe(**flux_call(num_inference_steps=STEPS, **options))[0]


# -- References: patches by hand.


def by_hand(num_patches, warmup_steps=1, cooldown_steps=0, **options):
    """Run the unmodified pipeline, calling its transformer for each patch and keeping the keys in a dict."""
    pipe = flux_pipe()
    forward, held, calls, branch = pipe.transformer.forward, {}, {}, []
    scaled_dot_product_attention = F.scaled_dot_product_attention

    def transformer(hidden_states, encoder_hidden_states, img_ids, txt_ids, **rest):
        name = branch[-1]
        calls[name] = calls.get(name, 0) + 1
        whole = calls[name] <= warmup_steps or calls[name] > STEPS - cooldown_steps
        num_text, num_image = encoder_hidden_states.shape[1], hidden_states.shape[1]
        patches = [range(num_image)] if whole else torch.arange(num_image).tensor_split(num_patches)
        noise = []
        for index, patch in enumerate(patches):
            image = torch.as_tensor(list(patch))
            text = torch.arange(num_text if index == 0 else 0)
            rows = torch.cat([text, num_text + image])
            number = [0]

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

    def named(name, **_):
        branch.append(name)
        return mock.MagicMock()

    with (
        mock.patch.object(pipe.transformer, "forward", transformer),
        mock.patch.object(pipe.transformer, "cache_context", named),
    ):
        return run(pipe, **options)


def fused(num_patches, *, pipe=None, mesh=None, **options):
    """Generate with PipeFusion. Return the output and the report."""
    settings, call = split_options(options)
    pipe = pipe or flux_pipe(shared_parts=False)
    parallelize_pipe(pipe, mesh=mesh, pipefusion=PipeFusion(num_patches, **settings))
    out = run(pipe, **call)
    return out, pipefusion_report(pipe)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("num_patches", "options"),
    [
        (1, {}),
        (4, {}),
        (5, {"warmup_steps": 2, "cooldown_steps": 3}),
        (3, GUIDED),
    ],
)
def test_one_process_equals_patches_by_hand(num_patches, options):
    settings, call = split_options(options)
    output, report = fused(num_patches, **options)
    expected = by_hand(num_patches, **options)
    assert torch.equal(output, expected)
    branches = 2 if "negative_prompt" in options else 1
    whole = settings.get("warmup_steps", 1) + settings.get("cooldown_steps", 0)
    assert (report.whole_calls, report.patched_calls) == (branches * whole, branches * (STEPS - whole))
    exact = run(flux_pipe(), **call)
    # PipeFusion is a good approximation. With one patch it is exact, because all keys are from the same step.
    assert torch.equal(output, exact) if num_patches == 1 else 0 < relative_error(output, exact) < 0.2


def test_whole_steps_only_are_exact():
    output, report = fused(4, warmup_steps=STEPS)
    assert torch.equal(output, run(flux_pipe()))
    assert report.patched_calls == 0


@dataclass(frozen=True)
class Cuts:
    """The dims of a model's token tensors, by which hooks split them into patches.

    Args:
        first: the first block, whose ``hidden_states`` is split.
        outputs: further outputs to split: the module, the index of its output, and the dim.
        dim: the dim of latents and output along which patches are split.
        text_first: whether text comes first in a joint sequence.
        behind_text: whether ``patch_embed`` returns text and video in one tensor, of which the video is split.
    """

    first: str
    outputs: tuple[tuple[str, int, int], ...] = ()
    dim: int = 2
    text_first: bool = False
    behind_text: bool = False


CUTS = {
    "wan": Cuts("blocks.0", (("rope", 0, 1), ("rope", 1, 1))),
    "hunyuan": Cuts("transformer_blocks.0", (("rope", 0, 0), ("rope", 1, 0))),
    "cogvideox": Cuts("", dim=1, text_first=True, behind_text=True),
    "mochi": Cuts("transformer_blocks.0", (("rope", 0, 0), ("rope", 1, 0))),
    "qwen-image": Cuts("transformer_blocks.0", (("pos_embed", 0, 0),), dim=1, text_first=True),
}


def by_hooks(name, num_patches):
    """Run the unmodified pipeline, calling its transformer for each patch. Hooks split the tensors, and a dict keeps
    the keys.

    Every patch has the whole text.
    """
    pipe, cuts = PIPELINES[name].build(), CUTS[name]
    model = pipe.transformer
    forward, held, calls, branch = model.forward, {}, {}, []
    scaled_dot_product_attention = F.scaled_dot_product_attention
    now = {"block": False}

    def of_image(x, dim):
        return x if now["whole"] else x.index_select(dim, now["image"])

    def cut_first(module, args, kwargs):
        if args:
            return (of_image(args[0], 1), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": of_image(kwargs["hidden_states"], 1)}

    def cut_output(module, args, output, index, dim):
        parts = list(output)
        parts[index] = of_image(parts[index], dim)
        return tuple(parts)

    def cut_video(module, args, output):
        video = now["total"]
        return torch.cat([output[:, :-video], of_image(output[:, -video:], 1)], dim=1)

    def fill(module, args, output):
        if now["whole"]:
            return output
        return output.new_zeros(output.shape[0], now["total"], output.shape[2]).index_copy(1, now["image"], output)

    def attend(query, key, value, attn_mask=None, **kwargs):
        if not now["block"] or query.shape[-2] != key.shape[-2]:
            return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **kwargs)
        stored = held.setdefault((now["branch"], now["number"]), {})
        now["number"] += 1
        if now["whole"]:
            stored.update(key=key.clone(), value=value.clone(), mask=attn_mask)
        else:
            num_text = key.shape[-2] - len(now["image"])
            start = num_text if cuts.text_first else 0
            text = torch.arange(num_text) + (0 if cuts.text_first else now["total"])
            parts = [text, start + now["image"]] if cuts.text_first else [start + now["image"], text]
            rows = torch.cat(parts)
            stored["key"][:, :, rows], stored["value"][:, :, rows] = key, value
            key, value, attn_mask = stored["key"], stored["value"], stored["mask"]
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **kwargs)

    def inside(module, args, kwargs):
        now["block"] = True

    def outside(module, args, output):
        now["block"] = False

    for module_name, index, dim in cuts.outputs:
        model.get_submodule(module_name).register_forward_hook(
            lambda module, args, output, index=index, dim=dim: cut_output(module, args, output, index, dim)
        )
    if cuts.first:
        model.get_submodule(cuts.first).register_forward_pre_hook(cut_first, with_kwargs=True)
    if cuts.behind_text:
        model.patch_embed.register_forward_hook(cut_video)
    model.proj_out.register_forward_hook(fill)
    for kind in ("blocks", "transformer_blocks", "single_transformer_blocks"):
        for block in getattr(model, kind, ()):
            block.register_forward_pre_hook(inside, with_kwargs=True)
            block.register_forward_hook(outside)

    def transformer(hidden_states, **rest):
        now["branch"] = branch[-1] if branch else ""
        calls[now["branch"]] = calls.get(now["branch"], 0) + 1
        now["whole"] = calls[now["branch"]] == 1
        entries = hidden_states.shape[cuts.dim]
        now["total"] = entries if hidden_states.ndim == 3 else NUM_TOKENS
        patches, noise = torch.arange(entries).tensor_split(1 if now["whole"] else num_patches), []
        for patch in patches:
            each = now["total"] // entries
            now.update(number=0, block=False, image=torch.arange(patch[0] * each, (patch[-1] + 1) * each))
            (output,) = forward(hidden_states, **rest)
            noise.append(output.index_select(cuts.dim, patch))
        return (torch.cat(noise, dim=cuts.dim),)

    def named(name, **_):
        branch.append(name)
        return mock.MagicMock()

    with (
        mock.patch.object(model, "forward", transformer),
        mock.patch.object(model, "cache_context", named),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
    ):
        return latents_of(pipe, name)


# The tiny videos have 3 frames of 3 × 5 tokens.
NUM_TOKENS = 45


def latents_of(pipe, name):
    return torch.as_tensor(pipe(**PIPELINES[name].call(num_inference_steps=STEPS))[0])


@pytest.mark.parametrize(
    "name",
    ["wan", "qwen-image", *[pytest.param(name, marks=pytest.mark.long) for name in ("hunyuan", "cogvideox", "mochi")]],
)
def test_one_process_equals_patches_by_hooks(name):
    pipe = parallelize_pipe(PIPELINES[name].build(), pipefusion=PipeFusion(2))
    output, exact = latents_of(pipe, name), latents_of(PIPELINES[name].build(), name)
    assert torch.equal(output, by_hooks(name, 2))
    assert 0 < relative_error(output, exact) < 0.1
    assert pipefusion_report(pipe).patched_calls % (STEPS - 1) == 0
    assert torch.equal(latents_of(unparallelize_pipe(pipe), name), exact)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *(
            "flux2 klein",
            "ovis",
            "longcat-image",
            "bria",
            "ltx",
            "chronoedit",
            "wan 2.2",
            "wan, a time step for each token",
        ),
        *("cogvideox, rotary", "cogvideox 1.5", "qwen-image, editing", "qwen-image, controlnet", "wan, image"),
    ],
)
def test_one_patch_is_exact_and_two_are_near(name):
    """Check models that join text and image in another order or in one tensor: wrongly split rows would give large
    errors.
    """

    def of(*fused):
        pipe = PIPELINES[name].build()
        for options in fused:
            parallelize_pipe(pipe, pipefusion=options)
        return latents_of(pipe, name)

    exact = of()
    assert torch.equal(of(PipeFusion(1)), exact)
    assert 0 < relative_error(of(PipeFusion(2)), exact) < 0.1


# -- Over stages.


def split_options(options):
    """Return the settings of PipeFusion, and the arguments of the call."""
    names = ("warmup_steps", "cooldown_steps")
    settings = {name: x for name, x in options.items() if name in names}
    return settings, {name: x for name, x in options.items() if name not in names}


def over_stages(num_patches, size, options):
    shape = (size, dist.get_world_size() // size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pipe", "batch"))
    pipe, norms = flux_pipe(shared_parts=False), []

    def look(pipe, step, time, tensors):
        # Reading latents on one rank needs no call on the others.
        if dist.get_rank() == 0:
            norms.append(tensors["latents"].norm().item())
        return {}

    output, report = fused(num_patches, pipe=pipe, mesh=mesh, **options)
    call = split_options(options)[1]
    again = run(pipe, callback_on_step_end=look, **call)
    assert len(norms) == (STEPS if dist.get_rank() == 0 else 0)
    # The stages stay, and PipeFusion goes.
    parallelize_pipe(pipe, mesh=mesh)
    return output, again, report, run(pipe, **call)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("num_patches", "size", "ranks", "options"),
    [
        pytest.param(4, 2, 2, {}, marks=pytest.mark.long),
        (3, 2, 2, {"cooldown_steps": 2, **GUIDED}),
        (8, 4, 4, {"warmup_steps": 2}),
        pytest.param(2, 4, 4, GUIDED, marks=pytest.mark.long),
        # Two ranks of each stage share the branches of guidance.
        pytest.param(3, 2, 4, GUIDED, marks=pytest.mark.long),
    ],
)
def test_any_number_of_stages_equals_one_process(rank_pool, num_patches, size, ranks, options):
    expected, alone = fused(num_patches, **options)
    plain = run(flux_pipe(), **split_options(options)[1])
    total, per_rank = 0, ranks // size
    for output, again, report, undone in rank_pool.run(over_stages, ranks, num_patches, size, options):
        assert torch.equal(output, expected)
        assert torch.equal(again, expected)
        assert torch.equal(undone, plain) if size == 2 else relative_error(undone, plain) < 1e-5
        assert (per_rank * report.whole_calls, per_rank * report.patched_calls) == (
            alone.whole_calls,
            alone.patched_calls,
        )
        total += report.key_bytes
    # Each rank stores the keys of its own blocks only: 2 · L · B · (T + S) · D numbers of 4 bytes in each branch.
    branches = 2 if "negative_prompt" in options else 1
    assert total == alone.key_bytes == branches * 2 * 4 * (13 + 63) * 64 * 4


def model_over_stages(name, num_stages):
    warnings.filterwarnings("ignore", message="In CPU autocast")
    mesh = init_device_mesh("cpu", (num_stages, dist.get_world_size() // num_stages), mesh_dim_names=("pipe", "batch"))
    outputs = []
    for warmup in (STEPS, 1):
        pipe = PIPELINES[name].build()
        parallelize_pipe(pipe, mesh=mesh, pipefusion=PipeFusion(2, warmup_steps=warmup))
        outputs.append(latents_of(pipe, name))
    return *outputs, pipefusion_report(pipe)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("cogvideox", 2),
        pytest.param("wan", 2, marks=pytest.mark.long),
        pytest.param("wan", 4, marks=pytest.mark.long),
        pytest.param("hunyuan", 2, marks=pytest.mark.long),
        pytest.param("cogvideox", 4, marks=pytest.mark.long),
        pytest.param("mochi", 2, marks=pytest.mark.long),
        pytest.param("qwen-image", 2, marks=pytest.mark.long),
    ],
)
def test_stages_of_other_models_equal_one_process(rank_pool, name, size):
    """Compare other models over stages with one process. On 4 ranks, two share the guidance branches or the samples of
    a batch.
    """
    exact = latents_of(PIPELINES[name].build(), name)
    expected = latents_of(parallelize_pipe(PIPELINES[name].build(), pipefusion=PipeFusion(2)), name)
    for whole, output, report in rank_pool.run(model_over_stages, size, name, 2):
        assert torch.equal(whole, exact) if size == 2 else relative_error(whole, exact) < 1e-5
        assert torch.equal(output, expected) if size == 2 else relative_error(output, expected) < 1e-5
        assert report.patched_calls % (STEPS - 1) == 0
        assert report.patched_calls > 0


def shared_by_ranks(name, shape):
    mesh, outputs = init_device_mesh("cpu", shape, mesh_dim_names=("pipe", "ring", "ulysses")), []
    for options in (None, PipeFusion(2, warmup_steps=STEPS), PipeFusion(2)):
        pipe = parallelize_pipe(PIPELINES[name].build(), mesh=mesh, pipefusion=options)
        outputs.append(latents_of(pipe, name))
    report = pipefusion_report(pipe)
    with UsersMode():
        return *outputs, report, latents_of(pipe, name)


class UsersMode(TorchFunctionMode):
    """A mode that changes nothing, like that of ``torch.set_default_device``. Below it the dispatcher does not see
    attention.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("hunyuan", (1, 1, 2)),
        *[
            pytest.param(name, shape, marks=pytest.mark.long)
            for name, shape in [
                ("flux2 klein", (1, 2, 1)),
                ("wan", (2, 1, 2)),
                ("qwen-image", (2, 2, 1)),
                ("cogvideox", (2, 1, 2)),
            ]
        ],
    ],
)
def test_ranks_of_a_stage_may_share_each_patch(rank_pool, name, shape):
    alone = parallelize_pipe(PIPELINES[name].build(), pipefusion=PipeFusion(2))
    expected, report = latents_of(alone, name), pipefusion_report(alone)
    keys = 0
    for exact, whole, output, of_rank, in_mode in rank_pool.run(
        shared_by_ranks, torch.Size(shape).numel(), name, shape
    ):
        assert torch.equal(whole, exact)
        assert torch.equal(in_mode, output)
        assert relative_error(output, expected) < 1e-5 < relative_error(output, exact)
        assert of_rank.patched_calls == report.patched_calls
        keys += of_rank.key_bytes
    # Each rank holds the keys of all tokens.
    assert keys == shape[1] * shape[2] * report.key_bytes


FLOW = {
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
}
# The bool says whether the scheduler works on single elements, so that steps can overlap.
SCHEDULERS = {
    "stochastic Euler": (lambda: FlowMatchEulerDiscreteScheduler(stochastic_sampling=True), True),
    "DPM++ 2M": (lambda: DPMSolverMultistepScheduler(**FLOW), True),
    "UniPC": (lambda: UniPCMultistepScheduler(**FLOW), False),
}


def with_scheduler(name):
    outs = []
    mesh = init_context_parallel_mesh("cpu", max_pipe_dim_size=2)
    for over in (mesh["ulysses"], mesh):
        pipe = flux_pipe(shared_parts=False)
        pipe.scheduler = SCHEDULERS[name][0]()
        parallelize_pipe(pipe, mesh=over, pipefusion=PipeFusion(3))
        torch.manual_seed(0)
        outs.append(run(pipe))
    return *outs, pipefusion_report(pipe).overlapping_calls


@pytest.mark.parametrize(
    "name", ["DPM++ 2M", *[pytest.param(name, marks=pytest.mark.long) for name in ("stochastic Euler", "UniPC")]]
)
def test_other_schedulers_step_on_patches(rank_pool, name):
    for alone, output, overlapping in rank_pool.run(with_scheduler, 2, name):
        assert torch.equal(alone, output)
        assert bool(alone.isfinite().all())
        # The first call after a whole one has all of its tokens.
        assert overlapping == (STEPS - 2 if SCHEDULERS[name][1] else 0)


# -- Tensors that arrive in patches.


def test_patched_modules_run_per_patch():
    rows, computed = patch_runs(5, 2), []
    whole = torch.full((1, 5, 2), torch.nan)
    arrival, tokens = Arrival(whole.clone(), rows, LiveTensors()), torch.randn(1, 5, 2)
    for index, (begin, length) in enumerate(rows):

        def get(index=index, begin=begin, length=length):
            computed.append(index)
            return tokens[:, begin : begin + length]

        arrival.add(get)
    noise = LazyTensor.make(arrival, Expected(whole.to("meta"), whole.device))
    latents = torch.ones(1, 5, 2)
    stepped = (latents + 0.5 * noise).to(torch.float64)
    latents.zero_()
    assert isinstance(stepped, LazyTensor)
    first = stepped.source.up_to(0)
    assert computed == [0]
    assert torch.equal(first[:, :3], (1 + 0.5 * tokens[:, :3]).double())
    assert bool(first[:, 3:].isnan().all())
    # A sum is not a function of single elements, so it waits for all patches.
    assert not isinstance(noise.sum(), LazyTensor)
    assert computed == [0, 1]
    assert torch.equal(torch.stack([stepped, stepped])[1], (1 + 0.5 * tokens).double())
    assert noise.equal(tokens)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"warmup_steps": 0}, ValueError, r"warmup_steps=0\).*1"),
        ({"num_patches": 2.0}, TypeError, r"num_patches=2\.0\)"),
        ({"cooldown_steps": -1}, ValueError, r"cooldown_steps=-1\).*0"),
    ],
)
def test_options_that_mean_nothing_are_errors(options, error, message):
    with pytest.raises(error, match=message):
        PipeFusion(**options)


def test_few_steps_switch_it_off_with_a_warning():
    pipe = parallelize_pipe(flux_pipe(), pipefusion=PipeFusion())
    with pytest.warns(UserWarning, match=r"PipeFusion .*FluxPipeline.* 8 steps"):
        output = pipe(**flux_call(num_inference_steps=4))[0]
    assert torch.equal(output, flux_pipe()(**flux_call(num_inference_steps=4))[0])


def test_incompatible_options_are_refused():
    with pytest.raises(TypeError, match=r"PipeFusion .*SD3Transformer2DModel"):
        parallelize_pipe(PIPELINES["stable diffusion 3"].build(), pipefusion=PipeFusion())
    with pytest.raises(ValueError, match=r"3 frames .*num_patches=4 "):
        latents_of(parallelize_pipe(PIPELINES["hunyuan"].build(), pipefusion=PipeFusion()), "hunyuan")
    with pytest.raises(TypeError, match=r"pipefusion .*4; .*PipeFusion"):
        parallelize_pipe(flux_pipe(), pipefusion=4)
    pipe = apply_cache_on_pipe(parallelize_pipe(flux_pipe(), pipefusion=PipeFusion()))
    with pytest.raises(RuntimeError, match=r"cache.* PipeFusion "):
        run(pipe)
    pipe = parallelize_pipe(flux_pipe(), pipefusion=PipeFusion(64))
    with pytest.raises(ValueError, match=r"63 tokens .*num_patches=64 "):
        run(pipe)


def keep_patches(fail):
    tiny = PIPELINES["wan"]
    pipe = tiny.build()
    pipe.scheduler = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
    parallelize_pipe(pipe, pipefusion=PipeFusion(2))
    kept = []

    def keep(pipe, step, timestep, tensors):
        kept.append(tensors["latents"])
        if fail and step == 6:
            raise KeyError("stop")
        return {}

    try:
        pipe(**tiny.call(num_inference_steps=8, callback_on_step_end=keep))
    except KeyError:
        assert fail
    assert pipefusion_report(pipe).patched_calls > 0
    return [*kept, *[x for x in pytree.tree_leaves(vars(pipe.scheduler)) if isinstance(x, torch.Tensor)]], pipe


@pytest.mark.parametrize("fail", [False, True])
def test_no_patched_tensor_outlives_the_call(fail):
    tensors, pipe = keep_patches(fail)
    assert all(type(x) is torch.Tensor for x in tensors)
    assert all(x.isfinite().all() for x in tensors if x.is_floating_point() and x.ndim > 1)
    copy.deepcopy(pipe.scheduler)
