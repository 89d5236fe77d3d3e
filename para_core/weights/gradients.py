"""Turn off ``requires_grad`` of a model's parameters while its weights are distributed, and turn it on again
afterwards.
"""

from __future__ import annotations

from torch import nn

from para_core.torch_internals import parameter_slots


class Gradients:
    """A record of the parameters of a model whose ``requires_grad`` was turned off, to turn it on again.

    A parameter is identified by module and name, because FSDP2, tensor parallelism and pipeline stages replace the
    parameter object. If the user replaced a parameter by a parameter of another class, such as a quantized weight, its
    ``requires_grad`` does not change.
    """

    def __init__(self) -> None:
        self._enabled: dict[tuple[int, str], tuple[nn.Module, str, type]] = {}

    def stop(self, module: nn.Module) -> None:
        """Turn gradients off for all parameters of ``module``, and record those that had them on. Call this method
        again after parameters were added.
        """
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
        """Drop the record, so that :meth:`restore` leaves gradients off.

        Call this method after peft adds an adapter and freezes all other parameters. The record does not show that peft
        froze them, so :meth:`restore` would turn their gradients on again.
        """
        self._enabled.clear()
