"""Invalid arguments raise with their name, their value and what was expected, and change nothing."""

import inspect
import re
from functools import partial

import pytest
import torch
from diffusers import FluxPipeline

from para_core.adapters import Adapter, apply_cache_on_pipe, parallelize_pipe, parallelize_transformer, shard_weights
from para_core.attention.schedule import AttentionSchedule
from para_core.option_values import BACKENDS, EXACT_FORM, RING_STYLES
from tests.adapters.agree.test_options import attend
from tests.adapters.parallel.unchanged import same_pipe
from tests.tiny import flux_pipe
from zoo.tiny.transformers.registry import MODELS


@pytest.fixture(scope="module")
def pipe():
    """Yield a pipeline that stays as it is through all calls."""
    pipe = flux_pipe()
    with same_pipe(pipe):
        yield pipe


# The backends of libraries that are not installed, and what each imports.
PACKAGES = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute", "sage": "sageattention"}
LIBRARIES = [(name, package) for name, package in PACKAGES.items() if name in BACKENDS]
# The options, the error and words of its message. tests/test_declared_options.py checks the rules of types.
OPTIONS = [
    ({"assume_equal": "no"}, TypeError, "assume_equal is 'no'"),
    *[
        ({"timeout": value}, ValueError, rf"timeout is .*{re.escape(str(value))}")
        for value in (0, -1, 1e-9, 86400000000000.0, 1e300, float("nan"), float("inf"))
    ],
    ({"text": "cut"}, ValueError, r"text .*'cut'; .*'shard', 'replicate'"),
    ({"weights": "typo"}, ValueError, "weights is 'typo'"),
    ({"adapter": "flux"}, TypeError, "adapter is 'flux'"),
    ({"mesh": 2}, TypeError, r"mesh .*int; .*DeviceMesh .*ProcessGroup"),
    ({"backend": "fast"}, ValueError, f"backend .*'fast'; .*{', '.join(BACKENDS)}"),
    ({"backend": "math", "attn_func": attend}, ValueError, "backend='math' .*attn_func"),
    *[({"backend": AttentionSchedule(name)}, ImportError, package) for name, package in LIBRARIES],
    ({"cross_backend": "math", "attn_func": attend}, ValueError, "cross_backend='math' and attn_func"),
    *[({"cross_backend": name}, ImportError, package) for name, package in LIBRARIES],
    ({"comm_dtype": torch.bfloat16}, ValueError, r"comm_dtype .*torch\.bfloat16; .*torch\.int8 .*torch\.float8_e4m3fn"),
    *[
        ({"comm_dtype": torch.int8, "rotate_method": name}, ValueError, rf"='{name}' .*comm_dtype .*torch\.int8")
        for name, style in RING_STYLES.items()
        if not style.takes_wire
    ],
]


@pytest.mark.parametrize(("options", "error", "message"), OPTIONS)
def test_invalid_options_raise_and_change_nothing(pipe, options, error, message):
    calls = [partial(parallelize_pipe, pipe)]
    if options.keys() <= inspect.signature(parallelize_transformer).parameters.keys() - {"adapter"}:
        calls.append(partial(parallelize_transformer, pipe.transformer))
    if isinstance(options.get("backend"), AttentionSchedule):
        calls = calls[:1]
    for call in calls:
        with pytest.raises(error, match=message):
            call(**options)


CALLS = [
    *[
        (lambda function=function, given=given: function(given), TypeError, rf"pipeline.* {named}\b")
        for function in (parallelize_pipe, apply_cache_on_pipe, shard_weights)
        for given, named in ((None, "None"), ("a/path", "str"), (FluxPipeline, "FluxPipeline"), ({}, "dict"))
    ],
    (lambda: parallelize_transformer(MODELS["hunyuan"].build(), text="shard"), ValueError, "'shard' .*HunyuanVideo"),
    (partial(Adapter, "Model", "Model", text="cut"), ValueError, "text is 'cut'; .*'shard' or 'replicate'"),
    (lambda: AttentionSchedule("fast"), ValueError, f"'fast'.*{', '.join(BACKENDS)}"),
    *[(partial(AttentionSchedule, "math", exact=name), ValueError, f"'{name}'.*flash") for name in EXACT_FORM],
    (lambda: AttentionSchedule("math", first=-1), ValueError, r"first.*-1"),
    *[(partial(AttentionSchedule, "math", last=value), TypeError, f"last.*{value}") for value in (1.5, True)],
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_invalid_calls_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()
