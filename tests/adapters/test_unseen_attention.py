"""``set_attention_backend``: what goes through SDPA is exact on several ranks, what does not is an error that says
so.
"""

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
from tests.rank_pool import heartbeat
from tests.tiny import cpu_mesh, relative_error, relative_errors
from zoo.tiny.transformers.registry import MODELS

# One model of each family, with masks and without, with text in the sequence and outside it.
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
# A processor that calls SDPA itself does not look at the backend, alone neither.
DEAF = ["mochi", "cogvideox", "sd3"]


@contextmanager
def backends_restored():
    """Restore what ``set_attention_backend`` sets for all models of the process."""
    with mock.patch.object(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE):
        yield


# A CPU has the plain formula, and flash attention where there is no mask.
ON_CPU = ("_native_math", "_native_flash")


def call_native(name, backend, mesh_shape=None):
    """Return the model's output, or the text of its error; on one device if there is no mesh."""
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
            if isinstance(alone, str):  # No backend computes it alone, either.
                same = isinstance(out, str) and (out == alone or "sdpa_kernel(" in out)
            else:
                same = relative_error(out, alone) < 1e-5
            assert same, (name, backend, mesh_shape, out)


# -- what no mode sees


def attend_by_hand(query, key, value, attn_mask=None, scale=None):
    """A stand-in for a kernel of flash_attn: ``[B, S, H, D]``, without scaled_dot_product_attention."""
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        attn_mask = attn_mask if attn_mask.ndim == 4 else attn_mask[:, None, None]
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(0.0), value)


@contextmanager
def flash_attn_installed():
    """diffusers believes so, of flash_attn and of all others; the backend ``flash`` is :func:`attend_by_hand`."""
    arguments = {AttentionBackendName.FLASH: {"query", "key", "value", "attn_mask", "scale"}}
    with ExitStack() as stack:
        stack.enter_context(backends_restored())
        for refusal in ("_check_attention_backend_requirements", "_maybe_download_kernel_for_backend"):
            stack.enter_context(mock.patch.object(attention_dispatch, refusal))
        backends = {AttentionBackendName.FLASH: attend_by_hand}
        stack.enter_context(mock.patch.dict(_AttentionBackendRegistry._backends, backends))
        stack.enter_context(mock.patch.dict(_AttentionBackendRegistry._supported_arg_names, arguments))
        yield


def unseen(backend="flash", name="transformer", place=".*"):
    return (
        rf"{name} .*'{backend}' .*'{place}', .*"
        rf"scaled_dot_product_attention.*{name}\.set_attention_backend\('native'\)"
    )


def call_unseen():
    outs = {}
    for name in FAMILIES:
        heartbeat()
        transformer = parallelize_transformer(MODELS[name].build(), mesh=cpu_mesh(1, 2))
        with flash_attn_installed():
            for backend in () if name in DEAF else ("flash", "flex", "sage", "xformers", "_flash_3_hub"):
                transformer.set_attention_backend(backend)
                with pytest.raises(RuntimeError, match=unseen(backend)):
                    call(transformer, name, SIZES[0])
            transformer.set_attention_backend("flash" if name in DEAF else "native")
            outs[name] = call(transformer, name, SIZES[0])[0]
    return outs


def test_other_backends_raise_on_every_family(rank_pool):
    expected = {name: call(MODELS[name].build(), name, SIZES[0])[0] for name in FAMILIES}
    for outs in rank_pool.run(call_unseen, 2):
        errors = relative_errors(outs, expected)
        assert max(errors.values()) < 1e-5, errors


PIPES = ["hunyuan", "mochi", "cogvideox", "wan 2.2", "qwen-image", "ltx"]
expected_of = cache(lambda name: generate(build(name), name))


def set_flash(transformer):
    """Set the backend of this transformer only; restore the process-wide one, which models without their own use."""
    with backends_restored():
        transformer.set_attention_backend("flash")


def draw_unseen():
    outs = {}
    for name in PIPES:
        part = "transformer_2" if name == "wan 2.2" else "transformer"
        for when in ("before", "after"):
            with flash_attn_installed():
                pipe = build(name)
                if when == "before":
                    set_flash(getattr(pipe, part))
                parallelize_pipe(pipe, mesh=cpu_mesh(1, 2))
                if when == "after":
                    set_flash(getattr(pipe, part))
                if name not in DEAF:
                    with pytest.raises(RuntimeError, match=unseen(name=rf"pipe\.{part}")):
                        generate(pipe, name)
                    getattr(pipe, part).set_attention_backend("_native_math")
                outs[name, when] = generate(pipe, name)
    return outs


def test_pipes_refuse_other_backends_and_recover(rank_pool):
    for outs in rank_pool.run(draw_unseen, 2):
        errors = {key: relative_error(out, expected_of(key[0])) for key, out in outs.items()}
        assert max(errors.values()) < 1e-5, errors


def draw_partly_unseen():
    """Set another backend on one attention only, and by other ways."""
    model = MODELS["wan"]
    with flash_attn_installed():
        pipe = build("wan", cpu_mesh(1, 2))
        place = r"blocks\.1\.attn1"
        pipe.transformer.blocks[1].attn1.set_attention_backend("flash")
        with pytest.raises(RuntimeError, match=unseen(name=r"pipe\.transformer", place=place)):
            generate(pipe, "wan")
        pipe.transformer = torch.compile(pipe.transformer, backend="aot_eager")
        with pytest.raises(RuntimeError, match=unseen(name=r"pipe\.transformer", place=place)):
            generate(pipe, "wan")
        transformer = parallelize_transformer(model.build(), mesh=cpu_mesh(1, 2))
        with attention_dispatch.attention_backend("flash"), pytest.raises(RuntimeError, match=unseen()):
            call(transformer, "wan", SIZES[0])
        # Only of one rank: an error on both.
        if torch.distributed.get_rank() == 1:
            transformer.blocks[0].attn1.set_attention_backend("flash")
        with pytest.raises(RuntimeError, match=r"sequence rank 1: .*" + unseen(place=r"blocks\.0\.attn1")):
            call(transformer, "wan", SIZES[0])
        # This alone does not help: what set_attention_backend set for all models is still set.
        transformer.set_attention_backend("flash")
        transformer.reset_attention_backend()
        with pytest.raises(RuntimeError, match=unseen()):
            call(transformer, "wan", SIZES[0])


def test_one_unseen_attention_among_others_raises(rank_pool):
    rank_pool.run(draw_partly_unseen, 2)


def draw_guided(names):
    outs = {}
    with flash_attn_installed():
        for name in names:
            pipe = build(name, cpu_mesh(1, 1, batch=2))
            pipe.transformer.set_attention_backend("flash")
            outs[name] = generate(pipe, name)
    return outs


def test_ranks_that_share_only_guidance_may_use_any_backend(rank_pool):
    names = ["wan 2.2", "ltx"]
    for outs in rank_pool.run(draw_guided, 2, names):
        errors = {name: relative_error(outs[name], expected_of(name)) for name in names}
        assert max(errors.values()) < 1e-5, errors
