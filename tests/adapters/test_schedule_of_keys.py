"""An attention schedule whose middle steps attend to a share of the keys, compared with the formula."""

from math import ceil

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from para_core.adapters import AttentionSchedule, KeptKeys, parallelize_pipe, unparallelize_pipe
from tests.adapters.test_attention_schedule import draw, small_pipe
from tests.adapters.test_pipelines import build
from tests.tiny import cpu_mesh, relative_error


class KeysByFormula(TorchFunctionMode):
    """The attention of a FLUX transformer in which each head keeps the keys with the largest weights in some steps.

    It counts the transformer's calls, one for each step. All queries are observed.
    """

    def __init__(self, transformer, middle, share):
        super().__init__()
        self.middle, self.share, self.step, self.inside = middle, share, -1, False
        transformer.register_forward_pre_hook(self.begin)
        transformer.register_forward_hook(self.end)

    def begin(self, *_):
        self.step, self.inside = self.step + 1, True

    def end(self, *_):
        self.inside = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention or not self.inside or self.step not in self.middle:
            return func(*args, **(kwargs or {}))
        query, key, value = args if args else (kwargs[name] for name in ("query", "key", "value"))
        votes = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1).sum(-2)
        kept = votes.topk(ceil(self.share * key.shape[-2])).indices
        mask = torch.zeros_like(votes, dtype=torch.bool).scatter(-1, kept, True)
        return func(query, key, value, mask[:, :, None])


HALF = AttentionSchedule(KeptKeys(0.5, window=10_000), first=1, last=2)


def draw_by_formula(middle):
    pipe = small_pipe()
    with KeysByFormula(pipe.transformer, middle, 0.5):
        return draw(pipe)


def with_kept_keys(ring, ulysses, compiled=False):
    pipe = parallelize_pipe(small_pipe(), mesh=cpu_mesh(ring, ulysses), backend=HALF)
    if compiled:
        pipe.transformer.compile(backend="aot_eager", fullgraph=True)
    return draw(pipe), draw(unparallelize_pipe(pipe))


def test_kept_keys_in_the_middle_are_those_of_the_formula():
    exact, expected = draw_by_formula([]), draw_by_formula([1, 2])
    assert relative_error(expected, exact) > 1e-3
    pipe = parallelize_pipe(small_pipe(), backend=HALF)
    for _ in range(2):
        assert relative_error(draw(pipe), expected) < 1e-5
    assert torch.equal(draw(unparallelize_pipe(pipe)), exact)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("ring", "ulysses", "compiled"), [(2, 1, False), (1, 2, False), (1, 2, True), (2, 1, True)])
def test_kept_keys_on_ranks_are_those_of_the_formula(rank_pool, ring, ulysses, compiled):
    exact, expected = draw_by_formula([]), draw_by_formula([1, 2])
    for out, undone in rank_pool.run(with_kept_keys, 2, ring, ulysses, compiled):
        assert relative_error(out, expected) < 1e-5
        assert torch.equal(undone, exact)


def test_kept_keys_of_flex_attention_are_refused():
    pipe = build("anyflow far")
    with pytest.raises(ValueError, match=r"KeptKeys\(share=0.5.*transformer"):
        parallelize_pipe(pipe, backend=HALF)


@pytest.mark.parametrize(("share", "window"), [(0, 64), (1.5, 64), (True, 64), (0.5, 0), (0.5, True)])
def test_bad_kept_keys_are_refused(share, window):
    with pytest.raises(ValueError, match=r"share is|window is"):
        KeptKeys(share, window)
