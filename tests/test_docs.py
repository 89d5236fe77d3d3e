"""Every python block of README and docs/ runs, on two ranks, on the tiny pipeline; doctests run by import name.

Most scripts run in the rank processes, which have imported torch and diffusers already, because importing takes longer
than the scripts.
"""

import doctest
import os
import re
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest
from PIL import Image

from para_core.adapters.models import ADAPTERS
from tests.scripts import ROOT, on_ranks
from zoo.flux.check import check
from zoo.flux.scenes import ImageScene, Thing

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
# The keys are the reader's hardware and checkpoint, and the values are those of this machine.
SUBSTITUTIONS = {
    "black-forest-labs/FLUX.1-dev": str(ROOT / "zoo/flux/pipeline"),
    '"zoo/flux/pipeline"': repr(str(ROOT / "zoo/flux/pipeline")),
    '"cuda"': '"cpu"',
    "\ntorch.cuda.set_device(dist.get_node_local_rank())\n": "\n",
    "torch.bfloat16": "torch.float32",
    "height=1024, width=1024, num_inference_steps=28": (
        "height=64, width=64, num_inference_steps=2, max_sequence_length=16"
    ),
    'backend="inductor"': 'backend="eager"',
    "compile_repeated_blocks(fullgraph=True)": 'compile_repeated_blocks(fullgraph=True, backend="eager")',
}


def programs(page: str) -> list[str]:
    """Return the Python blocks of a page. Blocks are joined up to the next one that initialises the process group.
    Those that launch ranks themselves are left out.

    Two groups in one process would use the same store: a rank that is early the second time would read the other's old
    address and wait for it for ever.
    """
    blocks: list[str] = []
    for block in BLOCK.findall((ROOT / page).read_text()):
        if LAUNCHES in block:
            continue
        if not blocks or "init_process_group(" in block:
            blocks.append(block)
        else:
            blocks[-1] += "\n" + block
    return blocks


# Is in blocks that are programs of their own.
LAUNCHES = "from para_core import launch"
# Other tests of the default run cover the content of these two pages, and each takes several seconds.
LONG = ("docs/weights.md", "docs/cache.md")
PROGRAMS = [
    pytest.param(program, id=f"{page}-{index}", marks=pytest.mark.long if page in LONG else ())
    for page in PAGES
    if page != "docs/migration.md"  # tests/test_migration.py runs its blocks, which are independent.
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


@pytest.mark.sample(2)
@pytest.mark.parametrize("source", PROGRAMS)
def test_python_blocks_run_from_top_to_bottom(rank_pool, source, tmp_path):
    for shown, used in {**SUBSTITUTIONS, '"circle.png"': repr(str(tmp_path / "circle.png"))}.items():
        source = source.replace(shown, used)
    script = tmp_path / "page.py"
    script.write_text(source)
    on_ranks(rank_pool, script)


@pytest.mark.sample(1)
@pytest.mark.parametrize("page", ["README.md", "docs/one_process.md"])
def test_blocks_that_launch_ranks_run(page, tmp_path):
    blocks = BLOCK.findall((ROOT / page).read_text())
    (source,) = [block for block in blocks if LAUNCHES in block]
    source = source.replace("ranks=4", "ranks=2").replace(
        "num_inference_steps=28", "height=64, width=64, num_inference_steps=2"
    )
    for shown, used in SUBSTITUTIONS.items():
        source = source.replace(shown, used)
    # README imports these in the block before.
    imports = "import torch\nfrom diffusers import FluxPipeline\nfrom para_core.adapters import parallelize_pipe\n"
    script = tmp_path / "page.py"
    script.write_text(f"{imports}{source}\nassert image.size == (64, 64)\n")
    subprocess.run([sys.executable, script], check=True, cwd=tmp_path)


def test_small_program_of_the_readme_draws_a_red_circle(rank_pool, tmp_path):
    small = '"zoo/flux/pipeline"'
    program = next(block for block in BLOCK.findall((ROOT / "README.md").read_text()) if small in block)
    script, image = tmp_path / "readme.py", tmp_path / "circle.png"
    script.write_text(program.replace(small, SUBSTITUTIONS[small]).replace('"circle.png"', repr(str(image))))
    on_ranks(rank_pool, script)
    scene = ImageScene((Thing("red", "circle", "large", "centre"),), "white")
    assert check(np.asarray(Image.open(image)), scene).all_right


# Without the exit hook, a script that ends directly after a collective (tests/test_examples.py has one) aborts in one
# run of four, and on a busy machine more rarely. The reason for the hook can be seen each time: a thread that wants the
# GIL when the interpreter begins to end still gets it.
LATE_THREAD = """
import atexit, os, threading, time
import torch

atexit.register(os.write, 1, b", then the rest")  # called after what para_core registers

from para_core import UnifiedAttnMode

ending = threading.Event()

def let_go():
    ending.wait()
    time.sleep(0.001)
    os.write(1, b"let go")

threading.Thread(target=let_go, daemon=True).start()
atexit.register(ending.set)  # called before it
"""


@pytest.mark.long
@pytest.mark.slow
def test_collective_threads_get_the_gil_at_exit(tmp_path):
    script = tmp_path / "ends_with_a_thread.py"
    script.write_text(LATE_THREAD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run([sys.executable, script], capture_output=True, env=environment, check=True).stdout
    assert printed == b"let go, then the rest"


def modules_with_examples():
    """Yield the names of the modules of para_core and its adapters that have an example with a result."""
    for folder, package in ((ROOT / "para_core", "para_core"), (ROOT / "adapters", "para_core.adapters")):
        for file in sorted(folder.rglob("*.py")):
            if re.search(r"^ *>>> (?!.*SKIP).*\n *[^ >.`]", file.read_text(), re.MULTILINE):
                yield ".".join([package, *file.relative_to(folder).with_suffix("").parts])


@pytest.mark.parametrize("module", [*modules_with_examples(), "para_core.kernels.merge_reference"])
def test_doctests_pass(module):
    results = doctest.testmod(import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, "CONTRIBUTING.md", "zoo/README.md", "zoo/flux/README.md", "cache_examples/README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
