"""The table of docs/pipelines.md covers all transformers of the installed diffusers."""

import pytest

from benchmarks.pipelines.supported import pipelines_of, row, transformer_classes
from para_core.adapters.models import ADAPTERS
from para_core.adapters.models.unsupported import REFUSED
from zoo.tiny.transformers.registry import MODELS


def test_every_transformer_has_adapter_or_reason():
    supported, classes = {adapter.transformer for adapter in ADAPTERS}, set(transformer_classes())
    assert classes <= supported | REFUSED.keys()
    assert not supported & REFUSED.keys()
    assert REFUSED.keys() <= classes


def test_undescribed_class_names_the_folder():
    with pytest.raises(ValueError, match=r"NewTransformer.* adapters/models "):
        row("NewTransformer")


def test_pipelines_are_found_by_their_arguments():
    assert "Flux" in pipelines_of("FluxTransformer2DModel")
    assert pipelines_of("WanTransformer3DModel")[0].startswith(("Lucy", "Wan"))


def test_cached_classes_of_the_table_were_tried():
    assert {adapter.transformer for adapter in ADAPTERS} == {model.cls for model in MODELS.values()}
    uncached = {adapter.transformer for adapter in ADAPTERS if adapter.blocks is None}
    # Their blocks keep keys for later calls, which a skipped block would not write.
    assert uncached == {"AnyFlowFARTransformer3DModel", "WanAnimate2Transformer3DModel"}
    assert all(row(name)[5] == "no" for name in uncached)
