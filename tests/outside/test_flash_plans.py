"""propose_plan sees the operators of flash_attn, and a plan runs them over the mesh."""

from unittest import mock

import pytest

from para_core import check_parallel
from para_core.adapters import propose_plan
from tests.outside import official
from tests.outside.inputs import build, inputs_of
from tests.outside.recipes import flash_of_all


@pytest.mark.slow
def test_flash_attn_model_gets_an_exact_plan():
    model = build("FLUX")
    with mock.patch.object(official, "sdpa", flash_of_all):
        proposal = propose_plan(model, (inputs_of("FLUX", 0), inputs_of("FLUX", 1)))
        assert proposal.plan is not None
        check = check_parallel(model, plan=proposal.plan, ranks=(2, 3), **inputs_of("FLUX"))
    assert check.error < 1e-5


def test_padding_as_a_second_sequence_is_the_reason():
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        propose_plan(build("HunyuanVideo"), (inputs_of("HunyuanVideo", 0), inputs_of("HunyuanVideo", 1)))
