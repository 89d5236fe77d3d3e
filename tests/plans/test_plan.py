"""Plans: their effect, what they refuse, and compiling them in parts."""

import gc
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaModel

from para_core.distributed.mesh import one_rank, sequence_mesh
from para_core.plans.apply import apply_plan, remove_plan
from para_core.plans.apply_rules import RuleExecutor
from para_core.plans.plan import Entries, Gather, Plan, Split
from para_core.plans.region import mesh_of_plan
from tests.plans.test_published_plan import GATHER, cut
from tests.tiny import cpu_mesh, fill, relative_error


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, hidden_states, rotation):
        q, k, v = self.project(hidden_states).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q * rotation, k * rotation, v)
        return hidden_states + out.transpose(1, 2).flatten(2)


class Rotation(nn.Module):
    def forward(self, hidden_states):
        return torch.linspace(-1, 1, hidden_states.shape[1])[:, None], torch.ones(())


class Model(nn.Module):
    """A model whose tokens are split at the first block, as Wan's are. A rotation is split at the output of the module
    that makes it.
    """

    def __init__(self):
        super().__init__()
        self.rotation = Rotation()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.proj_out = nn.Linear(8, 8)

    def forward(self, hidden_states):
        # Before the split all ranks compute the same, so nothing may be rerouted.
        hidden_states = hidden_states + F.scaled_dot_product_attention(hidden_states, hidden_states, hidden_states)
        rotation, _ = self.rotation(hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states, rotation)
        out = self.proj_out(hidden_states)
        # After the gather all ranks compute the same again, so nothing may be rerouted.
        return out + F.scaled_dot_product_attention(out, out, out)


PLAN = {
    "rotation": {0: cut(dim=0, dims=2, output=True)},
    "blocks.0": {"hidden_states": cut()},
    "proj_out": GATHER,
}


def run_model(compiled):
    model = fill(Model(), seed=1)
    mesh = cpu_mesh(2, 1) if compiled == "no" else cpu_mesh(1, 2)
    if compiled == "blocks before":
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
    if compiled == "blocks replaced":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="eager", fullgraph=True)
    apply_plan(model, PLAN, sequence_mesh(mesh))
    if compiled == "blocks after":
        for block in model.blocks:
            block.compile(backend="eager", fullgraph=True)
    called = torch.compile(model, backend="eager", fullgraph=True) if compiled == "whole" else model
    outs = [called(tokens(num)) for num in (11, 11, 6)]
    remove_plan(model)
    return outs, called(tokens(11))


def run_decoder(lengths):
    plan = Plan(
        inputs={},
        inner={
            "layers.0": {"hidden_states": Split(1, "text", ndim=3)},
            "rotary_emb": {0: Split(1, like="text"), 1: Split(1, like="text")},
        },
        outputs={"layers.-1": Gather(1, "text")},
        joint_order=("text",),
    )
    model, outs = make_decoder(), []
    apply_plan(model, plan, sequence_mesh(cpu_mesh(1, 2)))
    with torch.no_grad():
        for num in lengths:
            ids = torch.arange(num)[None]
            outs += [model(ids).last_hidden_state, model(ids, attention_mask=torch.ones(1, num)).last_hidden_state]
    return outs


def make_decoder():
    sizes = {"vocab_size": 20, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(1)
    return LlamaModel(LlamaConfig(**sizes, num_attention_heads=4, attn_implementation="sdpa")).eval()


def test_decoder_with_few_tokens_is_exact(rank_pool):
    lengths, model = [1, 2, 3, 4, 5, 9], make_decoder()
    with torch.no_grad():
        expected = [model(torch.arange(num)[None]).last_hidden_state for num in lengths for _ in range(2)]
    for outs in rank_pool.run(run_decoder, 2, lengths):
        errors = [relative_error(out, whole) for out, whole in zip(outs, expected, strict=True)]
        assert max(errors) < 1e-5, errors


def tokens(num):
    return torch.randn(2, num, 8, generator=torch.Generator().manual_seed(num))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "compiled",
    [
        "no",
        "blocks replaced",
        "whole",
        *[pytest.param(x, marks=pytest.mark.long) for x in ("blocks before", "blocks after")],
    ],
)
def test_a_plan_that_cuts_inside_the_model_is_exact(rank_pool, compiled):
    model = fill(Model(), seed=1)
    expected = [model(tokens(num)) for num in (11, 11, 6)]
    for outs, alone in rank_pool.run(run_model, 2, compiled):
        errors = [
            relative_error(out, reference)
            for out, reference in zip([*outs, alone], [*expected, expected[0]], strict=True)
        ]
        assert max(errors) < 1e-5, errors


