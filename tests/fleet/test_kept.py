"""Data that a rank keeps between requests (encoded prompts and LoRAs), and requests generated as one batch."""

import io

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from peft import LoraConfig
from PIL import Image

from para_core.fleet.failures import RequestFailed
from para_core.fleet.outputs import Result
from para_core.fleet.pipeline_info import TINY_FLUX_FIELDS, find_tiny_flux
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.rank_actor import RankActor
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Delivery, Lora, Request, batch_key
from para_core.launcher.errors import Cancelled

FIELDS = {**TINY_FLUX_FIELDS, "height": 48, "width": 64, "num_inference_steps": 2}
PROMPTS = ["a large red circle", "a blue square", "a green triangle"]
pytestmark = pytest.mark.slow


def request(prompt=PROMPTS[0], seed=0, lora=None, **fields):
    return Request({**FIELDS, "prompt": prompt, **fields}, seed, lora=lora)


def make_rank(**kept):
    rank = RankActor(Recipe(str(find_tiny_flux())), 0, ReplicaOptions(**kept))
    rank.join("127.0.0.1", 0)
    return rank


def generate(rank, id_, request):
    return rank.generate_batch([(id_, request)])[0]


def pixels(answer):
    assert isinstance(answer.outcome, Result), answer.outcome
    return np.asarray(Image.open(io.BytesIO(answer.outcome.outputs[0].data))).astype(int)


@pytest.fixture(scope="module")
def rank():
    return make_rank(prompt_bytes=2**24, loras=2)


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """Return a folder of three LoRAs."""
    folder = tmp_path_factory.mktemp("loras")
    for index, name in enumerate("abc"):
        pipe = FluxPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), name)
        torch.manual_seed(index)
        layers = {key: torch.randn_like(x) * 0.3 for key, x in pipe.transformer.named_parameters() if "lora" in key}
        pipe.transformer.load_state_dict(layers, strict=False)
        from peft.utils import get_peft_model_state_dict

        state = get_peft_model_state_dict(pipe.transformer, adapter_name=name)
        FluxPipeline.save_lora_weights(folder, transformer_lora_layers=state, weight_name=f"{name}.safetensors")
    return folder


def test_prompt_with_another_seed_encodes_nothing(rank):
    kept = rank._require_joined()._encoded_prompts
    first = pixels(generate(rank, "a", request(seed=1)))
    misses, hits = kept.misses, kept.hits
    second = pixels(generate(rank, "b", request(seed=2)))
    assert kept.misses == misses
    assert kept.hits > hits
    assert np.abs(first - second).max() > 10
    assert np.array_equal(second, pixels(generate(make_rank(), "c", request(seed=2))))


def test_request_with_a_lora_changes_no_other(rank, loras):

    def find(name, scale=1.0):
        return Lora(str(loras / f"{name}.safetensors"), scale)

    plain = pixels(generate(rank, "plain", request()))
    images = {name: pixels(generate(rank, name, request(lora=find(name)))) for name in "abc"}
    assert rank._require_joined()._loras.loads == 3
    assert len({image.tobytes() for image in (plain, *images.values())}) == 4
    # c and b are still loaded, and a was used longest ago.
    assert np.array_equal(pixels(generate(rank, "b", request(lora=find("b")))), images["b"])
    assert rank._require_joined()._loras.loads == 3
    assert np.array_equal(pixels(generate(rank, "a", request(lora=find("a")))), images["a"])
    assert rank._require_joined()._loras.loads == 4
    assert np.array_equal(pixels(generate(rank, "plain", request())), plain)
    half = pixels(generate(rank, "half", request(lora=find("a", 0.5))))
    assert 0 < np.abs(half - plain).mean() < np.abs(images["a"] - plain).mean()
    pipe = FluxPipeline.from_pretrained(find_tiny_flux(), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(loras / "a.safetensors")
    alone = pipe(prompt=PROMPTS[0], generator=torch.Generator().manual_seed(0), **FIELDS).images[0]
    assert np.array_equal(np.asarray(alone).astype(int), images["a"])


def test_broken_lora_fails_its_request_only(rank, tmp_path):
    (tmp_path / "broken.safetensors").write_text("no weights")
    before = pixels(generate(rank, "before", request()))
    answer = generate(rank, "a", request(lora=Lora(str(tmp_path / "broken.safetensors"), 1.0)))
    assert (type(answer.outcome), "'broken.safetensors'" in str(answer.outcome)) == (RequestFailed, True)
    assert np.array_equal(pixels(generate(rank, "after", request())), before)


def test_batch_gives_each_request_its_own_image(rank):
    requests = [request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    assert len({batch_key(each) for each in requests}) == 1
    alone = [pixels(generate(rank, str(i), each)) for i, each in enumerate(requests)]
    together = rank.generate_batch([(str(i), each) for i, each in enumerate(requests)])
    for image, answer in zip(alone, together, strict=True):
        assert np.abs(image - pixels(answer)).max() <= 1
    assert [answer.outcome.metadata["request"]["seed"] for answer in together] == [0, 1, 2]


def test_cancelled_request_of_a_batch_does_not_end_the_others(rank):
    rank.cancel("b")
    kinds = [type(answer.outcome) for answer in rank.generate_batch([("a", request()), ("b", request(seed=1))])]
    assert kinds == [Result, Cancelled]
    rank.cancel("a")
    rank.cancel("b")
    kinds = [type(answer.outcome) for answer in rank.generate_batch([("a", request()), ("b", request(seed=1))])]
    assert kinds == [Cancelled, Cancelled]


@pytest.mark.parametrize(
    "other",
    [
        {"num_inference_steps": 3},
        {"guidance_scale": 1.0},
        {"height": 64},
        {"negative_prompt": "b"},
        {"num_images_per_prompt": 2},
        {"prompt": ["a", "b"]},
        {"lora": ("a", 1.0)},
    ],
)
def test_requests_that_differ_otherwise_are_no_batch(other):
    assert batch_key(request()) is not None
    assert batch_key(request(**other)) != batch_key(request())


@pytest.mark.parametrize("format_", ["png", "jpg"])
def test_previews_approach_the_image(rank, format_):
    wanted = Request(
        {**FIELDS, "prompt": PROMPTS[0], "num_inference_steps": 8}, 3, delivery=Delivery(format_, partial_images=3)
    )
    answer = generate(rank, "previews", wanted)
    image = pixels(answer)
    previews = [np.asarray(Image.open(io.BytesIO(each.data))).astype(int) for each in answer.previews]
    assert [each.suffix for each in answer.previews] == [f".{format_}"] * 3
    distances = [np.abs(preview - image).mean() for preview in previews]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.5 * distances[0]
    plain = Request(dict(wanted.fields), 3, delivery=Delivery(format_))
    assert np.array_equal(pixels(generate(rank, "plain", plain)), image)
