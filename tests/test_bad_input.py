"""Bad input on all ranks or on one rank only gives a clear error on every rank, in seconds."""

import re
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from para_core import UnifiedAttnMode, adapters
from para_core.distributed.agree import together
from para_core.distributed.mesh import sequence_mesh
from tests.attention.one_device import make_qkv
from tests.tiny import cpu_mesh, flux_pipe, flux_transformer, relative_error

SECONDS = 10


def error_of(call):
    """Return the type and message of the error of ``call``, which must come soon."""
    start = time.monotonic()
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        assert time.monotonic() - start < SECONDS
        return f"{type(error).__name__}: {error}"
    return "no error"


def words_missing(message, words):
    return [word for word in words if word not in message]


def masked(*shape, dtype=torch.bool):
    """Return a change that adds a mask."""
    return lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(*shape, dtype=dtype)})


def with_options(**options):
    return lambda q, k, v: ((q, k, v), options)


def of_keys(change, **options):
    return lambda q, k, v: ((q, change(k), change(v)), options)


def of_all(change):
    return lambda q, k, v: ([change(x) for x in (q, k, v)], {})


# Each row has a change of the arguments of an SDPA call, and what the error has. Each of these calls is invalid alone.
BAD = {
    "dtype": (lambda q, k, v: ((q, k.bfloat16(), v), {}), ("torch.float32, torch.bfloat16, torch.float32",)),
    "device": (lambda q, k, v: ((q, k, v.to("meta")), {}), ("cpu, cpu, meta",)),
    "value length": (lambda q, k, v: ((q, k, v[:, :, 1:]), {}), ("length", "key [2, 2, 3, 8], value [2, 2, 2, 8]")),
    "head dim": (lambda q, k, v: ((q, k[..., 1:], v), {}), ("head dim", "query [2, 2, 3, 8], key [2, 2, 3, 7]")),
    "heads": (of_keys(lambda x: x.repeat(1, 2, 1, 1)[:, :3]), (" 2 heads", "key 3", "enable_gqa=True")),
    "groups": (of_keys(lambda x: x.repeat(1, 3, 1, 1), enable_gqa=True), ("heads", "2 and 6")),
    "batch": (of_keys(lambda x: x.repeat(2, 1, 1, 1)[:3]), ("batch", "query [2, 2, 3, 8], key [3, 2, 3, 8]")),
    "1-D": (of_all(lambda x: x[0, 0, 0]), ("[B, H, S, D]", "query [8]")),
    "mask dtype": (masked(3, 12, dtype=torch.float8_e5m2), ("attn_mask", "torch.float8_e5m2", "bool", "16 bits")),
    "mask heads": (masked(5, 1, 12, dtype=None), ("attn_mask [5, 1, 12]", "query [2, 2, 3, 8]")),
    "mask dims": (masked(1, 1, 1, 1, 12, dtype=None), ("attn_mask [1, 1, 1, 1, 12]", "query [2, 2, 3, 8]")),
    "dropout": (with_options(dropout_p=-0.25), ("dropout_p=-0.25",)),
    "integers": (of_all(torch.Tensor.int), ("torch.int32", "float")),
}
# Each mask is bad on every rank. If only one rank has it, the ranks disagree.
MASKS = {
    "diagonal mask": (masked(3, 3), ("attn_mask", "[..., 3, 3]", "12", "cp.shard(mask, dim=-2)")),
    "mask length": (masked(1, 7), ("attn_mask", "7, 7, 7, 7", " 1,", " 12 ", "3, 3, 3, 3")),
}
# Each of these is valid alone, but only rank 2 has it.
DIFFERENT = {
    "mask of one rank": (masked(1, 12), ("attn_mask: ", "rank 0 none, rank 1 none, rank 2 [..., 1, 12]")),
    "length": (of_all(lambda x: x[:, :, :2]), ("query lengths", "[3, 3, 2, 3]")),
    "causal": (with_options(is_causal=True), ("is_causal: ", "rank 0 has False", "rank 2 has True")),
    "scale": (with_options(scale=0.125), ("scale: ", "rank 0 has None", "rank 2 has 0.125")),
    "all dtypes": (of_all(torch.Tensor.double), ("dtype: ", "rank 0 has torch.float32", "rank 2 has torch.float64")),
    "all batches": (of_all(lambda x: x[:1]), ("query", "rank 0 has [2, 2, 8]", "rank 2 has [1, 2, 8]")),
    "grad": (
        lambda q, k, v: ((q.double().requires_grad_(), k.double(), v.double()), {}),  # More telling than the dtype.
        ("requires_grad: ", "rank 0 has [False, False, False]", "rank 2 has [True"),
    ),
}
ROWS = {**BAD, **MASKS, **DIFFERENT}
ROWS["unsharded length"] = (DIFFERENT["length"][0], ("query has 2 ", "3 of 12", "cp.shard"))


