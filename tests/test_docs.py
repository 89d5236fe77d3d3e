"""Every python block of README and docs/ runs, on two ranks, on the tiny pipeline; doctests run by import name."""

import doctest
import re
from importlib import import_module

import numpy as np
import pytest
from PIL import Image

from tests.lift_out import module_files
from tests.scripts import ROOT, as_program, on_ranks
from zoo.flux.check import check
from zoo.flux.scenes import ImageScene, Thing

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
TINY = "height=64, width=64, num_inference_steps=2"
# The keys are the reader's hardware and checkpoint, and the values are those of this machine.
SUBSTITUTIONS = {
    "black-forest-labs/FLUX.1-dev": str(ROOT / "zoo/flux/pipeline"),
    '"zoo/flux/pipeline"': repr(str(ROOT / "zoo/flux/pipeline")),
    '"cuda"': '"cpu"',
    "\ntorch.cuda.set_device(dist.get_node_local_rank())\n": "\n",
    "torch.bfloat16": "torch.float32",
    "height=1024, width=1024, num_inference_steps=28": f"{TINY}, max_sequence_length=16",
    "num_inference_steps=28": TINY,
    "ranks=4": "ranks=2",
    'backend="inductor"': 'backend="eager"',
    "compile_repeated_blocks(fullgraph=True)": 'compile_repeated_blocks(fullgraph=True, backend="eager")',
}
# Is in blocks that are programs of their own.
LAUNCHES = "from para_core import launch"
# README imports these in the block before.
IMPORTS = "import torch\nfrom diffusers import FluxPipeline\nfrom para_core.adapters import parallelize_pipe\n"
SMALL = '"zoo/flux/pipeline"'
# Other tests of the default run cover the content of these two pages, and each takes several seconds.
LONG = ("docs/weights.md", "docs/cache.md")


def blocks_of(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def programs(page: str) -> list[str]:
    """Return the Python blocks of a page, joined up to the next one that initialises the process group.

    Two groups in one process would use the same store: a rank that is early the second time would read the other's old
    address and wait for it for ever.
    """
    programs: list[str] = []
    for block in blocks_of(page):
        if LAUNCHES in block:
            continue
        if not programs or "init_process_group(" in block:
            programs.append(block)
        else:
            programs[-1] += "\n" + block
    return programs


def written(source, folder):
    """Write ``source`` as this machine runs it to a file in ``folder``, and return the file."""
    for shown, used in SUBSTITUTIONS.items():
        source = source.replace(shown, used)
    script = folder / "page.py"
    script.write_text(source.replace('"circle.png"', repr(str(folder / "circle.png"))))
    return script


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(program, id=f"{page}-{index}", marks=pytest.mark.long if page in LONG else ())
        for page in PAGES
        if page != "docs/migration.md"  # tests/test_migration.py runs its blocks, which are independent.
        for index, program in enumerate(programs(page))
        if SMALL not in program
    ],
)
def test_python_blocks_run_from_top_to_bottom(rank_pool, source, tmp_path):
    on_ranks(rank_pool, written(source, tmp_path))


def test_small_program_of_the_readme_draws_a_red_circle(rank_pool, tmp_path):
    source = next(block for block in blocks_of("README.md") if SMALL in block)
    on_ranks(rank_pool, written(source, tmp_path))
    scene = ImageScene((Thing("red", "circle", "large", "centre"),), "white")
    assert check(np.asarray(Image.open(tmp_path / "circle.png")), scene).all_right


@pytest.mark.sample(1)
@pytest.mark.parametrize("page", ["README.md", "docs/one_process.md"])
def test_blocks_that_launch_ranks_run(page, tmp_path):
    (source,) = [block for block in blocks_of(page) if LAUNCHES in block]
    as_program(written(f"{IMPORTS}{source}\nassert image.size == (64, 64)\n", tmp_path), cwd=tmp_path)


def test_doctests_pass():
    """Run the examples that have a result, of every module of the library."""
    attempted = 0
    for name, path in module_files(ROOT).items():
        if re.search(r"^ *>>> (?!.*SKIP).*\n *[^ >.`]", (ROOT / path).read_text(), re.MULTILINE):
            results = doctest.testmod(import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
            assert results.failed == 0, name
            attempted += results.attempted
    assert attempted > 50


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, "CONTRIBUTING.md", "zoo/README.md", "zoo/flux/README.md", "cache_examples/README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text()):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"