def apply_in_rounds(in_place):
    model, counter = fill(Model(), seed=1), CompileCounter()
    if in_place:
        model.compile(backend=counter, fullgraph=True)
        called = model
    else:
        called = torch.compile(model, backend=counter, fullgraph=True)
    meshes = {shape: sequence_mesh(cpu_mesh(*shape)) for shape in [(1, 2), (2, 1)]}
    outs, frames = [], []
    for shape in [(1, 2), (1, 2), (2, 1), (1, 2), (2, 1)]:
        apply_plan(model, PLAN, meshes[shape])
        outs.append(called(tokens(11)))
        remove_plan(model)
        assert type(model) is Model
        gc.collect()
        outs.append(called(tokens(11)))
        frames.append(counter.frame_count)
    reference = ref(model)
    torch._dynamo.reset()
    del model, called
    gc.collect()
    return outs, frames, reference() is None


@pytest.mark.parametrize("in_place", [True, False])
def test_next_equal_plan_of_a_compiled_model_uses_its_graphs(rank_pool, in_place):
    expected = fill(Model(), seed=1)(tokens(11))
    for outs, frames, collected in rank_pool.run(apply_in_rounds, 2, in_place):
        assert max(relative_error(out, expected) for out in outs) < 1e-5
        assert frames == [2, 2, 3, 3, 3]
        assert collected


def apply_unfitting():
    model = Model()
    missing = Plan({"hidden_states": Split(1, "image")}, {"nothing": Gather(1, "image")}, ("image",))
    with pytest.raises(ValueError, match=r"'nothing'.* Model "):
        apply_plan(model, missing, sequence_mesh(cpu_mesh(1, 2)))
    assert type(model) is Model
    assert mesh_of_plan(model) is None


def test_plan_of_another_model_changes_nothing(rank_pool):
    rank_pool.run(apply_unfitting, 2)


def cut_entries():
    cutting, of_video = RuleExecutor(sequence_mesh(cpu_mesh(1, 2))), Split(dim=0, like="video")
    whole = torch.arange(5.0)
    rule = Entries((None, of_video, of_video))
    with pytest.raises(TypeError, match=r"rope.* tuple of 2.* 3 "):
        cutting.cut((whole, whole), rule, "rope")
    return cutting.cut((whole, (whole, whole), {"query": whole, "key": whole}), rule, "rope")


def test_entries_of_tuples_and_dicts_are_sharded(rank_pool):
    for own, entries in zip(torch.arange(5.0).tensor_split(2), rank_pool.run(cut_entries, 2), strict=True):
        torch.testing.assert_close(entries, (torch.arange(5.0), (own, own), {"query": own, "key": own}))


def test_replicated_segment_leaves_its_entries_whole():
    of_text, of_image = Split(dim=0, like="text"), Split(dim=0, like="image")
    plan = Plan({}, {}, ("text", "image"), inner={"blocks.*": {"rope": Entries((of_text, of_image))}})
    assert plan.with_replicated("text").inner == {"blocks.*": {"rope": Entries((None, of_image))}}


def test_gather_of_unsharded_segment_is_named():
    cutting = RuleExecutor(one_rank("cpu"))
    with pytest.raises(ValueError, match=r"segment 'image'.* none\."):
        cutting.outputs(torch.ones(1, 2), (Gather(1, "image"),))
    cutting.cut(torch.ones(1, 2), Split(1, segment="image"), "hidden_states")
    assert cutting.outputs(torch.ones(1, 2), (Gather(1, "image"),)).shape == (1, 2)


def gathered_with_text_behind(num):
    mesh = sequence_mesh(cpu_mesh(1, 2))
    cutting = RuleExecutor(mesh)
    video, text = tokens(num), tokens(3)
    held = cutting.cut(video, Split(dim=1, segment="video"), "video")
    (out,) = cutting.outputs((torch.cat([held, text], dim=1),), (Gather(dim=1, segment="video", then_replicated=True),))
    return out


# The last length is smaller than the number of ranks, so every rank holds all tokens.
@pytest.mark.sample(1)
@pytest.mark.parametrize("num", [11, 12, 1])
def test_gather_replicates_later_segments(rank_pool, num):
    expected = torch.cat([tokens(num), tokens(3)], dim=1)
    for out in rank_pool.run(gathered_with_text_behind, 2, num):
        assert torch.equal(out, expected)