def attend_badly(kinds, bad_ranks, ring, ulysses, cut):
    """Return the error of each kind of call on ``bad_ranks``, and the result of a correct call after it."""
    mesh = cpu_mesh(ring, ulysses)
    results, rank = {}, mesh.get_rank()

    def parts_of(cp, length):
        tensors = make_qkv(length, 2)
        return [cp.shard(x, dim=2) if cut else x.chunk(ring * ulysses, dim=2)[rank] for x in tensors]

    for kind in kinds:
        with UnifiedAttnMode(mesh) as cp:
            args, options = parts_of(cp, 12), {}
            if rank in bad_ranks:
                args, options = ROWS[kind][0](*args)
            message = error_of(lambda args=args, options=options: F.scaled_dot_product_attention(*args, **options))
            out = F.scaled_dot_product_attention(*parts_of(cp, 8))
            results[kind] = message, cp.gather(out, dim=2, sequence=cp.sequence(8))
    return results


@pytest.mark.parametrize(
    ("kinds", "bad_ranks", "ring", "ulysses", "cut", "words"),
    [
        ([*BAD, *MASKS], [0, 1, 2, 3], 2, 2, False, ()),
        (list(MASKS), [0, 1, 2, 3], 2, 2, True, ()),
        (list(BAD), [2], 2, 2, True, ("mesh rank 2: ",)),
        (list(DIFFERENT), [2], 2, 2, False, ()),
        (["unsharded length"], [2], 2, 2, True, ()),
    ],
    ids=["on all", "masks after shard", "on one after shard", "differing", "unsharded"],
)
def test_bad_input_raises_on_every_rank(rank_pool, kinds, bad_ranks, ring, ulysses, cut, words):
    expected = F.scaled_dot_product_attention(*make_qkv(8, 2))
    for rank, results in enumerate(rank_pool.run(attend_badly, 4, kinds, bad_ranks, ring, ulysses, cut)):
        for kind, (message, after) in results.items():
            assert message.startswith(("ValueError: ", "TypeError: "))
            assert not words_missing(message, (*ROWS[kind][1], *words)), f"{kind}, rank {rank}: {message}"
            assert relative_error(after, expected) < 1e-5, (kind, rank)


X = torch.zeros(2, 10, 4)
# Each row has a call of ``shard`` or ``gather``, which is bad on one rank or on all, and the words of the error.
CUTS = {
    "length": (
        lambda cp, x, bad: cp.shard(X[:, 1:] if bad else X, dim=1),
        ("rank 0 ", "[3, 3, 2, 2]", "dim 1", "[2, 4]", "torch.float32; rank 3 ", "[3, 2, 2, 2]"),
    ),
    "sequence": (
        lambda cp, x, bad: cp.shard(X, dim=1, sequence=cp.sequence(9 if bad else 10)),
        ("mesh rank 3: ", " 10 ", "dim 1", "sequence=", " 9"),
    ),
    "dim": (lambda cp, x, bad: cp.shard(X.transpose(0, 2), dim=7 if bad else 1), ("mesh rank 3: dim=7 ", "[4, 10, 2]")),
    "twice": (
        lambda cp, x, bad: cp.shard(X, dim=1, sequence=cp.sequence(10), balance="causal" if bad else None),
        ("mesh rank 3: ", "sequence=", "balance="),
    ),
    "unknown balance": (
        lambda cp, x, bad: cp.shard(X, dim=1, balance="early" if bad else "causal"),
        ("mesh rank 3: ", "'early'"),
    ),
    # 16 tokens are 4 per rank, balanced or not.
    "balance": (
        lambda cp, x, bad: cp.shard(torch.zeros(1, 16), dim=1, balance="causal" if bad else None),
        ("rank 0 ", " 16,", "rank 3 ", " 16 balanced"),
    ),
    "gather, length": (
        lambda cp, x, bad: cp.gather(x[:, 1:] if bad else x, dim=1),
        ("mesh rank 3: ", " 1 ", "dim 1", " 10 ", " 2"),
    ),
    "gather, sequence": (
        lambda cp, x, bad: cp.gather(x, dim=1, sequence=cp.sequence(11 if bad else 10)),
        ("rank 3 ", "[3, 3, 3, 2]", "dim 1"),
    ),
    "list": (lambda cp, x, bad: cp.shard(X.tolist() if bad else X, dim=1), ("mesh rank 3: ", "list", "tensor")),
    "number": (
        lambda cp, x, bad: cp.shard(X, dim=1, sequence=10 if bad else cp.sequence(10)),
        ("mesh rank 3: ", "int", "cp.sequence"),
    ),
    "no dim": (lambda cp, x, bad: cp.shard(X, dim=None if bad else 1), ("mesh rank 3: ", "dim is None")),
}


