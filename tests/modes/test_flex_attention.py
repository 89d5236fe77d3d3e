"""flex_attention under a mode, compared with flex_attention on one device."""

import re
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._pytree import tree_map

from para_core import Segment, SequenceLayout, UnifiedAttnMode
from para_core.attention.attention_options import AttnOptions
from para_core.attention.attention_plan import AttentionPlan
from para_core.attention.flex_exchange import enter, leave
from para_core.attention.spec import AttentionSpec
from para_core.distributed.mesh import sequence_mesh
from tests.attention.one_device import make_qkv, relative_error
from tests.modes.outcomes import outcome
from tests.operators import Operators
from tests.tiny import cpu_mesh


def causal(b, h, q, k):
    return q >= k


def per_head(b, h, q, k):
    return (q - k).abs() <= 2 + h


def by_distance(score, b, h, q, k):
    return score - (h + 1) * 0.1 * (q - k).abs()


def attend(q, k, v, **options):
    with warnings.catch_warnings(action="ignore"):  # flex_attention warns that it is slow without torch.compile.
        return flex_attention(q, k, v, **options)


ONE_BLOCK = torch.ones(1, 1, 1).int(), torch.zeros(1, 1, 1, 1).int(), None, None, 1 << 30
CASES = [
    (7, 2, 2, None, causal, None, None),
    (12, 2, 2, None, causal, 4, (None, None)),
    (10, 3, 1, None, lambda b, h, q, k: k <= q + 2 * b, 128, (2, None)),
    (3, 3, 3, by_distance, None, 128, (None, None)),
]


def call_of(S, H, H_kv, score_mod, mask_mod, block, batch_and_heads):
    """Return query, key, value, the mask over all tokens, and the other options of a case."""
    mask = None
    if block is None:
        mask = BlockMask.from_kv_blocks(*ONE_BLOCK, mask_mod, (S, S))
    elif mask_mod is not None:
        mask = create_block_mask(mask_mod, *batch_and_heads, S, S, device="cpu", BLOCK_SIZE=block)
    return make_qkv(S, H, H_kv=H_kv, D=16), mask, {"score_mod": score_mod, "enable_gqa": H_kv != H}


LAYOUTS = (13, 4, 2, by_distance, per_head, 4, (None, 4))
CROSS_MASK = create_block_mask(lambda b, h, q, k: (q - k).abs() <= 3, None, None, 13, 5, device="cpu", BLOCK_SIZE=4)


def attend_in_mode():
    mesh, outs = cpu_mesh(2, 1), {}
    with torch.no_grad():
        for index, case in enumerate(CASES):
            qkv, mask, options = call_of(*case)
            with UnifiedAttnMode(mesh) as cp:
                parts = [cp.shard(x, dim=2) for x in qkv]
                out = attend(*parts, block_mask=mask if mask is None else cp.shard(mask), **options)
                outs[index] = cp.gather(out, dim=2)
        (q, k, v), mask, options = call_of(*LAYOUTS)
        with UnifiedAttnMode(mesh) as cp:
            balanced = cp.sequence(13, balance="causal")
            parts = [cp.shard(x, dim=2, sequence=balanced) for x in (q, k, v)]
            out = attend(*parts, block_mask=cp.shard(mask), **options)
            outs["balanced"] = cp.gather(out, dim=2, sequence=balanced)
            first = create_block_mask(lambda b, h, q, k: (h == 0) & (k >= 0), None, None, 13, 13, "cpu", 4)
            seen = cp.shard(first).mask_mod.local_mask_mod(*torch.tensor([0, 1, 0, 0]))
            assert seen, "a full block of a mask that was made from the first head is not full for the second"
        with UnifiedAttnMode(mesh) as cp:
            # Cross-attention reads keys that are replicated.
            keys, values = (cp.replicated(x[:, :, :5]) for x in (k, v))
            out = attend(cp.shard(q, dim=2), keys, values, block_mask=cp.shard(CROSS_MASK), **options)
            outs["replicated keys"] = cp.gather(out, dim=2, sequence=cp.sequence(13))
        # Five tokens are replicated, and eight tokens after them are sharded.
        layout = SequenceLayout((Segment("text", 5, replicated=True), Segment("image", 8)), 2)
        with UnifiedAttnMode(mesh, layout=layout) as cp:
            image = cp.sequence(8)
            parts = [torch.cat([x[:, :, :5], cp.shard(x[:, :, 5:], 2, sequence=image)], dim=2) for x in (q, k, v)]
            out, lse = attend(*parts, block_mask=cp.shard(mask), return_lse=True, **options)
            for name, x in (("out", out), ("lse", lse)):
                text, own = x.split([5, x.shape[2] - 5], dim=2)
                outs[name] = torch.cat([text, cp.gather(own, dim=2, sequence=image)], dim=2)
    return outs


