"""Training resumes exactly, its loss is that of FLUX, and its tokenizers know the grammar."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from torch import nn

from zoo.flux import PIPELINE, tune
from zoo.flux import scenes as grammar
from zoo.flux.models import LATENT_CHANNELS, SHIFT, FluxDenoiser, build_tokenizers, build_vae
from zoo.flux.scenes import SIDE, ImageScene, draw
from zoo.flux.train import (
    ATTRIBUTES,
    TOKEN,
    AlignedDenoiser,
    DecoderLoss,
    FluxCaptions,
    Reader,
    TextLoss,
    alignment_loss,
    build_pool,
    cell_weights,
    draw_batch,
    draw_crowded_batch,
    encode,
    measure_latents,
    naming_tokens,
    things_by_token,
)
from zoo.training import FlowLoss, PlainAttention, Pool, Schedule, State, VaeLoss, build_optimizers, fit, step_seed

# Under autocast, RMSNorm gets a bfloat16 input and a float32 weight. It warns once and computes anyway.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
SCHEDULE = Schedule(steps=4, learning_rate=1e-3, warmup=2)


def train_vae(checkpoint: Path, stop_after: int | None = None) -> State:
    torch.manual_seed(0)
    return fit(build_vae(), VaeLoss(0, 1, draw_crowded_batch), SCHEDULE, checkpoint=checkpoint, stop_after=stop_after)


def train_flow(checkpoint: Path, stop_after: int | None = None) -> State:
    torch.manual_seed(0)
    vae, tokenizers = build_vae(), build_tokenizers()
    measure_latents(vae, 0, batches=1, batch=2)
    pool = build_pool(partial(encode, vae), 0, 4, (0.3, 0.4, 0.3), 3.0)
    loss = FlowLoss(pool, FluxCaptions(tokenizers), seed=0, batch=2, shift=SHIFT, autocast=True, also=alignment_loss)
    model = AlignedDenoiser(tokenizers)
    model.text_encoder_2.requires_grad_(False)
    return fit(model, loss, SCHEDULE, checkpoint=checkpoint, stop_after=stop_after)


def train_text(checkpoint: Path, stop_after: int | None = None) -> State:
    torch.manual_seed(0)
    tokenizers = build_tokenizers()
    model = Reader(FluxDenoiser(tokenizers).text_encoder_2)
    loss = TextLoss(tokenizers.t5, seed=0, batch=4)
    return fit(model, loss, SCHEDULE, checkpoint=checkpoint, stop_after=stop_after)


@pytest.mark.parametrize(
    "train", [train_vae, *[pytest.param(train, marks=pytest.mark.long) for train in (train_text, train_flow)]]
)
def test_two_steps_and_two_resumed_equal_four_straight(train, tmp_path):
    straight = train(tmp_path / "straight.pt")
    assert train(tmp_path / "parts.pt", stop_after=2).step == 2
    resumed = train(tmp_path / "parts.pt")
    assert straight.step == resumed.step == 4
    for module in ("model", "averaged"):
        ours, theirs = (getattr(state, module).state_dict() for state in (resumed, straight))
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), (module, name)


def test_training_the_decoder_alone_leaves_the_latents(tmp_path):
    vae = build_vae()
    measure_latents(vae, 0, batches=1, batch=2)
    vae.encoder.requires_grad_(False)
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    after = fit(vae, DecoderLoss(0, 2), SCHEDULE, checkpoint=tmp_path / "x.pt", stop_after=1).averaged
    for name, value in after.state_dict().items():
        assert torch.equal(value, before[name]) == (name.startswith("encoder.")), name


def test_an_interrupted_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    state = State(model, nn.Linear(2, 2), build_optimizers(model), step=7)
    state.save(tmp_path / "x.pt")

    def fail(content, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail)
    state.step = 8
    with pytest.raises(OSError, match="disk full"):
        state.save(tmp_path / "x.pt")
    monkeypatch.undo()
    state.load(tmp_path / "x.pt")
    assert state.step == 7


def test_learning_rate_warms_up_stays_and_falls_to_zero():
    schedule = Schedule(steps=1000, learning_rate=1.0, warmup=10, decay=0.4)
    rates = [schedule.rate(step) for step in range(1000)]
    assert rates[0] == pytest.approx(0.1)
    assert set(rates[10:600]) == {1.0}
    assert rates[800] == pytest.approx(0.5)
    assert 0 < rates[-1] < 0.01
    # The end may be moved before the decay begins.
    long, short = (Schedule(steps=steps, learning_rate=1.0, decay=0.4) for steps in (1000, 500))
    assert [long.rate(step) for step in range(300)] == [short.rate(step) for step in range(300)]


def test_a_step_draws_the_same_images_and_scenes_again():
    (images, scenes), (images_again, scenes_again) = (draw_batch(step_seed(3, 1, 5), 4) for _ in range(2))
    assert scenes == scenes_again
    assert torch.equal(images, images_again)
    assert draw_batch(step_seed(3, 1, 6), 4)[1] != scenes


class ExactVelocity(nn.Module):
    """A model that has the data, so it predicts the flow-matching target exactly: noise = (noisy − (1 − sigma) data) /
    sigma.
    """

    def __init__(self, data: torch.Tensor) -> None:
        super().__init__()
        self.data = nn.Parameter(data)
        self.sigmas: list[torch.Tensor] = []

    def forward(self, tokens, sigma, clip_ids, t5_ids):
        self.sigmas.append(sigma)
        assert t5_ids.shape[1] in (32, 64, 128)
        assert clip_ids.shape[1] == 77
        assert tokens.shape[1:] == (64, 4 * LATENT_CHANNELS)
        sigma = sigma[:, None, None]
        noise = (tokens - (1 - sigma) * self.data) / sigma
        return noise - self.data


def test_the_flow_loss_of_the_exact_velocity_is_zero():
    torch.manual_seed(0)
    vae, tokenizers = build_vae(), build_tokenizers()
    measure_latents(vae, 0, batches=1, batch=2)
    pool = build_pool(partial(encode, vae), 0, 1, (1.0, 0.0, 0.0), 3.0)
    with torch.no_grad():
        latents = vae.encode(draw_batch(step_seed(0, 1, 0), 1, (1.0, 0.0, 0.0))[0]).latent_dist.mean
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    # This is FLUX's packing, written out: 2 × 2 latent pixels are one token, channel first.
    data = latents.reshape(1, LATENT_CHANNELS, 8, 2, 8, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, 64, -1)
    model = ExactVelocity(data)
    loss = FlowLoss(pool, FluxCaptions(tokenizers), seed=0, batch=2, shift=SHIFT, autocast=False)(model, 0)
    # The rounding error of the data grows as 1 / sigma.
    assert loss.item() < 1e-6 / float(torch.cat(model.sigmas).min()) ** 2


class SaysSo(nn.Module):
    """A model that predicts the given noise for data of zeros, off by one in the first half of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, tokens, sigma):
        velocity = tokens / sigma[:, None, None]
        velocity[:, : tokens.shape[1] // 2] += 1
        return velocity


@pytest.mark.parametrize("also", [None, lambda model, scenes: torch.tensor(7.0 * len(scenes))])
def test_flow_loss_weighs_tokens_and_adds_terms(also):
    weights = torch.tensor([3.0, 3.0, 1.0, 1.0]).reshape(1, 4, 1)
    pool = Pool(["a"], torch.zeros(1, 4, 2), weights)
    loss = FlowLoss(pool, lambda scenes, rng: (), seed=0, batch=2, shift=SHIFT, autocast=False, also=also)
    assert loss(SaysSo(), 0).item() == pytest.approx(1.5 if also is None else 15.5, abs=1e-4)


def test_weights_cover_all_of_a_thing_and_little_else():
    for i in range(20):
        rng = np.random.default_rng([21, i])
        scene = grammar.training_scene(rng, (0.0, 0.0, 1.0))
        empty = draw(ImageScene((), scene.background), rng)
        differs = (draw(scene, rng) != empty).any(-1).reshape(8, 16, 8, 16).any((1, 3))
        weights = cell_weights(scene, 5.0).reshape(SIDE // TOKEN, SIDE // TOKEN)
        heavy = (weights > weights.min()).numpy()
        assert weights.mean().item() == pytest.approx(1.0)
        assert weights.max().item() == pytest.approx(5 * weights.min().item())
        assert heavy[differs].all()
        assert heavy.sum() <= 3 * 16


def test_each_thing_has_one_colour_and_shape_word():
    tokenizer = build_tokenizers().t5
    scenes = [grammar.training_scene(np.random.default_rng([23, i]), (0.2, 0.4, 0.4)) for i in range(40)]
    captions = [grammar.caption(scene, np.random.default_rng([24, i])) for i, scene in enumerate(scenes)]
    captions[::4] = [text.capitalize() for text in captions[::4]]
    captions[7] = ""
    ids = tokenizer(captions, padding="max_length", max_length=64, return_tensors="pt").input_ids
    words = [
        (caption, thing, tokenizer.convert_ids_to_tokens(ids[caption, position].item()).strip("▁").lower())
        for caption, thing, position in naming_tokens(tokenizer, ids)
    ]
    expected = {
        (caption, index, word)
        for caption, scene in enumerate(scenes)
        for index, thing in enumerate(scene.things)
        for word in (thing.colour, thing.shape)
        if captions[caption]
    }
    assert set(words) == expected
    assert len(words) == len(expected)


class TellsThingsApart(nn.Module):
    """An encoder with embeddings of 1 at the words of one object, which distinguish the cells of two objects and
    nothing else.
    """

    def __init__(self, words: list[int], cells: list[int]) -> None:
        super().__init__()
        self.words = torch.tensor(words)
        self.heads = nn.ModuleDict({name: nn.Linear(1, len(values)) for name, values in ATTRIBUTES.items()})
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        first, other = cells
        cell = self.heads["cell"]
        cell.weight.data[first], cell.weight.data[other], cell.bias.data[other] = 100.0, -100.0, 50.0

    def forward(self, ids):
        return torch.isin(ids, self.words).float()[..., None]


@pytest.mark.parametrize(("right", "loss_of_cells"), [(True, 0.0), (False, (150 + 50) / 2)])
def test_text_loss_asks_for_each_attribute(monkeypatch, right, loss_of_cells):
    red, blue = grammar.Thing("red", "circle", "small", "top"), grammar.Thing("blue", "ring", "large", "left")
    monkeypatch.setattr(grammar, "training_scene", lambda rng, things: ImageScene((red, blue), "grey"))
    tokenizer = build_tokenizers().t5
    words = tokenizer.convert_tokens_to_ids(["▁red", "▁Red", "▁circle"])
    cells = [list(grammar.CELLS).index(thing.cell) for thing in ((red, blue) if right else (blue, red))]
    loss = TextLoss(tokenizer, seed=0, batch=8)(TellsThingsApart(words, cells), 0)
    others_by_chance = math.log(8) + math.log(5) + math.log(2)
    assert loss.item() == pytest.approx(others_by_chance + loss_of_cells, rel=1e-5)


def test_plain_attention_is_attention():
    q, k, v = (torch.randn(2, 3, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    expected = nn.functional.scaled_dot_product_attention(q, k, v)
    with PlainAttention():
        assert torch.allclose(nn.functional.scaled_dot_product_attention(q, k, v), expected)
        assert torch.allclose(nn.functional.scaled_dot_product_attention(query=q, key=k, value=v), expected)
        mask = torch.ones(5, 7, dtype=torch.bool).tril()
        masked = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.allclose(masked, nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    assert not torch.allclose(masked, expected)


def test_measured_statistics_make_the_latents_unit_normal():
    vae = build_vae()
    measure_latents(vae, 0, batches=2, batch=4)
    with torch.no_grad():
        latents = vae.encode(draw_batch(step_seed(0, 1, 0), 8)[0]).latent_dist.mean
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    assert abs(latents.mean().item()) < 0.2
    assert math.isclose(latents.std().item(), 1.0, rel_tol=0.2)


def clip_vocabulary():
    return build_tokenizers().clip.get_vocab()


def test_tokenizers_are_the_same_in_every_process(rank_pool):
    """Check tokenizers of two processes: the merges were once trained, and token ids differed after a resumption."""
    assert rank_pool.run(clip_vocabulary, 1) == [clip_vocabulary()]


def test_tokens_are_asked_for_their_thing():
    for i in range(20):
        rng = np.random.default_rng([22, i])
        scene = grammar.training_scene(rng, (0.0, 0.0, 1.0))
        truth = things_by_token(scene)
        empty = draw(ImageScene((), scene.background), rng)
        for thing in scene.things:
            alone = draw(ImageScene((thing,), scene.background), rng)
            covered = (alone != empty).any(-1).reshape(8, 16, 8, 16).mean((1, 3)).flatten()
            # Tokens with less coverage may be the rim of an object that extends into them.
            touched = torch.from_numpy((covered > 0.4) | (covered == covered.max()))
            assert set(truth["colour"][touched].tolist()) == {1 + list(grammar.COLOURS).index(thing.colour)}
            assert set(truth["shape"][touched].tolist()) == {1 + grammar.SHAPES.index(thing.shape)}
        assert (truth["colour"] == 0).any()


def test_alignment_loss_is_zero_for_right_answers():
    model = AlignedDenoiser(build_tokenizers())
    rng = np.random.default_rng(23)
    scenes = [grammar.training_scene(rng, (0.0, 1.0, 0.0)) for _ in range(3)]
    truths = [things_by_token(scene) for scene in scenes]
    for name, head in model.heads.items():
        truth = torch.stack([classes[name] for classes in truths])
        model.answers[name] = 50.0 * nn.functional.one_hot(truth, head.out_features).float()
    assert alignment_loss(model, scenes).item() < 1e-6
    model.answers["shape"] = model.answers["shape"].roll(1, 0)
    assert alignment_loss(model, scenes).item() > 5


def test_aligned_tokens_reach_first_single_block():
    torch.manual_seed(0)
    tokenizers = build_tokenizers()
    model = AlignedDenoiser(tokenizers)
    scenes = [grammar.training_scene(np.random.default_rng(24), (0.0, 1.0, 0.0))]
    ids = FluxCaptions(tokenizers)(scenes, np.random.default_rng(0))
    inputs = torch.randn(1, 64, 4 * LATENT_CHANNELS), torch.ones(1), *ids
    torch.testing.assert_close(model(*inputs), FluxDenoiser.forward(model, *inputs), rtol=0, atol=0)
    alignment_loss(model, scenes).backward()
    reached = {
        i
        for i, block in enumerate(model.transformer.single_transformer_blocks)
        if block.proj_out.weight.grad is not None
    }
    assert reached == {0}


def test_tuning_keeps_the_record_and_refuses_a_tuned_pipeline(tmp_path):
    trained, tuned = tmp_path / "trained", tmp_path / "tuned"
    shutil.copytree(PIPELINE, trained)
    record = json.loads((PIPELINE / "training.json").read_text())
    del record["tuning"]
    (trained / "training.json").write_text(json.dumps(record))
    numbers = ["--scenes", "4", "--steps", "2", "--batch", "2"]
    folders = ["--checkpoints", str(tmp_path / "checkpoints"), "--output", str(tuned)]
    tune.main([*numbers, *folders, "--input", str(trained)])
    written = json.loads((tuned / "training.json").read_text())
    assert written.pop("tuning")["options"]["steps"] == 2
    assert written == record
    # The tuned parts have moved, and the text encoder that stays has its reach limited.
    pipes = [FluxPipeline.from_pretrained(folder, dtype=torch.float32) for folder in (trained, tuned)]
    before, after = (pipe.transformer.proj_out.weight for pipe in pipes)
    assert not torch.equal(before, after)
    with pytest.raises(ValueError, match="already tuned"):
        tune.main([*numbers, *folders, "--input", str(tuned)])


def test_reach_of_t5_is_63_tokens_in_each_of_two_layers():
    encoder = FluxDenoiser(build_tokenizers()).text_encoder_2.eval()
    ids = torch.randint(3, 40, (1, 400), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 200] = 3 + (ids[0, 200] - 2) % 37

    def moved():
        with torch.no_grad():
            difference = (encoder(ids)[0] - encoder(changed)[0]).abs().amax(-1)[0]
        return difference.nonzero().flatten()

    assert len(moved()) == 400
    tune.limit_reach(encoder)
    assert moved().min() >= 200 - 2 * 63
    assert moved().max() <= 200 + 2 * 63
    assert {200 - 63, 200 + 63} <= set(moved().tolist())
