"""``para_core plan`` and ``para_core doctor`` print what the library finds."""

import json
import re
from dataclasses import replace

import pytest

from para_core.adapters import plan_mesh
from para_core.cli.app import run
from para_core.fleet.recipe import read_mesh_sizes


def test_the_plan_is_the_library_s(capsys, tmp_path):
    image = tmp_path / "plan.png"
    assert run(["plan", "--model", "FLUX.1-dev", "--ranks", "2", "--size", "1024x768", "--out", str(image)]) == 0
    expected = plan_mesh("FLUX.1-dev", ranks=2, width=1024, height=768).markdown()
    assert expected in capsys.readouterr().out
    assert image.stat().st_size > 1000


def test_plan_ends_with_its_generate_command(capsys, monkeypatch):
    plan = plan_mesh("FLUX.1-dev", ranks=4, device="RTX 4090", compiled=True)
    options_of_rows = []
    for row in plan.rows:
        monkeypatch.setattr("para_core.adapters.plan_mesh", lambda *_, row=row, **__: replace(plan, rows=(row,)))
        assert run(["plan", "--compiled", "--steps", "20"]) == 0
        command = re.search(r"As a command: para_core generate (.*)", capsys.readouterr().out)
        if command is None:
            assert not plan.runs(row)
            continue
        words = command[1].split()
        options = dict(zip(words[::2], words[1::2], strict=True))
        assert options.pop("--ranks") == "4"
        mesh = {f"max_{name}_dim_size": size for name, size in read_mesh_sizes(options.pop("--mesh"))}
        assert mesh == row.mesh_options
        assert options.pop("--model") == "black-forest-labs/FLUX.1-dev"
        assert options.pop("--steps") == "20"
        whole = row.placement.resident is None and not row.shape.fsdp
        assert options.pop("--compile") == ("whole" if whole else "blocks")
        assert options.pop("--prompt") == "TEXT"
        assert options == {f"--{name.replace('_', '-')}": str(value) for name, value in row.options.items()}
        options_of_rows += options.items()
    expected = [
        ("--rotate-method", "2d"),
        ("--weights", "tensor"),
        ("--text-encoders", "first"),
        ("--offload", "blocks"),
    ]
    assert set(expected) <= set(options_of_rows)


@pytest.mark.long
def test_table_fits_a_terminal_of_80_columns():
    for model in ("FLUX.1-dev", "Wan 2.2 A14B"):
        lines = plan_mesh(model, ranks=8, device="RTX 4090").lines()
        assert max(map(len, lines)) <= 80
        assert len(lines) > 14


def test_a_terminal_shows_the_rows_in_its_width(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["plan", "--ranks", "2", "--device", "RTX 4090"]) == 0
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    assert max(len(line) for line in lines if not line.startswith("As a command")) <= 80
    plan = plan_mesh("FLUX.1-dev", ranks=2, device="RTX 4090")
    figures = [f"{row.step.total:.3f}" for row in plan.printed]
    assert [line.split()[2] for line in lines if re.match(r" *[0-9.]+ s ", line)] == figures


def test_quantized_weights_and_placements_are_those_of_the_options(capsys):
    assert run(["plan", "--ranks", "1", "--device", "RTX 4090", "--quantize", "int8"]) == 0
    expected = plan_mesh("FLUX.1-dev", ranks=1, device="RTX 4090", quantize="int8")
    out = capsys.readouterr().out
    assert expected.markdown() in out
    assert "--quantize int8" in out
    assert run(["plan", "--text-encoders", "fsdp"]) == 0
    assert plan_mesh("FLUX.1-dev", ranks=8, text_encoders="fsdp").markdown() in capsys.readouterr().out
    assert run(["plan", "--ranks", "2", "--vae-placement", "first"]) == 0
    out = capsys.readouterr().out
    assert plan_mesh("FLUX.1-dev", ranks=2, vae_placement="first").markdown() in out
    assert "--vae-placement first" in out
    assert run(["plan", "--quantize", "int3"]) == 2
    assert "--quantize is 'int3'" in capsys.readouterr().err


def test_a_chart_of_an_unknown_format_is_refused_before_planning(capsys, tmp_path):
    assert run(["plan", "--out", str(tmp_path / "plan.nonsense")]) == 2
    assert ".nonsense" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_ring_of_no_rank_names_the_option(capsys):
    assert run(["doctor", "--cpu", "--ring", "0"]) == 2
    assert "--ring is 0" in capsys.readouterr().err


def test_a_plan_over_hosts_is_run_by_torchrun(capsys):
    assert run(["plan", "--ranks", "16", "--compiled"]) == 0
    assert "torchrun --nnodes=2 --nproc_per_node=8" in capsys.readouterr().out


def test_what_is_not_known_is_a_sentence(capsys):
    assert run(["plan", "--list"]) == 0
    assert "FLUX.1-dev" in capsys.readouterr().out.splitlines()
    assert run(["plan", "--model", "FLUX.7"]) == 1
    assert "FLUX.7" in capsys.readouterr().err
    assert run(["plan", "--device", "abacus"]) == 2
    assert "--device is 'abacus'" in capsys.readouterr().err
    assert run(["plan", "--size", "large"]) == 2
    assert "large" in capsys.readouterr().err


def test_the_doctor_s_figures_are_taken_by_the_plan(capsys, tmp_path):
    figures = tmp_path / "doctor.json"
    assert run(["doctor", "--cpu", "--out", str(figures)]) == 0
    assert "torch" in capsys.readouterr().out
    assert json.loads(figures.read_text())
    assert run(["plan", "--ranks", "1", "--measured", str(figures)]) == 0