def test_flex_attention_equals_one_device(rank_pool):
    expected = {}
    for index, case in enumerate(CASES):
        qkv, mask, options = call_of(*case)
        expected[index] = attend(*qkv, block_mask=mask, **options)
    (q, k, v), mask, options = call_of(*LAYOUTS)
    expected["out"], expected["lse"] = attend(q, k, v, block_mask=mask, return_lse=True, **options)
    expected["balanced"] = expected["out"]
    expected["replicated keys"] = attend(q, k[:, :, :5], v[:, :, :5], block_mask=CROSS_MASK, **options)
    for outs in rank_pool.run(attend_in_mode, 2):
        for name, whole in expected.items():
            finite = whole.nan_to_num(neginf=-100.0)
            assert relative_error(outs[name].nan_to_num(neginf=-100.0), finite) < 1e-5, name


def attend_compiled():
    """Return the relative error of a compiled call with captured tensors, whose mask is sharded inside."""
    slopes, documents = torch.tensor([0.1, 0.5, 0.3]), torch.tensor([0] * 5 + [1] * 8)

    def score_mod(score, b, h, q, k):
        return score - slopes[h] * (q - k).abs()

    def mask_mod(b, h, q, k):
        return (documents[q] == documents[k]) & (q >= k)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(cp, q, k, v, mask):
        tokens = cp.sequence(q.shape[2])
        q, k, v = (cp.shard(x, 2, sequence=tokens) for x in (q, k, v))
        out = flex_attention(q, k, v, score_mod=score_mod, block_mask=cp.shard(mask, sequence=tokens))
        return cp.gather(out, 2, sequence=tokens)

    qkv, mask, _ = call_of(13, 3, 3, None, mask_mod, 4, (None, None))
    with torch.no_grad(), UnifiedAttnMode(cpu_mesh(1, 2)) as cp:
        out = run(cp, *qkv, mask)
    return relative_error(out, attend(*qkv, score_mod=score_mod, block_mask=mask))


def test_compiled_with_captured_tensors_equals_one_device(rank_pool):
    assert max(rank_pool.run(attend_compiled, 2)) < 1e-5


def compare_with_traced():
    """Return the operators that ran, and whether their results have the traced shapes and strides."""
    layout, compared = SequenceLayout((Segment("text", 5, replicated=True), Segment("image", 8)), 2), []
    for shape in ((2, 1), (1, 2)):
        mesh = sequence_mesh(cpu_mesh(*shape))
        inputs = [x.requires_grad_() for x in make_qkv(layout.size(mesh.rank), 4, H_kv=2, D=16)]
        plan = AttentionPlan(AttentionSpec(layout, layout, mesh, 4, 2, options_text=AttnOptions().as_text()))
        columns = torch.zeros(13, plan.spec.queries.size(mesh.ring.index), requires_grad=True)
        with Operators() as operators:
            query, key, value = enter(*inputs, plan)
            torch.autograd.grad(leave(query, plan).sum() + key.sum() + value.sum(), inputs)
            arguments = (columns.T[None, None], plan.spec.text, plan.spec.numbers, None)
            torch.ops.para_core.attention_to_learn(*inputs, *arguments)[0].sum().backward()
        for operator, args, out in operators.calls:
            if operator.namespace == "para_core":
                traced = operator(*tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, args))
                same = [(x.shape, x.stride()) == (y.shape, y.stride()) for x, y in zip(out, traced, strict=True)]
                compared.append((str(operator), all(same)))
    return compared