def cut_badly():
    mesh = cpu_mesh(2, 2)
    with UnifiedAttnMode(mesh) as cp:
        # This test is about splitting only, so the warning about calls that were not intercepted is switched off.
        cp.intercepted = True
        part = cp.shard(X, dim=1)
        bad = mesh.get_rank() == 3
        errors = {name: error_of(lambda call=call: call(cp, part, bad)) for name, (call, _) in CUTS.items()}
        assert cp.gather(part, dim=1).shape == X.shape
    return errors


def test_bad_shard_and_gather_raise_on_every_rank(rank_pool):
    for rank, errors in enumerate(rank_pool.run(cut_badly, 4)):
        for name, message in errors.items():
            assert not words_missing(message, CUTS[name][1]), f"{name}, rank {rank}: {message}"


def leave_a_rank_alone():
    """Return what rank 0 is told in a call that rank 1 does not make, after it, and after the end of the group."""
    q, k, v = make_qkv(4, 2, seed=dist.get_rank())

    def attend():
        with UnifiedAttnMode(cpu_mesh(1, 2)):
            return F.scaled_dot_product_attention(q, k, v)

    def attend_together():
        with together(sequence_mesh(dist.group.WORLD), "attention failed"):
            attend()

    attend()
    # The function is public since torch 2.15.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=1), dist.group.WORLD)
    if dist.get_rank() == 1:
        raise KeyError("a bug of the user's own")
    messages = error_of(attend_together), error_of(attend)
    mesh = dist.init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("batch", "ring", "ulysses"))
    mode = UnifiedAttnMode(mesh)
    dist.destroy_process_group()
    with mode:
        calls = [lambda: F.scaled_dot_product_attention(q, k, v), lambda: UnifiedAttnMode(mesh)]
        calls += [lambda: mode.shard(q, dim=2), lambda: mode.gather(q, dim=2)]
        return *messages, [error_of(call) for call in calls]


def test_rank_that_is_left_alone_is_told_so(rank_pool):
    (waiting, new_mesh, destroyed), own = rank_pool.run_expecting_errors(leave_a_rank_alone, 2)
    assert isinstance(own, KeyError)
    assert re.search(r"Unanswered: .* 2 ranks .*'ulysses'", waiting)
    assert re.search(r"'ulysses' .*default group.*destroy_process_group\(\) .*init_process_group\(\)", new_mesh)
    assert all("RuntimeError" in message and "destroyed" in message for message in destroyed), destroyed


# Each row has the functions, their argument in place of a pipeline or model, and the names in the error.
OTHER_KINDS = [
    (["parallelize_pipe"], "transformer", "FluxTransformer2DModel", "parallelize_transformer"),
    (["parallelize_pipe"], "vae", "AutoencoderKL", "parallelize_vae"),
    (["unparallelize_pipe"], "transformer", "FluxTransformer2DModel", "unparallelize_transformer"),
    (["apply_cache_on_pipe"], "transformer", "FluxTransformer2DModel", "apply_cache_on_transformer"),
    (["remove_cache_from_pipe"], "transformer", "FluxTransformer2DModel", "para_core.remove_cache"),
    (["shard_weights"], "text_encoder", "CLIPTextModel", "components="),
    (["parallelize_transformer", "parallelize_unet"], "pipe", "FluxPipeline", "parallelize_pipe"),
    (["parallelize_vae"], "pipe", "FluxPipeline", "parallelize_pipe(pipe, vae=True)"),
    (["unparallelize_transformer", "unparallelize_unet"], "pipe", "FluxPipeline", "unparallelize_pipe"),
    (["unparallelize_vae"], "pipe", "FluxPipeline", "unparallelize_pipe"),
    (["apply_cache_on_transformer"], "pipe", "FluxPipeline", "apply_cache_on_pipe"),
    (["propose_plan"], "pipe", "FluxPipeline", "pipe.transformer"),
]


@pytest.mark.parametrize(("functions", "part", "name", "way_out"), OTHER_KINDS)
def test_model_in_place_of_pipeline_or_reverse_is_refused(functions, part, name, way_out):
    pipe = flux_pipe()
    instance = pipe if part == "pipe" else getattr(pipe, part)
    before = type(instance)
    # A function of an optional feature may have been removed with it.
    for function in filter(partial(hasattr, adapters), functions):
        options = {"example_inputs": ({},)} if function == "propose_plan" else {}
        with pytest.raises(TypeError, match=rf"{name}\b.*{re.escape(way_out)}"):
            getattr(adapters, function)(instance, **options)
    assert type(instance) is before


def test_module_that_holds_a_transformer_is_a_pipeline():
    pipe = torch.nn.Module()
    pipe.transformer, pipe.device = flux_transformer(), torch.device("cpu")
    assert adapters.remove_cache_from_pipe(adapters.apply_cache_on_pipe(pipe)) is pipe
    assert adapters.unparallelize_pipe(adapters.parallelize_pipe(pipe)) is pipe
