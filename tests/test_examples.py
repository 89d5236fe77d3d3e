"""Each example is one file that runs wherever para_core is installed: alone, under torchrun, and, copied, away from the repository."""

import ast
import re
import runpy
import shutil
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
from PIL import Image, ImageSequence

from tests.scripts import ROOT, alone, on_ranks, under_torchrun
from zoo.tiny.pipelines.registry import PIPELINES
from zoo.tiny.pipelines.unet import UNET_PIPELINES

EXAMPLES = sorted(ROOT.glob("*_examples/*.py"))
PARALLEL, CACHE = ROOT / "parallel_examples", ROOT / "cache_examples"
NEED_RANKS = ("run_elastic", "run_own_model", "run_pipefusion", "run_sharded")
ONE_OR_MORE_RANKS = [path for path in EXAMPLES if path.parent == PARALLEL and path.stem not in NEED_RANKS]
# Those whose tiny pipeline has random weights, by the name of what stands in for a checkpoint.
RANDOM = {"run_cogvideox": "cogvideox", "run_hunyuan_video": "hunyuan", "run_mochi": "mochi"}
VIDEOS = {
    "run_hunyuan_video": ["--ring", "2", "--parallel-vae"],
    "run_mochi": ["--batch", "2"],
    "run_cogvideox": [],
    "run_wan": ["--batch", "2", "--parallel-vae"],
}
identify = {"ids": lambda path: f"{path.parent.name}/{path.stem}" if isinstance(path, Path) else None}


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch, tmp_path):
    """In this process, where only what ends before that is run."""

    def loaded(*args, **kwargs):
        raise AssertionError("a checkpoint was asked for")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    for name in ("DiffusionPipeline", "FluxPipeline", "AutoModel", "AutoPipelineForText2Image"):
        monkeypatch.setattr(getattr(diffusers, name), "from_pretrained", loaded)
    monkeypatch.setattr("torch.distributed.init_process_group", loaded)


def ending(example, arguments, monkeypatch, capsys):
    """With which code it ends, and what it prints, as one line."""
    monkeypatch.setattr(sys, "argv", [example.name, *arguments.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr()
    return end.value.code, " ".join((printed.out + printed.err).split())


@pytest.mark.parametrize("example", EXAMPLES, **identify)
def test_nothing_but_what_a_user_has_is_imported(example):
    trees = ast.parse(example.read_text())
    at_the_top = [node for node in trees.body if isinstance(node, ast.Import | ast.ImportFrom)]
    every = [node for node in ast.walk(trees) if isinstance(node, ast.Import | ast.ImportFrom)]

    def packages(nodes):
        names = [[node.module] if isinstance(node, ast.ImportFrom) else [x.name for x in node.names] for node in nodes]
        return {name.partition(".")[0] for inner in names for name in inner} - set(sys.stdlib_module_names)

    assert packages(at_the_top) <= {"torch", "diffusers", "para_core", "PIL", "numpy"}
    # Later, the repository's tiny pipelines, where no --model is given.
    assert packages(every) - packages(at_the_top) <= {"zoo"}
    assert all(node.level == 0 for node in every if isinstance(node, ast.ImportFrom))


@pytest.mark.parametrize("example", EXAMPLES, **identify)
def test_help_shows_how_to_start_it(example, monkeypatch, capsys):
    code, printed = ending(example, "--help", monkeypatch, capsys)
    assert code == 0
    assert example.name in printed


BAD = [
    *[(path, "--ring 2", "ranks.* torchrun --nproc_per_node=N") for path in ONE_OR_MORE_RANKS if path.stem in ("run_flux", *VIDEOS)],
    *[(PARALLEL / f"{name}.py", "--batch 2", "ranks") for name in ("run_mochi", "run_wan", "run_stable_diffusion")],
    *[(PARALLEL / f"{name}.py", "", "ranks.* torchrun --nproc_per_node=N") for name in NEED_RANKS],
    *[(path, "--steps 0", "--steps .*0") for path in EXAMPLES if path.stem not in ("run_own_model", "run_vae")],
    *[(path, "--threshold -1", "--threshold .*-1.* 0") for path in EXAMPLES if path.parent == CACHE],
    *[(path, "--runs 0", "--runs .*0") for path in EXAMPLES if path.parent == CACHE or path in ONE_OR_MORE_RANKS],
    *[(path, "--height 100 --width 96", r"--height 100 --width 96.* \d+") for path in EXAMPLES if path.parent == CACHE or path in ONE_OR_MORE_RANKS],
    *[(path, "--output nowhere/out.png", "nowhere/out.png") for path in EXAMPLES if path.stem not in ("run_own_model", "run_elastic")],
    *[(path, "--output out", r"out.* \.") for path in EXAMPLES if path.stem not in ("run_own_model", "run_elastic")],
    *[(path, "--frames 16", r"--frames 16.*16, .*[46] k \+ 1 ") for path in EXAMPLES if path.stem in VIDEOS],
    (PARALLEL / "run_elastic.py", "--size 100", "--size .*100.* 16"),
    (PARALLEL / "run_sharded.py", "--weights tensor --tensor 0", "--tensor .*0"),
    (PARALLEL / "run_pipefusion.py", "--patches -1", r"num_patches=-1\).* 1"),
    (PARALLEL / "run_pipefusion.py", "--patches 4 --warmup 0", r"warmup_steps=0\).* 1"),
    (PARALLEL / "run_vae.py", "--frames 9", "--frames 9 "),
    (PARALLEL / "run_vae.py", "--image nowhere.png", r"nowhere\.png"),
    (CACHE / "run_wan.py", "--threshold nan", "--threshold .*nan.* 0"),
    (CACHE / "run_flux.py", "--plot nowhere/steps.png", r"nowhere/steps\.png: .*\.png"),
]  # fmt: skip


@pytest.mark.parametrize(("example", "arguments", "message"), BAD, **identify)
def test_bad_options_exit_before_loading(example, arguments, message, monkeypatch, capsys):
    code, printed = ending(example, arguments, monkeypatch, capsys)
    assert code == 2
    assert re.search(f"error: .*{message}", printed), printed


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.stem in VIDEOS], **identify)
def test_missing_video_writer_exits_before_loading(example, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, printed = ending(example, "--output out.mp4", monkeypatch, capsys)
    assert code == 2
    assert re.search(r"\.mp4 .*pip install imageio imageio-ffmpeg", printed)


def test_impossible_folder_exits_before_loading(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    code, printed = ending(PARALLEL / "run_elastic.py", "--output no/such/folder", monkeypatch, capsys)
    assert code == 2
    assert re.search("--output .*no/such/folder", printed)


@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path.stem not in ("run_own_model", "run_vae")], **identify
)
def test_copy_asks_for_a_model(example, monkeypatch, capsys, tmp_path):
    copy = shutil.copy(example, tmp_path)
    code, printed = ending(Path(copy), "", monkeypatch, capsys)
    assert code == 2
    assert "the following arguments are required: --model" in printed


