"""A call's spec as JSON, and the arguments of a call."""

import json
from dataclasses import replace

import pytest
import torch

from para_core import Segment, SequenceLayout
from para_core.attention.attention_options import AttnOptions
from para_core.attention.block_sparse import read_block_mask
from para_core.attention.schedule import KeptKeys
from para_core.attention.sdpa_call import SdpaCall
from para_core.attention.spec import AttentionSpec
from para_core.dataclass_json import from_json, to_json
from para_core.distributed.mesh import MeshDim
from para_core.distributed.mesh import _sequence_mesh as mesh_of_dims

OPTIONS = [
    {},
    {"rotate_method": "2d", "backend": "triton-int8"},
    {"comm_dtype": torch.float8_e4m3fn, "kept_keys": KeptKeys(1 / 3, 7)},
    {"block_mask": read_block_mask(torch.tensor([[True, False, True], [False, True, True]]), (4, 3))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "none")
@pytest.mark.parametrize("same_layout", [True, False])
def test_a_spec_survives_its_json(options, same_layout):
    options = AttnOptions(**options)
    queries = SequenceLayout((Segment("", 13), Segment("", 5, replicated=True), Segment("", 0, balanced=True)), 6)
    keys = queries if same_layout else SequenceLayout((Segment("", 9),), 6)
    mesh = mesh_of_dims(MeshDim("ring", 2, 1, 'a "name" | of 3', None), MeshDim("ulysses", 3, 0, "", None), "cpu")
    spec = AttentionSpec(queries, keys, mesh, 6, 2, True, 0.5, options, to_json(options))
    other = AttentionSpec.read(json.dumps(json.loads(spec.text)), spec.numbers, spec.scale)
    assert (other.query_layout, other.key_layout) == (queries, keys)
    assert (other.key_layout is other.query_layout) == same_layout
    assert other.options == options
    assert other.mesh == replace(mesh, alone_text="")
    assert (other.num_heads, other.num_kv_heads, other.is_causal, other.scale) == (6, 2, True, 0.5)


@pytest.mark.parametrize("number", ["1|2", "1 2", "x"])
def test_what_is_no_json_is_refused(number):
    with pytest.raises(ValueError):
        from_json(AttnOptions, number)


def test_a_call_binds_its_arguments_as_sdpa_does():
    q = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask, scale=0.3)
    for call in (SdpaCall(q, q, q, mask, scale=0.3), SdpaCall(value=q, key=q, query=q, scale=0.3, attn_mask=mask)):
        assert torch.equal(call.on_one_device(), expected)
        assert torch.equal(call.original(), expected)
    assert SdpaCall(q, q, q, is_causal=True).with_tensors(q, q, q, None).is_causal
    with pytest.raises(TypeError):
        SdpaCall(q, q)
