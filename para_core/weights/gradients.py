"""Turn gradients off while the weights of a model are distributed, and restore them afterwards."""

from __future__ import annotations

from torch import nn

from para_core.torch_internals import parameter_slots


class Gradients:
    """A switch that turns gradients off for the parameters of a model, and on again.

    It identifies a parameter by module and name, because FSDP2, tensor parallelism and stages replace the object. A
    parameter that the user replaced by one of another class (a quantized weight) keeps its own ``requires_grad``.
    """

    def __init__(self) -> None:
        self._enabled: dict[tuple[int, str], tuple[nn.Module, str, type]] = {}

    def stop(self, module: nn.Module) -> None:
        """Turn gradients off for all parameters of ``module``. Call it again after parameters were added."""
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._enabled[id(owner), name] = (owner, name, type(parameter))
        module.requires_grad_(False)

    def restore(self) -> None:
        """Turn gradients on again for the parameters for which :meth:`stop` turned them off."""
        for owner, name, kind in self._enabled.values():
            parameter: nn.Parameter | None = parameter_slots(owner).get(name)
            if parameter is not None and type(parameter) is kind:
                parameter.requires_grad_(True)
        self.forget()

    def forget(self) -> None:
        """Forget the parameters that :meth:`stop` has turned off, so that :meth:`restore` leaves them off.

        Call it after peft adds an adapter: peft freezes all other parameters, but on a distributed model, where none
        takes gradients, that leaves no trace.
        """
        self._enabled.clear()
