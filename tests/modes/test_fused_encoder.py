"""Dynamo captures torch's fused encoder kernels without showing them to a mode."""

import threading

import pytest
import torch
from torch import nn

from para_core import UnifiedAttnMode, init_context_parallel_mesh
from para_core.distributed.mesh import one_rank


def build():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(d_model=32, nhead=4, batch_first=True).eval()
    return model, torch.randn(1, 21, 32)


def encode(form):
    model, x = build()
    mesh = init_context_parallel_mesh("cpu")
    mode = UnifiedAttnMode(mesh)

    def made_inside(x):
        with UnifiedAttnMode(mesh) as cp:
            tokens = cp.sequence(x.shape[1])
            return cp.gather(model(cp.shard(x, dim=1, sequence=tokens)), dim=1, sequence=tokens)

    def made_outside_entered_inside(x):
        tokens = mode.sequence(x.shape[1])
        with mode:
            return mode.gather(model(mode.shard(x, dim=1, sequence=tokens)), dim=1, sequence=tokens)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def around(x):
        with UnifiedAttnMode(mesh) as cp:
            return cp.gather(compiled(cp.shard(x, dim=1)), dim=1)

    run = {"around": around}.get(form)
    if run is None:
        inside = {"made inside": made_inside, "made outside, entered inside": made_outside_entered_inside}[form]
        run = torch.compile(inside, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = [run(x), run(x)][1]
    return out, torch.backends.mha.get_fastpath_enabled()


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["around", "made inside", "made outside, entered inside"])
def test_compiled_encoder_layer_attends_to_all_tokens(rank_pool, form):
    model, x = build()
    with torch.no_grad():
        expected = model(x)
    for out, fast_path in rank_pool.run(encode, 2, form):
        assert (out - expected).norm() / expected.norm() < 1e-5
        assert fast_path, "the switch was not put back"


def test_mode_ending_in_one_thread_keeps_others():
    entered, leave = threading.Event(), threading.Event()
    enabled = []

    def stay_inside():
        with UnifiedAttnMode(one_rank("cpu")):
            entered.set()
            leave.wait(60)
            enabled.append(torch.backends.mha.get_fastpath_enabled())

    other = threading.Thread(target=stay_inside)
    with UnifiedAttnMode(one_rank("cpu")):
        other.start()
        assert entered.wait(60)
    assert not torch.backends.mha.get_fastpath_enabled(), "another thread is still inside of a mode"
    leave.set()
    other.join()
    assert enabled == [False]
    assert torch.backends.mha.get_fastpath_enabled()


def test_disabled_fast_path_stays_disabled():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with UnifiedAttnMode(one_rank("cpu")), UnifiedAttnMode(one_rank("cpu")):
            assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_failed_trace_leaves_mode_on():
    model, x = build()

    def fail(x):
        with UnifiedAttnMode(one_rank("cpu")):
            torch._dynamo.graph_break()
            return model(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(fail, fullgraph=True, backend="eager")(x)
    with UnifiedAttnMode(one_rank("cpu")):
        pass
    assert torch.backends.mha.get_fastpath_enabled()
