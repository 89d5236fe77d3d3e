"""Branches distributed over ranks: what code in between may do with results that are not there yet."""

import pickle

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from para_core.guidance import Guidance
from para_core.mesh import guided_mesh


class Model:
    """Counts its calls; branches differ."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, branch, as_dict=False):
        self.calls += 1
        if as_dict:
            return {"sample": x.sin() * (branch + 1)}
        return (x.sin() * (branch + 1), (x[:1] + branch).double())


def combine_at_once(model, x):
    cond, extra = model(x, 0)
    uncond, _ = model(x, 1)
    return uncond + 2.0 * (cond - uncond) + extra.sum().float()


def cut_first(model, x):
    """As Qwen-Image's pipelines do: the first result is sharded before the second is called."""
    cond = model(x, 0)[0][:, :3].unsqueeze(0).to(torch.float64).squeeze(0)
    first, second = model(x, 1)[0].chunk(2, dim=1)
    return torch.cat([cond.float() + first, second], dim=1)


def scaled_first(model, x):
    """LTX-2's pipelines make of each result something else, together with the latents."""
    cond = x - 0.5 * model(x, 0)[0].float()
    return cond - model(x, 1)[0]


def used_by_the_second(model, x):
    cond = model(x, 0)[0]
    return model(cond, 1)[0] - cond


def three_branches(model, x):
    return sum(model(x, branch)[0] for branch in range(3))


def only_one(model, x):
    return model(x, 0)[0].clone()


def asked_for_a_number(model, x):
    cond = model(x, 0)[0]
    return model(x, 1)[0] * float(cond.norm())


def changed_in_place(model, x):
    cond = model(x, 0)[0]
    before, column = cond * 3.0, cond[:, :1]
    cond.mul_(2.0)
    cond[:, 0] = 1.0
    return before + column + cond - model(x, 1)[0]


def in_another_form(model, x):
    cond = model(x, 0, True)["sample"]
    return cond - model(x, 1, False)[0]


def seen_by_numpy(model, x):
    cond, uncond = model(x, 0)[0], model(x, 1)[0]
    assert "tensor" in repr(cond)
    return torch.from_numpy(cond.numpy() - pickle.loads(pickle.dumps(uncond)).numpy())


# Name of the loop body -> calls of this model that a rank of two computes in its second round of it.
BODIES = {
    combine_at_once: (1, 1),
    cut_first: (1, 1),
    scaled_first: (2, 2),
    used_by_the_second: (2, 2),
    three_branches: (2, 1),
    only_one: (1, 1),
    asked_for_a_number: (1, 1),
    changed_in_place: (2, 2),
    seen_by_numpy: (1, 1),
    in_another_form: (1, 1),
}


def run(body, model, call):
    """Three rounds of a loop; of each its result, and how often it ran ``model``."""
    x = torch.linspace(-1, 1, 12).view(2, 6)
    outs = []
    for _ in range(3):
        before = model.calls
        x = body(call, x)
        outs.append((x.clone(), model.calls - before))
    return outs


def run_shared(name):
    guidance = Guidance(guided_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("batch",))).batch)
    model = Model()
    with guidance.generation():
        return run(
            {body.__name__: body for body in BODIES}[name], model, lambda *args: guidance.call(model, model, args, {})
        )


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_code_does_with_results_that_are_not_there_yet_is_exact(rank_pool, body):
    model = Model()
    expected = run(body, model, model)
    for rank, outs in enumerate(rank_pool.run(run_shared, 2, body.__name__)):
        for (out, _), (alone, _) in zip(outs, expected, strict=True):
            assert torch.equal(out, alone)
        assert outs[2][1] == BODIES[body][rank]
