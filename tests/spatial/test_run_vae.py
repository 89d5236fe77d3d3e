"""The example that encodes and decodes an image or a clip writes on ranks what it writes alone."""

import re

import numpy as np
import pytest
from PIL import Image

from tests.scripts import ROOT, alone, on_ranks
from zoo.tiny.vaes import TINY_VAES

EXAMPLE = ROOT / "parallel_examples/run_vae.py"


def written(rank_pool, tmp_path, ranks, *arguments):
    """The image alone and on ``ranks``."""
    paths = [tmp_path / "alone.png", tmp_path / "shared.png"]
    alone(rank_pool, EXAMPLE, *arguments, "--output", str(paths[0]))
    printed = on_ranks(rank_pool, EXAMPLE, *arguments, "--output", str(paths[1]), ranks=ranks)
    assert re.search(r"encoded in .* s, decoded in .* s", printed)
    return [np.asarray(Image.open(path)).astype(int) for path in paths]


def test_image_on_one_rank_equals_three(rank_pool, tmp_path):
    one, other = written(rank_pool, tmp_path, 3, "--height", "72", "--width", "40")
    assert one.shape == (72, 40, 3) and one.std() > 1
    assert np.abs(one - other).max() <= 1


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_clip_on_one_rank_equals_several(rank_pool, tmp_path, ranks):
    TINY_VAES["Wan 2.1"].make().save_pretrained(tmp_path / "vae")
    options = ["--model", str(tmp_path), "--height", "64", "--width", "48", "--frames", "5"]
    one, other = written(rank_pool, tmp_path, ranks, *options)
    assert one.shape == (64, 48, 3) and one.std() > 1
    # In bfloat16, in which the VAE itself rounds by 2 %.
    assert np.abs(one - other).mean() < 1
