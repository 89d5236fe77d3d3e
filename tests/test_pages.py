"""Tables of pages equal the JSON that a program of benchmarks/ wrote, and tables of refusals those of the code."""

import pytest

from benchmarks import pages
from benchmarks.harness import read_results
from benchmarks.pipelines.supported import pipelines_of, row, transformer_classes
from para_core.adapters.models import ADAPTERS
from para_core.adapters.models.unsupported import REFUSED
from tests.lift_out import ROOT
from zoo.tiny.transformers.registry import MODELS


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("page", pages.PAGES)
def test_tables_equal_the_results(page):
    assert pages.render(page) == (ROOT / page).read_text(), "run python -m benchmarks.pages"


def test_every_check_has_a_row_with_its_phases_and_error():
    rows = pages.refused_rows()
    checks = [check for phase in pages.PHASES.values() for check in pages.checks_of(phase)]
    assert len(rows) == len(set(checks)) > 30
    assert sum(len(phases.split(", ")) for _, phases, _, _ in rows) == len(checks)
    for title, _, error, advice in rows:
        assert error in ("`TypeError`", "`ValueError`", "`RuntimeError`")
        assert advice and "{" not in advice, f"the error about {title} has no sentence that says what to do"


def test_combinations_were_refused_each_time_they_were_tried():
    tried = read_results("together")["excluded"]
    assert len(tried) > 15
    assert all(row["refused"] == row["tried"] > 0 for row in tried)


def test_every_transformer_of_diffusers_has_adapter_or_reason():
    supported, classes = {adapter.transformer for adapter in ADAPTERS}, set(transformer_classes())
    assert REFUSED.keys() <= classes <= supported | REFUSED.keys()
    assert not supported & REFUSED.keys()
    assert supported == {model.cls for model in MODELS.values()}
    uncached = {adapter.transformer for adapter in ADAPTERS if adapter.blocks is None}
    # Their blocks keep keys for later calls, which a skipped block would not write.
    assert uncached == {"AnyFlowFARTransformer3DModel", "WanAnimate2Transformer3DModel"}
    assert all(row(name)[5] == "no" for name in uncached)
    assert "Flux" in pipelines_of("FluxTransformer2DModel")
    with pytest.raises(ValueError, match=r"NewTransformer.* adapters/models "):
        row("NewTransformer")
