"""Arguments by which branches of guidance are identified: unknown names are errors, and a missing name is a warning."""

import warnings

import pytest
import torch
from torch import nn

from para_core import BlockGroup, CachedBlocks, apply_cache, model_cache_report, remove_cache, reset_cache
from tests.tiny import relative_error


class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, hidden_states, y):
        return hidden_states + torch.tanh(self.linear(hidden_states + y))


class Model(nn.Module):
    """A model whose condition is called ``y``, as in DiT."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(seed) for seed in range(4)])

    def forward(self, x, t, y):
        x = x * (1 + t.view(-1, 1, 1))
        for block in self.blocks:
            x = block(x, y)
        return x


class WithKeywords(Model):
    def forward(self, x, t, **kwargs):
        return super().forward(x, t, kwargs["y"])


def blocks(**options):
    return CachedBlocks((BlockGroup(("blocks",), chained=True),), **options)


def denoise(model, steps=5, branches=2):
    """Return the guided outputs of all steps. The branches are called one after the other."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, 8, generator=generator)
    texts = torch.randn(branches, 1, 1, 8, generator=generator).unbind()
    times = torch.linspace(1.0, 0.1, steps)
    outputs = []
    with torch.no_grad():
        for t in times:
            predicted = [model(x, t[None], text) for text in texts]
            outputs.append(predicted[0] + 3 * (predicted[0] - predicted[-1]))
            x = x - 0.02 * outputs[-1]
    return outputs


@pytest.mark.parametrize("conditions", [("text",), ("y", "encoder_hidden_states")])
def test_unknown_condition_raises(conditions):
    model = Model()
    with pytest.raises(ValueError, match=rf"{conditions[-1]}.*x, t, y"):
        apply_cache(model, blocks(conditions=conditions), residual_diff_threshold=0.1)
    assert type(model) is Model
    assert type(model.blocks[1]) is Block


def test_keyword_model_accepts_any_condition():
    model = apply_cache(WithKeywords(), blocks(conditions=("y",)), residual_diff_threshold=0.1)
    for time in (1.0, 0.5):
        with torch.no_grad():
            model(torch.ones(1, 6, 8), torch.tensor([time]), y=torch.ones(1, 1, 8))
    assert [row.branch for row in model_cache_report(model).rows] == ["branch 0"] * 2


@pytest.mark.parametrize("branches", [2, 3])
@pytest.mark.parametrize("options", [{}, {"conditions": ()}, {"conditions": ("t",)}])
def test_indistinguishable_branches_warn_with_argument(options, branches):
    model = apply_cache(Model(), blocks(**options), residual_diff_threshold=1e9)
    with pytest.warns(UserWarning, match=r"'y'|\bt of .*Model "):
        denoise(model, branches=branches)


class WithList(Model):
    """A model that takes its text as a list, like Wan's official code."""

    def forward(self, x, t, y):
        return super().forward(x, t, torch.stack(y))


class WithDict(Model):
    def forward(self, x, t, y):
        return super().forward(x, t, y["text"])


class WithNumber(Model):
    """A model whose label is not a tensor."""

    def forward(self, x, t, y):
        return super().forward(x, t, torch.full((1, 1, 8), y))


KINDS = {
    Model: lambda text: text,
    WithList: lambda text: [*text],
    WithDict: lambda text: {"text": text},
    WithNumber: lambda text: text.sum().item(),
}


def denoise_with_new_tensors(model, convert):
    """Call the model with tensors in other memory each time."""
    denoise(lambda x, t, text: model(x.clone(), t.clone(), convert(text.clone())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conditions", [None, ("t",)])
def test_branches_of_any_kind_warn(kind, conditions):
    for run in (
        denoise_with_new_tensors,
        lambda model, convert: denoise(lambda x, t, text: model(x, t, convert(text))),
    ):
        model = apply_cache(kind(), blocks(conditions=conditions), residual_diff_threshold=0.0)
        with pytest.warns(UserWarning, match=r"'y'"):
            run(model, KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_named_conditions_of_any_kind_do_not_warn(kind):
    model = apply_cache(kind(), blocks(conditions=("y",)), residual_diff_threshold=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        denoise_with_new_tensors(model, KINDS[kind])
    assert len({row.branch for row in model_cache_report(model).rows}) == 2


def test_buffers_that_are_filled_again_are_told_apart():
    """Check branches whose buffers are filled again: a pipeline may write the latents and the time of each step into
    the same memory.
    """
    model = apply_cache(Model(), blocks(), residual_diff_threshold=0.0)
    buffers = torch.zeros(1, 6, 8), torch.zeros(1)

    def filled(buffer, value):
        return buffer if torch.equal(buffer, value) else buffer.copy_(value)

    with pytest.warns(UserWarning, match="'y'"):
        denoise(lambda x, t, text: model(filled(buffers[0], x), filled(buffers[1], t), text))


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_named_conditions_do_not_warn_and_are_exact(branches):
    expected = denoise(Model(), branches=branches)
    model = apply_cache(Model(), blocks(conditions=("y",)), residual_diff_threshold=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            reset_cache(model)
            for output, wanted in zip(denoise(model, branches=branches), expected, strict=True):
                assert relative_error(output, wanted) < 1e-6
    assert len({row.branch for row in model_cache_report(model).rows}) == branches
    assert type(remove_cache(model)) is Model


def test_a_single_branch_without_a_condition_does_not_warn():
    model = apply_cache(Model(), blocks(), residual_diff_threshold=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        denoise(model, branches=1)
