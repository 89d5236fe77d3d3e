"""The FLUX-shaped transformer of `make gpu-check`, and the sections that run it."""

import subprocess
import sys
import time
from pathlib import Path

import diffusers
import pytest
import torch

from benchmarks.gpu import flux, nccl_ranks, two_ranks
from benchmarks.gpu.flux_model import FluxTransformer2DModel
from benchmarks.gpu.job import SectionJob, SectionSkipped
from tests.tiny import relative_error
from zoo.tiny.base import fill

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
CONFIG = {**flux.TINY, "num_layers": 2, "num_single_layers": 3}


@pytest.fixture(autouse=True)
def one_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def run_section(section, tmp_path, **options):
    job = SectionJob(section.__name__, CPU, True, tmp_path / "section.json", time.monotonic() + 600, **options)
    section.run(job)
    assert job.asked.items() <= section.NEEDS.items()
    return job


@pytest.mark.parametrize("batch", [1, 2])
def test_own_flux_transformer_equals_diffusers(batch):
    theirs = fill(diffusers.FluxTransformer2DModel(**CONFIG, guidance_embeds=True), 1)
    ours = FluxTransformer2DModel(**CONFIG).eval().requires_grad_(False)
    ours.load_state_dict(theirs.state_dict())
    kwargs = {name: x.float() for name, x in flux.flux_inputs(CPU, tiny=True).items()}
    for name in kwargs.keys() - {"img_ids", "txt_ids"}:
        kwargs[name] = torch.cat([kwargs[name] * (1 + sample) for sample in range(batch)])
    assert relative_error(ours(**kwargs)[0], theirs(**kwargs, return_dict=False)[0]) < 1e-6


