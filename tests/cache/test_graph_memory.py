"""The state of a cache is not kept in memory of a CUDA graph, which the next replay overwrites."""

import pytest
import torch

from para_core import apply_cache, model_cache_report, reset_cache
from para_core.adapters import apply_cache_on_pipe
from para_core.adapters.cache.generation import caching_of
from para_core.cache import graph
from para_core.cache.apply import require_cache
from tests.cache.scripted import ADAPTER, BLOCKS, IN_TWO_STAGES, Pipe, Scripted, verdicts
from tests.tiny import relative_error

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*cache ")]
CHANGING = {"cond": [1.0, 1.05, 1.09, 1.12, 1.13], "uncond": [5.0, 5.3, 5.4, 9.0, 9.1]}


class Replayed:
    """A backend whose graphs return the same memory in each run, as CUDA graphs do. It overwrites all of this memory
    first.
    """

    def __init__(self):
        self.outputs = []
        # This is called before each run.
        self.before = lambda: None
        self._backend = torch._dynamo.lookup_backend("aot_eager")

    def __call__(self, graph, inputs, **_):
        run, memory = self._backend(graph, inputs), []

        def replay(*args):
            self.before()
            # Like a CUDA graph, it reads inputs that are outside its memory.
            args = [x.clone() if any(_share(x, y) for y in memory) else x for x in args]
            for x in memory:
                x.fill_(torch.nan if x.is_floating_point() else -1)
            results = run(*args)
            if not memory:
                memory.extend([x.detach().clone() for x in results if isinstance(x, torch.Tensor)])
                self.outputs.extend(memory)
            kept = iter(memory)
            return tuple([next(kept).copy_(x) if isinstance(x, torch.Tensor) else x for x in results])

        return replay


def _share(x, y):
    return isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def generate(model, check=lambda: None):
    """Return the outputs of two generations with two alternating branches."""
    outputs = []
    for _ in range(2):
        reset_cache(model)
        for values in zip(*CHANGING.values(), strict=True):
            for name, value in zip(CHANGING, values, strict=True):
                with torch.no_grad(), model.cache_context(name):
                    added = torch.tensor([value, 10 * value])
                    outputs.append(model(torch.ones(1, 6, 8), torch.zeros(1, 3, 8), added).clone())
                check()
    return outputs


def require_no_shared_memory(cache, backend):
    """Raise if ``cache`` holds a tensor that a graph returned. Return the number of tensors that it holds."""
    states = list(cache.states.values())
    held = [x for state in states for x in state.tensors()]
    held += [state.decider._numbers for state in states if state.decider is not None]
    held += [x for outcome in cache.outcomes for x in outcome if isinstance(x, torch.Tensor)]
    assert not any(_share(x, y) for x in held for y in backend.outputs)
    return len(held)


@pytest.mark.sample(1)
@pytest.mark.parametrize("blocks", [BLOCKS, IN_TWO_STAGES], ids=["one stage", "two stages"])
def test_replay_keeps_state_of_other_branch(blocks):
    expected = generate(apply_cache(Scripted(), blocks, residual_diff_threshold=0.1))
    model, backend = apply_cache(Scripted(), blocks, residual_diff_threshold=0.1), Replayed()
    model.compile(fullgraph=True, backend=backend)
    outputs = generate(model, lambda: require_no_shared_memory(require_cache(model), backend))
    report = verdicts(model_cache_report(model))
    assert max(relative_error(x, y) for x, y in zip(outputs, expected, strict=True)) < 1e-6
    assert report.count("warmup") == 2 and "hit" in report and "miss" in report


@pytest.mark.long
def test_forecast_state_is_copied_once_per_branch(monkeypatch):
    copied = []
    monkeypatch.setattr(graph, "leave_graph", spied(graph.leave_graph, copied))
    pipe, backend = Pipe(), Replayed()
    apply_cache_on_pipe(pipe, residual_diff_threshold=0.1, forecast_order=1, adapter=ADAPTER)
    held = []
    backend.before = lambda: held.append(require_no_shared_memory(caching_of(pipe).caches["transformer"], backend))
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend=backend)
    for _ in range(2):
        pipe(CHANGING)
    assert len(copied) == 4
    assert len(set(map(id, copied))) == 4
    assert max(held) > 8


def spied(method, calls):
    def call(self):
        calls.append(self)
        return method(self)

    return call
