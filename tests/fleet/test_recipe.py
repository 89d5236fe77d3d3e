"""Recipes: options that exclude each other, and what follows from several options."""

import json
from dataclasses import asdict, fields

import pytest

from para_core.attention.schedule import AttentionSchedule
from para_core.call_checks import CHECKS
from para_core.declared_options import declarations
from para_core.fleet.recipe import Recipe, approximations, on_one_rank
from para_core.option_values import BACKENDS, EXACT_FORM

EXCLUDED = [
    ({"vae_placement": "offload", "offload": "model"}, "vae_placement is 'offload' with offload 'model'"),
    ({"resident_blocks": -1, "offload": "blocks"}, "^resident_blocks is -1; expected at least 0"),
    ({"mesh": (("ring", 0),)}, "mesh has 'ring=0'"),
    ({"weights": "fsdp", "offload": "blocks"}, "weights are 'fsdp' with offload 'blocks'"),
    *[({check: True, "comm_dtype": "int8"}, "comm_dtype leaves nothing equal") for check in CHECKS],
    *[({check: True, "mesh": (("pipe", 2),)}, "a mesh with pipe leaves nothing equal") for check in CHECKS],
    ({"products": "triton", "quantize": "int8"}, "products is 'triton' with quantize 'int8'"),
    *[
        ({"model": "a.gguf", "config": "b", **options}, f"^{next(iter(options))} is .*a.gguf")
        for options in (
            *({"weights": "fsdp"}, {"weights": "tensor", "mesh": (("tensor", 2),)}, {"quantize": "int8"}),
            *({"compile": "whole"}, {"mesh": (("pipe", 2),)}, {"products": "triton"}),
        )
    ],
]


@pytest.mark.parametrize(("options", "message"), EXCLUDED)
def test_options_that_exclude_each_other_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**{"model": "model", **options})
    Recipe("a.gguf", config="b", offload="blocks", mesh=(("ring", 2),), timeout=365 * 24 * 3600)


def test_text_encoders_follow_other_options():
    for options, placement, waits in (
        ({}, "replicate", False),
        ({"weights": "fsdp"}, "fsdp", False),
        ({"offload": "blocks"}, "offload", True),
        ({"offload": "blocks", "text_encoders": "replicate"}, "replicate", False),
        ({"text_encoders": "first"}, "first", True),
    ):
        recipe = Recipe("model", **options)
        assert (recipe.encoders_placement, recipe.encoders_wait_on_host) == (placement, waits)
    assert not Recipe("model", text_encoders="replicate").moves_weights


def test_one_rank_leaves_out_what_several_ranks_share():
    shared = {"weights": "tensor", "text_encoders": "fsdp", "vae": True}
    shared |= {"rotate_method": "allgather", "comm_dtype": "int8"}
    kept = {"cache": 0.1, "quantize": "int8", "vae_placement": "offload"}
    assert on_one_rank(Recipe("model", mesh=(("tensor", 2),), **shared, **kept)) == Recipe("model", **kept)
    assert on_one_rank(Recipe("model", text_encoders="first")).text_encoders == "first"


# Options that change results by more than rounding, and options that do not.
DECISIVE = [
    *({"model": "other"}, {"pipeline": "FluxImg2ImgPipeline"}, {"config": "a/b"}, {"controlnet": ("a/b",)}),
    *({"dtype": "float16"}, {"cache": 0.1}, {"lora": ("a/b",)}, {"pipefusion": 4}, {"comm_dtype": "int8"}),
    *({"quantize": "int8"}, {"quantize": "int8", "weights": "fsdp"}),
    *({"backend": "flash"}, {"backend": "math"}, {"cross_backend": "flash"}),
    *({"backend": AttentionSchedule(middle)} for middle in BACKENDS),
]
SAME = [
    *({"mesh": (("pipe", 2),)}, {"weights": "fsdp"}, {"rotate_method": "allgather"}, {"timeout": 3.0}),
    *({"offload": "blocks", "resident_blocks": 2}, {"text_encoders": "first"}, {"vae_placement": "first"}),
    *({"vae": True}, {"compile": "whole"}, {"products": "triton"}, {"verify": True}, {"same_bits": True}),
    *({"trust_remote_code": True}, {"cache": 0.0}),
]


def test_each_option_changes_the_digest_or_no_result():
    digests = [Recipe(**{"model": "model", **options}).digest for options in [{}, *DECISIVE]]
    assert len(set(digests)) == len(digests)
    assert {Recipe("model", **options).digest for options in SAME} == {digests[0]}
    assert Recipe("model", pipefusion=4, mesh=(("pipe", 2),)).digest == Recipe("model", pipefusion=4).digest
    assert {name for options in [*DECISIVE, *SAME] for name in options} == {field.name for field in fields(Recipe)}


def test_every_declared_option_is_a_field_of_the_json_form():
    recipe = Recipe("model", backend=AttentionSchedule("math"), comm_dtype="int8", timeout=3.0)
    stored = json.loads(json.dumps(asdict(recipe)))
    assert set(stored) == {field.name for field in fields(Recipe)} >= {each.name for each in declarations(Recipe)}
    assert (stored["comm_dtype"], stored["timeout"], stored["backend"]["middle"]) == ("int8", 3.0, "math")
    of_schedules = [approximations(Recipe("model", backend=AttentionSchedule(middle))) for middle in BACKENDS]
    assert of_schedules == [("attention_schedule",) if name in EXACT_FORM else () for name in BACKENDS]