def test_at_real_size_both_have_the_same_parameters():
    with torch.device("meta"):
        ours, theirs = (
            FluxTransformer2DModel(**flux.REAL),
            diffusers.FluxTransformer2DModel(**flux.REAL, guidance_embeds=True),
        )
    shapes = [{name: x.shape for name, x in model.named_parameters()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert 11.9e9 < sum(x.numel() for x in ours.parameters()) < 12e9
    # The section's memory requirement covers these parameters in 16 bits.
    assert flux.LEAST_FREE > 2 * 12e9


@pytest.mark.long
def test_flux_is_measured_in_every_way(tmp_path, monkeypatch):
    monkeypatch.setattr(flux, "has_diffusers", lambda: False)
    job = run_section(flux, tmp_path)
    rows = {row["way"]: row for row in job.rows if "way" in row}
    on_gpu = ["triton, eager", "triton, blocks", "parallel, reduce-overhead"]
    assert job.left_out == [f"{name}: needs a CUDA device" for name in on_gpu]
    assert [*rows] == [name for way, kind in flux.VARIANTS if (name := flux.variant_name(way, kind)) not in on_gpu]
    assert {row["verdict"] for row in rows.values()} == {"ok"}
    assert all(row["ms per step"] > 0 for row in rows.values())
    for name in ("cached, eager", "cached, blocks"):
        assert rows[name]["steps skipped"] == "6 of 12"
    assert job.rows[0]["transformer"] == "benchmarks.gpu.flux_model.FluxTransformer2DModel"


def test_blocks_compile_before_whole_graphs():
    kinds = [kind for _, kind in flux.VARIANTS]
    order = ["eager", "blocks", "one graph", "reduce-overhead"]
    assert kinds == sorted(kinds, key=order.index)
    assert not [kind for way, kind in flux.VARIANTS if way is flux.cached and kind == "reduce-overhead"]


def test_a_model_that_computes_something_else_is_called_wrong(tmp_path, monkeypatch):
    def off(transformer, device):
        handle = transformer.proj_out.register_forward_hook(lambda module, args, out: out * 1.5)
        yield
        handle.remove()

    monkeypatch.setattr(flux, "has_diffusers", lambda: False)
    monkeypatch.setattr(flux, "VARIANTS", ((flux.contextmanager(off), "eager"),))
    monkeypatch.setitem(flux.NEEDS, "off, eager", 1.0)
    assert [row["verdict"] for row in run_section(flux, tmp_path).rows[1:]] == ["wrong"]


def test_little_free_memory_skips_section_with_need():
    with pytest.raises(SectionSkipped, match=r"30 GB.* 23\.5 of 24\.0 GB"):
        flux.require_memory(int(23.5e9), int(24e9))
    flux.require_memory(int(31e9), int(80e9))


# -- Pipelines on two ranks.


def steps_of(part):
    return list(two_ranks.rows_of_part(CPU, part))


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", [part for part in two_ranks.PARTS if part not in ("bound device", "reduce-overhead")])
def test_pipelines_on_two_ranks_equal_one(rank_pool, part):
    for rows in rank_pool.run(steps_of, 2, part):
        assert [row["step"] for row in rows] == [*two_ranks.PARTS[part]]
        assert {row["verdict"] for row in rows} == {"ok"}, rows


@pytest.mark.long
def test_whole_transformer_graph_on_two_ranks_equals_one(rank_pool):
    for rows in rank_pool.run(steps_of, 2, "reduce-overhead"):
        assert [row["verdict"] for row in rows] == ["ok"], rows


def steps_with(changed, part):
    """Return the steps of a pipeline whose parallel run differs from that of one rank."""
    original = two_ranks._parallel

    def parallel(*args, **kwargs):
        pipe = original(*args, **kwargs)
        pipe.scheduler.step = changed
        return pipe

    two_ranks._parallel = parallel
    try:
        return steps_of(part)
    finally:
        two_ranks._parallel = original


def half_a_step(velocity, latents):
    return latents - velocity / 16


def test_a_parallel_run_that_differs_is_called_wrong(rank_pool):
    for rows in rank_pool.run(steps_with, 2, half_a_step, "exact"):
        of_pipelines = [row["verdict"] for row in rows if row["step"] in ("sequence", "ring", "stages")]
        assert of_pipelines == ["wrong"] * 3


def test_raising_step_fails_with_reason(tmp_path):
    job = SectionJob("two_ranks", CPU, True, tmp_path / "rows.json", time.monotonic() + 60)
    rows = [
        [{"step": "a", "verdict": "ok", "error": 1e-7}, {"step": "b", "verdict": "failed", "raised": "ValueError: x"}],
        [{"step": "a", "verdict": "ok", "error": 3e-7}],
    ]
    two_ranks.add_rows(job, rows, {1: "Traceback\nkilled"}, group="two")
    assert job.rows == [
        {"group": "two", "step": "a", "verdict": "ok", "error": 3e-7},
        {"group": "two", "step": "b", "verdict": "failed", "raised": "ValueError: x"},
        {"group": "two", "step": "rank 1 ended", "verdict": "failed", "raised": "Traceback\nkilled"},
    ]


@pytest.mark.long
@pytest.mark.parametrize(("section", "part"), [(two_ranks, "exact"), (nccl_ranks, "")])
def test_sections_of_ranks_run_in_processes_of_their_own(tmp_path, section, part):
    job = run_section(section, tmp_path, part=part)
    assert {row["verdict"] for row in job.rows} == {"ok"}, job.rows


def test_the_small_pipeline_is_no_identity():
    """Check that the result depends on each argument, so that a wrong shard of any of them is noticed."""
    pipe, call = flux.small_flux(CPU), flux.small_call(CPU)
    expected = pipe(**call)
    assert relative_error(expected, call["latents"]) > 0.1
    for name, x in call["conditions"].items():
        other = pipe(**{**call, "conditions": {**call["conditions"], name: x.flip(0) if name == "img_ids" else x + 1}})
        # A rotation of all text by one place changes its position relative to the image.
        assert relative_error(other, expected) > 1e-4, name


WITHOUT_DIFFUSERS = """
import sys, time
sys.modules["diffusers"] = None  # importing it raises ImportError
import torch
from pathlib import Path
from benchmarks.gpu import flux, nccl, vae_ranks
from benchmarks.gpu.job import SectionJob, SectionSkipped
from benchmarks.gpu.processes import use_no_network

use_no_network()
flux.VARIANTS = tuple(variant for variant in flux.VARIANTS if variant[1] == "eager")
for section in (flux, nccl, vae_ranks):
    file, end = Path(sys.argv[1]) / "job.json", time.monotonic() + 100
    job = SectionJob(section.__name__, torch.device("cpu"), True, file, end)
    try:
        section.run(job)
    except SectionSkipped as reason:
        print(reason)
    else:
        print({row["verdict"] for row in job.rows if "verdict" in row})
"""


@pytest.mark.long
def test_flux_and_nccl_run_without_diffusers(tmp_path):
    command = [sys.executable, "-c", WITHOUT_DIFFUSERS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    of_flux, of_nccl, of_vae = done.stdout.strip().splitlines()
    assert of_flux == of_nccl == "{'ok'}"
    assert "diffusers" in of_vae
