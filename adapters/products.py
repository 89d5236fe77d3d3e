"""``products="triton"`` of parallelize_pipe: matrix products whose bits do not depend on the number of rows.

``adapters/weights/features.py`` finds :data:`FEATURE`. The mode is in ``para_core/products.py``. Only
transformers have it, not autoencoders and text encoders. Weights that are quantized afterwards are not seen
here: the mode refuses their products. Tests: tests/test_products.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from para_core.adapters.weights.feature import ChangeRequest, Feature, FeatureChange
from para_core.instance.record import empty_slot, fill_slot
from para_core.instance.slots import Slot
from para_core.products import TritonProducts
from para_core.weights.parameters import is_plain_weight


class ProductsChange(FeatureChange):
    """``products="triton"`` on the transformers of one pipeline."""

    name = 'products="triton"'

    def __init__(self, transformers: list[nn.Module]) -> None:
        # The mode raises ImportError.
        self._transformers, self._mode = transformers, TritonProducts()

    def apply(self) -> None:
        """Fill the slots of the transformers."""
        for module in self._transformers:
            fill_slot(module, Slot.PRODUCTS, {"__call__": self._run})

    def undo(self) -> None:
        """Empty the slots of the transformers."""
        for module in self._transformers:
            empty_slot(module, Slot.PRODUCTS)

    def _run(self, call: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call of a transformer, whose products Triton computes."""
        with self._mode:
            return call(module, *args, **kwargs)


def products(request: ChangeRequest) -> list[ProductsChange]:
    """Return the change by the option ``products``; none without it.

    Raises:
        ValueError: Weights are quantized, or shared by tensor parallelism. Both have products of their own.
        ImportError: Triton is not installed, or there is no C compiler for it.
    """
    if request.options.get("products") is None:
        return []
    if request.mesh.tensor.size > 1 or request.options.get("weights") == "tensor":
        raise ValueError(
            'products="triton" with weights="tensor", or with a mesh that has ranks along \'tensor\': ranks have parts '
            'of each weight, and torch multiplies them. Leave products out, or take weights="fsdp" and a mesh '
            "without 'tensor'."
        )
    for name, module in request.transformers_by_path.items():
        for weight_name, weight in module.named_parameters():
            # FSDP2 gathers its weights before they are used: a whole weight is of the class of its shards.
            used = weight.to_local() if isinstance(weight, DTensor) else weight
            if not is_plain_weight(used):
                raise ValueError(
                    f'products="triton" with a quantized weight: {name}.{weight_name} is a '
                    f"{type(used).__name__}, which has a product of its own. Leave products out, or load plain "
                    "weights."
                )
    return [ProductsChange([*request.transformers.values()])]


FEATURE = Feature(option="products", changes=products, transformer_slots=(Slot.PRODUCTS,))
