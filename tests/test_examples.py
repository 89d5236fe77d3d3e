"""Each example is one file that needs para_core alone, and gives the result of the unmodified pipeline."""

import ast
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageSequence

from tests.scripts import ROOT, alone, on_ranks
from tests.tiny import load_pipe
from zoo.flux import PIPELINE as FLUX
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.pipelines.unet import UNET_PIPELINES
from zoo.tiny.vaes import TINY_VAES
from zoo.video import PIPELINE as WAN

# No extra installs gradio, so its example is run by hand.
EXAMPLES = sorted(path for path in ROOT.glob("*_examples/*.py") if path.stem != "launch_gradio")
PARALLEL, CACHE = ROOT / "parallel_examples", ROOT / "cache_examples"
CENTRE = "a large red circle in the centre on a white background"


def test_examples_import_installed_packages_only():
    for example in EXAMPLES:
        tree = ast.parse(example.read_text())
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {"." * node.level + node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        packages = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
        assert packages <= {"torch", "diffusers", "para_core", "PIL"}, example


def image_of(path):
    return np.asarray(Image.open(path)).astype(int)


def frames_of(path):
    with Image.open(path) as video:
        return [np.asarray(frame.convert("RGB"), dtype=int) for frame in ImageSequence.Iterator(video)]


def model_of(name, folder):
    """Return a checkpoint for an example: a trained one of the repository, or a tiny one with random weights."""
    if name in ("flux", "wan"):
        return {"flux": FLUX, "wan": WAN}[name]
    build = UNET_PIPELINES[name].build if name in UNET_PIPELINES else PIPELINES[name].build
    build().save_pretrained(folder / "model")
    return folder / "model"


def draw(**options):
    """Return the output of diffusers alone."""
    with torch.no_grad():
        return load_pipe(FLUX)(CENTRE, generator=torch.Generator().manual_seed(0), **options)


def test_own_model_example_is_exact(rank_pool):
    printed = on_ranks(rank_pool, PARALLEL / "run_own_model.py", ranks=4)
    differences = [float(value) for value in re.findall(r"relative difference (\S+)", printed)]
    assert len(differences) == 3
    assert max(differences) < 1e-5


def test_image_example_equals_the_unmodified_pipeline(rank_pool, tmp_path):
    on_ranks(rank_pool, Path(shutil.copy(PARALLEL / "run_flux.py", tmp_path)), "--model", str(FLUX), "--size", "48")
    expected = draw(height=48, width=48, num_inference_steps=28).images[0]
    image = image_of(tmp_path / "flux.png")
    assert np.abs(image - np.asarray(expected, dtype=int)).max() <= 1


OUTPUTS = [
    (CACHE, "run_wan", "wan", (64, 64, 17)),
    (CACHE, "run_flux", "flux", (48,)),
    (CACHE, "run_cogvideox", "cogvideox", (48, 80, 13)),
    (CACHE, "run_hunyuan_video", "hunyuan", (48, 80, 13)),
    (PARALLEL, "run_mochi", "mochi", (48, 80, 13)),
    (PARALLEL, "run_pipefusion", "flux", (48,)),
    (PARALLEL, "run_stable_diffusion", "xl", (72,)),
    (PARALLEL, "run_wan", "wan", (64, 64, 17)),
    (PARALLEL, "run_hunyuan_video", "hunyuan", (48, 80, 9)),
    (PARALLEL, "run_cogvideox", "cogvideox", (48, 80, 9)),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("folder", "name", "model", "size"), OUTPUTS)
def test_example_writes_its_image_or_video(rank_pool, tmp_path, folder, name, model, size):
    example = Path(shutil.copy(folder / f"{name}.py", tmp_path))
    run = on_ranks if folder is PARALLEL else alone
    printed = run(rank_pool, example, "--model", str(model_of(model, tmp_path)), "--size", *map(str, size))
    assert folder is PARALLEL or re.search(r"^\d+ of \d+ computed", printed, re.MULTILINE)
    (written,) = [path for path in tmp_path.glob(f"{name.removeprefix('run_').partition('_')[0]}*") if path.is_file()]
    assert (len(frames_of(written)) > 1) == (len(size) == 3)


def test_vae_example_equals_the_unmodified_vae(rank_pool, tmp_path):
    vae = TINY_VAES["KL"].make()
    vae.save_pretrained(tmp_path / "vae")
    generator = np.random.default_rng(0)
    Image.fromarray(generator.integers(0, 255, (40, 72, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    example = Path(shutil.copy(PARALLEL / "run_vae.py", tmp_path))
    on_ranks(rank_pool, example, str(tmp_path / "photo.png"), "--model", str(tmp_path), ranks=3)
    processor = VaeImageProcessor(vae_scale_factor=8)
    pixels = processor.preprocess(Image.open(tmp_path / "photo.png"))
    with torch.no_grad():
        expected = processor.postprocess(vae.eval().decode(vae.encode(pixels).latent_dist.mean).sample)[0]
    assert np.abs(image_of(tmp_path / "vae.png") - np.asarray(expected, dtype=int)).max() <= 1
