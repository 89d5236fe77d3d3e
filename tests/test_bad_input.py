"""Bad input on all ranks or on one rank only gives a clear error on every rank, in seconds."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from para_core.adapters import (
    apply_cache_on_pipe,
    apply_cache_on_transformer,
    parallelize_pipe,
    parallelize_transformer,
    parallelize_unet,
    parallelize_vae,
    propose_plan,
    remove_cache_from_pipe,
    shard_weights,
    unparallelize_pipe,
    unparallelize_transformer,
    unparallelize_unet,
    unparallelize_vae,
)
from tests.attention.one_device import make_qkv, relative_error
from tests.tiny import flux_pipe, flux_transformer

SECONDS = 10


def _error_of(call):
    start = time.monotonic()
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def masked(*shape, dtype=torch.bool):
    """Return a change that adds a mask."""
    return lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(*shape, dtype=dtype)})


def with_options(**options):
    return lambda q, k, v: ((q, k, v), options)


# Each row has a change of the arguments of an SDPA call, and what the error has. Each of these calls is invalid alone.
BAD = {
    "dtype": (
        lambda q, k, v: ((q, k.bfloat16(), v), {}),
        ("ValueError", "torch.float32, torch.bfloat16, torch.float32"),
    ),
    "device": (lambda q, k, v: ((q, k, v.to("meta")), {}), ("ValueError", "cpu, cpu, meta")),
    "value length": (
        lambda q, k, v: ((q, k, v[:, :, 1:]), {}),
        ("ValueError", "length", "query [2, 2, 3, 8], key [2, 2, 3, 8], value [2, 2, 2, 8]"),
    ),
    "head dim": (
        lambda q, k, v: ((q, k[..., 1:], v), {}),
        ("ValueError", "head dim", "query [2, 2, 3, 8], key [2, 2, 3, 7]"),
    ),
    "heads": (
        lambda q, k, v: ((q, *(x.repeat(1, 2, 1, 1)[:, :3] for x in (k, v))), {}),
        ("ValueError", " 2 heads", "key 3", "enable_gqa=True"),
    ),
    "groups": (
        lambda q, k, v: ((q, *(x.repeat(1, 3, 1, 1) for x in (k, v))), {"enable_gqa": True}),
        ("ValueError", "heads", "2 and 6"),
    ),
    "batch": (
        lambda q, k, v: ((q, *(x.repeat(2, 1, 1, 1)[:3] for x in (k, v))), {}),
        ("ValueError", "batch", "query [2, 2, 3, 8], key [3, 2, 3, 8]"),
    ),
    "1-D": (lambda q, k, v: ([x[0, 0, 0] for x in (q, k, v)], {}), ("ValueError", "[B, H, S, D]", "query [8]")),
    "mask dtype": (masked(3, 12, dtype=torch.int64), ("Error", "attn_mask", "torch.int64", "bool", "float")),
    "mask heads": (masked(5, 1, 12, dtype=None), ("ValueError", "attn_mask [5, 1, 12]", "query [2, 2, 3, 8]")),
    "mask dims": (
        masked(1, 1, 1, 1, 12, dtype=None),
        ("ValueError", "attn_mask [1, 1, 1, 1, 12]", "query [2, 2, 3, 8]"),
    ),
    "dropout": (with_options(dropout_p=0.25), ("ValueError", "dropout_p=0.25")),
}
# Each mask is bad on every rank. If only one rank has it, the ranks disagree.
MASKS = {
    "diagonal mask": (
        masked(3, 3),
        ("ValueError", "attn_mask", "[..., 3, 3]", "12", "cp.shard(mask, dim=-2)"),
    ),
    "mask length": (masked(1, 7), ("ValueError", "attn_mask", "7, 7, 7, 7", " 1,", " 12 ", "3, 3, 3, 3")),
}
# Each of these is valid alone, but only rank 2 has it.
DIFFERENT = {
    "mask of one rank": (masked(1, 12), ("attn_mask: ", "rank 0 none, rank 1 none, rank 2 [..., 1, 12]")),
    "length": (lambda q, k, v: ([x[:, :, :2] for x in (q, k, v)], {}), ("query lengths", "[3, 3, 2, 3]")),
    "causal": (with_options(is_causal=True), ("is_causal: ", "rank 0 has False", "rank 2 has True")),
    "scale": (with_options(scale=0.125), ("scale: ", "rank 0 has None", "rank 2 has 0.125")),
    "all dtypes": (
        lambda q, k, v: ([x.double() for x in (q, k, v)], {}),
        ("dtype: ", "rank 0 has torch.float32", "rank 2 has torch.float64"),
    ),
    "all batches": (
        lambda q, k, v: ([x[:1] for x in (q, k, v)], {}),
        ("query", "rank 0 has [2, 2, 8]", "rank 2 has [1, 2, 8]"),
    ),
    "grad": (
        lambda q, k, v: ((q.clone().requires_grad_(), k, v), {}),
        ("requires_grad: ", "rank 0 has [False, False, False]", "rank 2 has [True"),
    ),
}
ROWS = {**BAD, **MASKS, **DIFFERENT}


def attend_badly(kinds, bad_ranks, ring, ulysses, cut):
    """Return the error of each kind of call on ``bad_ranks``, its seconds, and the result of a correct call after
    it.
    """
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    results, rank = {}, mesh.get_rank()

    def parts_of(cp, length):
        tensors = make_qkv(length, 2)
        return [cp.shard(x, dim=2) if cut else x.chunk(ring * ulysses, dim=2)[rank] for x in tensors]

    for kind in kinds:
        with UnifiedAttnMode(mesh) as cp:
            args, options = parts_of(cp, 12), {}
            if rank in bad_ranks:
                args, options = ROWS[kind][0](*args)
            message = _error_of(lambda args=args, options=options: F.scaled_dot_product_attention(*args, **options))
            # The ranks make the same calls again, and the next call is correct.
            out = F.scaled_dot_product_attention(*parts_of(cp, 8))
            results[kind] = *message, cp.gather(out, dim=2, sequence=cp.sequence(8))
    return results


def check_errors(results, *expected):
    """Check that each rank raised an error with all words of its row, and that the next call was correct."""
    for rank, of_rank in enumerate(results):
        for kind, (message, seconds, after) in of_rank.items():
            wanted = (*ROWS[kind][1], *expected)
            assert [part for part in wanted if part not in message] == [], f"{kind}, rank {rank}: {message}"
            assert seconds < SECONDS, f"{kind}, rank {rank}"
            assert relative_error(after, F.scaled_dot_product_attention(*make_qkv(8, 2))) < 1e-5, (kind, rank)


@pytest.mark.parametrize(
    ("kinds", "bad_ranks", "ring", "ulysses", "cut", "expected"),
    [
        ([*BAD, *MASKS], [0, 1, 2, 3], 2, 2, False, ()),
        (list(MASKS), [0, 1, 2, 3], 2, 2, True, ()),
        (list(BAD), [2], 2, 2, True, ("sequence rank 2: ",)),
        (list(BAD), [2], 1, 4, False, ("sequence rank 2: ",)),
        (list(DIFFERENT), [2], 2, 2, False, ("ValueError",)),
    ],
    ids=["on all", "masks after shard", "on one after shard", "on one of ulysses", "differing"],
)
def test_bad_input_raises_on_every_rank(rank_pool, kinds, bad_ranks, ring, ulysses, cut, expected):
    check_errors(rank_pool.run(attend_badly, 4, kinds, bad_ranks, ring, ulysses, cut), *expected)


def test_unsharded_length_raises_on_every_rank(rank_pool):
    for results in rank_pool.run(attend_badly, 4, ["length"], [2], 2, 2, True):
        message, seconds, _ = results["length"]
        assert [x for x in ("ValueError", "query has 2 ", "3 of 12", "cp.shard") if x not in message] == []
        assert seconds < SECONDS


def cut_badly():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    bad = mesh.get_rank() == 3
    x = torch.randn(2, 10, 4)
    errors = {}
    with UnifiedAttnMode(mesh) as cp:
        # This test is about splitting only, so the warning about calls that were not intercepted is switched off.
        cp.intercepted = True
        part = cp.shard(x, dim=1)
        errors["shard, length"] = _error_of(lambda: cp.shard(x[:, 1:] if bad else x, dim=1))
        errors["shard, sequence"] = _error_of(lambda: cp.shard(x, dim=1, sequence=cp.sequence(9 if bad else 10)))
        errors["shard, dim"] = _error_of(lambda: cp.shard(x.transpose(0, 2), dim=7 if bad else 1))
        errors["shard, all"] = _error_of(lambda: cp.shard(x, dim=1, sequence=cp.sequence(12)))
        errors["shard, twice"] = _error_of(
            lambda: cp.shard(x, dim=1, sequence=cp.sequence(10), balance="causal" if bad else None)
        )
        errors["shard, unknown balance"] = _error_of(lambda: cp.shard(x, dim=1, balance="early" if bad else "causal"))
        # 16 tokens are 4 per rank, balanced or not.
        errors["shard, balance"] = _error_of(
            lambda: cp.shard(torch.zeros(1, 16), dim=1, balance="causal" if bad else None)
        )
        errors["gather, balance"] = _error_of(
            lambda: cp.gather(torch.zeros(1, 4), 1, sequence=cp.sequence(16, balance="causal" if bad else None))
        )
        text, image = Segment("text", 2, replicated=True), Segment("image", 8)
        errors["shard, order"] = _error_of(
            lambda: cp.shard(x, dim=1, sequence=SequenceLayout((text, image) if bad else (image, text), 4))
        )
        errors["gather, length"] = _error_of(lambda: cp.gather(part[:, 1:] if bad else part, dim=1))
        errors["gather, sequence"] = _error_of(lambda: cp.gather(part, dim=1, sequence=cp.sequence(11 if bad else 10)))
        errors["gather, dtype"] = _error_of(lambda: cp.gather(part.double() if bad else part, dim=1))
        errors["gather, shape"] = _error_of(lambda: cp.gather(part[:1] if bad else part, dim=1))
        errors["gather, dim"] = _error_of(lambda: cp.gather(part, dim=-9 if bad else 1))
        errors["shard, list"] = _error_of(lambda: cp.shard(x.tolist() if bad else x, dim=1))
        errors["shard, number"] = _error_of(lambda: cp.shard(x, dim=1, sequence=10 if bad else cp.sequence(10)))
        errors["shard, no dim"] = _error_of(lambda: cp.shard(x, dim=None if bad else 1))
        errors["gather, name of a dim"] = _error_of(lambda: cp.gather(part, dim="S" if bad else 1))
        errors["gather, none"] = _error_of(lambda: cp.gather(None if bad else part, dim=1))
        errors["layout"] = _error_of(lambda: cp.shard(x, dim=1, sequence=SequenceLayout((Segment("x", 10),), 2)))
        errors["layout on one"] = _error_of(
            lambda: cp.shard(x, dim=1, sequence=SequenceLayout((Segment("x", 10),), 2) if bad else cp.sequence(10))
        )
        errors["good"] = cp.gather(part, dim=1).shape == x.shape, 0.0
    return errors


def test_bad_shard_and_gather_raise_on_every_rank(rank_pool):
    expected = {
        "shard, length": ("rank 0 ", "[3, 3, 2, 2]", "dim 1", "[2, 4]", "torch.float32; rank 3 ", "[3, 2, 2, 2]"),
        "shard, sequence": ("sequence rank 3: ", " 10 ", "dim 1", "sequence=", " 9"),
        "shard, dim": ("sequence rank 3: dim=7 ", "[4, 10, 2]"),
        "shard, all": (" 10 ", "dim 1", "sequence=", " 12"),
        "shard, twice": ("sequence rank 3: ", "sequence=", "balance="),
        "shard, unknown balance": ("sequence rank 3: ", "'early'"),
        "shard, balance": ("rank 0 ", " 16,", "rank 3 ", " 16 balanced"),
        "gather, balance": ("rank 0 ", " 16,", "rank 3 ", " 16 balanced"),
        "shard, order": ("rank 0 ", " 8 + 2 replicated", "rank 3 ", " 2 replicated + 8"),
        "gather, length": ("sequence rank 3: ", " 1 ", "dim 1", " 10 ", " 2"),
        "gather, sequence": ("rank 3 ", "[3, 3, 3, 2]", "dim 1"),
        "gather, dtype": ("torch.float64",),
        "gather, shape": ("rank 0 ", "rank 3 "),
        "gather, dim": ("sequence rank 3: dim=-9 ", "[2, 2, 4]"),
        "shard, list": ("sequence rank 3: ", "list", "tensor"),
        "shard, number": ("sequence rank 3: ", "int", "cp.sequence"),
        "shard, no dim": ("sequence rank 3: ", "dim is None"),
        "gather, name of a dim": ("sequence rank 3: ", "dim is 'S'"),
        "gather, none": ("sequence rank 3: ", "NoneType", "tensor"),
        "layout on one": ("layout", " 2 ranks", " 4"),
        "layout": ("layout", " 2 ranks", " 4"),
    }
    for rank, errors in enumerate(rank_pool.run(cut_badly, 4)):
        assert errors.pop("good")[0]
        for name, (message, seconds) in errors.items():
            assert all(part in message for part in expected[name]), f"{name}, rank {rank}"
            assert seconds < SECONDS, f"{name}, rank {rank}"


def use_after_destroying():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    q, k, v = make_qkv(4, 2)
    mode = UnifiedAttnMode(mesh)
    dist.destroy_process_group()
    with mode:
        return (
            _error_of(lambda: F.scaled_dot_product_attention(q, k, v)),
            _error_of(lambda: mode.shard(q, dim=2)),
            _error_of(lambda: mode.gather(q, dim=2)),
            _error_of(lambda: UnifiedAttnMode(mesh)),
        )


def test_destroyed_group_is_named_in_the_error(rank_pool):
    for results in rank_pool.run(use_after_destroying, 2):
        for message, seconds in results:
            assert "RuntimeError" in message
            assert "destroyed" in message
            assert seconds < SECONDS


def raise_on_one_rank():
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    q, k, v = make_qkv(4, 2, seed=dist.get_rank())
    with UnifiedAttnMode(group):
        F.scaled_dot_product_attention(q, k, v)
        if dist.get_rank() == 1:
            raise KeyError("a bug of the user's own")
        F.scaled_dot_product_attention(q, k, v)


def test_user_exception_on_one_rank_ends_the_others(rank_pool):
    start = time.monotonic()
    waiting, own = rank_pool.run_expecting_errors(raise_on_one_rank, 2)
    assert time.monotonic() - start < SECONDS + 5  # The group's time-out is 2 seconds.
    assert isinstance(own, KeyError)
    assert isinstance(waiting, RuntimeError)
    assert re.search(r"2 ranks .*'ulysses'", str(waiting))


# Each row has a function, its argument in place of a pipeline or model, and the names in the error.
OTHER_KINDS = [
    (parallelize_pipe, "transformer", "FluxTransformer2DModel", "parallelize_transformer"),
    (parallelize_pipe, "vae", "AutoencoderKL", "parallelize_vae"),
    (unparallelize_pipe, "transformer", "FluxTransformer2DModel", "unparallelize_transformer"),
    (apply_cache_on_pipe, "transformer", "FluxTransformer2DModel", "apply_cache_on_transformer"),
    (remove_cache_from_pipe, "transformer", "FluxTransformer2DModel", "para_core.remove_cache"),
    (shard_weights, "text_encoder", "CLIPTextModel", "components="),
    *[(call, "pipe", "FluxPipeline", "parallelize_pipe") for call in (parallelize_transformer, parallelize_unet)],
    (parallelize_vae, "pipe", "FluxPipeline", "parallelize_pipe(pipe, vae=True)"),
    *[
        (call, "pipe", "FluxPipeline", "unparallelize_pipe")
        for call in (unparallelize_transformer, unparallelize_unet, unparallelize_vae)
    ],
    (apply_cache_on_transformer, "pipe", "FluxPipeline", "apply_cache_on_pipe"),
    (propose_plan, "pipe", "FluxPipeline", "pipe.transformer"),
]
MORE_ARGUMENTS = {propose_plan: {"example_inputs": ({},)}}


@pytest.mark.parametrize(
    ("function", "part", "name", "way_out"), OTHER_KINDS, ids=lambda x: getattr(x, "__name__", None)
)
def test_model_in_place_of_pipeline_or_reverse_is_refused(function, part, name, way_out):
    pipe = flux_pipe()
    instance = pipe if part == "pipe" else getattr(pipe, part)
    before = type(instance)
    with pytest.raises(TypeError, match=rf"{name}\b.*{re.escape(way_out)}"):
        function(instance, **MORE_ARGUMENTS.get(function, {}))
    assert type(instance) is before


class ModulePipeline(torch.nn.Module):
    """A user's pipeline that is a module."""

    device = torch.device("cpu")

    def __init__(self, transformer):
        super().__init__()
        self.transformer = transformer


