"""An attention schedule whose middle steps attend to a share of the keys, compared with the formula."""

from math import ceil

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from para_core.adapters import AttentionSchedule, KeptKeys, parallelize_pipe, unparallelize_pipe
from tests.adapters.test_attention_options import draw, small_pipe
from tests.tiny import cpu_mesh, relative_error


class KeysByFormula(TorchFunctionMode):
    """The attention of a FLUX transformer in which heads keep the keys with the largest weights in some steps."""

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


def draw_kept(ring, ulysses, compiled=False):
    """Require that steps 1 and 2 of five keep the keys of the formula, until it is undone."""
    exact, pipe = draw(small_pipe()), small_pipe()
    with KeysByFormula(pipe.transformer, [1, 2], 0.5):
        expected = draw(pipe)
    assert relative_error(expected, exact) > 1e-3
    mesh = cpu_mesh(ring, ulysses) if ring * ulysses > 1 else None
    pipe = parallelize_pipe(small_pipe(), mesh=mesh, backend=HALF)
    if compiled:
        pipe.transformer.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert relative_error(draw(pipe), expected) < 1e-5
    assert torch.equal(draw(unparallelize_pipe(pipe)), exact) or compiled


@pytest.mark.sample(2)
@pytest.mark.parametrize("args", [(1, 1), (2, 1), (1, 2), pytest.param((2, 1, True), marks=pytest.mark.long)])
def test_kept_keys_are_those_of_the_formula(rank_pool, args):
    rank_pool.run(draw_kept, args[0] * args[1], *args)


class FlexProcessor:
    """A processor that attends by flex attention."""

    def __call__(self, *args):
        return flex_attention(*args)


def test_kept_keys_of_flex_attention_and_unknown_steps_are_refused():
    pipe = small_pipe()
    pipe.transformer.transformer_blocks[0].attn.processor = FlexProcessor()
    with pytest.raises(ValueError, match=r"KeptKeys\(share=0.5.*transformer"):
        parallelize_pipe(pipe, backend=HALF)
    pipe.scheduler = None
    with pytest.raises(ValueError, match="no scheduler"):
        parallelize_pipe(pipe, backend=AttentionSchedule("math"))
