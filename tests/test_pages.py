"""Tables of pages equal the JSON that a program of benchmarks/ wrote, and every model has a row."""

import pytest

from benchmarks import pages
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
