"""Each example is one file that runs wherever para_core is installed, and gives the result of the unmodified
pipeline.
"""

import ast
import os
import re
import runpy
import shutil
import subprocess
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
from skimage.metrics import peak_signal_noise_ratio

from benchmarks import notebook
from para_core.adapters import apply_cache_on_pipe
from tests.scripts import ROOT, alone, on_ranks, processes, under_torchrun
from zoo.flux import PIPELINE as FLUX
from zoo.tiny.pipelines import PIPELINES
from zoo.tiny.pipelines.unet import UNET_PIPELINES
from zoo.tiny.vaes import TINY_VAES
from zoo.video import PIPELINE as WAN

# No extra installs gradio, so its example is run by hand.
EXAMPLES = sorted(path for path in ROOT.glob("*_examples/*.py") if path.stem != "launch_gradio")
PARALLEL, CACHE = ROOT / "parallel_examples", ROOT / "cache_examples"
identify = {"ids": lambda path: f"{path.parent.name}/{path.stem}" if isinstance(path, Path) else None}
# These are the examples of videos: the class, the size, and the call's other arguments as the file has them.
CAT = {"prompt": "a cat walks on the grass"}
VIDEOS = {
    "run_wan": (
        "WanPipeline",
        (64, 64, 17),
        {"prompt": "a red circle moving up left on a white background", "num_inference_steps": 30},
    ),
    "run_cogvideox": ("CogVideoXPipeline", (48, 80, 9), {**CAT, "max_sequence_length": 13}),
    "run_hunyuan_video": ("HunyuanVideoPipeline", (48, 80, 9), {**CAT, "num_inference_steps": 30}),
}  # fmt: skip
RANDOM = {"run_cogvideox": "cogvideox", "run_hunyuan_video": "hunyuan", "run_mochi": "mochi"}


@pytest.mark.parametrize("example", EXAMPLES, **identify)
def test_examples_import_installed_packages_only(example):
    nodes = [node for node in ast.walk(ast.parse(example.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else name.name for node in nodes for name in node.names]
    packages = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert packages <= {"torch", "diffusers", "para_core", "PIL"}
    assert all(node.level == 0 for node in nodes if isinstance(node, ast.ImportFrom))


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.stem != "run_own_model"], **identify)
def test_help_shows_how_to_start_it(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [example.name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(example), run_name="__main__")
    assert end.value.code == 0
    assert f"{example.parent.name}/{example.name}" in capsys.readouterr().out


def copied(example, folder):
    """Return a copy of the example, which runs in its own folder and writes there."""
    return Path(shutil.copy(example, folder))


def image_of(path):
    return np.asarray(Image.open(path)).astype(int)


def frames_of(path):
    with Image.open(path) as video:
        return [np.asarray(frame.convert("RGB"), dtype=int) for frame in ImageSequence.Iterator(video)]


def model_of(name, folder):
    """Return the checkpoint on which an example runs here: a trained one of the repository, or a tiny one with random
    weights.
    """
    if name not in RANDOM:
        return WAN if name == "run_wan" else FLUX
    PIPELINES[RANDOM[name]].build().save_pretrained(folder / "model")
    return folder / "model"


def unmodified(cls, model, prompt, **options):
    """Return the output of diffusers alone."""
    pipe = getattr(diffusers, cls).from_pretrained(model, dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return pipe(prompt, generator=torch.Generator().manual_seed(0), output_type="pil", **options)


def square(size, steps):
    return {"height": size, "width": size, "num_inference_steps": steps}


def differences_in(printed):
    return [float(value) for value in re.findall(r"relative difference (\S+)", printed)]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    "start",
    # The processes end directly after their last collective. tests/test_docs.py explains what may go wrong.
    [processes, pytest.param(under_torchrun, marks=pytest.mark.long)],
)
def test_own_model_example_is_exact_in_processes_of_its_own(start):
    differences = differences_in(start(PARALLEL / "run_own_model.py"))
    assert len(differences) == 3
    assert max(differences) < 1e-5


def test_own_model_example_is_exact_on_four_ranks(rank_pool):
    differences = differences_in(on_ranks(rank_pool, PARALLEL / "run_own_model.py", ranks=4))
    assert len(differences) == 3
    assert max(differences) < 1e-5


CENTRE = "a large red circle in the centre on a white background"
TOP_LEFT = "a large red circle in the top left on a white background"
# Each example of an image with its class, prompt, size and steps.
IMAGES = {
    "run_flux": ("FluxPipeline", CENTRE, 48, 28),
    "run_sharded": ("FluxPipeline", TOP_LEFT, 48, 28),
    "run_stable_diffusion": ("StableDiffusionXLPipeline", TOP_LEFT, 72, 30),
    "launch_flux": ("FluxPipeline", CENTRE, 48, 28),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if "_s" in name else ()) for name in IMAGES],
)
def test_image_examples_equal_the_unmodified_pipeline(rank_pool, name, tmp_path):
    cls, prompt, size, steps = IMAGES[name]
    model, example = FLUX, copied(PARALLEL / f"{name}.py", tmp_path)
    if name == "run_stable_diffusion":
        model = tmp_path / "model"
        UNET_PIPELINES["xl"].build().save_pretrained(model)
    arguments = ["--model", str(model), "--size", str(size)]
    if name == "launch_flux":
        command = [sys.executable, example, *arguments, "--ranks", "2"]
        subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    else:
        printed = on_ranks(rank_pool, example, *arguments)
    if name == "run_sharded":
        held, total = map(float, re.search(r"rank 0 holds (\S+) of (\S+) MB", printed).groups())
        assert held < 0.7 * total
    expected = unmodified(cls, model, prompt, **square(size, steps)).images[0]
    image = image_of(tmp_path / f"{name.partition('_')[2]}.png")
    assert np.abs(image - np.asarray(expected, dtype=int)).max() <= 1


