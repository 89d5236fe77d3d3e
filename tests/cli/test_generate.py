"""``para_core generate`` in this process and on ranks: results, bad lines, continuing, and errors found before the
first step.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import namedtuple
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

import para_core.cli.signals
import para_core.fleet.rank
from para_core.cli.app import run
from para_core.fleet.outputs import Result, compute_digest, encode, lock_folder, write_atomically
from para_core.fleet.recipe import Recipe
from para_core.fleet.request import Delivery, Request
from tests.scripts import command_on_ranks

ROOT = Path(__file__).parents[2]
TINY_FLUX = ROOT / "zoo/flux/pipeline"
CAPTION = "a large red circle in the centre on a white background"
SMALL = ["--size", "64x48", "--steps", "2"]


@pytest.fixture
def prompts(tmp_path):
    """Return a function that writes lines to a file and returns its path."""

    def write(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return str(path)

    return write


def pixels(path):
    return np.asarray(Image.open(path)).astype(int)


def plain_pixels(**call):
    """Generate with diffusers alone."""
    pipe = FluxPipeline.from_pretrained(TINY_FLUX, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    seed = call.pop("seed")
    call = {"height": 48, "width": 64, "num_inference_steps": 2, "max_sequence_length": 64, **call}
    return np.asarray(pipe(generator=torch.Generator().manual_seed(seed), **call).images[0]).astype(int)


def test_one_prompt_equals_plain_pipeline_and_is_recorded(tmp_path):
    prompt = "a red circle, 赤い丸"
    assert run(["generate", "--prompt", prompt, "--seed", "7", "--out", str(tmp_path), *SMALL]) == 0
    assert np.array_equal(pixels(tmp_path / "00001.png"), plain_pixels(prompt=prompt, seed=7))
    record = json.loads((tmp_path / "00001.json").read_text())
    assert record["request"]["seed"] == 7
    assert record["files"] == ["00001.png"]
    assert record["size"] == "64x48"
    assert set(record["versions"]) == {"para_core", "torch", "diffusers"}
    with Image.open(tmp_path / "00001.png") as image:
        assert image.text["prompt"] == prompt
        assert json.loads(image.text["para_core"]) == record


def test_bad_lines_are_reported_and_others_generated(tmp_path, prompts, capsys):
    path = prompts(
        {"prompt": CAPTION, "seed": 3},
        "{no json",
        "",
        {"prompt": CAPTION, "stepz": 3},
        {"prompt": CAPTION, "height": -8},
        # Only the pipeline itself finds this error, when it is called.
        {"prompt": CAPTION, "prompt_2": 5},
        {"prompt": "a blue square", "size": "48x64", "seed": 4},
    )
    assert run(["generate", "--prompts", path, "--out", str(tmp_path / "out"), *SMALL]) == 1
    stderr = capsys.readouterr().err
    assert re.search(r"line 2: .*JSON", stderr)
    assert re.search(r"line 4: FluxPipeline .*'stepz' .*steps\?", stderr)
    assert re.search(r"line 5: .*'height' .*-8.* 1", stderr)
    assert re.search(r"line 6: .*prompt_2", stderr)
    assert "2 generated" in stderr
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "00001.json",
        "00001.png",
        "00007.json",
        "00007.png",
    ]
    expected = plain_pixels(prompt="a blue square", seed=4, height=64, width=48)
    assert np.array_equal(pixels(tmp_path / "out/00007.png"), expected)


def test_finished_lines_are_kept_until_changed(tmp_path, prompts, capsys):
    out = tmp_path / "out"

    def generated(*options, second="a blue square"):
        path = prompts({"prompt": CAPTION}, {"prompt": second})
        assert run(["generate", "--prompts", path, "--out", str(out), *SMALL, *options]) == 0
        return int(re.search(r"(\d+) generated", capsys.readouterr().err)[1])

    assert generated() == 2
    times = [file.stat().st_mtime_ns for file in sorted(out.iterdir())]
    assert generated() == 0
    assert [file.stat().st_mtime_ns for file in sorted(out.iterdir())] == times
    assert generated(second="a green square") == 1
    assert generated(second="a green square") == 0
    # This result is incomplete, as after a crash between the image and its record.
    (out / "00003.json").unlink()
    assert generated(second="a green square") == 1
    assert generated("--cache", "0.1", second="a green square") == 2
    # A run overwrites no result of another run.
    assert [file.stat().st_mtime_ns for file in sorted(out.glob("0000[12].*"))] == times
    assert sorted(file.name for file in out.glob("*.png")) == [f"0000{i}.png" for i in range(1, 7)]


def test_files_of_lines_are_found_and_fit_the_disk(tmp_path, prompts, monkeypatch, capsys):
    monkeypatch.setattr(para_core.fleet.rank, "build", not_called)
    (tmp_path / "here").mkdir()
    (tmp_path / "text.png").write_text("no image")
    monkeypatch.chdir(tmp_path / "here")
    Image.new("RGB", (8, 8)).save("mine.png")
    # An image of a line is relative to the file, and one of the command line to the working directory.
    path = prompts(
        {"prompt": CAPTION},
        *[{"prompt": CAPTION, "ip_adapter_image": name} for name in ("mine.png", "absent.png", "text.png")],
        {"prompt": CAPTION, "size": "99999984x99999984"},
    )
    options = ["--set", "ip_adapter_image=mine.png", "--out", str(tmp_path / "out"), "--dry-run"]
    assert run(["generate", "--prompts", path, *options]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"to generate +│ 1, 0 finished, 4 bad", shown)
    assert f"line 2: {tmp_path}/mine.png: No such file or directory" in shown
    assert re.search(r"line 3: .*absent.png", shown)
    assert re.search(r"line 4: .*text.png: 8 bytes .*image", shown)
    assert re.search(r"line 5: .*3.1e\+07 GB, .*out .* GB free", shown)


@pytest.mark.long
def test_line_too_large_for_memory_fails_and_others_run(tmp_path, prompts, monkeypatch, capsys):
    generated = stand_in(monkeypatch)
    path = prompts({"prompt": "a"}, {"prompt": "b", "size": "4096x4096"}, {"prompt": "c", "size": "1040x1040"})
    arguments = ["generate", "--prompts", path, "--out", str(tmp_path / "out"), "--memory"]
    # A prediction that not even the weights fit limits nothing else.
    assert run([*arguments, "1e-3", "--dry-run"]) == 0
    assert run([*arguments, "0.1"]) == 1
    stderr = capsys.readouterr().err
    assert re.search(r"line 2: 16777216 pixels .* 0.543 GB of each rank, .* 0.1 GB", stderr)
    assert "2 generated" in stderr
    assert generated == ["a", "c"]
    assert run(["generate", "--prompt", "b", "--size", "4096x4096", "--out", str(tmp_path), "--memory", "0.1"]) == 1
    assert re.search("^error: 16777216 pixels", capsys.readouterr().err, re.M)


def not_called(*_):
    raise AssertionError("the pipeline was loaded")


Usage = namedtuple("Usage", "total used free")


def test_unwritable_results_are_refused_before_loading(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(para_core.fleet.rank, "build", not_called)
    command = ["generate", "--prompt", CAPTION]
    (tmp_path / "file").write_text("")
    assert run([*command, "--out", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
    assert run([*command, "--out", str(tmp_path), "--format", "mp4"]) == 2
    assert re.search(r"FluxPipeline .*png or jpg or webp", capsys.readouterr().err)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 10**6))
    assert run([*command, "--out", str(tmp_path / "full")]) == 1
    assert re.search(r"1\.0 MB free, .*1 .*0\.1 MB .*67\.1 MB", capsys.readouterr().err)


def test_missing_video_writer_is_refused_before_loading(tmp_path, monkeypatch, capsys):
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "WanPipeline", "_diffusers_version": "0.42.1"})
    )
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    arguments = ["generate", "--model", str(tmp_path), "--prompt", CAPTION, "--out", str(tmp_path / "out")]
    assert run(arguments) == 1
    assert "mp4" in capsys.readouterr().err
    assert run([*arguments, "--format", "gif", "--dry-run"]) == 0


def test_errors_are_one_sentence_and_a_traceback_with_debug(tmp_path, capsys):
    arguments = ["generate", "--model", str(tmp_path / "nowhere"), "--prompt", CAPTION, "--out", str(tmp_path)]
    assert run(arguments) == 1
    stderr = capsys.readouterr().err
    assert re.fullmatch(r"error: .*'.*nowhere' .*model_index\.json .*\n", stderr)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run([*arguments, "--debug"])


@pytest.mark.parametrize(
    "options",
    [
        *[["--backend", backend] for backend in ("flash3", "flash4", "sage")],
        ["--attention-schedule", "sage"],
        ["--cross-backend", "sage"],
    ],
)
def test_missing_attention_library_is_named_before_loading(tmp_path, monkeypatch, capsys, options):
    monkeypatch.setattr(para_core.fleet.rank, "build", not_called)
    assert run(["generate", "--prompt", CAPTION, "--out", str(tmp_path), *options]) == 1
    assert re.search(r"^error: (flash_attn|sageattention).* install", capsys.readouterr().err, re.M)


def test_value_of_an_argument_is_checked_before_loading(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(para_core.fleet.rank, "build", not_called)
    assert run(["generate", "--prompt", CAPTION, "--set", "true_cfg_scale=high", "--out", str(tmp_path)]) == 2
    assert re.search("^error: --set true_cfg_scale .*'high'", capsys.readouterr().err, re.M)


def test_prompts_are_read_from_a_pipe(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(para_core.fleet.rank, "build", not_called)
    read, write = os.pipe()
    os.write(write, b'{"prompt": "a", "stepz": 1}\n')
    os.close(write)
    assert run(["generate", "--prompts", f"/dev/fd/{read}", "--out", str(tmp_path / "out")]) == 1
    assert "line 1: FluxPipeline has no field 'stepz'" in capsys.readouterr().err
    os.close(read)


def test_text_file_has_a_prompt_in_each_line(tmp_path, monkeypatch, capsys):
    generated = stand_in(monkeypatch)
    path = tmp_path / "prompts.txt"
    path.write_text('a red circle\n\n  {"prompt": "in braces"}\n[b]\n')
    assert run(["generate", "--prompts", str(path), "--out", str(tmp_path / "out")]) == 0
    assert generated == ["a red circle", '{"prompt": "in braces"}', "[b]"]
    assert sorted(file.name for file in (tmp_path / "out").glob("*.png")) == ["00001.png", "00003.png", "00004.png"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"prompt": "a"}]', "is one JSON array; expected one object per line"),
        ('[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n', "is one JSON array; expected one object per line"),
        ("", "is empty; expected one request per line"),
        (" \n\n", "is empty; expected one request per line"),
    ],
)
def test_other_prompt_files_say_what_is_expected(tmp_path, capsys, content, message):
    path = tmp_path / "prompts.json"
    path.write_text(content)
    assert run(["generate", "--prompts", str(path), "--out", str(tmp_path / "out")]) == 1
    assert re.match(f"error: .*prompts.json {message}", capsys.readouterr().err)


def test_sigterm_ends_with_a_sentence(tmp_path, prompts, monkeypatch, capsys):
    generated = stand_in(monkeypatch)
    generate, before = para_core.fleet.rank.generate, signal.getsignal(signal.SIGTERM)

    def terminated(*args, **kwargs):
        if generated:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate(*args, **kwargs)

    monkeypatch.setattr(para_core.fleet.rank, "generate", terminated)
    path = prompts({"prompt": "a"}, {"prompt": "b"})
    assert run(["generate", "--prompts", path, "--out", str(tmp_path / "out")]) == 143
    assert re.search("^ended by SIGTERM: .*\n1 generated in .* \\(00001\\)\n\\Z", capsys.readouterr().err, re.M)
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr(para_core.fleet.rank, "generate", generate)
    assert run(["generate", "--prompts", path, "--out", str(tmp_path / "out")]) == 0
    assert generated == ["a", "b"]


def test_more_ranks_than_gpus_are_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert run(["generate", "--prompt", CAPTION, "--out", str(tmp_path), "--ranks", "3"]) == 2
    assert "2 GPUs" in capsys.readouterr().err


def test_lines_end_at_newlines_and_bad_ones_are_reported(tmp_path, prompts, monkeypatch, capsys):
    monkeypatch.setattr(para_core.fleet.rank, "build", not_called)
    path = prompts("[" * 100_000, json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False), '{"prompt": "\\ud800"}')
    assert run(["generate", "--prompts", path, "--out", str(tmp_path / "out"), "--dry-run"]) == 1
    shown = capsys.readouterr().out
    assert "line 1: " in shown
    assert re.search(r"line 3: .*'prompt' .*'\\ud800'", shown)
    assert re.search(r"to generate +│ 1, 0 finished, 2 bad", shown)


def stand_in(monkeypatch):
    """Replace generation by a fixed image; return the list of prompts that were generated."""
    generated, image = [], Image.new("RGB", (2, 1), "red")

    def generate(pipe, request, recipe, watch):
        generated.append(request.fields["prompt"])
        return Result(tuple(encode([image], request.delivery)), {"request": request.fields})

    monkeypatch.setattr(para_core.fleet.rank, "build", lambda *_: None)
    monkeypatch.setattr(para_core.fleet.rank, "generate", generate)
    return generated


def test_full_disk_keeps_finished_results(tmp_path, prompts, monkeypatch, capsys):
    generated, fsync = stand_in(monkeypatch), os.fsync
    path = prompts(*[{"prompt": text} for text in "abc"])

    def full(descriptor):
        if generated == ["a", "b"]:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    assert run(["generate", "--prompts", path, "--out", str(tmp_path / "out")]) == 1
    stderr = capsys.readouterr().err
    assert re.search(
        r"^1 generated in .*out/ \(00001\)\nerror: .*out/00002.png: No space left on device.$", stderr, re.M
    )
    assert generated == ["a", "b"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["00001.json", "00001.png"]


def generated_files(out, *options):
    before = set(out.glob("*"))
    assert run(["generate", "--out", str(out), *options]) == 0
    return sorted(path.name for path in set(out.glob("*")) - before)


def test_results_of_other_requests_are_never_overwritten(tmp_path, prompts, monkeypatch, capsys):
    stand_in(monkeypatch)
    assert generated_files(tmp_path, "--prompt", "a") == ["00001.json", "00001.png"]
    assert generated_files(tmp_path, "--prompt", "b") == ["00002.json", "00002.png"]
    assert "1 generated" in capsys.readouterr().err
    path = prompts({"prompt": "a"}, {"prompt": "c"}, {"prompt": "d"})
    assert generated_files(tmp_path, "--prompts", path, "--format", "png")[1::2] == ["00003.png", "00004.png"]
    assert generated_files(tmp_path, "--prompts", path) == []
    # Each of two equal lines has its own result.
    path = prompts(*[{"prompt": "a", "seed": 0}] * 2)
    assert generated_files(tmp_path, "--prompts", path) == ["00005.json", "00005.png"]
    # A file that no run wrote takes its number too.
    (tmp_path / "00006.jpg").touch()
    assert generated_files(tmp_path, "--prompt", "e") == ["00007.json", "00007.png"]


def test_other_format_is_another_result(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    assert generated_files(tmp_path, "--prompt", "a") == ["00001.json", "00001.png"]
    assert generated_files(tmp_path, "--prompt", "a", "--format", "jpg") == ["00002.jpg", "00002.json"]
    assert generated_files(tmp_path, "--prompt", "a", "--fps", "3") == []
    ways = [Delivery(format_, fps) for format_ in ("mp4", "gif") for fps in (8, 16)]
    of_videos = {compute_digest(Request({"prompt": "a"}, delivery=way), Recipe("model"), "video") for way in ways}
    assert len(of_videos) == 4


def test_names_begin_with_the_given_one(tmp_path, monkeypatch, capsys):
    stand_in(monkeypatch)
    for prompt, number in (("a", 1), ("b", 2)):
        files = generated_files(tmp_path, "--prompt", prompt, "--name", "my cat")
        assert files == [f"my cat-0000{number}.json", f"my cat-0000{number}.png"]
    assert generated_files(tmp_path, "--prompt", "a") == ["00001.json", "00001.png"]
    (tmp_path / ".my cat-00001.png.abcd_123").touch()
    assert generated_files(tmp_path, "--prompt", "a", "--name", "my cat") == []
    for name in ("../a", "a/b", ".a", ""):
        assert run(["generate", "--prompt", "a", "--out", str(tmp_path), "--name", name]) != 0
        assert "name" in capsys.readouterr().err


def test_result_that_appears_meanwhile_is_not_overwritten(tmp_path, prompts, monkeypatch, capsys):
    generated = stand_in(monkeypatch)
    path = prompts({"prompt": "a"}, {"prompt": "b"})
    generate = para_core.fleet.rank.generate

    def slow(*args, **kwargs):
        (tmp_path / "00001.json").write_text("of somebody else")
        return generate(*args, **kwargs)

    monkeypatch.setattr(para_core.fleet.rank, "generate", slow)
    assert run(["generate", "--prompts", path, "--out", str(tmp_path)]) == 1
    assert re.search(r"^error: .*00001\.json exists", capsys.readouterr().err, re.M)
    assert (tmp_path / "00001.json").read_text() == "of somebody else"
    assert generated == ["a"]


def test_one_run_writes_to_a_folder_at_a_time(tmp_path, prompts, monkeypatch, capsys):
    generated = stand_in(monkeypatch)
    out = tmp_path / "ö 日本"
    out.mkdir()
    for name in (".00001.png.abcd_123", ".mine"):
        (out / name).touch()
    arguments = ["generate", "--prompts", prompts({"prompt": ""}), "--out", str(out)]
    with lock_folder(out):
        assert run(arguments) == 1
        assert re.search(r"^error: .*日本", capsys.readouterr().err, re.M)
    assert generated == []
    assert run(arguments) == 0
    assert sorted(file.name for file in out.iterdir()) == [".mine", "00001.json", "00001.png"]


@pytest.mark.slow
def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path, prompts, monkeypatch, capsys):
    monkeypatch.setattr(para_core.fleet.rank, "build", not_called)
    path = prompts({"prompt": CAPTION}, "[]", {"prompt": CAPTION})
    out = tmp_path / "out"
    options = ["--mesh", "ring=2", "--rotate-method", "2d", "--cache", "0.1", "--ranks", "2", "--dry-run", *SMALL]
    assert run(["generate", "--prompts", path, "--out", str(out), *options]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"ranks +│ 2", shown)
    assert re.search(r"mesh +│ batch 1 × ring 2 × ulysses 1, rotate_method 2d", shown)
    assert re.search(r"to generate +│ 2, 0 finished, 1 bad", shown)
    assert re.search(r"line 2: .*'\[\]'; .*object", shown)
    assert list(out.iterdir()) == []
    # The mesh follows from the number of heads, which is 4. There is no guidance.
    run(["generate", "--prompt", CAPTION, "--out", str(out), "--ranks", "6", "--dry-run"])
    assert re.search(r"mesh +│ batch 1 × ring 2 × ulysses 3", capsys.readouterr().out)


def test_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result.png"
    write_atomically(path, b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_missing_default_model_asks_for_a_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(para_core, "__file__", str(tmp_path / "para_core/__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert run(["generate", "--prompt", CAPTION]) == 1
    assert "--model black-forest-labs/FLUX.1-dev" in capsys.readouterr().err


@pytest.mark.long
def test_two_ranks_equal_one_and_survive_a_kill(tmp_path, prompts):
    path = prompts({"prompt": CAPTION}, {"prompt": "killed", "steps": 10**5}, {"prompt": "a blue square"})
    command = [sys.executable, "-m", "para_core", "generate", "--prompts", path, "--out", tmp_path / "out"]
    process = subprocess.Popen(
        [*command, "--ranks", "2", *SMALL],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    late = threading.Timer(600, process.kill)
    late.start()
    with process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "generating line 2" in line:
                ranks = psutil.Process(process.pid).children()
                os.kill(next(rank.pid for rank in ranks if rank.environ()["RANK"] == "1"), signal.SIGKILL)
    late.cancel()
    stderr = "".join(lines)
    assert process.returncode == 1, stderr
    assert re.search(r"line 2: rank 1 .*SIGKILL", stderr)
    assert "2 generated" in stderr
    assert "Traceback" not in stderr
    for number, prompt in ((1, CAPTION), (3, "a blue square")):
        image = pixels(tmp_path / f"out/{number:05d}.png")
        assert np.abs(image - plain_pixels(prompt=prompt, seed=number - 1)).max() <= 1


@pytest.mark.long
def test_three_compiled_cached_sizes_on_ranks_equal_one(tmp_path, prompts):
    sizes = ["64x48", "48x64", "80x64"]
    path = prompts(*[{"prompt": CAPTION, "seed": 7, "size": size} for size in sizes])

    def generated(*options):
        out = tmp_path / f"out{len(options)}"
        done = subprocess.run(
            [
                *[sys.executable, "-m", "para_core", "generate", "--prompts", path, "--out", out],
                *["--steps", "4", "--cache", "0.12", *options],
            ],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        return [pixels(out / f"{number:05d}.png") for number in (1, 2, 3)]

    for image, alone in zip(generated("--ranks", "2", "--compile", "whole"), generated(), strict=True):
        assert np.abs(image - alone).max() <= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_that_arrives_in_a_callback_of_a_weak_reference_ends_the_command(number):
    class Object:
        pass

    # A shell starts its background jobs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), para_core.cli.signals.terminable():
            kept = Object()
            reference = weakref.ref(kept, lambda _: signal.raise_signal(number))
            del kept  # Python ignores what the callback raises.
            assert reference() is None
            time.sleep(30)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.long
def test_torchrun_ranks_are_used(tmp_path, prompts):
    path = prompts({"prompt": CAPTION}, "{", {"prompt": "a blue square"})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "para_core"]

    def under_torchrun(*options):
        return subprocess.run(
            [*command, "generate", "--prompts", path, "--out", tmp_path / "out", *SMALL, *options],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        )

    stderr = under_torchrun("--mesh", "ring=2").stderr
    assert stderr.count("line 2: ") == 1
    assert "2 generated" in stderr
    record = json.loads((tmp_path / "out/00003.json").read_text())
    assert record["mesh"] == {"batch": 1, "ring": 2, "ulysses": 1}
    assert np.abs(pixels(tmp_path / "out/00003.png") - plain_pixels(prompt="a blue square", seed=2)).max() <= 1
    stderr = under_torchrun("--mesh", "ring=1,ulysses=1", "--seed", "9").stderr
    assert "error: rank 0: --mesh is too small: 2 ranks " in stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        ["--text-encoders", "first", "--vae-placement", "first", "--mesh", "ring=2"],
        ["--text-encoders", "offload", "--mesh", "pipe=2"],
        ["--weights", "tensor", "--mesh", "tensor=2", "--backend", "math"],
    ],
)
def test_placed_text_encoders_and_stages_equal_plain_pipeline(rank_pool, tmp_path, options):
    command = ["generate", "--prompt", CAPTION, "--seed", "7", "--guidance", "2", *SMALL]
    command_on_ranks(rank_pool, *command, *options, "--out", str(tmp_path))
    difference = np.abs(pixels(tmp_path / "00001.png") - plain_pixels(prompt=CAPTION, seed=7, guidance_scale=2.0))
    assert difference.max() <= 1
    record = json.loads((tmp_path / "00001.json").read_text())
    assert record["request"]["guidance_scale"] == 2


@pytest.mark.long
def test_rounded_exchange_is_not_taken_for_the_exact_result(tmp_path, capsys):
    command = ["generate", "--prompt", CAPTION, *SMALL, "--out", str(tmp_path), "--dry-run"]
    assert run([*command[:-1]]) == 0
    for options, finished in (
        ([], 1),
        (["--vae"], 1),
        (["--comm-dtype", "int8"], 0),
        (["--backend", "triton-int8"], 0),
        (["--attention-schedule", "triton-int8:1:1"], 0),
        (["--cross-backend", "math"], 0),
    ):
        capsys.readouterr()
        assert run([*command, *options]) == 0
        assert f"{1 - finished}, {finished} finished" in capsys.readouterr().out


@pytest.mark.long
def test_dry_run_shows_the_memory_of_a_rank(tmp_path, capsys):
    held = []
    for options in ([], ["--quantize", "int8"], ["--offload", "blocks"], ["--memory", "0.75"]):
        command = ["generate", "--prompt", CAPTION, *SMALL, "--dry-run", "--out", str(tmp_path)]
        assert run([*command, *options]) == 0
        shown = re.search(r"memory +│ ([0-9.e-]+) of ([0-9.]+) GB on each rank", capsys.readouterr().out)
        held.append(float(shown[1]))
    assert max(held[1:3]) < held[0]
    assert shown[2] == "0.75"


@pytest.mark.long
def test_pipefusion_patches_the_steps_and_is_not_taken_for_exact(rank_pool, tmp_path):
    command = ["generate", "--prompt", CAPTION, "--size", "128x128", "--steps", "12", "--out", str(tmp_path)]
    command_on_ranks(rank_pool, *command, "--mesh", "pipe=2")
    command_on_ranks(rank_pool, *command, "--mesh", "pipe=2", "--pipefusion", "2")
    exact, patched = pixels(tmp_path / "00001.png"), pixels(tmp_path / "00002.png")
    assert np.abs(exact - patched).max() > 0
    assert np.abs(exact - patched).mean() < 40
