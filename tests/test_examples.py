"""Each example is one file that needs para_core alone, and gives the result of the unmodified pipeline."""

import ast
import re
import shutil
import sys
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import diffusers
import nbformat
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageSequence

from benchmarks import notebook
from para_core.adapters import apply_cache_on_pipe
from tests.scripts import ROOT, alone, as_program, on_ranks, under_torchrun
from zoo.flux import PIPELINE as FLUX
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.pipelines.unet import UNET_PIPELINES
from zoo.tiny.vaes import TINY_VAES
from zoo.video import PIPELINE as WAN

# No extra installs gradio, so its example is run by hand.
EXAMPLES = sorted(path for path in ROOT.glob("*_examples/*.py") if path.stem != "launch_gradio")
PARALLEL, CACHE = ROOT / "parallel_examples", ROOT / "cache_examples"
CENTRE = "a large red circle in the centre on a white background"
TOP_LEFT = "a large red circle in the top left on a white background"
# README's program of one process is like the first, and the second is a variant of run_flux.
LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("launch_flux", "run_sharded")]


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


def draw(cls, model, threshold=None, **options):
    """Return the output of diffusers alone, or with a cache."""
    pipe = getattr(diffusers, cls).from_pretrained(model, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    if threshold is not None:
        apply_cache_on_pipe(pipe, residual_diff_threshold=threshold)
    with torch.no_grad():
        return pipe(generator=torch.Generator().manual_seed(0), **{"output_type": "pil", **options})


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [4, pytest.param("torchrun", marks=pytest.mark.long)])
def test_own_model_example_is_exact(rank_pool, ranks):
    example = PARALLEL / "run_own_model.py"
    # Under torchrun the processes end directly after their last collective, which needs the exit hook of para_core.
    printed = under_torchrun(example) if ranks == "torchrun" else on_ranks(rank_pool, example, ranks=ranks)
    differences = [float(value) for value in re.findall(r"relative difference (\S+)", printed)]
    assert len(differences) == 3
    assert max(differences) < 1e-5


@pytest.mark.parametrize("name", ["run_flux", *LONG])
def test_image_examples_equal_the_unmodified_pipeline(rank_pool, tmp_path, name):
    example, arguments = Path(shutil.copy(PARALLEL / f"{name}.py", tmp_path)), ["--model", str(FLUX), "--size", "48"]
    if name == "launch_flux":
        as_program(example, *arguments, "--ranks", "2", cwd=tmp_path)
    else:
        on_ranks(rank_pool, example, *arguments)
    prompt = TOP_LEFT if name == "run_sharded" else CENTRE
    expected = draw("FluxPipeline", FLUX, prompt=prompt, height=48, width=48, num_inference_steps=28).images[0]
    image = image_of(tmp_path / f"{name.partition('_')[2]}.png")
    assert np.abs(image - np.asarray(expected, dtype=int)).max() <= 1


OUTPUTS = [
    (CACHE, "run_wan", "wan", (64, 64, 17)),
    (CACHE, "run_flux", "flux", (48,)),
    (CACHE, "run_cogvideox", "cogvideox", (48, 80, 13)),
    (CACHE, "run_hunyuan_video", "hunyuan", (48, 80, 13)),
    (CACHE, "run_mochi", "mochi", (48, 80, 13)),
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


@pytest.mark.long
def test_elastic_example_generates_missing_images_only(rank_pool, tmp_path):
    out = tmp_path / "images"
    out.mkdir()
    (out / "0.png").write_text("finished")
    example = Path(shutil.copy(PARALLEL / "run_elastic.py", tmp_path))
    on_ranks(rank_pool, example, "--model", str(FLUX), "--size", "32", "--output", str(out))
    assert sorted(path.name for path in out.iterdir()) == ["0.png", "1.png", "2.png"]
    assert (out / "0.png").read_bytes() == b"finished"
    assert image_of(out / "1.png").shape == (32, 32, 3)


def test_thresholds_example_compares_with_the_uncached_image(rank_pool, tmp_path):
    arguments = ("--model", str(FLUX), "--size", "48", "--steps", "8", "--thresholds", "0", "0.1", "0.4")
    printed = alone(rank_pool, Path(shutil.copy(CACHE / "try_thresholds.py", tmp_path)), *arguments)
    pattern = r"^threshold (\S+): (\d+) of 8 steps skipped, \S+ times as fast, PSNR (\S+) dB$"
    rows = [tuple(map(float, row)) for row in re.findall(pattern, printed, re.MULTILINE)]
    assert [threshold for threshold, _, _ in rows] == [0, 0.1, 0.4]
    assert rows[0][1:] == (0, float("inf"))
    assert 0 < rows[1][1] < rows[2][1]
    call = {"prompt": CENTRE, "height": 48, "width": 48, "num_inference_steps": 8, "output_type": "np"}
    images = [draw("FluxPipeline", FLUX, threshold, **call).images[0] for threshold in (None, 0.4)]
    assert rows[2][2] == pytest.approx(-10 * np.log10(np.mean((images[0] - images[1]) ** 2)), abs=0.1)


@pytest.mark.long
def test_notebook_runs_and_shows_what_is_stored_in_it():
    images = []
    for book in (nbformat.read(notebook.NOTEBOOK, as_version=4), notebook.run()):
        outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
        shown = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
        images.append(image_of(BytesIO(b64decode(shown[0]))))
    assert np.abs(images[0] - images[1]).max() <= 2
