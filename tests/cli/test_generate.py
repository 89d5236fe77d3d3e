"""``para_core generate`` in this process and on ranks: results, bad lines, continuing and files."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import para_core.cli.signals
import para_core.fleet.rank
from para_core.cli.app import run
from para_core.fleet.failures import EncodingFailed
from para_core.fleet.outputs import Result, encode
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Delivery, Request
from para_core.fleet.result_files import compute_digest, lock_folder, write_atomically
from para_core.option_values import BACKENDS
from para_core.progress import readable_bytes
from tests.scripts import command_on_ranks
from tests.tiny import load_pipe

ROOT = Path(__file__).parents[2]
TINY_FLUX = ROOT / "zoo/flux/pipeline"
CAPTION = "a large red circle in the centre on a white background"
SMALL = ["--size", "64x48", "--steps", "2"]


@pytest.fixture
def prompts(tmp_path):
    """Return a function that writes lines to a file and returns its path."""

    def write(*lines, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return write


@pytest.fixture
def nothing_loads(monkeypatch):
    monkeypatch.setattr(para_core.fleet.rank, "build", lambda *_: pytest.fail("the pipeline was loaded"))


@pytest.fixture
def stand_in(monkeypatch):
    """Replace generation by a fixed image; return the list of prompts that were generated."""
    generated, image = [], Image.new("RGB", (2, 1), "red")

    def generate(pipe, request, recipe, watch):
        generated.append(request.fields["prompt"])
        return Result(tuple(encode([image], request.delivery)), {"request": request.fields})

    monkeypatch.setattr(para_core.fleet.rank, "build", lambda *_: None)
    monkeypatch.setattr(para_core.fleet.rank, "generate_request", generate)
    return generated


def pixels(path):
    return np.asarray(Image.open(path)).astype(int)


def plain_pixels(**call):
    pipe, seed = load_pipe(TINY_FLUX), call.pop("seed")
    call = {"height": 48, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64, **call}
    return np.asarray(pipe(generator=torch.Generator().manual_seed(seed), **call).images[0]).astype(int)


def names_in(folder, pattern="*"):
    return sorted(file.name for file in folder.glob(pattern))


def test_one_prompt_equals_plain_pipeline_and_is_recorded(tmp_path, capsys):
    prompt = "a red circle, 赤い丸"
    assert run(["generate", "--prompt", prompt, "--seed", "7", "--out", str(tmp_path), *SMALL]) == 0
    assert np.array_equal(pixels(tmp_path / "00001.png"), plain_pixels(prompt=prompt, seed=7))
    record = json.loads((tmp_path / "00001.json").read_text())
    assert (record["request"]["seed"], record["files"], record["size"]) == (7, ["00001.png"], "64x48")
    assert set(record["versions"]) == {"para_core", "torch", "diffusers"}
    with Image.open(tmp_path / "00001.png") as image:
        assert image.text["prompt"] == prompt and json.loads(image.text["para_core"]) == record
    # A pipe gets a line for each phase.
    lines = capsys.readouterr().err.splitlines()
    total, transformer = (
        readable_bytes(sum(file.stat().st_size for file in TINY_FLUX.glob(f"{folder}/*.safetensors")))
        for folder in ("*", "transformer")
    )
    loading = next(index for index, line in enumerate(lines) if f"7 components, {total}" in line)
    loaded = lines[loading + 1 : loading + 8]
    assert [line.split(":")[0] for line in loaded] == [f"loaded component {index} of 7" for index in range(1, 8)]
    assert sum(line.endswith(f": transformer ({transformer})") for line in loaded) == 1
    assert "generating, 2 steps" in lines[loading + 8 :]


def test_bad_lines_are_reported_others_generated_and_finished_ones_kept(tmp_path, prompts, capsys):
    out = tmp_path / "out"

    def generated(*options, text="a blue square"):
        path = prompts(
            {"prompt": CAPTION, "seed": 3},
            "{no json",
            "",
            {"prompt": CAPTION, "stepz": 3},
            {"prompt": CAPTION, "height": -8},
            # Only the pipeline itself finds this error, when it is called.
            {"prompt": CAPTION, "prompt_2": 5},
            {"prompt": text, "size": "48x64", "seed": 4},
        )
        assert run(["generate", "--prompts", path, "--out", str(out), *SMALL, *options]) == 1
        stderr = capsys.readouterr().err
        return int(re.search(r"(\d+) generated", stderr)[1]), stderr

    number, stderr = generated()
    assert re.search(r"line 2: .*JSON", stderr)
    assert re.search(r"line 4: FluxPipeline .*'stepz' .*steps\?", stderr)
    assert re.search(r"line 5: .*'height' .*-8.* 1", stderr)
    assert re.search(r"line 6: .*prompt_2", stderr)
    assert (number, names_in(out)) == (2, ["00001.json", "00001.png", "00007.json", "00007.png"])
    expected = plain_pixels(prompt="a blue square", seed=4, height=64, width=48)
    assert np.array_equal(pixels(out / "00007.png"), expected)
    times = [file.stat().st_mtime_ns for file in sorted(out.iterdir())]
    assert generated()[0] == 0
    assert generated(text="a green square")[0] == 1
    # This result is incomplete, as after a crash between the image and its record.
    (out / "00008.json").unlink()
    assert generated(text="a green square")[0] == 1
    assert generated("--cache", "0.1", text="a green square")[0] == 2
    # A run overwrites no result of another run.
    assert [file.stat().st_mtime_ns for file in sorted(out.glob("0000[17].*"))] == times
    assert len(names_in(out, "*.png")) == 6


def test_placed_text_encoders_and_stages_equal_plain_pipeline(rank_pool, tmp_path):
    command = ["generate", "--prompt", CAPTION, "--seed", "7", "--guidance", "2", *SMALL, "--out", str(tmp_path)]
    options = ["--text-encoders", "first", "--vae-placement", "first", "--mesh", "pipe=2", "--backend", "math"]
    command_on_ranks(rank_pool, *command, *options)
    difference = np.abs(pixels(tmp_path / "00001.png") - plain_pixels(prompt=CAPTION, seed=7, guidance_scale=2.0))
    assert difference.max() <= 1


@pytest.mark.long
@pytest.mark.parametrize("torchrun", [False, True])
def test_two_ranks_equal_one_and_survive_a_kill(tmp_path, prompts, torchrun):
    path = prompts({"prompt": CAPTION}, "{" if torchrun else {"prompt": "b", "steps": 10**5}, {"prompt": "a square"})
    command = ["-m", "para_core", "generate", "--prompts", path, "--out", str(tmp_path / "out"), *SMALL]
    command += ["--mesh", "ring=2", *([] if torchrun else ["--ranks", "2"])]
    if torchrun:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *command]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    options = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
    with subprocess.Popen([sys.executable, *command], **options) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "generating line 2" in line:
                children = psutil.Process(process.pid).children()
                next(rank for rank in children if rank.environ()["RANK"] == "1").kill()
    stderr = "".join(lines)
    assert re.search("line 2: .*JSON" if torchrun else "line 2: rank 1 .*SIGKILL", stderr)
    assert "2 generated" in stderr
    for number, prompt in ((1, CAPTION), (3, "a square")):
        difference = np.abs(pixels(tmp_path / f"out/{number:05d}.png") - plain_pixels(prompt=prompt, seed=number - 1))
        assert difference.max() <= 1
    assert json.loads((tmp_path / "out/00003.json").read_text())["mesh"] == {"batch": 1, "ring": 2, "ulysses": 1}


def test_a_dry_run_shows_the_plan_and_the_problems_of_lines(tmp_path, prompts, monkeypatch, capsys, nothing_loads):
    (tmp_path / "here").mkdir()
    (tmp_path / "text.png").write_text("no image")
    monkeypatch.chdir(tmp_path / "here")
    Image.new("RGB", (8, 8)).save("mine.png")
    # An image of a line is relative to the file, and one of the command line to the working directory.
    path = prompts(
        {"prompt": CAPTION},
        *[{"prompt": CAPTION, "ip_adapter_image": name} for name in ("mine.png", "text.png")],
        {"prompt": CAPTION, "size": "99999984x99999984"},
        "[]",
        "[" * 100_000,
        json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False),
        '{"prompt": "\\ud800"}',
    )
    out = tmp_path / "[/b] out"
    options = ["--mesh", "ring=2", "--rotate-method", "allgather", "--cache", "0.1", "--ranks", "2", "--dry-run"]
    options += [*SMALL, "--set", "ip_adapter_image=mine.png", "--out", str(out)]
    assert run(["generate", "--prompts", path, *options]) == 1
    shown = capsys.readouterr().out
    for expected in (
        r"ranks +│ 2",
        r"mesh +│ batch 1 × ring 2 × ulysses 1, rotate_method allgather",
        r"to generate +│ 2, 0 finished, 6 bad",
        r"results +│ .*/\[/b\] out/\*\.png",
        f"line 2: {tmp_path}/mine.png: No such file or directory",
        r"line 3: .*text.png: 8 bytes .*image",
        r"line 4: .*3.1e\+04 TB, .*out .* [GT]B free",
        r"line 5: .*'\[\]'; .*object",
        "line 6: ",
        r"line 8: .*'prompt' .*'\\ud800'",
    ):
        assert re.search(expected, shown), expected
    assert list(out.iterdir()) == []


def test_a_dry_run_shows_what_is_predicted(tmp_path, capsys, nothing_loads):
    # The mesh follows from the number of heads, which is 4. There is no guidance.
    held = []
    for options in (["--ranks", "6"], [], ["--quantize", "int8"], ["--offload", "blocks"], ["--memory", "0.75"]):
        assert run(["generate", "--prompt", CAPTION, "--out", str(tmp_path), "--dry-run", *options, *SMALL]) == 0
        shown = capsys.readouterr().out
        assert "--ranks" not in options or re.search(r"mesh +│ batch 1 × ring 2 × ulysses 3", shown)
        memory = re.search(r"memory +│ ([0-9.e-]+) of ([0-9.]+) GB on each rank", shown)
        held.append(float(memory[1]))
    assert max(held[2:4]) < held[1] == held[4]
    assert memory[2] == "0.75"


def test_line_too_large_for_memory_fails_and_others_run(tmp_path, prompts, stand_in, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    # From an image, four are generated one by one.
    edit = {"prompt": "d", "n": 4, "size": "1040x1040", "ip_adapter_image": "a.png"}
    path = prompts({"prompt": "a"}, {"prompt": "b", "size": "4096x4096"}, {"prompt": "c", "size": "1040x1040"}, edit)
    arguments = ["generate", "--out", str(tmp_path / "out"), "--memory"]
    # A prediction that not even the weights fit limits nothing else.
    assert run([*arguments, "1e-3", "--prompts", path, "--dry-run"]) == 0
    assert run([*arguments, "0.1", "--prompts", path]) == 1
    assert re.search(r"line 2: 16777216 pixels .* 0.543 GB of each rank, .* 0.1 GB", capsys.readouterr().err)
    assert stand_in == ["a", "c", "d"]
    assert run([*arguments, "0.1", "--prompt", "b", "--size", "4096x4096"]) == 1
    assert re.search("^error: 16777216 pixels", capsys.readouterr().err, re.M)


def test_results_that_cannot_be_written_are_refused_before_loading(tmp_path, monkeypatch, capsys, nothing_loads):
    command = ["generate", "--prompt", CAPTION]
    (tmp_path / "file").write_text("")
    assert run([*command, "--out", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
    index = {"_class_name": "WanPipeline", "_diffusers_version": "0.42.1"}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    video = [*command, "--model", str(tmp_path), "--out", str(tmp_path / "out")]
    assert run(video) == 1
    assert "mp4" in capsys.readouterr().err
    assert run([*video, "--format", "gif", "--dry-run"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    assert run([*command, "--out", str(tmp_path / "full")]) == 1
    assert re.search(r"1 MB free, .*1 .*kB .*67\.1 MB", capsys.readouterr().err)


def test_errors_are_one_sentence_and_a_traceback_with_debug(tmp_path, monkeypatch, capsys, nothing_loads):
    arguments = ["generate", "--model", str(tmp_path / "nowhere"), "--prompt", CAPTION, "--out", str(tmp_path)]
    assert run(arguments) == 1
    assert re.fullmatch(r"error: .*'.*nowhere' .*model_index\.json .*\n", capsys.readouterr().err)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run([*arguments, "--debug"])
    named = (["--backend", "flash3"], ["--attention-schedule", "sage"], ["--cross-backend", "sage"])
    for options in [options for options in named if options[1] in BACKENDS]:
        assert run(["generate", "--prompt", CAPTION, "--out", str(tmp_path), *options]) == 1
        assert re.search(r"^error: (flash_attn|sageattention).* install", capsys.readouterr().err, re.M)
    monkeypatch.setattr(para_core, "__file__", str(tmp_path / "para_core/__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert run(["generate", "--prompt", CAPTION]) == 1
    assert "--model black-forest-labs/FLUX.1-dev" in capsys.readouterr().err


def test_prompts_are_read_from_pipes_and_text_files_and_others_are_refused(tmp_path, prompts, stand_in, capsys):
    out = tmp_path / "out"
    read, write = os.pipe()
    os.write(write, b'{"prompt": "a", "stepz": 1}\n')
    os.close(write)
    assert run(["generate", "--prompts", f"/dev/fd/{read}", "--out", str(out)]) == 1
    assert "line 1: FluxPipeline has no field 'stepz'" in capsys.readouterr().err
    os.close(read)
    for content, message in (
        ('[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n', "is one JSON array; expected one object per line"),
        (" \n\n", "is empty; expected one request per line"),
    ):
        assert run(["generate", "--prompts", prompts(content), "--out", str(out)]) == 1
        assert re.match(f"error: .*prompts.jsonl {message}", capsys.readouterr().err)
    path = prompts('a red circle\n\n  {"prompt": "in braces"}\n[b]\n', name="prompts.txt")
    assert run(["generate", "--prompts", path, "--out", str(out)]) == 0
    assert stand_in == ["a red circle", '{"prompt": "in braces"}', "[b]"]
    assert names_in(out, "*.png") == ["00001.png", "00003.png", "00004.png"]


def test_names_of_results_follow_what_is_in_the_folder(tmp_path, prompts, stand_in):
    def new_files(*options):
        before = set(tmp_path.glob("*.*"))
        assert run(["generate", "--out", str(tmp_path), *options]) == 0
        return sorted({file.name for file in set(tmp_path.glob("*.*")) - before} - {"prompts.jsonl"})

    def pair(number, format_="png"):
        return sorted([f"{number:05d}.json", f"{number:05d}.{format_}"])

    assert new_files("--prompt", "a") == pair(1)
    assert new_files("--prompt", "b") == pair(2)
    path = prompts({"prompt": "a"}, {"prompt": "c"}, {"prompt": "d"})
    assert new_files("--prompts", path, "--format", "png") == [*pair(3), *pair(4)]
    assert new_files("--prompts", path) == []
    # Each of two equal lines has its own result.
    assert new_files("--prompts", prompts(*[{"prompt": "a", "seed": 0}] * 2)) == pair(5)
    # A file that no run wrote takes its number too.
    (tmp_path / "00006.jpg").touch()
    assert new_files("--prompt", "e") == pair(7)
    # Another format is another result.
    assert new_files("--prompt", "a", "--format", "jpg") == pair(8, "jpg")
    assert new_files("--prompt", "a", "--fps", "3") == []
    for prompt, number in (("a", 1), ("b", 2)):
        assert new_files("--prompt", prompt, "--name", "my cat") == [f"my cat-{name}" for name in pair(number)]
    ways = [Delivery(format_, fps) for format_ in ("mp4", "gif") for fps in (8, 16)]
    of_videos = {compute_digest(Request({"prompt": "a"}, delivery=way), Recipe("model"), "video") for way in ways}
    assert len(of_videos) == 4


def test_full_disk_and_a_result_of_somebody_else_keep_what_is_there(tmp_path, prompts, stand_in, monkeypatch, capsys):
    fsync, out = os.fsync, tmp_path / "out"
    path = prompts(*[{"prompt": text} for text in "abc"])

    def full(descriptor):
        if stand_in == ["a", "b"]:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr("os.umask", lambda mask: pytest.fail("this would change the umask of all threads"))
    assert run(["generate", "--prompts", path, "--out", str(out)]) == 1
    message = r"^1 generated in .*out/ \(00001\)\nerror: .*out/00002.png: No space left on device.$"
    assert re.search(message, capsys.readouterr().err, re.M)
    assert (stand_in, names_in(out)) == (["a", "b"], ["00001.json", "00001.png"])
    monkeypatch.setattr("os.fsync", fsync)
    generate = para_core.fleet.rank.generate_request

    def slow(*args, **kwargs):
        (out / "00002.json").write_text("of somebody else")
        return generate(*args, **kwargs)

    monkeypatch.setattr(para_core.fleet.rank, "generate_request", slow)
    assert run(["generate", "--prompts", path, "--out", str(out)]) == 1
    assert re.search(r"^error: .*00002\.json exists", capsys.readouterr().err, re.M)
    assert (out / "00002.json").read_text() == "of somebody else"
    assert stand_in == ["a", "b", "b"]
    monkeypatch.setattr(para_core.fleet.rank, "generate_request", lambda *_: EncodingFailed("no room"))
    assert run(["generate", "--prompts", path, "--out", str(out)]) == 1
    assert re.search(r"^line 2: no room$(?s:.*)^line 3: no room$", capsys.readouterr().err, re.M)


def test_one_run_writes_to_a_folder_at_a_time(tmp_path, prompts, stand_in, monkeypatch, capsys):
    out = tmp_path / "ö 日本"
    out.mkdir()
    (out / ".mine").touch()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: None)  # The process was killed before.
        for name in ("00001.png", "my cat-00001-2.webp"):
            write_atomically(out / name, b"")
    arguments = ["generate", "--prompts", prompts({"prompt": ""}), "--out", str(out)]
    with lock_folder(out):
        assert run(arguments) == 1
        assert re.search(r"^error: .*日本", capsys.readouterr().err, re.M)
    assert stand_in == []
    assert run(arguments) == 0
    assert sorted(file.name for file in out.iterdir()) == [".mine", "00001.json", "00001.png"]
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1
