"""The number of para_core's Python frames below a pipeline call, and the line to which warnings point."""

import sys
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from diffusers import FluxTransformer2DModel

import para_core
from benchmarks.harness import fake_group
from para_core.adapters import apply_cache_on_pipe, apply_cache_on_transformer, parallelize_pipe
from para_core.attention import swap
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer

ROOT = Path(para_core.__file__).parents[1]


def own_files():
    """Return the file name of each active frame of para_core, innermost first."""
    frame, files = sys._getframe(2), []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT / "para_core") or path.is_relative_to(ROOT / "adapters"):
            files.append(path.name)
        frame = frame.f_back
    return files


def files_at(owner, function, pipe):
    """Return the files of the active frames at the first call of ``function``, which belongs to a class or module."""
    stacks, original = [], getattr(owner, function)

    def watched(*args, **kwargs):
        stacks.append(own_files())
        return original(*args, **kwargs)

    with mock.patch.object(owner, function, watched), torch.no_grad():
        pipe(**flux_call(num_inference_steps=1))
    return Counter(stacks[0])


@pytest.mark.parametrize(
    ("cached", "at_forward", "at_exchange"),
    [
        pytest.param(False, 6, 16, id="parallel"),
        pytest.param(True, 10, 23, id="parallel and cached"),
    ],
)
def test_each_wrapper_is_one_frame(cached, at_forward, at_exchange):
    with fake_group(2):
        pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 2), assume_equal=True)
        if cached:
            apply_cache_on_pipe(pipe, residual_diff_threshold=0.0)
        # Three of these frames are wrapped methods: __call__ of the pipe and of the model, and _call_impl of the model.
        assert files_at(FluxTransformer2DModel, "forward", pipe).total() <= at_forward
        # These frames lead to ToHeads.start, which sends keys and values to other ranks.
        assert files_at(swap, "start_all_to_all", pipe).total() <= at_exchange


def test_warning_points_at_line_of_user():
    transformer = apply_cache_on_transformer(flux_transformer(), residual_diff_threshold=0.1)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad(), fake_group(2):
        warnings.simplefilter("always")
        pipe = parallelize_pipe(flux_pipe(), mesh=cpu_mesh(1, 1, batch=2), assume_equal=True)
        pipe(**flux_call(num_inference_steps=1))
        for step in range(12):
            inputs = flux_inputs(20, 5)
            changing = {name: inputs[name] + step for name in ("encoder_hidden_states", "pooled_projections")}
            transformer(**{**inputs, **changing})
    filenames = {
        kind: w.filename for w in caught for kind in ("no branches", "cannot be identified") if kind in str(w.message)
    }
    assert filenames == {"no branches": __file__, "cannot be identified": __file__}
