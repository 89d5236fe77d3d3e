"""Keep the weights of text encoders in host memory. Optionally only the first rank runs them.

``features.py`` finds :data:`FEATURE`. What text encoders have in common with autoencoders is in
``offloaded_modules.py``. Tests: tests/weights/test_placement.py.
"""

from __future__ import annotations

from para_core.adapters.inspect.components import text_encoders_of
from para_core.adapters.weights.feature import ChangeRequest, Feature
from para_core.adapters.weights.offloaded_modules import OffloadedModules
from para_core.adapters.weights.one_way import check_holds_all
from para_core.instance.private_class import original_class


class OffloadedTextEncoders(OffloadedModules):
    """Text encoders in host memory, from which each layer is copied to the device while it runs."""

    name = "placing the text encoders"


def changes_for_text_encoders(request: ChangeRequest) -> list[OffloadedTextEncoders]:
    """Return the change that the option ``text_encoders`` asks for; none if it keeps them on the device.

    Raise ``ValueError`` if the pipeline has no text encoder, and ``RuntimeError`` if their weights are
    sharded already, and the option asks for all of them.
    """
    placement = request.options.get("text_encoders")
    if placement is None:
        return []
    encoders = text_encoders_of(request.owner)
    if not encoders:
        name = original_class(request.owner).__name__
        raise ValueError(f"text_encoders={placement!r}: this {name} has no text encoder. Leave it out.")
    if placement == "fsdp":
        return []
    check_holds_all(request.owner, encoders.values(), f"text_encoders={placement!r}")
    if placement == "replicate":
        return []
    first_rank_only = placement == "first"
    return [OffloadedTextEncoders(encoders, request.mesh, "text_encoders", first_rank_only=first_rank_only)]


FEATURE = Feature(option="text_encoders", changes=changes_for_text_encoders)
