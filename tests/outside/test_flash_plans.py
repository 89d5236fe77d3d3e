"""propose_plan sees the operators of flash_attn, and a plan runs them over the mesh."""

from unittest import mock

import pytest

from para_core import check_parallel
from para_core.adapters import propose_plan
from tests.modes.fake_flash_attn import flash_attn_func
from tests.outside import official
from tests.outside.inputs import build, inputs_of


def flash(q, k, v, mask=None):
    return flash_attn_func(q, k, v).flatten(2)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["FLUX", "Stable Diffusion 3.5"])
def test_flash_attn_model_gets_an_exact_plan(name):
    model = build(name)
    with mock.patch.object(official, "sdpa", flash):
        proposal = propose_plan(model, (inputs_of(name, 0), inputs_of(name, 1)))
        assert proposal.plan is not None
        check = check_parallel(model, plan=proposal.plan, ranks=(2, 3), **inputs_of(name))
    assert check.error < 1e-5


def without_padding(inputs):
    if "text_mask" in inputs:
        valid = int(inputs["text_mask"].sum())
        inputs = {**inputs, **{name: inputs[name][:, :valid] for name in ("text_states", "text_mask")}}
    return inputs


# For these models docs/any_model.md has plans written by hand, because they compute rotary positions inside attention,
# or indices or lengths of all tokens.
@pytest.mark.parametrize("name", ["Wan 2.1", "Mochi", "HunyuanVideo"])
def test_unplannable_model_gets_a_guess_and_reason(name):
    proposal = propose_plan(build(name), tuple(without_padding(inputs_of(name, size)) for size in (0, 1)))
    assert proposal.plan is None
    assert proposal.guess is not None
    assert "scaled_dot_product_attention" not in " ".join(proposal.questions)


def test_padding_as_a_second_sequence_is_the_reason():
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        propose_plan(build("HunyuanVideo"), (inputs_of("HunyuanVideo", 0), inputs_of("HunyuanVideo", 1)))
