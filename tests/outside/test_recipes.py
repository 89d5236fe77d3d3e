"""Every recipe of docs/any_model.md is exact on several ranks, and wrong if ranks attend to their own tokens only."""

import warnings

import pytest

from tests.outside.recipes import RECIPES, expected, on_mesh
from tests.tiny import cpu_mesh, each_rank_alone, relative_error

BY_NAME = {recipe.name: recipe for recipe in RECIPES}
# The control does not imitate how decoding from an empty cache and a training step attend.
WITHOUT_CONTROL = ("Llama, decoding", "Llama, training")
# The default run has one recipe of each way on three ranks.
ON_THREE = ("Qwen3", "timm ViT", "Stable Diffusion 3.5", "HunyuanVideo", "Wan 2.1", "Llama, decoding")


def outputs(name, shapes, control):
    recipe = BY_NAME[name]
    outs = {shape: on_mesh(recipe, cpu_mesh(*shape)) for shape in shapes}
    if control:
        with each_rank_alone(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outs["each rank alone"] = on_mesh(recipe, cpu_mesh(*shapes[0]))
    return outs


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BY_NAME)
def test_recipe_is_exact_on_two_ranks(rank_pool, name):
    alone, control = expected(BY_NAME[name]), BY_NAME[name].model not in WITHOUT_CONTROL
    for rank, outs in enumerate(rank_pool.run(outputs, 2, name, [(1, 2), (2, 1)], control)):
        for shape in [(1, 2), (2, 1)]:
            assert relative_error(outs[shape], alone) < 2e-6, f"{shape}, rank {rank}"
        if control:
            assert relative_error(outs["each rank alone"], alone) > 1e-3


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith(ON_THREE) else pytest.mark.long) for name in BY_NAME]
)
def test_recipe_is_exact_on_three_ranks(rank_pool, name):
    alone = expected(BY_NAME[name])
    for rank, outs in enumerate(rank_pool.run(outputs, 3, name, [(1, 3), (3, 1)], False)):
        for shape, out in outs.items():
            assert relative_error(out, alone) < 2e-6, f"{shape}, rank {rank}"
