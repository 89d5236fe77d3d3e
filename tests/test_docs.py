"""Every python block of README and docs/ runs, on two ranks, on the tiny pipeline; doctests run by import name.

Most scripts run in the rank processes, which have imported torch and diffusers already: that takes longer than they do.
"""

import contextlib
import doctest
import io
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from PIL import Image, ImageSequence

from para_core.adapters.models import ADAPTERS

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# From the hardware and checkpoint that a reader has to what is here.
SUBSTITUTIONS = {
    "black-forest-labs/FLUX.1-dev": str(ROOT / "benchmarks/tiny_flux/pipeline"),
    '"cuda"': '"cpu"',
    "torch.bfloat16": "torch.float32",
    "height=1024, width=1024, num_inference_steps=28": (
        "height=64, width=64, num_inference_steps=2, max_sequence_length=16"
    ),
    # Enough steps for a curve.
    "height=1024, width=1024, num_inference_steps=50": (
        "height=64, width=64, num_inference_steps=8, max_sequence_length=16"
    ),
    'backend="inductor"': 'backend="aot_eager"',
    "compile_repeated_blocks(fullgraph=True)": 'compile_repeated_blocks(fullgraph=True, backend="aot_eager")',
}


def programs(page: str) -> list[str]:
    """The python blocks of a page, joined from one that initialises the process group to the next.

    Two in one process would meet in the same store: a rank that is early the second time reads the other's old address
    and waits for it for ever.
    """
    found: list[str] = []
    for block in BLOCK.findall((ROOT / page).read_text()):
        if not found or "init_process_group(" in block:
            found.append(block)
        else:
            found[-1] += "\n" + block
    return found


PROGRAMS = [
    pytest.param(program, id=f"{page}-{index}")
    for page in PAGES
    if page != "docs/migration.md"  # its blocks stand each for itself: tests/test_migration.py
    for index, program in enumerate(programs(page))
]


def test_the_default_thresholds_are_those_that_the_page_says():
    table = re.findall(r"^\| (.*) \| (0\.\d+) \| (.*) \|$", (ROOT / "docs/cache.md").read_text(), re.MULTILINE)
    *named, (_, usual, usual_source) = table
    cached = {adapter.pipelines: adapter for adapter in ADAPTERS if adapter.blocks is not None}
    for pipelines, threshold, source in named:
        for name in pipelines.split(", "):
            adapter = cached.pop(name)
            assert (adapter.threshold, adapter.threshold_source) == (float(threshold), source)
    assert len(cached) > 10
    for adapter in cached.values():
        assert (adapter.threshold, adapter.threshold_source) == (float(usual), usual_source)


def under_torchrun(script: Path, *arguments: str) -> str:
    """What two ranks print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=script.parent,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(script, arguments, environment):
    """As the main program of this rank; without an ``environment`` of the first alone. Returns what it prints."""
    rank = dist.get_rank()
    # It makes its own. Not before all ranks have made this one: a rank that leaves closes what the others are still connecting.
    dist.barrier()
    dist.destroy_process_group()
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment or {}))
        if environment is None:
            if rank > 0:
                return ""
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                del os.environ[name]
        stack.enter_context(mock.patch.object(sys, "argv", [str(script), *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(script.parent), *sys.path]))
        stack.enter_context(contextlib.chdir(script.parent))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(printed))
        # Each folder of examples has its own.
        sys.modules.pop("options", None)
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


@contextlib.contextmanager
def meeting_point() -> Iterator[dict[str, str]]:
    """The environment by which torchrun says where the ranks meet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def on_ranks(rank_pool, script, *arguments, ranks=2):
    """What rank 0 prints."""
    with meeting_point() as place:
        return rank_pool.run(run_script, ranks, script, arguments, place, timeout=300)[0]


def alone(rank_pool, script, *arguments):
    return rank_pool.run(run_script, 2, script, arguments, None, timeout=300)[0]


@pytest.mark.parametrize("source", PROGRAMS)
def test_python_blocks_run_from_top_to_bottom(rank_pool, source, tmp_path):
    for shown, used in SUBSTITUTIONS.items():
        source = source.replace(shown, used)
    script = tmp_path / "page.py"
    script.write_text(source)
    on_ranks(rank_pool, script)


