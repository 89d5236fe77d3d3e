"""The FLUX-shaped transformer of `make gpu-check`, and the sections that run it."""

import time
from dataclasses import replace

import diffusers
import pytest
import torch

from benchmarks.gpu import blocks, flux, flux_graphs, nccl_ranks, two_ranks
from benchmarks.gpu.flux_model import FluxTransformer2DModel
from benchmarks.gpu.job import SectionJob, SectionSkipped
from tests.tiny import relative_error
from zoo.tiny.base import fill

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZE = replace(flux.TINY, side=5, text=5, changes=flux.TINY.changes | {"num_layers": 2, "num_single_layers": 3})


@pytest.fixture(autouse=True)
def one_machine(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def run_section(section, tmp_path, **options):
    options = {"compile_backend": "eager", **options}
    job = SectionJob(section.__name__, CPU, True, tmp_path / "section.json", time.monotonic() + 600, **options)
    section.run(job)
    assert job.asked.items() <= section.NEEDS.items()
    return job


@pytest.mark.parametrize("batch", [1, 2])
def test_own_flux_transformer_equals_diffusers(batch):
    theirs = fill(diffusers.FluxTransformer2DModel(**SIZE.config, guidance_embeds=True), 1)
    ours = FluxTransformer2DModel(**SIZE.config).eval().requires_grad_(False)
    ours.load_state_dict(theirs.state_dict())
    kwargs = flux.flux_inputs(CPU, SIZE, torch.float32)
    for name in kwargs.keys() - {"img_ids", "txt_ids"}:
        kwargs[name] = torch.cat([kwargs[name] * (1 + sample) for sample in range(batch)])
    assert relative_error(ours(**kwargs)[0], theirs(**kwargs, return_dict=False)[0]) < 1e-6


def test_at_real_size_both_have_the_same_parameters():
    with torch.device("meta"):
        ours, theirs = (
            FluxTransformer2DModel(**flux.PUBLISHED),
            diffusers.FluxTransformer2DModel(**flux.PUBLISHED, guidance_embeds=True),
        )
    shapes = [{name: x.shape for name, x in model.named_parameters()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert 11.9e9 < sum(x.numel() for x in ours.parameters()) < 12e9
    # The section's memory requirement covers these parameters in 16 bits.
    assert flux.LEAST_FREE > 2 * 12e9


def test_flux_is_measured_in_every_way(tmp_path):
    job = run_section(flux, tmp_path)
    rows = {row["way"]: row for row in job.rows}
    assert job.left_out == ["triton, eager: needs a CUDA device"]
    assert [*rows, "triton, eager"] == [flux.variant_name(variant) for variant in flux.VARIANTS]
    assert {row["verdict"] for row in rows.values()} == {"ok"}
    assert all(row["ms per step"] > 0 for row in rows.values())
    # Of the steps that are measured, half are skipped. The others are the first steps and the last.
    for name in ("cached, eager", "cached, blocks"):
        assert rows[name]["steps skipped"] == "5 of 12"
    run_section(flux_graphs, tmp_path)


def test_a_model_that_computes_something_else_is_called_wrong(tmp_path, monkeypatch):
    def off(transformer, device):
        handle = transformer.proj_out.register_forward_hook(lambda module, args, out: out * 1.1)
        yield
        handle.remove()

    monkeypatch.setattr(flux, "VARIANTS", ((flux.contextmanager(off), "eager"),))
    monkeypatch.setitem(flux.NEEDS, "off, eager", 1.0)
    assert [row["verdict"] for row in run_section(flux, tmp_path).rows] == ["wrong"]


def test_blocks_on_one_rank_and_on_two_are_as_exact_as_the_model(tmp_path):
    job = run_section(blocks, tmp_path)
    rows = {(row["ranks"], row["way"]): row for row in job.rows if "way" in row}
    assert [*rows] == [(1, "parallel"), (2, "Ulysses"), (2, "ring"), (2, "negative control: no exchange")]
    assert {row["verdict"] for row in rows.values()} == {"ok"}
    # A ring adds up in another order, and Ulysses in the order of one rank.
    assert rows[2, "ring"]["error"] != rows[2, "Ulysses"]["error"] == rows[1, "parallel"]["error"]
    assert max(row["error"] for (_, way), row in rows.items() if "no exchange" not in way) < 0.05


def test_little_free_memory_skips_section_with_need():
    with pytest.raises(SectionSkipped, match=r"30 GB.* 23\.5 of 24\.0 GB"):
        flux.require_memory(int(23.5e9), int(24e9))
    flux.require_memory(int(31e9), int(80e9))


# -- Pipelines on two ranks.


def steps_of(part):
    return list(two_ranks.rows_of_part(CPU, part))


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", [part for part in two_ranks.PARTS if part != "bound device"])
def test_pipelines_on_two_ranks_equal_one(rank_pool, part):
    for rows in rank_pool.run(steps_of, 2, part):
        assert [row["step"] for row in rows] == [*two_ranks.PARTS[part]]
        assert {row["verdict"] for row in rows} == {"ok"}, rows


@pytest.mark.long
@pytest.mark.parametrize(("section", "part"), [(two_ranks, "exact"), (nccl_ranks, "")])
def test_sections_of_ranks_run_in_processes_of_their_own(tmp_path, section, part):
    job = run_section(section, tmp_path, part=part)
    assert {row["verdict"] for row in job.rows} == {"ok"}, job.rows
