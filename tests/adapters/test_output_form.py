"""The output of a model call is predicted before it is computed, without changing the model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from para_core.adapters.cfg.output_form import meta_output
from tests.adapters.test_transformers import BATCHED
from tests.tiny import flux_inputs, flux_transformer
from zoo.tiny.transformers.registry import MODELS

# The outputs of these models cannot be predicted, because the models read values of their arguments.
UNKNOWN = {"framepack", "framepack, one sample", "hunyuan 1.5", "hunyuan 1.5, image", "lumina2", "glm-image"}
UNKNOWN |= {"hunyuanimage", "joyimage", "omnigen", "bria fibo 2", "bria fibo 2, editing"}
UNKNOWN |= {"qwen-image 2.1", "qwen-image 2.1, no image", "qwen-image 2.1, cached"}
# These models make masks of flex_attention, or keep keys of earlier calls.
UNKNOWN |= {"anyflow far", "wan animate 2", "kandinsky 6 sr"}
# The blocks of these models depend on the number of blocks.
UNKNOWN |= {"wan vace", "wan animate", "chroma", "chroma, controlnet", "bria fibo", "hunyuandit, controlnet", "krea 2"}
# These models disable autocast for a device type, which the meta device does not support.
UNKNOWN |= {"helios", "helios, no guidance of text", "ernie-image", "cosmos 3"}
UNKNOWN |= {"ideogram 4", "ideogram 4, a time step for each token"}
SIXTEEN_BITS = ("flux", "wan", "qwen-image", "hunyuan", "ltx2")


def forms(tree):
    leaves, spec = pytree.tree_flatten(tree)
    return spec, [(x.shape, x.dtype) for x in leaves]


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # A model with both branches in one batch needs no prediction.
        *[(name, torch.float32) for name in MODELS if name not in BATCHED],
        *[(name, torch.bfloat16) for name in SIXTEEN_BITS],
    ],
)
def test_it_is_what_every_model_gives(name, dtype):
    model = MODELS[name].build().to(dtype)
    inputs = pytree.tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, MODELS[name].inputs(3, 6, 10)
    )
    foreseen = meta_output(model, (), inputs)
    assert (foreseen is None) == (name in UNKNOWN)
    if foreseen is not None:
        with torch.no_grad():
            assert forms(foreseen) == forms(model(**inputs))


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_prediction_runs_no_hook_mode_or_random_number():
    model, inputs, calls = flux_transformer(), flux_inputs(4, 3), []
    for part in model.modules():
        if part is not model:
            part.register_forward_pre_hook(lambda *_: calls.append(1))
    before, random = {name: dict(vars(part)) for name, part in model.named_modules()}, torch.get_rng_state()
    with Seen() as recorder, Dispatched() as dispatched:
        assert meta_output(model, (), inputs).sample.shape == inputs["hidden_states"].shape
    assert F.linear not in recorder.functions
    assert (calls, dispatched.count) == ([], 0)
    assert {name: dict(vars(part)) for name, part in model.named_modules()} == before
    assert torch.equal(torch.get_rng_state(), random)


def test_model_unlike_its_config_is_not_predicted():
    model, inputs = flux_transformer(), flux_inputs(4, 3)
    eightbit, wider, patched, hooked = (copy.deepcopy(model) for _ in range(4))
    eightbit.to(torch.float8_e4m3fn)
    wider.proj_out = torch.nn.Linear(wider.proj_out.in_features, 7)
    patched.forward = lambda **_: None
    hooked.register_forward_hook(lambda *_: None)
    for changed in (eightbit, wider, patched, hooked, torch.compile(model)):
        assert meta_output(changed, (), inputs) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert meta_output(model, (), inputs) is None
    assert meta_output(model, (), {**inputs, "joint_attention_kwargs": {"store": object()}}) is None