@pytest.mark.slow
def test_notebook_runs_and_shows_what_is_stored_in_it():
    stored = nbformat.read(notebook.NOTEBOOK, as_version=4)
    executed = notebook.run()

    def images(book):
        outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
        return [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]

    decoded = [np.asarray(Image.open(BytesIO(b64decode(images(book)[0]))), dtype=int) for book in (stored, executed)]
    assert np.abs(decoded[0] - decoded[1]).max() <= 2


@pytest.mark.long
def test_pipefusion_example_holds_a_part_on_each_rank(rank_pool, tmp_path):
    example = copied(PARALLEL / "run_pipefusion.py", tmp_path)
    printed = on_ranks(rank_pool, example, "--model", str(FLUX), "--size", "48")
    assert re.search(r"rank 0 holds \S+ MB", printed)
    assert "PipeFusionReport(whole_calls=1, patched_calls=27" in printed
    assert image_of(tmp_path / "pipefusion.png").shape == (48, 48, 3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "run_cogvideox" else pytest.mark.long) for name in VIDEOS]
)
@pytest.mark.long
def test_video_examples_equal_the_unmodified_pipeline(rank_pool, name, tmp_path):
    cls, size, options = VIDEOS[name]
    model = model_of(name, tmp_path)
    on_ranks(rank_pool, copied(PARALLEL / f"{name}.py", tmp_path), "--model", str(model), "--size", *map(str, size))
    sizes = dict(zip(("height", "width", "num_frames"), size, strict=True))
    diffusers.utils.export_to_gif(unmodified(cls, model, **sizes, **options).frames[0], str(tmp_path / "expected.gif"))
    videos = [frames_of(path) for path in (tmp_path / f"{name.removeprefix('run_')}.gif", tmp_path / "expected.gif")]
    assert len(videos[0]) == len(videos[1]) > 1
    # Each frame has its own palette. A value that is rounded in another way may choose another entry, or change the
    # palette of its frame. Videos of another seed or prompt differ in a fifth of all values, and by 17 on average.
    shares = [np.mean(frame != expected) for frame, expected in zip(*videos, strict=True)]
    assert np.median(shares) < 0.01
    assert np.max([np.abs(frame - expected).mean() for frame, expected in zip(*videos, strict=True)]) < 5


@pytest.mark.long
def test_mochi_example_runs_cached_on_two_ranks(rank_pool, tmp_path):
    example = copied(PARALLEL / "run_mochi.py", tmp_path)
    model = model_of("run_mochi", tmp_path)
    printed = on_ranks(rank_pool, example, "--model", str(model), "--size", "48", "80", "13")
    assert re.search(r"^\d+ of \d+ computed", printed, re.MULTILINE)
    assert len(frames_of(tmp_path / "mochi.gif")) > 1


