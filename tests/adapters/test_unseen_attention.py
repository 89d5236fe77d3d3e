"""Attention backends of diffusers, by name: each is exact on several ranks, or an error says what to do."""

import re
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from benchmarks.harness import fake_group
from para_core.adapters import Adapter, parallelize_pipe, parallelize_transformer
from para_core.adapters.inspect.attention_names import processor_backends
from para_core.adapters.models.shared.wan import CACHED_SELF_ATTENTION as BY_HEADS
from para_core.adapters.registry import plan_for
from tests.adapters.test_pipelines import build, generate
from tests.adapters.test_transformers import SIZES, call
from tests.attention.fake_libraries import libraries_installed
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.transformers.registry import MODELS

# There are models with and without masks, with text in the sequence and outside it, and with their own processors.
FAMILIES = ["mochi", "wan, image context", "qwen-image, masked", "sd3", "ltx"]
# Their processors call SDPA themselves and ignore the backend, also on one device.
DEAF = ["mochi", "sd3"]

# The libraries are stand-ins, on a CPU in float32, and the model has no masks.
EXACT = {
    *("flash", "flash_varlen", "_flash_3", "_flash_varlen_3", "flex", "xformers", "sage", "sage_varlen"),
    *("_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90"),
    *("_sage_qk_int8_pv_fp16_cuda", "_sage_qk_int8_pv_fp16_triton"),
    *("native", "_native_flash", "_native_math"),
}
# PyTorch has no such kernel for CPUs, also on one device.
NOT_ON_CPU = {"_native_cudnn", "_native_efficient"}
REFUSED = {
    *("flash_hub", "flash_varlen_hub", "flash_4_hub", "_flash_3_hub", "_flash_3_varlen_hub", "aiter_fa2_hub"),
    *("sage_hub", "sage_blackwell_hub", "_native_npu", "_native_xla"),
}
UNSEEN = r"transformer .*'{}' .*'.*', .*scaled_dot_product_attention.*transformer\.set_attention_backend\('native'\)"
LIBRARY_OF = {"_flash_3": "flash3", "_flash_varlen_3": "flash3"} | {x: "sage" for x in EXACT if "sage" in x}


@contextmanager
def all_installed():
    """Make diffusers believe that all packages are installed. Yield the calls of the stand-ins that para_core finds."""
    with ExitStack() as stack:
        # ``set_attention_backend`` sets this for all models of the process.
        native = mock.patch.object(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE)
        stack.enter_context(native)
        for refusal in ("_check_attention_backend_requirements", "_maybe_download_kernel_for_backend"):
            stack.enter_context(mock.patch.object(attention_dispatch, refusal))
        yield stack.enter_context(libraries_installed())


def call_with(name, transformer, backend):
    """Return the output or the text of its error, and the calls of libraries."""
    heartbeat()
    with all_installed() as calls:
        transformer.set_attention_backend(backend)
        try:
            return call(transformer, name, SIZES[0])[0], dict(calls)
        except RuntimeError as error:
            return str(error), {}


def call_every_name():
    outs = {}
    transformer = parallelize_transformer(MODELS["flux2"].build(), mesh=cpu_mesh(2, 1))
    for backend in [x.value for x in AttentionBackendName]:
        outs[backend] = call_with("flux2", transformer, backend)
        names = {x.processor._attention_backend for x in transformer.modules() if hasattr(x, "processor")}
        assert names == {AttentionBackendName(backend)}
    with all_installed():
        transformer.reset_attention_backend()
        outs["reset"] = call(transformer, "flux2", SIZES[0])[0], {}
    for name in FAMILIES:
        transformer = parallelize_transformer(MODELS[name].build(), mesh=cpu_mesh(1, 2))
        outs |= {(name, x): call_with(name, transformer, x) for x in ("flash", "flash_hub")}
    return outs


def test_every_backend_name_is_exact_or_an_error(rank_pool):
    assert {x.value for x in AttentionBackendName} == EXACT | NOT_ON_CPU | REFUSED
    alone = {name: call(MODELS[name].build(), name, SIZES[0])[0] for name in ("flux2", *FAMILIES)}
    for outs in rank_pool.run(call_every_name, 2):
        for key, (out, calls) in outs.items():
            name, backend = ("flux2", key) if isinstance(key, str) else key
            if backend in NOT_ON_CPU:
                assert "sdpa_kernel(" in out, key
            elif backend in REFUSED and name not in DEAF:
                assert re.search(UNSEEN.format(backend), out), (key, out)
            else:
                assert not isinstance(out, str), (key, out)
                assert relative_error(out, alone[name]) < 1e-5, key
            if name == "flux2":
                assert list(calls) == ([LIBRARY_OF[backend]] if backend in LIBRARY_OF else []), key


def test_plan_of_an_own_adapter_names_attention_by_heads():
    model = MODELS["wan"].build()
    model.blocks[0].attn1.processor._attention_backend = "flash"
    own = Adapter("WanTransformer3DModel", "Wan", replace(plan_for(model), attention={"**.attn1": BY_HEADS}))
    with fake_group(2):
        backends = processor_backends(parallelize_transformer(model, mesh=cpu_mesh(1, 2), adapter=own))
    assert {backend.path.rpartition(".")[2] for backend in backends} == {"attn2"}


def draw_by_options(ranks):
    results = {}
    with libraries_installed() as calls:
        for libraries, options in (
            ("flash3", {"cross_backend": "flash3"}),
            ("flash3, sage", {"backend": "sage", "cross_backend": "flash3"}),
            ("sage", {"backend": "sage"}),
        ):
            heartbeat()
            pipe = parallelize_pipe(build("wan"), mesh=cpu_mesh(1, ranks), **options)
            calls.clear()
            results[libraries] = generate(pipe, "wan"), set(calls)
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_to_another_sequence_has_its_own_backend(rank_pool, ranks):
    expected = generate(build("wan"), "wan")
    for results in rank_pool.run(draw_by_options, ranks, ranks):
        for libraries, (out, calls) in results.items():
            assert ", ".join(sorted(calls)) == libraries
            assert relative_error(out, expected) < 1e-5, libraries