def image_of(path):
    return np.asarray(Image.open(path)).astype(int)


def frames_of(path):
    with Image.open(path) as video:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(video)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_own_model_example_is_exact_on_every_mesh(rank_pool, ranks):
    printed = on_ranks(rank_pool, PARALLEL / "run_own_model.py", ranks=ranks)
    differences = [float(value) for value in re.findall(r"relative difference (\S+)", printed)]
    assert len(differences) == 3
    assert max(differences) < 1e-5


def test_flux_copy_on_one_rank_equals_two(rank_pool, tmp_path):
    copy = Path(shutil.copy(PARALLEL / "run_flux.py", tmp_path))
    size = ["--steps", "2", "--height", "80", "--width", "48"]
    paths = [tmp_path / "alone.png", tmp_path / "shared.png"]
    alone(rank_pool, copy, *size, "--model", str(ROOT / "zoo/flux/pipeline"), "--output", str(paths[0]))
    printed = under_torchrun(PARALLEL / "run_flux.py", *size, "--ring", "2", "--output", str(paths[1]))
    assert re.search(r"^DeviceMesh\(\(batch=1, ring=2, ulysses=1\).*: 2 steps in \S+ s; ", printed, re.MULTILINE)
    images = [image_of(path) for path in paths]
    assert images[0].shape == (80, 48, 3)
    assert np.abs(images[0] - images[1]).max() <= 1


@pytest.mark.long
def test_stable_diffusion_copy_on_one_rank_equals_two(rank_pool, tmp_path):
    example = PARALLEL / "run_stable_diffusion.py"
    paths = [tmp_path / "alone.png", tmp_path / "shared.png"]
    UNET_PIPELINES["xl"].build().save_pretrained(tmp_path / "model")
    copy = Path(shutil.copy(example, tmp_path))
    alone(rank_pool, copy, "--model", str(tmp_path / "model"), "--output", str(paths[0]))
    on_ranks(rank_pool, example, "--parallel-vae", "--output", str(paths[1]))
    assert np.abs(image_of(paths[0]) - image_of(paths[1])).max() <= 1