@pytest.mark.parametrize(("ranks", "size"), [(2, (64, 48)), (3, (40, 72))])
def test_vae_example_equals_the_unmodified_vae(rank_pool, ranks, size, tmp_path):
    vae = TINY_VAES["KL"].make()
    vae.save_pretrained(tmp_path / "vae")
    generator = np.random.default_rng(0)
    Image.fromarray(generator.integers(0, 255, (*size, 3), dtype=np.uint8)).save(tmp_path / "photo.png")
    example = copied(PARALLEL / "run_vae.py", tmp_path)
    on_ranks(rank_pool, example, str(tmp_path / "photo.png"), "--model", str(tmp_path), ranks=ranks)
    processor = VaeImageProcessor(vae_scale_factor=8)
    pixels = processor.preprocess(Image.open(tmp_path / "photo.png"))
    with torch.no_grad():
        vae.eval()
        expected = processor.postprocess(vae.decode(vae.encode(pixels).latent_dist.mean).sample)[0]
    assert np.abs(image_of(tmp_path / "vae.png") - np.asarray(expected, dtype=int)).max() <= 1


@pytest.mark.long
def test_elastic_example_generates_missing_images_only(rank_pool, tmp_path):
    example = copied(PARALLEL / "run_elastic.py", tmp_path)
    out = tmp_path / "images"
    out.mkdir()
    for index in (0, 2):
        (out / f"{index}.png").write_text("finished")
    printed = on_ranks(rank_pool, example, "--model", str(FLUX), "--size", "32", "--output", str(out))
    assert "[1]" in printed
    assert sorted(path.name for path in out.iterdir()) == ["0.png", "1.png", "2.png"]
    assert [(out / f"{index}.png").read_bytes() for index in (0, 2)] == [b"finished"] * 2
    assert image_of(out / "1.png").shape == (32, 32, 3)


@pytest.mark.long
def test_cached_flux_example_reports_its_steps(rank_pool, tmp_path):
    example = copied(CACHE / "run_flux.py", tmp_path)
    printed = alone(rank_pool, example, "--model", str(FLUX), "--size", "48")
    computed, steps = map(int, re.search(r"^(\d+) of (\d+) computed", printed, re.MULTILINE).groups())
    assert 0 < computed <= steps == 28
    assert image_of(tmp_path / "flux.png").shape == (48, 48, 3)


def test_thresholds_example_compares_with_the_uncached_image(rank_pool, tmp_path):
    arguments = ("--model", str(FLUX), "--size", "48", "--steps", "8", "--thresholds", "0", "0.1", "0.4")
    printed = alone(rank_pool, copied(CACHE / "try_thresholds.py", tmp_path), *arguments)
    pattern = r"^threshold (\S+): (\d+) of 8 steps skipped, \S+ times as fast, PSNR (\S+) dB$"
    rows = [tuple(map(float, row)) for row in re.findall(pattern, printed, re.MULTILINE)]
    assert [threshold for threshold, _, _ in rows] == [0, 0.1, 0.4]
    assert rows[0][1:] == (0, float("inf"))
    assert 0 < rows[1][1] < rows[2][1]
    pipe = diffusers.FluxPipeline.from_pretrained(FLUX, dtype=torch.float32, local_files_only=True)
    images = []
    for cached in (False, True):
        if cached:
            apply_cache_on_pipe(pipe, residual_diff_threshold=0.4)
        prompt, generator = "a large red circle in the centre on a white background", torch.Generator().manual_seed(0)
        images.append(pipe(prompt, generator=generator, output_type="np", **square(48, 8)).images[0])
    assert rows[2][2] == pytest.approx(peak_signal_noise_ratio(*images, data_range=1.0), abs=0.1)


@pytest.mark.parametrize(
    "name", ["run_wan", *[pytest.param(name, marks=pytest.mark.long) for name in RANDOM]]
)  # fmt: skip
def test_cached_video_examples_write_a_video(rank_pool, name, tmp_path):
    size = ("64", "64", "17") if name == "run_wan" else ("48", "80", "13")
    example = copied(CACHE / f"{name}.py", tmp_path)
    printed = alone(rank_pool, example, "--model", str(model_of(name, tmp_path)), "--size", *size)
    assert re.search(r"^\d+ of \d+ computed", printed, re.MULTILINE)
    assert len(frames_of(tmp_path / f"{name.removeprefix('run_')}.gif")) > 1