def test_a_script_may_end_right_after_a_collective(tmp_path):
    script = tmp_path / "ends_at_once.py"
    script.write_text(programs("README.md")[1])
    one_of_two = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with meeting_point() as place:
        ranks = [
            subprocess.Popen(
                [sys.executable, script],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **place, **one_of_two, "RANK": str(rank)},
            )
            for rank in range(2)
        ]
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], printed


# Without the exit hook the script above aborts in one run of four, and on a busy machine more rarely. What the hook is for
# can be seen each time: a thread that wants the GIL when the interpreter begins to end still gets it.
LATE_THREAD = """
import atexit, os, threading, time
import torch

atexit.register(os.write, 1, b", then the rest")  # called after what para_core registers

import para_core

ending = threading.Event()

def let_go():
    ending.wait()
    time.sleep(0.001)
    os.write(1, b"let go")

threading.Thread(target=let_go, daemon=True).start()
atexit.register(ending.set)  # called before it
"""


def test_threads_of_a_collective_get_the_gil_when_a_script_ends(tmp_path):
    script = tmp_path / "ends_with_a_thread.py"
    script.write_text(LATE_THREAD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run([sys.executable, script], capture_output=True, env=environment, check=True).stdout
    assert printed == b"let go, then the rest"


@pytest.mark.parametrize("ranks", [2, 4])
def test_own_model_example_is_exact_on_every_mesh(rank_pool, ranks):
    printed = on_ranks(rank_pool, ROOT / "parallel_examples/run_own_model.py", ranks=ranks)
    differences = [float(value) for value in re.findall(r"relative difference (\S+)", printed)]
    assert len(differences) == 3
    assert max(differences) < 1e-5


def test_flux_example_generates_the_same_image_on_one_rank_and_on_two(rank_pool, tmp_path):
    example = ROOT / "parallel_examples/run_flux.py"
    size = ["--steps", "2", "--height", "80", "--width", "48"]
    paths = [tmp_path / "alone.png", tmp_path / "shared.png"]
    alone(rank_pool, example, *size, "--output", str(paths[0]))
    printed = under_torchrun(example, *size, "--ring", "2", "--output", str(paths[1]))
    assert re.search(r"^2 ranks, ring 2 × ulysses 1: 2 steps in .* s per step", printed, re.MULTILINE)
    images = [np.asarray(Image.open(path)).astype(int) for path in paths]
    assert images[0].shape == (80, 48, 3)
    assert np.abs(images[0] - images[1]).max() <= 1


@pytest.mark.long
def test_stable_diffusion_example_generates_the_same_image_on_one_rank_and_on_two(rank_pool, tmp_path):
    example = ROOT / "parallel_examples/run_stable_diffusion.py"
    paths = [tmp_path / "alone.png", tmp_path / "shared.png"]
    alone(rank_pool, example, "--output", str(paths[0]))
    on_ranks(rank_pool, example, "--parallel-vae", "--output", str(paths[1]))
    images = [np.asarray(Image.open(path)).astype(int) for path in paths]
    assert np.abs(images[0] - images[1]).max() <= 1


VIDEOS = {
    "run_hunyuan_video": ["--ring", "2", "--parallel-vae"],
    "run_mochi": ["--batch", "2"],
    "run_cogvideox": [],
    "run_wan": ["--batch", "2", "--parallel-vae"],
}


def frames_of(path: Path) -> list[np.ndarray]:
    with Image.open(path) as video:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(video)]


@pytest.mark.parametrize("name", VIDEOS)
def test_video_examples_write_the_same_video_on_one_rank_and_on_two(rank_pool, name, tmp_path):
    example = ROOT / f"parallel_examples/{name}.py"
    paths = [tmp_path / "alone.gif", tmp_path / "shared.gif"]
    arguments = ["--steps", "2", "--output"]
    alone(rank_pool, example, *arguments, str(paths[0]))
    printed = on_ranks(rank_pool, example, *VIDEOS[name], *arguments, str(paths[1]))
    assert "a tiny pipeline with random weights" in printed
    assert re.search(r"^2 ranks, .*: 2 steps in .* s per step", printed, re.MULTILINE)
    videos = [frames_of(path) for path in paths]
    assert videos[0][0].shape == (48, 80, 3)
    assert len(videos[0]) == len(videos[1]) > 1
    # Each frame has a palette of its own: a rounded value may choose another entry.
    assert all(np.mean(one != other) < 0.01 for one, other in zip(*videos, strict=True))