@pytest.mark.parametrize("name", VIDEOS)
def test_video_copy_on_one_rank_equals_two(rank_pool, name, tmp_path):
    model = ROOT / "zoo/video/pipeline"
    if name in RANDOM:
        model = tmp_path / "model"
        PIPELINES[RANDOM[name]].build().save_pretrained(model)
    example = PARALLEL / f"{name}.py"
    copy = Path(shutil.copy(example, tmp_path))
    paths = [tmp_path / "alone.gif", tmp_path / "shared.gif"]
    alone(rank_pool, copy, "--model", str(model), "--steps", "2", "--output", str(paths[0]))
    printed = on_ranks(rank_pool, example, *VIDEOS[name], "--steps", "2", "--output", str(paths[1]))
    assert re.search(r"^DeviceMesh\(.*: 2 steps in \S+ s; ", printed, re.MULTILINE)
    videos = [frames_of(path) for path in paths]
    assert len(videos[0]) == len(videos[1]) > 1
    # Each frame has a palette of its own: a rounded value may choose another entry.
    assert all(np.mean(one != other) < 0.01 for one, other in zip(*videos, strict=True))


def test_vae_example_on_two_ranks_equals_one(rank_pool, tmp_path):
    paths = [tmp_path / "alone.png", tmp_path / "shared.png"]
    size = ["--height", "64", "--width", "48", "--runs", "1", "--output"]
    alone(rank_pool, Path(shutil.copy(PARALLEL / "run_vae.py", tmp_path)), *size, str(paths[0]))
    printed = on_ranks(rank_pool, PARALLEL / "run_vae.py", *size, str(paths[1]))
    assert re.search(r"^\[1, 3, 64, 48\]: encoded in \S+ s, decoded in \S+ s, medians of 1$", printed, re.MULTILINE)
    assert np.abs(image_of(paths[0]) - image_of(paths[1])).max() <= 1


@pytest.mark.parametrize("weights", ["fsdp", pytest.param("tensor", marks=pytest.mark.long)])
def test_the_sharded_example_holds_a_part_on_each_rank(rank_pool, weights, tmp_path):
    path = tmp_path / "sharded.png"
    printed = on_ranks(
        rank_pool, PARALLEL / "run_sharded.py", "--weights", weights, "--steps", "2", "--output", str(path)
    )
    held, total = map(float, re.search(r"rank 0 holds (\S+) of (\S+) MB", printed).groups())
    assert held < 0.7 * total
    assert image_of(path).shape == (128, 128, 3)


@pytest.mark.parametrize(
    "arguments", [["--patches", "3", "--steps", "8"], pytest.param(["--steps", "2"], marks=pytest.mark.long)]
)
def test_the_stages_example_holds_a_part_on_each_rank(rank_pool, arguments, tmp_path):
    path = tmp_path / "stages.png"
    printed = on_ranks(rank_pool, PARALLEL / "run_pipefusion.py", *arguments, "--output", str(path))
    assert re.search(r"rank 0 holds \S+ MB", printed)
    assert ("PipeFusionReport(whole_calls=1, patched_calls=7" in printed) == ("--patches" in arguments)
    assert image_of(path).shape == (128, 128, 3)


def test_the_elastic_example_generates_only_what_is_missing(rank_pool, tmp_path):
    arguments = ["--steps", "2", "--output", str(tmp_path / "images"), "--prompts", "a red circle"]
    for added, missing in (((), "[0]"), (("a blue square",), "[1]")):
        printed = on_ranks(rank_pool, PARALLEL / "run_elastic.py", *arguments, *added)
        assert missing in printed
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["0.png", "1.png"]


def test_cached_flux_copy_writes_images_and_plot(rank_pool, tmp_path):
    copy, path = Path(shutil.copy(CACHE / "run_flux.py", tmp_path)), tmp_path / "flux.png"
    arguments = ["--steps", "6", "--height", "80", "--width", "48", "--threshold", "0.5", "--output", str(path)]
    model = ["--model", str(ROOT / "zoo/flux/pipeline"), "--plot", str(tmp_path / "steps.png")]
    printed = alone(rank_pool, copy, *model, *arguments)
    assert re.search(r"^[1-5] of 6 computed, [1-5] skipped", printed, re.MULTILINE)
    assert re.search(r"^without the cache \S+ s, with it \S+ s: \S+ × \(medians of 3\); ", printed, re.MULTILINE)
    images = [image_of(place) for place in (path, tmp_path / "flux_without.png")]
    assert images[0].shape == images[1].shape == (80, 48, 3)
    assert not np.array_equal(*images)
    assert (tmp_path / "steps.png").exists()


@pytest.mark.parametrize(
    "name",
    ["run_wan", *[pytest.param(name, marks=pytest.mark.long) for name in VIDEOS if name != "run_wan"]],
)
def test_cached_video_examples_generate_both_videos(rank_pool, name, tmp_path):
    path = tmp_path / "video.gif"
    arguments = ["--steps", "4", "--runs", "1", "--threshold", "1e9", "--output", str(path)]
    printed = alone(rank_pool, CACHE / f"{name}.py", *arguments)
    # The first of each branch.
    assert re.search(r"^1 of 4 computed|^2 of 8 computed", printed, re.MULTILINE)
    videos = [frames_of(place) for place in (path, tmp_path / "video_without.gif")]
    assert len(videos[0]) == len(videos[1]) > 1
