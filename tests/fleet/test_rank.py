"""One rank, and its actor as a plain object without Ray: its environment, what it keeps, and batches."""

import contextlib
import os
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FluxPipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from para_core.fleet import rank as rank_module
from para_core.fleet.engine import OwnRank
from para_core.fleet.failures import RequestFailed
from para_core.fleet.loras import LoadedLoras
from para_core.fleet.outputs import Output
from para_core.fleet.pipeline_info import TINY_FLUX_FIELDS, find_tiny_flux
from para_core.fleet.rank import ReplicaOptions
from para_core.fleet.rank_actor import RankActor
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Delivery, Lora, Request, batch_key
from para_core.launcher.errors import Cancelled, RankDied
from para_core.progress import logger
from tests.fleet.test_work import pixels
from tests.tiny import load_pipe

FIELDS = {**TINY_FLUX_FIELDS, "height": 48, "width": 64, "num_inference_steps": 2}
PROMPT = "a large red circle"

TORCHRUN = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE"
TORCHELASTIC = "RUN_ID RESTART_COUNT MAX_RESTARTS USE_AGENT_STORE"
LAUNCHERS = [*TORCHRUN.split(), "MASTER_ADDR", "MASTER_PORT", *(f"TORCHELASTIC_{x}" for x in TORCHELASTIC.split())]
LAUNCHERS += [f"SLURM_{name}" for name in ("PROCID", "LOCALID", "NODEID", "NTASKS", "NPROCS", "NNODES", "JOB_ID")]
KEPT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME", "HF_HOME", "RAY_ADDRESS", "GROUP_NAME")


def test_rank_is_not_the_launcher_process(monkeypatch):
    at_build = {}
    monkeypatch.setattr(rank_module, "build", lambda recipe, encode_first: at_build.update(os.environ))
    with mock.patch.dict(os.environ):
        os.environ.update(dict.fromkeys((*LAUNCHERS, *KEPT), "3"))
        RankActor(Recipe(""), 0, ReplicaOptions()).join("127.0.0.1", 0)
    assert [name for name in LAUNCHERS if name in at_build] == []
    assert [at_build[name] for name in KEPT] == ["3"] * len(KEPT)


def raise_in_the_same_call_and_then_in_different_ones():
    own = OwnRank(lambda: mock.Mock(fail=mock.Mock(side_effect=ValueError)))
    own.start()
    for error in (ValueError, RankDied):
        with pytest.raises(error):
            own.call("fail")
        if dist.get_rank() == 1:
            own.call("work")


def test_ranks_of_torchrun_that_raise_in_different_calls_end(rank_pool):
    rank_pool.run(raise_in_the_same_call_and_then_in_different_ones, 2)


def request(prompt=PROMPT, seed=0, lora=None, partial_images=0, **fields):
    delivery = Delivery(partial_images=partial_images)
    return Request({**FIELDS, "prompt": prompt, **fields}, seed, delivery=delivery, lora=lora)


@pytest.fixture(scope="module")
def rank():
    handlers = list(logger.handlers)
    rank = RankActor(Recipe(str(find_tiny_flux())), 0, ReplicaOptions(prompt_bytes=2**24, loras=2))
    with mock.patch.dict(os.environ):
        rank.join("127.0.0.1", 0)
    # Loading is logged for the process that asks.
    position, entries = rank.loading_log(0)
    messages = [entry.message for entry in entries]
    assert "7 components" in messages[0] and sum(x.startswith("loaded component") for x in messages) == 7
    assert rank.loading_log(position)[1] == [] and logger.handlers == handlers
    return rank


@pytest.fixture(scope="module")
def plain():
    """Return diffusers' own pipeline."""
    return load_pipe(find_tiny_flux())


def generate(rank, request):
    return rank.generate_batch([("id", request)], 0)[0]


@pytest.mark.slow
def test_request_with_a_lora_changes_no_other_and_encodes_no_prompt_again(rank, plain, tmp_path):
    for index, name in enumerate("abc"):
        torch.manual_seed(index)
        plain.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), name)
        state = {key: 3 * x for key, x in get_peft_model_state_dict(plain.transformer, adapter_name=name).items()}
        FluxPipeline.save_lora_weights(tmp_path, transformer_lora_layers=state, weight_name=f"{name}.safetensors")
        plain.transformer.delete_adapters(name)
    loads = []

    def image_with(name=None, scale=1.0):
        answer = generate(rank, request(lora=name and Lora(str(tmp_path / f"{name}.safetensors"), scale)))
        loads.append(rank._require_joined()._loras.loads)
        return pixels(answer.outcome)

    without, *images = (image_with(name) for name in (None, "a", "b", "c"))
    assert len({image.tobytes() for image in (without, *images)}) == 4
    # c and b are still loaded, and a was used longest ago.
    for name, expected in (("b", images[1]), ("a", images[0]), (None, without)):
        assert np.array_equal(image_with(name), expected)
    assert loads == [0, 1, 2, 3, 3, 4, 4]
    half = image_with("a", 0.5)
    assert 0 < np.abs(half - without).mean() < np.abs(images[0] - without).mean()
    plain.load_lora_weights(tmp_path / "a.safetensors")
    alone = np.asarray(plain(PROMPT, generator=torch.Generator().manual_seed(0), **FIELDS).images[0])
    plain.unload_lora_weights()
    assert np.array_equal(alone, images[0])
    # A broken LoRA, or one of another model, fails its request only, and unloads no other.
    (tmp_path / "broken.safetensors").write_text("no weights")
    for name in ("other", "another"):
        save_file({"unet.mid_block.to_q.lora_A.weight": torch.ones(2, 8)}, tmp_path / f"{name}.safetensors")
    for name in ("broken", "other", "another"):
        answer = generate(rank, request(lora=Lora(str(tmp_path / f"{name}.safetensors"), 1.0)))
        assert (type(answer.outcome), f"'{name}.safetensors'" in str(answer.outcome)) == (RequestFailed, True)
    assert np.array_equal(image_with("a", 0.5), half)
    assert np.array_equal(image_with(None), without)
    kept = rank._require_joined()._encoded_prompts
    assert (loads[-1], kept.misses, kept.hits > 2) == (4, 2, True)  # of two text encoders