@pytest.mark.parametrize("weights", ["fsdp", pytest.param("tensor", marks=pytest.mark.long)])
def test_the_sharded_example_holds_a_part_on_each_rank(rank_pool, weights, tmp_path):
    path = tmp_path / "sharded.png"
    arguments = ["--weights", weights, "--steps", "2", "--output", str(path)]
    printed = on_ranks(rank_pool, ROOT / "parallel_examples/run_sharded.py", *arguments)
    held, whole = map(float, re.search(r"rank 0 holds (\S+) of (\S+) MB", printed).groups())
    assert held < 0.7 * whole
    assert np.asarray(Image.open(path)).shape == (128, 128, 3)


@pytest.mark.parametrize(
    "arguments", [["--patches", "3", "--steps", "8"], pytest.param(["--steps", "2"], marks=pytest.mark.long)]
)
def test_the_stages_example_holds_a_part_on_each_rank(rank_pool, arguments, tmp_path):
    path = tmp_path / "stages.png"
    printed = on_ranks(rank_pool, ROOT / "parallel_examples/run_pipefusion.py", *arguments, "--output", str(path))
    assert re.search(r"rank 0 holds \S+ MB", printed)
    assert ("PipeFusionReport(whole_calls=1, patched_calls=7" in printed) == ("--patches" in arguments)
    assert np.asarray(Image.open(path)).shape == (128, 128, 3)


def test_the_cached_flux_example_generates_both_images_and_the_plot(rank_pool, tmp_path):
    path = tmp_path / "flux.png"
    arguments = ["--steps", "6", "--height", "80", "--width", "48", "--threshold", "0.5", "--output", str(path)]
    printed = alone(rank_pool, ROOT / "cache_examples/run_flux.py", *arguments)
    assert re.search(r"^[1-5] of 6 computed, [1-5] skipped", printed, re.MULTILINE)
    assert re.search(r"^without the cache \S+ s, with it \S+ s: \S+ ×$", printed, re.MULTILINE)
    images = [np.asarray(Image.open(place)) for place in (path, tmp_path / "flux_without.png")]
    assert images[0].shape == images[1].shape == (80, 48, 3)
    assert not np.array_equal(*images)
    assert (tmp_path / "flux_steps.png").exists()


@pytest.mark.parametrize(
    "name",
    ["run_wan", *[pytest.param(name, marks=pytest.mark.long) for name in VIDEOS if name != "run_wan"]],
)
def test_cached_video_examples_generate_both_videos_and_the_plot(rank_pool, name, tmp_path):
    path = tmp_path / "video.gif"
    arguments = ["--steps", "4", "--threshold", "1e9", "--output", str(path)]
    printed = alone(rank_pool, ROOT / f"cache_examples/{name}.py", *arguments)
    assert "a tiny pipeline with random weights" in printed
    # The first of each branch.
    assert re.search(r"^1 of 4 computed|^2 of 8 computed", printed, re.MULTILINE)
    videos = [frames_of(place) for place in (path, tmp_path / "video_without.gif")]
    assert videos[0][0].shape == (48, 80, 3)
    assert len(videos[0]) == len(videos[1]) > 1
    assert (tmp_path / "video_steps.png").exists()


@pytest.mark.parametrize(
    "module",
    [
        "para_core.layout",
        "para_core.make_mesh",
        "para_core.planner.hardware",
        "para_core.planner.rows",
        "para_core.kernels.merge_reference",
        "para_core.adapters.mesh_choice",
    ],
)
def test_doctests_pass(module):
    results = doctest.testmod(import_module(module))
    assert results.attempted > 0
    assert results.failed == 0


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, "CONTRIBUTING.md", "benchmarks/tiny_flux/README.md", "cache_examples/README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_what_the_page_on_troubles_says_is_printed_is_printed():
    sources = "".join(
        re.sub(r'"\n\s*f?"', "", path.read_text())  # messages stand on several lines
        for folder in ("para_core", "adapters")
        for path in (ROOT / folder).rglob("*.py")
    )
    said = re.findall(
        r"(?<!\*)\*{1}([^*\n]+)\*{1}(?!\*)|\*{3}([^*\n]+)\*{3}", (ROOT / "docs/troubleshooting.md").read_text()
    )
    messages = [one or other for one, other in said if len(one or other) > 10]
    assert len(messages) > 12
    for message in messages:
        assert message in sources, message
