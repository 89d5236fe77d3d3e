"""Prompts that were encoded before give the same result without running the text encoders."""

from types import SimpleNamespace

import pytest
import torch

from para_core import init_context_parallel_mesh
from para_core.adapters import parallelize_pipe
from para_core.adapters.weights.encoded_prompts import EncodedPrompts
from tests.tiny import relative_error
from tests.weights.pipes import generate, make


def encoders(pipe):
    return [part for name, part in pipe.components.items() if name.startswith("text_encoder") and part is not None]


def counted(pipe):
    """Count the runs of the text encoders."""
    calls = []
    for part in encoders(pipe):
        part.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("name", ["flux", "wan 2.2", "hunyuan", "qwen-image"])
def test_equal_prompts_are_encoded_once(name):
    plain, pipe = make(name), make(name)
    expected = generate(plain, name)
    kept, calls = EncodedPrompts(pipe), counted(pipe)
    outs = [generate(pipe, name)]
    first = len(calls)
    outs.append(generate(pipe, name))
    assert all(torch.equal(out, expected) for out in outs)
    assert first > 0
    assert len(calls) == first
    assert kept.hits >= kept.misses > 0


def test_other_prompts_and_other_lengths_are_encoded():
    pipe = make("flux")
    kept = EncodedPrompts(pipe)
    for options in (
        {"prompt": "a cat"},
        {"prompt": "two red dogs run"},
        {"prompt": "two red dogs run", "max_sequence_length": 5},
    ):
        expected = generate(make("flux"), "flux", **options)
        assert torch.equal(generate(pipe, "flux", **options), expected)
    # CLIP takes no max_sequence_length, so its output for the last prompt was cached before.
    assert (kept.hits, kept.misses) == (1, 5)


def test_the_least_recently_used_output_is_dropped():
    encoder = make("flux").text_encoder_2
    pipe = SimpleNamespace(components={"text_encoder": encoder})
    kept = EncodedPrompts(pipe)
    with torch.no_grad():
        encoder(torch.tensor([[1, 2, 3]]))
        size = kept.bytes
        kept.max_bytes = 2 * size + 1
        for token, misses in ((2, 2), (1, 2), (3, 3), (1, 3), (2, 4)):
            encoder(torch.tensor([[token, 2, 3]]))
            assert kept.misses == misses
            assert kept.bytes <= 2 * size
        kept.max_bytes = 0
        encoder(torch.tensor([[7, 2, 3]]))
        encoder(torch.tensor([[7, 2, 3]]))
        assert kept.misses == 6


def test_changes_of_an_output_are_not_kept():
    pipe = make("flux")
    kept = EncodedPrompts(pipe)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        first = pipe.text_encoder_2(ids)[0]
        expected = first.clone()
        first.zero_()
        pipe.text_encoder_2(ids)[0].zero_()
        assert torch.equal(pipe.text_encoder_2(ids)[0], expected)
    pipe.text_encoder_2.requires_grad_()
    with torch.enable_grad():
        assert pipe.text_encoder_2(ids)[0].requires_grad
    kept.remove()
    assert kept.bytes == 0
    assert type(pipe.text_encoder_2) is type(make("flux").text_encoder_2)


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="-1"):
        EncodedPrompts(make("flux"), -1)


def on_ranks(placement):
    pipe = make("flux")
    kept, calls = EncodedPrompts(pipe), counted(pipe)
    parallelize_pipe(pipe, mesh=init_context_parallel_mesh("cpu"), text_encoders=placement)
    return [generate(pipe, "flux") for _ in range(2)], kept.hits, len(calls)


@pytest.mark.sample(1)
@pytest.mark.parametrize("placement", ["replicate", "fsdp", "offload", "first"])
def test_prompts_are_encoded_once_on_ranks(rank_pool, placement):
    expected = generate(make("flux"), "flux")
    for rank, (outs, hits, calls) in enumerate(rank_pool.run(on_ranks, 2, placement)):
        assert max(relative_error(out, expected) for out in outs) < 1e-5
        assert hits == (2 if placement != "first" or rank == 0 else 0)
        assert calls == (2 if placement != "first" or rank == 0 else 0)