def test_results_have_the_traced_shapes(rank_pool):
    for compared in rank_pool.run(compare_with_traced, 2):
        assert len(compared) == 12 and all(same for _, same in compared), compared


MISUSES = {
    "whole": (lambda cp, mask, own: mask, r"cp\.shard\(block_mask\)"),
    "of own length": (lambda cp, mask, own: own, r"cp\.shard\(block_mask\)"),
    "own on one rank": (lambda cp, mask, own: cp.shard(mask) if cp._mesh.rank else own, r"cp\.shard\(block_mask\)"),
    "twice": (lambda cp, mask, own: cp.shard(cp.shard(mask)), ""),
    "another layout": (lambda cp, mask, own: cp.shard(mask, sequence=cp.sequence(12, balance="causal")), ""),
    "other lengths": (lambda cp, mask, own: cp.shard(mask, sequence=cp.sequence(13)), "13"),
    "number on rank 1": (lambda cp, mask, own: cp.shard(mask, sequence=(None, 12)[cp._mesh.rank]), "rank 1: .* int "),
}


def misuse():
    mesh, errors = cpu_mesh(1, 2), {}
    qkv, mask, _ = call_of(12, 2, 2, None, causal, 4, (None, None))
    for name, (mask_of, _) in MISUSES.items():

        def call(mask_of=mask_of):
            with torch.no_grad(), UnifiedAttnMode(mesh) as cp:
                parts = [cp.shard(x, dim=2) for x in qkv]
                own = create_block_mask(causal, None, None, *[parts[0].shape[2]] * 2, device="cpu")
                attend(*parts, block_mask=mask_of(cp, mask, own))

        errors[name] = outcome(call)
    return errors


def test_unfitting_masks_raise_on_every_rank(rank_pool):
    for errors in rank_pool.run(misuse, 2):
        for name, (_, words) in MISUSES.items():
            assert re.match(f"(Value|Type)Error: (?s:.*){words}", errors[name]), (name, errors[name])


def gradients(ring, ulysses):
    """Return gradients of the operator itself, because flex_attention computes none on a CPU."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    S, mesh = 13, cpu_mesh(ring, ulysses)
    q, k, v = (x.requires_grad_() for x in make_qkv(S, 4, H_kv=2, D=16))
    weights = make_qkv(S, 4, D=16, seed=1)[0]
    mask = create_block_mask(per_head, None, 4, S, S, device="cpu", BLOCK_SIZE=4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(q, k, v, mask):
        return operator(q, k, v, by_distance, mask.as_tuple(), 0.25, {})[0]

    whole = torch.autograd.grad((run(q, k, v, mask) * weights).sum(), (q, k, v))
    with UnifiedAttnMode(mesh) as cp:
        # The parts are leaves, because Dynamo reads .grad of its inputs.
        parts = [cp.shard(x, dim=2).detach().requires_grad_() for x in (q, k, v)]
        out = run(*parts, cp.shard(mask))
        own = torch.autograd.grad((out * cp.shard(weights, dim=2)).sum(), parts)
        return [relative_error(cp.gather(x, dim=2), reference) for x, reference in zip(own, whole, strict=True)]


# Dynamo makes such a function while it traces how score_mod indexes a tensor.
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning")
@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_gradients_equal_one_device(rank_pool, shape):
    for errors in rank_pool.run(gradients, 2, *shape):
        assert max(errors) < 1e-5, errors
