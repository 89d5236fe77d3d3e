"""The answer of ``para_core plan`` for a model whose operations cannot be counted: whether its weights fit a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from para_core.planner.weights import ModuleBytes

# Numbers of ranks over which the advice shards weights.
_RANKS = (2, 4, 8)


@dataclass(frozen=True)
class ComponentBytes:
    """The bytes of one component of a pipeline.

    Args:
        whole (`ModuleBytes`): Its bytes in 16 bits.
        in_8_bits (`ModuleBytes`, *optional*): Its bytes if ``--quantize`` is given. None if that leaves it as it is.
        can_be_sharded (`bool`): Whether ``--weights fsdp`` shards it.
    """

    whole: ModuleBytes
    in_8_bits: ModuleBytes | None = None
    can_be_sharded: bool = False


@dataclass(frozen=True)
class WeightOptions:
    """The options of a plan that change the bytes of weights on a rank."""

    ranks: int = 1
    weights: str | None = None
    offload: str | None = None
    quantize: str | None = None

    def __str__(self) -> str:
        """Return the options that change the bytes, as on the command line, without ``--ranks``."""
        changes = {
            "weights": "fsdp" if self.shards else None,
            "offload": "model" if self.takes_turns else None,
            "quantize": self.quantize,
        }
        return " ".join(f"--{name} {value}" for name, value in changes.items() if value is not None)

    @property
    def used(self) -> list[str]:
        """Names of the options whose values the bytes depend on."""
        names = ["ranks", "quantize"]
        if self.shards or self.weights == "replicate":
            names.append("weights")
        if self.takes_turns:
            names.append("offload")
        return names

    @property
    def shards(self) -> bool:
        """Whether FSDP2 shards weights over the ranks."""
        return self.weights == "fsdp" and self.ranks > 1

    @property
    def takes_turns(self) -> bool:
        """Whether each component is on the device only while it runs."""
        return self.offload == "model"


@dataclass(frozen=True)
class WeightsOnly:
    """A model whose operations cannot be counted: its name, the bytes of its components, and the reason."""

    name: str
    components: Mapping[str, ComponentBytes]
    reason: str

    def held(self, options: WeightOptions) -> float:
        """Return the most bytes of weights that a rank holds at one time."""
        sizes = self._sizes(options)
        if options.takes_turns:
            return max((size.total for size in sizes.values()), default=0)
        if not options.shards:
            return sum(size.total for size in sizes.values())
        sharded = {name for name, component in self.components.items() if component.can_be_sharded}
        at_rest = sum(size.at_rest(options.ranks) if name in sharded else size.total for name, size in sizes.items())
        return at_rest + max((sizes[name].at_once for name in sharded), default=0)

    def answer(self, card: str, room: float, options: WeightOptions, unused: Sequence[str] = ()) -> str:
        """Return whether the weights fit into ``room`` bytes of each ``card``, and if not, what makes them fit.

        ``unused`` are the names of options whose values the user chose, and that the answer does not depend on.
        """
        held = self.held(options)
        fits = "fit" if held <= room else "do not fit"
        chosen = f" with {options}" if str(options) else ""
        parts = ", ".join(f"{name} {size.total / 1e9:.3g}" for name, size in self._sizes(options).items())
        sizes = f"{held / 1e9:.3g} GB of {room / 1e9:.3g} that a rank may hold ({parts})"
        lines = [f"{self.name}: its weights {fits} {options.ranks} × {card}{chosen}: {sizes}."]
        if held > room:
            lines.append(self._advice(room, options))
        lines.append(f"Activations and seconds are not predicted: {self.reason}")
        if unused:
            names = ", ".join(f"--{name}" for name in unused)
            lines.append(f"Not used, because only bytes of weights are compared: {names}.")
        return "\n\n".join(lines)

    def _sizes(self, options: WeightOptions) -> dict[str, ModuleBytes]:
        """Return the bytes of each component, in 8 bits if it is quantized."""
        sizes = {name: component.whole for name, component in self.components.items()}
        if options.quantize is None:
            return sizes
        quantized = {name: component.in_8_bits for name, component in self.components.items()}
        return {name: quantized[name] or size for name, size in sizes.items()}

    def _advice(self, room: float, options: WeightOptions) -> str:
        """Return a sentence that names the options with which the weights fit ``room``, added to those given."""
        ways: dict[str, WeightOptions] = {}
        replicates = options.weights in (None, "replicate")
        if options.offload is None and replicates:
            ways["--offload model"] = replace(options, offload="model")
        can_quantize = any(component.in_8_bits is not None for component in self.components.values())
        if options.quantize is None and can_quantize:
            ways["--quantize int8"] = replace(options, quantize="int8")
        if options.offload is None and options.quantize in (None, "int8"):
            for ranks in _RANKS:
                if ranks >= options.ranks:
                    ways[f"--weights fsdp --ranks {ranks}"] = replace(options, weights="fsdp", ranks=ranks)
        fitting = [way for way, changed in ways.items() if self.held(changed) <= room]
        # Of the ways with FSDP2, the one with the fewest ranks is enough.
        sharding = [way for way in fitting if "fsdp" in way]
        fitting = [way for way in fitting if way not in sharding[1:]]
        if not fitting:
            return "What makes it fit: a larger card."
        return f"What makes it fit: {'; or '.join(fitting)}."
