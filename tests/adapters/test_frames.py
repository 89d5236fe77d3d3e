"""The line to which warnings point."""

import warnings

import torch

from benchmarks.harness import fake_group
from para_core.adapters import apply_cache_on_transformer, parallelize_pipe
from tests.tiny import cpu_mesh, flux_call, flux_inputs, flux_pipe, flux_transformer


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
