"""Warnings to users appear once per object and key, can be filtered by category, and point to the user's own line."""

import warnings

import pytest
import torch

from para_core import CacheWarning, ParaCoreWarning, ParallelWarning
from para_core.adapters import apply_cache_on_pipe
from para_core.user_warnings import WarningLog
from tests.tiny import flux_call, flux_pipe


def test_warning_key_is_given_once_until_cleared():
    warned = WarningLog()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for message in ("first", "again"):
            warned.warn("key", message, ParallelWarning)
        warned.warn("other key", "second", CacheWarning)
        warned.clear()
        warned.warn("key", "third", ParallelWarning)
    assert [str(warning.message) for warning in caught] == ["first", "second", "third"]
    assert [warning.category for warning in caught] == [ParallelWarning, CacheWarning, ParallelWarning]
    assert {warning.filename for warning in caught} == {__file__}
    assert issubclass(CacheWarning, ParaCoreWarning)


def test_useless_cache_warns_at_the_pipeline_call():
    pipe = apply_cache_on_pipe(flux_pipe(), residual_diff_threshold=1e-9)
    with torch.no_grad(), pytest.warns(CacheWarning, match="1e-09") as caught:
        pipe(**flux_call(num_inference_steps=3))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        pipe(**flux_call(num_inference_steps=3))
