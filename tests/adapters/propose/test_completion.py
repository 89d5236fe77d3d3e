"""Samples are split over ranks only if they give the same result one by one, up to rounding."""

import pytest
import torch
from torch import nn

from para_core.adapters.propose.samples import DependentSamplesError, with_samples
from para_core.plans.plan import Plan


class RoundsByBatch(nn.Module):
    """Returns its input with a relative error that depends on the number of samples, as kernels in 16 bits do."""

    def forward(self, hidden_states):
        return hidden_states * (1 + 1e-3 / len(hidden_states))


def test_samples_that_differ_by_rounding_do_not_depend_on_each_other():
    inputs, plan = {"hidden_states": torch.ones(2, 3)}, Plan({}, {}, ("image",))
    assert with_samples(RoundsByBatch(), plan, inputs, 2, tolerance=5e-2).batched == {"hidden_states": 0}
    with pytest.raises(DependentSamplesError):
        with_samples(RoundsByBatch(), plan, inputs, 2, tolerance=1e-5)
