"""Attention backends of diffusers, by name: each is exact on several ranks, or an error says what to do. Attention to
another sequence may have another backend.
"""

import re
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from para_core.adapters import parallelize_pipe, parallelize_transformer
from tests.adapters.test_pipelines import build, generate
from tests.adapters.test_transformers import SIZES, call
from tests.attention.fake_libraries import libraries_installed
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, relative_error
from zoo.tiny.transformers.registry import MODELS

# There is one model of each family, with and without masks, with text in the sequence and outside it.
FAMILIES = [
    "hunyuan",
    "framepack, one sample",
    "hunyuan 1.5",
    "mochi",
    "cogvideox",
    "wan, image context",
    "wan vace",
    "qwen-image, masked",
    "flux2",
    "ltx",
    "ltx2",
    "helios",
    "minimax-h3",
    "sd3",
]
# Their processors call SDPA themselves and ignore the backend, also on one device.
DEAF = ["mochi", "cogvideox", "sd3"]


@contextmanager
def backends_restored():
    """Restore what ``set_attention_backend`` sets for all models of the process."""
    with mock.patch.object(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE):
        yield


# A CPU has the plain formula, and flash attention without a mask.
ON_CPU = ("_native_math", "_native_flash")


def call_native(name, backend, mesh_shape=None):
    """Return the model's output, or the text of its error. Without a mesh the model runs on one device."""
    with backends_restored():
        transformer = MODELS[name].build()
        transformer.set_attention_backend(backend)
        if mesh_shape is not None:
            parallelize_transformer(transformer, mesh=cpu_mesh(*mesh_shape))
        try:
            return call(transformer, name, SIZES[0])[0]
        except (RuntimeError, ValueError) as error:
            return str(error)


def call_all_native(cases):
    outs = {}
    for number, (name, backend) in enumerate(cases):
        heartbeat()
        shape = (1, 2) if number % 2 else (2, 1)
        outs[name, backend, shape] = call_native(name, backend, shape)
    return outs


def test_native_backends_equal_one_device(rank_pool):
    cases = [(name, backend) for name in FAMILIES for backend in ON_CPU]
    cases += [("flux2", backend) for backend in ("native", "_native_efficient", "_native_cudnn")]
    expected = {case: call_native(*case) for case in cases}
    runs = [case for case in cases if not isinstance(expected[case], str)]
    assert {*runs} > {
        *[(name, "_native_math") for name in FAMILIES],
        ("wan vace", "_native_flash"),
        ("flux2", "native"),
    }
    for outs in rank_pool.run(call_all_native, 2, cases):
        for (name, backend, mesh_shape), out in outs.items():
            alone = expected[name, backend]
            if isinstance(alone, str):  # No backend computes it on one device either.
                same = isinstance(out, str) and (out == alone or "sdpa_kernel(" in out)
            else:
                same = relative_error(out, alone) < 1e-5
            assert same, (name, backend, mesh_shape, out)


# -- Names of functions that no mode sees.

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
LIBRARY_OF = {"_flash_3": "flash3", "_flash_varlen_3": "flash3"} | {x: "sage" for x in EXACT if "sage" in x}


@contextmanager
def all_installed():
    """Make diffusers believe that all packages are installed. Yield the calls of the stand-ins that para_core finds."""
    with ExitStack() as stack:
        stack.enter_context(backends_restored())
        for refusal in ("_check_attention_backend_requirements", "_maybe_download_kernel_for_backend"):
            stack.enter_context(mock.patch.object(attention_dispatch, refusal))
        yield stack.enter_context(libraries_installed())


def unseen(backend="flash_hub", name="transformer", path=".*"):
    return (
        rf"{name} .*'{backend}' .*'{path}', .*"
        rf"scaled_dot_product_attention.*{name}\.set_attention_backend\('native'\)"
    )


def call_every_name():
    outs = {}
    transformer = parallelize_transformer(MODELS["flux2"].build(), mesh=cpu_mesh(2, 1))
    for backend in [x.value for x in AttentionBackendName]:
        heartbeat()
        with all_installed() as calls:
            transformer.set_attention_backend(backend)
            try:
                outs[backend] = call(transformer, "flux2", SIZES[0])[0], dict(calls)
            except RuntimeError as error:
                outs[backend] = str(error), {}
            names = {x.processor._attention_backend for x in transformer.modules() if hasattr(x, "processor")}
            assert names == {AttentionBackendName(backend)}
    with all_installed():
        transformer.reset_attention_backend()
        outs["reset"] = call(transformer, "flux2", SIZES[0])[0], {}
    return outs


def test_every_backend_name_is_exact_or_an_error(rank_pool):
    assert {x.value for x in AttentionBackendName} == EXACT | NOT_ON_CPU | REFUSED
    expected = call(MODELS["flux2"].build(), "flux2", SIZES[0])[0]
    for outs in rank_pool.run(call_every_name, 2):
        for backend in (*EXACT, "reset"):
            out, calls = outs[backend]
            assert not isinstance(out, str), (backend, out)
            assert relative_error(out, expected) < 1e-5, backend
            assert list(calls) == ([LIBRARY_OF[backend]] if backend in LIBRARY_OF else []), backend
        for backend in NOT_ON_CPU:
            assert "sdpa_kernel(" in outs[backend][0], backend
        for backend in REFUSED:
            assert re.search(unseen(backend), outs[backend][0]), outs[backend][0]


