"""CFG branches are distributed over ranks. Code between the branches may use results that are not there yet."""

import pickle
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from para_core.cfg.guidance import Guidance
from para_core.distributed.mesh import guided_mesh
from tests.test_dataclasses import Frozen


class Model:
    """A model that counts its calls and whose branches differ."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, branch, form="tuple"):
        self.calls += 1
        x = getattr(x, "x", x)  # A dataclass may hold it.
        out = x.sin() * (branch + 1)
        outputs = {"parts": ([out], None, (x[:1] + branch,)), "twice": {"sample": torch.cat([out] * 2)}}
        outputs |= {"transposed": (out.mT,), "nothing": (None,)}
        return outputs.get(form, (out, (x[:1] + branch).double()))


def combine_at_once(model, x):
    cond, extra = model(x, 0)
    uncond, _ = model(x, 1)
    return uncond + 2.0 * (cond - uncond) + extra.sum().float()


def cut_first(model, x):
    """Shard the first result before the second call, as the pipelines of Qwen-Image do."""
    cond = model(x, 0)[0][:, :3].unsqueeze(0).to(torch.float64).squeeze(0)
    first, second = model(x, 1)[0].chunk(2, dim=1)
    return torch.cat([cond.float() + first, second], dim=1)


def between_latents_changed_in_place(model, x):
    """Mix results with latents that are changed in place between the calls, as the pipelines of Cosmos do."""
    x = x.clone()
    cond = torch.where(x > 0, x * (1 - torch.tensor(0.5)), model(x, 0)[0])
    x.add_(1.0)
    uncond = x - 0.5 * model(x, 1)[0].float()
    x.mul_(0.5)
    return cond - uncond + x


def through_weights(model, x):
    cond = model(x, 0)[0] @ torch.eye(6)
    return cond - model(x, 1)[0]


def used_by_the_second(model, x):
    cond = model(x, 0)[0]
    second = model(cond, 1)[0]
    return model(Frozen(second), 1)[0] - cond


def three_branches(model, x):
    return sum(model(x, branch)[0] for branch in range(3))


def after_calls_without_output(model, x):
    assert model(x, 0, "nothing") == model(x, 1, "nothing") == (None,)
    return x.clone()


def as_views_that_need_the_strides(model, x):
    cond, uncond = model(x, 0, "transposed")[0], model(x, 1, "transposed")[0]
    return cond.mT.view(2, 6) - uncond.mT.view(12).view(2, 6)


def changed_in_place(model, x):
    cond = model(x, 0)[0]
    before, column = cond * 3.0, cond[:, :1]
    cond.mul_(2.0)
    cond[:, 0] = 1.0
    return before + column + cond - model(x, 1)[0]


def between_random_numbers(model, x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        cond = model(x, 0)[0]
        noise = torch.rand_like(cond) + torch.randn(2, 6)
        return cond + noise - model(x, 1)[0]


def with_parts_that_are_not_there(model, x):
    """Combine outputs with lists and None among them, like the videos, sounds and actions of Cosmos 3."""
    (cond,), nothing, (extra,) = model(x, 0, "parts")
    (uncond,), also_nothing, _ = model(x, 1, "parts")
    assert nothing is None and also_nothing is None
    return uncond - cond + extra


def in_another_form(model, x):
    """Combine outputs whose size and container depend on a string, as ``kv_cache_mode`` of Qwen-Image 2.1."""
    cond = model(x, 0, "twice")["sample"][:2]
    return cond - model(x, 1)[0]


def read_by_other_code(model, x):
    cond, uncond = model(x, 0)[0], model(x, 1)[0]
    assert abs(float(cond.mean()) - float(f"{cond.mean():.3f}")) < 1e-3 and "tensor" in repr(cond)
    assert len(cond.tolist()) == 2 and min(cond.data_ptr(), cond.untyped_storage().data_ptr()) > 0
    return torch.from_dlpack(cond) + torch.from_numpy(cond.numpy()) - pickle.loads(pickle.dumps(uncond))


# The tuple of each loop body has the calls of each of two ranks in a round whose output shapes are known.
BODIES = {
    **dict.fromkeys((combine_at_once, cut_first, between_latents_changed_in_place), (1, 1)),
    **dict.fromkeys((after_calls_without_output, as_views_that_need_the_strides), (1, 1)),
    **dict.fromkeys((read_by_other_code, in_another_form, with_parts_that_are_not_there), (1, 1)),
    **dict.fromkeys((between_random_numbers, through_weights, changed_in_place), (2, 0)),
    used_by_the_second: (3, 0),
    three_branches: (2, 1),
}


def run(body, model, call):
    """Run three rounds of a loop. Return the result of each round, and how often it called ``model``."""
    x = torch.linspace(-1, 1, 12).view(2, 6)
    outs = []
    for _ in range(3):
        before = model.calls
        x = body(call, x)
        outs.append((x.clone(), model.calls - before))
    return outs


def on_meta(model, args, kwargs):
    return Model()(*[x.to("meta") if isinstance(x, torch.Tensor) else x for x in args], **kwargs)


def shared_by_two(foresee):
    return Guidance(guided_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=("batch",))).batch, foresee)


def run_shared(foresee):
    results = {}
    for body in BODIES:
        guidance, model = shared_by_two(foresee), Model()
        with guidance.generation():
            results[body.__name__] = run(body, model, lambda *args: guidance.call(model, model, args, {}))  # noqa: B023
    return results


@pytest.mark.parametrize("foresee", [None, on_meta], ids=["seen once", "foreseen"])
def test_code_on_lazy_results_is_exact(rank_pool, foresee):
    for rank, results in enumerate(rank_pool.run(run_shared, 2, foresee)):
        for body, calls in BODIES.items():
            model, outs = Model(), results[body.__name__]
            for (out, _), (alone, _) in zip(outs, run(body, model, model), strict=True):
                assert torch.equal(out, alone), body
            # A shape that was not foreseen is known after all ranks have computed it.
            counts = [count for _, count in outs[0 if foresee else 2 :]]
            assert counts == [calls[rank]] * len(counts), body


def run_another_form():
    """Return the error of the first call on this rank whose output has another shape than a call with equal inputs."""
    guidance, model = shared_by_two(None), Model()

    def compute(x, branch):
        out, _ = model(x, branch)
        return out if branch < 2 else out.mT

    with pytest.raises(RuntimeError) as raised, guidance.generation():
        guidance.call(model, compute, (torch.ones(2, 6), 0), {})
        guidance.finish()
        lazy = guidance.call(model, compute, (torch.ones(2, 6), 2), {})
        with pytest.raises(RuntimeError, match=r"t_.* changes the shape .*\[2, 6\]"):
            lazy.t_()
        guidance.call(model, compute, (torch.ones(2, 6), 3), {})
    return str(raised.value)


def test_an_output_of_another_form_than_before_raises(rank_pool):
    for message in rank_pool.run(run_another_form, 2):
        assert re.search(r"Model returned .*\[6, 2\].* \[2, 6\]", message), message


def wrong_dtype(model, args, kwargs):
    output = on_meta(model, args, kwargs)
    return (output[0].double(), *output[1:])


def not_on_the_last(model, args, kwargs):
    return None if dist.get_rank() == 1 else on_meta(model, args, kwargs)


def run_twice(foresee, broken):
    """Return the errors of two generations, the first of which may break on rank 1, the last result, all outputs."""
    guidance, model, errors, out, kept, watched = shared_by_two(foresee), Model(), [], None, [], []

    def compute(*args):
        if broken and not errors and dist.get_rank() == 1:
            raise IndexError("this rank's own")
        return model(*args)

    def call(*args):
        output = guidance.call(model, compute, args, {})
        # Neither a view nor a weak reference is a reason to leave a tensor without data.
        kept.extend([output[0][:, :3], *output])
        watched.append(weakref.ref(output[1]))
        return output

    for _ in range(2):
        try:
            with guidance.generation():
                out = combine_at_once(call, torch.ones(2, 6))
        except (IndexError, RuntimeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors, out, kept


@pytest.mark.parametrize(
    ("foresee", "broken", "messages"),
    [
        (wrong_dtype, False, ["RuntimeError: .*Model"] * 2),
        (on_meta, True, ["ValueError: mesh rank 1: this rank's own", "IndexError: this rank's own"]),
        (None, True, ["ValueError: mesh rank 1: this rank's own", "IndexError: this rank's own"]),
        (not_on_the_last, False, ["ValueError: .*output.* rank 0 .*rank 1 "] * 2),
    ],
    ids=["another dtype", "an error of one rank", "an error of one rank, seen once", "foreseen on one rank"],
)
def test_unforeseen_output_raises_on_every_rank_and_the_next_call_is_right(rank_pool, foresee, broken, messages):
    for (errors, out, kept), message in zip(rank_pool.run(run_twice, 2, foresee, broken), messages, strict=True):
        assert re.match(message, errors[0])
        assert {type(x) for x in kept} == {torch.Tensor}
        missing = [True] * (len(kept) - 6) + [foresee is not_on_the_last] * 6
        assert [bool(x.isnan().all()) for x in kept] == missing
        if foresee is not not_on_the_last:
            assert len(errors) == 1, errors
            assert torch.equal(out, combine_at_once(Model(), torch.ones(2, 6)))
