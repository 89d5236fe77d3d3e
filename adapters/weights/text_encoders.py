"""Find the text encoders of a pipeline.

Text encoders run once per generation, not once per step. The option ``text_encoders=`` therefore says where their
weights are kept, apart from the options for the transformer's weights.
"""

from __future__ import annotations

from typing import Any, get_args

from torch import nn

from para_core.adapters.components import TextEncoders, components_of
from para_core.instance_patching import original_class, uncompiled

TEXT_ENCODERS: tuple[TextEncoders, ...] = get_args(TextEncoders)


def text_encoders_of(pipe: Any) -> dict[str, nn.Module]:
    """Return the text encoders of ``pipe`` by name, each without the wrapper of ``torch.compile``."""
    parts = {name: uncompiled(part) for name, part in pipe.components.items() if name.startswith("text_encoder")}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def encoders_with_blocks(pipe: Any) -> list[str]:
    """Return the names of the text encoders of ``pipe`` that have blocks, which FSDP2 can shard."""
    return [name for name in components_of(pipe) if name in text_encoders_of(pipe)]


def require_text_encoders(pipe: Any, placement: TextEncoders) -> None:
    """Raise ``ValueError`` if ``pipe`` has no text encoder."""
    if not text_encoders_of(pipe):
        raise ValueError(
            f"text_encoders={placement!r}: this {original_class(pipe).__name__} has no text encoder. Leave it out."
        )