def call_families():
    outs = {}
    for name in FAMILIES:
        heartbeat()
        transformer = parallelize_transformer(MODELS[name].build(), mesh=cpu_mesh(1, 2))
        with all_installed():
            for backend in ("flash", "flex"):
                transformer.set_attention_backend(backend)
                outs[name, backend] = call(transformer, name, SIZES[0])[0]
            transformer.set_attention_backend("flash_hub")
            if name not in DEAF:
                with pytest.raises(RuntimeError, match=unseen()):
                    call(transformer, name, SIZES[0])
    return outs


@pytest.mark.long
def test_translated_names_are_exact_on_every_family(rank_pool):
    expected = {name: call(MODELS[name].build(), name, SIZES[0])[0] for name in FAMILIES}
    for outs in rank_pool.run(call_families, 2):
        errors = {key: relative_error(out, expected[key[0]]) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


expected_of = cache(lambda name: generate(build(name), name))


def draw_in_parts():
    """Set a backend on some attention modules, in a context, and together with ``backend=``. Return the outputs."""
    model, results = MODELS["wan"], {}
    with all_installed() as calls:
        pipe = build("wan", cpu_mesh(1, 2))
        blocks = pipe.transformer.blocks
        blocks[1].attn1.set_attention_backend("sage")
        mixed = r"pipe\.transformer .*'sage' .*'blocks\.1\.attn1' .*'native' .*'blocks\.0\.attn1'"
        with pytest.raises(RuntimeError, match=mixed):
            generate(pipe, "wan")
        assert calls.total() == 0
        for block in blocks:
            block.attn1.set_attention_backend("sage")
        results["own sequence"] = generate(pipe, "wan"), dict(calls)
        calls.clear()
        for block in blocks:
            block.attn2.set_attention_backend("_flash_3")
        results["both"] = generate(pipe, "wan"), dict(calls)
        pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
        calls.clear()
        results["compiled"] = generate(pipe, "wan"), dict(calls)
        transformer = parallelize_transformer(model.build(), mesh=cpu_mesh(1, 2))
        calls.clear()
        with attention_dispatch.attention_backend("sage"):
            results["context"] = call(transformer, "wan", SIZES[0])[0], dict(calls)
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2), backend="math")
        with (
            attention_dispatch.attention_backend("sage"),
            pytest.raises(RuntimeError, match=r"'sage' .*backend='math'"),
        ):
            call(transformer, "wan", SIZES[0])
        # A backend that is set on one rank only is an error on both ranks.
        parallelize_transformer(transformer, mesh=cpu_mesh(1, 2))
        if torch.distributed.get_rank() == 1:
            transformer.set_attention_backend("sage")
        with pytest.raises(ValueError, match=r"rank 0 .*native.*rank 1 .*sage"):
            call(transformer, "wan", SIZES[0])
    return results


@pytest.mark.long
def test_each_kind_of_attention_may_have_a_name(rank_pool):
    expected = call(MODELS["wan"].build(), "wan", SIZES[0])[0]
    for results in rank_pool.run(draw_in_parts, 2):
        libraries = {key: set(calls) for key, (_, calls) in results.items()}
        both = {"sage", "flash3"}
        assert libraries == {"own sequence": {"sage"}, "both": both, "compiled": both, "context": {"sage"}}
        for key, (out, _) in results.items():
            assert relative_error(out, expected if key == "context" else expected_of("wan")) < 1e-5, key


def cross_backends(ranks):
    results = {}
    with libraries_installed() as calls:
        for option, values in (
            ("cross", {"cross_backend": "flash3"}),
            ("both", {"backend": "sage", "cross_backend": "flash3"}),
            ("own", {"backend": "sage"}),
        ):
            heartbeat()
            pipe = parallelize_pipe(build("wan"), mesh=cpu_mesh(1, ranks), **values)
            calls.clear()
            results[option] = generate(pipe, "wan"), set(calls)
    return results


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_to_another_sequence_has_its_own_backend(rank_pool, ranks):
    for results in rank_pool.run(cross_backends, ranks, ranks):
        assert {option: calls for option, (_, calls) in results.items()} == {
            "cross": {"flash3"},
            "both": {"sage", "flash3"},
            "own": {"sage"},
        }
        for option, (out, _) in results.items():
            assert relative_error(out, expected_of("wan")) < 1e-5, option


def draw_guided(names):
    outs = {}
    with all_installed():
        for name in names:
            pipe = build(name, cpu_mesh(1, 1, batch=2))
            with mock.patch.dict(_AttentionBackendRegistry._backends, {AttentionBackendName.FLASH: attend_by_hand}):
                pipe.transformer.set_attention_backend("flash")
                outs[name] = generate(pipe, name)
    return outs


def attend_by_hand(query, key, value, attn_mask=None, scale=None, **_):
    """Attend over ``[B, S, H, D]`` without scaled_dot_product_attention, like a kernel of flash_attn."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        attn_mask = attn_mask if attn_mask.ndim == 4 else attn_mask[:, None, None]
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(0.0), value)


def test_ranks_that_share_only_guidance_may_use_any_backend(rank_pool):
    names = ["wan 2.2", "ltx"]
    for outs in rank_pool.run(draw_guided, 2, names):
        errors = {name: relative_error(outs[name], expected_of(name)) for name in names}
        assert max(errors.values()) < 1e-5, errors