def test_encoded_prompts_are_cleared_if_a_lora_of_a_text_encoder_is_unloaded():
    encoder, kept, cleared = torch.nn.Linear(1, 1), mock.Mock(), []
    encoder.peft_config, names = {}, []

    def load(path, adapter_name):
        names.append(adapter_name)
        if path == "text":
            encoder.peft_config[adapter_name] = None

    pipe = mock.Mock(components={"text_encoder": encoder}, load_lora_weights=load)
    pipe.get_list_adapters.return_value = {"transformer": names}
    pipe.delete_adapters = lambda name: encoder.peft_config.pop(name, None)
    loras = LoadedLoras(pipe, Recipe(""), 1, kept)
    for lora in (Lora("text"), Lora("image"), Lora("image", version="of a new file"), Lora("other image")):
        loras.use(lora)
        cleared.append(kept.clear.call_count)
    assert (cleared, loras.loads) == ([1, 2, 2, 2], 4)
    # After a failure the same LoRA is activated again, and the same one is unloaded.
    once = OSError, None, None, None
    pipe.set_adapters.side_effect, pipe.delete_adapters = once, mock.Mock(side_effect=once)
    for _ in range(2):
        with pytest.raises(OSError):
            loras.use(Lora("a"))
    for name in "ab":  # The first unloads what the failed call has not.
        loras.use(Lora(name))
    deleted = [call.args[0] for call in pipe.delete_adapters.call_args_list]
    assert (pipe.set_adapters.call_count, deleted) == (8, ["request_3", "request_3", "request_4"])


def test_lora_is_never_left_out_and_memory_of_a_failed_request_is_released_before_the_next(monkeypatch):
    released = mock.Mock()
    monkeypatch.setattr(torch.cuda, "empty_cache", released)
    monkeypatch.setattr(rank_module, "build", lambda *_: None)
    monkeypatch.setattr(rank_module, "generate_request", mock.Mock(side_effect=(Cancelled("stopped"), None)))
    with pytest.raises(ValueError, match="prompt_bytes is 1"):
        rank_module.Rank(Recipe(""), ReplicaOptions(prompt_bytes=1), encode_first=True)
    rank = rank_module.Rank(Recipe(""))
    for use, error, count in (
        (lambda: rank.generate(request(lora=Lora("a"))), ValueError, 0),
        (lambda: rank.encode(None), RuntimeError, 1),  # There is nothing to encode with.
        (lambda: rank.generate(request()), Cancelled, 2),
        (lambda: rank.generate(request()), None, 2),
    ):
        with pytest.raises(error) if error else contextlib.nullcontext():
            use()
        assert released.call_count == count


def test_partial_images_are_those_of_the_request_that_is_named():
    actor, counts = RankActor(Recipe(""), 0, ReplicaOptions()), []

    def run(requests, link):
        link.push(Output(".png", b"preview"))
        counts.extend(len(actor.progress(id_, 0)[1]) for id_ in ("a", "next"))

    actor._rank = mock.Mock(generate_batch=run)
    (answer,) = actor.generate_batch([("a", request())], 0)
    assert (len(answer.previews), counts, actor.progress("next", 0)) == (1, [1, 0], (0, []))
    actor.cancel("a", 0)  # This arrives late, and is not one of the next request with this id.
    assert [x.outcome for x in actor.generate_batch([("a", request()), ("b", request())], 1)] == [None, None]


def test_requests_that_differ_otherwise_are_no_batch():
    others = [{"num_inference_steps": 3}, {"height": 64}, {"num_images_per_prompt": 2}, {"prompt": ["a", "b"]}]
    others += [{"lora": ("a", 1.0)}, {"partial_images": 1}]
    keys = [batch_key(request(**other)) for other in others]
    assert batch_key(request()) == batch_key(request("a blue square", seed=1)) not in (None, *keys)