def test_module_that_holds_a_transformer_is_a_pipeline():
    pipe = ModulePipeline(flux_transformer())
    assert remove_cache_from_pipe(apply_cache_on_pipe(pipe)) is pipe
    assert unparallelize_pipe(parallelize_pipe(pipe)) is pipe


def attend_after_a_time_out(path):
    q, k, v = make_qkv(4, 2, seed=dist.get_rank())

    def attend():
        with UnifiedAttnMode(init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))):
            return F.scaled_dot_product_attention(q, k, v)

    attend()
    rank = dist.get_rank()
    # The function is public since torch 2.15.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=2), dist.group.WORLD)
    if rank == 0:
        first = _error_of(attend)
    else:
        first = None
        time.sleep(4)
    second = _error_of(attend)
    # The message advises this.
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    return first, second, attend().shape


@pytest.mark.long
def test_new_mesh_after_timeout_names_dead_default_group(rank_pool, tmp_path):
    (first, *on_rank_0), (_, *on_rank_1) = rank_pool.run(attend_after_a_time_out, 2, str(tmp_path / "store"))
    assert re.search(r"2 ranks .*'ulysses' ", first[0])
    for (message, seconds), shape in (on_rank_0, on_rank_1):
        assert re.search(r"'ulysses' .*default group.*destroy_process_group\(\) .*init_process_group\(\)", message)
        assert seconds < SECONDS
        assert len(shape) == 4
