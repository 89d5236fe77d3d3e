"""The forecast FoCa is that of its paper."""

import pytest
import torch

from para_core.cache.forecasts import FOCA


def test_foca_equals_its_equations():
    f0, f1, f2 = 3.0, 5.0, -4.0
    stored = torch.tensor([f0, f1, f2], dtype=torch.float64)
    for h in (1.0, 3.0):
        times, now = -torch.arange(3).double(), torch.tensor(h).double()
        predicted = 4 / 3 * f0 - f1 / 3 + 2 * h / 3 * (f0 - f1)  # Equation 7 of the paper.
        ahead = (3 * predicted - 4 * f0 + f1) / (2 * h)  # Equation 6 of the paper.
        behind = (3 * f0 - 4 * f1 + f2) / 2  # Equation 6 of the paper, at the last computed step.
        forecast = float(FOCA.weights(times, now, torch.tensor(3.0).double()) @ stored)
        assert forecast == pytest.approx(f0 + h / 2 * (behind + ahead))  # Equation 8 of the paper.
